"""Spaces: what is supported, where channels stand, which actions are legal."""

import numpy as np
import pytest
from gymnasium import spaces

from repertory.environments import EnvironmentConfig, EnvironmentRefused, describe
from repertory.environments.spaces import image_layout, legal_actions
from tests.probes import SPACE_ZOO, Actions, Constant


def image(shape, dtype=np.uint8):
    return spaces.Box(0, 1 if dtype == np.bool_ else 255, shape, dtype)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((84, 84, 4), "hwc"),
        ((4, 84, 84), "chw"),
        ((64, 64, 3), "hwc"),
        ((3, 64, 64), "chw"),
        ((5, 5, 3), "hwc"),
        ((1, 10, 5), "chw"),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.bool_])
def test_b49_channel_order_is_read_from_the_smaller_end(shape, layout, dtype):
    """Source: DLR-RM/stable-baselines3#1162, chandar-lab/RLHive PR#334."""
    config = EnvironmentConfig(lambda: Constant(image(shape, dtype), np.zeros(shape, dtype)))
    assert describe(config).image_layout == layout


@pytest.mark.parametrize("shape", [(3, 64, 3), (10, 10, 10)])
def test_b49_ambiguous_channel_order_asks_for_an_explicit_one(shape):
    """Source: DLR-RM/stable-baselines3#1162."""
    with pytest.raises(EnvironmentRefused, match="--image-layout chw or --image-layout hwc"):
        image_layout("Here", image(shape), "auto")
    assert image_layout("Here", image(shape), "chw") == "chw"
    assert image_layout("Here", image(shape), "hwc") == "hwc"


def test_an_explicit_layout_wins_over_the_shape():
    assert image_layout("Here", image((84, 84, 4)), "chw") == "chw"


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (4,), np.float32),
        spaces.Box(-1, 1, (8, 8, 3), np.float32),
        spaces.Box(0, 255, (84, 84), np.uint8),
        spaces.Box(0, 1, (), np.float32),
    ],
)
def test_other_observations_have_no_layout(space):
    assert image_layout("Here", space, "auto") == "none"


def test_a_layout_for_a_vector_is_refused():
    with pytest.raises(EnvironmentRefused, match=r"shape \(4,\), which cannot be hwc"):
        image_layout("Here", spaces.Box(-1, 1, (4,)), "hwc")


@pytest.mark.parametrize("kind", ["multi-discrete", "multi-binary", "dict", "tuple"])
def test_unsupported_actions_are_refused_and_the_supported_named(kind):
    space = SPACE_ZOO[kind]
    with pytest.raises(EnvironmentRefused) as refusal:
        describe(EnvironmentConfig(lambda: Actions(space)))
    assert f"has actions {space}" in str(refusal.value)
    assert "supported are Box observations of any shape (bool, uint8," in str(refusal.value)
    assert str(refusal.value).endswith(" and Discrete actions")


@pytest.mark.parametrize("kind", ["multi-discrete", "dict", "tuple", "discrete that starts at -1"])
def test_unsupported_observations_are_refused_and_the_supported_named(kind):
    space = SPACE_ZOO[kind]
    with pytest.raises(EnvironmentRefused) as refusal:
        describe(EnvironmentConfig(lambda: Constant(space, space.sample())))
    assert f"has observations {space}" in str(refusal.value)
    assert "supported are Box observations" in str(refusal.value)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_dtypes_that_pytorch_cannot_calculate_with_are_refused(dtype):
    space = spaces.Box(0, 60_000, (2,), dtype)
    with pytest.raises(EnvironmentRefused, match=f"has observations of dtype {space.dtype}; supp"):
        describe(EnvironmentConfig(lambda: Constant(space, space.sample())))


def test_a_specification_shows_the_spaces_as_the_environment_has_them():
    spec = describe(EnvironmentConfig(lambda: Actions(spaces.Discrete(3, start=-1))))
    assert spec.action_space == spaces.Discrete(3, start=-1)
    assert spec.observation_space == spaces.Box(-100, 100, (1,), np.float32)
    assert (spec.action_repeat, spec.frame_stack, spec.protocol) == (1, 1, "default")
    assert spec.name == (
        "tests.environments.test_spaces:"
        "test_a_specification_shows_the_spaces_as_the_environment_has_them.<locals>.<lambda>"
    )


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_legal_actions_are_passed_on_as_int64(dtype):
    legal = legal_actions(np.array([0, 2, 1], dtype), 3, 3)
    assert legal.dtype == np.int64
    np.testing.assert_array_equal(legal, [0, 2, 1])


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.array([0, 3]), "action 3 of column 1 is not one of 0..2"),
        (np.array([-1, 0]), "action -1 of column 0 is not one of 0..2"),
        (np.array([0]), r"expected actions of shape \(2,\), got \(1,\)"),
        (np.array([[0], [1]]), r"expected actions of shape \(2,\), got \(2, 1\)"),
        (np.array([0.0, 1.0]), "expected integer actions, got float64"),
        (np.array([True, False]), "expected integer actions, got bool"),
    ],
)
def test_illegal_actions_are_refused_before_any_environment_sees_them(actions, message):
    with pytest.raises(ValueError, match=message):
        legal_actions(actions, 2, 3)
