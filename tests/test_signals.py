"""A signal ends a run after a checkpoint, whoever gets it, and the same command goes on to the same weights."""

import subprocess
import sys
import time
from pathlib import Path
from signal import SIGTERM, SIGUSR1

import pytest
from launched import command, run, sends
from tiny import write_recipe

from mtraining_nns import signals

STEPS = ["train.steps=10"]


def weights(folder: Path) -> bytes:
    return (folder / "run" / "hf" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    code, said = run(command(write_recipe(folder, *STEPS)))
    assert code == 0, said
    return folder


@pytest.mark.parametrize(
    ("torchrun", "act"),
    [
        (False, sends(SIGTERM)),
        (False, sends(SIGUSR1, worker=1)),
        (True, sends(SIGTERM)),
    ],
    ids=["launcher", "worker", "torchrun"],
)
def test_a_signal_saves_and_the_same_command_goes_on(straight, tmp_path, torchrun, act):
    line = command(write_recipe(tmp_path, *STEPS), torchrun=torchrun)
    code, said = run(line, "step 2/", act)
    assert code == (1 if torchrun else signals.STOPPED), said
    farewells = [text for text in said.splitlines() if text.startswith("stopped by SIG")]
    assert len(farewells) == 1 and farewells[0].endswith("; the same command goes on"), said
    assert "Traceback" not in said or torchrun, said
    (saved,) = (tmp_path / "run").glob("step-*")
    assert 2 <= int(saved.name[-6:]) < 10 and (saved / "manifest.json").is_file()
    code, said = run(line)
    assert code == 0 and f"resumed {saved}" in said, said
    assert weights(tmp_path) == weights(straight)


def test_a_second_signal_ends_at_once(tmp_path):
    line = command(write_recipe(tmp_path, "train.steps=4", "train.accumulation=400"))
    began = []

    def act(process):
        time.sleep(3)  # the step of half a minute has begun
        began.append(time.monotonic())
        sends(SIGTERM, again_after_s=signals.REPEAT_S + 0.5)(process)

    code, said = run(line, "backend", act)
    assert code == 128 + SIGTERM, said
    assert time.monotonic() - began[0] < signals.REPEAT_S + 5
    assert not list((tmp_path / "run").glob("step-*"))


def test_a_signal_while_a_run_is_built_trains_no_step(tmp_path):
    code, said = run(command(write_recipe(tmp_path), nproc=1), "engine torch", sends(SIGTERM))
    assert code == signals.STOPPED and "stopped by SIGTERM before step 1, no step was made" in said, said


def test_sums_over_ranks_name_the_signal():
    assert [signals.name(counts) for counts in ([0.0, 0.0], [0.0, 1.0], [3.0, 1.0])] == ["", "SIGUSR1", "SIGTERM"]


def test_a_signal_after_the_farewell_changes_nothing():
    program = (
        "import os, signal, time; from mtraining_nns import signals; signals.listen()\n"
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.2)\n"
        "try: signals.stop('saved')\n"
        f"except signals.Stopped: time.sleep({signals.REPEAT_S + 0.3})\n"
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert done.returncode == signals.STOPPED, done.stderr
