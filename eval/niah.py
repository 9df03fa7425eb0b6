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
from dataclasses import dataclass
from itertools import accumulate

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
TEMPLATE = {"instruction": INSTRUCTION, "needle": NEEDLE, "question": QUESTION, "answer": ANSWER}
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
    chat: bool = False

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


def split_sentences(text: str) -> list[str]:
    """Sentences that join to `text` again: `"A b. C?\\nD" -> ["A b.", " C?\\n", "D"]`.

    A space opens the sentence after it and line ends close the one before, which is where tokenizers cut as well.
    """
    pieces = re.split(r"(?<=[.!?])(?= )|(?<=[。！？\n])(?!\n)", text)
    size = MAX_SENTENCE_CHARACTERS
    cut = re.compile(rf"(?s).{{1,{size}}}(?=\s|$)|.{{1,{size}}}")
    return [part for piece in pieces for part in (cut.findall(piece) if len(piece) > size else [piece]) if part]


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
        self.opening = self.form.before + tokenizer.encode([INSTRUCTION])[0]

    def ids(self) -> list[str]:
        """Of all questions, in the order in which they are asked."""
        config = self.config
        cells = ((length, depth) for length in config.lengths for depth in config.depths)
        return [f"{self.name}/{length}/{depth:g}/{i}" for length, depth in cells for i in range(config.samples)]

    def check(self) -> None:
        """UserError, before any model is loaded, if the shortest length cannot hold its prompts."""
        shortest = min(self.config.lengths)
        for name in self.ids():
            if int(name.split("/")[1]) == shortest:
                self.build(name)

    def build(self, name: str) -> Question:
        """Coordinates and seed decide a question, whatever else a run asks for. `needle_begin` is the prompt position
        of the needle's first token.

        Raises UserError when its length cannot hold the template, one sentence and the generation budget.
        """
        _, length, depth, sample = name.split("/")
        length, depth = int(length), float(depth)
        rng = random.Random(f"{self.config.seed} {length} {depth:g} {sample}")
        city, answer = rng.choice(CITIES), self._draw_answer(rng)
        needle, question = self.tokenizer.encode([NEEDLE.format(city=city, answer=answer)])[0], self._closing(city)
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
        about = {
            "length": length,
            "depth": depth,
            "sample": int(sample),
            "city": city,
            "needle_begin": len(self.opening) + len(before),
        }
        prompt = self.opening + before + needle + after + question
        return Question(name, prompt, self.config.max_new_tokens, [answer], "number", about)

    def _closing(self, city: str) -> list[int]:
        question, answer = QUESTION.format(city=city), ANSWER.format(city=city)
        if not self.config.chat:
            return self.tokenizer.encode([question + answer])[0]
        asked, begun = self.tokenizer.encode([question, answer.removeprefix("Answer: ")])
        return [*asked, *self.form.after, *begun]

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
