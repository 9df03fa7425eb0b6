"""RULER: 13 tasks of retrieval, tracing, counting and question answering at any length; the tasks are in ruler.yaml.

    ruler = Ruler(RulerConfig(lengths=(4096,), samples=20), tokenizer, sources)
    question = ruler.build("ruler/vt/4096/0")

Every prompt follows from the seed, its task, its length and its number alone. What a task reads comes from `sources`:
text (any documents; the paper takes essays), squad and hotpotqa (their JSON files). Tasks whose source is missing are
not run, and said so; they never count as 0.

Source of sizes, budgets and metrics: Hsieh et al. 2024 (see ruler.yaml). Own: the wording, sentences of the haystack
`noise`, words from the package wonderwords. So scores compare with each other, and with published ones roughly.
"""

import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path

import yaml

from mtraining_nns.errors import UserError
from mtraining_nns.eval import words
from mtraining_nns.eval.niah import NOISE, split_sentences
from mtraining_nns.eval.prompts import Draft, Format, fitted
from mtraining_nns.eval.questions import Generative, Question

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
DOTS = "...."  # the most frequent word of fwe, which does not count


@functools.cache
def tables() -> dict:
    """ruler.yaml."""
    return yaml.safe_load((resources.files("mtraining_nns.eval") / "ruler.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class RulerConfig:
    """Lengths in tokens, prompt and generation together; tasks of ruler.yaml, None for all of them."""

    lengths: tuple[int, ...]
    tasks: tuple[str, ...] | None = None
    samples: int = 20
    seed: int = 0
    chat: bool = False

    def __post_init__(self):
        known = tables()["tasks"]
        if self.tasks is None:
            object.__setattr__(self, "tasks", tuple(known))
        for task in self.tasks:
            if task not in known:
                raise UserError(f"unknown RULER task {task!r}; there are {', '.join(known)}")
        if not self.lengths or min(self.lengths) < 1 or self.samples < 1:
            raise UserError(
                f"ruler needs lengths and samples of at least 1, got {list(self.lengths)} and {self.samples}"
            )


@dataclass(frozen=True)
class Sources:
    """What tasks read. text: documents; squad, hotpotqa: paths of their JSON files; None where there is none."""

    text: tuple[str, ...] | None = None
    squad: str | None = None
    hotpotqa: str | None = None

    def describe(self) -> dict:
        """The files with their sha256, for a manifest."""
        paths = {"squad": self.squad, "hotpotqa": self.hotpotqa}
        return {name: {"path": path, "sha256": _sha256(Path(path))} for name, path in paths.items() if path}


class Ruler(Generative):
    """The questions of a run, by id: ruler/TASK/LENGTH/NUMBER. not_run: tasks without a source, and what they need."""

    name = "ruler"

    def __init__(self, config: RulerConfig, tokenizer, sources: Sources):
        self.config, self.sources, self.read = config, sources, {}
        self.form = Format(tokenizer, chat=config.chat)
        missing = {task: self._missing(tables()["tasks"][task]) for task in config.tasks}
        self.not_run = {task: f"needs {source}" for task, source in missing.items() if source}
        self.tasks = [task for task in config.tasks if not missing[task]]

    def _missing(self, task: dict) -> str | None:
        source = task.get("dataset") or ("text" if task.get("haystack") == "text" else None)
        return source if source and getattr(self.sources, source) is None else None

    def ids(self) -> list[str]:
        """Of all questions, in the order in which they are asked."""
        lengths, samples = self.config.lengths, range(self.config.samples)
        return [f"{self.name}/{task}/{length}/{i}" for length in lengths for task in self.tasks for i in samples]

    def check(self) -> None:
        """UserError, before any model is loaded, if the shortest length cannot hold a first question of each task."""
        for task in self.tasks:
            self.build(f"{self.name}/{task}/{min(self.config.lengths)}/0")

    def build(self, name: str) -> Question:
        """UserError where the length cannot hold the question."""
        _, task, length, i = name.split("/")
        settings = tables()["tasks"][task]
        rng = random.Random(f"{self.config.seed} {task} {length} {i}")
        short = settings.get("short", {"below": 0})
        draft = KINDS[settings["kind"]](self, rng, settings | (short if int(length) < short["below"] else {}), int(i))
        budget = settings["max_new_tokens"]
        prompt = fitted(draft, self.form, int(length), budget, f"ruler {task}")
        about = {"task": task, "length": int(length), "sample": int(i), "units": prompt.units, **draft.about}
        return Question(name, prompt.token_ids, budget, draft.references, settings["metric"], about)

    @functools.cached_property
    def sentences(self) -> list[str]:
        """Of the documents in `sources.text`."""
        found = [sentence for sentence in split_sentences("\n\n".join(self.sources.text)) if sentence.strip()]
        if not found:
            raise UserError("the text for RULER's haystacks has no sentence; give one that is not empty")
        return found

    @functools.cached_property
    def joined(self) -> str:
        return "".join(self.sentences)

    def asked(self, dataset: str) -> tuple[list["Asked"], list[str]]:
        """(questions, all documents) of a dataset."""
        if dataset not in self.read:
            self.read[dataset] = READERS[dataset](Path(getattr(self.sources, dataset)))
        return self.read[dataset]


def _niah(ruler: Ruler, rng: random.Random, task: dict, i: int) -> Draft:
    """Needles `The ... for KEY is: VALUE` at random depths; some of their keys are asked for."""
    keys, values, queries = (task.get(name, 1) for name in ("keys", "values", "queries"))
    draw = {"word": words.pairs, "number": words.numbers, "uuid": words.uuids}
    names, found = draw[task["key"]](rng), draw[task["value"]](rng)
    if task["haystack"] == "text":
        found = (value for value in found if value not in ruler.joined)
    needles = {key: list(islice(found, values)) for key in islice(names, keys)}
    asked = rng.sample(list(needles), queries)
    text, name = tables()["niah"], f"magic {task['value']}"

    def sentence(key: str, value: str) -> str:
        return text["needle"].format(value_name=name, key=key, value=value)

    hidden = [sentence(key, value) for key, some in needles.items() for value in some]
    depths = sorted(rng.choice(range(0, 101)) for _ in hidden)
    rng.shuffle(hidden)
    if task["haystack"] == "needles":
        hay, separator = _growing(sentence(key, value) for key, value in zip(names, found)), "\n"
    elif task["haystack"] == "noise":
        hay, separator = (lambda count: ["".join(NOISE).strip()] * count), "\n"
    else:
        hay, separator = _around(ruler.sentences, rng.randrange(len(ruler.sentences))), ""
        hidden = [f" {needle}" for needle in hidden]
    names_asked = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    fields = {"value_name": name, "query": names_asked}
    return Draft(
        instruction=text["instruction"].format(**fields),
        context=lambda count: separator.join(_with(hay(count), hidden, [depth / 100 for depth in depths])),
        question=text["question"].format(**fields),
        answer=text["answer"].format(**fields),
        references=[value for key in asked for value in needles[key]],
        about={"depths": depths},
    )


def _variables(ruler: Ruler, rng: random.Random, task: dict, i: int) -> Draft:
    """A chain of assignments hidden in noise, in its order; every name of it is asked for. One example comes before."""
    names = words.letters(rng, 5, ALPHABET.upper())
    text, noise = tables()["variables"], "".join(NOISE).strip()

    def chain(hops: int) -> tuple[list[str], str, list[str]]:
        chosen, value = list(islice(names, hops + 1)), next(words.numbers(rng, 5))
        lines = [f"VAR {chosen[0]} = {value}"]
        return lines + [f"VAR {b} = VAR {a}" for a, b in zip(chosen, chosen[1:])], value, chosen

    def asked(value: str, found: list[str]) -> tuple[str, str]:
        return text["question"].format(value=value), text["answer"].format(value=value, count=len(found))

    shown, value, found = chain(task["hops"])
    example = _example(text["instruction"], "\n".join(shown), *asked(value, found), found)
    lines, value, found = chain(task["hops"])
    depths = sorted(rng.random() for _ in lines)
    question, answer = asked(value, found)
    return Draft(
        instruction=example + text["instruction"],
        context=lambda count: "\n".join(_with([noise] * count, lines, depths)),
        question=question,
        answer=answer,
        references=found,
        about={"depths": [round(100 * depth) for depth in depths]},
    )


def _common_words(ruler: Ruler, rng: random.Random, task: dict, i: int) -> Draft:
    """A numbered list in which `common` words occur `often`, the others `seldom`. One example comes before."""
    supply, text = _growing(words.single_words(rng)), tables()["common_words"]
    common, example, seed = task["common"], task["example"], rng.random()
    shown = supply(example["words"])
    question, answer = (text[part].format(count=common) for part in ("question", "answer"))

    def listed(often: list[str], seldom: list[str], times: dict) -> str:
        entries = often * times["often"] + seldom * times["seldom"]
        random.Random(seed).shuffle(entries)
        return "\n".join(f"{number}. {word}" for number, word in enumerate(entries, 1))

    begin = listed(shown[:common], shown[common:], example)
    often, used = supply(len(shown) + common)[len(shown) :], len(shown) + common
    return Draft(
        instruction=_example(text["instruction"], begin, question, answer, shown[:common]) + text["instruction"],
        context=lambda count: listed(often, supply(used + count)[used:], task),
        question=question,
        answer=answer,
        references=often,
    )


def _frequent_words(ruler: Ruler, rng: random.Random, task: dict, i: int) -> Draft:
    """Code words whose frequencies fall as a power of their rank; the most frequent one is dots and does not count."""
    supply, text = _growing(words.letters(rng, 6, ALPHABET)), tables()["frequent_words"]
    alpha, answers, seed = task["alpha"], task["answers"], rng.random()

    def coded(count: int) -> str:
        total = sum(rank**-alpha for rank in range(1, count + 1))
        times = [round(count * rank**-alpha / total) for rank in range(1, count + 1)]
        names = [DOTS, *supply(len(times))]
        entries = [name for name, n in zip(names, times) for _ in range(n)]
        random.Random(seed).shuffle(entries)
        return " ".join(entries)

    return Draft(
        instruction=text["instruction"].format(count=answers),
        context=coded,
        question=text["question"].format(count=answers),
        answer=text["answer"].format(count=answers),
        references=supply(answers),
        least=100,  # below, ranks 2 to 5 could occur equally often
    )


def _questions(ruler: Ruler, rng: random.Random, task: dict, i: int) -> Draft:
    """Question `i` of a dataset, its documents among others in random order."""
    asked, documents = ruler.asked(task["dataset"])
    one = asked[
        random.Random(f"{ruler.config.seed} {task['dataset']}").sample(range(len(asked)), len(asked))[i % len(asked)]
    ]
    own, text, seed = set(one.documents), tables()["questions"], rng.random()
    others = [document for document in documents if document not in own]
    rng.shuffle(others)

    def context(count: int) -> str:
        chosen = [*one.documents, *(others[n % len(others)] for n in range(count - len(one.documents)))]
        random.Random(seed).shuffle(chosen)
        return "\n\n".join(f"Document {n}:\n{document}" for n, document in enumerate(chosen, 1))

    return Draft(
        instruction=text["instruction"] + "\n",
        context=context,
        question="\n" + text["question"].format(question=one.question),
        answer=text["answer"],
        references=one.answers,
        least=len(one.documents),
    )


KINDS = {
    "niah": _niah,
    "variables": _variables,
    "common_words": _common_words,
    "frequent_words": _frequent_words,
    "questions": _questions,
}


def _example(instruction: str, context: str, question: str, answer: str, found: list[str]) -> str:
    return f"{instruction}\n{context}\n{question}{answer} {', '.join(found)}\n\n"


def _growing(supply: Iterator[str]) -> Callable[[int], list[str]]:
    """count -> the first so many, always the same ones."""
    kept: list[str] = []

    def first(count: int) -> list[str]:
        kept.extend(islice(supply, max(0, count - len(kept))))
        return kept[:count]

    return first


def _around(sentences: list[str], start: int) -> Callable[[int], list[str]]:
    """count -> so many sentences from one of them on, round and round."""
    return lambda count: [sentences[(start + n) % len(sentences)] for n in range(count)]


def _with(hay: list[str], needles: list[str], depths: list[float]) -> list[str]:
    """The hay with needles at their depths, ascending shares of it."""
    places = [round(depth * len(hay)) for depth in depths]
    mixed, before = [], 0
    for place, needle in zip(places, needles):
        mixed += [*hay[before:place], needle]
        before = place
    return mixed + hay[before:]


@dataclass(frozen=True)
class Asked:
    """A question of a dataset and the documents that answer it."""

    question: str
    answers: list[str]
    documents: list[str]


def _squad(path: Path) -> tuple[list[Asked], list[str]]:
    """SQuAD 1.1 or 2.0 as published; questions without an answer are left out."""
    paragraphs = [paragraph for article in _json(path)["data"] for paragraph in article["paragraphs"]]
    asked = [
        Asked(one["question"], sorted({answer["text"] for answer in one["answers"]}), [paragraph["context"]])
        for paragraph in paragraphs
        for one in paragraph["qas"]
        if one["answers"]
    ]
    return asked, list(dict.fromkeys(paragraph["context"] for paragraph in paragraphs))


def _hotpotqa(path: Path) -> tuple[list[Asked], list[str]]:
    """HotpotQA's distractor setting as published: ten paragraphs a question."""
    rows = _json(path)
    asked = [Asked(row["question"], [row["answer"]], [_paragraph(*part) for part in row["context"]]) for row in rows]
    return asked, list(dict.fromkeys(document for one in asked for document in one.documents))


def _paragraph(title: str, sentences: list[str]) -> str:
    return f"{title}\n{''.join(sentences)}"


def _json(path: Path):
    try:
        return json.loads(_bytes(path))
    except ValueError as error:
        raise UserError(f"{path} is no JSON file ({error}); give it as published") from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give the file as published") from error


def _sha256(path: Path) -> str:
    return hashlib.sha256(_bytes(path)).hexdigest()


READERS = {"squad": _squad, "hotpotqa": _hotpotqa}
