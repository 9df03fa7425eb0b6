"""How long documents are, and folders whose sequences are made anew: other lengths, other ways, same tokens."""

import sys
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pytest
from test_prepare import config, corpus, text, tokenizer_folder  # noqa: F401

from mtraining_nns.cli import prepare as verb
from mtraining_nns.data import lengths, store
from mtraining_nns.data.dataset import PackedDataset
from mtraining_nns.data.prepare import PrepareConfig, prepare
from mtraining_nns.errors import UserError


def boundaries_of(documents) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(documents)]).astype(np.int64)


def test_retention_counts_documents_and_tokens_of_at_least_a_length(monkeypatch):
    monkeypatch.setattr(store, "PART_DOCUMENTS", 3)
    documents = [100, 4095, 4096, 8191, 8192, 40_000, 7]
    rows = lengths.retention(boundaries_of(documents))
    assert [row["length"] for row in rows] == [4096, 8192, 16384, 32768, 65536]
    for row in rows:
        long = [n for n in documents if n >= row["length"]]
        assert row["documents"] == len(long) and row["share"] == sum(long) / sum(documents)
    assert rows[-1]["documents"] == 0
    assert lengths.retention(boundaries_of([4095, 3])) == [{"length": 4096, "documents": 0, "share": 0.0}]


def test_the_table_is_printed_and_kept(corpus, tmp_path, tokenizer_folder, capsys):  # noqa: F811
    (corpus / "long.txt").write_text(text(99, 9000))
    parser = ArgumentParser()
    verb.add_parser(parser.add_subparsers(dest="verb"))
    words = ["prepare", str(corpus), "--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer_folder)]
    words += ["--glob", "*.txt", "--seq-len", "2048", "--pack", "best_fit", "--holdout", "0.1"]
    assert verb.run(parser.parse_args(words)) == 0
    shown = capsys.readouterr().out
    manifest = store.read_manifest(tmp_path / "out")
    starts = store.read_boundaries(tmp_path / "out", manifest)
    assert manifest["retention"] == lengths.retention(starts)
    longest = int(np.diff(starts).max())
    assert longest > 4096 and f"{manifest['retention'][0]['share']:.2%}" in shown
    assert "documents of at least" in shown and "1 documents are longer than a sequence and cut" in shown
    share = manifest["packing"]["padding_share"]
    assert f"({share:.3%})" in shown and 0 < share < 0.5
    assert (tmp_path / "out" / "heldout" / "packing-2048.npy").exists()
    assert PackedDataset(tmp_path / "out" / "heldout", 2048).padded(0)[1] < 2048


def test_the_curve_is_drawn(corpus, tmp_path, tokenizer_folder):  # noqa: F811
    pytest.importorskip("matplotlib")
    file = tmp_path / "curve.png"
    for _ in range(2):  # also of a folder that is kept
        prepare(config(corpus, tmp_path, tokenizer=str(tokenizer_folder), plot=str(file)))
        assert file.read_bytes().startswith(b"\x89PNG")
        file.unlink()


@pytest.mark.parametrize(
    "plot, missing, message",
    [
        ("curve.png", True, "needs matplotlib; pip install"),
        ("curve.pdf", False, "must end in .png"),
        ("nowhere/curve.png", False, "folder that does not exist"),
    ],
)
def test_a_curve_that_cannot_be_drawn_is_said_before_work_starts(tmp_path, monkeypatch, plot, missing, message):
    if missing:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    else:
        pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match=message):
        PrepareConfig(sources=("text",), out=str(tmp_path / "out"), train_bpe=300, plot=str(tmp_path / plot))


def test_packing_needs_a_length(tmp_path):
    with pytest.raises(UserError, match="--pack best_fit fills sequences of one length; give --seq-len"):
        PrepareConfig(sources=("text",), out=str(tmp_path / "out"), train_bpe=300, pack="best_fit")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_kept_folder_gets_other_sequences_without_tokenising(corpus, tmp_path, tokenizer_folder, monkeypatch):  # noqa: F811
    """After any changes of length and way the files are those of a fresh run."""
    wanted = {"tokenizer": str(tokenizer_folder), "holdout": 0.2}
    ways = [("stream", 64), ("best_fit", 64), ("best_fit", 300), ("stream", 300)]
    fresh = {}
    for way, seq_len in ways:
        settings = {"out": str(tmp_path / f"{way}{seq_len}"), "pack": way, "seq_len": seq_len}
        fresh[way, seq_len] = prepare(config(corpus, tmp_path, **settings, **wanted))
    prepare(config(corpus, tmp_path, **wanted))
    monkeypatch.setattr("mtraining_nns.data.prepare.tokenise", None)
    for way, seq_len in ways:
        again = config(corpus, tmp_path, pack=way, seq_len=seq_len, **wanted)
        assert prepare(again) == (fresh[way, seq_len][0], "rearranged") and prepare(again)[1] == "kept"
        assert files_of(tmp_path / "out") == files_of(tmp_path / f"{way}{seq_len}")
        assert len(PackedDataset(tmp_path / "out", seq_len)) == fresh[way, seq_len][0]["sequences"]


def test_a_kill_while_a_folder_gets_other_sequences_is_made_good(corpus, tmp_path, tokenizer_folder, monkeypatch):  # noqa: F811
    """The old sequences or the new ones, in each part of the folder; the next run completes them."""
    wanted = {"tokenizer": str(tokenizer_folder), "holdout": 0.2, "pack": "best_fit"}
    prepare(config(corpus, tmp_path, seq_len=64, **wanted))
    write = store.write_manifest
    for before in (0, 1):  # manifests that are written before the kill

        def killed(folder, manifest, left=[before]):  # noqa: B006
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return write(folder, manifest)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(store, "write_manifest", killed)
            prepare(config(corpus, tmp_path, seq_len=100, **wanted))
        assert len(PackedDataset(tmp_path / "out", 64)) > 0
        PackedDataset(tmp_path / "out" / "heldout", 100 if before else 64)
    assert prepare(config(corpus, tmp_path, seq_len=64, **wanted))[1] == "rearranged"
    prepare(config(corpus, tmp_path, seq_len=64, out=str(tmp_path / "fresh"), **wanted))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")
