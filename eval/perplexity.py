"""Sliding-window perplexity by position: does the model use its long context, and does it break anywhere?

    window 8, stride 3, 14 tokens       tokens read     tokens scored
    first window                        0 .. 7          1 .. 7         all but token 0, which nothing precedes
    second                              3 .. 10         8 .. 10        the last `stride`
    third                               6 .. 13         11 .. 13

Every token is scored exactly once, with at least window - stride tokens before it after the first window. A window that
covers the sequence is a single pass. Means are weighted by token: sequences and buckets never count equally.
Not a retrieval test: a model can predict well here and read nothing beyond its neighbours, hence the buckets and NIAH.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mtraining_nns.errors import UserError
from mtraining_nns.eval.scoring import mean_known
from mtraining_nns.eval.text import left_out

FIRST_BUCKET = 256  # positions 0..255 are the first bucket, each further one doubles the position


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig:
    """Lengths in tokens; `window=None` reads every sequence in a single pass."""

    lengths: tuple[int, ...]
    samples: int = 1
    window: int | None = None
    stride: int | None = None  # None means half the window

    def __post_init__(self):
        if not self.lengths or min(self.lengths) < 2:
            raise UserError(f"perplexity needs lengths of at least 2 tokens, got {list(self.lengths)}; give e.g. 1k,4k")
        if self.samples < 1:
            raise UserError(f"samples must be at least 1, got {self.samples}; give --samples 1 or more")
        if self.window is None:
            if self.stride is not None:
                raise UserError(f"stride {self.stride} needs a window; give --window too, or neither")
            return
        if self.stride is None:
            object.__setattr__(self, "stride", max(1, self.window // 2))
        if not 1 <= self.stride < self.window:
            raise UserError(
                f"stride must lie in 1..window-1, got stride={self.stride}, window={self.window}; "
                "a longer stride would leave tokens without context"
            )

    def reach(self, length: int) -> int:
        """Longest input, in tokens, that the model reads for a sequence of `length`."""
        return length if self.window is None else min(self.window, length)


@dataclass(frozen=True)
class Span:
    """One window: tokens [begin, end) are read, tokens [score_from, end) are scored."""

    begin: int
    end: int
    score_from: int


def spans(length: int, window: int | None = None, stride: int | None = None) -> list[Span]:
    """Windows of a sequence; `spans(14, 8, 3)` is the picture at the top of this file."""
    end = length if window is None else min(window, length)
    windows = [Span(begin=0, end=end, score_from=1)]
    while end < length:
        score_from, end = end, min(end + stride, length)
        windows.append(Span(begin=end - window, end=end, score_from=score_from))
    return windows


def position_nll(engine, token_ids: torch.Tensor, config: PerplexityConfig) -> tuple[torch.Tensor, float | None]:
    """Negative log-likelihood of tokens 1 .. S-1 of one sequence: [S] int64 -> [S-1] fp32 on the CPU; mean density."""
    scored, densities = [], []
    for span in spans(len(token_ids), config.window, config.stride):
        nll = engine.nll(token_ids[span.begin : span.end])
        scored.append(nll[span.score_from - span.begin - 1 :].float().cpu())
        densities.append(next(iter(engine.densities)))
    nll = torch.cat(scored)
    bad = (~torch.isfinite(nll)).nonzero()
    if len(bad) > 0:
        first = int(bad[0])
        raise UserError(f"the loss at position {first + 1} is {float(nll[first])}; the weights or the dtype are broken")
    return nll, mean_known(densities)


@dataclass(frozen=True)
class Bucket:
    """Scored tokens of positions [begin, end) over all sequences of one length."""

    begin: int
    end: int
    tokens: int
    nll_sum: float

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood in nats per token."""
        return self.nll_sum / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)

    def as_dict(self) -> dict:
        return {
            "begin": self.begin,
            "end": self.end,
            "tokens": self.tokens,
            "nll": self.nll,
            "perplexity": self.perplexity,
        }


@dataclass(frozen=True)
class LengthPerplexity:
    """Perplexity of all sequences of one length, whole and by position."""

    length: int
    total: Bucket
    buckets: tuple[Bucket, ...]
    density: float | None  # mean of the sequences

    def as_dict(self) -> dict:
        return {
            "length": self.length,
            **self.total.as_dict(),
            "density": self.density,
            "buckets": [bucket.as_dict() for bucket in self.buckets],
        }


def bucket_edges(length: int) -> list[tuple[int, int]]:
    """Position ranges that double: `bucket_edges(1000) == [(1, 256), (256, 512), (512, 1000)]`."""
    edges, end = [1], FIRST_BUCKET
    while end < length:
        edges.append(end)
        end *= 2
    edges.append(length)
    return list(zip(edges[:-1], edges[1:], strict=True))


