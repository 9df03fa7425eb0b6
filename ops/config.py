"""Attention settings: what is kept, how tokens are laid out over the ring, which kernels run.

Plain data, no torch: recipes, the evaluation and the operator share this one dataclass, and it is written into every
exported checkpoint. It describes the model, never the machine, except `backend`.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

PATTERNS = ("dense", "vertical_slash", "xattention", "moba")
LAYOUTS = ("contiguous", "zigzag", "striped")
BUDGETS = ("top_p", "fixed")
BACKENDS = ("auto", "torch", "triton", "cute", "cuda")
MOST = (1 << 31) - 1  # positions are 32-bit
CROSSOVER = 16384  # dense_below="auto": shorter sequences are no faster sparse at every density, docs/benchmarks.md


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Settings of the sparse attention operator. Lengths are in tokens unless the comment says otherwise.

    Raises ValueError for a value outside its range, naming the value, what was expected and how to fix it.
    Source of the parameters of vertical_slash: MTraining, section 4.1 and algorithm 1.
    """

    pattern: str = "vertical_slash"
    layout: str = "striped"
    granularity: int | None = None  # length of a stripe; None means `block`
    block: int = 128  # index resolution of every pattern and kernel; the paper uses 64 for slashes
    budget: str = "top_p"
    p_v: float = 0.95  # share of attention mass that the kept columns must reach
    p_s: float = 0.95  # share of attention mass that the kept slash bins must reach
    k_v: int = 1024  # budget "fixed": columns per head
    k_s: int = 64  # budget "fixed": slash bins per head, each `block` distances wide
    cap: int = 4096  # most columns a head may keep beside the sinks; reaching it is counted and logged
    last_q: int = 64  # queries at the end of the sequence that the estimate looks at; 256 follows small models closer
    sinks: int = 64  # first keys, always kept
    local: int = 1024  # nearest keys, always kept
    stride: int = 16  # xattention: tokens of a group, whose antidiagonals stand for the attention of two groups
    threshold: float = 0.9  # xattention: share of a query block's estimated mass that its kept blocks must reach
    chunk: int = 4096  # moba: keys that a query takes or leaves together
    top_k: int = 12  # moba: chunks of each query, its own included
    dense_layers: tuple[int, ...] = ()  # layers that keep every key
    dense_below: int | Literal["auto"] = 0  # shorter global sequences keep every key; "auto": the measured crossover
    backend: str = "auto"
    deterministic: bool = False

    def __post_init__(self):
        if isinstance(self.dense_layers, list):  # YAML has no tuples
            object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), field.type)
            _check_size(field.name, getattr(self, field.name))
        _one_of("pattern", self.pattern, PATTERNS)
        _one_of("layout", self.layout, LAYOUTS)
        _one_of("budget", self.budget, BUDGETS)
        _one_of("backend", self.backend, BACKENDS)
        if self.block < 16 or self.block & (self.block - 1):
            raise ValueError(f"attention.block must be a power of two of at least 16, got {self.block}; use 64 or 128")
        if self.granularity is not None and (self.granularity < 1 or self.granularity % self.block):
            raise ValueError(
                f"attention.granularity must be a multiple of attention.block, got granularity={self.granularity},"
                f" block={self.block}; lower the block or raise the granularity"
            )
        for name in ("p_v", "p_s", "threshold"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(
                    f"attention.{name} must lie in (0, 1], got {getattr(self, name)}; 1 keeps everything, or leave it"
                    " out for the default"
                )
        for name in ("k_v", "k_s", "cap", "last_q", "stride", "chunk", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"attention.{name} must be at least 1, got {getattr(self, name)}; leave it out for the default"
                )
        if self.block % self.stride:
            raise ValueError(
                f"attention.block must be a multiple of attention.stride, got block={self.block},"
                f" stride={self.stride}; use a power of two for the stride"
            )
        if self.pattern == "moba" and self.chunk % self.block:
            raise ValueError(
                f"attention.chunk must be a multiple of attention.block, got chunk={self.chunk}, block={self.block};"
                " lower the block or raise the chunk"
            )
        for name in ("sinks", "local", "dense_below"):
            value = getattr(self, name)
            if value != "auto" and value < 0:
                raise ValueError(f"attention.{name} must not be negative, got {value}; use 0 for none")
        if any(type(layer) is not int or layer < 0 for layer in self.dense_layers):
            raise ValueError(f"attention.dense_layers must list layer numbers from 0, got {list(self.dense_layers)}")

    def resolved(self) -> "AttentionConfig":
        """The same settings with no default left open."""
        below = CROSSOVER if self.dense_below == "auto" else self.dense_below
        return replace(self, granularity=self.stripe, dense_below=below)

    def check_layers(self, layers: int) -> None:
        """ValueError where a layer is named that a model of so many has not."""
        beyond = [layer for layer in self.dense_layers if layer >= layers]
        if beyond:
            raise ValueError(
                f"attention.dense_layers names layer {beyond[0]}, the model has layers 0 to {layers - 1}; leave it out"
            )

    @property
    def stripe(self) -> int:
        """Length of a stripe with the default filled in."""
        return self.granularity or self.block


def shortest(config: AttentionConfig, seq_len: int, world: int) -> tuple[int, str]:
    """(tokens below which a rank of a ring would go without any, what each rank gets).

    >>> shortest(AttentionConfig(layout="striped"), 1000, 8)
    (1024, 'a stripe of 128 tokens')
    """
    if config.layout == "striped":
        return world * config.stripe, f"a stripe of {config.stripe} tokens"
    if config.layout == "zigzag":
        return 2 * world * config.block, f"two chunks of at least {config.block} tokens"
    chunk = config.block * -(-seq_len // (config.block * world))
    return (world - 1) * chunk + 1, f"a part of {chunk} tokens"


def _check_type(name: str, value, expected: type) -> None:
    """bool is no number here, and a whole number will do for a share."""
    kinds = {
        float: (float, int),
        int | None: (int, type(None)),
        int | Literal["auto"]: (int, "auto"),
        tuple[int, ...]: (tuple,),
    }.get(expected, (expected,))
    if type(value) not in kinds and not (isinstance(value, str) and value in kinds):
        names = {tuple: "a list", type(None): "null", "auto": "auto"}
        words = " or ".join(names[kind] if kind in names else kind.__name__ for kind in kinds)
        raise ValueError(f"attention.{name} must be {words}, got {value!r} ({type(value).__name__})")


def _check_size(name: str, value) -> None:
    if type(value) is int and value > MOST:
        raise ValueError(f"attention.{name} must be at most {MOST}, got {value}; no sequence is longer")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"attention.{name} must be one of {', '.join(known)}, got {value!r}")
