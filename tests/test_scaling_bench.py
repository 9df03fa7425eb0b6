"""The benchmark of scaling, dry on 4 CPU ranks at a tiny length."""

import contextlib
import io
import json
import re

import pytest
import scaling as bench
from attention import BLOCK, standard_index
from distributed import run_workers

from mtraining_nns.ops import balance
from mtraining_nns.ops.index import DistanceIndex
from mtraining_nns.ops.layout import Layout

SEQ_LEN, HEADS = 1536, 2
FLAT = [(1, "none"), (2, "flat, hop by hop"), (2, "flat, gathered"), (4, "flat, hop by hop"), (4, "flat, gathered")]
ROWS = [("dense", *ring) for ring in FLAT]
ROWS += [("sparse", *ring) for ring in [*FLAT, (4, "2 x 2, hop by hop"), (4, "2 x 2, gathered")]]


def dry_run(rank, world, path):
    out = io.StringIO()
    words = ["--seq-len", str(SEQ_LEN), "--heads", f"{HEADS}/1", "--dim", "16", "--seconds", "0", "--hops"]
    with contextlib.redirect_stdout(out):
        bench.main([*words, "--out", path])
    return out.getvalue()


def test_a_dry_run(tmp_path):
    path = tmp_path / "rows.json"
    printed = run_workers(dry_run, 4, str(path))
    assert not any(printed[1:]), "rank 0 speaks"
    written = json.loads(path.read_text())
    check_every_ring_has_its_row_as_printed(printed[0], written)
    check_times_fit_each_other(written["rows"])
    check_balance_is_that_of_the_pattern_on_the_ring(written["rows"])


def check_every_ring_has_its_row_as_printed(printed, written):
    lines = [re.split(r" {2,}", line.strip()) for line in printed.splitlines()]
    names = next(line for line in lines if line[0] == "attention")
    rows = [line for line in lines if len(line) == len(names) and line[0] in bench.PATTERNS]
    assert [(row["attention"], row["cp"], row["ring"]) for row in written["rows"]] == ROWS and len(rows) == len(ROWS)
    keys = {name.removesuffix("_ms").replace("_", " "): name for name in bench.BEFORE | bench.AFTER}
    for cells, row in zip(rows, written["rows"]):
        for name, cell in zip(names, cells):
            value = row[keys[name]]
            assert cell == value or float(cell) == pytest.approx(value, abs=6e-3), (name, cell, value)
    assert written["world"] == 4 and f"{written['seconds']:.1f} s in all" in printed
    assert "A100, not of this CPU" in printed and "planned" in names


def check_times_fit_each_other(rows):
    alone = {}
    for row in rows:
        total = row["total_ms"]
        alone.setdefault(row["attention"], total)
        assert total == pytest.approx(row["forward_ms"] + row["backward_ms"]) and row["index_ms"] < row["forward_ms"]
        assert row["speedup"] == pytest.approx(alone[row["attention"]] / total)
        assert row["x_ideal"] == pytest.approx(row["cp"] / row["speedup"])
        assert row["planned_ms"] == pytest.approx(sum(row["planned_parts_ms"].values())) and row["planned_ms"] > 0
        assert row["plan_ratio"] == pytest.approx(row["planned_ms"] / total)
        # a wait is measured within the span that names it
        assert 0 <= row["exposed_ms"] <= sum(row["hops_ms"].values()) * 1.001
        assert (row["exposed_ms"] > 0) == (row["cp"] > 1)
        assert row["planned_parts_ms"]["ring, exposed"] == 0 or row["cp"] > 1


def check_balance_is_that_of_the_pattern_on_the_ring(rows):
    indices = {
        "dense": DistanceIndex.keep_all(1, HEADS, SEQ_LEN // BLOCK, BLOCK, "cpu"),
        "sparse": standard_index(SEQ_LEN, HEADS, device="cpu"),
    }
    for row in rows:
        inner = 2 if row["ring"].startswith("2 x 2") else None
        layout = Layout(seq_len=SEQ_LEN, world=row["cp"], block=BLOCK, inner=inner)
        work = balance.work(indices[row["attention"]], layout, balance.schedule(row["cp"], inner))
        expected = balance.measure(work)
        assert [row[name] for name in balance.Balance._fields] == pytest.approx(list(expected), rel=1e-9)
        assert expected.worker > 1 or row["cp"] == 1
