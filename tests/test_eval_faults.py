"""What an evaluation must notice: another model in the folder, files that are not what they should be, lost work."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import byte_tokenizer, save_llama

from mtraining_nns import cli
from mtraining_nns.errors import UserError
from mtraining_nns.eval.attentions import attention_of
from mtraining_nns.eval.compare import compare
from mtraining_nns.eval.huggingface import HuggingFaceEngine, TextTokenizer
from mtraining_nns.eval.infinitebench_rows import read
from mtraining_nns.eval.niah import Niah, NiahConfig
from mtraining_nns.eval.perplexity import Perplexity, PerplexityConfig
from mtraining_nns.eval.questions import Engine
from mtraining_nns.eval.ruler import Ruler, RulerConfig
from mtraining_nns.eval.ruler_sources import Sources
from mtraining_nns.eval.runner import Records, run


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
        records.add({"id": "niah/1/0/0", "length": 1, "score": 1.0, "generated": "one\u2028two\x85three \ud800"})
        records.close()
    assert compare(tmp_path / "a", tmp_path / "b").cells[0].difference == 0
    again = Records(tmp_path / "a", {"tasks": {}})
    assert again.found["niah/1/0/0"]["generated"] == "one\u2028two\x85three \ud800"
    again.close()
    (tmp_path / "a" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json is damaged"):
        Records(tmp_path / "a", {"tasks": {}})


RECORD = json.dumps({"id": "niah/1/0/0", "length": 1, "score": 1.0}).encode()


@pytest.mark.parametrize(
    "line", [b"garbage", b"[]", b"3", b"{}", b"\xff\xfe", b"\0", b'{"id": "niah/1/0/1"}', b'{"length": 1, "score": 1}']
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


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([1], "is not squad's file"),
        ({"data": []}, "holds no questions with answers over several documents"),
        (
            {"data": [{"paragraphs": [{"context": "x", "qas": [{"question": "q", "answers": []}]}]}]},
            "holds no questions",
        ),
    ],
)
def test_a_source_that_is_something_else(tmp_path, tokenizer, tree, message):
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(tree))
    ruler = Ruler(RulerConfig(lengths=(2000,), tasks=("qa_1",), samples=1), tokenizer, Sources(squad=str(path)))
    with pytest.raises(UserError, match=message):
        ruler.check()


def test_no_question_is_asked_twice(tmp_path, tokenizer):
    paragraph = {"context": "A b.", "qas": [{"question": "q", "answers": [{"text": "b"}]}]}
    other = {"context": "C d.", "qas": []}
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [paragraph, other]}]}))
    ruler = Ruler(RulerConfig(lengths=(2000,), tasks=("qa_1",), samples=4), tokenizer, Sources(squad=str(path)))
    with pytest.raises(UserError, match="squad has 1 questions, ruler qa_1 wants --samples 4"):
        ruler.check()


def test_a_reference_fits_its_metric(tmp_path):
    path = tmp_path / "code_run.jsonl"
    row = {"id": 0, "context": "def func_1(x): return x", "input": "func_1(3)", "answer": ["abc"], "options": []}
    path.write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"line 1: expected numbers as its answer, got \['abc'\]"):
        list(read("code_run", path, None))


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


def test_requests_that_cannot_be(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Some words. " * 200)
    line = ["--model", folder, "--suite", "perplexity", "--lengths", "512", "--text", text]
    assert "--gpus must be at least 1, got 0" in fails(capsys, *line, "--gpus", "0")
    assert "device 'banana' is not usable here" in fails(capsys, *line, "--gpus", "2", "--device", "banana")
