"""FlashAttention-4's backward pass for Hopper in its three parts, so that the steps of a ring add into one dQ.

    begin     once: rowsum(dout * out), lse in base 2, and dQ zeroed
    add       a step: dQ of its keys added in fp32, their dK and dV
    finish    once: dQ rounded to the inputs' dtype

The package's own function does all three in one call: over a ring of W ranks it would read dout and out, and write and
add up dQ, W times.
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

from mtraining_nns.ops.kernels.backends import BLOCK
from mtraining_nns.ops.kernels.contract import Tape

SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # compilations are kept on disk
ARCH = 90
compiled = get_jit_cache("mtraining_bwd")


class Sums(NamedTuple):
    """dq: fp32 [B, N, S' * D] in the kernel's own order; delta, lse: fp32 [B, N, S']; S' is S in whole tiles."""

    dq: torch.Tensor
    delta: torch.Tensor
    lse: torch.Tensor


def begin(q, tape: Tape) -> Sums:
    """What all steps share. q [B, S, N, D]."""
    (batch, length, heads, dim), rows = q.shape, _config(q).m_block_size
    rounded = -(-length // rows) * rows
    sums = Sums(*(torch.empty(batch, heads, rounded * n, device=q.device) for n in (dim, 1, 1)))
    interface._bwd_preprocess(
        tape.out, tape.dout, sums.delta, tape.lse, sums.lse, sums.dq, None, None, None, _dtype(q), dim, dim, rows,
        fake_mode=False,
    )  # fmt: skip
    return sums


def add(
    q, k, v, tape: Tape, sums: Sums, dkv, *, causal=False, block_sparse_tensors=None, mask_mod=None, aux_tensors=None
):
    """Add dQ over keys k, v [B, Sk, H, D] to `sums` and write dkv [2, B, Sk, H, D]; the options are the package's."""
    config, group = _config(q), q.shape[2] // k.shape[2]
    (batch, length, kv_heads, dim), blocks = k.shape, -(-k.shape[1] // config.n_block_size)
    if group == 1:
        totals = dkv
    else:
        totals = torch.zeros(2, batch, kv_heads, blocks * config.n_block_size * dim, device=q.device)
    lists = None
    if block_sparse_tensors is not None:
        lists, pattern = normalize_block_sparse_config_bwd(
            block_sparse_tensors, batch_size=batch, num_head=q.shape[2], seqlen_q=q.shape[1], seqlen_k=length,
            block_size=(config.m_block_size, config.n_block_size), q_subtile_factor=BLOCK // config.m_block_size,
        )  # fmt: skip
    tensors = q, k, v, tape.dout, sums.lse, sums.delta, sums.dq, *totals
    key = (
        SOURCE, _dtype(q), dim, group, causal, mask_mod and utils.hash_callable(mask_mod),
        aux_tensors and get_aux_tensor_metadata(aux_tensors), lists and pattern,
        *(get_broadcast_dims(x) for x in tensors[:4]), q.shape[1] <= config.m_block_size, blocks == 1,
    )  # fmt: skip
    if key not in compiled:
        kernel = _kernel(q, group, config, causal, mask_mod, aux_tensors)
        compiled[key] = _compile(kernel, tensors, tape.scale, aux_tensors, lists)
    compiled[key](*tensors, tape.scale, *[None] * 9, utils.AuxData(aux_tensors, None), lists and _listed(lists), None)
    if group > 1:
        for total, grad, scale in zip(totals, dkv, (tape.scale, 1.0)):
            _convert(total, grad, scale, config.n_block_size, config.AtomLayoutNdKV, config.dKV_swapAB, config)


def finish(sums: Sums, q, scale: float) -> torch.Tensor:
    """dq [B, S, N, D] in q's dtype."""
    config, dq = _config(q), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _convert(sums.dq, dq, scale, config.m_block_size, config.AtomLayoutMdQ, config.dQ_swapAB, config)
    return dq


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
