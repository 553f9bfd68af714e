"""Networks: published shapes, image handling, and recurrent state across episodes."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repertory.config import RunConfig
from repertory.environments.base import EnvironmentSpec
from repertory.models import create_on_cpu
from repertory.models.base import Model
from repertory.models.cores import RecurrentCore
from repertory.models.networks import (
    ActorCritic,
    ConvolutionTorso,
    ImageConvolution,
    IMPALATorso,
    MLPTorso,
    RememberingActorCritic,
    build_model,
)
from repertory.models.policies import CategoricalHead

ATARI = ((4, 84, 84), np.uint8, "chw")
SMALL = ((1, 42, 42), np.float32, "chw")
DMLAB = ((72, 96, 3), np.uint8, "hwc")
MINATAR = ((10, 10, 6), np.bool_, "hwc")
VECTOR = ((4,), np.float32, "none")

Observation = tuple[tuple[int, ...], Any, str]


def spec_of(observation: Observation, num_actions: int = 6) -> EnvironmentSpec:
    shape, dtype, layout = observation
    return EnvironmentSpec(
        name="test",
        protocol="default",
        observation_space=gymnasium.spaces.Box(0, 255 if dtype == np.uint8 else 1, shape, dtype),
        action_space=gymnasium.spaces.Discrete(num_actions),
        image_layout=layout,
    )


def build(observation: Observation, **settings: Any) -> ActorCritic:
    torch.manual_seed(0)
    return build_model(spec_of(observation), **({"network": "auto"} | settings))


def observations_of(observation: Observation, *rows: int) -> Tensor:
    shape, dtype, _ = observation
    generator = torch.Generator().manual_seed(1)
    numbers = torch.rand(*rows, *shape, generator=generator)
    if dtype == np.uint8:
        return (numbers * 256).to(torch.uint8)
    return numbers > 0.7 if dtype == np.bool_ else numbers.to(torch.float32)


def run(model: Model, observations: Tensor, resets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Log-probabilities of every action, [T, B, n], and values, [T, B]."""
    rows = observations.shape[:2]
    if resets is None:
        resets = torch.zeros(rows, dtype=torch.bool)
    output = model(observations, model.initial_core_state(rows[1]), resets)
    actions = range(model.policy.out_features)
    log_probs = [output.policy.log_prob(torch.full(rows, action)) for action in actions]
    return torch.stack(log_probs, -1), output.values


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], atol: float = 1e-6) -> None:
    for first, second in zip(actual, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=atol)


# ---------------------------------------------------------------------------------------------
# Torsos
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
@pytest.mark.parametrize(
    ("observation", "network"),
    [
        (VECTOR, "mlp"),
        (ATARI, "a3c"),
        (ATARI, "nature"),
        (SMALL, "a3c42"),
        (DMLAB, "a3c42"),
        (MINATAR, "a3c42"),
        (MINATAR, "minatar"),
        (DMLAB, "impala"),
        (MINATAR, "impala"),
        (MINATAR, "mlp"),
    ],
)
def test_every_network_acts_and_learns(
    observation: Observation, network: str, core: str, precision: str
) -> None:
    model: Model = build(observation, network=network, core=core, precision=precision, core_size=16)
    state = model.initial_core_state(2)
    resets = torch.tensor([[False, False], [False, True], [False, False]])
    output = model(observations_of(observation, 3, 2), state, resets)
    actions = output.policy.sample(torch.Generator().manual_seed(0))
    assert actions.shape == output.values.shape == (3, 2)
    assert output.values.dtype == output.policy.entropy().dtype == torch.float32
    assert [s.dtype for s in output.core_state] == [torch.float32] * len(state)
    assert [s.shape for s in output.core_state] == [s.shape for s in state]
    (output.policy.log_prob(actions) + output.values).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize(
    ("observation", "network", "torso_size"),
    [
        (VECTOR, "mlp", 4 * 64 + 64 + 64 * 64 + 64),
        (ATARI, "a3c", 256 * 16 + 16 + 256 * 32 + 32 + 2592 * 256 + 256),
        (ATARI, "nature", 256 * 32 + 32 + 512 * 64 + 64 + 576 * 64 + 64 + 3136 * 512 + 512),
        (SMALL, "a3c42", (9 * 32 + 32) + 3 * (288 * 32 + 32)),
        (MINATAR, "minatar", 54 * 16 + 16 + 1024 * 128 + 128),
        (
            DMLAB,
            "impala",
            (27 * 16 + 16)
            + 4 * (144 * 16 + 16)
            + (144 * 32 + 32)
            + 9 * (288 * 32 + 32)
            + (9 * 12 * 32 * 256 + 256),
        ),
    ],
)
def test_torsos_have_the_published_sizes(
    observation: Observation, network: str, torso_size: int
) -> None:
    model = build(observation, network=network)
    assert sum(p.numel() for p in model.torso.parameters()) == torso_size


