"""Checkpoints: complete or passed over, resumed to the bit, read by any number of ranks."""

import contextlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import launched
import pytest
import torch
from distributed import run_workers
from tiny import prepare, write_recipe

from mtraining_nns import checkpoint, resume, run_lock
from mtraining_nns.errors import UserError
from mtraining_nns.recipe import Recipe

# 7 samples and 2 a step: the epoch ends inside step 3. A checkpoint after steps 2, 4 and 6.
OVERRIDES = ["train.steps=6", "checkpoint.every=2", "checkpoint.keep=3", "train.accumulation=2"]


def run_engine(rank, world_size, path, overrides, killed_at=None):
    """Summary of a run; killed_at: rank 0 is killed when all data of that step's checkpoint is written."""
    from mtraining_nns import engines

    publish = checkpoint._publish

    def publish_or_die(partial, final):
        if killed_at is not None and final.endswith(f"{killed_at:06d}"):
            os.kill(os.getpid(), signal.SIGKILL)
        publish(partial, final)

    checkpoint._publish = publish_or_die
    return engines.train(Recipe.load(path, overrides).resolve(world_size))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """(folder, summary) of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, run_workers(run_engine, 2, write_recipe(folder, tokens=7 * 256), OVERRIDES)[0]


@pytest.fixture
def run(straight, tmp_path):
    """A copy of the straight run's checkpoints to damage."""
    return shutil.copytree(straight[0] / "run", tmp_path / "run")


def test_a_kill_in_the_middle_of_a_save_costs_only_that_save(straight, tmp_path):
    path = write_recipe(tmp_path, tokens=7 * 256)
    with pytest.raises(RuntimeError, match="died without a result|Connection closed by peer"):
        run_workers(run_engine, 2, path, OVERRIDES, 4)
    left = sorted(name for name in os.listdir(tmp_path / "run") if "step" in name)
    assert left == [".step-000004.partial", "step-000002"]
    resumed = run_workers(run_engine, 2, path, OVERRIDES)[0]
    assert resumed["losses"] == straight[1]["losses"]
    weights = [(folder / "run" / "hf" / "model.safetensors").read_bytes() for folder in (tmp_path, straight[0])]
    assert weights[0] == weights[1]
    assert not [name for name in os.listdir(tmp_path / "run") if name.endswith(".partial")]


def test_moments_in_host_memory_change_nothing_and_may_come_and_go(straight, tmp_path):
    """To the bit, also where a run goes on from a checkpoint of the other kind."""
    path, host = write_recipe(tmp_path, tokens=7 * 256), [*OVERRIDES, "parallel.offload=true"]
    assert run_workers(run_engine, 2, path, host)[0]["losses"] == straight[1]["losses"]
    for overrides in (OVERRIDES, host):
        shutil.rmtree(tmp_path / "run" / "step-000006")
        resumed = run_workers(run_engine, 2, path, overrides)[0]
        assert resumed["losses"] == straight[1]["losses"]
        weights = [(folder / "run" / "hf" / "model.safetensors").read_bytes() for folder in (tmp_path, straight[0])]
        assert weights[0] == weights[1]


def test_a_truncated_or_missing_file_passes_a_checkpoint_over(run, capsys):
    shard = sorted((run / "step-000006").glob("shard-*"))[3]
    os.truncate(shard, shard.stat().st_size - 1)
    assert resume.latest(str(run), tell=print).path.endswith("step-000004")
    assert f"{shard.name} has {shard.stat().st_size} bytes instead of" in capsys.readouterr().out
    (run / "step-000004" / "trainer.json").unlink()
    assert resume.latest(str(run), tell=print).path.endswith("step-000002")
    assert "trainer.json is missing" in capsys.readouterr().out
    (run / "step-000002" / "manifest.json").unlink()
    assert resume.latest(str(run), tell=print) is None


def test_which_checkpoint_a_recipe_means(run, tmp_path):
    def find(folder, means):
        return resume.find(str(folder), means, "torch", print)

    assert find(run, "auto").path.endswith("step-000006")
    assert find(tmp_path / "none", "auto") is None
    assert find(tmp_path / "none", "never") is None
    assert find(tmp_path / "none", str(run)).path.endswith("step-000006")
    assert find(tmp_path / "none", f"{run}/step-000002/").path == f"{run}/step-000002"
    with pytest.raises(UserError, match="holds step-000006 of another run"):
        find(run, "never")
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        find(run, str(tmp_path))
    with pytest.raises(UserError, match="step-000002 is older than step-000006"):
        find(run, str(run / "step-000002"))
    (run / "step-000002" / "manifest.json").unlink()
    with pytest.raises(UserError, match="step-000002 is not complete: no readable manifest.json"):
        find(run, str(run / "step-000002"))


