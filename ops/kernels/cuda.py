"""Sparse attention on CUDA C++ packages for Ampere and newer GPUs: block-sparse-attn for lists, flash-attn 2 for dense.

    kept blocks        block-sparse-attn, blocks of 128 x 128, the diagonal masked causally
    every block        flash-attn 2.7 or newer, causal; without the package, block-sparse-attn with every block listed
    gathered columns   the Triton backend, merged in fp32

block-sparse-attn walks its lists from the last block to the first:

    count=[0, 1, 2] index=[[-, -, -], [0, -, -], [0, 1, -]] with diagonal becomes [[0, -1, -1], [1, 0, -1], [2, 1, 0]]

Rounding: out and the gradients of one ring step come in 16 bits and are summed in fp32; dK and dV of a group of query
heads are rounded once a head. The backward pass adds into dQ in any order.
"""

import importlib.util
from dataclasses import replace

import torch
import triton
import triton.language as tl
from block_sparse_attn.block_sparse_attn_interface import _block_sparse_attn_backward, _block_sparse_attn_forward

from mtraining_nns.ops.index import BlockIndex, Lists
from mtraining_nns.ops.kernels import triton as columns_backend
from mtraining_nns.ops.kernels import triton_rows
from mtraining_nns.ops.kernels.backends import BLOCK
from mtraining_nns.ops.kernels.contract import Grads, Keys, Tape, Traits, joined
from mtraining_nns.ops.kernels.contract import no_front_rows as front_rows  # noqa: F401
from mtraining_nns.ops.kernels.sizes import cuda as workspace_bytes  # noqa: F401
from mtraining_nns.ops.kernels.triton_lists import chunk
from mtraining_nns.ops.merge import Partial

# flash-attn-4 also installs a folder flash_attn, but none with this file
HAS_FLASH_ATTN = bool(importlib.util.find_spec("flash_attn")) and bool(
    importlib.util.find_spec("flash_attn.flash_attn_interface")
)
if HAS_FLASH_ATTN:
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

PLAIN = {"window_size_left": -1, "window_size_right": -1}  # no window, in either package
DENSE = {"dropout_p": 0.0, "causal": True, "softcap": 0.0, "alibi_slopes": None, **PLAIN}
TRAITS = Traits(causal_without_lists=HAS_FLASH_ATTN, own_with_others=False)


def forward(q, keys: Keys, *, scale, carry=None, into=None) -> Partial:
    """Attention over the listed blocks and the columns, merged with `carry`."""
    _check(keys)
    part = _dense_forward(q, keys, scale) if _causal(keys) else _blocks_forward(q, keys, scale)
    if keys.columns is not None:
        part = triton_rows.merge(carry, part, None)
        return columns_backend.forward(q, _columns_alone(keys), scale=scale, carry=part, into=into)
    return triton_rows.merge(carry, part, into)


def begin(q, tape: Tape) -> None:
    """Nothing is carried."""


def backward(q, keys: Keys, tape: Tape, *, carry, into=None) -> Grads:
    """Gradients over the listed blocks and the columns."""
    _check(keys)
    dq, dkv = _dense_backward(q, keys, tape) if _causal(keys) else _blocks_backward(q, keys, tape)
    if keys.columns is None:
        return Grads(joined(carry, dq, into), dkv, None)
    dq = joined(carry, dq, None)
    dq, _, columns = columns_backend.backward(q, _columns_alone(keys), tape, carry=dq, into=into)
    return Grads(dq, dkv, columns)


def _check(keys: Keys) -> None:
    if keys.blocks.row_bits is not None:
        raise ValueError("the cuda backend takes whole blocks, this pattern chooses rows; use attention.backend=triton")


def _causal(keys: Keys) -> bool:
    """Everything up to the diagonal: no list needed."""
    return HAS_FLASH_ATTN and keys.blocks.dense and keys.blocks.diagonal


def _dense_forward(q, keys: Keys, scale) -> Partial:
    out, lse, *_ = _flash_attn_forward(q, keys.k, keys.v, softmax_scale=scale, return_softmax=False, **DENSE)
    return Partial(out, lse)


def _dense_backward(q, keys: Keys, tape: Tape):
    dq, dkv = torch.empty_like(q), torch.empty(2, *keys.k.shape, dtype=q.dtype, device=q.device)
    _flash_attn_backward(
        tape.dout, q, keys.k, keys.v, tape.out, tape.lse, dq, *dkv,
        softmax_scale=tape.scale, deterministic=False, **DENSE,
    )  # fmt: skip
    return dq, dkv


