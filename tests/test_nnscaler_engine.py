"""A recipe on the nnScaler engine is the recipe on the torch engine: losses, norms, held-out losses, exports."""

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import launched
import pytest
import torch
from safetensors.torch import load_file
from tiny import pack, prepare, save_tokenizer, write_recipe

from mtraining_nns import resume
from mtraining_nns.errors import UserError
from mtraining_nns.export import export

pytestmark = [
    pytest.mark.nnscaler,
    pytest.mark.skipif(importlib.util.find_spec("nnscaler") is None, reason="nnScaler is not importable"),
]
RUN = ["train.steps=4", "train.seq_len=384", "train.recompute=true", "train.accumulation=2"]
RUN += ["log.eval_every=2", "log.niah_every=2"]


def train(folder: Path, name: str, world: int, *overrides: str, gpus: str = "") -> dict:
    """Summary of a run of the recipe of `folder` in folder/name, on the CPU unless `gpus` names devices."""
    found = start(folder, name, world, *overrides, gpus=gpus)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return json.loads((folder / name / "summary.json").read_text(encoding="utf-8"))


def start(folder: Path, name: str, world: int, *overrides: str, gpus: str = ""):
    line = command(folder, name, "--standalone", f"--nproc-per-node={world}", overrides=overrides)
    return subprocess.run(line, **PIPED, env=visible(gpus), cwd=folder, timeout=400)


PIPED = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def visible(gpus: str = "") -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "1"}


def command(folder: Path, name: str, *launch: str, overrides=()) -> list[str]:
    where = [f"checkpoint.dir={folder / name}", f"data.eval_path={folder / 'held_out'}"]
    train = ["-m", "mtraining_nns.train", str(folder / "recipe.yaml"), *RUN, *where, *overrides]
    return [sys.executable, "-m", "torch.distributed.run", *launch, *train]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "hf" / "model.safetensors")


def assert_same(found: dict, expected: dict, tolerance: float) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert len(set(found["losses"])) == len(found["losses"])
    tags = {tag for tag in expected if tag.startswith(("train/", "eval", "attention/"))}
    assert tags == {tag for tag in found if tag.startswith(("train/", "eval", "attention/"))}
    assert {"eval_by_position/dense_from_0000256", "eval_by_position/sparse_from_0000001"} <= tags
    assert {"train/grad_norm", "eval/loss_dense", "eval/loss_sparse", "eval/niah_loss", "attention/density"} <= tags
    if found["world"] != expected["world"]:
        tags = {tag for tag in tags if not tag.startswith("attention/")}  # they tell of the busiest ring
    for tag in tags:
        assert found[tag] == pytest.approx(expected[tag], rel=10 * tolerance), tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nnscaler")
    prepare(folder / "held_out", 384 * 5, seed=1)
    write_recipe(folder, tokens=384 * 20)
    save_tokenizer(folder / "data")
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    return train(folder, "torch", 2)


@pytest.mark.parametrize(
    ("world", "split"),
    [
        (2, ["parallel.zero=2", "attention.keep_output=true"]),
        (2, ["parallel.zero=0", "train.recompute=false"]),
        (1, ["parallel.zero=2", "parallel.cp=1"]),
        (4, ["parallel.zero=1", "parallel.cp=2", "parallel.dp=2", "train.accumulation=1"]),
    ],
)
def test_the_engines_agree(folder, expected, world, split):
    name = f"nnscaler-{world}-{split[0][-1]}"
    assert_same(train(folder, name, world, "parallel.engine=nnscaler", *split), expected, 1e-5)
    (code,) = (folder / name / "nnscaler" / "code").rglob("gencode0.py")
    assert "chunk=48" in code.read_text(), "train.loss_chunk of the recipe"
    ours, theirs = weights(folder / name), weights(folder / "torch")
    assert ours.keys() == theirs.keys() and ours.keys() > {"lm_head.weight"}
    for key, weight in ours.items():
        assert (weight - theirs[key]).norm() < 1e-5 * theirs[key].norm(), key


