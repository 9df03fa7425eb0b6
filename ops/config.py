"""Attention settings: what is kept, how tokens are laid out over the ring, which kernels run.

Plain data, no torch: recipes, the evaluation and the operator share this one dataclass, and it is written into every
exported checkpoint. It describes the model, never the machine, except `backend`, `deterministic` and `keep_output`.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

PATTERNS = ("dense", "vertical_slash", "xattention", "moba", "flexprefill")
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
    head_budgets: tuple[tuple[tuple[int, int], ...], ...] = ()  # budget "fixed": (k_v, k_s) of each head of each layer
    cap: int = 4096  # most columns a head may keep beside the sinks; reaching it is counted and logged
    last_q: int = 64  # queries at the end of the sequence that the estimate looks at; 256 follows small models closer
    sinks: int = 64  # first keys, always kept
    local: int = 1024  # nearest keys, always kept
    stride: int = 16  # xattention: tokens of a group, whose antidiagonals stand for the attention of two groups
    threshold: float = 0.9  # xattention, flexprefill: share of the estimated mass that kept blocks must reach
    tau: float = 0.1  # flexprefill: a head whose two estimates are less than this apart chooses blocks by query
    chunk: int = 4096  # moba: keys that a query takes or leaves together
    top_k: int = 12  # moba: chunks of each query, its own included
    dense_layers: tuple[int, ...] = ()  # layers that keep every key
    dense_below: int | Literal["auto"] = 0  # shorter global sequences keep every key; "auto": the measured crossover
    backend: str = "auto"
    deterministic: bool = False
    keep_output: bool = False  # under recomputation: attention is not computed again, for its output and lse in memory

    def __post_init__(self):
        for name in ("dense_layers", "head_budgets"):
            object.__setattr__(self, name, _tuples(getattr(self, name)))  # YAML and JSON have none
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
        if not 0.0 <= self.tau <= 1.0:
            raise ValueError(f"attention.tau must lie in [0, 1], got {self.tau}; 0 chooses no head's blocks by query")
        _check_head_budgets(self)
        if any(type(layer) is not int or layer < 0 for layer in self.dense_layers):
            raise ValueError(f"attention.dense_layers must list layer numbers from 0, got {list(self.dense_layers)}")

    def resolved(self) -> "AttentionConfig":
        """The same settings with no default left open."""
        below = CROSSOVER if self.dense_below == "auto" else self.dense_below
        return replace(self, granularity=self.stripe, dense_below=below)

    def of_layer(self, layer: int) -> "AttentionConfig":
        """The settings with `head_budgets` of that layer alone, and k_v and k_s the largest of them."""
        if not self.head_budgets:
            return self
        budgets = self.head_budgets[layer]
        columns, bins = (max(numbers) for numbers in zip(*budgets))
        return replace(self, k_v=columns, k_s=bins, head_budgets=(budgets,))

    def check_layers(self, layers: int) -> None:
        """ValueError where the settings are of a model with another number of layers."""
        if self.head_budgets and len(self.head_budgets) != layers:
            raise ValueError(
                f"attention.head_budgets is for {len(self.head_budgets)} layers, the model has {layers}; take the file"
                " of this model"
            )
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


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _check_head_budgets(config: AttentionConfig) -> None:
    layers = config.head_budgets
    if not layers:
        return
    if config.pattern != "vertical_slash" or config.budget != "fixed":
        raise ValueError(
            f"attention.head_budgets is for pattern vertical_slash with budget fixed, got {config.pattern} with"
            f" {config.budget}; set both"
        )
    pairs = [pair for heads in layers if isinstance(heads, tuple) for pair in heads]
    if not all(isinstance(heads, tuple) and heads for heads in layers) or not all(map(_is_budget, pairs)):
        raise ValueError(
            "attention.head_budgets must be a list of layers, each a list of heads, each a pair (k_v, k_s) of numbers"
            f" from 1, got {str(layers)[:80]}"
        )


def _is_budget(pair) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and all(type(x) is int and 1 <= x <= MOST for x in pair)


def _check_type(name: str, value, expected: type) -> None:
    """bool is no number here, and a whole number will do for a share."""
    kinds = {
        float: (float, int),
        int | None: (int, type(None)),
        int | Literal["auto"]: (int, "auto"),
        tuple[int, ...]: (tuple,),
        tuple[tuple[tuple[int, int], ...], ...]: (tuple,),
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
