"""Checkpoints: whole or not at all, plain, safe to open, and named so that they are found."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from repertory import Agent, checkpoints, evaluate, resume
from repertory.checkpoints import (
    FORMAT_VERSION,
    KEYS,
    CheckpointError,
    CheckpointNotFound,
    check_plain,
    latest,
    load,
    load_model_state,
    make_state,
    model_state,
    point,
    resolve,
    run_folder_of,
    save,
    save_step,
    set_aside_after,
    spec_text,
)
from repertory.config import RunConfig, to_yaml
from repertory.environments.base import EnvironmentSpec
from repertory.models.networks import build_model
from repertory.optimizers import load_in_place, optimizer_for, prepare_state
from repertory.step_names import step_path
from tests.programs import run_program

SPEC = EnvironmentSpec(
    name="CartPole-v1",
    protocol="default",
    observation_space=gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32),
    action_space=gymnasium.spaces.Discrete(2),
)


def small_model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_model(SPEC, network="mlp", hidden_sizes=(8,), core="lstm", core_size=4)


def state_of(model: nn.Module, env_steps: int = 1000) -> dict[str, Any]:
    """A state as a run saves it, with an optimiser that has made a step."""
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return make_state(
        model=model_state(model),
        optimizer=optimizer.state_dict(),
        env_steps=env_steps,
        updates=25,
        algorithm="a2c",
        config=to_yaml(RunConfig(env="CartPole-v1"), "a2c"),
        spec=SPEC,
    )


def assert_equal(first: Any, second: Any) -> None:
    """Fail unless both hold the same values, tensors included."""
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_equal(first[key], second[key])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_equal(one, other)
    else:
        assert first == second


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_b103_parameters_that_are_not_finite_are_never_saved(number: float) -> None:
    """One bad gradient kills the model silently, and its checkpoint too.

    Source: pytorch/pytorch#46849; facebookresearch/habitat-lab PR#2229.
    """
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight[0, 1] = number
    with pytest.raises(CheckpointError, match="weight holds numbers that are not finite"):
        state_of(model)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    state = {
        **state_of(small_model()),
        "mine": {"best": 1.5, "names": ["a", None, True], 3: (1, 2)},
    }
    save(tmp_path / "x.pt", state)
    loaded = load(tmp_path / "x.pt")
    assert_equal(loaded, check_plain(state))
    assert set(KEYS) <= set(loaded)
    assert loaded["format_version"] == FORMAT_VERSION
    assert loaded["spec"] == spec_text(SPEC)


def test_a_loaded_optimiser_goes_on_as_the_saved_one(tmp_path: Path) -> None:
    model = small_model()
    save(tmp_path / "x.pt", state_of(model))
    other = small_model(seed=1)
    state = load(tmp_path / "x.pt")
    load_model_state(other, state["model"])
    optimizer = torch.optim.Adam(other.parameters())
    optimizer.load_state_dict(state["optimizer"])
    assert {int(entry["step"]) for entry in optimizer.state.values()} == {1}
    assert_equal(model_state(other), model_state(model))


def test_b95_what_was_written_of_a_gpu_is_read_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file remembers where its tensors were, and torch wants them back there.

    Source: pytorch/pytorch#80809; thu-ml/tianshou#681; leggedrobotics/rsl_rl#47;
    DeNA/HandyRL PR#339; allenai/allennlp PR#386.
    """
    state = state_of(small_model())
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    save(tmp_path / "x.pt", state)
    monkeypatch.undo()
    assert b"cuda:0" in (tmp_path / "x.pt").read_bytes()
    loaded = load(tmp_path / "x.pt")
    assert_equal(loaded, check_plain(state))
    for tensor in (*loaded["model"].values(), loaded["optimizer"]["state"][0]["step"]):
        assert tensor.device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_b95_what_was_written_of_a_cpu_goes_on_on_a_gpu(tmp_path: Path, name: Any) -> None:
    """Adam's `step` as a tensor on the GPU made its next step fail. Source as above."""
    config = RunConfig(env="CartPole-v1", optimizer=name)
    here, there = small_model(), small_model().cuda()
    optimizers = [optimizer_for(config, model.parameters()) for model in (here, there)]
    for optimizer in optimizers:
        prepare_state(optimizer)
    load_in_place(optimizers[1], optimizers[0].state_dict())
    for model, optimizer in zip((here, there), optimizers, strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(one, other.cpu())


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.float32(1.5), "numpy.float32"),
        (np.float64(1.5), "numpy.float64"),  # a float to isinstance
        (np.zeros(2), "numpy.ndarray"),
        (np.random.default_rng(0), "numpy.random._generator.Generator"),
        (Path("x"), "pathlib.PosixPath" if os.name == "posix" else "pathlib.WindowsPath"),
        (RunConfig(env="CartPole-v1"), "repertory.config.RunConfig"),
        (SPEC.action_space, "gymnasium.spaces.discrete.Discrete"),
        (lambda: None, "builtins.function"),
        (b"bytes", "builtins.bytes"),
        ({1, 2}, "builtins.set"),
        (torch.float32, "torch.dtype"),
    ],
)
def test_own_checkpoint_refused_by_torch(tmp_path: Path, value: object, kind: str) -> None:
    """What `weights_only` would refuse when reading is refused when writing, by its key.

    Source: nerfstudio-project/nerfstudio PR#3702; deepmodeling/deepmd-kit PR#4147;
    automl/TFM-Playground PR#52.
    """
    path = tmp_path / "x.pt"
    with pytest.raises(CheckpointError) as caught:
        save(path, {**state_of(small_model()), "best": {"of": [0.0, value]}})
    message = f"state.best.of[1] is a {kind}, which a checkpoint does not hold: make it plain"
    assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == []


