"""What the readers of all kinds of sources share: the texts they find, and the record of what they leave out.

A reader is `read(path, reading)` and yields (name, UTF-8 bytes) in the order of the source. Names lead back to it:
`a/b.txt`, `a/b.jsonl:12`, `a/b.parquet:1234`, with lines and rows counted from 1.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtraining_nns.data.source_ids import SourceTokenizer

NAMED_SKIPS = 10_000
Skip = Callable[[str, str], None]
Texts = Iterator[tuple[str, bytes]]


class SkipLog:
    """Counts what was left out by reason and names it: `log("a/b.png", "not UTF-8")`."""

    def __init__(self):
        self.reasons: Counter[str] = Counter()
        self.names: list[dict[str, str]] = []

    def __call__(self, name: str, reason: str) -> None:
        self.reasons[reason] += 1
        if len(self.names) < NAMED_SKIPS:
            self.names.append({"name": name, "reason": reason})

    def add(self, other: "SkipLog") -> None:
        """Append what another one has counted and named."""
        self.reasons += other.reasons
        self.names += other.names[: NAMED_SKIPS - len(self.names)]

    @classmethod
    def restored(cls, manifest: dict) -> "SkipLog":
        """The log that `to_manifest` was called on; {} gives an empty one."""
        log = cls()
        log.reasons.update(manifest.get("reasons", {}))
        log.names += manifest.get("names", [])
        return log

    def to_manifest(self) -> dict:
        """Counts of all, names of the first NAMED_SKIPS."""
        count = self.reasons.total()
        reasons = dict(sorted(self.reasons.items()))
        return {"count": count, "reasons": reasons, "names": self.names, "names_omitted": count - len(self.names)}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a reader is told: the field with the text, the tokenizer of ids, and whom to tell about its documents.

    skip: called for what becomes no document. changed: called for a document that is kept, but whose text does not
    encode to the ids it was decoded from.
    """

    text_key: str
    source_tokenizer: "SourceTokenizer | None"
    skip: Skip
    changed: Skip

    def no_text(self, name: str) -> None:
        """Leave out a record that has no string under the key."""
        self.skip(name, f"no text under the key {self.text_key!r}")
