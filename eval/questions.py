"""What a suite asks an engine, and what becomes of the answers.

A suite has a name, `settings` for the manifest, `ids()` of all it asks in order, and `answers(engine, ids)`, which
gives a record for each: plain values that go into records.jsonl as they are. `Generative` is such a suite whose
questions are prompts; it needs `build(id)` and a `form` with the model's tokenizer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, repeat

from mtraining_nns.eval.scoring import METRICS


class Engine:
    """What suites know of an engine, beside `generate(prompts, max_new_tokens)` and `nll(token_ids)`.

    batch_size: prompts that are asked at once. densities: for each sequence of the last call the share of its causal
    pairs that attention kept while it was read, over layers and heads; None where the engine cannot tell.
    """

    batch_size: int = 1
    densities: Iterable[float | None] = repeat(None)


@dataclass(frozen=True)
class Question:
    """A prompt in the model's tokens. references: right answers; metric: a key of METRICS; about: for the record."""

    id: str
    prompt: list[int]
    max_new_tokens: int
    references: list[str]
    metric: str
    about: dict


class Generative:
    """A suite of prompts."""

    def answers(self, engine, ids: list[str]) -> list[dict]:
        """Ask some questions at once. ValueError if more tokens come than were asked for: those could be the prompt."""
        records = []
        for budget, some in groupby(map(self.build, ids), lambda question: question.max_new_tokens):
            asked = list(some)
            generated = engine.generate([question.prompt for question in asked], budget)
            records += map(self._record, asked, generated, engine.densities)
        return records

    def _record(self, question: Question, tokens: list[int], density: float | None) -> dict:
        if len(tokens) > question.max_new_tokens:
            raise ValueError(
                f"engine returned {len(tokens)} tokens, at most {question.max_new_tokens} were asked for; it must"
                " return new tokens only"
            )
        text = self.form.tokenizer.decode(tokens)
        return {
            "id": question.id,
            **question.about,
            "prompt_tokens": len(question.prompt),
            "density": density,
            "references": question.references,
            "generated": text,
            "metric": question.metric,
            "score": METRICS[question.metric](text, question.references),
        }