def test_the_newest_of_both_engines_counts_and_of_equals_ones_own(run, tmp_path):
    def find(means, engine):
        return resume.find(str(run), means, engine, print).name

    for step, file in ((4, "complete.json"), (6, "complete.json")):
        folder = run / "nnscaler" / "states" / f"0000-{step:04d}"
        folder.mkdir(parents=True)
        (folder / file).write_text('{"step": 0, "files": {}}')
    assert (find("auto", "torch"), find("auto", "nnscaler")) == ("step-000006", "0000-0006")
    assert find(str(run / "nnscaler" / "states" / "0000-0006"), "torch") == "0000-0006"
    shutil.rmtree(run / "step-000006")
    assert find("auto", "torch") == "0000-0006"
    (run / "nnscaler" / "states" / "0000-0007").mkdir()
    assert find("auto", "torch") == "0000-0006", "without its list a checkpoint does not count"
    found = resume.latest(str(run))
    assert found.run == str(run) and resume.latest(f"{run}/step-000004") is None


def recorded(run: Path, step: int, engine: str = "torch", means: str = "auto") -> Path:
    """A complete checkpoint of a run whose recipe says checkpoint.resume=means."""
    name = f"step-{step:06d}" if engine == "torch" else f"nnscaler/states/0000-{step:04d}"
    folder = run / name
    folder.mkdir(parents=True)
    path = write_recipe(run.parent / f"{run.name}-recipe", f"checkpoint.resume={means}")
    shutil.copy(path, folder / "recipe.yaml")
    (folder / resume.LISTS[engine]).write_text('{"files": {}}')
    return folder


def test_a_run_that_began_at_another_ones_checkpoint_goes_on(tmp_path):
    start = recorded(tmp_path / "a", 4)
    assert resume.find(str(tmp_path / "b"), str(start), "torch").path == str(start)
    recorded(tmp_path / "b", 6, means=str(start))
    assert resume.find(str(tmp_path / "b"), f"{start}/", "torch").name == "step-000006"
    recorded(tmp_path / "b", 8, "nnscaler", means=str(start))
    assert resume.find(str(tmp_path / "b"), str(start), "torch").name == "0000-0008"
    recorded(tmp_path / "b", 9)
    with pytest.raises(UserError, match="step-000004 is older than step-000009"):
        resume.find(str(tmp_path / "b"), str(start), "torch")


def test_keep_counts_both_engines(tmp_path):
    for step in (2, 4):
        recorded(tmp_path / "run", step, "nnscaler")
    for step in (6, 8):
        recorded(tmp_path / "run", step)
    recorded(tmp_path / "run", 5, "nnscaler")
    (tmp_path / "run" / "nnscaler" / "states" / "0000-0005" / "complete.json").unlink()
    resume.prune(str(tmp_path / "run"), 8, keep=3)
    left = {found.name for found in resume.steps(str(tmp_path / "run"), "torch")}
    assert left == {"step-000008", "step-000006", "0000-0005", "0000-0004"}
    resume.prune(str(tmp_path / "run"), 8, keep=1, but="nnscaler")
    assert resume.latest(str(tmp_path / "run")).name == "step-000008"


def test_a_second_run_in_a_folder_is_refused(tmp_path):
    path = write_recipe(tmp_path)
    (tmp_path / "run").mkdir()
    with run_lock.held(str(tmp_path / "run"), "checkpoint.dir"):
        code, said = launched.run(launched.command(path, nproc=1))
        assert code == 2 and f"run is that of a run at work (process {os.getpid()} on " in said, said
        assert not list((tmp_path / "run").glob("step-*"))
    code, said = launched.run(launched.command(path, nproc=1))
    assert code == 0, said
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file cannot be written .*; take another folder"):
        run_lock.held(str(tmp_path / "file"), "checkpoint.dir").__enter__()


def whole_state(rank, world_size, path, source):
    """Every tensor of a checkpoint, gathered from the ranks that read it, and the optimizer's step counters."""
    from mtraining_nns.engines.torch import build_sharded
    from mtraining_nns.engines.world import start
    from mtraining_nns.optim import build_optimizer

    recipe = Recipe.load(path, ["parallel.cp=null"]).resolve(world_size)
    with start(recipe.parallel) as world:
        model, _ = build_sharded(recipe, world, load=False)
        state = checkpoint.State(model.lm, build_optimizer(model, recipe.train))
        trainer = checkpoint.load(source, state)
        steps = {float(entry["step"]) for entry in state.optimizer.state.values()}
        return {name: x.detach().full_tensor() for name, x in state.tensors().items()}, steps, trainer["step"]


@pytest.mark.parametrize("world", [1, 3, 4])
def test_another_world_size_reads_the_same_state(straight, world):
    path, source = str(straight[0] / "recipe.yaml"), str(straight[0] / "run" / "step-000004")
    expected, *_ = run_workers(whole_state, 2, path, source)[0]
    for found, steps, step in run_workers(whole_state, world, path, source):
        assert steps == {4.0} and step == 4
        assert found.keys() == expected.keys() and any(name.startswith("exp_avg_sq/") for name in found)
        assert all(torch.equal(x, expected[name]) for name, x in found.items())