def test_deep_network_has_fifteen_convolutions() -> None:
    convolutions = [m for m in build(DMLAB, network="impala").modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 15
    assert all(convolution.kernel_size == (3, 3) for convolution in convolutions)


def test_a3c_torso_is_its_formula() -> None:
    torso = build(ATARI, network="a3c").torso
    first, _, second, _ = torso.convolutions
    images = observations_of(ATARI, 5)
    x = F.relu(F.conv2d(images.double() / 255, first.weight.double(), first.bias.double(), 4))
    x = F.relu(F.conv2d(x, second.weight.double(), second.bias.double(), 2))
    # The dense layer reads pixel by pixel, channels innermost.
    dense = torso.dense.weight.double().unflatten(1, (9, 9, 32)).permute(0, 3, 1, 2).flatten(1)
    expected = F.relu(x.flatten(1) @ dense.T + torso.dense.bias.double())
    torch.testing.assert_close(torso(images).double(), expected, rtol=1e-4, atol=1e-5)


def test_a3c42_torso_is_its_formula() -> None:
    torso = build(SMALL, network="a3c42").torso
    x = (observations_of(SMALL, 5) * 20 - 1).double()
    features = torso(x.float())
    for layer in torso.convolutions[::2]:
        x = F.elu(F.conv2d(x, layer.weight.double(), layer.bias.double(), stride=2, padding=1))
    assert x.shape == (5, 32, 3, 3)
    assert features.shape == (5, torso.output_size) == (5, 288)
    # The features come pixel by pixel, channels innermost.
    expected = x.permute(0, 2, 3, 1).flatten(1)
    torch.testing.assert_close(features.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "output_size"),
    [((1, 42, 42), 288), ((4, 84, 84), 32 * 36), ((3, 210, 160), 32 * 14 * 10), ((2, 1, 5), 32)],
)
def test_a3c42_torso_takes_images_of_any_size(
    shape: tuple[int, int, int], output_size: int
) -> None:
    torso = build((shape, np.uint8, "chw"), network="a3c42").torso
    assert torso.output_size == output_size
    assert torso(observations_of((shape, np.uint8, "chw"), 2)).shape == (2, output_size)


def test_a3c42_model_has_the_published_number_of_parameters() -> None:
    """Torso, an LSTM with two biases a gate, and heads for the six actions of Pong."""
    model = build(SMALL, network="a3c42", core="lstm", core_size=256)
    torso = (9 * 32 + 32) + 3 * (288 * 32 + 32)
    lstm = 4 * 256 * (288 + 256 + 2)
    heads = 256 * 6 + 6 + 256 + 1
    assert sum(p.numel() for p in model.parameters()) == torso + lstm + heads == 588_967