def test_own_checkpoint_with_plain_generators_opens_in_a_fresh_process(tmp_path: Path) -> None:
    """Generators as plain values and the settings as text load with `weights_only`.

    Source: nerfstudio-project/nerfstudio PR#3702; deepmodeling/deepmd-kit PR#4147;
    automl/TFM-Playground PR#52.
    """
    path = tmp_path / "x.pt"
    state = {
        **state_of(small_model()),
        "best_return": float(np.float32(0.5)),
        "generators": {
            "torch": torch.Generator().manual_seed(1).get_state(),
            "numpy": np.random.default_rng(1).bit_generator.state,
        },
    }
    save(path, state)
    program = (
        "import sys, torch\n"
        "state = torch.load(sys.argv[1], weights_only=True)\n"
        "assert state['best_return'] == 0.5 and 'PCG64' in str(state['generators']['numpy'])\n"
        "assert 'discount: 0.99' in state['config']"
    )
    finished = run_program("-c", program, str(path))
    assert finished.returncode == 0, finished.stderr


def test_keys_that_are_neither_strings_nor_ints_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"state\.a has the key \(1, 2\)"):
        check_plain({"a": {(1, 2): 0}})


def test_views_do_not_drag_their_storage_along(tmp_path: Path) -> None:
    whole = torch.zeros(1_000_000)
    save(tmp_path / "x.pt", {**state_of(small_model()), "part": whole[:3].share_memory_()})
    assert (tmp_path / "x.pt").stat().st_size < 50_000
    assert load(tmp_path / "x.pt")["part"].shape == (3,)


@dataclass
class Malicious:
    """Makes a folder when it is unpickled."""

    marker: str

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("how", ["torch", "legacy torch", "pickle"])
def test_a_malicious_file_is_refused_and_not_run(tmp_path: Path, how: str) -> None:
    """Opening a stranger's checkpoint runs none of its code.

    Source: nerfstudio-project/nerfstudio PR#3702; deepmodeling/deepmd-kit PR#4147;
    automl/TFM-Playground PR#52.
    """
    path, marker = tmp_path / "x.pt", tmp_path / "marker"
    state = {**check_plain(state_of(small_model())), "evil": Malicious(str(marker))}
    if how == "pickle":
        path.write_bytes(pickle.dumps(state["evil"]))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=how == "torch")
    with pytest.raises(CheckpointError, match=r"was refused|is damaged") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert not marker.exists()
    # The file does what it is meant to where nobody looks.
    torch.load(path, weights_only=False) if how != "pickle" else pickle.loads(path.read_bytes())
    assert marker.exists()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused_in_one_line(tmp_path: Path, share: float) -> None:
    path = tmp_path / "x.pt"
    save(path, state_of(small_model()))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04", bytes(1000), b"\x80\x02}."])
def test_a_foreign_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": torch.zeros(1)}, "but no checkpoint of this package"),
        ([1, 2], "but no checkpoint of this package"),
        ({"format_version": FORMAT_VERSION}, "lacks model, optimizer, env_steps"),
        (
            {"format_version": 999, "versions": {"repertory": "9.0"}},
            "has format 999, and this version reads format 1; the version that wrote it can read "
            "it: {'repertory': '9.0'}",
        ),
    ],
)
def test_other_torch_files_are_refused_in_one_line(
    tmp_path: Path, state: object, message: str
) -> None:
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "x.pt")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint"):
        load(tmp_path / "x.pt")


