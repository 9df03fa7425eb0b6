"""Sparse attention on FlashAttention-4 (package flash-attn-4, CuTe), for Hopper GPUs: one fused pass each way.

FlashAttention-4 takes lists of blocks that are seen whole and of blocks that a mask function decides. Gathered columns
become further key blocks in front of the keys, so that one softmax, one pass over the queries and one dQ serve both:

    keys of a kv head     | columns of its query heads, tiles of 128 | its own keys, blocks of 128 |
    seen whole            | tiles without a covered or later column  | listed blocks               |
    decided by the mask   | the others: one bit a column             | the diagonal: causality     |

Lists are as wide as they can get and their contents change freely: a compilation depends on dtype, head dim, heads a
group and copies alone. Rounding: out, dK and dV of one ring step are rounded once before they are summed in fp32; dQ
is rounded once after all steps. The backward pass adds into dQ in any order.
"""

import torch
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_fwd

from mtraining_nns.ops.index import COLUMN_TILE
from mtraining_nns.ops.kernels import cute_backward, cute_lists, cute_mask, triton_rows
from mtraining_nns.ops.kernels.backends import BLOCK
from mtraining_nns.ops.kernels.contract import Grads, Keys, Tape, list_bytes
from mtraining_nns.ops.merge import Partial

QUERIES_PER_COPY = 128  # query blocks that one program of the backward pass takes of a column tile
MOST_COPIES = 8
CAUSAL_WITHOUT_LISTS = True


def forward(q, keys: Keys, *, scale, carry=None, out_dtype=None) -> Partial:
    """Attention over the listed blocks and the columns, merged with `carry`."""
    _check(keys)
    if _causal(keys):
        how = {"causal": True}
    else:
        group = q.shape[2] // keys.k.shape[2]
        lists = cute_lists.by_query(keys.blocks, _tiles(keys), group)
        keys, how = _extended(keys, copies=1), _sparse(lists, keys, q, cute_mask.forward_mask(group))
    out, lse, *_ = _flash_attn_fwd(q, keys.k, keys.v, softmax_scale=scale, return_lse=True, **how)
    return triton_rows.merge(carry, Partial(out, lse), out_dtype)


def begin(q, tape: Tape) -> cute_backward.Sums:
    """The accumulator of dQ and what every step needs of the tape."""
    return cute_backward.begin(q, tape)


def backward(q, keys: Keys, tape: Tape, *, carry: cute_backward.Sums, dq_dtype=None) -> Grads:
    """Gradients over the listed blocks and the columns."""
    _check(keys)
    group, columns, first = q.shape[2] // keys.k.shape[2], None, 0
    if _causal(keys):
        extended, how = keys, {"causal": True}
    else:
        copies = 1 if keys.columns is None else _copies(q.shape[1])
        lists = cute_lists.by_key(keys.blocks, _tiles(keys), group, copies)
        mask = cute_mask.backward_mask(group, copies, q.shape[3])
        extended, how = _extended(keys, copies), _sparse(lists, keys, q, mask)
        first = extended.k.shape[1] - keys.k.shape[1]
    dkv = torch.empty(2, *extended.k.shape, dtype=q.dtype, device=q.device)
    cute_backward.add(q, extended.k, extended.v, tape, carry, dkv, **how)
    if first:
        columns = _column_grads(dkv[:, :, :first], keys, copies)
    dq = carry if dq_dtype is None else cute_backward.finish(carry, q, tape.scale).to(dq_dtype)
    return Grads(dq, dkv[:, :, first:], columns)


def workspace_bytes(q, k, block: int, columns: int) -> int:
    """Bytes that one key head and its query heads need beside their results."""
    batch, length, _, dim = q.shape
    group, copies = q.shape[2] // k.shape[2], _copies(length)
    extended = k.shape[1] + group * columns * copies
    lists = 2 * 4 * batch * group * (extended // BLOCK) * -(-length // BLOCK)
    # keys, values and their gradients in 16 bits, dK and dV in 32, and the accumulator of dQ
    return list_bytes(q, k, block) + lists + batch * dim * (extended * (4 * 2 + 2 * 4) + group * length * 4)


def _check(keys: Keys) -> None:
    if keys.blocks.row_bits is not None:
        raise ValueError("the cute backend knows no row bits; use attention.backend=triton")


def _causal(keys: Keys) -> bool:
    """Everything up to the diagonal: no list needed."""
    return keys.blocks.dense and keys.blocks.diagonal and keys.columns is None


def _tiles(keys: Keys):
    return None if keys.columns is None else keys.columns.tiles


def _copies(length: int) -> int:
    """Programs that share a column tile's queries, a power of two; a tile sees thousands, a key block some dozens."""
    return min(MOST_COPIES, 1 << max(0, (length // BLOCK // QUERIES_PER_COPY).bit_length() - 1))


def _extended(keys: Keys, copies: int) -> Keys:
    """The keys behind `copies` copies of each column tile, laid out as cute_lists says."""
    if keys.columns is None:
        return keys
    batch, length, kv_heads, dim = keys.k.shape
    # [2, B, N, C, D] -> [2, B, member, tile, copy, column, H, D]
    tiles = keys.columns.kv.unflatten(2, (kv_heads, -1)).unflatten(4, (-1, COLUMN_TILE)).permute(0, 1, 3, 4, 5, 2, 6)
    tiles = tiles[:, :, :, :, None].expand(-1, -1, -1, -1, copies, -1, -1, -1)
    first = tiles.shape[2] * tiles.shape[3] * copies * COLUMN_TILE
    both = torch.empty(2, batch, first + length, kv_heads, dim, dtype=keys.k.dtype, device=keys.k.device)
    both[:, :, :first].unflatten(2, tiles.shape[2:6]).copy_(tiles)
    both[0, :, first:], both[1, :, first:] = keys.k, keys.v
    return keys._replace(k=both[0], v=both[1])


def _column_grads(grads, keys: Keys, copies: int):
    """fp32 [2, B, N, C, D] from the columns' part of the extended keys."""
    members = keys.columns.kv.shape[2] // grads.shape[3]
    parts = grads.unflatten(2, (members, -1, copies, COLUMN_TILE))
    summed = parts.sum(4, dtype=torch.float32)  # [2, B, member, tile, column, H, D]
    return summed.permute(0, 1, 5, 2, 3, 4, 6).flatten(4, 5).flatten(2, 3)


def _sparse(lists: cute_lists.MaskFull, keys: Keys, q, mask: cute_mask.Mask) -> dict:
    partly, whole = ([x.expand(q.shape[0], q.shape[2], *x.shape[2:]) for x in some] for some in lists)
    return {
        "block_sparse_tensors": BlockSparseTensorsTorch(*partly, *whole, block_size=(BLOCK, BLOCK)),
        "mask_mod": mask,
        "aux_tensors": None if keys.columns is None else [keys.columns.tiles.bits],
    }