def test_a3c42_acts_in_inference_mode_as_it_learns() -> None:
    model = build(SMALL, network="a3c42", core="lstm")
    observations = observations_of(SMALL, 3, 2)
    learned = run(model, observations)
    with torch.inference_mode():
        acted = run(model, observations)
    # Not the same bits on every processor: a gradient asks for another kernel.
    for one, other in zip(acted, learned, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_impala_torso_is_its_formula() -> None:
    torso = build(DMLAB, network="impala").torso
    images = observations_of(DMLAB, 2)

    def convolve(x: Tensor, layer: nn.Conv2d) -> Tensor:
        return F.conv2d(x, layer.weight.double(), layer.bias.double(), padding=1)

    x = images.permute(0, 3, 1, 2).double() / 255
    layers = list(torso.sections)
    for section in range(3):
        convolution, _, *blocks = layers[4 * section : 4 * section + 4]
        x = F.max_pool2d(convolve(x, convolution), 3, 2, padding=1)
        for block in blocks:
            x = x + convolve(F.relu(convolve(F.relu(x), block.first)), block.second)
    flat = F.relu(x).permute(0, 2, 3, 1).flatten(1)
    expected = F.relu(F.linear(flat, torso.dense.weight.double(), torso.dense.bias.double()))
    torch.testing.assert_close(torso(images).double(), expected, rtol=1e-4, atol=1e-5)


def test_mlp_torso_is_its_formula() -> None:
    torso = build(VECTOR).torso
    x = observations_of(VECTOR, 7)
    for layer in (torso.layers[0], torso.layers[2]):
        x = torch.tanh(x @ layer.weight.T + layer.bias)
    torch.testing.assert_close(torso(observations_of(VECTOR, 7)), x)


def test_policy_and_critic_of_an_mlp_learn_apart() -> None:
    model = build(VECTOR)
    log_probs, values = run(model, observations_of(VECTOR, 2, 3))
    ours = set(dict(model.value_torso.named_parameters(prefix="value_torso")))
    ours |= {"value.weight", "value.bias"}
    for loss, expected in ((values.sum(), True), (log_probs[..., 0].sum(), False)):
        model.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == ((name in ours) == expected), name


def test_a_critic_without_the_cores_memory_is_refused() -> None:
    torso = build(VECTOR).torso
    core, head = RecurrentCore("lstm", torso.output_size, 8), CategoricalHead(2)
    with pytest.raises(ValueError, match="share the torso"):
        ActorCritic((4,), torso, core, head, value_torso=build(VECTOR).torso)


@pytest.mark.parametrize("network", ["a3c", "a3c42", "nature", "impala", "minatar", "mlp"])
def test_bytes_are_scaled_exactly_once(network: str) -> None:
    shape, _, layout = ATARI
    of_bytes = build(ATARI, network=network)
    of_floats = build((shape, np.float32, layout), network=network)
    of_floats.load_state_dict(of_bytes.state_dict())
    images = observations_of(ATARI, 2, 3)
    assert_close(run(of_bytes, images), run(of_floats, images.float() / 255), 1e-5)


@pytest.mark.parametrize("network", ["a3c", "a3c42", "nature", "impala", "minatar"])
def test_image_layouts_differ_in_nothing_but_the_axes(network: str) -> None:
    chw = build(((3, 48, 40), np.uint8, "chw"), network=network)
    hwc = build(((48, 40, 3), np.uint8, "hwc"), network=network)
    hwc.load_state_dict(chw.state_dict())
    images = observations_of(((3, 48, 40), np.uint8, "chw"), 2, 3)
    assert_close(run(chw, images), run(hwc, images.movedim(2, -1).contiguous()), 1e-5)


def test_a_channel_count_like_a_width_is_not_guessed_at() -> None:
    """Ten channels last by declaration, though the first axis has ten entries too."""
    model = build(((10, 12, 10), np.uint8, "hwc"), network="minatar")
    assert model.torso.convolutions[0].in_channels == 10
    assert model.torso.dense.in_features == 16 * 8 * 10


def test_bool_images_are_zeros_and_ones() -> None:
    shape, _, layout = MINATAR
    of_bools, of_floats = build(MINATAR), build((shape, np.float32, layout))
    of_floats.load_state_dict(of_bools.state_dict())
    images = observations_of(MINATAR, 2, 3)
    assert_close(run(of_bools, images), run(of_floats, images.float()))


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint8, np.bool_])
def test_vectors_of_any_dtype_are_taken_as_they_are(dtype: Any) -> None:
    model = build(((2, 3), dtype, "none"))
    numbers = torch.tensor([[[[0, 1, 1], [1, 0, 1]]]])
    as_declared = numbers.to(torch.from_numpy(np.zeros(1, dtype)).dtype)
    assert_close(run(model, as_declared), run(model, numbers.float()))


