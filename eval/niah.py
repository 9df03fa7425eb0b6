"""Needles in a haystack: sentences with a magic number each, hidden in a long text, asked for at the end.

    [BOS] instruction | haystack ... needle ... haystack | question, "the magic number of Lisbon is" -> "4821973"
                      depth 0 %                     100 %

Of several needles the first lies at the depth and the others evenly between it and the end; all are asked for.
Prompts are built from token ids of the evaluated model, so lengths are exact: prompt plus the generation budget is at
most the asked length and less than one sentence short of it. Nothing is ever truncated; a length that cannot hold the
template and a sentence is an error. Only generated text is scored, so repeating the prompt earns nothing.
Not for comparing with published tables to the digit: the template is our own, and the haystack is what you give.
"""

import random
import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from mtraining_nns.errors import UserError
from mtraining_nns.eval.prompts import Format
from mtraining_nns.eval.questions import Generative, Question

INSTRUCTION = (
    "Somewhere in the text below, one sentence states the magic number of a city. "
    "Find it and remember it: the question after the text asks for it.\n\n"
)
NEEDLE = " The magic number of {city} is {answer}."
QUESTION = "\n\nQuestion: What is the magic number of {city}?\n"
ANSWER = "Answer: The magic number of {city} in the text is"
INSTRUCTION_OF_SEVERAL = (
    "Somewhere in the text below, {count} sentences state the magic number of a city each. "
    "Find them and remember them: the question after the text asks for them.\n\n"
)
QUESTION_OF_SEVERAL = "\n\nQuestion: What are the magic numbers of {city}?\n"
ANSWER_OF_SEVERAL = "Answer: The magic numbers of {city} in the text are"
CITIES = ("Lisbon", "Nairobi", "Kyoto", "Quito", "Oslo", "Hanoi", "Denver", "Tunis", "Perth", "Riga", "Cusco", "Bergen")
NOISE = (
    " The river runs slowly past the old mill.",
    " A train leaves the station shortly after noon.",
    " Some clouds drift over the hills towards the sea.",
    " The baker opens the shop before the sun is up.",
    " Two children fly a kite in the empty field.",
    " In the evening the lamps along the harbour are lit.",
)
MAX_SENTENCE_CHARACTERS = 300  # text without sentence ends (code, tables) is cut into pieces of this size


