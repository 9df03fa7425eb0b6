"""A needle in a haystack: one sentence with a magic number, hidden at a depth of a long text, asked for at the end.

    [BOS] instruction | haystack ... needle ... haystack | question, "the magic number of Lisbon is" -> "4821973"
                      depth 0 %                     100 %

Prompts are built from token ids of the evaluated model, so lengths are exact: prompt plus the generation budget is at
most the asked length and less than one sentence short of it. Nothing is ever truncated; a length that cannot hold the
template and a sentence is an error. Only generated text is scored, so repeating the prompt earns nothing.
Not for comparing with published tables to the digit: the template is our own, and the haystack is what you give.
"""

import random
import re
from bisect import bisect_left
from dataclasses import asdict, dataclass
from itertools import accumulate

from mtraining_nns.errors import UserError

INSTRUCTION = (
    "Somewhere in the text below, one sentence states the magic number of a city. "
    "Find it and remember it: the question after the text asks for it.\n\n"
)
NEEDLE = " The magic number of {city} is {answer}."
QUESTION = "\n\nQuestion: What is the magic number of {city}?\nAnswer: The magic number of {city} in the text is"
TEMPLATE = {"instruction": INSTRUCTION, "needle": NEEDLE, "question": QUESTION}
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
    """Lengths in tokens, prompt plus generation; depths in percent of the haystack."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    samples: int = 1
    max_new_tokens: int = 32
    seed: int = 0

    def __post_init__(self):
        if not self.lengths or min(self.lengths) < 1:
            raise UserError(f"niah needs lengths of at least 1 token, got {list(self.lengths)}; give e.g. 1k,4k")
        if not self.depths or not all(0 <= depth <= 100 for depth in self.depths):
            raise UserError(f"niah depths must lie in 0..100 percent, got {list(self.depths)}; give e.g. 0,50,100")
        if self.samples < 1 or self.max_new_tokens < 1:
            raise UserError(
                f"niah needs at least 1 sample and 1 generated token, got samples={self.samples}, "
                f"max_new_tokens={self.max_new_tokens}"
            )


@dataclass(frozen=True, kw_only=True)
class NiahCase:
    """One question. `needle_begin` is the prompt position of the needle's first token."""

    length: int
    depth: float
    sample: int
    city: str
    answer: str
    prompt_tokens: int
    needle_begin: int


@dataclass(frozen=True)
class NiahScore:
    """What the model answered."""

    case: NiahCase
    generated: str
    correct: bool


@dataclass(frozen=True)
class NiahResult:
    """All scores of a run; a cell is one length at one depth."""

    config: NiahConfig
    scores: tuple[NiahScore, ...]

    def percent(self, length: int | None = None, depth: float | None = None) -> float:
        """Share of correct answers in percent; None takes all lengths or all depths."""
        chosen = [
            score.correct
            for score in self.scores
            if length in (None, score.case.length) and depth in (None, score.case.depth)
        ]
        return 100.0 * sum(chosen) / len(chosen)

    def as_dict(self) -> dict:
        cells = [
            {"length": length, "depth": depth, "samples": self.config.samples, "score": self.percent(length, depth)}
            for length in self.config.lengths
            for depth in self.config.depths
        ]
        samples = [
            {**asdict(score.case), "generated": score.generated, "correct": score.correct} for score in self.scores
        ]
        return {"cells": cells, "score": self.percent(), "samples": samples}


def split_sentences(text: str) -> list[str]:
    """Sentences that join to `text` again: `"A b. C?\\nD" -> ["A b.", " C?\\n", "D"]`.

    A space opens the sentence after it and line ends close the one before, which is where tokenizers cut as well.
    """
    pieces = re.split(r"(?<=[.!?])(?= )|(?<=[。！？\n])(?!\n)", text)
    size = MAX_SENTENCE_CHARACTERS
    cut = re.compile(rf"(?s).{{1,{size}}}(?=\s|$)|.{{1,{size}}}")
    return [part for piece in pieces for part in (cut.findall(piece) if len(piece) > size else [piece]) if part]