@pytest.mark.parametrize("network", ["a3c", "nature", "minatar"])
def test_convolutional_torsos_start_uniform_by_fan_in(network: str) -> None:
    """Torch7's default, which the papers' networks started from."""
    model = build(ATARI, network=network)
    for layer in model.modules():
        if not isinstance(layer, nn.Conv2d | nn.Linear):
            continue
        bound = 1.0 / math.sqrt(layer.weight[0].numel())
        assert max(layer.weight.abs().max(), layer.bias.abs().max()) <= bound
        if layer.weight.numel() > 1000:
            assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
            assert layer.bias.abs().max() > bound / 2


def test_deep_network_starts_from_a_cut_normal() -> None:
    for layer in build(DMLAB, network="impala").modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            deviation = 1.0 / math.sqrt(layer.weight[0].numel())
            assert layer.weight.abs().max() <= 2 * deviation
            assert not layer.bias.any()
            if layer.weight.numel() > 1000:
                assert layer.weight.std().item() == pytest.approx(0.88 * deviation, rel=0.1)


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
def test_a3c42_starts_as_its_program_did(core: str) -> None:
    model = build(SMALL, network="a3c42", core=core)
    for index, layer in enumerate(model.torso.convolutions[::2]):
        fan_in, fan_out = (9 if index == 0 else 288), 288
        bound = math.sqrt(6 / (fan_in + fan_out))
        assert bound * 0.9 < layer.weight.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert abs(layer.weight.mean()) < bound / 10
        assert not layer.bias.any()
    for head, norm in ((model.policy, 0.01), (model.value, 1.0)):
        lengths = head.weight.norm(dim=1)
        torch.testing.assert_close(lengths, torch.full_like(lengths, norm))
        # Rows point anywhere: as many entries above 0 as below, and no two rows alike.
        assert 0.4 < (head.weight > 0).float().mean() < 0.6
        directions = F.normalize(head.weight)
        assert (directions @ directions.T - torch.eye(len(directions))).abs().max() < 0.3
        assert not head.bias.any()
    if core != "none":
        recurrent = model.core.recurrent
        for kernel in (recurrent.weight_ih_l0, recurrent.weight_hh_l0):
            assert 0.99 / 16 < kernel.abs().max() <= 1 / 16
            assert kernel.std().item() == pytest.approx(1 / 16 / math.sqrt(3), rel=0.02)
        assert not recurrent.bias_ih_l0.any()
        assert not recurrent.bias_hh_l0.any()


def test_a3c42_may_start_orthogonal_and_then_keeps_the_cores_own_biases() -> None:
    model = build(SMALL, network="a3c42", core="lstm", initialization="orthogonal")
    torch.testing.assert_close(
        torch.linalg.svdvals(model.policy.weight), torch.full((6,), 0.01), rtol=1e-4, atol=0
    )
    assert model.core.recurrent.bias_ih_l0.any()


@pytest.mark.parametrize("network", ["a3c", "a3c42", "nature", "impala"])
def test_orthogonal_initialization_keeps_the_scale_of_what_goes_through(network: Any) -> None:
    model = build_model(spec_of(ATARI), network=network, initialization="orthogonal")
    for layer in model.torso.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            kernel = layer.weight.detach().flatten(1)
            smaller = kernel @ kernel.T if kernel.shape[0] <= kernel.shape[1] else kernel.T @ kernel
            torch.testing.assert_close(smaller, 2 * torch.eye(len(smaller)), atol=1e-4, rtol=0)
            assert not layer.bias.any()
    policy = model(torch.zeros(1, 1, 4, 84, 84, dtype=torch.uint8), (), torch.zeros(1, 1).bool())
    assert policy.policy.entropy().item() == pytest.approx(math.log(6), abs=1e-3)


def test_mlp_starts_orthogonal_with_a_nearly_uniform_policy() -> None:
    model = build(VECTOR, hidden_sizes=(32, 16))
    gains = [
        (model.torso.layers[0], math.sqrt(2)),
        (model.torso.layers[2], math.sqrt(2)),
        (model.value_torso.layers[0], math.sqrt(2)),
        (model.policy, 0.01),
        (model.value, 1.0),
    ]
    for layer, gain in gains:
        singular = torch.linalg.svdvals(layer.weight)
        torch.testing.assert_close(singular, torch.full_like(singular, gain))
        assert not layer.bias.any()


