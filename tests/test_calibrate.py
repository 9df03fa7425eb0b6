"""`mtraining calibrate` on a CPU with small shapes: what it writes is what `mtraining plan` reads."""

import pytest
from distributed import run_workers
from test_plan import QWEN, write

from mtraining_nns import cli
from mtraining_nns.plan.constants import Constants

STEP = {"memory_gb_s", "matmul_tflops", "host_gb_s", "call_forward_ms", "index_call_ms", "torch_sparse_backward_tflops"}


def calibrated(rank, world_size, path, *words):
    return cli.main(["calibrate", "--out", path, *words])


def test_what_one_rank_and_two_measure_serves_a_plan(tmp_path, capsys):
    one, two, recipe = (str(tmp_path / name) for name in ("one.yaml", "two.yaml", "recipe.yaml"))
    assert run_workers(calibrated, 1, one) == [0]
    found = Constants.load(one)
    measured = {name for name, number in found.numbers.items() if number.how == "measured"}
    assert measured >= STEP and found.capability == (0, 0)
    assert all(found[name] > 0 for name in STEP - {"index_call_ms"})
    assert "intra_gb_s" not in measured and "not of this device" in found.numbers["intra_gb_s"].source
    assert run_workers(calibrated, 2, two, "--update", one) == [0, 0]
    both = {name for name, number in Constants.load(two).numbers.items() if number.how == "measured"}
    assert both >= measured | {"intra_gb_s", "intra_latency_ms"}
    keys = ["attention.backend=torch", "train.seq_len=4096", "model.init.num_hidden_layers=2"]
    recipe = write(tmp_path, QWEN)
    assert cli.main(["plan", recipe, "--constants", two, "--gpus", "2", *keys]) == 0
    text = capsys.readouterr().out
    assert "2 x CPU" in text and "intra_gb_s" not in text.rpartition("assumed, not measured")[2]


@pytest.mark.parametrize("words, fault", [(["--out", "/nowhere/x"], "is no folder"), (["--update", "/no"], "be read")])
def test_mistakes_come_before_measuring(tmp_path, capsys, words, fault):
    assert cli.main(["calibrate", "--out", str(tmp_path / "x"), *words]) == 2
    assert fault in capsys.readouterr().err
