"""What RULER's tasks read: text for haystacks, and datasets of questions in the files that were published."""

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from mtraining_nns.errors import UserError
from mtraining_nns.eval.niah import split_sentences


@dataclass(frozen=True)
class Sources:
    """text: documents; squad, hotpotqa: paths of their JSON files; None where there is none."""

    text: tuple[str, ...] | None = None
    squad: str | None = None
    hotpotqa: str | None = None

    def missing(self, task: dict) -> str | None:
        """The source that a task of ruler.yaml needs and that is not there."""
        source = source_of(task)
        return source if source and getattr(self, source) is None else None

    @functools.cached_property
    def sentences(self) -> list[str]:
        """Of the documents."""
        found = [sentence for sentence in split_sentences("\n\n".join(self.text)) if sentence.strip()]
        if not found:
            raise UserError("the text for RULER's haystacks has no sentence; give one that is not empty")
        return found

    @functools.cached_property
    def joined(self) -> str:
        """All sentences."""
        return "".join(self.sentences)

    def dataset(self, name: str) -> "Dataset":
        """squad or hotpotqa; UserError for a file that cannot be read."""
        return _read(name, getattr(self, name))

    def describe(self) -> dict:
        """The files with their sha256, for a manifest."""
        paths = {"squad": self.squad, "hotpotqa": self.hotpotqa}
        return {name: {"path": path, "sha256": _sha256(Path(path))} for name, path in paths.items() if path}


def source_of(task: dict) -> str | None:
    """The source that a task of ruler.yaml reads: text, squad, hotpotqa or none."""
    return task.get("dataset") or ("text" if task.get("haystack") == "text" else None)


@dataclass(frozen=True)
class Asked:
    """A question and the documents that answer it."""

    question: str
    answers: list[str]
    documents: list[str]


@dataclass(frozen=True)
class Dataset:
    """Questions, and the documents of all of them."""

    asked: list[Asked]
    documents: list[str]


@functools.cache
def _read(name: str, path: str) -> Dataset:
    try:
        found = READERS[name](_json(Path(path)))
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise UserError(
            f"{path} is not {name}'s file ({type(error).__name__}: {error}); give it as published"
        ) from error
    if not found.asked:
        raise UserError(f"{path} holds no questions with answers; give {name}'s file as published")
    for one in found.asked:
        if not all(isinstance(answer, str) and answer.strip() for answer in one.answers):
            raise UserError(
                f"{path} has an empty answer to {one.question!r}, which every text holds; give {name}'s file as"
                " published"
            )
        if len(set(one.documents)) == len(found.documents):
            raise UserError(
                f"{path} holds {len(found.documents)} documents, all of them of the question {one.question!r}, and none"
                f" to put beside them; give {name}'s file as published"
            )
    return found


def _squad(tree: dict) -> Dataset:
    """SQuAD 1.1 or 2.0; questions without an answer are left out."""
    paragraphs = [paragraph for article in tree["data"] for paragraph in article["paragraphs"]]
    asked = [
        Asked(one["question"], sorted({answer["text"] for answer in one["answers"]}), [paragraph["context"]])
        for paragraph in paragraphs
        for one in paragraph["qas"]
        if one["answers"]
    ]
    return Dataset(asked, list(dict.fromkeys(paragraph["context"] for paragraph in paragraphs)))


def _hotpotqa(rows: list) -> Dataset:
    """HotpotQA's distractor setting: ten paragraphs a question."""
    asked = [Asked(row["question"], [row["answer"]], [_paragraph(*part) for part in row["context"]]) for row in rows]
    return Dataset(asked, list(dict.fromkeys(document for one in asked for document in one.documents)))


def _paragraph(title: str, sentences: list[str]) -> str:
    return f"{title}\n{''.join(sentences)}"


def _json(path: Path):
    data = _bytes(path)
    try:
        return json.loads(data)
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