@pytest.mark.parametrize("network", ["a3c", "a3c42", "nature", "impala", "minatar"])
def test_kernels_stay_channels_last_through_copies_and_loads(network: str) -> None:
    model = build(ATARI, network=network)
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    other.load_state_dict(model.state_dict())
    for layer in other.modules():
        if isinstance(layer, nn.Conv2d):
            assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    images = observations_of(ATARI, 1, 2)
    assert all(map(torch.equal, run(model, images), run(other, images)))


def test_memory_format_of_an_image_changes_nothing() -> None:
    model = build(ATARI, network="a3c")
    images = observations_of(ATARI, 1, 4)
    interleaved = images[0].contiguous(memory_format=torch.channels_last).unsqueeze(0)
    assert all(map(torch.equal, run(model, images), run(model, interleaved)))


def test_bfloat16_is_close_to_float32() -> None:
    settings: dict[str, Any] = {"network": "nature", "core": "lstm", "core_size": 32}
    exact = build(ATARI, **settings)
    coarse = build(ATARI, precision="bfloat16", **settings)
    images = observations_of(ATARI, 3, 4)
    assert_close(run(coarse, images), run(exact, images), 0.01)
    assert not torch.equal(run(coarse, images)[1], run(exact, images)[1])


@pytest.mark.parametrize(
    ("observation", "torso"),
    [
        (VECTOR, MLPTorso),
        (((9, 9, 2), np.float32, "none"), MLPTorso),
        (((35, 84, 3), np.uint8, "hwc"), ConvolutionTorso),
        (ATARI, ConvolutionTorso),
        (SMALL, ConvolutionTorso),
    ],
)
def test_auto_chooses_by_declared_shape(observation: Observation, torso: type) -> None:
    assert type(build(observation).torso) is torso


@pytest.mark.parametrize(("side", "hidden_size"), [(35, 128), (36, 256)])
def test_auto_takes_small_images_for_minatar(side: int, hidden_size: int) -> None:
    assert build(((3, 84, side), np.uint8, "chw")).torso.output_size == hidden_size


