"""InfiniteBench on files of its published format: right answers score, questions are asked once and never cut."""

import doctest
import json
import sys

import pytest
from tiny_model import byte_tokenizer, save_llama

from mtraining_nns import cli
from mtraining_nns.errors import UserError
from mtraining_nns.eval import html, infinitebench_scoring, report
from mtraining_nns.eval.compare import compare
from mtraining_nns.eval.huggingface import TextTokenizer
from mtraining_nns.eval.infinitebench import InfiniteBench, InfiniteBenchConfig
from mtraining_nns.eval.infinitebench_rows import tables
from mtraining_nns.eval.questions import Engine
from mtraining_nns.eval.runner import Records, run
from mtraining_nns.eval.scoring import METRICS

rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")

TASKS = list(tables())
PARTIAL = ("math_calc", "longbook_qa_eng", "longbook_qa_chn", "longbook_sum_eng")  # metrics between 0 and 1
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = ["first", "second", "third", "fourth"]
LIST = [5, 88, 7, 3]


def row(context: str, asked: str, answer: list, options: tuple = ()) -> dict:
    return {"id": 0, "context": context, "input": asked, "answer": answer, "options": list(options)}


# A row of each task; then what answers it, and what answers it half where a metric has halves.
ROWS = {
    "passkey": row("The pass key is 71432. Remember it.", "What is the pass key?", ["71432"]),
    "number_string": row("The sequence of digits is 3000077442.", "What is the sequence of digits?", ["3000077442"]),
    "kv_retrieval": row(
        'JSON data:\n{"84fe-443f": "c14c-b8ba"}',
        '\nKey: "84fe-443f"\nThe value associated with the specified key is: ',
        ["c14c-b8ba"],
    ),
    "code_run": row("def func_1(x):\n    return x - 9", "Please give me the return value of func_1(-3).", [-12]),
    "code_debug": row("def third(): return {}['a']", "", ["third"], NAMES),
    "math_find": row(str(LIST), "Only one number. The largest number of the list is: ", [88]),
    "math_calc": row("9 + 3 - 5 + 1 - 1", "The value of the numerical expression is: ", [[12, 7, 8, 7]]),
    "longdialogue_qa_eng": row("$$MASK$$\nHello, {Sam}.", "", ["ACE", "JONAH KING"]),
    "longbook_qa_eng": row("He died in the war.", "How did he die?", ["in combat", "bravely fighting"]),
    "longbook_choice_eng": row("A book.", "Which one?", ["third"], NAMES),
    "longbook_sum_eng": row("A long story of a man.", "", ["The man left.\nNobody saw him."]),
    "longbook_qa_chn": row("很久以前。", "谁死了？", ["胡一刀，马行空"]),
}
RIGHT = {
    "passkey": " 71432",
    "number_string": " 3000077442",
    "kv_retrieval": '"c14c-b8ba"',
    "code_run": " -12",
    "code_debug": " C",
    "math_find": "88",
    "math_calc": " [12, 7, 8, 7]",
    "longdialogue_qa_eng": " Jonah King.",
    "longbook_qa_eng": " Bravely fighting!",
    "longbook_choice_eng": " C.",
    "longbook_sum_eng": " The man left. \n Nobody saw him.",
    "longbook_qa_chn": "胡一刀马行空",
}
HALF = RIGHT | {
    "math_calc": "12, 7, 9, 7",
    "longbook_qa_eng": "fighting cowardly",
    "longbook_sum_eng": "The man came. Everybody saw them.",
    "longbook_qa_chn": "胡一刀死了吗",
}


@pytest.fixture(scope="module")
def tokenizer():
    made = byte_tokenizer()
    made.chat_template = CHATML
    return TextTokenizer(made)


def write(folder, rows: dict[str, list[dict]]):
    """A folder of files as published."""
    folder.mkdir(exist_ok=True)
    for task, some in rows.items():
        text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in some)
        (folder / f"{task}.jsonl").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write(tmp_path_factory.mktemp("files"), {task: [one, one | {"id": 1}] for task, one in ROWS.items()})


def suite_of(tokenizer, folder, **settings) -> InfiniteBench:
    suite = InfiniteBench(InfiniteBenchConfig(**{"lengths": (32768, 2048), **settings}), tokenizer, folder)
    suite.check()
    return suite


