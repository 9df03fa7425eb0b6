"""Every word of a request does something, or is refused in one line that names what it is for."""

import argparse
import json

import pytest
from tiny_model import byte_tokenizer, save_llama

from mtraining_nns import cli
from mtraining_nns.cli import eval as verb
from mtraining_nns.errors import UserError
from mtraining_nns.eval.attentions import attention_of
from mtraining_nns.eval.huggingface import TextTokenizer
from mtraining_nns.eval.niah import Niah, NiahConfig
from mtraining_nns.eval.prompts import MARK, Format

READ_BY_ALL = {"model", "suite", "lengths", "samples", "engine", "gpus", "attention", "out", "dtype", "help"}
VALUES = {"prompt": "chat", "device": "cpu", "seed": "0", "needles": "1", "max_new_tokens": "32"}
CHATML = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}<|assistant|>"


@pytest.fixture
def folder(tmp_path):
    """Without weights: whatever is refused is refused before they are loaded."""
    folder = save_llama(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    return folder


def refused(capsys, folder, *words) -> str:
    capsys.readouterr()
    assert cli.main(["eval", "--model", str(folder), *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mtraining: error: ") and error.count("\n") == 1
    return error


def test_what_reads_an_option_is_known_of_each():
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers(dest="verb"))
    declared = {action.dest: action for action in parser._subparsers._group_actions[0].choices["eval"]._actions}
    assert declared.keys() == READ_BY_ALL | verb.READ_BY.keys()
    assert all(declared[name].default is None for name in verb.READ_BY), "a default hides whether it was given"


@pytest.mark.parametrize("name", verb.READ_BY)
def test_an_option_that_nothing_reads_is_refused(folder, capsys, name):
    """Also where its value is the default."""
    reader, values = verb.READ_BY[name]
    others = {"suite": verb.SUITES, "engine": ("hf", "vllm"), "attention": verb.ATTENTIONS}[reader]
    given = [f"--{name.replace('_', '-')}", VALUES.get(name, "x")]
    for other in set(others) - set(values):
        error = refused(capsys, folder, "--lengths", "1k", f"--{reader}", other, *given)
        assert f"{given[0]} is for --{reader} {' or '.join(values)}, got --{reader} {other}" in error


def test_an_option_of_one_of_several_suites_is_read(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("Some words. " * 400)
    words = ["--suite", "niah,perplexity", "--lengths", "1k", "--window", "600", "--text", tmp_path / "text.txt"]
    assert "cannot be loaded" in refused(capsys, folder, *words, "--needles", "2", "--max-new-tokens", "64")


@pytest.mark.parametrize("option", ["--squad", "--hotpotqa", "--text"])
def test_a_source_that_none_of_the_tasks_reads_is_refused(folder, capsys, option):
    words = ["--suite", "ruler", "--lengths", "2k", "--tasks", "vt,niah_single_1"]
    assert f"{option} is for other tasks of ruler than --tasks vt" in refused(capsys, folder, *words, option, "none")


@pytest.mark.parametrize(
    ("attention", "changes", "message"),
    [
        (
            "mtraining",
            {"pattern": "vertical_slash", "threshold": 0.5},
            "threshold does nothing with vertical_slash and",
        ),
        ("mtraining", {"pattern": "vertical_slash", "k_v": 5}, "k_v does nothing with vertical_slash and top_p"),
        ("mtraining", {"budget": "fixed", "p_v": 0.5}, "p_v does nothing with vertical_slash and fixed, which reads"),
        ("mtraining", {"pattern": "xattention", "sinks": 5}, "sinks does nothing with xattention"),
        ("mtraining", {"pattern": "moba", "stride": 8}, "stride does nothing with moba, which reads chunk, top_k"),
        ("mtraining", {"pattern": "dense", "local": 5}, "local does nothing with dense, which reads none"),
        ("mtraining", {"p_v": 0.5, "keep_output": True}, "keep_output does nothing"),
        ("flexprefill", {"p_v": 0.5}, "p_v does nothing with flexprefill, which reads local, sinks, tau, threshold"),
    ],
)
def test_a_setting_that_its_pattern_does_not_read_is_refused(folder, attention, changes, message):
    with pytest.raises(UserError, match=f"attention setting {message}"):
        attention_of(folder, attention, changes)


def test_budgets_of_each_head_leave_no_others(folder, tmp_path):
    recorded = {"block": 64, "cap": 100, "last_q": 64, "sinks": 4, "local": 64}
    tree = {"format": 2, "attention": recorded, "budgets": [[[1, 1]]]}
    (tmp_path / "budgets.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match="k_v does nothing with vertical_slash and budgets of each head"):
        attention_of(folder, "minference", {"k_v": 5}, tmp_path / "budgets.json")


@pytest.mark.parametrize(
    ("date", "text"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{% if strftime_now is defined %}{{ strftime_now('%B %-d, %Y') }}{% endif %}", "July 26, 2024"),
        ("{% set how = '%Y-%m-%d' %}{% set now = strftime_now(how) %}{{ now }}", "2024-07-26"),
        ("{% macro today() %}{{ strftime_now('%A') }}{% endmacro %}{{ today() }}", "Friday"),
        ("{% for m in messages %}{{ strftime_now('%H:%M') }}{% endfor %}", "00:00"),
        ("{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}", "26 Jul 2024"),
    ],
)
def test_chat_prompts_are_the_same_every_day(date, text):
    tokenizer = TextTokenizer(byte_tokenizer())
    tokenizer.tokenizer.chat_template = f"{date}|{CHATML}"
    form = Format(tokenizer, chat=True)
    assert tokenizer.decode(form.before).startswith(f"{text}|")
    assert form.describe()["clock"] == "2024-07-26T00:00:00"


@pytest.mark.parametrize("opening", ["", "\n", "  \n", "\n\n", "  {% set a = 1 %}\n", "{%- set a = 1 %} x\n", "  "])
def test_a_template_without_a_date_gives_what_transformers_gives(opening):
    tokenizer = TextTokenizer(byte_tokenizer())
    tokenizer.tokenizer.chat_template = opening + CHATML
    message = [{"role": "user", "content": MARK}]
    expected = tokenizer.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    before, after = tokenizer.chat_turn(MARK)
    assert tokenizer.decode(before) + MARK + tokenizer.decode(after) == expected


def test_the_answers_turn_begins_as_an_answer():
    """In a chat prompt the template itself says whose turn it is, where a plain prompt has `Answer:`."""
    tokenizer = TextTokenizer(byte_tokenizer())
    tokenizer.tokenizer.chat_template = CHATML
    for needles in (1, 2):
        config = {"lengths": (1500,), "depths": (50,), "needles": needles, "max_new_tokens": 64}
        plain, chat = (Niah(NiahConfig(**config, chat=chat), tokenizer) for chat in (False, True))
        (one,), (other,) = (
            [tokenizer.decode(suite.build(name).prompt) for name in suite.ids()] for suite in (plain, chat)
        )
        begun = one.rpartition("Answer: ")[2]
        assert begun.startswith("The magic number") and other.endswith(f"?\n\n<|assistant|>{begun}")
        assert "Answer:" not in other and other.startswith("<|user|>Somewhere")
