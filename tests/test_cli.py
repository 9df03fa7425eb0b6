"""The command line as a user meets it: help, mistakes as one line with exit code 2, how a failed run is reported."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mtraining_nns import cli, environment, failure, launch
from mtraining_nns.errors import UserError

RECIPE = "recipes/demo_base.yaml"


@pytest.fixture
def data(tmp_path):
    """Overrides that point the recipe at a prepared folder; only its manifest is there."""
    manifest = {"format": 1, "dtype": "uint16", "vocab_size": 300, "tokens": 1 << 16}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return f"data.path={tmp_path}", "data.eval_path=null"


def command(module: str, *words: str, **env: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", f"mtraining_nns.{module}", *words]
    return subprocess.run(line, capture_output=True, text=True, env={**os.environ, **env}, timeout=120)


def assert_one_line(done: subprocess.CompletedProcess, *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("mtraining: error: ") and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_explains_itself_with_an_example(verb, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    assert caught.value.code == 0
    assert f"mtraining {verb}" in capsys.readouterr().out.partition("\n\n")[2]  # after the usage


@pytest.mark.parametrize(
    "words, expected",
    [
        (["train.sequence_len=8"], ["train.sequence_len", "did you mean seq_len"]),
        (["train.steps=many"], ["train.steps must be int", "'many'"]),
        (["attention.pattern=spiral"], ["attention.pattern", "spiral", "vertical_slash"]),
        (["--nproc", "2", "train.seq_len=100"], ["train.seq_len must be at least 128", "got 100"]),
        (["--nproc", "4"], ["parallel.cp=2", "launched with 4"]),
        (["data.path=nowhere"], ["data.path", "nowhere", "mtraining prepare"]),
        (["parallel.zero=0", "parallel.engine=torch"], ["parallel.zero=0", "torch has 2 and 3"]),
        (["--nproc", "0"], ["--nproc", "at least 1"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_mistake_is_one_line_and_exit_code_2(words, expected, data):
    """Overrides may stand before and after --nproc; the last of a key counts."""
    assert_one_line(command("cli", "train", RECIPE, *data, *words, CUDA_VISIBLE_DEVICES=""), *expected)


def test_every_worker_checks_and_rank_0_alone_speaks(data):
    launched = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    assert_one_line(command("train", RECIPE, *data, RANK="0", **launched), "parallel.cp=2", "launched with 4")
    other = command("train", RECIPE, *data, RANK="3", **launched)
    assert (other.returncode, other.stderr) == (2, "")


def test_nproc_must_agree_with_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(UserError, match="--nproc 3, but torchrun started 2"):
        launch.launch(RECIPE, [], 3)


def test_a_recipe_asks_for_its_processes(monkeypatch):
    from mtraining_nns.recipe import Recipe

    monkeypatch.setattr(launch, "count_gpus", lambda: 8)
    assert launch.default_nproc(Recipe.load(RECIPE)) == 2
    assert launch.default_nproc(Recipe.load(RECIPE, ["parallel.cp=null", "parallel.dp=2"])) == 8
    monkeypatch.setattr(launch, "count_gpus", lambda: 0)
    assert launch.default_nproc(Recipe.load(RECIPE, ["parallel.cp=null", "parallel.dp=2"])) == 2


def test_too_few_gpus_is_a_mistake(monkeypatch, data):
    monkeypatch.setattr(launch, "count_gpus", lambda: 1)
    with pytest.raises(UserError, match="2 processes need 2 GPUs, this machine has 1.*CUDA_VISIBLE_DEVICES"):
        launch.launch(RECIPE, list(data), None)


def failed(error: Exception, seconds: float, exitcode: int = 1) -> SimpleNamespace:
    """What torch's agent makes of a worker's error file."""
    extra = {"py_callstack": f"Traceback of {error!r}", "timestamp": str(int(seconds)), "seconds": seconds}
    extra["user"] = isinstance(error, UserError)
    return SimpleNamespace(exitcode=exitcode, message={"message": str(error), "extraInfo": extra})


def test_the_first_error_is_reported_and_only_it(capsys):
    """Both in one second: torch's own order, by whole seconds, would name rank 0."""
    failures = {0: failed(RuntimeError("connection closed"), 100.9), 1: failed(IndexError("the cause"), 100.2)}
    assert launch.report(failures, "logs") == 1
    printed = capsys.readouterr().err
    assert "the cause" in printed and "rank 1 failed first" in printed and "connection closed" not in printed


