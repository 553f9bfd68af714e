"""Networks: torsos for vectors and images, and the actor-critic model built from them.

What is here: the published torsos (MLP, A3C, that of the PyTorch A3C program, Nature, MinAtar,
IMPALA's deep one), the model that puts torso, recurrent core and two heads together, and its
construction from what an environment says of itself. What is not here: the core (`cores`) and
distributions (`policies`).

Torsos take observations as environments give them, `[N, ...]` in their own dtype, and know their
image layout from the environment's spec; nothing is guessed from sizes. Images are kept
channels-last in memory, which is what convolutions on a CPU and on tensor cores are fastest with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repertory.config import Core, Initialization, Network, Precision
from repertory.environments.base import EnvironmentSpec, ImageLayout
from repertory.models.base import ModelOutput
from repertory.models.cores import RecurrentCore
from repertory.models.policies import PolicyHead, policy_head
from repertory.trajectories import CoreState

LayerT = TypeVar("LayerT", bound=nn.Conv2d | nn.Linear)

_SMALL_IMAGE_SIDE = 36
"""Images with a shorter side than this get the MinAtar torso when the network is `auto`."""


@dataclass(frozen=True)
class _Convolutions:
    """A published stack: convolutions as (channels, kernel, stride), then one dense layer."""

    layers: tuple[tuple[int, int, int], ...]
    hidden_size: int


_STACKS = {
    # Mnih et al. 2016, section 5.1 (the network of Mnih et al. 2013).
    "a3c": _Convolutions(((16, 8, 4), (32, 4, 2)), 256),
    # Mnih et al. 2015, Methods.
    "nature": _Convolutions(((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512),
    # Young and Tian 2019, appendix.
    "minatar": _Convolutions(((16, 3, 1),), 128),
}

_A3C42_LAYERS = 4
_A3C42_CHANNELS = 32

_IMPALA_SECTIONS = (16, 32, 32)
"""Channels of the deep network's three sections; Espeholt et al. 2018, figure 3."""


_SMALLEST_VARIANCE = 1e-6
"""Added to the variance of an image, so that one of a single colour becomes 0 instead of 0 / 0."""


class ImageConvolution(nn.Conv2d):
    """The first convolution of a torso: takes images as the environment gives them.

    Bytes are divided by 255 by scaling the kernel rather than the image: the kernel is smaller by
    orders of magnitude, and whole numbers up to 255 are exact even in bfloat16.

    Attributes:
        standardized: Whether each image is shifted and scaled to mean 0 and deviation 1 instead,
            over all of its channels. A ball of a few pixels on a bright field is then a large
            number and the field a small one; as bytes it is the other way round.
    """

    def __init__(
        self,
        space: gymnasium.spaces.Box,
        layout: ImageLayout,
        channels: int,
        kernel: int,
        stride: int,
        padding: int = 0,
    ) -> None:
        """Make the layer for images of `space` (one image), [C, H, W] or [H, W, C] by `layout`."""
        depth = space.shape[0] if layout == "chw" else space.shape[-1]
        super().__init__(depth, channels, kernel, stride, padding)
        self.layout = layout
        self.scale = _byte_scale(space)
        self.standardized = False

    def forward(self, images: Tensor) -> Tensor:
        """Convolve images [N, ...] of any dtype; the result is [N, channels, H', W']."""
        if self.layout == "hwc":
            images = images.movedim(-1, 1)
        elif not images.is_contiguous(memory_format=torch.channels_last):
            # Interleaving the narrow dtype first is several times faster than `Tensor.to` with a
            # memory format.
            images = torch.stack(images.unbind(1), -1).movedim(-1, 1)
        device_type = images.device.type
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else self.weight.dtype
        if self.standardized:
            images = _standardized(images, self.scale)
            kernel = self.weight
        else:
            kernel = self.weight if self.scale == 1.0 else self.weight * self.scale
        return F.conv2d(images.to(dtype), kernel, self.bias, self.stride, self.padding)