class Telling(Engine):
    """Answers every question of a task alike."""

    batch_size = 3

    def __init__(self, suite, answers: dict[str, str]):
        tokenizer, questions = suite.form.tokenizer, map(suite.build, suite.ids())
        self.answers = {tuple(one.prompt): tokenizer.encode([answers[one.about["task"]]])[0] for one in questions}

    def generate(self, prompts, max_new_tokens):
        return [self.answers[tuple(prompt)] for prompt in prompts]


class Echo(Engine):
    """The beginning or the end of the prompt, as much as may be generated."""

    batch_size = 2

    def __init__(self, end: bool):
        self.end = end

    def generate(self, prompts, max_new_tokens):
        return [prompt[-max_new_tokens:] if self.end else prompt[:max_new_tokens] for prompt in prompts]


def scores(engine, suite) -> dict[str, float]:
    records = run([suite], engine, Records(None, {}))["infinitebench"]
    return {cell["task"]: cell["score"] for cell in report.cells(records, "task", "length")}


@pytest.mark.parametrize("chat", [False, True])
def test_planted_answers_score_100_half_of_them_half_and_the_prompt_nothing(tokenizer, files, chat):
    """F1 and ROUGE count shared words, so a prompt that shares some with the answer earns something there."""
    suite = suite_of(tokenizer, files, chat=chat)
    assert scores(Telling(suite, RIGHT), suite) == dict.fromkeys(TASKS, 100)
    half = scores(Telling(suite, HALF), suite)
    assert half == pytest.approx({task: 50 if task in PARTIAL else 100 for task in TASKS})
    for end in (False, True):
        found = scores(Echo(end), suite)
        assert 0 < found.pop("longbook_sum_eng") < 60
        assert found == dict.fromkeys(found, 0.0)


@pytest.mark.parametrize("task", TASKS)
def test_prompts_hold_the_row_and_end_with_the_beginning_of_the_answer(tokenizer, files, task):
    base, chat = (suite_of(tokenizer, files, tasks=(task,), chat=chat) for chat in (False, True))
    (name, _), table = base.ids(), tables()[task]
    text = tokenizer.decode(base.build(name).prompt)
    turned = tokenizer.tokenizer.decode(chat.build(name).prompt)
    one = ROWS[task]
    assert one["context"] in text and text == text.rstrip()
    assert text.endswith(table["answer"].replace("{call}", "func_1(-3)") or one["input"].strip())
    assert all(f"{letter}. {name}" in text for letter, name in zip("ABCD", one["options"]))
    asked, begun = turned.split("<|im_end|>\n<|im_start|>assistant\n")
    assert asked.startswith("<|im_start|>") and (asked.removeprefix("<|im_start|>") + begun) == text
    assert base.build(name).max_new_tokens == table["max_new_tokens"]


def test_what_a_template_finds_in_a_row(tokenizer, files):
    suite = suite_of(tokenizer, files, tasks=("code_run", "math_find", "math_calc", "code_debug"))
    found = {name.split("/")[1]: suite.build(name) for name in suite.ids()}
    text = {task: tokenizer.decode(question.prompt) for task, question in found.items()}
    assert "among them func_1." in text["code_run"] and "what func_1(-3) returns" in text["code_run"]
    assert text["math_find"].startswith("Find the largest number of this list.")
    assert found["math_calc"].references == ["12", "7", "8", "7"]
    assert found["code_debug"].references == ["third", "C"]


def test_a_question_is_asked_once_at_the_smallest_length_that_holds_it(tokenizer, tmp_path):
    """A token a byte: prompt and budget of 600, 601, 1000 and 1001 tokens, lengths 600 and 1000."""
    empty = suite_of(tokenizer, write(tmp_path, {"passkey": [ROWS["passkey"] | {"context": ""}]}), lengths=(10**6,))
    around = len(empty.build(*empty.ids()).prompt) + 6
    rows = [ROWS["passkey"] | {"context": "x" * (size - around)} for size in (601, 600, 1000, 1001)]
    write(tmp_path, {"passkey": rows})
    suite = suite_of(tokenizer, tmp_path, lengths=(1000, 600))
    assert suite.ids() == [
        "infinitebench/passkey/600/1",
        "infinitebench/passkey/1000/0",
        "infinitebench/passkey/1000/2",
    ]
    assert [len(suite.build(name).prompt) + 6 for name in suite.ids()] == [600, 601, 1000]
    assert suite.not_asked == {"passkey": "1 of 4 are longer than 1000 tokens with 6 to generate"}
    first = suite_of(tokenizer, tmp_path, lengths=(1000, 600), samples=1)
    assert first.ids() == ["infinitebench/passkey/1000/0"] and not first.not_asked


