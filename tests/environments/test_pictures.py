"""The small picture of `a3c42`: pixels and moments against loops, and against OpenCV."""

import math

import numpy as np
import pytest

from repertory.environments.pictures import SHAPE, SIDE, RunningMoments, SmallPictures

DECAY = 0.9999


def bilinear(image, height, width):
    """The oracle: pixel by pixel in float64, a pixel's place being that of its centre."""
    lines, columns = image.shape
    resized = np.zeros((height, width))
    for y in range(height):
        for x in range(width):
            row = (y + 0.5) * lines / height - 0.5
            column = (x + 0.5) * columns / width - 0.5
            top, left = math.floor(row), math.floor(column)
            for line, above in ((top, 1 - (row - top)), (top + 1, row - top)):
                for place, before in ((left, 1 - (column - left)), (left + 1, column - left)):
                    line_inside = min(max(line, 0), lines - 1)
                    place_inside = min(max(place, 0), columns - 1)
                    resized[y, x] += above * before * image[line_inside, place_inside]
    return resized


def halved(screen):
    """Mean of two by two pixels, a half rounded up: what the emulator makes of a screen."""
    height, width = screen.shape
    half = np.zeros((height // 2, width // 2), np.uint8)
    for y in range(height // 2):
        for x in range(width // 2):
            four = screen[2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
            half[y, x] = (int(four.sum()) + 2) // 4
    return half


def random_screens(num_columns, height=210, width=160):
    return np.random.default_rng(0).integers(0, 256, (num_columns, height, width), np.uint8)


def shrunk(screen):
    half = halved(screen)
    return SmallPictures(1, *half.shape).shrink(half[None, None])[0, 0]


def test_a_picture_is_the_court_resized_twice():
    screen = random_screens(1)[0]
    once = bilinear(screen[34:194].astype(np.float64), 80, 80)
    np.testing.assert_allclose(halved(screen)[17:97], once, rtol=0, atol=0.5)
    # Rounded in between, as pictures of bytes are.
    twice = bilinear(np.floor(once + 0.5), SIDE, SIDE) / 255
    np.testing.assert_allclose(shrunk(screen), twice, rtol=0, atol=1e-6)


def test_a_picture_is_that_of_opencv():
    """The program resizes bytes with it twice; its second rounding is what is left out here."""
    cv2 = pytest.importorskip("cv2")
    court = random_screens(1)[0][34:194, :160]
    bytes_twice = cv2.resize(cv2.resize(court, (80, 80)), (SIDE, SIDE))
    floats = cv2.resize(cv2.resize(court, (80, 80)).astype(np.float32), (SIDE, SIDE))
    picture = shrunk(random_screens(1)[0])
    np.testing.assert_allclose(picture, floats / 255, rtol=0, atol=1e-6)
    np.testing.assert_allclose(picture, bytes_twice / 255.0, rtol=0, atol=1 / 255)


@pytest.mark.parametrize(
    ("height", "top", "bottom"), [(210, 17, 97), (250, 20, 115), (214, 17, 99), (230, 19, 106)]
)
def test_screens_of_any_height_lose_the_same_share(height, top, bottom):
    screen = random_screens(1, height)[0]
    expected = bilinear(halved(screen)[top:bottom].astype(np.float64), SIDE, SIDE) / 255
    np.testing.assert_allclose(shrunk(screen), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("grey", [0, 1, 87, 255])
def test_an_even_screen_gives_an_even_picture(grey):
    picture = shrunk(np.full((210, 160), grey, np.uint8))
    np.testing.assert_allclose(picture, np.full((SIDE, SIDE), grey / 255), rtol=1e-6)


def test_nothing_outside_the_court_is_seen():
    screens = random_screens(2)
    screens[1, 34:194] = screens[0, 34:194]
    np.testing.assert_array_equal(shrunk(screens[0]), shrunk(screens[1]))


def hand_written(sequence):
    """One column's observations of a sequence of pictures, in Python's numbers."""
    mean = deviation = 0.0
    observations = []
    for count, picture in enumerate(sequence.astype(np.float64), start=1):
        mean = mean * DECAY + picture.mean() * (1 - DECAY)
        deviation = deviation * DECAY + picture.std() * (1 - DECAY)
        unbiased_mean = mean / (1 - DECAY**count)
        unbiased_deviation = deviation / (1 - DECAY**count)
        observations.append((picture - unbiased_mean) / (unbiased_deviation + 1e-8))
    return np.stack(observations)


def random_pictures(num_rows, num_columns):
    """Pictures whose mean and deviation differ from column to column and from row to row."""
    generator = np.random.default_rng(1)
    contrast = generator.random((num_rows, num_columns, 1, 1, 1))
    brightness = generator.random((num_rows, num_columns, 1, 1, 1))
    noise = generator.random((num_rows, num_columns, *SHAPE))
    return (brightness + contrast * noise).astype(np.float32)


def test_moments_are_those_of_a_loop_and_each_column_has_its_own():
    sequence = random_pictures(60, 3)
    moments = RunningMoments(3)
    observations = np.stack([moments.normalize(pictures) for pictures in sequence])
    assert observations.dtype == np.float32
    for column in range(3):
        expected = hand_written(sequence[:, column])
        np.testing.assert_allclose(observations[:, column], expected, rtol=1e-4, atol=1e-4)


def test_moments_begin_afresh_only_when_told_to():
    sequence = random_pictures(20, 2)
    moments = RunningMoments(2)
    first = [moments.normalize(pictures) for pictures in sequence]
    longer = [moments.normalize(pictures) for pictures in sequence]
    assert not np.allclose(longer[0], first[0])
    moments.restart()
    again = [moments.normalize(pictures) for pictures in sequence]
    np.testing.assert_array_equal(again, first)


def test_the_first_observation_has_mean_0_and_deviation_1():
    first = RunningMoments(4).normalize(random_pictures(1, 4)[0])
    np.testing.assert_allclose(first.mean((1, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(first.std((1, 2, 3)), 1, rtol=1e-5)


def test_a_black_screen_is_nothing_to_divide_by():
    pictures = SmallPictures(1, 105, 80)
    black = np.zeros((1, 1, 105, 80), np.uint8)
    assert not pictures.observe(black).any()
    assert not pictures.observe(black).any()
    assert np.isfinite(pictures.observe(black + np.uint8(236))).all()


def test_a_column_has_the_same_bits_beside_others_as_alone():
    screens = random_screens(5, 105, 80)[:, None]
    together, alone = SmallPictures(5, 105, 80), SmallPictures(1, 105, 80)
    for shift in range(4):
        shifted = np.roll(screens, shift, axis=3)
        np.testing.assert_array_equal(
            together.observe(shifted)[3], alone.observe(shifted[3:4])[0], strict=True
        )


def test_observations_are_memory_of_their_own():
    pictures = SmallPictures(2, 105, 80)
    screens = random_screens(2, 105, 80)[:, None]
    first = pictures.observe(screens)
    kept = first.copy()
    pictures.observe(screens[::-1].copy())
    np.testing.assert_array_equal(first, kept)
    assert first.shape == (2, *SHAPE)
    assert first.flags.c_contiguous