def test_the_engines_read_the_same_mix(folder):
    """A stream and a packed folder of which a sequence is half empty, held-out data with padding; and no other data."""
    short = folder / "packed"
    pack(prepare(short, 384 * 3 - 140, seed=2), 384)
    save_tokenizer(short)
    data = ["data.path=null", f"data.mix={{{folder / 'data'}: 2, {short}: 1}}", f"data.eval_path={short}"]
    expected = train(folder, "mixed-torch", 2, *data)
    name, nnscaler = "mixed-nnscaler", ["parallel.engine=nnscaler", "checkpoint.every=2"]
    found = train(folder, name, 2, *data, *nnscaler)
    assert_same(found, expected, 1e-5)
    assert found["data"] == expected["data"] and found["data"][str(short)]["sequences"] == 3
    (folder / name / "nnscaler" / "states" / "0000-0004" / "complete.json").unlink()
    other = start(folder, name, 2, *data, *nnscaler, f"data.mix.{short}=2")
    assert other.returncode != 0
    assert f"data.mix holds other tokens or shares than {folder / name} was trained on" in other.stdout + other.stderr
    again = start(folder, name, 2, *data, *nnscaler)
    assert again.returncode == 0 and "3 of 8 sequences" in again.stdout, again.stdout + again.stderr
    assert_same(json.loads((folder / name / "summary.json").read_text()), expected, 1e-5)


def test_two_machines_share_a_folder(folder, expected):
    """Two launchers that meet at an address, as on two machines; the generated code lies in the shared folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    launch = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}"]
    line = command(folder, "machines", *launch, overrides=["parallel.engine=nnscaler"])
    started = [subprocess.Popen(line, **PIPED, env=visible(), cwd=folder) for _ in range(2)]
    said = [process.communicate(timeout=400) for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(
        text[-3000:] for pair in said for text in pair
    )
    assert_same(json.loads((folder / "machines" / "summary.json").read_text()), expected, 1e-5)


def test_an_earlier_step_is_exported_without_the_data(folder, expected, tmp_path):
    """The last step again, and the one before it; then a folder that a kill has left incomplete."""
    train(folder, "exported", 2, "parallel.engine=nnscaler", "checkpoint.every=2")
    run, hidden = folder / "exported", folder / "elsewhere"
    (folder / "data").rename(hidden)
    try:
        export(str(run), str(tmp_path / "last"))
        export(str(run / "nnscaler" / "states" / "0000-0002"), str(tmp_path / "second"))
    finally:
        hidden.rename(folder / "data")
    for name in ("model.safetensors", "config.json", "generation_config.json", "mtraining.json", "tokenizer.json"):
        assert (tmp_path / "last" / name).read_bytes() == (run / "hf" / name).read_bytes(), name
    second = load_file(tmp_path / "second" / "model.safetensors")
    assert not torch.equal(second["lm_head.weight"], weights(run)["lm_head.weight"])
    (run / "nnscaler" / "states" / "0000-0002" / "config.json").unlink()
    with pytest.raises(UserError, match="0000-0002 is not complete: config.json is missing"):
        export(str(run / "nnscaler" / "states" / "0000-0002"), str(tmp_path / "none"))


def test_a_run_goes_on_where_it_was_stopped_and_on_another_number_of_ranks(folder, expected):
    """The newest checkpoint is not complete, as after a kill; every later step is as in the straight run."""
    name = "resumed"
    nnscaler = ["parallel.engine=nnscaler", "checkpoint.every=2"]
    train(folder, name, 2, *nnscaler)
    states = folder / name / "nnscaler" / "states"
    for world, split in ((2, []), (4, ["parallel.cp=2", "parallel.dp=2", "train.accumulation=1"])):
        (states / "0000-0004" / "complete.json").unlink()
        again = start(folder, name, world, *nnscaler, *split)
        assert again.returncode == 0 and "resumed after step 2" in again.stdout, again.stdout + again.stderr
        assert_same(json.loads((folder / name / "summary.json").read_text()), expected, 1e-5)


def test_bf16_and_tied_weights(folder):
    """bf16 weights and compute, fp32 sums and optimizer, as far from fp32 as the torch engine's."""
    tied = ["model.init.tie_word_embeddings=true", "train.lr=1e-3", "train.seq_len=256"]
    exact, far = train(folder, "fp32-tied", 2, *tied, "parallel.engine=nnscaler")["losses"], {}
    for engine in ("torch", "nnscaler"):
        found = train(folder, f"bf16-{engine}", 2, *tied, "train.precision=bf16", f"parallel.engine={engine}")
        far[engine] = max(abs(a / b - 1) for a, b in zip(found["losses"], exact, strict=True))
        assert "lm_head.weight" not in weights(folder / f"bf16-{engine}")
    assert 0 < far["nnscaler"] < 1.5 * far["torch"] < 2e-2, far


