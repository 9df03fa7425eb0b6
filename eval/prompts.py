"""Prompts of an exact number of tokens: what a prompt consists of, and how much of its context fits.

    base    [BOS] instruction | context | question | beginning of the answer
    chat    template's opening | instruction | context | question | template's answer turn | beginning of the answer

The context comes in units (sentences, lines, words, documents). `fitted` takes as many as fit into a length together
with the tokens to generate; a length that does not hold the fewest is a UserError, and nothing is ever cut.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from mtraining_nns.errors import UserError

MARK = "the user's message stands here"  # found again in a rendered chat template
PROBE = 64  # units beyond the fewest, of which a unit's tokens are learned
SECANTS = 6  # guesses by the tokens of a unit before halving the rest


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A prompt whose context is as long as wanted.

    context: text of so many units, the fewest being `least`; more units are more text. references: right answers.
    """

    instruction: str
    context: Callable[[int], str]
    question: str
    answer: str
    references: list[str]
    least: int = 1
    about: dict = field(default_factory=dict)

    def message(self, units: int) -> str:
        """Everything before the answer."""
        return f"{self.instruction}\n{self.context(units)}\n{self.question}"


class Prompt(NamedTuple):
    """Token ids, and how many units of context they hold."""

    token_ids: list[int]
    units: int


class Format:
    """How a message becomes a prompt of a model. chat: through the template of its tokenizer (`TextTokenizer`)."""

    def __init__(self, tokenizer, *, chat: bool):
        self.tokenizer, self.chat = tokenizer, chat
        self.before = [] if tokenizer.first is None else [tokenizer.first]
        self.after = []
        if chat:
            self.before, self.after = tokenizer.chat_turn(MARK)

    def token_ids(self, message: str, answer: str) -> list[int]:
        """Of a message, and the beginning of its answer."""
        if not self.chat:
            return [*self.before, *self.tokenizer.encode([message + answer])[0]]
        asked, begun = self.tokenizer.encode([message, answer])
        return [*self.before, *asked, *self.after, *begun]

    def describe(self) -> dict:
        """Manifest entry."""
        kind = {"format": "chat", "clock": self.tokenizer.clock.isoformat()} if self.chat else {"format": "base"}
        return {**kind, "before": self.before, "after": self.after}


def shortest(draft: Draft, form: Format, length: int, max_new_tokens: int, what: str) -> Prompt:
    """The prompt of the fewest units; UserError if `length` does not hold it. what: names the prompt in errors."""
    prompt = Prompt(form.token_ids(draft.message(draft.least), draft.answer), draft.least)
    needed = len(prompt.token_ids) + max_new_tokens
    if needed > length:
        raise UserError(
            f"{what}: length {length} cannot hold its {len(prompt.token_ids)} tokens and {max_new_tokens} to generate;"
            f" use at least {needed} for this tokenizer"
        )
    return prompt


def fitted(draft: Draft, form: Format, length: int, max_new_tokens: int, what: str) -> Prompt:
    """The prompt of the most units that fit: at most `length` tokens with those to generate.

    Encodes the prompt a few times, however long it is. UserError as `shortest`.
    """
    room = length - max_new_tokens
    best = least = shortest(draft, form, length, max_new_tokens, what)
    too_many, tried, units = None, 0, draft.least + PROBE
    while too_many is None or too_many > best.units + 1:
        found, tried = Prompt(form.token_ids(draft.message(units), draft.answer), units), tried + 1
        if len(found.token_ids) <= room:
            best = found
        else:
            too_many = found.units
        each = max((len(found.token_ids) - len(least.token_ids)) / (found.units - least.units), 0.1)
        if room - len(best.token_ids) < each:
            break
        units = least.units + int((room - len(least.token_ids)) / each)
        if too_many is not None:
            units = (best.units + too_many) // 2 if tried > SECANTS else min(units, too_many - 1)
        units = max(units, best.units + 1)
    return best