def test_a_killed_worker_is_the_cause_of_its_peers_errors(capsys):
    killed = SimpleNamespace(exitcode=-9, message="Signal 9 (SIGKILL) received by PID 7", timestamp=100)
    assert launch.report({0: failed(RuntimeError("connection closed"), 100.0), 1: killed}, "logs") == 1
    assert capsys.readouterr().err.startswith("mtraining: error: rank 1 died: Signal 9 (SIGKILL)")


@pytest.mark.parametrize(("exitcode", "timestamp"), [(-9, 130), (-15, 100)])
def test_a_worker_that_the_agent_killed_after_an_error_is_no_cause(capsys, exitcode, timestamp):
    """It gives those that linger 30 s."""
    killed = SimpleNamespace(exitcode=exitcode, message="received by PID 7", timestamp=timestamp)
    assert launch.report({0: killed, 1: failed(RuntimeError("rank 0 on a hangs"), 100.0)}, "logs") == 1
    assert "rank 1 failed first" in capsys.readouterr().err


@pytest.mark.parametrize("exitcode", [UserError.exit_code, -15])  # the launcher may end a worker that lingers
def test_a_users_mistake_in_a_worker_stays_one(exitcode):
    with pytest.raises(UserError, match="^tokens.bin is truncated$"):
        launch.report({1: failed(UserError("tokens.bin is truncated"), 100.0, exitcode)}, "logs")


def test_a_worker_leaves_its_error_for_the_launcher(tmp_path, monkeypatch, capsys):
    file = tmp_path / "error.json"
    monkeypatch.setenv(environment.ERROR_FILE, str(file))
    monkeypatch.setenv(environment.PARENT, "1")
    assert failure.leave(IndexError("out of range"), rank=1) == 1
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "IndexError: out of range" and message["extraInfo"]["seconds"] > 0
    assert message["extraInfo"]["user"] is False
    assert capsys.readouterr().err == ""  # the launcher prints it


def test_the_launcher_reports_a_worker_that_fails(data, tmp_path):
    """The manifest promises tokens that are not there: both ranks refuse, one line says so, after a real start."""
    words = ["train", RECIPE, *data, f"checkpoint.dir={tmp_path}/run", "--nproc", "2", "parallel.engine=torch"]
    assert_one_line(command("cli", *words, CUDA_VISIBLE_DEVICES=""), str(tmp_path))
    assert (tmp_path / "run" / "recipe.yaml").is_file()


def test_doctor_says_what_runs_and_why():
    done = command("cli", "doctor", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    for words in (
        "torch",
        "cuda",
        "attention.backend  auto -> torch",
        "parallel.engine    auto ->",
        "flash-attn-4",
        "nnscaler",
    ):
        assert words in done.stdout, done.stdout


def test_compiled_kernels_of_somebody_else_are_not_taken(own_tmp):
    (own_tmp / "theirs").mkdir()
    folder = own_tmp / f"mtraining-{os.getuid()}"
    folder.symlink_to(own_tmp / "theirs")
    with pytest.raises(UserError, match="belongs to somebody else; set TMPDIR"):
        environment.prepare_caches()
    folder.unlink()
    environment.prepare_caches()
    assert folder.stat().st_mode & 0o777 == 0o700 and os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")


def test_parallelize_says_where_nnscaler_is_to_be_had(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["parallelize", "my.module:Model", "--world", "2", "--seq-len", "1k", "--out", str(tmp_path)]
    assert cli.main(words) == 2
    assert "nnScaler is not importable; https://github.com/msrasys/nnscaler" in capsys.readouterr().err
