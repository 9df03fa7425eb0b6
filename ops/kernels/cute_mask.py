"""The mask function of FlashAttention-4's partly seen blocks: column bits, and causality on the diagonal.

FlashAttention-4 unrolls a tile of scores while it compiles: it calls the mask function once for every score that a
thread holds, row by row. Evaluated score by score, the mask costs as much as a tenth of the forward pass. But a thread
holds scores of few rows and columns, at fixed offsets from the first one, as Hopper's matrix units deal them:

    forward    2 queries x 32 keys      keys  first + 8 (j / 2) + j % 2
    backward   16 or 32 queries x 2 keys      queries  first + 8 (i / 2) + i % 2

So the first score of a tile loads the tile's bits into words, and every other one tests a bit at a fixed place. Another
order of the calls would be another mask: it is checked where it can be, and by the tests of every head dim.
"""

import functools
import hashlib
from pathlib import Path

import cutlass
from cutlass import cute
from cutlass._mlir import ir
from flash_attn.cute.utils import scalar_to_ssa

SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # compilations are kept by name, on disk too
BACKWARD_QUERIES = {64: 32, 128: 16}  # that a thread holds, by head dim


@functools.cache
def forward_mask(group: int) -> "Mask":
    """For queries against extended keys with one copy of each column tile; group: query heads a key head."""
    return Mask(2, 32, _forward_words, group, 1)


@functools.cache
def backward_mask(group: int, copies: int, dim: int) -> "Mask":
    """Likewise for the backward pass, where scores are held transposed."""
    return Mask(BACKWARD_QUERIES[dim], 2, _backward_words, group, copies)


class Mask:
    """A mask function for one pass. Called while compiling, `queries` x `keys` times a tile, row by row."""

    def __init__(self, queries: int, keys: int, words, group: int, copies: int):
        self.queries, self.keys, self.words, self.group, self.copies = queries, keys, words, group, copies
        self.calls, self.tile, self.kept = 0, None, {}
        self.__cute_hash__ = f"{SOURCE} {words.__name__} {queries} {keys} {group} {copies}"

    def __call__(self, batch, head, q_idx, kv_idx, seqlen_info, aux):
        query, key = divmod(self.calls, self.keys)
        here = ir.InsertionPoint.current.block
        if self.calls == 0:
            self.tile, self.kept = here, {}
        if here != self.tile:
            self.calls = 0
            raise RuntimeError("flash-attn-4 unrolls its tiles in another order than the mask function knows")
        bits = None if aux is None else aux[0]
        where = batch[0], head[0], q_idx[0], kv_idx[0]
        seen = self.words(self.kept, (query, key), bits, where, self.group, self.copies.bit_length() - 1)
        self.calls = (self.calls + 1) % (self.queries * self.keys)
        return scalar_to_ssa(seen != 0, cutlass.Boolean)


def _forward_words(kept: dict, element: tuple[int, int], bits, where, group: int, shift: int):
    """Each query has four words of 32 keys, shifted so that its first key is bit 0."""
    query, key = element
    if not kept:
        kept["columns"] = (False, 0, 0, 0, 0) if bits is None else _column_words(bits, *where, group, shift)
    if key == 0:
        kept[query] = _query_words(*kept["columns"], where[2], where[3])
    group_of_8 = key // 2
    return kept[query][group_of_8 // 4] & (1 << (8 * (group_of_8 % 4) + key % 2))


def _backward_words(kept: dict, element: tuple[int, int], bits, where, group: int, shift: int):
    """Each key has one word, a bit a query."""
    query, key = element
    if query == 0:
        kept[key] = _key_word(bits, *where, group, shift) if bits is not None else _later_queries(*where[2:])
    return kept[key] & (1 << query if query < 31 else -(1 << 31))


@cute.jit
def _tile_of(bits, kv, group: cutlass.Constexpr, shift: cutlass.Constexpr):
    """(whether the key is a column, the first word of its tile); see cute_lists for how the tiles lie."""
    tile, tiles = kv >> (7 + shift), bits.shape[3] >> 2
    is_column = tile < group * tiles
    for _ in cutlass.range_constexpr(group - 1):
        tile = tile - tiles if tile >= tiles else tile
    return is_column, (tile if is_column else 0) << 2


@cute.jit
def _column_words(bits, batch, head, q, kv, group: cutlass.Constexpr, shift: cutlass.Constexpr):
    is_column, first = _tile_of(bits, kv, group, shift)
    row = bits[batch, head, q >> 7, None]
    return is_column, row[first], row[first + 1], row[first + 2], row[first + 3]


@cute.jit
def _query_words(is_column, word0, word1, word2, word3, q, kv):
    lead = kv & 7  # the first key's place; bits past its group of 8 stay inside the word
    place = (q & 127) + 1
    return (
        (word0 if is_column else _ones(place)) >> lead,
        (word1 if is_column else _ones(place - 32)) >> lead,
        (word2 if is_column else _ones(place - 64)) >> lead,
        (word3 if is_column else _ones(place - 96)) >> lead,
    )


@cute.jit
def _key_word(bits, batch, head, q, kv, group: cutlass.Constexpr, shift: cutlass.Constexpr):
    is_column, first = _tile_of(bits, kv, group, shift)
    word = bits[batch, head, q >> 7, first + ((kv >> 5) & 3)]
    seen = 0 - ((word >> (kv & 31)) & 1)
    return seen if is_column else _later_queries(q, kv)


@cute.jit
def _later_queries(q, kv):
    """Bit i: query first + 8 (i / 2) + i % 2 is not before the key, both in one block."""
    ahead = cutlass.max((kv & 127) - (q & 127), 0)
    return ~_ones(2 * (ahead >> 3) + cutlass.min(ahead & 7, 2))


@cute.jit
def _ones(count):
    """A word whose lowest `count` bits are set, none below 0, all above 31."""
    some = (cutlass.Int32(1) << cutlass.min(cutlass.max(count, 0), 31)) - 1
    return cutlass.Int32(-1) if count > 31 else some