def test_moments_in_host_memory_change_nothing_and_may_come_and_go(folder, expected):
    """Both precisions; the second half of a run keeps them where the first half did not."""
    host = ["parallel.engine=nnscaler", "parallel.offload=true"]
    assert_same(train(folder, "host", 2, *host, "parallel.zero=1"), expected, 1e-5)
    bf16 = ["parallel.engine=nnscaler", "train.precision=bf16"]
    exact = train(folder, "no-host-bf16", 2, *bf16)
    train(folder, "host-bf16", 2, *bf16, "checkpoint.every=2")
    states = folder / "host-bf16" / "nnscaler" / "states"
    (states / "0000-0004" / "complete.json").unlink()
    again = train(folder, "host-bf16", 2, *bf16, "checkpoint.every=2", "parallel.offload=true")
    assert again["losses"] == exact["losses"]
    assert all(torch.equal(w, weights(folder / "no-host-bf16")[k]) for k, w in weights(folder / "host-bf16").items())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("pattern", ["vertical_slash", "dense"])
def test_the_engines_agree_on_two_gpus(folder, pattern):
    on_gpus = ["train.precision=bf16", "train.seq_len=512", "attention.block=64", f"attention.pattern={pattern}"]
    on_gpus.append("train.lr=1e-4")  # two runs of one engine differ by 1e-3 after steps of 1e-3
    ours, theirs = (
        train(folder, f"gpu-{pattern}-{engine}", 2, *on_gpus, f"parallel.engine={engine}", gpus="0,1")
        for engine in ("nnscaler", "torch")
    )
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
    assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-2)
    assert ours["memory/peak_gb"] == pytest.approx(theirs["memory/peak_gb"], rel=0.5)


ONCE = ["parallel.engine=nnscaler", "train.steps=1", "log.eval_every=0", "log.niah_every=0"]


def test_code_of_another_run_is_not_run(folder, expected):
    """Another pattern, then another length, in the folder of a finished run; then the first again, without tracing."""
    first = train(folder, "stale", 2, *ONCE)
    code = folder / "stale" / "nnscaler" / "code"
    made = {path.name for path in code.iterdir()}
    for change in ("attention.pattern=dense", "train.seq_len=128"):
        shutil.rmtree(folder / "stale" / "nnscaler" / "states")
        found = train(folder, "stale", 2, *ONCE, change)
        assert (found["attention/density"] == 1.0) == ("dense" in change)
        assert (found["tokens_per_step"] == first["tokens_per_step"]) == ("seq_len" not in change)
    assert len(list(code.iterdir())) == 3
    shutil.rmtree(folder / "stale" / "nnscaler" / "states")
    times = {name: (code / name).stat().st_mtime for name in made}
    assert train(folder, "stale", 2, *ONCE)["losses"] == first["losses"]
    assert {name: (code / name).stat().st_mtime for name in made} == times


def test_weights_of_another_run_and_half_written_code_are_not_used(folder):
    first = train(folder, "seeds", 2, *ONCE)
    shutil.rmtree(folder / "seeds" / "nnscaler" / "states")
    for file in (folder / "seeds" / "nnscaler" / "code").rglob("gencode1.py"):
        file.unlink()  # as a kill while code is written leaves it
    assert train(folder, "seeds", 2, *ONCE)["losses"] == first["losses"]
    shutil.rmtree(folder / "seeds" / "nnscaler" / "states")
    assert train(folder, "seeds", 2, *ONCE, "train.seed=7")["losses"] != first["losses"]


def test_a_loss_that_is_not_finite_ends_the_run_before_the_update(folder):
    found = start(folder, "nan", 2, "parallel.engine=nnscaler", "train.lr=1e30", "train.clip=1e30")
    said = found.stdout + found.stderr
    assert found.returncode != 0 and re.search(
        r"step 1: loss \S+, gradient norm \S+, samples \[\d+, \d+\] of .*, batch [0-9a-f]{16}; ", said
    )
    assert re.search(r"first not finite: (weight|gradient of) (model|lm_head)\.", said), said


def test_a_checkpoint_to_go_on_from_is_checked_before_the_model_is_built(folder, expected):
    found = start(folder, "unread", 2, "parallel.engine=nnscaler", f"checkpoint.resume={folder / 'data'}")
    assert found.returncode != 0 and f"{folder / 'data'} holds no complete checkpoint" in found.stdout + found.stderr