def _blocks_forward(q, keys: Keys, scale) -> Partial:
    lists = descending(keys.blocks.by_query, keys.blocks.diagonal, own_first=True)
    out, lse, *_ = _block_sparse_attn_forward(
        *_flat(q, keys.k, keys.v), row_blockmask=_per_batch(lists, q), softmax_scale=scale, exact_streaming=False,
        return_softmax=False, **_sizes(q, keys, shared=lists.shape[1] == 1),
    )  # fmt: skip
    # a query block without any key block gets +inf
    return Partial(out.view(q.shape), torch.where(lse == torch.inf, -torch.inf, lse))


def _blocks_backward(q, keys: Keys, tape: Tape):
    assert keys.blocks.by_key is not None, "lists by key are for backward passes: build them with both=True"
    lists = descending(keys.blocks.by_key, keys.blocks.diagonal, own_first=False)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dkv = torch.empty(2, *keys.k.shape, dtype=q.dtype, device=q.device)
    _block_sparse_attn_backward(
        *_flat(tape.dout, q, keys.k, keys.v, tape.out), tape.lse.contiguous(), *_flat(dq, *dkv),
        col_blockmask=_per_batch(lists, q), softmax_scale=tape.scale, zero_tensors=True, deterministic=False,
        rng_state=torch.empty(2, dtype=torch.int64, device=q.device), **_sizes(q, keys, shared=lists.shape[1] == 1),
    )  # fmt: skip
    return dq, dkv


def _flat(*tensors):
    """[B, S, N, D] -> [B * S, N, D]: the package takes sequences laid end to end."""
    return [x.flatten(0, 1) for x in tensors]


def _per_batch(lists, q):
    return lists if lists.shape[0] == q.shape[0] else lists.expand(q.shape[0], -1, -1, -1).contiguous()


def _sizes(q, keys: Keys, *, shared: bool) -> dict:
    """What both passes say of the shapes. shared: all heads read the first list."""
    (batch, q_len, heads, _), k_len = q.shape, keys.k.shape[1]
    ints = {"dtype": torch.int32, "device": q.device}
    return {
        "cu_seqlens_q": torch.arange(0, (batch + 1) * q_len, q_len, **ints),
        "cu_seqlens_k": torch.arange(0, (batch + 1) * k_len, k_len, **ints),
        "max_seqlen_q_": q_len,
        "max_seqlen_k_": k_len,
        "m_block_dim": BLOCK,
        "n_block_dim": BLOCK,
        "head_mask_type": torch.ones(heads, **ints) if shared else torch.arange(1, heads + 1, **ints),
        "streaming_info": torch.zeros(2 * heads, **ints),  # not used, but its address is read
        "p_dropout": 0.0,
        "is_causal": keys.blocks.diagonal,
        **PLAIN,
    }


def _columns_alone(keys: Keys) -> Keys:
    """The columns with lists that hold no block."""
    blocks: BlockIndex = keys.blocks
    by_query, by_key = (
        lists and Lists(torch.zeros_like(lists.count), lists.index) for lists in (blocks.by_query, blocks.by_key)
    )
    return keys._replace(blocks=replace(blocks, by_query=by_query, by_key=by_key, diagonal=False, dense=False))


def descending(lists: Lists, diagonal: bool, *, own_first: bool) -> torch.Tensor:
    """int32 [B, N, rows, width]: each row's blocks from the last to the first, then -1.

    diagonal adds the row's own number, as its last block (own_first, lists by query) or its first (lists by key).
    """
    (*heads, rows, width), device = lists.index.shape, lists.index.device
    # one entry more: the package reads the one after a full row
    flat = torch.empty(lists.index.numel() + 1, dtype=torch.int32, device=device)
    result = flat[:-1].view(*heads, rows, width)
    descending_rows[(lists.count.numel(),)](
        *lists, result, rows, width, FIRST=int(diagonal and own_first), LAST=int(diagonal and not own_first),
        CHUNK=chunk(width),
    )  # fmt: skip
    return result


@triton.jit
def descending_rows(
    COUNT, INDEX, RESULT, rows, width, FIRST: tl.constexpr, LAST: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Program (head, row)."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(COUNT + row)
    for first in range(0, width, CHUNK):
        slot = first + tl.arange(0, CHUNK)
        source = count - 1 - slot + FIRST
        listed = tl.load(INDEX + row * width + source, mask=(source >= 0) & (source < count), other=-1)
        own = (slot == 0) if FIRST else (slot == count) & (LAST == 1)
        tl.store(RESULT + row * width + slot, tl.where(own, tl.program_id(0) % rows, listed), mask=slot < width)
