"""The operator: index, ring, kernels and merge behind one autograd function.

    op = Operator(AttentionConfig(), Ring.single(), "cuda")
    out = op(q, k, v, layer=0)                            one rank, [B, S, N, D]
    out = op(q, k, v, layer=0, seq_len=524288)            context parallel, q, k, v are this rank's shards

A call is checked, its index estimated, its kernels chosen; `ops/passes.py` then goes around the ring.

The index of the forward pass is the index of the backward pass. Under activation checkpointing the forward runs twice;
the second run takes the first one's index from a small store instead of estimating again (see `IndexStore`).
"""

import math
from contextlib import nullcontext

import torch

from mtraining_nns.ops import clock, kernels
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.index import Index
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.passes import Call, aligned, attend, set_out
from mtraining_nns.ops.patterns import Place, dense, flexprefill, moba, vertical_slash, xattention
from mtraining_nns.ops.ring import Ring, RingError, placing
from mtraining_nns.ops.store import IndexStore

PATTERNS = {
    "dense": dense,
    "vertical_slash": vertical_slash,
    "xattention": xattention,
    "moba": moba,
    "flexprefill": flexprefill,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Operator:
    """Causal attention of one model under one configuration, on one ring.

    Raises ValueError at construction where the backend cannot run on the device, and at the call for tensors that fit
    neither each other nor the layout; RingError where the ranks of the ring do not agree.
    """

    def __init__(self, config: AttentionConfig, ring: Ring, device_type: str):
        if not isinstance(config, AttentionConfig):
            raise TypeError(f"expected an AttentionConfig, got {type(config).__name__}; AttentionConfig(**settings)")
        if not isinstance(ring, Ring):
            raise TypeError(f"expected a Ring, got {type(ring).__name__}; Ring.single() is one process")
        self.config, self.ring, self.device_type = config.resolved(), ring, device_type
        self.device, self.shape = kernels.Device.here(device_type, config.backend), {}
        self.choice()
        self.store, self.agreed = IndexStore(), None
        self.last: dict[int, tuple[Index, Layout]] = {}  # what each layer kept last, for read_stats

    def __call__(self, q, k, v, *, layer: int = 0, seq_len: int | None = None, scale: float | None = None):
        """q [B, S_local, N, D], k and v [B, S_local, H, D] -> [B, S_local, N, D] in q's dtype, one of DTYPES.

        seq_len: global length; without it the sequence is q's own, which only a ring of one has.
        scale: of the scores, D ** -0.5 by default.
        """
        layout = self._fitting(q, k, v, seq_len)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if not isinstance(scale, float | int) or not 0 < scale < math.inf:
            raise ValueError(f"scale must be a positive, finite number, got {scale!r}; leave it out for D ** -0.5")
        if not isinstance(layer, int) or layer < 0:
            raise ValueError(f"layer must be a number from 0, got {layer!r}; give each attention layer its own")
        q, k, v = map(aligned, _one_dtype(q, k, v))
        with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
            return self._attend(q, k, v, layer, layout, scale)

    def _attend(self, q, k, v, layer: int, layout: Layout, scale: float):
        self._agree(layer, (layout.seq_len, *q.shape, k.shape[2], DTYPES.index(q.dtype)))

        self._know(q.shape[3], q.shape[2], k.shape[2], q.dtype)
        backend, place = kernels.load(self.choice(layout.seq_len, layer)[0]), Place(layout, self.ring)
        config = self.config.of_layer(layer)

        @torch.no_grad()
        def build():
            with placing(f"estimate of layer {layer}"), clock.span("index"):
                return self._pattern(layer, layout).build(q, k, place, config, scale)

        with torch.autocast(q.device.type, enabled=False):
            sizes, start = f"q {tuple(q.shape)} of {layout.seq_len} tokens", None
            kept = self.store.take(layer, sizes)
            if kept is None or kept.output is None:
                dense = self._keeps_all(layer, layout.seq_len)
                columns = 0 if dense else PATTERNS[config.pattern].most_columns(config, layout.seq_len)
                # keys travel during the estimate
                start = set_out(q, k, v, place, backend, layer, block=config.block, dense=dense, columns=columns)
            index = build() if kept is None else kept.index
            if kept is None and torch.is_grad_enabled():
                kept = self.store.keep(layer, sizes, index)
            self.last[layer] = index, layout
            call = Call(index, place, backend, scale, layer, self.store, kept, config.keep_output)
            return attend(q, k, v, start, call)

    def prepare(self, head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype, layers: int | None = None) -> None:
        """Tell a model's shape.

        Raises ValueError where no backend, or not the one asked for, can do it, and for dense layers beyond `layers`.
        """
        if layers is not None:
            self.config.check_layers(layers)
        self._know(head_dim, heads, kv_heads, dtype)
        self.choice()

    def _know(self, head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
        if min(head_dim, heads, kv_heads) < 1 or heads % kv_heads:
            raise ValueError(
                f"query heads must be a multiple of key heads, and neither they nor the head dim 0,"
                f" got {heads} query heads, {kv_heads} key heads, head dim {head_dim}"
            )
        for row in self.config.head_budgets:
            if len(row) != heads:
                raise ValueError(
                    f"attention.head_budgets has a layer of {len(row)} heads, the model has {heads} query heads; take"
                    " the file of this model"
                )
        self.shape = {"head_dim": head_dim, "heads": heads, "kv_heads": kv_heads, "dtype": dtype}

    def choice(self, seq_len: int | None = None, layer: int | None = None) -> tuple[str, str]:
        """(backend, reason) for a global sequence and a layer, as far as they are known."""
        return kernels.choose(self.device, self._work(seq_len, layer), self.config.backend)

    def _work(self, seq_len: int | None, layer: int | None) -> kernels.Work:
        known, dense = self.shape, seq_len is not None and self._keeps_all(layer, seq_len)
        if seq_len is not None:
            known = known | {"queries": self.layout(seq_len).local_len, "dense": dense}
        row_bits = PATTERNS[self.config.pattern].ROW_BITS and not dense
        config = {"block": self.config.block, "deterministic": self.config.deterministic}
        return kernels.Work(**config, row_bits=row_bits, **known)

    def __reduce__(self):
        """A copied or pickled operator starts anew: what it keeps belongs to the calls of the original."""
        return Operator, (self.config, self.ring, self.device_type)

    def layout(self, seq_len: int) -> Layout:
        """Layout of a global sequence on this ring."""
        return Layout.of(self.config, seq_len, self.ring.world, self.ring.node_size)

    def read_stats(self) -> dict[str, dict[int, float]]:
        """Of each layer's last call: density in (0, 1], capped heads, and work, the query-key pairs of this rank.

        The density is that of the sequence, or of this rank's rows where a pattern chooses for every row (`RowIndex`).
        Waits for the device; call it at logging steps only.
        """
        stats: dict[str, dict[int, float]] = {"density": {}, "capped": {}, "work": {}}
        for layer, (index, layout) in sorted(self.last.items()):
            starts = layout.block_starts(self.ring.rank, index.device)
            stats["density"][layer] = index.density(layout.seq_len).item()
            stats["capped"][layer] = 0 if index.capped is None else int(index.capped)
            stats["work"][layer] = index.kept_pairs(starts, layout.seq_len).item()
        return stats

    def density(self) -> float:
        """Share of the causal pairs of the last sequence that its layers kept: of all ranks, layers and heads.

        Collective; waits for the device.
        """
        kept = [
            index.kept_pairs(layout.block_starts(self.ring.rank, index.device), layout.seq_len)
            for index, layout in self.last.values()
        ]
        index, layout = next(iter(self.last.values()))
        causal = len(kept) * index.head_count * layout.seq_len * (layout.seq_len + 1) / 2
        return (sum(self.ring.gather(torch.stack(kept).sum())) / causal).item()

    def describe(self, seq_len: int) -> str:
        """What a layer does with a global sequence of this length, and why, in one line."""
        pattern = self.config.pattern
        if seq_len < self.config.dense_below:
            pattern = f"dense, since {seq_len} tokens are fewer than attention.dense_below={self.config.dense_below}"
        elif self.config.dense_layers:
            pattern += f", dense in layers {', '.join(map(str, self.config.dense_layers))}"
        backend, reason = self.choice(seq_len)
        kernels_used = f"{backend}: {reason}"
        for dense_backend in {self.choice(seq_len, layer)[0] for layer in self.config.dense_layers} - {backend}:
            kernels_used += f", {dense_backend} in dense layers"
        return f"attention backend {kernels_used}; pattern {pattern}"

    def _pattern(self, layer: int, layout: Layout):
        return PATTERNS["dense" if self._keeps_all(layer, layout.seq_len) else self.config.pattern]

    def _keeps_all(self, layer: int | None, seq_len: int) -> bool:
        config = self.config
        return config.pattern == "dense" or layer in config.dense_layers or seq_len < config.dense_below

    def _fitting(self, q, k, v, seq_len: int | None) -> Layout:
        """The layout of a call whose tensors fit each other and it."""
        if not all(isinstance(x, torch.Tensor) for x in (q, k, v)):
            raise ValueError(f"expected tensors, got {', '.join(type(x).__name__ for x in (q, k, v))}")
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        if not q.dim() == k.dim() == v.dim() == 4 or 0 in q.shape + k.shape + v.shape:
            raise ValueError(
                f"expected q [B, S, N, D] and k, v [B, S, H, D], none of them empty, got {shapes}; add a batch dim with"
                " x[None], bring [B, N, S, D] into order with x.transpose(1, 2)"
            )
        if k.shape != v.shape:
            raise ValueError(f"expected k and v of one shape, got {shapes}; pad the smaller head dim")
        if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
            raise ValueError(
                f"expected one batch and head dim and N a multiple of H, got {shapes}; dims are [B, S, heads, D]"
            )
        devices = {x.device for x in (q, k, v)}
        if len(devices) > 1 or devices.pop().type != self.device.type or any(x.is_sparse for x in (q, k, v)):
            found = ", ".join(f"{'sparse ' if x.is_sparse else ''}{x.device}" for x in (q, k, v))
            raise ValueError(
                f"the operator was made for {self.device.type} tensors, all on one device, got {found}; move them with"
                " x.to, or make another operator"
            )
        if self.ring.world > 1 and seq_len is None:
            raise ValueError(f"a ring of {self.ring.world} ranks needs seq_len, the global length of the sequence")
        if seq_len is None:
            if k.shape[1] != q.shape[1]:
                raise ValueError(
                    f"self-attention needs as many keys as queries, got {shapes}; decode with dense attention"
                )
            return Layout(seq_len=q.shape[1], block=self.config.block)
        if not isinstance(seq_len, int):
            raise ValueError(f"seq_len must be a whole number of tokens, got {seq_len!r}; give an int")
        layout = self.layout(seq_len)
        if not q.shape[1] == k.shape[1] == layout.local_len:
            raise ValueError(
                f"rank {self.ring.rank} of {self.ring.world} holds {layout.local_len} tokens of a sequence of {seq_len}"
                f" ({layout.kind}, block {layout.block}), got {shapes}; shard with Layout.shard"
            )
        return layout

    def _agree(self, layer: int, sizes: tuple[int, ...]) -> None:
        """Ranks of the ring are in one layer and hold the same sizes; transfers between others hang or crash.

        Asked at every call on CPUs. On GPUs, where asking waits for the device, only where the sizes are not those of
        the call before.
        """
        if self.ring.world == 1 or (self.device.type == "cuda" and sizes == self.agreed):
            return
        mine = torch.tensor([layer, *sizes], device="cuda" if self.device.type == "cuda" else "cpu")
        with placing(f"layer {layer}"):
            found = [tuple(part.tolist()) for part in self.ring.gather(mine)]
        for rank, theirs in zip(self.ring.ranks, found):
            if theirs != (layer, *sizes):
                raise RingError(
                    f"layer {layer}: ranks of a ring need the same layer, lengths, heads and dtype, got"
                    f" {_call_text(layer, *sizes)} on this rank {self.ring.ranks[self.ring.rank]} and"
                    f" {_call_text(*theirs)} on rank {rank}; give all ranks the same batch"
                )
        self.agreed = sizes


def _call_text(layer: int, seq_len: int, *sizes: int) -> str:
    *shape, kv_heads, dtype = sizes
    return f"layer {layer}, a sequence of {seq_len}, q {tuple(shape)}, {kv_heads} key heads, {DTYPES[dtype]}"


def _one_dtype(q, k, v):
    """The inputs as they are, or in the dtype of an autocast region, as PyTorch's own attention takes them."""
    autocast, dtypes = torch.is_autocast_enabled(q.device.type), {q.dtype, k.dtype, v.dtype}
    if not dtypes <= set(DTYPES) or not (autocast or len(dtypes) == 1):
        known = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(
            f"expected q, k and v of one dtype of {known}, got {q.dtype}, {k.dtype} and {v.dtype}; use x.to"
        )
    return tuple(x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v)) if autocast else (q, k, v)
