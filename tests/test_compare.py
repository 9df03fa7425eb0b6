"""Two evaluations side by side, and the page of one: known answers, known differences."""

import json
import re
import sys

import numpy as np
import pytest

from mtraining_nns import cli
from mtraining_nns.errors import UserError
from mtraining_nns.eval import html, intervals, report
from mtraining_nns.eval.compare import compare
from mtraining_nns.eval.runner import Records

MANIFEST = {
    "model": "models/<tiny>",
    "engine": "huggingface",
    "attention": "dense",
    "dtype": "float32",
    "device": "cpu",
    "versions": {"torch": "2"},
    "tasks": {"ruler": {"seed": 0}},
}


def evaluation(folder, scores, losses=(2.0, 3.0), **changes):
    """A folder of answers: a RULER task of one length, and sequences of 10 tokens."""
    folder.mkdir()
    records = Records(folder, MANIFEST | changes)
    for i, score in enumerate(scores):
        told = {"task": "vt", "length": 4096, "density": 1.0}
        records.add({"id": f"ruler/vt/4096/{i}", **told, "score": score})
    for i, loss in enumerate(losses):
        buckets = [{"begin": 1, "end": 11, "tokens": 10, "nll_sum": 10 * loss}]
        records.add({"id": f"perplexity/11/{i}", "length": 11, "sample": i, "density": 1.0, "buckets": buckets})
    records.close()
    return folder


def test_differences_are_those_of_pairs(tmp_path):
    """Scores that scatter, a difference that is always the same: it is known exactly."""
    rng = np.random.default_rng(0)
    scores = rng.random(200) / 2
    a = evaluation(tmp_path / "a", scores)
    b = evaluation(tmp_path / "b", scores + 0.25, losses=(2.5, 3.0), attention="mtraining")
    found = compare(a, b)
    vt, loss = found.cells
    assert (vt.name, vt.length, vt.questions) == ("ruler vt", 4096, 200)
    assert vt.a == pytest.approx(100 * scores.mean()) and vt.difference == pytest.approx(25)
    assert vt.interval == pytest.approx((25, 25))
    assert (loss.name, loss.a, loss.b) == ("perplexity, loss a token", 2.5, 2.75)
    assert loss.interval == pytest.approx((0.25 - 12.7062 * 0.25, 0.25 + 12.7062 * 0.25), rel=1e-5)
    assert found.differing == {"attention": ("dense", "mtraining")} and found.alone == 0
    table = found.table()
    assert "A and B differ in attention: 'dense', 'mtraining'" in table and "+0.2500" in table and "+25.00" in table


def test_the_interval_is_that_of_the_mean(tmp_path):
    """Of 400 independent differences of known spread: about 1.96 standard errors to each side."""
    rng = np.random.default_rng(1)
    a = evaluation(tmp_path / "a", rng.random(400), losses=())
    b = evaluation(tmp_path / "b", rng.random(400), losses=())
    (cell,) = compare(a, b).cells
    width = 1.96 * 100 * (2 / 12) ** 0.5 / 400**0.5
    assert cell.interval[1] - cell.interval[0] == pytest.approx(2 * width, rel=0.1)
    assert cell.interval[0] < cell.difference < cell.interval[1]


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (19, 2.093), (30, 2.042), (120, 1.980)]
)
def test_students_t_is_that_of_the_tables(degrees, quantile):
    assert intervals.t_quantile(degrees) == pytest.approx(quantile, abs=5e-4)


def test_the_interval_of_right_and_wrong_is_the_published_one():
    """Fagerland, Lydersen and Laake 2014, the airways of 21 patients: 1 differs one way and 7 the other."""
    differences = np.array([1] + [-1] * 7 + [0] * 13)
    assert intervals.of_scores(differences) == pytest.approx((-0.508, -0.013), abs=5e-4)


def flips(share: float):
    """Answers of which a share is right in one run alone, as often in either."""
    return lambda rng, size: rng.choice([-1, 0, 1], size, p=[share / 2, 1 - share, share / 2])