def test_every_question_is_tokenised_once(tokenizer, files, monkeypatch):
    encode, seen = tokenizer.encode, []
    monkeypatch.setattr(tokenizer, "encode", lambda texts: seen.append(1) or encode(texts))
    suite = suite_of(tokenizer, files)
    questions = [suite.build(name) for name in [*suite.ids(), *suite.ids()]]
    assert len(seen) == 2 * len(TASKS) and questions[0] == questions[len(suite.ids())]


def test_a_control_token_in_a_book_is_text(files, tmp_path):
    tokenizer = TextTokenizer(byte_tokenizer(bos=True))
    write(tmp_path, {"passkey": [ROWS["passkey"] | {"context": "<eos><bos>"}]})
    suite = suite_of(tokenizer, tmp_path)
    prompt = suite.build(*suite.ids()).prompt
    assert prompt[0] == tokenizer.first and tokenizer.first not in prompt[1:] and tokenizer.eos not in prompt
    assert "<eos><bos>" in tokenizer.decode(prompt)


def test_what_is_not_run_and_not_asked_is_said_and_not_scored(tokenizer, files, tmp_path):
    rows = {"passkey": [ROWS["passkey"]], "math_calc": [ROWS["math_calc"]] * 3, "code_run": [ROWS["code_run"]] * 2}
    rows["passkey"].append(ROWS["passkey"] | {"context": "x" * 900})
    suite = suite_of(tokenizer, write(tmp_path, rows), lengths=(512, 2048), tasks=(*rows, "kv_retrieval"))
    records = run([suite], Telling(suite, RIGHT), Records(None, {}))["infinitebench"]
    missing = suite.not_run, suite.not_asked
    result = report.infinitebench_result(records, *missing)
    assert result["not_run"] == {"kv_retrieval": "needs kv_retrieval.jsonl"}
    assert result["not_asked"] == {"math_calc": "3 of 3 are longer than 2048 tokens with 30000 to generate"}
    found = [(cell["task"], cell["length"], cell["samples"]) for cell in result["cells"]]
    assert found == [("passkey", 512, 1), ("code_run", 512, 2), ("passkey", 2048, 1)]
    lines = report.infinitebench_table(records, *missing).splitlines()
    assert [line.split() for line in lines[2:4]] == [
        ["passkey", *"100.0 (1) 100.0 (1)".split()],
        ["code_run", *"100.0 +- 0.0 (2) -".split()],
    ]
    assert lines[4].split() == [*"kept by prefill - -".split()]
    assert lines[5:] == report.notes(*missing) and lines[6].startswith("not asked: math_calc, 3 of 3 are longer than")
    manifest = {"model": "m", "engine": "e", "attention": "dense", "dtype": "f", "device": "cpu", "versions": {}}
    page = html.write(tmp_path, manifest, {"infinitebench": records}, {"infinitebench": lines[5:]}).read_text()
    assert "<td>-</td>" in page and "100.0 <small>(2)</small>" in page and all(line in page for line in lines[5:])