class Torso(nn.Module):
    """Turns observations `[N, ...]`, in the environment's dtype, into features `[N, output_size]`.

    Attributes:
        output_size: Width of the features.
    """

    output_size: int


class MLPTorso(Torso):
    """Dense tanh layers over the flattened observation.

    Orthogonal kernels of gain sqrt(2), biases 0: the practice for CartPole and its kind since
    OpenAI Baselines.
    """

    def __init__(
        self, space: gymnasium.spaces.Box, layout: ImageLayout, sizes: Sequence[int]
    ) -> None:
        """Make layers of `sizes` for observations of `space`; image bytes are divided by 255."""
        super().__init__()
        widths = [math.prod(space.shape), *sizes]
        layers: list[nn.Module] = []
        for width, size in pairwise(widths):
            layers += [_orthogonal(nn.Linear(width, size), math.sqrt(2.0)), nn.Tanh()]
        self.layers = nn.Sequential(*layers)
        self.output_size = widths[-1]
        self.scale = _byte_scale(space) if layout != "none" else 1.0

    def forward(self, observations: Tensor) -> Tensor:
        """Features [N, output_size] of observations [N, ...] of any dtype."""
        flat = observations.reshape(len(observations), -1).float()
        features: Tensor = self.layers(flat if self.scale == 1.0 else flat * self.scale)
        return features


class ConvolutionTorso(Torso):
    """A published stack of unpadded convolutions and one dense layer, with ReLU.

    Kernels and biases start uniform in +-1 / sqrt(fan-in), the default of Torch7 that A3C and DQN
    were published with, and of torch.
    """

    def __init__(self, space: gymnasium.spaces.Box, layout: ImageLayout, network: Network) -> None:
        """Make the stack that `network` names (`a3c`, `nature`, `minatar`) for images of `space`.

        Raises:
            ValueError: Observations are no images, or too small for the stack.
        """
        super().__init__()
        stack = _STACKS[network]
        channels, *size = _image_shape(space, layout, network)
        layers: list[nn.Module] = []
        for index, (outputs, kernel, stride) in enumerate(stack.layers):
            if min(size) < kernel:
                raise ValueError(
                    f"network {network!r} cannot take images of shape {list(space.shape)}: "
                    f"{size} pixels are left before a kernel of {kernel}; try 'minatar' or 'impala'"
                )
            if index == 0:
                first = ImageConvolution(space, layout, outputs, kernel, stride)
                layers += [first, nn.ReLU(inplace=True)]
            else:
                layers += [nn.Conv2d(channels, outputs, kernel, stride), nn.ReLU(inplace=True)]
            channels, size = outputs, [(side - kernel) // stride + 1 for side in size]
        self.convolutions = nn.Sequential(*layers)
        self.dense = nn.Linear(channels * math.prod(size), stack.hidden_size)
        self.output_size = stack.hidden_size
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, observations: Tensor) -> Tensor:
        """Features [N, output_size] of images [N, ...] of any dtype."""
        return F.relu(self.dense(_flatten(self.convolutions(observations))), inplace=True)


class A3C42Torso(Torso):
    """Four convolutions of 32 channels, 3x3 and stride 2, with ELU, and no dense layer.

    The network of the widely used PyTorch A3C program (ikostrikov/pytorch-a3c, `model.py`, 2017).
    An image of 42 by 42 becomes 288 features, which the program feeds to an LSTM of 256. Kernels
    start uniform in +-sqrt(6 / (fan-in + fan-out)), after Glorot and Bengio 2010; biases at 0.
    """

    def __init__(self, space: gymnasium.spaces.Box, layout: ImageLayout) -> None:
        """Make the network for images of `space`; any size will do.

        Raises:
            ValueError: Observations are no images.
        """
        super().__init__()
        _, *size = _image_shape(space, layout, "a3c42")
        layers: list[nn.Module] = []
        for index in range(_A3C42_LAYERS):
            if index == 0:
                layers.append(ImageConvolution(space, layout, _A3C42_CHANNELS, 3, 2, padding=1))
            else:
                layers.append(nn.Conv2d(_A3C42_CHANNELS, _A3C42_CHANNELS, 3, 2, padding=1))
            layers.append(nn.ELU(inplace=True))
            size = [(side + 1) // 2 for side in size]
        self.convolutions = nn.Sequential(*layers)
        self.output_size = _A3C42_CHANNELS * math.prod(size)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                _zero_biases(module)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, observations: Tensor) -> Tensor:
        """Features [N, output_size] of images [N, ...] of any dtype."""
        return _flatten(self.convolutions(observations))