def cut_sequences(stream: torch.Tensor, length: int, samples: int, first: int | None) -> torch.Tensor:
    """Sequences of exactly `length` tokens from the joined text: [T] int64 -> [samples, length] int64.

    `first` is the token that every sequence opens with (the model's BOS), if any. Text is never repeated: too little
    of it raises UserError, since repeated text would fake a low perplexity.
    """
    size = length - (first is not None)
    if len(stream) < samples * size:
        raise UserError(
            f"perplexity of {samples} x {length} tokens needs {samples * size} tokens of text, got {len(stream)}; "
            "give more text, fewer samples or a shorter length"
        )
    rows = stream[: samples * size].view(samples, size)
    return rows if first is None else torch.cat([rows.new_full((samples, 1), first), rows], dim=1)


class Perplexity:
    """The sequences of a run, by id: perplexity/LENGTH/NUMBER. A record has the sums of its buckets."""

    name = "perplexity"

    def __init__(self, config: PerplexityConfig, stream: torch.Tensor, first: int | None):
        self.config = config
        self.inputs = {length: cut_sequences(stream, length, config.samples, first) for length in config.lengths}

    def ids(self) -> list[str]:
        """Of all sequences, in the order in which they are read."""
        return [f"{self.name}/{length}/{i}" for length in self.config.lengths for i in range(self.config.samples)]

    def answers(self, engine, ids: list[str]) -> Iterator[dict]:
        """Read some sequences, a record as soon as one is read."""
        return (self._read(engine, name) for name in ids)

    def _read(self, engine, name: str) -> dict:
        length, sample = map(int, name.split("/")[1:])
        nll, density = position_nll(engine, self.inputs[length][sample], self.config)  # [length - 1]
        buckets = [vars(_bucket(nll.double(), begin, end)) for begin, end in bucket_edges(length)]
        return {"id": name, "length": length, "sample": sample, "density": density, "buckets": buckets}


class Books(Perplexity):
    """The same over books, by id: pg19/LENGTH/NUMBER: of each book that is long enough its first tokens, and of no two
    in one sequence. used: paths and digests of the books by length and number, for a manifest.

    books: documents, read until every length has `samples`. skipped: what they leave out, by reason, as it is read.
    """

    name = "pg19"

    def __init__(self, config: PerplexityConfig, tokenizer, books, first: int | None, skipped: dict[str, int]):
        self.config, opening = config, [] if first is None else [first]
        rows: dict[int, list[torch.Tensor]] = {length: [] for length in config.lengths}
        self.used: dict[int, dict[int, dict]] = {length: {} for length in config.lengths}
        read = 0
        for book in books:
            wanting = [length for length in config.lengths if len(rows[length]) < config.samples]
            if not wanting:
                break
            tokens, read = torch.tensor(opening + tokenizer.encode([book.text])[0]), read + 1
            for length in wanting:
                if len(tokens) >= length:
                    self.used[length][len(rows[length])] = {"path": book.name, "blake2b": book.digest.hex()}
                    rows[length].append(tokens[:length])
        for length, found in rows.items():
            if len(found) < config.samples:
                raise UserError(
                    f"{len(found)} of {read} books have {length} tokens, expected --samples {config.samples}"
                    f"{left_out(skipped)}; give more books, fewer samples or a shorter length"
                )
        self.inputs = {length: torch.stack(found) for length, found in rows.items()}


def summed(records: list[dict]) -> list[LengthPerplexity]:
    """Records of several sequences, by length: totals and buckets, weighted by token."""
    found = []
    for length in dict.fromkeys(record["length"] for record in records):
        those = [record for record in records if record["length"] == length]
        rows = [[Bucket(**bucket) for bucket in record["buckets"]] for record in those]
        buckets = tuple(_sum(same, same[0].begin, same[0].end) for same in zip(*rows, strict=True))
        density = mean_known([record["density"] for record in those])
        found.append(LengthPerplexity(length, _sum(buckets, 1, length), buckets, density))
    return found


def _sum(buckets, begin: int, end: int) -> Bucket:
    tokens, nll_sum = sum(bucket.tokens for bucket in buckets), sum(bucket.nll_sum for bucket in buckets)
    return Bucket(begin=begin, end=end, tokens=tokens, nll_sum=nll_sum)


def _bucket(nll: torch.Tensor, begin: int, end: int) -> Bucket:
    scored = nll[begin - 1 : end - 1]  # entry i scores position i + 1
    return Bucket(begin=begin, end=end, tokens=scored.numel(), nll_sum=float(scored.sum()))