@pytest.mark.parametrize(
    ("observation", "settings", "message"),
    [
        (MINATAR, {"network": "nature"}, r"'nature' cannot take images of shape \[10, 10, 6\]"),
        (((3, 30, 30), np.uint8, "chw"), {"network": "nature"}, "kernel of 3"),
        (VECTOR, {"network": "a3c"}, r"'a3c' needs images.*\[4\]"),
        (VECTOR, {"network": "impala"}, "'impala' needs images"),
        (VECTOR, {"network": "a3c42"}, "'a3c42' needs images"),
        (((84, 84), np.uint8, "chw"), {}, "needs images"),
        (VECTOR, {"network": "resnet"}, "'resnet'"),
        (VECTOR, {"core": "rnn"}, "'rnn'"),
        (VECTOR, {"precision": "float16"}, "'float16'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    observation: Observation, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(observation, **settings)


def test_observation_spaces_other_than_box_are_refused() -> None:
    discrete = gymnasium.spaces.Discrete(4)
    spec = EnvironmentSpec("test", "default", discrete, discrete)
    with pytest.raises(ValueError, match="only Box"):
        build_model(spec, network="auto")


def test_wrong_shapes_are_refused() -> None:
    model = build(VECTOR)
    resets = torch.zeros(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"got \[2, 3, 5\]"):
        model(torch.zeros(2, 3, 5), (), resets)
    with pytest.raises(ValueError, match=r"and \[3, 2\]"):
        model(torch.zeros(2, 3, 4), (), resets.T)


def test_parameters_follow_the_seed() -> None:
    first, second = build(ATARI), build(ATARI)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_gradient_of_the_model_agrees_with_finite_differences() -> None:
    model = ActorCritic(
        (2, 5, 5),
        IMPALATorso(spec_of(((2, 5, 5), np.float64, "chw")).observation_space, "chw"),
        RecurrentCore("lstm", 256, 3),
        CategoricalHead(2),
    ).double()
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(3, 1, 2, 5, 5, generator=generator, dtype=torch.float64)
    resets = torch.tensor([[False], [True], [False]])

    def outputs(images: Tensor) -> Tensor:
        log_probs, values = run(model, images, resets)
        return torch.cat([log_probs.flatten(), values.flatten()])

    assert torch.autograd.gradcheck(outputs, images.requires_grad_())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
def test_a_model_on_a_gpu_agrees_with_the_cpu(core: str) -> None:
    model = build(ATARI, network="a3c", core=core)
    images = observations_of(ATARI, 3, 4)
    resets = torch.zeros(3, 4, dtype=torch.bool)
    resets[1, 2] = True
    here = model(images, model.initial_core_state(4), resets)
    model.cuda()
    there = model(images.cuda(), model.initial_core_state(4), resets.cuda())
    torch.testing.assert_close(there.values.cpu(), here.values, rtol=1e-2, atol=1e-2)
    draws = [x.policy.sample(torch.Generator().manual_seed(0)).cpu() for x in (here, there)]
    assert (draws[0] == draws[1]).float().mean() > 0.9


# ---------------------------------------------------------------------------------------------
# Recurrent state
# ---------------------------------------------------------------------------------------------

KINDS = pytest.mark.parametrize("kind", ["lstm", "gru"])


def make_core(kind: str, initial_value: float = 0.0) -> RecurrentCore:
    torch.manual_seed(0)
    return RecurrentCore(kind, 3, 5, initial_value).double()


def features(*rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*rows, 3, generator=generator, dtype=torch.float64)


def cell_by_cell(core: RecurrentCore, inputs: Tensor, resets: Tensor) -> Tensor:
    """One column and one tick at a time, by torch's cells."""
    recurrent = core.recurrent
    make = nn.LSTMCell if isinstance(recurrent, nn.LSTM) else nn.GRUCell
    cell = make(recurrent.input_size, recurrent.hidden_size).double()
    cell.load_state_dict({k.removesuffix("_l0"): v for k, v in recurrent.state_dict().items()})
    outputs = torch.zeros(*inputs.shape[:2], recurrent.hidden_size, dtype=torch.float64)
    for b in range(inputs.shape[1]):
        state = core.initial_core_state(1)
        for t in range(len(inputs)):
            if resets[t, b]:
                state = core.initial_core_state(1)
            result = cell(inputs[t, b : b + 1], state if len(state) == 2 else state[0])
            state = result if len(state) == 2 else (result,)
            outputs[t, b] = state[0]
    return outputs


@KINDS
@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 1.0])
def test_resets_act_on_their_row_and_column_alone(kind: str, probability: float) -> None:
    core, inputs = make_core(kind, 0.3), features(9, 4).requires_grad_()
    resets = torch.rand(9, 4, generator=torch.Generator().manual_seed(3)) < probability
    outputs, state = core(inputs, core.initial_core_state(4), resets)
    expected = cell_by_cell(core, inputs, resets)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(state[0], outputs[-1])
    gradients = [torch.autograd.grad(x[-1].sum(), inputs)[0] for x in (outputs, expected)]
    torch.testing.assert_close(*gradients)


@KINDS
def test_b27_state_is_reset_inside_an_unroll(kind: str) -> None:
    """State must be reset inside the unroll.

    Rows after an end equal a fresh run over them, and send no gradient to rows before it.
    Source: hill-a/stable-baselines#263, #1022; Alfredvc/paac#2.
    """
    core, inputs = make_core(kind), features(5, 1).requires_grad_()
    resets = torch.tensor([[False], [False], [False], [True], [False]])
    outputs, _ = core(inputs, core.initial_core_state(1), resets)
    fresh, _ = core(inputs[3:], core.initial_core_state(1), resets[:2])
    torch.testing.assert_close(outputs[3:], fresh, rtol=0, atol=1e-6)
    outputs[3:].sum().backward()
    assert not inputs.grad[:3].any()
    assert inputs.grad[3:].any()


@KINDS
def test_what_a_finished_episode_left_is_not_read(kind: str) -> None:
    core, inputs = make_core(kind), features(2, 2)
    resets = torch.tensor([[True, False], [False, False]])
    state = core.initial_core_state(2)
    for tensor in state:
        tensor[0] = math.nan
    outputs, _ = core(inputs, state, resets)
    expected, _ = core(inputs, core.initial_core_state(2), resets)
    assert torch.equal(outputs, expected)
    outputs.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in core.parameters())


