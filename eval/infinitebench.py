"""InfiniteBench: 12 tasks on books, code, scripts and lists of about 100K tokens; the tasks are in infinitebench.yaml.

    suite = InfiniteBench(InfiniteBenchConfig(lengths=(65536, 131072)), tokenizer, "InfiniteBench/")
    suite.check()                                           # reads all questions
    question = suite.build("infinitebench/passkey/131072/0")

A question is as long as it is, so lengths are limits: each is asked once, at the smallest length that holds its prompt
and what is generated, and nothing is ever cut. A question that no length holds is not asked; `not_asked` counts them.

    lengths 65536, 131072    of 50000 tokens: asked at 65536; of 90000: at 131072; of 140000: not asked

Every question is tokenised once and kept at 4 bytes a token: about 1.3 GB for all that 128K tokens hold.
Source of files, budgets and metrics: Zhang et al. 2024 (see infinitebench.yaml). Own: the wording.
"""

import dataclasses
import functools
from array import array
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from mtraining_nns.errors import UserError
from mtraining_nns.eval import infinitebench_scoring
from mtraining_nns.eval.infinitebench_rows import read, sha256, tables
from mtraining_nns.eval.prompts import Format
from mtraining_nns.eval.questions import Generative, Question


@dataclass(frozen=True, kw_only=True)
class InfiniteBenchConfig:
    """Lengths in tokens, prompt and generation together; tasks and samples: None for all of them."""

    lengths: tuple[int, ...]
    tasks: tuple[str, ...] | None = None
    samples: int | None = None
    chat: bool = False

    def __post_init__(self):
        if self.tasks is None:
            object.__setattr__(self, "tasks", tuple(tables()))
        for task in self.tasks:
            if task not in tables():
                raise UserError(f"unknown InfiniteBench task {task!r}; there are {', '.join(tables())}")
        if not self.lengths or min(self.lengths) < 1 or (self.samples is not None and self.samples < 1):
            raise UserError(
                f"infinitebench needs lengths and samples of at least 1, got {list(self.lengths)} and {self.samples};"
                " give e.g. --lengths 128k, and leave out --samples for all questions"
            )


class InfiniteBench(Generative):
    """The questions of a run, by id: infinitebench/TASK/LENGTH/NUMBER, the number counting the rows of the task's file.

    folder: holds the published files. not_run: tasks without a file, and what they need.
    not_asked: tasks with questions that are too long, and how many; known once the questions are read.
    """

    name = "infinitebench"

    def __init__(self, config: InfiniteBenchConfig, tokenizer, folder: str | Path):
        self.config, self.form = config, Format(tokenizer, chat=config.chat)
        files = {task: Path(folder) / tables()[task]["file"] for task in config.tasks}
        self.files = {task: path for task, path in files.items() if path.is_file()}
        self.not_run = {task: f"needs {path.name}" for task, path in files.items() if task not in self.files}
        self.not_asked: dict[str, str] = {}
        if not self.files:
            names = ", ".join(path.name for path in files.values())
            raise UserError(f"{folder} has none of {names}; give --infinitebench the folder of InfiniteBench's files")

    def ids(self) -> list[str]:
        """Of all questions, in the order in which they are asked."""
        return list(self._questions)

    def check(self) -> None:
        """UserError, before any model is loaded, for a row that is not as published and a metric that is not there."""
        if any(tables()[task]["metric"] == "rouge_lsum" for task in self.files):
            infinitebench_scoring.rouge()
        self.ids()  # reads every question

    def build(self, name: str) -> Question:
        """As it was read."""
        question = self._questions[name]
        return dataclasses.replace(question, prompt=list(question.prompt))

    def describe(self) -> dict[str, str]:
        """sha256 of the files by their names, for a manifest."""
        return {path.name: sha256(path) for path in self.files.values()}

    @functools.cached_property
    def _questions(self) -> dict[str, Question]:
        """By id, shortest length first."""
        found = [question for task in self.files for question in self._read(task)]
        return {question.id: question for question in sorted(found, key=lambda question: question.about["length"])}

    def _read(self, task: str) -> list[Question]:
        """The questions of a task that a length holds; the others are counted."""
        metric, budget = tables()[task]["metric"], tables()[task]["max_new_tokens"]
        rows = read(task, self.files[task], self.config.samples)
        kept, count = [], 0
        for asked in tqdm(rows, desc=f"reading {task}", disable=None, leave=False):
            prompt = array("I", self.form.token_ids(asked.message, asked.answer))
            length = min((length for length in self.config.lengths if length >= len(prompt) + budget), default=None)
            if length is not None:
                about = {"task": task, "length": length, "sample": count}
                name = f"{self.name}/{task}/{length}/{count}"
                kept.append(Question(name, prompt, budget, asked.references, metric, about))
            count += 1
        if count == 0:
            raise UserError(f"{self.files[task]} holds no question; give InfiniteBench's file as published")
        if len(kept) < count:
            longer, longest = count - len(kept), max(self.config.lengths)
            self.not_asked[task] = f"{longer} of {count} are longer than {longest} tokens with {budget} to generate"
        return kept