@dataclass(frozen=True, kw_only=True)
class NiahConfig:
    """Lengths in tokens, prompt plus generation; depths in percent of the haystack, of the first of `needles`."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    samples: int = 1
    max_new_tokens: int = 32
    seed: int = 0
    chat: bool = False
    needles: int = 1

    def __post_init__(self):
        if not self.lengths or min(self.lengths) < 1:
            raise UserError(f"niah needs lengths of at least 1 token, got {list(self.lengths)}; give e.g. 1k,4k")
        if not self.depths or not all(0 <= depth <= 100 for depth in self.depths):
            raise UserError(f"niah depths must lie in 0..100 percent, got {list(self.depths)}; give e.g. 0,50,100")
        if not 1 <= self.needles <= len(CITIES):
            raise UserError(f"niah hides 1 to {len(CITIES)} needles, got {self.needles}; change --needles")
        if self.samples < 1 or self.max_new_tokens < 1:
            raise UserError(
                f"niah needs at least 1 sample and 1 generated token, got samples={self.samples}, "
                f"max_new_tokens={self.max_new_tokens}; give --samples and --max-new-tokens of 1 or more"
            )


def split_sentences(text: str) -> list[str]:
    """Sentences that join to `text` again: `"A b. C?\\nD" -> ["A b.", " C?\\n", "D"]`.

    A space opens the sentence after it and line ends close the one before, which is where tokenizers cut as well.
    """
    pieces = re.split(r"(?<=[.!?])(?= )|(?<=[。！？\n])(?!\n)", text)
    size = MAX_SENTENCE_CHARACTERS
    cut = re.compile(rf"(?s).{{1,{size}}}(?=\s|$)|.{{1,{size}}}")
    return [part for piece in pieces for part in (cut.findall(piece) if len(piece) > size else [piece]) if part]


class _Draw(NamedTuple):
    """What chance decides of a question; needles and question are token ids."""

    length: int
    depth: float
    cities: str
    answers: list[str]
    needles: list[list[int]]
    question: list[int]
    start: int


class Niah(Generative):
    """The questions of a run, by id: niah/LENGTH/DEPTH/NUMBER, in the model's own tokens.

    tokenizer: anything with `encode(texts) -> ids of each`, `decode(ids)` and `first` (BOS id or None)
    documents: haystack text, repeated when it is shorter than a prompt; None takes built-in noise sentences
    """

    name = "niah"

    def __init__(self, config: NiahConfig, tokenizer, documents: tuple[str, ...] | None = None):
        self.tokenizer, self.config, self.form = tokenizer, config, Format(tokenizer, chat=config.chat)
        sentences = list(NOISE) if documents is None else split_sentences("\n\n".join(documents))
        self.text = "".join(sentences)
        self.sentences = [ids for ids in tokenizer.encode(sentences) if ids]
        if not self.sentences:
            raise UserError("the haystack has no tokens; give a text that is not empty")
        several = config.needles > 1
        self.template = {
            "instruction": INSTRUCTION_OF_SEVERAL.format(count=config.needles) if several else INSTRUCTION,
            "needle": NEEDLE,
            "question": QUESTION_OF_SEVERAL if several else QUESTION,
            "answer": ANSWER_OF_SEVERAL if several else ANSWER,
        }
        self.opening = self.form.before + tokenizer.encode([self.template["instruction"]])[0]

    def ids(self) -> list[str]:
        """Of all questions, in the order in which they are asked."""
        config = self.config
        cells = ((length, depth) for length in config.lengths for depth in config.depths)
        return [f"{self.name}/{length}/{depth:g}/{i}" for length, depth in cells for i in range(config.samples)]

    def check(self) -> None:
        """UserError, before any model is loaded, if a length cannot hold one of its prompts."""
        shorts = [(draw, self._needed(draw)) for draw in map(self._draw, self.ids())]
        short = [draw.length for draw, needed in shorts if draw.length < needed]
        if short:
            raise self._too_short(short[0], max(needed for _, needed in shorts))

    def build(self, name: str) -> Question:
        """Coordinates and seed decide a question, whatever else a run asks for. `needle_begin` is the prompt position
        of the first needle's first token.

        Raises UserError when its length cannot hold the template, one sentence and the generation budget.
        """
        draw, count = self._draw(name), self.config.needles
        depth, needles = draw.depth, draw.needles
        if draw.length < self._needed(draw):
            raise self._too_short(draw.length, self._needed(draw))
        hay = self._fill(draw.length - self._fixed(draw), start=draw.start)
        ends = [0, *accumulate(map(len, hay))]  # tokens before each sentence border
        borders = [_nearest(ends, (depth + (100 - depth) * k / count) / 100 * ends[-1]) for k in range(count)]
        parts = [hay[first:last] for first, last in zip([0, *borders], [*borders, len(hay)])]
        text = [token for sentence in parts[0] for token in sentence]
        about = {
            "length": draw.length,
            "depth": depth,
            "sample": int(name.rpartition("/")[2]),
            "city": draw.cities,
            "needle_begin": len(self.opening) + len(text),
        }
        for needle, part in zip(needles, parts[1:], strict=True):
            text += needle + [token for sentence in part for token in sentence]
        prompt = self.opening + text + draw.question
        return Question(name, prompt, self.config.max_new_tokens, draw.answers, "numbers", about)

    def _draw(self, name: str) -> "_Draw":
        _, length, depth, sample = name.split("/")
        rng, count = random.Random(f"{self.config.seed} {length} {float(depth):g} {sample}"), self.config.needles
        cities = [rng.choice(CITIES)] if count == 1 else rng.sample(CITIES, count)
        answers = self._draw_answers(rng)
        needles = self.tokenizer.encode([NEEDLE.format(city=c, answer=a) for c, a in zip(cities, answers)])
        start, listed = rng.randrange(len(self.sentences)), _listed(cities)
        return _Draw(int(length), float(depth), listed, answers, needles, self._closing(listed), start)

    def _fixed(self, draw: "_Draw") -> int:
        """Tokens of a prompt beside its haystack, with those to generate."""
        parts = [self.opening, *draw.needles, draw.question]
        return sum(map(len, parts)) + self.config.max_new_tokens

    def _too_short(self, length: int, needed: int) -> UserError:
        return UserError(
            f"niah length {length} cannot hold the template and {self.config.max_new_tokens} generated tokens; use at"
            f" least {needed} for this tokenizer"
        )

    def _needed(self, draw: "_Draw") -> int:
        return self._fixed(draw) + len(self.sentences[draw.start])

    def _closing(self, cities: str) -> list[int]:
        question, answer = (self.template[part].format(city=cities) for part in ("question", "answer"))
        if not self.config.chat:
            return self.tokenizer.encode([question + answer])[0]
        asked, begun = self.tokenizer.encode([question, answer.removeprefix("Answer: ")])
        return [*asked, *self.form.after, *begun]

    def _draw_answers(self, rng: random.Random) -> list[str]:
        """Seven digits each that the haystack does not hold and that fit the generation budget."""
        answers = []
        while len(answers) < self.config.needles:
            answer = str(rng.randrange(10**6, 10**7))
            if answer not in self.text and answer not in answers:
                answers.append(answer)
        tokens = len(self.tokenizer.encode([f" {_listed(answers)}"])[0])
        if tokens > self.config.max_new_tokens:
            raise UserError(
                f"max_new_tokens={self.config.max_new_tokens} cannot hold an answer of {tokens} tokens; raise it"
            )
        return answers

    def _fill(self, room: int, *, start: int) -> list[list[int]]:
        """Whole sentences from `start` on, round and round, until the next one does not fit into `room` tokens."""
        hay, position = [], start
        while len(sentence := self.sentences[position % len(self.sentences)]) <= room:
            hay.append(sentence)
            room -= len(sentence)
            position += 1
        return hay


def _listed(words: list[str]) -> str:
    """`a`, `a and b` or `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _nearest(ends: list[int], target: float) -> int:
    """Index of the border closest to `target` tokens; ends is increasing and starts with 0."""
    above = bisect_left(ends, target)
    return above if above == 0 or ends[above] - target < target - ends[above - 1] else above - 1
