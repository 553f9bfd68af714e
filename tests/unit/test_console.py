"""What a terminal shows, and when."""

from __future__ import annotations

import io
import math
import os
import pty
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rich.console import Console as RichConsole

from repertory.console import (
    LiveConsole,
    PlainConsole,
    closing_lines,
    make_console,
    sparkline,
)
from repertory.losses import actor_critic_losses
from repertory.models.policies import Categorical
from repertory.progress import EntropyWatch
from repertory.targets import n_step
from tests.unit.test_metrics import progress

START = {
    "kind": "event",
    "event": "start",
    "algorithm": "a2c",
    "env": "ALE/Pong-v5",
    "protocol": "dqn",
    "network": "a3c",
    "seed": 7,
    "total_steps": 10_000,
    "action_repeat": 4,
    "repeat_action_probability": 0.25,
    "run_dir": "runs/a run",
}
END = progress(10_000, kind="end", reason="total_steps", episodes=250, episode_return_mean=18.25)


def ticking(seconds: float) -> Iterator[float]:
    """A clock that moves on by so much with every look."""
    now = 0.0
    while True:
        yield now
        now += seconds


def test_plain_output_names_the_run_first() -> None:
    stream = io.StringIO()
    with PlainConsole(stream, preset="pong") as console:
        console.on_record(START)
    first, second = stream.getvalue().splitlines()
    assert first == (
        "a2c on ALE/Pong-v5 (protocol dqn: 4 frames a step, each sticky with probability 0.25), "
        "preset pong, network a3c, seed 7"
    )
    assert second == "run folder runs/a run"


def test_plain_output_has_a_line_for_a_record_and_labels_steps_and_frames() -> None:
    stream = io.StringIO()
    with PlainConsole(stream, clock=ticking(100.0).__next__) as console:
        console.on_record(START)
        console.on_record(progress(2500))
    line = stream.getvalue().splitlines()[-1]
    assert line.startswith("2,500 of 10,000 env steps (10,000 frames)  25 %  return -20.5  ")
    assert "400 env steps/s" in line
    assert "lag 0.5 mean, 2 max" in line
    assert "policy 0.125, value 0.25" in line
    assert "entropy 1.5 (75 % of maximum)" in line


def test_plain_output_writes_no_more_than_a_line_every_few_seconds() -> None:
    stream = io.StringIO()
    with PlainConsole(stream, clock=ticking(1.0).__next__) as console:
        console.on_record(START)
        for number in range(12):
            console.on_record(progress(100 * number))
    shown = [line.split()[0] for line in stream.getvalue().splitlines() if "%" in line]
    assert shown == ["0", "500", "1,000"]


def test_pulses_fill_the_time_between_records_and_hide_none() -> None:
    stream = io.StringIO()
    with PlainConsole(stream, clock=ticking(1.0).__next__) as console:
        console.on_record(START)
        for number in range(1, 4):
            for second in range(11):
                console.on_record({"kind": "pulse", "env_steps": 1000 * number + second})
            console.on_record(progress(1000 * number + 500))
        for second in range(5):
            console.on_record({"kind": "pulse", "env_steps": 4000 + second})
    shown = [line.split()[0] for line in stream.getvalue().splitlines() if "%" in line]
    assert shown == ["1,500", "2,500", "3,500"]
    assert "1,005 of 10,000 env steps" in stream.getvalue().splitlines()


def test_a_record_before_any_episode_has_no_return() -> None:
    stream = io.StringIO()
    with PlainConsole(stream) as console:
        console.on_record(START)
        console.on_record(progress(episode_return_mean=None, episodes=0))
    assert "return -  0 episodes" in stream.getvalue()


def test_messages_of_events_are_shown() -> None:
    stream = io.StringIO()
    with PlainConsole(stream) as console:
        console.on_record(START)
        console.on_record({"kind": "event", "event": "failure", "message": "actor-1 failed"})
        console.on_record({"kind": "event", "event": "quiet"})
    assert stream.getvalue().splitlines()[2:] == ["actor-1 failed"]


@pytest.mark.parametrize("live", [False, True])
def test_the_last_lines_say_what_came_out_and_what_to_type(live: bool) -> None:
    stream = io.StringIO()
    console = LiveConsole(RichConsole(file=stream, width=40)) if live else PlainConsole(stream)
    with console:
        console.on_record(START)
        console.on_record(END)
    shown = stream.getvalue()
    assert (
        "mean return 18.2 over the last 100 of 250 episodes, after 10,000 env steps "
        "(40,000 frames) in 2 s (total_steps)\n"
    ) in shown
    assert "run folder: runs/a run\n" in shown
    assert "to evaluate it: repertory eval 'runs/a run'\n" in shown


def test_a_run_that_ended_before_its_first_record_still_says_where_it_lies() -> None:
    end = {"kind": "end", "reason": "interrupted", "env_steps": 0, "episode_return_mean": None}
    assert closing_lines(end, START).splitlines()[:2] == [
        "no episode was finished, after 0 env steps (interrupted)",
        "run folder: runs/a run",
    ]


def test_fewer_episodes_than_the_window_are_said_to_be_fewer() -> None:
    assert "over the last 3 of 3 episodes" in closing_lines({**END, "episodes": 3}, START)


