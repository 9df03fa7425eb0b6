"""The sections of a recipe, one frozen dataclass each; `recipe.py` joins them.

A section checks its own ranges and raises UserError; types are checked where the YAML is read (`recipe_yaml.py`).
"""

from dataclasses import dataclass
from typing import Literal

from mtraining_nns.errors import UserError


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


def _at_least(least: float, section: str, config, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        ok = value is None or least <= value < float("inf")
        _require(ok, f"{section}.{name} must be at least {least} and finite, got {value}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train: a checkpoint to continue from, or a fresh one."""

    path: str | None = None  # local folder of a HuggingFace checkpoint
    init: dict | None = None  # fields of a transformers config, with model_type, for a fresh model
    rope: dict | None = None  # rope_theta, rope_type, factor, ...: replaces the model's own
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_position_embeddings: int | None = None  # None: train.seq_len if that is larger than the model's

    def __post_init__(self):
        _require(
            (self.path is None) != (self.init is None),
            f"give exactly one of model.path and model.init, got path={self.path!r}, init={self.init!r}",
        )
        if self.init is not None:
            _require("model_type" in self.init, "model.init must name its model_type, such as llama or qwen2")
            vocabulary = self.init.get("vocab_size", 1)
            _require(type(vocabulary) is int, f"model.init.vocab_size must be int, got {vocabulary!r}")
        _at_least(1, "model", self, "max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Folders that `mtraining prepare` wrote: one to train on (`path`), or several by weight (`mix`)."""

    path: str | None = None
    mix: dict[str, float] | None = None  # folder: its part of the tokens, in any unit
    eval_path: str | None = None
    seed: int = 0  # order of the samples

    def __post_init__(self):
        _require(
            (self.path is None) != (self.mix is None),
            f"give exactly one of data.path and data.mix, got path={self.path!r}, mix={self.mix!r}",
        )
        _require(self.mix != {}, "data.mix names no folder; give e.g. {data/books: 0.7, data/code: 0.3}")
        for folder, weight in (self.mix or {}).items():
            _require(
                0 < weight < float("inf"),
                f"data.mix.{folder} must be a positive number, got {weight}; leave a folder out that is not to be read",
            )

    @property
    def weights(self) -> dict[str, float]:
        """Every folder to train on with its weight."""
        return {self.path: 1.0} if self.mix is None else self.mix

    @property
    def first(self) -> str:
        """A folder to train on; all agree on the tokenizer."""
        return next(iter(self.weights))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimisation. Lengths are in tokens; one step is `micro_batch * accumulation * dp` sequences."""

    steps: int
    seq_len: int  # global: the whole sequence, before it is split over the ring
    lr: float
    micro_batch: int = 1
    accumulation: int = 1
    min_lr_ratio: float = 0.1  # the last learning rate, as a part of lr
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0  # largest gradient norm
    seed: int = 0  # initial weights of a fresh model
    recompute: bool = True  # activation checkpointing, per decoder layer; attention.keep_output spares attention
    offload_inputs: bool = False  # what a recomputed layer starts from waits in host memory
    loss_chunk: int = 1024  # tokens whose logits exist at one time
    precision: Literal["bf16", "fp32"] = "bf16"
    kernels: Literal["torch", "liger"] = "torch"  # of norms, MLPs and rotations

    def __post_init__(self):
        _at_least(0, "train", self, "warmup_steps", "weight_decay", "lr", "min_lr_ratio")
        _at_least(1, "train", self, "steps", "micro_batch", "accumulation", "loss_chunk")
        _at_least(2, "train", self, "seq_len")
        _require(
            self.recompute or not self.offload_inputs,
            "train.offload_inputs=true is for train.recompute=true, got false; without recomputation layers keep more"
            " than their inputs",
        )
        _require(self.min_lr_ratio <= 1, f"train.min_lr_ratio must be at most 1, got {self.min_lr_ratio}")
        for name in ("clip", "eps"):
            _require(getattr(self, name) > 0, f"train.{name} must be positive, got {getattr(self, name)}")
        _require(all(0 <= beta < 1 for beta in self.betas), f"train.betas must lie in [0, 1), got {list(self.betas)}")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the processes are used: a ring of `cp` ranks shares a sequence, `dp` rings share a batch."""

    engine: Literal["auto", "torch", "nnscaler"] = "auto"
    cp: int | None = None  # None: the launched processes / dp
    dp: int = 1
    ring: Literal["auto", "flat", "hierarchical"] = "auto"  # auto: hierarchical where a ring spans equal nodes
    inner: int | None = None  # hierarchical: ranks of an inner circle; None: the ranks of a node
    inner_mode: Literal["auto", "ring", "gather"] = "auto"  # keys within a node: hop by hop, or several ranks' a hop
    # torch: 2 keeps gathered weights from the forward pass to the backward pass, 3 gathers them twice
    # nnscaler: 0 keeps all on every rank, 1 shards the optimizer states, 2 and 3 weights and gradients, too
    zero: Literal[0, 1, 2, 3] = 2
    offload: bool = False  # AdamW's moments in host memory
    timeout_s: int = 600  # for one exchange between ranks
    warmup_timeout_s: int = 1800  # the same in the first step, in which each rank compiles its kernels
    data_guard_steps: int = 3  # first steps that check that a ring reads one batch

    def __post_init__(self):
        _at_least(0, "parallel", self, "data_guard_steps")
        _at_least(1, "parallel", self, "cp", "dp", "inner", "timeout_s", "warmup_timeout_s")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where training states are kept."""

    dir: str
    every: int = 0  # steps; 0: only at the end
    keep: int = 2  # complete checkpoints that stay
    resume: str = "auto"  # auto: the latest complete one in dir; never; or the path of one

    def __post_init__(self):
        _at_least(0, "checkpoint", self, "every")
        _at_least(1, "checkpoint", self, "keep")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written while training."""

    dir: str | None = None  # TensorBoard; None: checkpoint.dir/tensorboard
    every: int = 1  # steps
    eval_every: int = 0  # steps between losses on data.eval_path; 0: none
    profile_every: int = 0  # steps between those whose time is measured part by part; 0: none
    niah_every: int = 0  # steps between needles in a haystack of train.seq_len tokens, and at the end; 0: none
    niah_depths: tuple[float, ...] = (10.0, 50.0, 90.0)  # of the needles, in percent
    spike_window: int = 128  # steps whose median a loss is compared with; 0: no loss is called a spike
    spike_factor: float = 10.0  # median distances from the median at which a loss is a spike
    spike_warmup: int = 20  # first steps of the run, in which no loss is
    slow_factor: float = 1.5  # a rank whose own work takes this many times the median of all ranks is named
    batches: bool = False  # hashes of what every step reads, in checkpoint.dir/batches.jsonl

    def __post_init__(self):
        _at_least(0, "log", self, "eval_every", "niah_every", "profile_every", "spike_window", "spike_warmup")
        _at_least(1, "log", self, "every", "spike_factor", "slow_factor")
        _require(
            len(self.niah_depths) > 0 and all(0 <= depth <= 100 for depth in self.niah_depths),
            f"log.niah_depths must be percentages, got {list(self.niah_depths)}; give e.g. [10, 50, 90]",
        )


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The HuggingFace checkpoint at the end of a run."""

    dir: str | None = None  # None: checkpoint.dir/hf
