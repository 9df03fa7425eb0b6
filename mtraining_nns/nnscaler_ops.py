"""Operators for nnScaler's graphs: attention over a ring, the chunked loss, and a guard of the tokens' order.

    from mtraining_nns import nnscaler_ops          # call operators through the module: nnScaler traces into others
    out = nnscaler_ops.attention(q, k, v, settings, layer, seq_len)
    loss = nnscaler_ops.linear_cross_entropy(hidden, lm_head.weight, labels)

    nnscaler.init(); nnscaler_ops.connect(plan_ngpus)     # on every rank, before the first step

The graph sees the whole padded sequence in the ring's order: tokens, labels and positions as the ranks' shards of
`Layout` laid end to end (`Layout.permutation`). nnScaler then gives every rank of a plan its part, and attention turns
each part into a ring step's queries. Any other partition is an error while code is generated; a ring or an order that
does not fit the plan is an error in the first step. Nothing here creates a process group but `connect`.

Letters: B batch, S padded tokens, N query heads, H key heads, D head dim, E features, V words.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace

import torch
import torch.distributed as dist
from nnscaler.graph.parser.register import register_op

from mtraining_nns import loss as losses
from mtraining_nns import nnscaler_meta
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.ring import Ring

CHECKED_CALLS = 3  # of `ordered` on each rank: the order of tokens is compared, which waits for the device

_rings: dict[tuple[int, ...], Ring] = {}
_operators: dict[tuple, Operator] = {}
_checks_left = CHECKED_CALLS
_token_losses: list | None = None
_timed: Callable[[], AbstractContextManager] = nullcontext


def connect(plan_ngpus: int, **options) -> Ring:
    """Build and keep the ring of this rank, `plan_ngpus` neighbouring ranks; options are those of `Ring.create`.

    Collective over the world. A later call replaces the rings and forgets the operators' indices.
    """
    return use(Ring.create(plan_ngpus, **options))


def use(ring: Ring) -> Ring:
    """Keep a ring that was made already, in place of `connect`."""
    global _checks_left
    _rings.clear()
    _operators.clear()
    _rings[ring.ranks if ring.world > 1 else _alone()] = ring
    _checks_left = CHECKED_CALLS
    return ring


def time_losses(timed: Callable[[], AbstractContextManager]) -> None:
    """Enter `timed()` around every chunked loss from now on."""
    global _timed
    _timed = timed


def operator() -> Operator:
    """The operator of this rank; RuntimeError unless generated code has run, with one set of settings."""
    if len(_operators) != 1:
        raise RuntimeError(f"expected one operator on this rank, got {len(_operators)}; run a step first")
    return next(iter(_operators.values()))


@contextmanager
def changed(**settings):
    """Within it generated code computes with other settings of AttentionConfig than it was generated with."""
    kept = dict(_operators)
    for key, before in kept.items():
        if settings:
            _operators[key] = Operator(replace(before.config, **settings), before.ring, before.device_type)
    try:
        yield
    finally:
        _operators.update(kept)


def settings_of(config: AttentionConfig) -> str:
    """The settings as they stand in generated code, so that other settings are other code."""
    return json.dumps(asdict(config.resolved()), sort_keys=True)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: str,
    layer: int = 0,
    seq_len: int | None = None,
    scale: float | None = None,
    process_group: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Causal attention of one layer: q [B, S, N, D], k and v [B, S, H, D] -> [B, S, N, D]; S local in generated code.

    settings: of `settings_of`. seq_len: real tokens of the whole sequence. process_group: ranks of the ring, written by
    generated code. RuntimeError where `connect` made no such ring.
    """
    return _operator(settings, process_group, q.device.type)(q, k, v, layer=layer, seq_len=seq_len, scale=scale)


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int = 1024
) -> torch.Tensor:
    """fp32 sum of the token losses: hidden [B, S, E], weight [V, E], labels int64 [B, S], -100 where there is none.

    chunk: tokens whose logits exist at one time.
    """
    if _token_losses is None:
        with _timed():
            return losses.linear_cross_entropy(hidden, weight, labels, chunk=chunk)
    found = losses.token_losses(hidden, weight, labels, chunk=chunk)
    _token_losses.append((found, labels))
    return found.sum()


@contextmanager
def token_losses():
    """Within it the loss leaves losses (fp32) and labels, [B, S] of this rank, in the list that comes; no gradients."""
    global _token_losses
    _token_losses = []
    try:
        yield _token_losses
    finally:
        _token_losses = None