def test_the_live_view_shows_curve_bar_and_stages() -> None:
    stream = io.StringIO()
    with LiveConsole(RichConsole(file=stream, width=100)) as console:
        console.on_record(START)
        for number in range(1, 9):
            console.on_record(progress(1000 * number, episode_return_mean=float(number)))
    shown = stream.getvalue()
    assert "8  ▁▂▃▄▅▆▇█" in shown
    assert "8,000 of 10,000 (32,000 frames)" in shown
    assert "80 %" in shown
    assert "environment 50 %, inference 25 %, learning 25 %, waiting 0 %" in shown
    assert "0.5 mean, 2 max" in shown


def test_the_live_view_needs_no_unicode() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    with LiveConsole(RichConsole(file=stream, width=100)) as console:
        console.on_record(START)
        for number in range(1, 5):
            console.on_record(progress(1000 * number, episode_return_mean=float(number)))
    stream.flush()
    assert "4  _-=#" in stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]


def test_the_terminal_is_given_back_when_something_raises() -> None:
    stream = io.StringIO()
    console = LiveConsole(RichConsole(file=stream, force_terminal=True, width=100))

    def show_and_break() -> None:
        with console:
            console.on_record(START)
            console.on_record(progress())
            raise RuntimeError("broke")

    with pytest.raises(RuntimeError, match="broke"):
        show_and_break()
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert stream.getvalue().rindex(show) > stream.getvalue().index(hide)


def test_only_a_terminal_gets_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_console(io.StringIO()), PlainConsole)
    leader, follower = pty.openpty()
    try:
        with os.fdopen(follower, "w", closefd=False) as terminal:
            assert isinstance(make_console(terminal), LiveConsole)
            monkeypatch.setenv("TERM", "dumb")
            assert isinstance(make_console(terminal), PlainConsole)
    finally:
        os.close(leader)
        os.close(follower)


@pytest.mark.parametrize(
    ("values", "width", "curve"),
    [
        ([], 5, ""),
        ([3.0], 5, "▁"),
        ([2.0, 2.0, 2.0], 5, "▁▁▁"),
        ([-1.0, 0.0, 6.0], 5, "▁▂█"),
        ([0.0, 0.0, 7.0, 7.0], 2, "▁█"),
        ([0.0, 2.0, 1.0, 1.0, 7.0, 7.0], 3, "▁▁█"),
    ],
)
def test_sparkline(values: list[float], width: int, curve: str) -> None:
    assert sparkline(values, width) == curve


def test_sparkline_is_never_wider_than_asked() -> None:
    for count in range(1, 200):
        assert len(sparkline([float(i) for i in range(count)], 48)) == min(count, 48)


def bandit_entropies(reward_scale: float, updates: int) -> Iterator[dict[str, Any]]:
    """Records of a policy gradient on a two-armed bandit with no entropy bonus."""
    logits = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=0.1)
    generator = torch.Generator().manual_seed(0)
    ones, zeros = torch.ones(1, 8), torch.zeros(1, 8)
    for update in range(updates):
        policy = Categorical(logits.expand(1, 8, 2))
        actions = policy.sample(generator)
        targets = n_step(torch.zeros(2, 8), reward_scale * actions, zeros, ones.bool())
        losses = actor_critic_losses(
            policy.log_prob(actions),
            policy.entropy(),
            zeros,
            targets,
            ones.bool(),
            value_cost=0.0,
            entropy_cost=0.0,
        )
        optimizer.zero_grad()
        (losses.total / losses.count).backward()
        optimizer.step()
        entropy = losses.entropy.item() / 8
        assert math.isfinite(entropy)
        yield progress(update, entropy=entropy, entropy_normalised=entropy / math.log(2))


def test_entropy_collapse_is_told_once_with_the_likely_levers() -> None:
    """A bandit with rewards of 10,000 and no entropy bonus is deterministic at once.

    Source: Unity-Technologies/ml-agents#281; openai/baselines#237.
    """
    watch = EntropyWatch()
    records = bandit_entropies(reward_scale=1e4, updates=200)
    warnings = [warning for record in records if (warning := watch.observe(record))]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: the policy's entropy is")
    for lever in ("--entropy-cost", "--learning-rate", "--reward-transform"):
        assert lever in warnings[0]


def test_a_policy_that_still_explores_is_not_warned_about() -> None:
    watch = EntropyWatch()
    records = list(bandit_entropies(reward_scale=1e-3, updates=50))
    assert [watch.observe(record) for record in records] == [None] * 50


@pytest.mark.parametrize(
    ("normalised", "warned"),
    [(0.0099, True), (0.0, True), (0.01, False), (1.0, False), (None, False), (math.nan, False)],
)
def test_the_limit_of_the_entropy_warning(normalised: float | None, warned: bool) -> None:
    record = progress(entropy_normalised=normalised)
    assert (EntropyWatch().observe(record) is not None) == warned


def test_a_single_action_has_no_normalised_entropy_and_no_warning() -> None:
    record = progress(entropy=0.0)
    del record["entropy_normalised"]
    assert EntropyWatch().observe(record) is None


def test_consoles_in_one_process_share_nothing() -> None:
    """Two consoles, interleaved; each tells of its own run.

    Source: ray-project/ray PR#59544.
    """
    streams = [io.StringIO(), io.StringIO()]
    consoles = [PlainConsole(stream) for stream in streams]
    for index, console in enumerate(consoles):
        console.on_record({**START, "seed": index})
    for console in consoles:
        console.on_record(progress())
    for index, stream in enumerate(streams):
        assert f"seed {index}" in stream.getvalue()
        assert stream.getvalue().count("env steps/s") == 1
