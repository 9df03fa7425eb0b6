"""The folder of an evaluation: what may go on in it, what is written, and what must not be read from it."""

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import byte_tokenizer, save_llama

from mtraining_nns import cli, run_lock
from mtraining_nns.errors import UserError
from mtraining_nns.eval import report
from mtraining_nns.eval.compare import compare
from mtraining_nns.eval.perplexity import Perplexity, PerplexityConfig
from mtraining_nns.eval.questions import Engine
from mtraining_nns.eval.runner import Records, run

FOUND = {"id": "niah/1/0/0", "length": 1, "depth": 0.0, "density": 1.0, "score": 1.0}


@pytest.fixture
def folder(tmp_path):
    return save_llama(tmp_path / "model")


def fails(capsys, *words) -> str:
    assert cli.main(["eval", *map(str, words)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    return line


def test_answers_of_other_weights_or_another_tokenizer_are_not_gone_on_with(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Some words that say little. " * 60)
    line = ["--model", folder, "--suite", "perplexity", "--lengths", "256", "--text", text, "--device", "cpu"]
    assert cli.main(["eval", *map(str, line), "--out", str(tmp_path / "a")]) == 0
    weights = load_file(folder / "model.safetensors")
    save_file({name: 0.5 * weight for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    assert "differs in model_sha256" in fails(capsys, *line, "--out", tmp_path / "a")
    byte_tokenizer(bos=True).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 257}))
    assert cli.main(["eval", *map(str, line), "--out", str(tmp_path / "b")]) == 0
    with pytest.raises(UserError, match=r"asked other questions: they differ in .*tokenizer.sha256"):
        compare(tmp_path / "a", tmp_path / "b")


def test_each_sequence_is_kept_once_it_is_read(tmp_path):
    class Ends(Engine):
        batch_size, left = 8, 2

        def nll(self, token_ids):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return torch.ones(len(token_ids) - 1)

    suite = Perplexity(PerplexityConfig(lengths=(16,), samples=5), torch.arange(100), None)
    records = Records(tmp_path, {})
    with pytest.raises(KeyboardInterrupt):
        run([suite], Ends(), records)
    records.close()
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 2


def test_any_text_is_a_record(tmp_path):
    """Line ends of Unicode, and a lone surrogate, which UTF-8 has not."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        records = Records(tmp_path / name, {"tasks": {}})
        records.add({**FOUND, "generated": "one\u2028two\x85three \ud800"})
        records.close()
    assert compare(tmp_path / "a", tmp_path / "b").cells[0].difference == 0
    again = Records(tmp_path / "a", {"tasks": {}})
    assert again.found["niah/1/0/0"]["generated"] == "one\u2028two\x85three \ud800"
    again.close()
    (tmp_path / "a" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json is damaged"):
        Records(tmp_path / "a", {"tasks": {}})


RECORD = json.dumps(FOUND).encode()
LOSS = {"begin": 1, "end": 2, "tokens": 1, "nll_sum": 0.5}
READ = {"id": "perplexity/2/0", "length": 2, "density": None, "buckets": [LOSS]}
DAMAGED = [
    *({key: value for key, value in FOUND.items() if key != name} for name in FOUND),
    *({**FOUND, "score": score} for score in (None, float("nan"), "1", 1.5, -0.1, [1])),
    *({**FOUND, name: value} for name in ("length", "depth", "density") for value in ("1", float("inf"), [])),
    {**FOUND, "id": 3},
    {**FOUND, "id": "ruler/vt/1/0"},
    {**FOUND, "id": "ruler/vt/1/0", "task": None},
    *({**READ, "buckets": buckets} for buckets in (None, [], [3], [{**LOSS, "tokens": 0}])),
    *({**READ, "buckets": [{**LOSS, "nll_sum": loss}]} for loss in (None, float("nan"))),
]


@pytest.mark.parametrize(
    "line", [b"garbage", b"[]", b"3", b"{}", b"\xff\xfe", b"\0", *(json.dumps(record).encode() for record in DAMAGED)]
)
def test_a_damaged_answer_is_named_and_not_counted(tmp_path, line):
    """In the middle of a file, where no kill of this program leaves it; a blank line is none."""
    Records(tmp_path, {"tasks": {}}).close()
    path = tmp_path / "records.jsonl"
    path.write_bytes(RECORD + b"\n\n" + line + b"\n" + RECORD + b"\n")
    for reader in (lambda: Records(tmp_path, {"tasks": {}}), lambda: compare(tmp_path, tmp_path)):
        with pytest.raises(UserError, match=r"records.jsonl, line 3 is damaged .* remove the line and evaluate again"):
            reader()
    path.write_bytes(RECORD + b"\n\n" + RECORD + b"\n")
    assert list(Records(tmp_path, {"tasks": {}}).found) == ["niah/1/0/0"]


def test_answers_without_a_manifest_are_of_no_known_run(tmp_path):
    (tmp_path / "records.jsonl").write_bytes(RECORD + b"\n")
    with pytest.raises(UserError, match="holds answers of an unknown run, without manifest.json"):
        Records(tmp_path, {"tasks": {}})
    assert (tmp_path / "records.jsonl").read_bytes() == RECORD + b"\n"


@pytest.mark.parametrize("text", ["{", "[]", "3", ""])
def test_a_manifest_that_is_none_is_one_line(tmp_path, text):
    (tmp_path / "records.jsonl").write_bytes(RECORD + b"\n")
    (tmp_path / "manifest.json").write_text(text)
    for reader in (lambda: Records(tmp_path, {"tasks": {}}), lambda: compare(tmp_path, tmp_path)):
        with pytest.raises(UserError, match="manifest.json is damaged"):
            reader()


def test_a_folder_is_that_of_one_run_at_a_time(folder, tmp_path, capsys):
    line = ["--model", folder, "--lengths", "1k", "--depths", "0", "--device", "cpu", "--out", tmp_path / "out"]
    (tmp_path / "out").mkdir()
    with run_lock.held(tmp_path / "out", "--out"):
        error = fails(capsys, *line)
    assert f"--out={tmp_path}/out is that of a run at work (process {os.getpid()} on " in error
    assert not (tmp_path / "out" / "records.jsonl").exists()
    assert cli.main(["eval", *map(str, line)]) == 0


def test_the_same_data_elsewhere_are_the_same_questions(folder, tmp_path, capsys, monkeypatch):
    """Model, text and books under other names; what a folder leaves out beside them counts nothing, either."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        for place in (f"{name}/text", f"{name}/books"):
            Path(place).mkdir(parents=True)
            Path(place, "a.txt").write_text("Some words that say little. " * 60)
    Path("two/text/picture.png").write_bytes(b"\xff\xfe")
    line = ["--suite", "perplexity,pg19", "--lengths", "256", "--device", "cpu"]
    first = ["--model", "model", "--text", "one/text", "--pg19", "one/books", "--out", "a"]
    second = ["--model", "./model/", "--text", "two/text", "--pg19", "two/books"]
    assert cli.main(["eval", *line, *first]) == 0
    assert cli.main(["eval", *line, *second, "--out", "a"]) == 0
    assert len(Path("a/records.jsonl").read_text().splitlines()) == 2
    assert cli.main(["eval", *line, *second, "--out", "b"]) == 0
    assert compare("a", "b").differing == {} and "two/text" in Path("b/manifest.json").read_text()
    Path("two/books/a.txt").write_text("Other words that say little. " * 60)
    assert "differs in tasks.pg19.books.256.0.blake2b; give another --out" in fails(
        capsys, *line, *second, "--out", "a"
    )


def test_a_full_disk_is_one_line(tmp_path):
    """No traceback, and no half of a file under its name."""
    records = Records(tmp_path, {"tasks": {}})
    page = report.write_csv(tmp_path, {}).read_text()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    try:
        with pytest.raises(UserError, match=r"cannot write .*records.jsonl \(File too large\); make room"):
            records.add({**FOUND, "generated": "x" * 5000})
        records.close()
        cells = [{"task": "x" * 5000}]
        with pytest.raises(UserError, match=r"cannot write .*scores.csv \(File too large\); make room"):
            report.write_csv(tmp_path, {"ruler": cells})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert (tmp_path / "scores.csv").read_text() == page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "records.jsonl", "scores.csv"]
    assert Records(tmp_path, {"tasks": {}}).found == {}