def test_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_no_code_travels_in_a_checkpoint(tmp_path: Path) -> None:
    """The pickle inside names torch's own rebuilding functions and nothing of anybody's.

    Source: DLR-RM/stable-baselines3 PR#1123 (#1122); hill-a/stable-baselines#740;
    andreped/super-ml-pets#16.
    """
    path = tmp_path / "x.pt"
    state = state_of(small_model())
    save(path, {**state, "ordered": OrderedDict(a=nn.Parameter(torch.zeros(2)))})
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        pickled = archive.read(name)
    operations = list(pickletools.genops(io.BytesIO(pickled)))
    names = {str(value) for operation, value, _ in operations if operation.name == "GLOBAL"}
    assert names == {
        "torch._utils _rebuild_tensor_v2",
        "torch FloatStorage",
        # The hooks of a tensor that asks for none.
        "collections OrderedDict",
    }
    assert "STACK_GLOBAL" not in {operation.name for operation, _, _ in operations}
    assert load(path)["format_version"] == FORMAT_VERSION


def test_b98_a_stored_checkpoint_of_each_format_plays_and_goes_on(tmp_path: Path) -> None:
    """Files of earlier versions stay in use; those in `tests/data` are never written again.

    Made by `repertory train a2c --env CartPole-v1 --preset none --optimizer adam --core lstm
    --core-size 4 --hidden-sizes 4 --total-steps 400`. Source: DLR-RM/stable-baselines3 PR#1123.
    """
    stored = Path(__file__).parents[1] / "data" / f"checkpoint_format_{FORMAT_VERSION}.pt"
    agent = Agent.load(stored)
    assert agent.env_steps == 423
    assert evaluate(agent, episodes=2).to_record()["episode_length_mean"] > 1
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    shutil.copy(stored, step_path(run_dir / "checkpoints", 423))
    (run_dir / "config.yaml").write_text(load(stored)["config"])
    (run_dir / "metrics.jsonl").touch()
    assert resume(run_dir, total_steps=800).env_steps >= 800


def test_a_failed_write_leaves_the_file_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.pt"
    save(path, state_of(small_model(), env_steps=1))
    before = path.read_bytes()

    def fail(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CheckpointError, match=r"cannot write .*x\.pt: No space left on device"):
        save(path, state_of(small_model(), env_steps=2))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["x.pt"]


def test_a_write_that_is_killed_leaves_the_file_of_before(tmp_path: Path) -> None:
    """Killed after every byte is written, but before the file has its name."""
    path = tmp_path / "x.pt"
    save(path, state_of(small_model(), env_steps=1))
    program = (
        "import os, sys; from pathlib import Path; from repertory import checkpoints\n"
        "os.replace = lambda *_: os._exit(9)\n"
        "checkpoints.save(Path(sys.argv[1]), {'big': 'x' * 1_000_000})"
    )
    assert run_program("-c", program, str(path)).returncode == 9
    assert load(path)["env_steps"] == 1


def test_a_folder_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write .*: No such file or directory"):
        save(tmp_path / "no" / "x.pt", state_of(small_model()))


def test_checkpoints_are_found_by_number_and_through_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    paths = {
        steps: save_step(folder, state_of(small_model(), env_steps=steps))
        for steps in (900, 1_000, 20, 123_456_789_012_345)
    }
    assert paths[1_000].name == "step_000000001000.pt"
    assert latest(tmp_path) == paths[123_456_789_012_345]
    assert resolve(tmp_path) == paths[123_456_789_012_345]
    assert resolve(folder / "latest") == paths[123_456_789_012_345]
    assert resolve(paths[20]) == paths[20]
    point(folder, "best", paths[900])
    assert resolve(folder / "best") == paths[900]
    assert load(resolve(folder / "best"))["env_steps"] == 900


