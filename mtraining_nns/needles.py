"""Needles in the haystack while a model trains: the probability that it gives the right answer to each.

    eval/niah         mean over needles of the probability of the whole answer, 1 where every token of it is certain
    eval/niah_loss    loss a token of the answers

    EOS .. EOS | prompt of `eval/niah.py` with a needle at a depth | answer       train.seq_len tokens in all

The answer stands at the end, so that a pattern estimated from the last queries sees the question as it does when a
prompt is read. One forward pass a needle and no decoding, so both engines do it on their rings. Not for comparing with
`mtraining eval`, which generates.
"""

import math
from dataclasses import dataclass

import torch

from mtraining_nns.data import tokenizer as tokenizers
from mtraining_nns.data.collator import IGNORED_LABEL
from mtraining_nns.errors import UserError
from mtraining_nns.eval.huggingface import TextTokenizer
from mtraining_nns.eval.niah import Niah, NiahConfig
from mtraining_nns.export import TOKENIZER
from mtraining_nns.recipe import Recipe


@dataclass(frozen=True)
class Needle:
    """tokens: int64 [train.seq_len]; the answer is its last `answer` tokens."""

    tokens: torch.Tensor
    answer: int

    def only_answer(self, batch: dict[str, torch.Tensor]) -> None:
        """Ignore all labels of a collated batch but the answer's, in place."""
        first = len(self.tokens) - self.answer
        batch["labels"].masked_fill_(batch["position_ids"] < first - 1, IGNORED_LABEL)


def needles(recipe: Recipe) -> list[Needle]:
    """One needle for each of log.niah_depths. UserError where train.seq_len cannot hold one."""
    tokenizer = TextTokenizer(tokenizers.load(f"{recipe.data.first}/{TOKENIZER}"))
    length = recipe.train.seq_len
    try:
        suite = Niah(NiahConfig(lengths=(length,), depths=recipe.log.niah_depths), tokenizer)
        suite.check()
    except UserError as error:
        raise UserError(f"log.niah_every needs room for a needle: {error}; set it to 0") from error
    return [_needle(suite.build(name), tokenizer, length) for name in suite.ids()]


def _needle(question, tokenizer: TextTokenizer, length: int) -> Needle:
    answer = tokenizer.encode([f" {question.references[0]}"])[0]
    filled = [*question.prompt, *answer]
    tokens = [tokenizer.eos] * (length - len(filled)) + filled
    return Needle(torch.tensor(tokens), len(answer))


def values(found: list[Needle], losses: list[float]) -> dict[str, float]:
    """Scalars by tag; losses: the sum over each needle's answer."""
    return {
        "eval/niah": sum(math.exp(-loss) for loss in losses) / len(losses),
        "eval/niah_loss": sum(losses) / sum(needle.answer for needle in found),
    }