def small_state():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return checkpoint.State(model, optimizer)


ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@ALONE
def test_only_the_newest_stay_and_later_ones_of_another_run_are_not_touched(tmp_path):
    state, files = small_state(), {checkpoint.TRAINER: '{"step": 1}'}
    for step in (9, 1, 2, 3):
        checkpoint.save(str(tmp_path), step, state, files=files, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-000002", "step-000003", "step-000009"]


@ALONE
def test_a_failed_save_leaves_the_older_ones(tmp_path, monkeypatch):
    state, files = small_state(), {checkpoint.TRAINER: '{"step": 1}'}
    checkpoint.save(str(tmp_path), 1, state, files=files, keep=1)
    monkeypatch.setattr(checkpoint, "_publish", lambda *paths: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoint.save(str(tmp_path), 2, state, files=files, keep=1)
    assert resume.latest(str(tmp_path)).path.endswith("step-000001")


def what_it_says(rank, world_size, path, overrides):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        run_engine(rank, world_size, path, overrides)
    return text.getvalue()


def test_a_resumed_run_says_what_changed_and_refuses_another_model(straight):
    path = str(straight[0] / "recipe.yaml")
    text = run_workers(what_it_says, 2, path, [*OVERRIDES, "train.lr=0.5"])[0]
    assert "after step 6; train.lr 0.001 -> 0.5" in text
    with pytest.raises(RuntimeError, match="UserError: .* is of another model .model.max_position_embeddings"):
        run_workers(run_engine, 2, path, [*OVERRIDES, "model.max_position_embeddings=999"])


def test_a_damaged_file_of_the_right_size_is_one_line(run, tmp_path):
    shard = next((run / "step-000006").glob("shard-00001-*.safetensors"))
    with open(shard, "r+b") as stream:
        stream.write(bytes(64))
    path = write_recipe(tmp_path, tokens=7 * 256)
    with pytest.raises(RuntimeError, match="UserError: .*step-000006 cannot be read, remove it or take another: "):
        run_workers(run_engine, 1, path, OVERRIDES)


def test_a_save_that_fails_says_so_and_keeps_the_earlier_ones(run, monkeypatch):
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    lm = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(lm.parameters())
    lm(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    def no_space(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", no_space)
    with pytest.raises(UserError, match="step-000008 failed, earlier checkpoints are kept: OSError: No space left"):
        checkpoint.save(str(run), 8, checkpoint.State(lm, optimizer), files={}, keep=2)
    assert resume.latest(str(run)).path.endswith("step-000006")


def test_damaged_checkpoints_do_not_count_among_those_that_are_kept(tmp_path):
    state, files = small_state(), {checkpoint.TRAINER: '{"step": 1}'}
    for step in (1, 2, 3):
        checkpoint.save(str(tmp_path), step, state, files=files, keep=3)
    (tmp_path / "step-000003" / checkpoint.TRAINER).unlink()
    checkpoint.save(str(tmp_path), 4, state, files=files, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-000002", "step-000003", "step-000004"]


SHELL = ["unshare", "-rm", "sh", "-c"]  # a user namespace in which this process may mount
MEGABYTES = 6  # a checkpoint of the tiny model has 2.4


@pytest.mark.skipif(
    subprocess.run([*SHELL, "mount -t tmpfs none /mnt"], capture_output=True).returncode != 0,
    reason="this machine permits no mounts",
)
def test_a_full_disk_is_one_line_and_leaves_the_earlier_checkpoints(tmp_path):
    """The third save does not fit; with room, the same command goes on."""
    path, disk, kept = write_recipe(tmp_path, "checkpoint.every=1", "checkpoint.keep=9"), tmp_path / "run", "kept"
    disk.mkdir()
    train = shlex.join([sys.executable, "-m", "mtraining_nns.cli", "train", path, "--nproc", "2"])
    mount = f"mount -t tmpfs -o size={MEGABYTES}m none {disk}"
    small = f"{mount} && {{ {train}; code=$?; cp -r {disk} {tmp_path / kept}; exit $code; }}"
    done = subprocess.run([*SHELL, small], capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and done.stderr.count("mtraining: error: ") == 1, done.stderr
    assert "step-000003 failed, earlier checkpoints are kept: " in done.stderr and "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr or "os error 28" in done.stderr, done.stderr
    left = sorted(name for name in os.listdir(tmp_path / kept) if "step" in name)
    assert left == ["step-000001", "step-000002"]
    assert resume.latest(str(tmp_path / kept)).path.endswith("step-000002")


def test_changed_data_is_never_trained_on_unasked(run, tmp_path):
    path = write_recipe(tmp_path, tokens=7 * 256)
    shutil.rmtree(tmp_path / "data")
    prepare(tmp_path / "data", 7 * 256, seed=1)
    with pytest.raises(RuntimeError, match="UserError: data.path=.* holds other tokens than .*step-000006"):
        run_workers(run_engine, 1, path, OVERRIDES)


def test_held_out_data_that_does_not_fit_is_found_before_the_first_step(tmp_path):
    short = prepare(tmp_path / "short", 8)
    path = write_recipe(tmp_path, f"data.eval_path={short}")
    with pytest.raises(RuntimeError, match="UserError: .*8 tokens, less than one sequence"):
        run_workers(run_engine, 1, path, OVERRIDES)
    assert not list((tmp_path / "run").glob("step-*"))