def test_stock_nnscaler_train_runs_the_resolved_file(folder, expected):
    """The same losses, and code without processes."""
    data = [f"checkpoint.dir={folder / 'stock'}", f"data.eval_path={folder / 'held_out'}"]
    resolve = ["mtraining_nns.cli", "resolve", str(folder / "recipe.yaml"), "--nproc", "2"]

    def call(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", *words], **PIPED, env=visible(), cwd=folder, timeout=400)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout

    call(*resolve, "--out", "stock.yaml", *RUN, *data)
    call("nnscaler.cli.train", "-f", "stock.yaml", "--run_mode", "compile")
    assert len(list((folder / "stock" / "nnscaler" / "code").rglob("gencode*.py"))) == 2
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    told = call(*launch, "nnscaler.cli.train", "-f", "stock.yaml")
    losses = [f"step {n}/4  loss {loss:.4f}" for n, loss in enumerate(expected["losses"], 1)]
    assert all(line in told for line in losses), told


TURNS = [  # engine, processes, steps done in the end, what the recipe changes
    ("torch", 2, 2, []),
    ("nnscaler", 2, 4, ["train.lr=5e-4", "train.weight_decay=0.3"]),
    ("torch", 1, 6, ["parallel.cp=1", "train.lr=5e-4", "train.weight_decay=0.3"]),
    ("nnscaler", 2, 8, ["train.betas=[0.8, 0.9]"]),
]


@pytest.mark.parametrize(
    ("precision", "tied", "tolerance"), [("fp32", "true", 1e-5), ("bf16", "false", 2e-3)], ids=["fp32 tied", "bf16"]
)
def test_the_engines_go_on_from_each_other(folder, precision, tied, tolerance):
    """Two steps each in turn, in one folder, as the torch engine alone would make them; the recipe's changes count."""
    same = [f"train.precision={precision}", f"model.init.tie_word_embeddings={tied}", "log.eval_every=0"]
    mixed, alone = f"turns-{precision}", f"alone-{precision}"
    for engine, world, steps, changes in TURNS:
        for name, runs in ((mixed, engine), (alone, "torch")):
            train(folder, name, world, *same, f"parallel.engine={runs}", f"train.steps={steps}", *changes)
    ours, theirs = (json.loads((folder / name / "summary.json").read_text()) for name in (mixed, alone))
    assert len(ours["losses"]) == 8 and ours["losses"] == pytest.approx(theirs["losses"], rel=tolerance)
    ours, theirs = weights(folder / mixed), weights(folder / alone)
    assert ours.keys() == theirs.keys() and ("lm_head.weight" in ours) == (tied == "false")
    for key, weight in ours.items():
        assert (weight - theirs[key]).norm() < tolerance * theirs[key].norm(), key


def test_fp32_weights_survive_changes_of_precision(folder):
    """Under nnScaler alone, then by the torch engine; those of an earlier change are not taken for the present ones."""
    turns = [("nnscaler", "fp32"), ("nnscaler", "bf16"), ("nnscaler", "fp32"), ("torch", "fp32"), ("nnscaler", "bf16")]
    for number, (engine, precision) in enumerate(turns, 1):
        same = [f"train.precision={precision}", "log.eval_every=0", "log.niah_every=0", f"train.steps={2 * number}"]
        for name, runs in (("changed", engine), ("changed-torch", "torch")):
            train(folder, name, 2, *same, f"parallel.engine={runs}")
    ours, theirs = (json.loads((folder / name / "summary.json").read_text()) for name in ("changed", "changed-torch"))
    assert len(ours["losses"]) == 10 and ours["losses"] == pytest.approx(theirs["losses"], rel=2e-3)
    ours, theirs = weights(folder / "changed"), weights(folder / "changed-torch")
    assert all((weight - theirs[key]).norm() < 2e-3 * theirs[key].norm() for key, weight in ours.items())


def test_a_signal_ends_a_run_after_a_checkpoint_and_the_same_command_goes_on(folder):
    """Between two checkpoints; the weights are those of a straight run to the bit."""
    more = ["parallel.engine=nnscaler", "train.steps=8", "log.eval_every=0", "log.niah_every=0"]
    train(folder, "unstopped", 2, *more)
    line = command(folder, "stopped", "--standalone", "--nproc-per-node=2", overrides=[*more, "checkpoint.every=5"])
    code, said = launched.run(line, "step 2/", launched.sends(signal.SIGTERM, worker=1), timeout_s=400)
    assert code != 0 and said.count("stopped by SIGTERM after step") == 1, said
    assert resume.latest(str(folder / "stopped")).engine == "nnscaler", said
    code, said = launched.run(line, timeout_s=400)
    assert code == 0 and "resumed after step" in said, said
    ours, theirs = weights(folder / "stopped"), weights(folder / "unstopped")
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
