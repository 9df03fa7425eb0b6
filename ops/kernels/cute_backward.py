"""FlashAttention-4's backward pass for Hopper in its three parts, so that the steps of a ring add into one dQ.

    begin     once: rowsum(dout * out), lse in base 2, q and dout head by head, and dQ zeroed
    add       a hop: dQ of its keys added in fp32, their dK and dV
    finish    once: dQ rounded to the inputs' dtype

The package's own function does all three in one call: over a ring of W ranks it would read dout and out, and write and
add up dQ, W times. And one of its programs sees one query head: dK and dV of a key block are added up in fp32 memory
among the heads of a group, which tells where a rank has few queries to every key. Here `fold` heads of a group follow
each other as one long head, so that a program has the queries of all of them:

    4 heads of one key head     fold 1: 4 heads of S' queries     fold 2: 2 of 2 S'     fold 4: 1 of 4 S', no sums
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from cutlass import cute
from flash_attn.cute import interface, utils
from flash_attn.cute.block_sparsity import normalize_block_sparse_config_bwd, to_cute_block_sparse_tensors
from flash_attn.cute.cache_utils import get_jit_cache
from flash_attn.cute.cute_dsl_utils import (
    get_aux_tensor_metadata,
    get_broadcast_dims,
    to_cute_aux_tensor,
    to_cute_tensor,
)
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90

from mtraining_nns.ops.kernels import triton_rows
from mtraining_nns.ops.kernels.backends import BLOCK
from mtraining_nns.ops.kernels.contract import Tape

SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # compilations are kept on disk
ARCH = 90
compiled = get_jit_cache("mtraining_bwd")


class Sums(NamedTuple):
    """dq: fp32 [B, N, S' * D] in the kernel's own order; length: S."""

    dq: torch.Tensor
    rows: triton_rows.HeadRows
    length: int

    def folded(self, fold: int) -> tuple:
        """(q, dout [B, fold * S', N / fold, D], lse, delta, dq), without a copy."""
        q, dout, lse, delta = (x.unflatten(1, (-1, fold)).flatten(2, 3) for x in self.rows)
        dq = self.dq.unflatten(1, (-1, fold)).flatten(2, 3)
        return q.transpose(1, 2), dout.transpose(1, 2), lse, delta, dq


def begin(q, tape: Tape) -> Sums:
    """What all hops share. q [B, S, N, D]."""
    rows = triton_rows.head_rows(q, tape.dout, tape.out, tape.lse, BLOCK)
    return Sums(rows.lse.new_zeros(*rows.q.shape[:2], rows.q[0, 0].numel()), rows, q.shape[1])


def add(
    k, v, scale: float, sums: Sums, dkv, *,
    fold=1, causal=False, block_sparse_tensors=None, mask_mod=None, aux_tensors=None,
):  # fmt: skip
    """Add dQ over keys k, v [B, Sk, H, D] to `sums` and write dkv [2, B, Sk, H, D].

    fold: query heads that follow each other as one. causal: S queries and keys, fold 1. The others are the package's.
    """
    q, dout, lse, delta, dq = sums.folded(fold)
    if causal:
        q, dout = (x[:, : sums.length] for x in (q, dout))
    config, group = _config(q), q.shape[2] // k.shape[2]
    (batch, length, kv_heads, dim), blocks = k.shape, -(-k.shape[1] // config.n_block_size)
    totals = dkv
    if group > 1:
        totals = dq.new_zeros(2, batch, kv_heads, blocks * config.n_block_size * dim)
    lists = None
    if block_sparse_tensors is not None:
        lists, pattern = normalize_block_sparse_config_bwd(
            block_sparse_tensors, batch_size=batch, num_head=q.shape[2], seqlen_q=q.shape[1], seqlen_k=length,
            block_size=(config.m_block_size, config.n_block_size), q_subtile_factor=BLOCK // config.m_block_size,
        )  # fmt: skip
    tensors = q, k, v, dout, lse, delta, dq, *totals
    key = (
        SOURCE, _dtype(q), dim, group, causal, mask_mod and utils.hash_callable(mask_mod),
        aux_tensors and get_aux_tensor_metadata(aux_tensors), lists and pattern,
        *(get_broadcast_dims(x) for x in tensors[:4]), q.shape[1] <= config.m_block_size, blocks == 1,
    )  # fmt: skip
    if key not in compiled:
        kernel = _kernel(q, group, config, causal, mask_mod, aux_tensors)
        compiled[key] = _compile(kernel, tensors, scale, aux_tensors, lists)
    compiled[key](*tensors, scale, *[None] * 9, utils.AuxData(aux_tensors, None), lists and _listed(lists), None)
    if group > 1:
        for total, grad, factor in zip(totals, dkv, (scale, 1.0)):
            _convert(total, grad, factor, config.n_block_size, config.AtomLayoutNdKV, config.dKV_swapAB, config)


def finish(sums: Sums, scale: float, into) -> torch.Tensor:
    """dq [B, S, N, D], written `into` a tensor of the inputs' dtype."""
    config = _config(into)
    _convert(sums.dq, into, scale, config.m_block_size, config.AtomLayoutMdQ, config.dQ_swapAB, config)
    return into


def _config(q) -> interface.BwdConfig:
    """One for causal attention and for lists of blocks, so that both add into one dQ."""
    return interface._tile_size_bwd_sm90(q.shape[3], q.shape[3], True, False, sparse_block_size_q=BLOCK)


def _dtype(q):
    return interface.torch2cute_dtype_map[q.dtype]


def _convert(total, result, scale: float, rows: int, atom_layout: int, swap: bool, config) -> None:
    interface._bwd_postprocess_convert(
        total, result, scale, None, None, ARCH, _dtype(result), result.shape[3], rows, config.num_wg * 128, atom_layout,
        swap, fake_mode=False,
    )  # fmt: skip


def _kernel(q, group: int, config, causal: bool, mask_mod, aux_tensors) -> FlashAttentionBackwardSm90:
    return FlashAttentionBackwardSm90(
        _dtype(q), q.shape[3], q.shape[3], group, causal,
        is_local=False, deterministic=False, tile_m=config.m_block_size, tile_n=config.n_block_size,
        Q_stage=config.num_stages_Q, dO_stage=config.num_stages_dO, PdS_stage=config.num_stages_PdS,
        SdP_swapAB=config.SdP_swapAB, dKV_swapAB=config.dKV_swapAB, dQ_swapAB=config.dQ_swapAB,
        AtomLayoutMSdP=config.AtomLayoutMSdP, AtomLayoutNdKV=config.AtomLayoutNdKV, AtomLayoutMdQ=config.AtomLayoutMdQ,
        num_threads=(config.num_wg + 1) * 128, V_in_regs=False, score_mod=None, score_mod_bwd=None, mask_mod=mask_mod,
        has_aux_tensors=aux_tensors is not None, q_subtile_factor=BLOCK // config.m_block_size,
        dQ_single_wg=config.dQ_single_wg,
    )  # fmt: skip


def _compile(kernel, tensors, scale: float, aux_tensors, lists):
    return cute.compile(
        kernel, *map(to_cute_tensor, tensors), scale, *[None] * 9,
        utils.AuxData(aux_tensors and [to_cute_aux_tensor(x) for x in aux_tensors], None),
        lists and to_cute_block_sparse_tensors(lists), None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi",
    )  # fmt: skip


def _listed(lists):
    """The lists in the order of the compiled function's tuple."""
    return (
        lists.mask_block_cnt, lists.mask_block_idx, lists.full_block_cnt, lists.full_block_idx,
        lists.cu_total_m_blocks, lists.cu_block_idx_offsets, lists.dq_write_order, lists.dq_write_order_full,
    )  # fmt: skip