def test_metrics_by_hand():
    assert doctest.testmod(infinitebench_scoring).failed == 0
    for metric, answer, references, score in (
        ("first_digits", "Key 5: 71432", ["71432"], 0),
        ("first_digits", "714321", ["71432"], 0),
        ("first_digits", "none", ["71432"], 0),
        ("word", "xc14c-b8ba", ["c14c-b8ba"], 0),
        ("last_number", "10.\n\n", ["10"], 1),
        ("last_number", "10 or so", ["10"], 0),
        ("last_number", "", ["10"], 0),
        ("first_number", "49.5", ["49"], 0),
        ("first_number", "about 88.0", ["88"], 1),
        ("first_number", "", ["88"], 0),
        ("leading_values", "4, 9, 6", ["4", "8", "6", "1"], 0.25),
        ("leading_values", "4 8 6 1 7", ["4", "8", "6", "1"], 1),
        ("leading_values", "", ["4"], 0),
        ("leading_values", "007, " + "9" * 5000, ["7", "8"], 0.5),
        ("leading_values", "9" * 5000 + " 8", ["9" * 5000, "8"], 1),
        ("last_number", "0" * 5000 + "10", ["10"], 1),
        ("last_number", "-" + "9" * 5000, ["10"], 0),
        ("last_number", "+0010", ["10"], 1),
        ("last_number", "-10", ["10"], 0),
        ("last_number", "-0", ["0"], 1),
        ("first_number", "9" * 5000, ["10"], 0),
        ("name", "ACES", ["ACE"], 0),
        ("name", "it's dr. sanger", ["SANGER", "DR. SANGER"], 1),
        ("choice", "B. third", ["third", "C"], 0),
        ("choice", "(C) third", ["third", "C"], 1),
        ("choice", "third", ["third", "C"], 1),
        ("choice", "Because of B, the answer is C", ["third", "C"], 1),
        ("choice", "The answer is: **third**", ["third", "C"], 1),
        ("choice", "Dorothea", ["third", "D"], 0),
        ("choice", "", ["third", "C"], 0),
        ("stated_choice", "C\n\nBecause", ["third", "C"], 1),
        ("stated_choice", "A. fine\nThe correct option is: option C", ["third", "C"], 1),
        ("stated_choice", "I would say C", ["third", "C"], 0),
        ("stated_choice", "The answer is: Cthird", ["third", "C"], 0),
        ("f1", "the a", ["an"], 0),
        ("f1", "He wept. He wept!", ["he laughed"], 1 / 3),  # one of 4 and one of 2
        ("f1_characters", "《三体》", ["三体"], 0.8),  # the official list keeps the first bracket
    ):
        assert METRICS[metric](answer, references) == pytest.approx(score), (metric, answer)


@pytest.mark.parametrize(
    "answer", ["The man left town.\nNobody saw him again.", "", "Nobody\nThe man was seen leaving."]
)
def test_rouge_is_that_of_rouge_score(answer):
    references = ["The man left.\nNobody saw him.", "A man was leaving."]
    scorer = rouge_scorer.RougeScorer(["rougeLsum"], use_stemmer=False)
    expected = [scorer.score(reference, answer)["rougeLsum"].fmeasure for reference in references]
    assert METRICS["rouge_lsum"](answer, references) == max(expected)


def test_a_run_that_was_killed_ends_with_the_same_files(tokenizer, files, tmp_path):
    suite = suite_of(tokenizer, files)

    class Dying(Telling):
        left = -1

        def generate(self, prompts, max_new_tokens):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return super().generate(prompts, max_new_tokens)

    for folder, rounds in (("straight", (-1,)), ("killed", (1, 4, 3, -1))):
        (tmp_path / folder).mkdir()
        for left in rounds:
            engine, records = Dying(suite, RIGHT), Records(tmp_path / folder, {})
            engine.left = left
            try:
                run([suite_of(tokenizer, files)], engine, records)
            except KeyboardInterrupt:
                assert left > 0
            records.close()
    first, second = ((tmp_path / folder / "records.jsonl").read_bytes() for folder in ("straight", "killed"))
    assert first == second and first.count(b"\n") == len(suite.ids()) == 2 * len(TASKS)


@pytest.mark.parametrize(
    ("task", "line", "message"),
    (
        ("passkey", "{", "line 2: .*; give InfiniteBench's file as published"),
        ("passkey", "[]", "line 2: expected a JSON object, got list"),
        ("passkey", '{"context": "", "input": ""}', "line 2: lacks 'answer'"),
        ("passkey", '{"context": null}', "line 2: expected text as its context, got None"),
        ("passkey", '{"context": "", "input": "", "answer": []}', "line 2: has no answer"),
        ("code_run", json.dumps(ROWS["passkey"]), "line 2: expected .*func.* in its input, got 'What is the pass key"),
        (
            "code_debug",
            json.dumps(ROWS["code_debug"] | {"answer": ["x"]}),
            "line 2: expected one of its options as answer",
        ),
        ("code_debug", json.dumps(ROWS["code_debug"] | {"options": None}), "line 2: expected four options, got None"),
    ),
)
def test_a_row_that_is_not_as_published_is_one_line(tokenizer, tmp_path, task, line, message):
    (tmp_path / f"{task}.jsonl").write_text(f"{json.dumps(ROWS[task])}\n{line}\n")
    with pytest.raises(UserError, match=f"{task}.jsonl, {message}"):
        suite_of(tokenizer, tmp_path)
    (tmp_path / f"{task}.jsonl").write_text("\n")
    with pytest.raises(UserError, match=f"{task}.jsonl holds no question; give InfiniteBench's file"):
        suite_of(tokenizer, tmp_path)


