"""HuggingFace models that nnScaler can trace: attention as a registered operator, the chunked loss, and tracer marks.

    lm = AutoModelForCausalLM.from_config(config, attn_implementation="mtraining")
    model = TracedLoss(lm, AttentionConfig(), seq_len=524288)
    parallelize(model, {"samples": sample}, context_parallel, compute_config)

sample: input_ids, labels (shifted) and position_ids, int64 [B, S], S the padded length, in the ring's order.

nnScaler's tracer runs the source of every Python function that it meets again, which breaks on some of transformers'
bookkeeping; it leaves alone what carries a mark (`mark_transformers`). Seen with transformers 5.17 and 5.24.

Where shapes alone are traced (`nnscaler_meta.py`), transformers cannot look at the tokens for packed documents; models
with the operator do not ask it to (`without_masks`).
"""

import functools
import importlib
import sys

from torch import nn

from mtraining_nns import hf, nnscaler_ops
from mtraining_nns.ops.config import AttentionConfig

MARK = "__fx_already_patched"  # what nnScaler's tracer looks for
UNTRACED = (  # module, object with the functions or None, functions; each exists in some version of transformers
    ("transformers.utils.output_capturing", "_CanRecordRegistry", ("get",)),
    ("transformers.modeling_utils", "AttentionInterface", ("get_interface", "get", "__getitem__")),
    ("transformers.utils.generic", "GeneralInterface", ("get_interface", "get", "__getitem__")),
    ("transformers.utils.generic", None, ("maybe_autocast",)),
)


class TracedLoss(nn.Module):
    """What nnScaler compiles: samples -> the summed loss. lm: a causal LM with attn_implementation="mtraining".

    seq_len: real tokens of a sequence; longer ones are padding. chunk: tokens whose logits exist at one time.
    ValueError for a model that the operator would compute wrongly.
    """

    def __init__(self, lm: nn.Module, attention: AttentionConfig, *, seq_len: int, chunk: int = 1024):
        super().__init__()
        mark_transformers()
        without_masks(lm)
        hf.rope_check(lm)
        self.lm, self.settings = lm, nnscaler_ops.settings_of(attention)
        self.seq_len, self.chunk = seq_len, chunk
        hf.attach(lm, TracedAttention(self.settings), seq_len=seq_len)

    def forward(self, samples):
        position_ids = nnscaler_ops.ordered(samples["position_ids"], self.settings, self.seq_len)
        hidden = self.lm.model(input_ids=samples["input_ids"], position_ids=position_ids, use_cache=False)[0]
        return nnscaler_ops.linear_cross_entropy(hidden, self.lm.lm_head.weight, samples["labels"], chunk=self.chunk)


class TracedAttention:
    """Stands in for an operator while a model is traced: every call becomes `nnscaler_ops.attention`."""

    def __init__(self, settings: str):
        self.settings = settings

    def __call__(self, q, k, v, *, layer: int, seq_len: int, scale: float | None = None):
        return nnscaler_ops.attention(q, k, v, self.settings, layer=layer, seq_len=seq_len, scale=scale)

    def prepare(self, *shape) -> None:
        """The operator of a rank learns the shape in its first call."""


def mark_transformers() -> None:
    """Keep nnScaler's tracer out of transformers' bookkeeping; replaces nothing."""
    for module_name, holder, names in UNTRACED:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        place = module if holder is None else getattr(module, holder, None)
        for name in names:
            function = vars(place).get(name) if place is not None else None
            for f in (function, getattr(function, "__wrapped__", None)):
                if f is not None:
                    setattr(f, MARK, True)


def without_masks(lm: nn.Module) -> None:
    """No mask, without a look at the tokens, for models with the operator that have neither padding nor a cache."""
    modeling = sys.modules[type(lm.model).__module__]
    make = getattr(modeling, "create_causal_mask", None)
    if make is None or hasattr(make, MARK):
        return

    @functools.wraps(make)
    def create_causal_mask(*args, **kwargs):
        needless = all(kwargs.get(name) is None for name in ("attention_mask", "past_key_values", "cache"))
        if not args and needless and kwargs["config"]._attn_implementation == hf.NAME:
            return None
        return make(*args, **kwargs)

    setattr(create_causal_mask, MARK, True)
    modeling.create_causal_mask = create_causal_mask