DIFFERENCES = {  # name -> (interval, what is drawn, its mean)
    "one answer in twenty differs": (intervals.of_scores, flips(0.05), 0),
    "half of them differ": (intervals.of_scores, flips(0.5), 0),
    "b is right where a is wrong": (intervals.of_scores, lambda rng, size: rng.choice([0, 1], size, p=[0.8, 0.2]), 0.2),
    "shares of words": (intervals.of_scores, lambda rng, size: rng.random(size) ** 2 - rng.random(size), 1 / 3 - 1 / 2),
    "losses": (intervals.of_mean, lambda rng, size: rng.normal(0.1, 0.3, size), 0.1),
}


@pytest.mark.parametrize("count", [2, 3, 5, 20])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_intervals_hold_the_mean_as_often_as_they_say(name, count):
    """Of 2,000 cells, whose standard error is half a percent; of few whole numbers nothing holds exactly 95 %."""
    interval, draw, mean = DIFFERENCES[name]
    rng = np.random.default_rng(count)
    found = [interval(draw(rng, count)) for _ in range(2000)]
    assert sum(low <= mean <= high for low, high in found) / 2000 > 0.92
    assert all(low < high for low, high in found)


def test_runs_that_agree_may_differ_a_little(tmp_path):
    """Twenty answers alike say no more than that few of all differ; losses alike to the last bit are of one model."""
    a = evaluation(tmp_path / "a", [1.0, 0.0] * 10)
    b = evaluation(tmp_path / "b", [1.0, 0.0] * 10)
    vt, loss = compare(a, b).cells
    assert vt.difference == 0 and vt.interval == pytest.approx((-12.6, 12.6), abs=0.1)
    assert loss.interval == (0, 0)


def test_one_question_has_no_interval_and_lonely_ones_are_counted(tmp_path):
    a = evaluation(tmp_path / "a", [1.0], losses=())
    b = evaluation(tmp_path / "b", [0.5, 1.0, 1.0], losses=())
    found = compare(a, b)
    assert found.cells[0].interval is None and found.alone == 2
    assert "2 questions were answered in one of them alone" in found.table()
    assert found.table().splitlines()[-1].split()[-1] == "-"


FULL = {
    "ruler": {
        "seed": 0,
        "lengths": [4096],
        "samples": 20,
        "tasks": ["vt"],
        "not_run": {},
        "sources": {"text": None, "squad": {"path": "a", "sha256": "s"}},
    },
    "perplexity": {"window": None, "lengths": [11], "text": {"path": "x", "skipped": {}, "sha256": "t"}},
    "pg19": {"books": {"11": {"0": {"path": "x", "blake2b": "b"}}}},
    "infinitebench": {"files": {"passkey.jsonl": "p"}},
}


def changed(tree: dict, where: str, value) -> dict:
    """A copy of a tree with the value at `a/b/c`, or without it for a value of `...`."""
    key, _, rest = where.partition("/")
    found = {name: value for name, value in tree.items() if name != key}
    if rest:
        return found | {key: changed(tree[key], rest, value)}
    return found if value is ... else found | {key: value}


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("ruler/lengths", [4096, 8192]),
        ("ruler/samples", 5),
        ("ruler/tasks", ["vt", "qa_1"]),
        ("ruler/not_run", {"qa_2": "needs --hotpotqa"}),
        ("ruler/sources/squad", ...),
        ("ruler/sources/squad/path", "b"),
        ("ruler/sources/text", {"path": "x", "sha256": "t"}),
        ("perplexity/text/path", "y"),
        ("perplexity/text/skipped", {"empty": 1}),
        ("pg19/books/22", {"0": {"path": "x", "blake2b": "c"}}),
        ("pg19/books/11/1", {"path": "y", "blake2b": "c"}),
        ("infinitebench/files/code_run.jsonl", "c"),
        ("infinitebench", ...),
    ],
)
def test_runs_that_share_some_questions_are_compared_by_those(tmp_path, where, value):
    a = evaluation(tmp_path / "a", [0.0, 1.0], tasks=FULL)
    b = evaluation(tmp_path / "b", [0.0, 1.0, 1.0], tasks=changed(FULL, where, value))
    for found in (compare(a, b), compare(b, a)):
        assert found.cells[0].questions == 2 and found.alone == 1 and found.differing == {}


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("ruler/seed", 1),
        ("ruler/sources/squad/sha256", "other"),
        ("perplexity/window", 8),
        ("perplexity/text/sha256", "other"),
        ("pg19/books/11/0/blake2b", "other"),
        ("infinitebench/files/passkey.jsonl", "other"),
    ],
)
def test_another_question_of_the_same_name_is_refused(tmp_path, where, value):
    a = evaluation(tmp_path / "a", [0.0, 1.0], tasks=FULL)
    b = evaluation(tmp_path / "b", [0.0, 1.0], tasks=changed(FULL, where, value))
    for one, other in ((a, b), (b, a)):
        with pytest.raises(UserError, match=f"they differ in tasks.{where.replace('/', '.')};"):
            compare(one, other)