def evaluate(folder, files, *words: str) -> int:
    given = ["--model", str(folder), "--suite", "infinitebench", "--infinitebench", str(files), "--lengths", "1k,2k"]
    return cli.main(["eval", *given, "--device", "cpu", *words])


def test_infinitebench_from_the_command_line(files, tmp_path, capsys):
    folder, tasks = save_llama(tmp_path / "model"), "passkey,code_debug,math_calc,longbook_choice_eng"
    dense, again = tmp_path / "dense", tmp_path / "again"
    assert evaluate(folder, files, "--tasks", tasks, "--samples", "1", "--out", str(dense)) == 0
    printed = capsys.readouterr().out
    assert "not asked: math_calc, 1 of 1 are longer than 2048 tokens with 30000 to generate" in printed
    results = json.loads((dense / "results.json").read_text())
    assert [(cell["task"], cell["length"]) for cell in results["infinitebench"]["cells"]] == [
        ("passkey", 1024),
        ("code_debug", 1024),
        ("longbook_choice_eng", 1024),
    ]
    assert "infinitebench,passkey,1024,,1," in (dense / "scores.csv").read_text()
    assert "not asked: math_calc" in (dense / "report.html").read_text()
    settings = results["manifest"]["tasks"]["infinitebench"]
    assert set(settings["files"]) == {f"{task}.jsonl" for task in tasks.split(",")}
    assert all(len(digest) == 64 for digest in settings["files"].values())
    kept = {name: (dense / name).read_bytes() for name in ("records.jsonl", "results.json", "scores.csv")}
    assert evaluate(folder, files, "--tasks", tasks, "--samples", "1", "--out", str(dense)) == 0
    assert {name: (dense / name).read_bytes() for name in kept} == kept and capsys.readouterr().out == printed
    assert evaluate(folder, files, "--tasks", tasks, "--samples", "1", "--dtype", "bfloat16", "--out", str(again)) == 0
    names = [cell.name for cell in compare(dense, again).cells]
    assert names == ["infinitebench passkey", "infinitebench code_debug", "infinitebench longbook_choice_eng"]


def test_tasks_are_shared_out_between_suites(files, tmp_path, capsys):
    folder = save_llama(tmp_path)
    both = ("--suite", "ruler,infinitebench", "--samples", "1", "--lengths", "2k")
    assert evaluate(folder, files, *both, "--tasks", "passkey,niah_single_1") == 0
    printed = capsys.readouterr().out
    assert " niah_single_1 " in printed and " passkey " in printed and " vt " not in printed
    assert evaluate(folder, files, *both, "--tasks", "passkey") == 2
    assert "--tasks names no task of ruler, got passkey; name some" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    (
        ("--tasks passkey,kv", "unknown InfiniteBench task 'kv'; there are passkey, number_string"),
        ("--tasks vt", "unknown InfiniteBench task 'vt'"),
        ("--samples 0", "samples of at least 1, got [1024, 2048] and 0"),
        ("--lengths 4k", "4096 tokens exceed max_position_embeddings=2048"),
        ("--prompt chat", "no chat template; use --prompt base"),
        ("--infinitebench none --tasks passkey", "none has none of passkey.jsonl; give --infinitebench the folder"),
        ("--tasks longbook_sum_eng", "pip install 'mtraining-nns[infinitebench]', or name other --tasks"),
    ),
)
def test_mistakes_end_before_the_weights_are_loaded(files, tmp_path, capsys, monkeypatch, words, message):
    folder = save_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    capsys.readouterr()
    assert evaluate(folder, files, *words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("mtraining: error: ") and message in error and error.count("\n") == 1


def test_the_suite_needs_its_folder(tmp_path, capsys):
    words = ["eval", "--model", str(save_llama(tmp_path)), "--suite", "infinitebench", "--lengths", "1k"]
    assert cli.main(words) == 2
    assert "infinitebench needs its files; give their folder with --infinitebench DIR" in capsys.readouterr().err