class PromptBuilder:
    """Builds prompts in the model's own tokens.

    tokenizer: anything with `encode(texts) -> ids of each`, `decode(ids)` and `first` (BOS id or None)
    documents: haystack text, repeated when it is shorter than a prompt; None takes built-in noise sentences
    """

    def __init__(self, tokenizer, config: NiahConfig, documents: tuple[str, ...] | None = None):
        self.tokenizer, self.config = tokenizer, config
        sentences = list(NOISE) if documents is None else split_sentences("\n\n".join(documents))
        self.text = "".join(sentences)
        self.sentences = [ids for ids in tokenizer.encode(sentences) if ids]
        if not self.sentences:
            raise UserError("the haystack has no tokens; give a text that is not empty")
        self.opening = ([] if tokenizer.first is None else [tokenizer.first]) + tokenizer.encode([INSTRUCTION])[0]

    def check(self) -> None:
        """UserError, before any model is loaded, if the shortest length cannot hold its prompts."""
        for depth in self.config.depths:
            for sample in range(self.config.samples):
                self.build(min(self.config.lengths), depth, sample)

    def build(self, length: int, depth: float, sample: int) -> tuple[NiahCase, list[int]]:
        """A case and its prompt's token ids; coordinates and seed decide them, whatever else a run asks for.

        Raises UserError when `length` cannot hold the template, one sentence and the generation budget.
        """
        rng = random.Random(f"{self.config.seed} {length} {depth:g} {sample}")
        city, answer = rng.choice(CITIES), self._draw_answer(rng)
        needle, question = self.tokenizer.encode([NEEDLE.format(city=city, answer=answer), QUESTION.format(city=city)])
        room = length - len(self.opening) - len(needle) - len(question) - self.config.max_new_tokens
        hay = self._fill(room, start=rng.randrange(len(self.sentences)))
        if not hay:
            shortest = length - room + max(map(len, self.sentences))
            raise UserError(
                f"niah length {length} cannot hold the template and {self.config.max_new_tokens} generated tokens; "
                f"use at least {shortest} for this tokenizer"
            )
        ends = [0, *accumulate(map(len, hay))]  # tokens before each sentence border
        border = _nearest(ends, depth / 100 * ends[-1])
        before = [token for sentence in hay[:border] for token in sentence]
        after = [token for sentence in hay[border:] for token in sentence]
        token_ids = self.opening + before + needle + after + question
        case = NiahCase(
            length=length,
            depth=depth,
            sample=sample,
            city=city,
            answer=answer,
            prompt_tokens=len(token_ids),
            needle_begin=len(self.opening) + len(before),
        )
        return case, token_ids

    def _draw_answer(self, rng: random.Random) -> str:
        """Seven digits that the haystack does not hold and that fit the generation budget."""
        answer = str(rng.randrange(10**6, 10**7))
        while answer in self.text:
            answer = str(rng.randrange(10**6, 10**7))
        tokens = len(self.tokenizer.encode([f" {answer}"])[0])
        if tokens > self.config.max_new_tokens:
            raise UserError(
                f"max_new_tokens={self.config.max_new_tokens} cannot hold an answer of {tokens} tokens; raise it"
            )
        return answer

    def _fill(self, room: int, *, start: int) -> list[list[int]]:
        """Whole sentences from `start` on, round and round, until the next one does not fit into `room` tokens."""
        hay, position = [], start
        while len(sentence := self.sentences[position % len(self.sentences)]) <= room:
            hay.append(sentence)
            room -= len(sentence)
            position += 1
        return hay


def _nearest(ends: list[int], target: float) -> int:
    """Index of the border closest to `target` tokens; ends is increasing and starts with 0."""
    above = bisect_left(ends, target)
    return above if above == 0 or ends[above] - target < target - ends[above - 1] else above - 1


def is_correct(generated: str, answer: str) -> bool:
    """The number appears in the generated text, not as part of a longer number."""
    return re.search(rf"(?<!\d){answer}(?!\d)", generated) is not None


def run_niah(engine, builder: PromptBuilder, *, progress=None) -> NiahResult:
    """Ask every cell `samples` times; `progress(score)` is called after each answer.

    Raises ValueError if the engine returns more tokens than asked, since those could be the prompt itself.
    """
    config, scores = builder.config, []
    for length in config.lengths:
        for depth in config.depths:
            for sample in range(config.samples):
                case, token_ids = builder.build(length, depth, sample)
                (generated,) = engine.generate([token_ids], config.max_new_tokens)
                if len(generated) > config.max_new_tokens:
                    raise ValueError(
                        f"engine returned {len(generated)} tokens, at most {config.max_new_tokens} were asked for; "
                        "it must return new tokens only"
                    )
                text = builder.tokenizer.decode(generated)
                scores.append(NiahScore(case, text, is_correct(text, case.answer)))
                if progress is not None:
                    progress(scores[-1])
    return NiahResult(config=config, scores=tuple(scores))