@KINDS
def test_b28_a_model_has_its_own_initial_state_in_every_episode(kind: str) -> None:
    """Custom initial state ignored between episodes.

    A state that starts at 0.5 starts there again after each end, acting and learning alike.
    Source: ray-project/ray#15483.
    """
    core, inputs = make_core(kind, 0.5), features(6, 1)
    assert all((state == 0.5).all() for state in core.initial_core_state(3))
    resets = torch.tensor([[False], [False], [True], [False], [False], [True]])
    learned, _ = core(inputs, core.initial_core_state(1), resets)
    state, acted = core.initial_core_state(1), []
    for t in range(6):
        output, state = core(inputs[t : t + 1], state, resets[t : t + 1])
        acted.append(output)
    torch.testing.assert_close(torch.cat(acted), learned)
    for t in (2, 5):
        fresh, _ = core(inputs[t : t + 1], core.initial_core_state(1), resets[:1])
        torch.testing.assert_close(learned[t], fresh[0])
    zeros, _ = make_core(kind)(inputs, make_core(kind).initial_core_state(1), resets)
    assert not torch.isclose(learned[2], zeros[2]).any()


@KINDS
def test_gradient_goes_through_time_and_stops_between_unrolls(kind: str) -> None:
    """The last row's loss reaches the first row's input; a stored state has no history.

    Source: ikostrikov/pytorch-a3c#76, #15, dgriff777/rl_a3c_pytorch#19,
    ikostrikov/pytorch-a2c-ppo-acktr-gail#278.
    """
    model = build(VECTOR, core=kind, core_size=8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    state = model.initial_core_state(2)
    resets = torch.zeros(5, 2, dtype=torch.bool)
    for _ in range(3):
        assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in state)
        observations = observations_of(VECTOR, 5, 2).requires_grad_()
        output = model(observations, state, resets)
        optimizer.zero_grad()
        output.values[4].sum().backward()
        optimizer.step()
        assert observations.grad[0].any()
        state = tuple(tensor.detach() for tensor in output.core_state)


@KINDS
@pytest.mark.parametrize(
    ("reset_rows", "num_calls"), [([], 1), ([0], 1), ([3], 2), ([3, 4], 3), ([0, 5], 2)]
)
def test_rows_without_resets_run_through_one_kernel(
    kind: str, reset_rows: list[int], num_calls: int
) -> None:
    core = make_core(kind)
    calls: list[int] = []
    core.recurrent.register_forward_hook(lambda *_: calls.append(1))
    resets = torch.zeros(6, 3, dtype=torch.bool)
    resets[reset_rows, 1] = True
    core(features(6, 3), core.initial_core_state(3), resets)
    assert len(calls) == num_calls


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
@pytest.mark.parametrize("observation", [VECTOR, ATARI], ids=["vector", "atari"])
def test_learning_sees_what_acting_saw(observation: Observation, core: str) -> None:
    """All rows at once give the policy and values that single rows gave one after the other."""
    model = build(observation, core=core, core_size=16)
    observations = observations_of(observation, 6, 3)
    resets = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)) < 0.3
    learned = run(model, observations, resets)
    state, acted = model.initial_core_state(3), []
    with torch.inference_mode():
        for t in range(6):
            output = model(observations[t : t + 1], state, resets[t : t + 1])
            state = output.core_state
            actions = range(model.policy.out_features)
            log_probs = [output.policy.log_prob(torch.full((1, 3), a)) for a in actions]
            acted.append((torch.stack(log_probs, -1), output.values))
    assert_close([torch.cat(parts) for parts in zip(*acted, strict=True)], learned, 1e-5)