class ResidualBlock(nn.Module):
    """ReLU, 3x3 convolution, twice, and the input added."""

    def __init__(self, channels: int) -> None:
        """Make a block that keeps `channels`."""
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Keep the shape [N, channels, H, W]."""
        residual: Tensor = self.second(F.relu(self.first(F.relu(images))))
        return images + residual


class IMPALATorso(Torso):
    """The deep residual network of IMPALA: three sections, 15 convolutions, a dense layer of 256.

    A section is a 3x3 convolution, a 3x3 max-pooling of stride 2 and two residual blocks. Kernels
    start from a normal cut at two deviations of 1 / sqrt(fan-in), biases at 0, as in the program
    published with the paper (Sonnet's default).

    Reference:
        Espeholt et al. 2018, figure 3, right.
    """

    def __init__(self, space: gymnasium.spaces.Box, layout: ImageLayout) -> None:
        """Make the network for images of `space`; any size will do.

        Raises:
            ValueError: Observations are no images.
        """
        super().__init__()
        channels, *size = _image_shape(space, layout, "impala")
        layers: list[nn.Module] = []
        for index, outputs in enumerate(_IMPALA_SECTIONS):
            if index == 0:
                layers.append(ImageConvolution(space, layout, outputs, 3, stride=1, padding=1))
            else:
                layers.append(nn.Conv2d(channels, outputs, 3, padding=1))
            layers += [nn.MaxPool2d(3, 2, 1), ResidualBlock(outputs), ResidualBlock(outputs)]
            channels, size = outputs, [(side + 1) // 2 for side in size]
        self.sections = nn.Sequential(*layers)
        self.output_size = 256
        self.dense = nn.Linear(channels * math.prod(size), self.output_size)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                _truncated_normal(module)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, observations: Tensor) -> Tensor:
        """Features [N, output_size] of images [N, ...] of any dtype."""
        return F.relu(self.dense(_flatten(F.relu(self.sections(observations)))), inplace=True)


class ActorCritic(nn.Module):
    """Torso, recurrent core or none, and two linear heads: logits of the policy, and the value.

    Policy and critic share torso and core, unless the critic is given a torso of its own. Keeps
    the `Model` protocol. Under bfloat16 torso and core compute in it; the heads, which are
    small and whose rounding would enter importance ratios and value targets, stay in float32.
    """

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        torso: Torso,
        core: RecurrentCore | None,
        head: PolicyHead,
        *,
        value_torso: Torso | None = None,
        precision: Precision = "float32",
    ) -> None:
        """Put the parts together; both heads start uniform by fan-in.

        Args:
            observation_shape: Shape of one observation.
            torso: Features of observations.
            core: Over the torso's features, or None.
            head: Makes the policy from the outputs of the policy's layer.
            value_torso: The critic's own torso, or None to share.
            precision: Arithmetic of torso and core.

        Raises:
            ValueError: A torso of its own would leave the critic without the core's memory.
        """
        super().__init__()
        if core is not None and value_torso is not None:
            raise ValueError("with a recurrent core policy and critic share the torso")
        width = torso.output_size if core is None else core.output_size
        self.observation_shape = torch.Size(observation_shape)
        self.torso = torso
        self.value_torso = value_torso
        self.core = core
        self.head = head
        self.policy = nn.Linear(width, head.num_outputs)
        self.value = nn.Linear(width if value_torso is None else value_torso.output_size, 1)
        self.precision = precision

    def initial_core_state(self, num_columns: int) -> CoreState:
        """The core state at the start of an episode, each [B, size]; `()` without a core."""
        return () if self.core is None else self.core.initial_core_state(num_columns)

    def forward(self, observations: Tensor, core_state: CoreState, resets: Tensor) -> ModelOutput:
        """Run over rows in time order; see `Model`.

        Raises:
            ValueError: Shapes do not fit the model or each other.
        """
        return self._run(observations, core_state, resets, None)

    def _run(
        self,
        observations: Tensor,
        core_state: CoreState,
        resets: Tensor,
        beside: Tensor | None,
    ) -> ModelOutput:
        """The same with more for the core to see: `beside` is [T, B, n]."""
        rows = observations.shape[:2]
        if observations.shape[2:] != self.observation_shape or resets.shape != rows:
            raise ValueError(
                f"expected observations [T, B, *{list(self.observation_shape)}] and resets [T, B], "
                f"got {list(observations.shape)} and {list(resets.shape)}"
            )
        with self._autocast(observations.device.type):
            features = self.torso(observations.flatten(0, 1))
            if self.core is not None:
                features = features.unflatten(0, rows)
                if beside is not None:
                    features = torch.cat([features, beside.to(features.dtype)], -1)
                features, core_state = self.core(features, core_state, resets)
                features = features.flatten(0, 1)
            value_features = features
            if self.value_torso is not None:
                value_features = self.value_torso(observations.flatten(0, 1))
        dtype = self.value.weight.dtype
        return ModelOutput(
            policy=self.head(self.policy(features.to(dtype)).unflatten(0, rows)),
            values=self.value(value_features.to(dtype)).view(rows),
            core_state=core_state,
        )

    def _autocast(self, device_type: str) -> AbstractContextManager[object]:
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(device_type, torch.bfloat16)


class RememberingActorCritic(ActorCritic):
    """One whose core sees the last action, one-hot, and the last reward, clipped to [-1, 1], too.

    As the agent of Espeholt et al. 2018 for DMLab. Keeps the `Remembers` protocol.
    """

    def initial_core_state(self, num_columns: int) -> CoreState:
        """That of the core, and [B, actions + 1] zeros: nothing was done yet."""
        nothing = self.policy.weight.new_zeros(num_columns, self.policy.out_features + 1)
        return (*super().initial_core_state(num_columns), nothing)

    def remember(self, core_state: CoreState, actions: Tensor, rewards: Tensor) -> CoreState:
        """See `Remembers`."""
        return (*core_state[:-1], self._encode(actions, rewards).to(core_state[-1]))

    def forward(self, observations: Tensor, core_state: CoreState, resets: Tensor) -> ModelOutput:
        """Run over a single row; see `Model`.

        Raises:
            ValueError: Shapes do not fit, or there are more rows, between which one has to know
                what was done: see `run`.
        """
        if len(observations) != 1:
            raise ValueError("several rows need the actions and rewards between them: call run")
        return self._with_last(observations, core_state, resets, core_state[-1][None])

    def run(
        self,
        observations: Tensor,
        core_state: CoreState,
        resets: Tensor,
        actions: Tensor,
        rewards: Tensor,
    ) -> ModelOutput:
        """See `Remembers`."""
        encoded = self._encode(actions, rewards).to(core_state[-1])
        last = torch.cat([core_state[-1][None], encoded[:-1]])
        output = self._with_last(observations, core_state, resets, last)
        return output._replace(core_state=(*output.core_state[:-1], encoded[-1]))

    def _with_last(
        self, observations: Tensor, core_state: CoreState, resets: Tensor, last: Tensor
    ) -> ModelOutput:
        # Selected, not multiplied: what a finished episode left behind may be NaN.
        last = torch.where(resets.unsqueeze(-1), 0.0, last)
        output = self._run(observations, core_state[:-1], resets, last)
        return output._replace(core_state=(*output.core_state, core_state[-1]))

    def _encode(self, actions: Tensor, rewards: Tensor) -> Tensor:
        taken = F.one_hot(actions.long(), self.policy.out_features)
        return torch.cat([taken, rewards.clamp(-1.0, 1.0).unsqueeze(-1)], -1)


def build_model(
    spec: EnvironmentSpec,
    *,
    network: Network,
    hidden_sizes: Sequence[int] = (64, 64),
    core: Core = "none",
    core_size: int = 256,
    last_inputs: bool = False,
    initialization: Initialization = "published",
    standardize_images: bool = False,
    precision: Precision = "float32",
) -> ActorCritic:
    """The model that a configuration asks for, with fresh parameters from torch's generator.

    Args:
        spec: The environment to build for.
        network: Torso; `auto` takes `mlp` for vectors, `minatar` for images with a side below 36
            pixels and `a3c` for others. Without a core `mlp` gives the critic a torso of its own,
            as Mnih et al. 2016 do for physical states, and Stable-Baselines3 and CleanRL: with a
            small shared one CartPole is learned markedly slower.
        hidden_sizes: Widths of the `mlp` torso's layers.
        core: Recurrent core between torso and heads.
        core_size: Width of the core.
        last_inputs: Give the core the last action and reward too; see `RememberingActorCritic`.
        initialization: `published` starts each network as its paper or program did; `orthogonal`
            starts every kernel orthogonal, of gain sqrt(2) in torsos, 0.01 in the policy's head
            and 1 in the critic's, with biases 0, as OpenAI Baselines does.
        standardize_images: Give each image mean 0 and deviation 1; see `ImageConvolution`.
        precision: Arithmetic of torso and core.

    Returns:
        The model, on the CPU.

    Raises:
        ValueError: The network cannot take such observations, there is no policy for such
            actions, or a name is unknown.
    """
    space = spec.observation_space
    if not isinstance(space, gymnasium.spaces.Box):
        raise ValueError(f"no network for the observation space {space}: only Box is supported")
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"unknown precision {precision!r}: float32 or bfloat16")
    head = policy_head(spec.action_space)
    if network == "auto":
        network = _default_network(space, spec.image_layout)
    torso = _torso(spec, space, network, hidden_sizes)
    # Policy and critic share a picture's torso, and a memory.
    own = network == "mlp" and core == "none"
    value_torso = _torso(spec, space, network, hidden_sizes) if own else None
    core_inputs = torso.output_size + (head.num_outputs + 1 if last_inputs else 0)
    memory = None if core == "none" else RecurrentCore(core, core_inputs, core_size)
    model = (RememberingActorCritic if last_inputs else ActorCritic)(
        space.shape, torso, memory, head, value_torso=value_torso, precision=precision
    )
    _initialize(model, network, initialization)
    convolutions = [part for part in model.modules() if isinstance(part, ImageConvolution)]
    if standardize_images and not convolutions:
        raise ValueError(f"standardize_images is for images, and network {network!r} takes none")
    for convolution in convolutions:
        convolution.standardized = standardize_images
    return model


def _torso(
    spec: EnvironmentSpec, space: gymnasium.spaces.Box, network: Network, sizes: Sequence[int]
) -> Torso:
    """The torso that a network's name stands for.

    Raises:
        ValueError: The name is unknown, or the torso cannot take such observations.
    """
    match network:
        case "mlp":
            return MLPTorso(space, spec.image_layout, sizes)
        case "a3c" | "nature" | "minatar":
            return ConvolutionTorso(space, spec.image_layout, network)
        case "a3c42":
            return A3C42Torso(space, spec.image_layout)
        case "impala":
            return IMPALATorso(space, spec.image_layout)
    raise ValueError(
        f"unknown network {network!r}: auto, mlp, a3c, a3c42, nature, minatar or impala"
    )


def _initialize(model: ActorCritic, network: Network, initialization: Initialization) -> None:
    """Set the first parameters that differ from what layers are made with."""
    if initialization == "orthogonal":
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                _orthogonal(module, math.sqrt(2.0))
    if network == "mlp" or initialization == "orthogonal":
        # A nearly uniform first policy, whose entropy is near its largest.
        _orthogonal(model.policy, 0.01)
        _orthogonal(model.value, 1.0)
    elif network == "impala":
        _truncated_normal(model.policy)
        _truncated_normal(model.value)
    elif network == "a3c42":
        # A nearly uniform first policy here too, and gates of the core that are half open.
        _normal_rows(model.policy, 0.01)
        _normal_rows(model.value, 1.0)
        if model.core is not None:
            _zero_biases(model.core.recurrent)


def _default_network(space: gymnasium.spaces.Box, layout: ImageLayout) -> Network:
    """What `auto` stands for."""
    if layout == "none":
        return "mlp"
    _, height, width = _image_shape(space, layout, "auto")
    return "minatar" if min(height, width) < _SMALL_IMAGE_SIDE else "a3c"


def _image_shape(
    space: gymnasium.spaces.Box, layout: ImageLayout, network: Network
) -> tuple[int, int, int]:
    """Channels, height and width of an image observation.

    Raises:
        ValueError: Observations of `space` are no images.
    """
    if layout == "none" or len(space.shape) != 3:
        raise ValueError(
            f"network {network!r} needs images, but observations have shape {list(space.shape)}; "
            "for vectors there is 'mlp', and for images whose channels are not found image_layout"
        )
    if layout == "chw":
        channels, height, width = space.shape
    else:
        height, width, channels = space.shape
    return channels, height, width


@torch.no_grad()
def _standardized(images: Tensor, scale: float) -> Tensor:
    """Images [N, ...] of any dtype, each with mean 0 and deviation 1, as float32.

    `scale` is that of the smallest variance. No gradient goes back to images.
    """
    images = images.to(torch.float32, copy=True)
    flat = _flatten(images)  # a view, where images lie channels-last
    images.sub_(flat.mean(1).view(-1, 1, 1, 1))
    # Torch's own variance, which is made for harder cases, takes several times as long.
    variance = torch.linalg.vector_norm(_flatten(images), dim=1).square() / flat.shape[1]
    deviation = torch.sqrt(variance + _SMALLEST_VARIANCE / scale**2)
    return images.div_(deviation.view(-1, 1, 1, 1))


def _byte_scale(space: gymnasium.spaces.Box) -> float:
    """What images are multiplied by: bytes come to [0, 1], all else stays."""
    return 1.0 / 255.0 if space.dtype == np.uint8 else 1.0


def _flatten(images: Tensor) -> Tensor:
    """[N, C, H, W] to [N, H * W * C]: in this order a view of channels-last memory, no copy."""
    return images.movedim(1, -1).flatten(1)


def _orthogonal(layer: LayerT, gain: float) -> LayerT:
    """Set an orthogonal kernel of `gain` and biases 0."""
    # Convolutions lie channels-last in memory, which the initialisation cannot flatten in place.
    kernel = torch.empty(layer.weight.shape, dtype=layer.weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(nn.init.orthogonal_(kernel, gain))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _truncated_normal(layer: nn.Conv2d | nn.Linear) -> None:
    """Set a kernel from a normal cut at two deviations of 1 / sqrt(fan-in), and biases 0."""
    deviation = 1.0 / math.sqrt(layer.weight[0].numel())
    nn.init.trunc_normal_(layer.weight, std=deviation, a=-2.0 * deviation, b=2.0 * deviation)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _normal_rows(layer: nn.Linear, norm: float) -> None:
    """Set rows that point anywhere and are all of length `norm`, and biases 0."""
    with torch.no_grad():
        layer.weight.copy_(F.normalize(torch.randn_like(layer.weight)) * norm)
    _zero_biases(layer)


def _zero_biases(module: nn.Module) -> None:
    """Set all biases of a layer or core to 0."""
    for name, parameter in module.named_parameters():
        if "bias" in name:
            nn.init.zeros_(parameter)
