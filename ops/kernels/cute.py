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
from mtraining_nns.ops.kernels.contract import Grads, Keys, Tape, Traits
from mtraining_nns.ops.kernels.sizes import copies as column_copies
from mtraining_nns.ops.kernels.sizes import cute as workspace_bytes  # noqa: F401
from mtraining_nns.ops.kernels.sizes import front_rows  # noqa: F401
from mtraining_nns.ops.merge import Partial

FOLDED_PROGRAMS = 1024  # of a backward pass, so many at least where heads are folded
TRAITS = Traits(causal_without_lists=True, backward_by_query=False)


def forward(q, keys: Keys, *, scale, carry=None, into=None) -> Partial:
    """Attention over the listed blocks and the columns, merged with `carry`."""
    _check(keys)
    if _causal(keys):
        how = {"causal": True}
    else:
        group = q.shape[2] // keys.k.shape[2]
        lists = cute_lists.by_query(keys.blocks, _tiles(keys), group)
        bits = None if keys.columns is None else keys.columns.tiles.bits
        keys = _extended(keys, copies=1)
        how = _sparse(lists, (q.shape[0], q.shape[2]), cute_mask.forward_mask(group), bits)
    out = into if carry is None else None
    out, lse, *_ = _flash_attn_fwd(q, keys.k, keys.v, softmax_scale=scale, return_lse=True, out=out, **how)
    return triton_rows.merge(carry, Partial(out, lse), into)


def begin(q, tape: Tape) -> cute_backward.Sums:
    """The accumulator of dQ and what every hop needs of the tape."""
    return cute_backward.begin(q, tape)


def backward(q, keys: Keys, tape: Tape, *, carry: cute_backward.Sums, into=None) -> Grads:
    """Gradients over the listed blocks and the columns."""
    _check(keys)
    columns, extended, how = None, keys, {"causal": True}
    if not _causal(keys):
        group, tiles = q.shape[2] // keys.k.shape[2], _tiles(keys)
        copies = 1 if tiles is None else column_copies(q.shape[1], BLOCK)
        extended = _extended(keys, copies)
        fold = 1 if tiles is None and cute_lists.shared(keys.blocks.by_key) else _fold(q, extended.k)
        lists = cute_lists.by_key(keys.blocks, tiles, group, copies, fold)
        # heads that follow each other are one head with as many more query blocks
        bits = tiles and tiles.bits.unflatten(1, (-1, fold)).flatten(2, 3)
        mask = cute_mask.backward_mask(group, copies, q.shape[3])
        how = {"fold": fold, **_sparse(lists, (q.shape[0], q.shape[2] // fold), mask, bits)}
    first = extended.k.shape[1] - keys.k.shape[1]
    dkv = torch.empty(2, *extended.k.shape, dtype=q.dtype, device=q.device)
    cute_backward.add(extended.k, extended.v, tape.scale, carry, dkv, **how)
    if first:
        columns = _column_grads(dkv[:, :, :first], keys, copies)
    return Grads(carry if into is None else _finished(carry, tape.scale, into), dkv[:, :, first:], columns)


def _finished(carry: cute_backward.Sums, scale: float, into):
    dtype = carry.rows.q.dtype
    found = into if into.dtype == dtype else torch.empty(into.shape, dtype=dtype, device=into.device)
    cute_backward.finish(carry, scale, found)
    return into if found is into else into.copy_(found)


def _check(keys: Keys) -> None:
    if keys.blocks.row_bits is not None:
        raise ValueError("the cute backend knows no row bits; use attention.backend=triton")


def _causal(keys: Keys) -> bool:
    """Everything up to the diagonal: no list needed."""
    blocks = keys.blocks
    return blocks.dense and blocks.diagonal and keys.columns is None and len(blocks.k_starts) == len(blocks.q_starts)


def _tiles(keys: Keys):
    return None if keys.columns is None else keys.columns.tiles


def _fold(q, k) -> int:
    """Query heads of a group that follow each other as one: the most that leave the GPU enough programs."""
    batch, _, heads, _ = q.shape
    group, blocks = heads // k.shape[2], -(-k.shape[1] // BLOCK)
    most = max(1, batch * heads * blocks // FOLDED_PROGRAMS)
    return max(n for n in range(1, group + 1) if group % n == 0 and n <= most)


def _extended(keys: Keys, copies: int) -> Keys:
    """The keys behind `copies` copies of each column tile, laid out as cute_lists says."""
    if keys.columns is None:
        return keys
    batch, length, kv_heads, dim = keys.k.shape
    # [2, B, N, C, D] -> [2, B, member, tile, copy, column, H, D]
    tiles = keys.columns.kv.unflatten(2, (kv_heads, -1)).unflatten(4, (-1, COLUMN_TILE)).permute(0, 1, 3, 4, 5, 2, 6)
    tiles = tiles[:, :, :, :, None].expand(-1, -1, -1, -1, copies, -1, -1, -1)
    first, both = tiles.shape[2:6].numel(), keys.front
    if both is None or both.shape[2] < first + length:
        both = torch.empty(2, batch, first + length, kv_heads, dim, dtype=keys.k.dtype, device=keys.k.device)
        both[0, :, first:], both[1, :, first:] = keys.k, keys.v
    both = both[:, :, both.shape[2] - first - length :]
    both[:, :, :first].unflatten(2, tiles.shape[2:6]).copy_(tiles)
    return keys._replace(k=both[0], v=both[1])


def _column_grads(grads, keys: Keys, copies: int):
    """fp32 [2, B, N, C, D] from the columns' part of the extended keys."""
    members = keys.columns.kv.shape[2] // grads.shape[3]
    parts = grads.unflatten(2, (members, -1, copies, COLUMN_TILE))
    summed = parts.sum(4, dtype=torch.float32)  # [2, B, member, tile, column, H, D]
    return summed.permute(0, 1, 5, 2, 3, 4, 6).flatten(4, 5).flatten(2, 3)


def _sparse(lists: cute_lists.MaskFull, heads: tuple[int, int], mask: cute_mask.Mask, bits) -> dict:
    partly, whole = ([x.expand(*heads, *x.shape[2:]) for x in some] for some in lists)
    return {
        "block_sparse_tensors": BlockSparseTensorsTorch(*partly, *whole, block_size=(BLOCK, BLOCK)),
        "mask_mod": mask,
        "aux_tensors": None if bits is None else [bits],
    }
