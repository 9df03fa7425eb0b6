"""The share of causal pairs that prompts kept, counted by brute force, in every place that shows it."""

import csv
import json

import pytest
import torch
from helpers import index_mask
from tiny_model import save_llama

from mtraining_nns import cli
from mtraining_nns.eval.huggingface import HuggingFaceEngine
from mtraining_nns.eval.perplexity import Perplexity, PerplexityConfig, position_nll
from mtraining_nns.eval.questions import Engine
from mtraining_nns.eval.ring_engine import RingEngine
from mtraining_nns.ops.index import RowIndex

SPARSE = {"block": 32, "budget": "fixed", "k_v": 8, "k_s": 1, "sinks": 4, "local": 32, "last_q": 16}
METHODS = {
    "dense": {},
    "mtraining": {},
    "all but the first layer": {"attention": "mtraining", "attention_config": {"dense_layers": [0]}},
    "flexprefill": {"attention_config": {"block": 32, "threshold": 0.3, "sinks": 4, "local": 32}},
    "moba": {"attention": "mtraining", "attention_config": {"pattern": "moba", "chunk": 64, "top_k": 2}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"), attention=SPARSE)


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length))


def row_mask(index: RowIndex, seq_len: int) -> torch.Tensor:
    """bool [B, N, S, S]: earlier blocks of kept spans, by row where there are bits, and a row's own block causally."""
    rows, cols = torch.arange(seq_len)[:, None], torch.arange(seq_len)[None]
    seen = index.mask[..., rows // index.block, cols // index.span]
    if index.row_bits is not None:
        word, bit = cols // index.span // 32, cols // index.span % 32
        seen = seen & (index.row_bits[:, :, :seq_len].gather(-1, word.expand(*seen.shape).long()) >> bit & 1).bool()
    earlier, own = cols // index.block < rows // index.block, cols // index.block == rows // index.block
    return (seen & earlier) | (own & (cols <= rows))


@pytest.mark.parametrize("name", METHODS)
def test_density_is_the_share_of_pairs_that_layers_and_heads_kept(folder, name):
    settings = {"attention": name, **METHODS[name]}
    engine = HuggingFaceEngine(folder, device="cpu", **settings)
    sequences = [tokens(length) for length in (300, 65, 1000)]
    engine.generate([ids.tolist() for ids in sequences], 4)
    found = engine.densities
    assert len(found) == 3
    for ids, density in zip(sequences, found):
        length = len(ids)
        engine.nll(ids)
        assert engine.densities == [density]
        if name == "dense":
            assert density == 1.0
            continue
        shares = []
        for index, _ in engine.operator.last.values():
            mask = row_mask(index, length) if isinstance(index, RowIndex) else index_mask(index, length)
            shares.append(mask.sum().item() / (mask.shape[1] * length * (length + 1) / 2))
        assert len(shares) == 2 and density == pytest.approx(sum(shares) / 2, abs=1e-6)
    assert name == "dense" or found[2] < 0.9


def test_ranks_that_choose_for_their_own_rows_keep_together_what_one_keeps(folder):
    settings = {"attention": "flexprefill", **METHODS["flexprefill"], "device": "cpu"}
    alone, ring = HuggingFaceEngine(folder, **settings), RingEngine(folder, ranks=2, shortest=301, **settings)
    try:
        for length in (301, 1000):
            alone.nll(tokens(length))
            ring.nll(tokens(length))
            assert ring.densities == pytest.approx(alone.densities, abs=2e-6) and ring.densities[0] < 1
    finally:
        ring.close()


def test_windows_count_alike():
    class Falling(Engine):
        calls = 0

        def nll(self, token_ids):
            self.calls += 1
            self.densities = [1 / self.calls]
            return torch.ones(len(token_ids) - 1)

    config = PerplexityConfig(lengths=(16,), window=8, stride=4)
    assert position_nll(Falling(), torch.arange(16), config)[1] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    (record,) = Perplexity(config, torch.arange(16), None).answers(Falling(), ["perplexity/16/0"])
    assert record["density"] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)


@pytest.mark.parametrize("attention", ["dense", "mtraining"])
def test_tables_files_and_page_show_it(folder, tmp_path, capsys, attention):
    """By length: the mean of its records, of all suites."""
    text = tmp_path / "text.txt"
    text.write_text("The road was long. Nobody came. " * 200)
    asked = ["eval", "--model", folder, "--suite", "niah,ruler,perplexity", "--lengths", "900,1500", "--samples", "2"]
    asked += ["--tasks", "niah_single_1,niah_single_2", "--depths", "0,90", "--max-new-tokens", "8", "--text", text]
    assert cli.main([*map(str, asked), "--device", "cpu", "--attention", attention, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    page = (tmp_path / "report.html").read_text()
    results = json.loads((tmp_path / "results.json").read_text())
    for suite in ("niah", "ruler", "perplexity"):
        means, own = [], [record for record in records if record["id"].startswith(suite)]
        for length in (900, 1500):
            kept = [record["density"] for record in own if record["length"] == length]
            assert len(kept) == {"niah": 4, "ruler": 4, "perplexity": 2}[suite]
            means.append(sum(kept) / len(kept))
        assert means == [1, 1] if attention == "dense" else means[1] < means[0] < 1
        shown = [f"{100 * mean:.1f} %" for mean in means]
        assert ["kept", "by", "prefill", *" ".join(shown).split()] in [line.split() for line in printed.splitlines()]
        assert all(f"<td>{share}</td>" in page for share in shown)
        if suite == "perplexity":
            assert [found["density"] for found in results[suite]] == pytest.approx(means)
    with (tmp_path / "scores.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    cells = results["niah"]["cells"] + results["ruler"]["cells"]
    assert [float(row["density"]) for row in rows] == [cell["density"] for cell in cells] and len(cells) == 8
    for cell in results["niah"]["cells"]:
        kept = [r["density"] for r in records if (r["length"], r.get("depth")) == (cell["length"], cell["depth"])]
        assert cell["density"] == pytest.approx(sum(kept) / 2)
