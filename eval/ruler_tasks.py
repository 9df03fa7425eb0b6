"""How RULER's tasks look: a function for each kind of ruler.yaml, which drafts one prompt.

Everything that is drawn follows from the seed, the task, the length and the number of the question.
"""

import functools
import random
from collections.abc import Callable, Iterator
from importlib import resources
from itertools import islice
from typing import NamedTuple

import yaml

from mtraining_nns.eval import words
from mtraining_nns.eval.niah import NOISE
from mtraining_nns.eval.prompts import Draft
from mtraining_nns.eval.ruler_sources import Sources

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
DOTS = "...."  # the most frequent word of fwe, which does not count


@functools.cache
def tables() -> dict:
    """ruler.yaml."""
    return yaml.safe_load((resources.files("mtraining_nns.eval") / "ruler.yaml").read_text(encoding="utf-8"))


class Ask(NamedTuple):
    """What a kind drafts. name, task: of ruler.yaml; number: of the question among those of its task and length."""

    name: str
    length: int
    number: int
    seed: int
    sources: Sources

    @property
    def task(self) -> dict:
        """The task's sizes at this length."""
        task = tables()["tasks"][self.name]
        short = task.get("short", {"below": 0})
        return task | short if self.length < short["below"] else task

    @property
    def rng(self) -> random.Random:
        """A generator for this question."""
        return random.Random(f"{self.seed} {self.name} {self.length} {self.number}")


def draft(ask: Ask) -> Draft:
    """The prompt of a question, its context as long as wanted."""
    return KINDS[ask.task["kind"]](ask, ask.rng)


def _niah(ask: Ask, rng: random.Random) -> Draft:
    """Needles `The ... for KEY is: VALUE` at random depths; some of their keys are asked for."""
    task = ask.task
    keys, values, queries = (task.get(name, 1) for name in ("keys", "values", "queries"))
    draw = {"word": words.pairs, "number": words.numbers, "uuid": words.uuids}
    names, found = draw[task["key"]](rng), draw[task["value"]](rng)
    if task["haystack"] == "text":
        found = (value for value in found if value not in ask.sources.joined)
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
        hay, separator = _around(ask.sources.sentences, rng.randrange(len(ask.sources.sentences))), ""
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


def _variables(ask: Ask, rng: random.Random) -> Draft:
    """A chain of assignments hidden in noise, in its order; every name of it is asked for. One example comes before."""
    names = words.letters(rng, 5, ALPHABET.upper())
    text, noise = tables()["variables"], "".join(NOISE).strip()

    def chain(hops: int) -> tuple[list[str], str, list[str]]:
        chosen, value = list(islice(names, hops + 1)), next(words.numbers(rng, 5))
        lines = [f"VAR {chosen[0]} = {value}"]
        return lines + [f"VAR {b} = VAR {a}" for a, b in zip(chosen, chosen[1:])], value, chosen

    def asked(value: str, found: list[str]) -> tuple[str, str]:
        return text["question"].format(value=value), text["answer"].format(value=value, count=len(found))

    shown, value, found = chain(ask.task["hops"])
    example = _example(text["instruction"], "\n".join(shown), *asked(value, found), found)
    lines, value, found = chain(ask.task["hops"])
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


def _common_words(ask: Ask, rng: random.Random) -> Draft:
    """A numbered list in which `common` words occur `often`, the others `seldom`. One example comes before."""
    supply, text, task = _growing(words.single_words(rng)), tables()["common_words"], ask.task
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


def _frequent_words(ask: Ask, rng: random.Random) -> Draft:
    """Code words whose frequencies fall as a power of their rank; the most frequent one is dots and does not count."""
    supply, text = _growing(words.letters(rng, 6, ALPHABET)), tables()["frequent_words"]
    alpha, answers, seed = ask.task["alpha"], ask.task["answers"], rng.random()

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


def _questions(ask: Ask, rng: random.Random) -> Draft:
    """A question of a dataset, its documents among others in random order."""
    dataset = ask.sources.dataset(ask.task["dataset"])
    order = random.Random(ask.seed).sample(range(len(dataset.asked)), len(dataset.asked))
    one = dataset.asked[order[ask.number % len(order)]]
    own, text, seed = set(one.documents), tables()["questions"], rng.random()
    others = [document for document in dataset.documents if document not in own]
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