def test_models_are_told_by_their_weights(tmp_path):
    a = evaluation(tmp_path / "a", [1.0], model="tiny", model_sha256="1")
    b = evaluation(tmp_path / "b", [1.0], model="tiny/", model_sha256="1")
    c = evaluation(tmp_path / "c", [1.0], model="tiny/", model_sha256="2")
    assert compare(a, b).differing == {}
    assert compare(a, c).differing == {"model": ("tiny", "tiny/"), "model_sha256": ("1", "2")}


def test_what_cannot_be_compared_is_one_line(tmp_path, capsys):
    a = evaluation(tmp_path / "a", [1.0])
    b = evaluation(tmp_path / "b", [1.0], tasks={"ruler": {"seed": 1}})
    with pytest.raises(UserError, match="asked other questions: they differ in tasks.ruler.seed"):
        compare(a, b)
    with pytest.raises(UserError, match="share no question"):
        compare(a, evaluation(tmp_path / "c", [], losses=()))
    assert cli.main(["compare", str(a), str(tmp_path / "none")]) == 2
    assert "none holds no evaluation" in capsys.readouterr().err


def test_the_page_shows_every_cell_and_needs_no_other_file(tmp_path):
    records = {
        "niah": [
            {"length": 512, "depth": depth, "score": score, "density": 0.125}
            for depth, score in ((0.0, 1.0), (50.0, 0.0))
        ],
        "ruler": [{"task": "vt", "length": 512, "score": score, "density": score / 4} for score in (0.2, 0.6)],
        "perplexity": [
            {
                "length": 11,
                "density": None,
                "buckets": [{"begin": 1, "end": 11, "tokens": 10, "nll_sum": 10 * np.log(7.0)}],
            },
        ],
    }
    page = html.write(tmp_path, MANIFEST, records, {"ruler": report.notes({"qa_1": "needs <squad>"})}).read_text()
    for words in (
        "100.0",
        "0.0",
        "40.0",
        "7.000",
        "12.5 %",
        "10.0 %",
        "<td>-</td>",
        "not run: qa_1, needs &lt;squad&gt;",
        "models/&lt;tiny&gt;",
    ):
        assert words in page, words
    assert "hsl(120 70% 80%)" in page and "hsl(0 70% 80%)" in page
    assert not re.search(r"(src|href)=|<script|<tiny>", page)


def test_cells_have_their_error(tmp_path):
    records = [{"task": "vt", "length": 512, "score": score, "density": score} for score in (0.0, 1.0)] + [
        {"task": "cwe", "length": 512, "score": 0.5, "density": None}
    ]
    vt, cwe = report.cells(records, "task", "length")
    assert vt["score"] == 50 and vt["standard_error"] == pytest.approx(50) and cwe["standard_error"] is None
    rows = report.write_csv(tmp_path, {"ruler": [vt, cwe]}).read_text().splitlines()
    assert rows[1].startswith("ruler,vt,512,,2,50.0,50.0") and rows[2] == "ruler,cwe,512,,1,50.0,,"
    assert rows[1].endswith(",0.5")
    assert json.dumps([vt, cwe])


def test_the_heat_map_is_a_picture(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    from mtraining_nns.cli.eval import _draw

    records = [
        {"length": length, "depth": depth, "score": depth > 0, "density": 1.0}
        for length in (512, 1024)
        for depth in (0.0, 50.0, 100.0)
    ]
    _draw(tmp_path, records)
    assert (tmp_path / "niah.png").read_bytes().startswith(b"\x89PNG") and "niah.png" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _draw(tmp_path, records)
    assert "pip install 'mtraining-nns[plots]'" in capsys.readouterr().err
