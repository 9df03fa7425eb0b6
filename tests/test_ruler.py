"""RULER's prompts and scores: what each task hides is there, where and as often as it should be."""

import json
import re
import string
from collections import Counter
from itertools import product

import pytest

from mtraining_nns.data.tokenizer import train_bpe
from mtraining_nns.errors import UserError
from mtraining_nns.eval import report, ruler_tasks, words
from mtraining_nns.eval.huggingface import TextTokenizer
from mtraining_nns.eval.questions import Engine
from mtraining_nns.eval.ruler import Ruler, RulerConfig
from mtraining_nns.eval.ruler_sources import Sources
from mtraining_nns.eval.runner import Records, run

STORY = "The road was long, and the lamp was dim. Nobody came! Why? Then it stopped raining at last. "
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TASKS = list(ruler_tasks.tables()["tasks"])


@pytest.fixture(scope="module")
def tokenizer():
    adjectives, nouns = words.words()
    names = " ".join(map("".join, product(string.ascii_uppercase, repeat=2))) + " "
    trained = train_bpe([" ".join(adjectives + nouns), names * 50, STORY * 50, json.dumps(ruler_tasks.tables())], 3000)
    trained.chat_template = CHATML
    return TextTokenizer(trained)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Ten paragraphs of SQuAD's form with two questions each, five questions of HotpotQA's."""
    folder = tmp_path_factory.mktemp("sources")

    def paragraph(n: int) -> dict:
        asked = [
            {"question": f"Who built bridge {n}?", "answers": [{"text": f"Builder {n}"}, {"text": f"builder no {n}"}]}
        ]
        return {
            "context": f"Bridge {n} is old. Builder {n} built it.",
            "qas": [*asked, {"question": "?", "answers": []}],
        }

    squad = {"data": [{"paragraphs": [paragraph(n) for n in (2 * a, 2 * a + 1)]} for a in range(5)]}
    hotpot = [
        {
            "question": f"Which lake does river {n} feed?",
            "answer": f"Lake {n}",
            "context": [[f"River {n}", [f"River {n} ends in it.", f" It is Lake {n}."]], [f"Hill {n}", ["A hill."]]],
        }
        for n in range(5)
    ]
    (folder / "squad.json").write_text(json.dumps(squad))
    (folder / "hotpot.json").write_text(json.dumps(hotpot))
    return Sources((STORY * 40,), str(folder / "squad.json"), str(folder / "hotpot.json"))


def suite_of(tokenizer, sources, **settings) -> Ruler:
    return Ruler(RulerConfig(**{"lengths": (3072,), "samples": 2, **settings}), tokenizer, sources)


class Knowing(Engine):
    """Answers each question with some of its references."""

    batch_size = 3

    def __init__(self, suite, share: float):
        asked = [suite.build(name) for name in suite.ids()]
        self.answers = {
            tuple(question.prompt): question.references[: max(1, round(share * len(question.references)))]
            for question in asked
        }
        self.tokenizer = suite.form.tokenizer

    def generate(self, prompts, max_new_tokens):
        return self.tokenizer.encode([" " + ", ".join(self.answers[tuple(prompt)]) + "." for prompt in prompts])


class Echo(Engine):
    """The question again."""

    batch_size = 2

    def generate(self, prompts, max_new_tokens):
        return [prompt[-25:] for prompt in prompts]


def scores(engine, suite) -> dict[str, float]:
    records = run([suite], engine, Records(None, {}))["ruler"]
    return {cell["task"]: cell["score"] for cell in report.ruler_result(records, {})["cells"]}


def test_planted_answers_score_100_half_of_them_half_and_the_prompt_nothing(tokenizer, sources):
    suite = suite_of(tokenizer, sources)
    assert suite.tasks == TASKS and not suite.not_run
    assert scores(Knowing(suite, 1.0), suite) == dict.fromkeys(TASKS, 100.0)
    half = {"niah_multivalue": 50, "niah_multiquery": 50, "vt": 40, "cwe": 50, "fwe": pytest.approx(200 / 3)}
    assert scores(Knowing(suite, 0.5), suite) == {task: half.get(task, 100.0) for task in TASKS}
    assert scores(Echo(), suite) == dict.fromkeys(TASKS, 0.0)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("length", [1500, 6000])
@pytest.mark.parametrize("task", TASKS)
def test_prompts_fill_their_length(task, length, chat, tokenizer, sources):
    """At most the length together with what is generated, and no further unit would fit."""
    suite = suite_of(tokenizer, sources, tasks=(task,), lengths=(length,), chat=chat)
    question = suite.build(f"ruler/{task}/{length}/0")
    free = length - len(question.prompt) - question.max_new_tokens
    assert 0 <= free < 120, free
    text = tokenizer.tokenizer.decode(question.prompt)
    template = ruler_tasks.tables()[ruler_tasks.tables()["tasks"][task]["kind"]]
    assert text.endswith(template["answer"].split("{")[0] if "{" not in template["answer"] else text[-5:])
    assert text.count("<|im_start|>") == (2 if chat else 0)
    if chat:
        assert "<|im_end|>\n<|im_start|>assistant\n" in text and text.startswith("<|im_start|>user\n")
    again = suite_of(tokenizer, sources, lengths=(8192, length), samples=9, chat=chat)
    assert again.build(f"ruler/{task}/{length}/0") == question
    assert suite_of(tokenizer, sources, seed=1, chat=chat).build(f"ruler/{task}/{length}/0").prompt != question.prompt


def text_of(suite, task: str, number: int = 0) -> tuple[str, list[str], dict]:
    question = suite.build(f"ruler/{task}/{suite.config.lengths[0]}/{number}")
    return suite.form.tokenizer.decode(question.prompt), question.references, question.about


NEEDLE = re.compile(r"One of the special magic \w+s for ([\w-]+) is: ([\w-]+)\.")
HAYSTACKS = {"niah_single_1": 1, "niah_single_2": 1, "niah_single_3": 1, "niah_multikey_1": 4, "niah_multivalue": 4}


@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("niah")])
def test_needles_are_hidden_once_at_their_depths(task, tokenizer, sources):
    suite = suite_of(tokenizer, sources, lengths=(4096,))
    text, references, about = text_of(suite, task)
    found = NEEDLE.findall(text)
    keys, values = [key for key, _ in found], [value for _, value in found]
    assert len(set(values)) == len(values) and all(text.count(value) == 1 for value in references)
    if "multikey_2" in task or "multikey_3" in task:
        assert len(found) > 40 and len(set(keys)) == len(keys)
    else:
        assert len(found) == HAYSTACKS.get(task, 4)
    asked = text[text.rindex("What are all") :]
    assert {value for key, value in found if key in asked} == set(references)
    assert len(references) == (4 if task in ("niah_multivalue", "niah_multiquery") else 1)
    if len(found) <= 4:
        begin, end = text.index("some of them.") + 14, text.rindex("\nWhat are all")
        places = [(match.start() - begin) / (end - begin) for match in NEEDLE.finditer(text)]
        for place, depth in zip(places, about["depths"], strict=True):
            assert abs(100 * place - depth) < 4
    kind = (
        r"[0-9]{7}"
        if ruler_tasks.tables()["tasks"][task]["value"] == "number"
        else r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    )
    assert all(re.fullmatch(kind, value) for value in references)


def test_a_chain_of_variables_is_in_order(tokenizer, sources):
    text, references, _ = text_of(suite_of(tokenizer, sources), "vt")
    begin = text.rindex("Follow the chain")
    chain = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?([A-Z]{5}|[0-9]{5})", text[begin:])
    assert [name for name, _ in chain] == references and len(set(references)) == 5
    assert [source for _, source in chain[1:]] == references[:-1]
    assert f"whose value is {chain[0][1]}." in text[begin:] and "5 variables" in text[begin:]
    assert text[:begin].count("VAR ") == 9 and not any(name in text[:begin] for name in references)


@pytest.mark.parametrize(("length", "often", "seldom"), [(8192, 30, 3), (3072, 6, 1)])
def test_common_words_are_common(length, often, seldom, tokenizer, sources):
    text, references, about = text_of(suite_of(tokenizer, sources, lengths=(length,)), "cwe")
    listed = Counter(re.findall(r"^\d+\. (\S+)$", text[text.rindex("Below is a numbered") :], re.MULTILINE))
    assert {word for word, times in listed.items() if times == often} == set(references) and len(references) == 10
    assert {times for word, times in listed.items() if word not in references} == {seldom}
    assert len(listed) == 10 + about["units"]
    assert not set(references) & set(re.findall(r"^\d+\. (\S+)$", text[: text.rindex("Below is")], re.MULTILINE))


@pytest.mark.parametrize("length", [1024, 8192])
def test_frequent_words_fall_with_their_rank(length, tokenizer, sources):
    text, references, _ = text_of(suite_of(tokenizer, sources, lengths=(length,)), "fwe")
    body = text.split("\n")[1]
    ranked = Counter(body.split()).most_common(6)
    assert ranked[0][0] == "...." and [word for word, _ in ranked[1:4]] == references
    times = [n for _, n in ranked]
    assert times[0] > times[1] > times[2] > times[3] > times[4]
    assert times[1] == pytest.approx(times[0] / 4, abs=1) and times[2] == pytest.approx(times[0] / 9, abs=1)


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_questions_come_with_their_documents(task, tokenizer, sources):
    suite = suite_of(tokenizer, sources, samples=5)
    seen = set()
    for number in range(5):
        text, references, _ = text_of(suite, task, number)
        asked = int(re.search(r"(?:bridge|river) (\d)", text[text.rindex("Question:") :])[1])
        seen.add(asked)
        expected = [f"Builder {asked}", f"builder no {asked}"] if task == "qa_1" else [f"Lake {asked}"]
        assert references == expected and text.count(expected[0]) == 1
        documents = re.findall(r"^Document (\d+):$", text, re.MULTILINE)
        assert documents == [str(n) for n in range(1, len(documents) + 1)] and len(documents) > 20
    assert len(seen) == 5


def test_tasks_without_a_source_are_not_run(tokenizer, sources):
    suite = suite_of(tokenizer, Sources(hotpotqa=sources.hotpotqa))
    missing = [f"niah_{name}" for name in ("single_2", "single_3", "multikey_1", "multivalue", "multiquery")]
    assert suite.not_run == {**dict.fromkeys(missing, "needs --text"), "qa_1": "needs --squad"}
    assert not {name.split("/")[1] for name in suite.ids()} & set(suite.not_run)
    records = run([suite], Echo(), Records(None, {}))["ruler"]
    table = report.ruler_table(records, suite.not_run)
    assert "not run: qa_1, needs --squad" in table and "mean of the tasks above" in table
    assert table.count("0.0 +- 0.0") == 7


@pytest.mark.parametrize("task", TASKS)
def test_a_length_below_the_template_is_an_error(task, tokenizer, sources):
    """The error names a length that works."""
    with pytest.raises(UserError, match=f"ruler {task}: length 60 cannot hold its .* use at least") as error:
        suite_of(tokenizer, sources, lengths=(60,), tasks=(task,)).check()
    length = int(re.search(r"at least (\d+)", str(error.value))[1]) * 11 // 10  # other words are drawn for each length
    question = suite_of(tokenizer, sources, lengths=(length,), tasks=(task,)).build(f"ruler/{task}/{length}/0")
    assert len(question.prompt) + question.max_new_tokens <= length


@pytest.mark.parametrize("task", ["niah_multikey_3", "cwe", "fwe"])
def test_long_prompts_need_few_encodings(task, tokenizer, sources, monkeypatch):
    suite, calls = suite_of(tokenizer, sources, lengths=(131072,)), []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda texts: calls.append(1) or encode(texts))
    question = suite.build(f"ruler/{task}/131072/0")
    assert 131072 - 60 < len(question.prompt) + question.max_new_tokens <= 131072 and len(calls) <= 9


def test_bad_sources_are_one_line(tokenizer, tmp_path):
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match="bad.json is no JSON file"):
        suite_of(tokenizer, Sources(squad=str(tmp_path / "bad.json")), tasks=("qa_1",)).check()
    with pytest.raises(UserError, match="unknown RULER task 'vt2'; there are niah_single_1"):
        RulerConfig(lengths=(10,), tasks=("vt2",))
    with pytest.raises(UserError, match="samples of at least 1"):
        RulerConfig(lengths=(10,), samples=0)
