"""What an evaluation must notice: models, files and requests that are not what they should be."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import byte_tokenizer, save_llama

from mtraining_nns import cli
from mtraining_nns.errors import UserError
from mtraining_nns.eval.attentions import attention_of
from mtraining_nns.eval.huggingface import HuggingFaceEngine, TextTokenizer
from mtraining_nns.eval.infinitebench_rows import read
from mtraining_nns.eval.niah import Niah, NiahConfig
from mtraining_nns.eval.ruler import Ruler, RulerConfig
from mtraining_nns.eval.ruler_sources import Sources


@pytest.fixture
def folder(tmp_path):
    return save_llama(tmp_path / "model")


@pytest.fixture
def tokenizer():
    return TextTokenizer(byte_tokenizer())


def fails(capsys, *words) -> str:
    assert cli.main(["eval", *map(str, words)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    return line


CONFIGS = {
    "config.json": {
        "{": "not a valid JSON",
        "[]": "model_type",
        '{"model_type": "none"}': "does not recognize this architecture",
        '{"model_type": "llama", "hidden_size": "x"}': "hidden_size",
        '{"model_type": "t5"}': "T5Config",
    },
    "generation_config.json": {
        "{": "not a valid JSON",
        "[1]": "cannot be loaded",
        '{"eos_token_id": "x"}': "states the eos_token_id 'x', expected token ids",
        '{"eos_token_id": [1, "x"]}': "expected token ids",
    },
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in CONFIGS.items() for text in texts])
def test_a_damaged_model_folder_is_one_line(folder, capsys, name, text):
    (folder / name).write_text(text)
    error = fails(capsys, "--model", folder, "--lengths", "1k", "--device", "cpu")
    assert CONFIGS[name][text] in error and len(error) < 450


def test_weights_of_another_shape_are_named(folder, capsys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    error = fails(capsys, "--model", folder, "--lengths", "1k", "--device", "cpu")
    assert "lacks 2 weights, first lm_head.weight" in error


def fill(folder, name: str, value: float) -> None:
    """Every weight of a tensor."""
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {name: torch.full_like(weights[name], value)}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("suite", ["niah", "ruler --tasks vt --samples 1", "perplexity"])
def test_weights_that_are_no_numbers_are_one_line(folder, tmp_path, capsys, suite):
    """And no score."""
    (tmp_path / "text.txt").write_text("Some words. " * 200)
    fill(folder, "model.norm.weight", float("nan"))
    line = ["--model", folder, "--lengths", "1500", "--device", "cpu", "--suite", *suite.split(), "--out", tmp_path]
    error = fails(capsys, *line, *(["--text", tmp_path / "text.txt"] if suite == "perplexity" else []))
    assert "nan" in error and "broken" in error
    assert not (tmp_path / "records.jsonl").read_text()
    record = ["record", folder, tmp_path / "text.txt", "--out", tmp_path / "index.safetensors", "--seq-len", "500"]
    assert cli.main([*map(str, record)]) == 2
    assert "the model's loss on the text is nan; its weights are broken" in capsys.readouterr().err
    assert not (tmp_path / "index.safetensors").exists()


def test_logits_that_break_while_decoding_are_one_line(folder):
    engine = HuggingFaceEngine(folder, device="cpu")
    forward, calls = engine.model.forward, []

    def breaks(*args, **kwargs):
        output = forward(*args, **kwargs)
        calls.append(1)
        if len(calls) == 4:  # two prompts are read, two tokens decoded
            output.logits[1, -1, 7] = float("inf")
        return output

    engine.model.forward = breaks
    with pytest.raises(UserError, match=r"answers with logits of inf; its weights or the dtype float32 are broken"):
        engine.generate([[1, 2, 3], [4, 5]], 8)
    assert len(calls) == 4


def test_every_length_is_checked_and_the_least_is_right(tokenizer):
    config = NiahConfig(lengths=(2000, 350), samples=4)
    with pytest.raises(UserError, match=r"length 350 cannot hold .* use at least (\d+)") as found:
        Niah(config, tokenizer).check()
    least = int(str(found.value).split("at least ")[1].split()[0])
    Niah(NiahConfig(lengths=(least, 2000), samples=4), tokenizer).check()
    cwe = RulerConfig(lengths=(3000, 4096), tasks=("cwe",), samples=1)
    with pytest.raises(UserError, match="ruler cwe: length 4096 cannot hold"):
        Ruler(cwe, tokenizer, Sources()).check()


def squad(contexts: list[str], answers: list) -> dict:
    """Paragraphs, the first with a question."""
    asked = [{"question": "q", "answers": [{"text": answer} for answer in answers]}]
    paragraphs = [{"context": context, "qas": asked if n == 0 else []} for n, context in enumerate(contexts)]
    return {"data": [{"paragraphs": paragraphs}]}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([1], "is not squad's file"),
        ({"data": []}, "holds no questions with answers; give squad's file"),
        (
            {"data": [{"paragraphs": [{"context": "x", "qas": [{"question": "q", "answers": []}]}]}]},
            "holds no questions",
        ),
        (squad(["A b.", "C d."], ["b", " "]), "has an empty answer to 'q', which every text holds"),
        (squad(["A b.", "C d."], [None]), "has an empty answer to 'q'"),
        (squad(["A b."], ["b"]), "holds 1 documents, all of them of the question 'q', and none to put beside them"),
    ],
)
def test_a_source_that_is_something_else(tmp_path, tokenizer, tree, message):
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(tree))
    ruler = Ruler(RulerConfig(lengths=(2000,), tasks=("qa_1",), samples=1), tokenizer, Sources(squad=str(path)))
    with pytest.raises(UserError, match=message):
        ruler.check()


def test_one_row_of_hotpotqa_has_no_other_documents(tmp_path, tokenizer):
    path = tmp_path / "hotpot.json"
    row = {"question": "q", "answer": "b", "context": [["A", ["A b."]], ["C", ["C d."]]]}
    path.write_text(json.dumps([row]))
    ruler = Ruler(RulerConfig(lengths=(2000,), tasks=("qa_2",), samples=1), tokenizer, Sources(hotpotqa=str(path)))
    with pytest.raises(UserError, match="holds 2 documents, all of them of the question 'q'"):
        ruler.check()
    path.with_name("empty.json").write_text(json.dumps([{**row, "answer": ""}]))
    ruler.sources = Sources(hotpotqa=str(path.with_name("empty.json")))
    with pytest.raises(UserError, match="has an empty answer to 'q'"):
        ruler.check()


def test_no_question_is_asked_twice(tmp_path, tokenizer):
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(squad(["A b.", "C d."], ["b"])))
    ruler = Ruler(RulerConfig(lengths=(2000,), tasks=("qa_1",), samples=4), tokenizer, Sources(squad=str(path)))
    with pytest.raises(UserError, match="squad has 1 questions, ruler qa_1 wants --samples 4"):
        ruler.check()


def test_a_reference_fits_its_metric(tmp_path):
    path = tmp_path / "code_run.jsonl"
    row = {"id": 0, "context": "def func_1(x): return x", "input": "func_1(3)", "answer": ["abc"], "options": []}
    path.write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"line 1: expected numbers as its answer, got \['abc'\]"):
        list(read("code_run", path, None))


@pytest.mark.parametrize("answer", [None, [None], [""], " ", ["right", ""], [[None]]])
def test_an_empty_answer_of_infinitebench_is_refused(tmp_path, answer):
    path = tmp_path / "longbook_qa_eng.jsonl"
    path.write_text(json.dumps({"id": 0, "context": "A book.", "input": "Who?", "answer": answer, "options": []}))
    with pytest.raises(UserError, match="line 1: expected no empty answer, got"):
        list(read("longbook_qa_eng", path, None))


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for %}"])
def test_a_chat_template_that_fails(tokenizer, template):
    tokenizer = TextTokenizer(byte_tokenizer())
    tokenizer.tokenizer.chat_template = template
    with pytest.raises(UserError, match="chat template fails .*; use --prompt base"):
        tokenizer.chat_turn("mark")


def test_what_a_method_is_stays(folder):
    with pytest.raises(UserError, match="attention='flexprefill' sets pattern itself"):
        attention_of(folder, "flexprefill", {"pattern": "dense"})
    assert attention_of(folder, "flexprefill", {"block": 64}).block == 64


def test_books_that_are_left_out_are_told(folder, tmp_path, capsys):
    books = tmp_path / "books"
    books.mkdir()
    (books / "a.txt").write_text(" \n")
    (books / "b.txt").write_bytes(b"\xff\xfe\xfa")
    line = ["--model", folder, "--suite", "pg19", "--lengths", "256", "--device", "cpu", "--pg19", books]
    assert f"no books in {books}, left out: 1 empty, 1 not UTF-8; give a folder" in fails(capsys, *line)
    (books / "c.txt").write_text("Some words that say little. " * 60)
    error = fails(capsys, *line, "--samples", "2")
    assert (
        "1 of 1 books have 256 tokens, expected --samples 2, left out: 1 empty, 1 not UTF-8; give more books" in error
    )
    assert cli.main(["eval", *map(str, line), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[-3] == f"books of {books}, left out: 1 empty, 1 not UTF-8"
    assert "left out: 1 empty, 1 not UTF-8" in (tmp_path / "out" / "report.html").read_text()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["tasks"]["pg19"]["skipped"] == {"empty": 1, "not UTF-8": 1}


def test_requests_that_cannot_be(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Some words. " * 200)
    line = ["--model", folder, "--suite", "perplexity", "--lengths", "512", "--text", text]
    assert "samples must be at least 1, got 0; give --samples 1 or more" in fails(capsys, *line, "--samples", "0")
    for suite, fix in {"niah": "give --samples", "ruler": "give e.g. --lengths 4k --samples 20"}.items():
        asked = ["--model", folder, "--suite", suite, "--lengths", "1k", "--samples", "0"]
        assert fix in fails(capsys, *asked)
    assert "--gpus must be at least 1, got 0" in fails(capsys, *line, "--gpus", "0")
    assert "device 'banana' is not usable here" in fails(capsys, *line, "--gpus", "2", "--device", "banana")
