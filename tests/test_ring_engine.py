"""Losses of a sequence that several processes share equal those of one, dense and sparse; books of PG-19."""

import os
import re
import signal

import pytest
import torch
from tiny_model import save_llama

from mtraining_nns import cli
from mtraining_nns.errors import UserError
from mtraining_nns.eval.huggingface import HuggingFaceEngine
from mtraining_nns.eval.ring_engine import RingEngine

SPARSE = {"block": 32, "budget": "fixed", "k_v": 8, "k_s": 1, "sinks": 4, "local": 32, "last_q": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"), attention=SPARSE)


@pytest.mark.parametrize("attention", ["dense", "mtraining"])
def test_two_ranks_are_one(folder, attention):
    alone = HuggingFaceEngine(folder, attention, device="cpu")
    ring = RingEngine(folder, ranks=2, shortest=301, attention=attention, device="cpu")
    try:
        for length in (301, 1000):
            ids = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length))
            torch.testing.assert_close(ring.nll(ids), alone.nll(ids), rtol=1e-5, atol=1e-5)
            assert ring.densities == pytest.approx(alone.densities, abs=2e-6)
        assert ring.describe()["ranks"] == 2 and ring.describe()["attention"] == attention
        with pytest.raises(UserError, match="perplexity alone"):
            ring.generate([[1]], 1)
        os.kill(ring.processes[1].pid, signal.SIGKILL)
        with pytest.raises(UserError, match="rank [01] of 2 failed"):
            ring.nll(ids)
    finally:
        ring.close()


def test_mistakes_end_before_a_process_starts(folder, capsys):
    with pytest.raises(UserError, match="200 tokens give 8 ranks less than a stripe of 32 tokens each"):
        RingEngine(folder, ranks=8, shortest=200, attention="mtraining", device="cpu")
    line = ["eval", "--model", str(folder), "--lengths", "1k", "--gpus", "2", "--suite", "niah"]
    assert cli.main(line) == 2
    assert "shares sequences for perplexity and pg19 alone" in capsys.readouterr().err


def test_books_from_the_command_line(folder, tmp_path, capsys):
    """The first tokens of each book that is long enough; on two processes as on one."""
    books = tmp_path / "books"
    books.mkdir()
    for number, length in enumerate((300, 900, 1200, 700)):
        (books / f"{number}.txt").write_text("".join(chr(97 + (number * i + i * i) % 26) for i in range(length)))
    line = ["eval", "--model", str(folder), "--suite", "pg19", "--pg19", str(books), "--device", "cpu"]
    tables = []
    for gpus in ("1", "2"):
        asked = [*line, "--lengths", "500,800", "--samples", "2", "--out", str(tmp_path / gpus)]
        assert cli.main([*asked, "--gpus", gpus]) == 0, capsys.readouterr().err
        tables.append(capsys.readouterr().out.partition("results:")[0])
        assert "pg19" in (tmp_path / gpus / "report.html").read_text()
    one, two = ([float(word) for word in re.findall(r"[\d.]+", table)] for table in tables)
    assert one == pytest.approx(two, rel=1e-5)
    assert tables[0].startswith("pg19 by position") and re.search(r"tokens scored +998 +1598", tables[0])
    assert cli.main([*line, "--lengths", "800", "--samples", "3"]) == 2
    assert "2 of 4 books have 800 tokens, expected --samples 3" in capsys.readouterr().err
    assert cli.main([*line[:5], "--pg19", str(folder), "--lengths", "800"]) == 2
    assert "no books in" in capsys.readouterr().err