def test_latest_is_right_where_a_kill_left_the_pointer_behind(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    save_step(folder, state_of(small_model(), env_steps=1))
    newest = checkpoints.step_path(folder, 2)
    save(newest, state_of(small_model(), env_steps=2))
    (folder / ".step_000000000003.pt.77.tmp").write_bytes(b"half")
    assert latest(tmp_path) == newest


@pytest.mark.parametrize("path", ["no", "empty", "run/checkpoints/best"])
def test_what_holds_no_checkpoint_is_told_in_one_line(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "best").write_text("step_000000000001.pt\n")
    with pytest.raises(CheckpointNotFound) as caught:
        resolve(tmp_path / path)
    assert "\n" not in str(caught.value)


def test_a_pointer_stays_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.pt").write_bytes(b"x")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "best").write_text("../secret.pt\n")
    with pytest.raises(CheckpointNotFound):
        resolve(folder / "best")


def test_the_run_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000000000001.pt"
    assert run_folder_of(checkpoint) is None
    (tmp_path / "run" / "config.yaml").write_text("env: CartPole-v1\n")
    assert run_folder_of(checkpoint) == tmp_path / "run"
    assert run_folder_of(tmp_path / "run" / "step_000000000001.pt") is None
    monkeypatch.chdir(tmp_path)
    assert run_folder_of(Path("run/checkpoints/step_000000000001.pt")) == Path("run")
    monkeypatch.chdir(tmp_path / "run" / "checkpoints")
    assert run_folder_of(Path("step_000000000001.pt")) == tmp_path / "run"


@pytest.fixture
def _process_group(tmp_path: Path) -> Iterator[None]:
    """A group of one process, which DistributedDataParallel cannot be without."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    """The model in torch's wrapper; no compiler is needed to look at its names."""
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def compiled_inside(model: nn.Module) -> nn.Module:
    """The model with a compiled part, whose parameters torch renames."""
    model.torso = compiled(model.torso)
    return model


WRAPPERS: dict[str, Any] = {
    "plain": lambda model: model,
    "compiled": compiled,
    "distributed": nn.parallel.DistributedDataParallel,
    "compiled inside": compiled_inside,
    "distributed and compiled": lambda model: compiled(nn.parallel.DistributedDataParallel(model)),
}


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("written_by", WRAPPERS)
def test_key_prefixes_from_compile_or_distributed(tmp_path: Path, written_by: str) -> None:
    """Whatever wraps the module that saves, any other loads it, strictly and to equal values.

    Source: DLR-RM/stable-baselines3#1438, #2137; huggingface/pytorch-image-models PR#2003.
    """
    plain = small_model(seed=1)
    names, values = (
        list(plain.state_dict()),
        [value.clone() for value in plain.state_dict().values()],
    )
    save(
        tmp_path / "x.pt",
        {**state_of(small_model()), "model": model_state(WRAPPERS[written_by](plain))},
    )
    state = load(tmp_path / "x.pt")["model"]
    assert list(state) == names
    for wrapper in WRAPPERS.values():
        other = small_model(seed=2)
        wrapped = wrapper(other)
        load_model_state(wrapped, state)
        assert_equal(list(model_state(wrapped).values()), values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra.weight": torch.zeros(1)}, "unknown: extra.weight"),
        ({"_orig_mod.value.weight": torch.zeros(1, 4)}, "unknown: _orig_mod.value.weight"),
        ({"value.bias": None}, "missing: value.bias"),
        ({"value.bias": torch.zeros(2)}, r"value.bias is \[2\] in the checkpoint and \[1\] here"),
    ],
)
def test_parameters_of_another_model_are_refused(
    change: dict[str, torch.Tensor | None], message: str
) -> None:
    """A name too many, too few or of another shape is an error, and nothing is half loaded.

    Source: DLR-RM/stable-baselines3#1438, #2137; huggingface/pytorch-image-models PR#2003.
    """
    state = {**model_state(small_model(seed=1)), **change}
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    model = small_model(seed=2)
    before = {name: tensor.clone() for name, tensor in model_state(model).items()}
    with pytest.raises(CheckpointError, match=message):
        load_model_state(model, state)
    assert_equal(model_state(model), before)


def test_a_submodule_that_is_called_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert list(model_state(model)) == ["module.weight", "module.bias"]
    load_model_state(model, {"module.weight": torch.ones(2, 2), "module.bias": torch.ones(2)})
    assert torch.equal(model["module"].bias, torch.ones(2))


def test_the_best_is_not_lost_where_newer_checkpoints_are_set_aside(tmp_path: Path) -> None:
    """`best` named a file that a resume had given another name."""
    model = nn.Linear(2, 1)
    older, newer = (save_step(tmp_path, state_of(model, steps)) for steps in (1000, 1500))
    point(tmp_path, "best", newer)
    set_aside_after(tmp_path, older)
    assert resolve(tmp_path / "best") == resolve(tmp_path / "latest") == older
    assert (tmp_path / f"set_aside_{newer.name}").is_file()


def test_what_was_set_aside_before_stays(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    older = save_step(tmp_path, state_of(model))
    for _ in range(2):
        save_step(tmp_path, state_of(model, 2000))
        set_aside_after(tmp_path, older)
    aside = sorted(path.name for path in tmp_path.glob("set_aside_*"))
    assert aside == ["set_aside_step_000000002000.pt", "set_aside_step_000000002000_2.pt"]


def test_halves_of_files_go_with_a_resume(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    whole = save_step(tmp_path, state_of(model))
    for name in (".step_000000002000.pt.7.tmp", ".latest.7.tmp", ".best.7.tmp"):
        (tmp_path / name).write_bytes(b"half")
    set_aside_after(tmp_path, whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", whole.name]


def test_a_checkpoint_of_another_machine_is_found_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_brought", {})
    model = nn.Linear(2, 1)
    path = save_step(tmp_path, state_of(model))
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(CheckpointNotFound):
        resolve(path)
    checkpoints.bring({str(path): content})
    assert_equal(load(resolve(path))["model"], model_state(model))
