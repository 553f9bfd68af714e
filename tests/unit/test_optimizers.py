"""Optimisers against loops over plain numbers in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from repertory.optimizers import InsideRootRMSprop, linear, make_optimizer

RATE, DECAY, EPSILON = 0.03, 0.9, 0.1


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(parameters: list[Tensor], **changes: object) -> torch.optim.Optimizer:
    settings = {
        "kind": "rmsprop",
        "learning_rate": RATE,
        "epsilon": EPSILON,
        "rmsprop_decay": DECAY,
        "epsilon_inside_root": True,
    }
    return make_optimizer(parameters, **(settings | changes))


def descend(optimizer: torch.optim.Optimizer, parameters: list[Tensor], steps: range) -> None:
    """Steps with made-up gradients, the same for the same step and parameter."""
    for step in steps:
        for index, parameter in enumerate(parameters):
            parameter.grad = normal(100 * step + index, *parameter.shape)
        optimizer.step()


def parameters() -> list[Tensor]:
    return [normal(1, 3, 2).requires_grad_(), normal(2, 4).requires_grad_()]


def by_hand(kind: str, num_steps: int) -> list[list[float]]:
    """The three update rules, one number at a time."""
    result = []
    for index, parameter in enumerate(parameters()):
        numbers = []
        for place, number in enumerate(parameter.flatten().tolist()):
            mean = square = 0.0
            for step in range(num_steps):
                gradient = normal(100 * step + index, *parameter.shape).flatten()[place].item()
                if kind == "adam":
                    mean = 0.9 * mean + 0.1 * gradient
                    square = 0.999 * square + 0.001 * gradient**2
                    corrected = square / (1 - 0.999 ** (step + 1))
                    move = mean / (1 - 0.9 ** (step + 1)) / (math.sqrt(corrected) + EPSILON)
                else:
                    square = DECAY * square + (1 - DECAY) * gradient**2
                    inside = kind == "inside"
                    root = math.sqrt(square + EPSILON) if inside else math.sqrt(square) + EPSILON
                    move = gradient / root
                number -= RATE * move
            numbers.append(number)
        result.append(numbers)
    return result


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("inside", {}),
        ("outside", {"epsilon_inside_root": False}),
        ("adam", {"kind": "adam"}),
        ("adam", {"kind": "adam", "epsilon_inside_root": False}),
    ],
)
def test_update_is_the_published_one(rule: str, changes: dict[str, object]) -> None:
    params = parameters()
    descend(make(params, **changes), params, range(6))
    for parameter, numbers in zip(params, by_hand(rule, 6), strict=True):
        assert parameter.flatten().tolist() == pytest.approx(numbers, rel=1e-12)


def test_epsilon_inside_and_outside_the_root_differ() -> None:
    """From 0, a gradient of 1 moves by 1 / sqrt(0.1 + 0.1) or by 1 / (sqrt(0.1) + 0.1)."""
    moves = []
    for inside in (True, False):
        parameter = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        parameter.grad = torch.ones(1, dtype=torch.float64)
        make([parameter], epsilon_inside_root=inside, learning_rate=1.0).step()
        moves.append(-parameter.item())
    assert moves == pytest.approx([1 / math.sqrt(0.2), 1 / (math.sqrt(0.1) + 0.1)])


def test_without_epsilon_both_forms_agree() -> None:
    ours, torchs = parameters(), parameters()
    descend(make(ours, epsilon=0.0), ours, range(4))
    descend(make(torchs, epsilon=0.0, epsilon_inside_root=False), torchs, range(4))
    for first, second in zip(ours, torchs, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=0)


def test_outside_variant_is_torchs_own() -> None:
    optimizer = make(parameters(), epsilon_inside_root=False)
    assert type(optimizer) is torch.optim.RMSprop


@pytest.mark.parametrize(
    "changes", [{}, {"epsilon_inside_root": False}, {"kind": "adam"}], ids=["in", "out", "adam"]
)
def test_all_state_is_in_tensors_that_can_be_shared(changes: dict[str, object]) -> None:
    params = parameters()
    optimizer = make(params, **changes)
    descend(optimizer, params, range(1))
    shared = []
    for parameter in params:
        for tensor in optimizer.state[parameter].values():
            tensor.share_memory_()
            shared.append((tensor, tensor.data_ptr(), tensor.clone()))
    descend(optimizer, params, range(1, 3))
    assert all(tensor.data_ptr() == address for tensor, address, _ in shared)
    assert all(not torch.equal(tensor, before) for tensor, _, before in shared)


def test_state_has_torchs_names() -> None:
    params = parameters()
    ours, torchs = make(params), make(params, epsilon_inside_root=False)
    descend(ours, params, range(3))
    descend(torchs, params, range(3))
    for parameter in params:
        assert ours.state[parameter].keys() == torchs.state[parameter].keys()
        assert ours.state[parameter]["step"].item() == 3.0
        torch.testing.assert_close(
            ours.state[parameter]["square_avg"], torchs.state[parameter]["square_avg"]
        )


def test_a_restored_optimizer_goes_on_as_if_never_stopped() -> None:
    straight, stopped = parameters(), parameters()
    descend(make(straight), straight, range(6))
    first = make(stopped)
    descend(first, stopped, range(3))
    second = make(stopped, learning_rate=1.0)
    second.load_state_dict(first.state_dict())
    descend(second, stopped, range(3, 6))
    for ours, theirs in zip(stopped, straight, strict=True):
        assert torch.equal(ours, theirs)


def test_a_parameter_without_gradient_stays() -> None:
    params = parameters()
    optimizer = make(params)
    before = params[1].detach().clone()
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.state[params[0]]["step"].item() == 1.0


def test_learning_rate_of_the_group_is_the_one_applied() -> None:
    params = parameters()
    optimizer = make(params)
    optimizer.param_groups[0]["lr"] = 0.0
    descend(optimizer, params, range(2))
    for parameter, untouched in zip(params, parameters(), strict=True):
        assert torch.equal(parameter, untouched)


@pytest.mark.parametrize("settings", [{"lr": -1.0}, {"alpha": 1.5}, {"eps": -1.0}])
def test_setting_out_of_range_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        InsideRootRMSprop(parameters(), **({"lr": 0.1} | settings))


def test_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="'sgd'"):
        make(parameters(), kind="sgd")


@pytest.mark.parametrize(
    ("fraction", "value"), [(-1.0, 0.6), (0.0, 0.6), (0.5, 0.4), (1.0, 0.2), (7.0, 0.2)]
)
def test_linear_goes_from_start_to_end_and_stops(fraction: float, value: float) -> None:
    assert linear(0.6, 0.2, fraction) == pytest.approx(value)


def test_linear_without_an_end_stays() -> None:
    assert linear(0.6, None, 0.9) == 0.6