def test_without_a_core_there_is_no_state() -> None:
    model = build(VECTOR)
    assert model.initial_core_state(3) == ()
    observations = observations_of(VECTOR, 2, 3)
    assert model(observations, (), torch.ones(2, 3, dtype=torch.bool)).core_state == ()


@KINDS
def test_initial_state_has_memory_of_its_own(kind: str) -> None:
    core = make_core(kind, 0.5)
    for tensor in core.initial_core_state(2):
        tensor.fill_(9.0)
    assert all((tensor == 0.5).all() for tensor in core.initial_core_state(2))
    assert all(tensor.is_contiguous() for tensor in core.initial_core_state(1))


@pytest.mark.parametrize("network", ["a3c", "minatar", "impala"])
def test_standardised_images_are_those_of_mean_0_and_deviation_1(network: Any) -> None:
    """The same as an independent shift and scale in front, borders included."""
    space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    spec = EnvironmentSpec("x", "default", space, gymnasium.spaces.Discrete(3), image_layout="chw")
    torch.manual_seed(0)
    model = build_model(spec, network=network, standardize_images=True)
    images = torch.randint(0, 256, (3, *space.shape), dtype=torch.uint8)
    first = next(m for m in model.modules() if isinstance(m, ImageConvolution))
    plain = images.double() / 255
    shifted = plain - plain.mean((1, 2, 3), keepdim=True)
    scaled = shifted / (shifted.square().mean((1, 2, 3), keepdim=True) + 1e-6).sqrt()
    expected = torch.nn.functional.conv2d(
        scaled, first.weight.double(), first.bias.double(), first.stride, first.padding
    )
    torch.testing.assert_close(first(images).double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(first(torch.zeros_like(images))).all()


def test_last_actions_and_rewards_are_seen_row_by_row_as_in_an_unroll() -> None:
    """What an actor tells the core tick by tick is what a learner finds in the trajectory."""
    model = build(VECTOR, core="lstm", core_size=8, last_inputs=True)
    assert isinstance(model, RememberingActorCritic)
    generator = torch.Generator().manual_seed(2)
    observations = observations_of(VECTOR, 5, 3)
    actions = torch.randint(6, (5, 3), generator=generator)
    rewards = 3.0 * torch.randn(5, 3, generator=generator)
    resets = torch.zeros(5, 3, dtype=torch.bool)
    resets[2, 1] = resets[0, 0] = True
    begun = model.remember(model.initial_core_state(3), actions[4], rewards[4])
    whole = model.run(observations, begun, resets, actions, rewards)
    state = begun
    for row in range(5):
        output = model(observations[row][None], state, resets[row][None])
        assert torch.allclose(output.values[0], whole.values[row], atol=1e-6)
        assert torch.allclose(output.policy.entropy()[0], whole.policy.entropy()[row], atol=1e-6)
        state = model.remember(output.core_state, actions[row], rewards[row])
    for one, other in zip(state, whole.core_state, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert state[-1][:, -1].abs().max() == 1.0, "rewards are clipped"
    other = model.run(observations, begun, resets, (actions + 1) % 6, rewards)
    assert torch.equal(other.values[0], whole.values[0]), "the first row knows no later action"
    assert not torch.equal(other.values[1], whole.values[1])
    anew = model(observations[2][None], begun, resets[2][None]).values[0, 1]
    assert torch.allclose(other.values[2, 1], anew, atol=1e-6), "nothing of the episode before"
    with pytest.raises(ValueError, match="call run"):
        model(observations, begun, resets)


def test_observations_that_are_a_single_number_will_do() -> None:
    single = ((), np.float32, "none")
    model = build(single)
    log_probs, values = run(model, observations_of(single, 3, 2))
    assert log_probs.shape == (3, 2, 6)
    assert values.shape == (3, 2)


def test_first_parameters_do_not_depend_on_the_threads_of_who_makes_them() -> None:
    """A3C's are made by the parent, A2C's by a role, which has another number of threads."""
    config = RunConfig(env="CartPole-v1", network="mlp", core="lstm", hidden_sizes=(256, 256))
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            made.append(create_on_cpu(config, spec_of(VECTOR)).state_dict())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
