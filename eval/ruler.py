"""RULER: 13 tasks of retrieval, tracing, counting and question answering at any length; the tasks are in ruler.yaml.

    ruler = Ruler(RulerConfig(lengths=(4096,), samples=20), tokenizer, sources)
    question = ruler.build("ruler/vt/4096/0")

Every prompt follows from the seed, its task, its length and its number alone. What a task reads comes from `sources`:
text (any documents; the paper takes essays), squad and hotpotqa (their JSON files). Tasks whose source is missing are
not run, and said so; they never count as 0.

Source of sizes, budgets and metrics: Hsieh et al. 2024 (see ruler.yaml). Own: the wording, sentences of the haystack
`noise`, words from the package wonderwords. So scores compare with each other, and with published ones roughly.
"""

from dataclasses import dataclass

from mtraining_nns.errors import UserError
from mtraining_nns.eval.prompts import Format, fitted, shortest
from mtraining_nns.eval.questions import Generative, Question
from mtraining_nns.eval.ruler_sources import Sources
from mtraining_nns.eval.ruler_tasks import Ask, draft, tables


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
                f"ruler needs lengths and samples of at least 1, got {list(self.lengths)} and {self.samples}; give e.g."
                " --lengths 4k --samples 20"
            )


class Ruler(Generative):
    """The questions of a run, by id: ruler/TASK/LENGTH/NUMBER. not_run: tasks without a source, and what they need."""

    name = "ruler"

    def __init__(self, config: RulerConfig, tokenizer, sources: Sources):
        self.config, self.sources = config, sources
        self.form = Format(tokenizer, chat=config.chat)
        missing = {task: sources.missing(tables()["tasks"][task]) for task in config.tasks}
        self.not_run = {task: f"needs --{source}" for task, source in missing.items() if source}
        self.tasks = [task for task in config.tasks if not missing[task]]

    def ids(self) -> list[str]:
        """Of all questions, in the order in which they are asked."""
        lengths, samples = self.config.lengths, range(self.config.samples)
        return [f"{self.name}/{task}/{length}/{i}" for length in lengths for task in self.tasks for i in samples]

    def check(self) -> None:
        """UserError, before any model is loaded, if a length cannot hold a question, or a source has too few."""
        for ask in map(self._ask, self.ids()):
            shortest(draft(ask), self.form, ask.length, ask.task["max_new_tokens"], f"ruler {ask.name}")
        for task in self.tasks:
            dataset = tables()["tasks"][task].get("dataset")
            have = len(self.sources.dataset(dataset).asked) if dataset else self.config.samples
            if have < self.config.samples:
                raise UserError(
                    f"{dataset} has {have} questions, ruler {task} wants --samples {self.config.samples}; lower it"
                )

    def build(self, name: str) -> Question:
        """UserError where the length cannot hold the question."""
        ask = self._ask(name)
        drafted, budget = draft(ask), ask.task["max_new_tokens"]
        prompt = fitted(drafted, self.form, ask.length, budget, f"ruler {ask.name}")
        about = {"task": ask.name, "length": ask.length, "sample": ask.number, "units": prompt.units, **drafted.about}
        return Question(name, prompt.token_ids, budget, drafted.references, ask.task["metric"], about)

    def _ask(self, name: str) -> Ask:
        _, task, length, number = name.split("/")
        return Ask(task, int(length), int(number), self.config.seed, self.sources)
