"""Records and where they go: the file that is the truth, TensorBoard, the run folder."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from repertory.config import ConfigError, RunConfig, from_yaml
from repertory.environments.base import EnvironmentSpec
from repertory.metrics import (
    EpisodeWindow,
    JsonlSink,
    RunFolder,
    TensorBoardSink,
    start_record,
    versions,
)
from tests.programs import run_program

SPEC = EnvironmentSpec(
    name="ALE/Pong-v5",
    protocol="dqn",
    observation_space=gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8),
    action_space=gymnasium.spaces.Discrete(6),
    action_repeat=4,
    frame_stack=4,
    image_layout="chw",
)


def progress(env_steps: int = 1000, **changes: Any) -> dict[str, Any]:
    """A `progress` record with all its keys."""
    return {
        "kind": "progress",
        "env_steps": env_steps,
        "frames": 4 * env_steps,
        "updates": 25,
        "episodes": 3,
        "wall_seconds": 2.5,
        "env_steps_per_second": 400.0,
        "episode_return_mean": -20.5,
        "episode_length_mean": 800.0,
        "policy_lag_mean": 0.5,
        "policy_lag_max": 2,
        "policy_loss": 0.125,
        "value_loss": 0.25,
        "entropy": 1.5,
        "entropy_normalised": 0.75,
        "entropy_cost": 0.01,
        "gradient_norm": 0.375,
        "learning_rate": 7e-4,
        "seconds_in": {"environment": 1.0, "inference": 0.5, "learning": 0.5, "waiting": 0.0},
        **changes,
    }


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, read as strictly as JSON is."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads from a folder: (x, value) by tag."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_every_record_is_a_line_of_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    record = progress(
        policy_loss=math.nan,
        value_loss=-math.inf,
        entropy=np.float32(1.5),
        episode_return_mean=None,
        seconds_in={"environment": math.inf},
        episode_returns=[1.0, math.nan, np.int64(3)],
    )
    sink.write(record)
    sink.write({"kind": "event", "message": 'two\nlines and "ü"'})
    sink.close()
    first, second = lines(path)
    assert first["policy_loss"] is first["value_loss"] is first["episode_return_mean"] is None
    assert first["seconds_in"] == {"environment": None}
    assert first["episode_returns"] == [1.0, None, 3]
    assert first["entropy"] == 1.5
    assert first["env_steps"] == 1000
    assert second["message"] == 'two\nlines and "ü"'
    assert math.isnan(record["policy_loss"])  # the record itself is left alone


def test_a_killed_process_leaves_every_line_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import os, sys; from pathlib import Path; from repertory.metrics import JsonlSink\n"
        "sink = JsonlSink(Path(sys.argv[1]))\n"
        "for n in range(3): sink.write({'kind': 'event', 'n': n})\n"
        "os._exit(9)"
    )
    assert run_program("-c", program, str(path)).returncode == 9
    assert [line["n"] for line in lines(path)] == [0, 1, 2]


def test_a_file_is_continued_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for number in range(2):
        sink = JsonlSink(path)
        sink.write({"kind": "event", "n": number})
        sink.close()
        sink.close()
    assert [line["n"] for line in lines(path)] == [0, 1]


def test_tensorboard_has_the_names_users_know_over_env_steps(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write({"kind": "event", "event": "start"})
    sink.write(progress(1000, replay_age=3.0))
    sink.write(progress(2000, episode_return_mean=None, policy_loss=0.5))
    sink.write({"kind": "eval", "env_steps": 2000, "episode_return_mean": 7.0, "episodes": 20})
    sink.close()
    found = scalars(tmp_path)
    assert found["charts/episodic_return"] == [(1000, -20.5)]
    assert found["charts/episodic_length"] == [(1000, 800.0), (2000, 800.0)]
    assert found["charts/SPS"] == [(1000, 400.0), (2000, 400.0)]
    assert found["charts/learning_rate"][0] == (1000, pytest.approx(7e-4))
    assert found["losses/policy_loss"] == [(1000, 0.125), (2000, 0.5)]
    assert found["losses/value_loss"][0] == (1000, 0.25)
    assert found["losses/entropy"][0] == (1000, 1.5)
    assert found["lag/mean"][0] == (1000, 0.5)
    assert found["lag/max"][0] == (1000, 2.0)
    assert found["replay/age"] == [(1000, 3.0)]
    assert found["time/environment"][0] == (1000, 1.0)
    assert found["eval/episodic_return"] == [(2000, 7.0)]


def test_budget_counted_times_the_action_repeat(tmp_path: Path) -> None:
    """Env steps are the axis everywhere, and frames stand beside them under their own name.

    Source: DLR-RM/rl-baselines3-zoo#367; ray-project/ray#4328; openai/baselines#397.
    """
    folder = RunFolder.create(RunConfig(env="ALE/Pong-v5"), "a2c", SPEC, tmp_path)
    for sink in folder.sinks():
        sink.write(progress(1000))
        sink.close()
    (record,) = lines(folder.metrics_file)
    assert (record["env_steps"], record["frames"]) == (1000, 4000)
    found = scalars(folder.tensorboard)
    assert found["charts/frames"] == [(1000, 4000.0)]
    assert {step for values in found.values() for step, _ in values} == {1000}


def test_a_missing_tensorboard_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    sink = TensorBoardSink(tmp_path / "tb")
    with pytest.warns(UserWarning, match="TensorBoard is not installed"):
        sink.write(progress(1000))
    sink.write(progress(2000))  # a second warning would be an error
    sink.close()
    assert not (tmp_path / "tb").exists()


def test_tensorboard_is_not_imported_before_the_first_record() -> None:
    program = (
        "import sys; from pathlib import Path; from repertory.metrics import TensorBoardSink\n"
        "TensorBoardSink(Path('unused')).close()\n"
        "assert not any('tensorboard' in name for name in sys.modules)"
    )
    finished = run_program("-c", program)
    assert finished.returncode == 0, finished.stderr


def test_the_episode_window_holds_the_last_episodes() -> None:
    window = EpisodeWindow(size=3)
    assert window.return_mean is None
    assert window.length_mean is None
    for number in range(1, 6):
        assert window.full == (number > 3)
        window.add(float(number), 10 * number)
    assert window.episodes == 5
    assert window.return_mean == 4.0
    assert window.length_mean == 40.0


def test_a_run_folder_says_what_ran_where(tmp_path: Path) -> None:
    config = RunConfig(env="ALE/Pong-v5", seed=7, hidden_sizes=(3,))
    folder = RunFolder.create(config, "a2c", SPEC, tmp_path / "new" / "runs")
    name, algorithm, seed, _ = folder.path.name.split("__")
    assert (name, algorithm, seed) == ("ALE_Pong-v5", "a2c", "7")
    assert folder.path.parent == tmp_path / "new" / "runs"
    assert from_yaml(RunConfig, folder.config_file.read_text()) == config
    assert "algorithm: a2c\n" in folder.config_file.read_text()
    assert Path(sys.argv[0]).name in (folder.path / "command.txt").read_text()
    meta = json.loads((folder.path / "meta.json").read_text())
    assert meta["environment"]["protocol"] == "dqn"
    assert meta["environment"]["action_repeat"] == 4
    assert meta["versions"] == versions()
    assert meta["versions"]["gymnasium"] == gymnasium.__version__
    assert meta["machine"]["num_cores"] >= 1
    assert {path.name for path in folder.path.iterdir()} == {
        *("config.yaml", "command.txt", "meta.json", "checkpoints", "eval"),
    }


def test_the_commit_and_whether_files_differ_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Above everything a test may run in there could be a repository of somebody's.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    config = RunConfig(env="ALE/Pong-v5")

    def state() -> Any:
        folder = RunFolder.create(config, "a2c", SPEC, tmp_path / "ignored")
        return json.loads((folder.path / "meta.json").read_text())["git"]

    assert state() is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / ".gitignore").write_text("ignored\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True, timeout=20)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert state() == {"commit": head.stdout.strip(), "dirty": False}
    (tmp_path / ".gitignore").write_text("ignored\n# changed\n")
    assert state() == {"commit": head.stdout.strip(), "dirty": True}


def test_runs_that_start_in_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    config = RunConfig(env="ALE/Pong-v5")
    folders: list[Path] = []
    barrier = threading.Barrier(4)

    def create() -> None:
        barrier.wait()
        folders.append(RunFolder.create(config, "a2c", SPEC, tmp_path).path)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 4


def test_a_named_folder_is_taken_only_if_nothing_is_in_it(tmp_path: Path) -> None:
    config = RunConfig(env="ALE/Pong-v5", run_dir=tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    assert RunFolder.create(config, "a2c", SPEC).path == tmp_path / "mine"
    before = (tmp_path / "mine" / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match="mine already holds files"):
        RunFolder.create(config, "batched_a2c", SPEC)
    assert (tmp_path / "mine" / "config.yaml").read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="/dev/null cannot hold a folder anywhere else")
@pytest.mark.parametrize("below", ["named", "default"])
def test_a_folder_that_cannot_be_made_is_told_in_one_line(below: str) -> None:
    impossible = Path(os.devnull) / "runs"
    run_dir = impossible if below == "named" else None
    config = RunConfig(env="ALE/Pong-v5", run_dir=run_dir)
    with pytest.raises(ConfigError, match="cannot make the run folder /dev/null/runs: ") as caught:
        RunFolder.create(config, "a2c", SPEC, impossible)
    assert "\n" not in str(caught.value)


def test_the_start_of_a_run_is_a_record(tmp_path: Path) -> None:
    config = RunConfig(env="ALE/Pong-v5", seed=3, network="nature", total_steps=99)
    folder = RunFolder.create(config, "a2c", SPEC, tmp_path)
    record = start_record(config, "a2c", SPEC, folder)
    assert json.loads(json.dumps(record)) == {
        "kind": "event",
        "event": "start",
        "algorithm": "a2c",
        "env": "ALE/Pong-v5",
        "protocol": "dqn",
        "network": "nature",
        "seed": 3,
        "total_steps": 99,
        "action_repeat": 4,
        "repeat_action_probability": 0.0,
        "run_dir": str(folder.path),
    }


def test_runs_in_one_process_share_nothing(tmp_path: Path) -> None:
    """Two runs with other settings, interleaved: folders, files and counts stay apart.

    Source: ray-project/ray PR#59544.
    """
    configs = [RunConfig(env="ALE/Pong-v5", seed=seed, learning_rate=seed) for seed in (1, 2)]
    folders = [RunFolder.create(config, "a2c", SPEC, tmp_path) for config in configs]
    sinks = [folder.sinks() for folder in folders]
    windows = [EpisodeWindow(), EpisodeWindow()]
    for turn in range(3):
        for index in (0, 1):
            windows[index].add(100.0 * index + turn, 1)
            record = progress(turn, episode_return_mean=windows[index].return_mean)
            for sink in sinks[index]:
                sink.write(record)
    for sink in [*sinks[0], *sinks[1]]:
        sink.close()
    for index, folder in enumerate(folders):
        assert from_yaml(RunConfig, folder.config_file.read_text()) == configs[index]
        means = [100.0 * index, 100.0 * index + 0.5, 100.0 * index + 1.0]
        assert [line["episode_return_mean"] for line in lines(folder.metrics_file)] == means
        shown = scalars(folder.tensorboard)["charts/episodic_return"]
        assert shown == list(enumerate(means))