def ordered(
    position_ids: torch.Tensor,
    settings: str,
    seq_len: int,
    process_group: tuple[int, ...] | None = None,
    whole: bool = False,
) -> torch.Tensor:
    """position_ids [B, S] as they came, once it is sure that this rank's tokens are in the order of its ring.

    whole: they are those of all ranks, one after another; written by generated code.
    """
    global _checks_left
    if _checks_left > 0:
        _checks_left -= 1
        operator = _operator(settings, process_group, position_ids.device.type)
        ranks, layout = range(operator.ring.world) if whole else (operator.ring.rank,), operator.layout(seq_len)
        expected = torch.cat([layout.positions(rank, position_ids.device) for rank in ranks]).clamp_max(seq_len - 1)
        found = position_ids.clamp_max(seq_len - 1)  # padding may have any later position, or the last real one
        if found.shape[1] != len(expected) or not bool((found == expected).all()):
            raise RuntimeError(
                f"rank {operator.ring.rank} of a ring of {operator.ring.world} expects tokens"
                f" {expected[:3].tolist()} ... {expected[-1].item()}, got {position_ids[0, :3].tolist()} ..."
                f" {position_ids[0, -1].item()}; order the data by Layout.permutation of a ring of plan_ngpus ranks"
            )
    return position_ids


def _operator(settings: str, ranks: tuple[int, ...] | None, device_type: str) -> Operator:
    ring = _rings.get(ranks or _alone())
    if ring is None:
        raise RuntimeError(
            f"no ring of ranks {ranks or _alone()}, there are {sorted(_rings)}; call nnscaler_ops.connect(plan_ngpus)"
            " after nnscaler.init() and before the first step"
        )
    key = settings, ring.ranks, device_type
    if key not in _operators:
        _operators[key] = Operator(AttentionConfig(**json.loads(settings)), ring, device_type)
    return _operators[key]


def _alone() -> tuple[int, ...]:
    return (dist.get_rank() if dist.is_initialized() else 0,)


def _attention_shapes(q, k, v, *args, **kwargs) -> str:
    """Heads may be grouped; only batch and tokens can be cut, and `_with_ring` refuses the batch."""
    group = q.shape[2] // k.shape[2]
    heads = "h^" if group == 1 else f"(h^ {group})"
    return f"b l {heads} d^, b l h^ d^, b l h^ d^ -> b l {heads} d^"


def _with_ring(node, args, kwargs, runtime_devid: int, plan_ndevs: int, runtime_ndevs: int) -> str:
    """The call in generated code, with the ranks of the ring."""
    cut, name = _cut(node), node.signature.rpartition(".")[2]
    if cut != ([1] if plan_ndevs > 1 else []):
        found = f"cut along dims {cut}" if cut else "replicated"
        raise RuntimeError(
            f"nnscaler_ops.{name} is {found} over {plan_ndevs} GPUs, expected its tokens (dim 1) to be cut; use the"
            f" policy mtraining_nns.policy.context_parallel or constrain this operator; from {node.comment}"
        )
    return _call(node, args, kwargs, runtime_devid, plan_ndevs)


def _with_order(node, args, kwargs, runtime_devid: int, plan_ndevs: int, runtime_ndevs: int) -> str:
    """Likewise, but it may also see the whole sequence."""
    if plan_ndevs > 1 and not _cut(node):
        return _call(node, args, kwargs | {"whole": True}, runtime_devid, plan_ndevs)
    return _with_ring(node, args, kwargs, runtime_devid, plan_ndevs, runtime_ndevs)


def _call(node, args, kwargs, runtime_devid: int, plan_ndevs: int) -> str:
    first = runtime_devid // plan_ndevs * plan_ndevs
    named = kwargs | {"process_group": tuple(range(first, first + plan_ndevs))}
    return f"{node.signature}({', '.join([*args, *(f'{key}={value}' for key, value in named.items())])})"


def _cut(node) -> list[int]:
    """Along which dims the first input is cut."""
    part = node.inputs()[0]
    return [dim for dim, (mine, whole) in enumerate(zip(part.shape, part.parent.shape)) if mine != whole]


def _queries(node) -> list[torch.Tensor]:
    """Inputs for nnScaler's profiler: attention that is neither uniform nor one-hot."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(x.shape, generator=g).to(x.dtype) for x in node.inputs() if hasattr(x, "shape")]


def _attention_traced(q, k, v, settings, layer=0, seq_len=None, scale=None, process_group=None):
    """Of the result's shape and dtype, with a gradient, without its arithmetic: for tracing."""
    return q.clone()


def _loss_traced(hidden, weight, labels, chunk=1024):
    return hidden.sum(dtype=torch.float32)


def _ordered_traced(position_ids, settings, seq_len, process_group=None, whole=False):
    return position_ids.clone()


nnscaler_meta.keep_types()
nnscaler_meta.keep_devices()
register_op(_attention_shapes, emit_fn=_with_ring, input_gen_fn=_queries, fake_fn=_attention_traced)(attention)
register_op("b+ l+ e^, v^ e^, b+ l+ -> 1", fake_fn=_loss_traced)(linear_cross_entropy)
register_op("b l -> b l", emit_fn=_with_order, fake_fn=_ordered_traced)(ordered)
