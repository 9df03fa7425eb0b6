"""Indices against brute force: lists, transposes, columns, densities."""

import pytest
import torch
from helpers import block_mask, column_table, index_mask, make_index

from mtraining_nns.ops.config import LAYOUTS
from mtraining_nns.ops.index import NO_COLUMN, BlockIndex, ColumnIndex, DistanceIndex, Lists, RowIndex, packed
from mtraining_nns.ops.layout import Layout


def random_mask(*shape, share=0.4, seed=0):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    if mask.shape[-2] > 2:
        mask[..., 1, :], mask[..., 2, :] = False, True  # an empty and a full list
    return mask


def starts(count: int, block: int = 16) -> torch.Tensor:
    return torch.arange(0, count * block, block, dtype=torch.int32)


SHAPES = pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 7, 7), (2, 3, 5, 9), (2, 1, 9, 4)])


@SHAPES
def test_mask_to_lists_and_back(shape):
    mask = random_mask(*shape)
    count, index = lists = Lists.of(mask)
    assert count.dtype == index.dtype == torch.int32
    assert index.shape == shape and index.is_contiguous()
    assert torch.equal(lists.to_mask(shape[3]), mask)
    for row, length, listed in zip(mask.flatten(0, 2), count.flatten(), index.flatten(0, 2)):
        assert listed[:length].tolist() == row.nonzero()[:, 0].tolist()


def test_entries_past_the_count_mean_nothing():
    count = torch.tensor([[[2, 1]]], dtype=torch.int32)
    index = torch.tensor([[[[0, 3, 0, 0], [1, 9, 9, 9]]]], dtype=torch.int32)
    assert Lists(count, index).to_mask(4)[0, 0].nonzero().tolist() == [[0, 0], [0, 3], [1, 1]]


@SHAPES
def test_lists_by_key_are_the_transpose(shape):
    mask = random_mask(*shape, seed=1)
    index = BlockIndex.of(mask, starts(shape[2]), starts(shape[3]), 16, diagonal=False)
    assert torch.equal(index.by_query.to_mask(shape[3]), mask)
    assert torch.equal(index.by_key.to_mask(shape[2]), mask.transpose(-1, -2))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ring_steps_keep_what_the_whole_matrix_keeps(kind, world):
    layout = Layout(kind=kind, world=world, seq_len=300, block=16, granularity=32)
    index = make_index(300, 3, 16, batch=2, blocks=layout.global_blocks)
    whole = torch.zeros(2, 3, layout.global_blocks, layout.global_blocks, dtype=torch.bool)
    for i in range(layout.global_blocks):
        for j in range(i):
            whole[:, :, i, j] = index.hit[:, :, i - j]
    for rank in range(world):
        for source in range(world):
            q_starts, k_starts = layout.block_starts(rank), layout.block_starts(source)
            step = index.blocks(q_starts, k_starts, diagonal=rank == source)
            expected = whole[:, :, q_starts // 16][..., k_starts // 16]
            assert torch.equal(step.by_query.to_mask(len(k_starts)), expected)
            assert torch.equal(step.by_key.to_mask(len(q_starts)), expected.transpose(-1, -2))
            assert step.diagonal == torch.equal(q_starts, k_starts)
            assert step.q_starts is q_starts and step.k_starts is k_starts and step.block == 16


def test_distance_example():
    hit = torch.tensor([[[True, False, True, False]]])
    index = DistanceIndex(hit=hit, block=16).blocks(starts(4), starts(4), diagonal=True)
    assert index.by_query.to_mask(4)[0, 0].nonzero().tolist() == [[2, 0], [3, 1]]


def test_dense_keeps_every_causal_pair_and_nothing_else():
    index = DistanceIndex.keep_all(2, 3, 5, 16, "cpu")
    blocks = index.blocks(starts(5), starts(5), diagonal=True)
    assert blocks.dense and blocks.by_query.count.shape == (1, 1, 5)  # lists once, not for every head
    assert torch.equal(block_mask(blocks, 80, 80)[0, 0], torch.ones(80, 80, dtype=torch.bool).tril())


def edge_columns() -> ColumnIndex:
    """Columns on the edges of blocks, an empty head, a full head."""
    lists = [[0, 15, 16, 17, 31, 32, 47, 48, 79], [], list(range(0, 80, 9)), [79]]
    position = torch.full((2, 2, 9), NO_COLUMN, dtype=torch.int32)
    for flat, chosen in zip(position.flatten(0, 1), lists):
        flat[: len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    count = torch.tensor([len(x) for x in lists], dtype=torch.int32).view(2, 2)
    hit = torch.rand(2, 2, 5, generator=torch.Generator().manual_seed(3)) < 0.4
    return ColumnIndex(position=position, count=count, hit=hit, block=16)


QUERY_BLOCKS = torch.tensor([0, 16, 32, 64, 96], dtype=torch.int32)  # one is missing, one is padding


def test_tiles_pack_what_is_seen():
    columns = edge_columns()
    bits, state, visible = columns.tiles(QUERY_BLOCKS)
    assert bits.dtype == visible.dtype == torch.int32 and bits.shape == (2, 2, 5, 4)
    assert torch.equal(visible.long(), (columns.position[:, :, None] < QUERY_BLOCKS[:, None]).sum(-1))
    for i, start in enumerate(QUERY_BLOCKS):
        seen = columns.seen(start)
        for c in range(seen.shape[-1]):
            assert torch.equal((bits[:, :, i, c // 32] >> (c % 32)) & 1 == 1, seen[..., c])
        assert (bits[:, :, i, 0] >> seen.shape[-1] == 0).all() and (bits[:, :, i, 1:] == 0).all()
        assert torch.equal(state[:, :, i, 0], seen.any(-1).to(torch.uint8))  # 9 columns never fill a tile


def test_a_tile_is_full_where_every_column_is_seen():
    position = torch.arange(0, 200, dtype=torch.int32)[None, None]
    hit = torch.zeros(1, 1, 40, dtype=torch.bool)
    columns = ColumnIndex(position=position, count=torch.tensor([[200]], dtype=torch.int32), hit=hit, block=16)
    bits, state, _ = columns.tiles(torch.tensor([0, 16, 128, 144, 300], dtype=torch.int32))
    assert state[0, 0].tolist() == [[0, 0], [1, 0], [2, 0], [2, 1], [2, 1]]
    assert bits[0, 0, 4].tolist() == [-1] * 6 + [255, 0]


def test_seen_is_an_earlier_block_that_no_kept_block_covers():
    columns = edge_columns()
    for start in QUERY_BLOCKS[:-1].tolist():
        for b in range(2):
            for n in range(2):
                expected = []
                for c in columns.position[b, n].tolist():
                    distance = start // 16 - c // 16
                    expected.append(c != NO_COLUMN and distance > 0 and not bool(columns.hit[b, n, distance]))
                assert columns.seen(start)[b, n].tolist() == expected
        assert torch.equal(columns.seen(start), columns.seen(torch.tensor(start, dtype=torch.int32)))


@pytest.mark.parametrize("tile", [1, 2, 4, 16])
def test_first_block_comes_after_each_tiles_first_column(tile):
    columns = edge_columns()
    first = columns.tiles(QUERY_BLOCKS).first_block(tile)
    assert first.shape == (2, 2, 128 // tile)
    for b in range(2):
        for n in range(2):
            leads = columns.position[b, n, ::tile].tolist()
            for t, found in enumerate(first[b, n].tolist()):
                later = [i for i, start in enumerate(QUERY_BLOCKS.tolist()) if t < len(leads) and start > leads[t]]
                assert found == (later[0] if later else len(QUERY_BLOCKS))


@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 100, 257])
def test_density_is_the_share_of_causal_pairs(seq_len):
    index = make_index(seq_len, 4, 16, batch=2, share=0.2)
    mask = index_mask(index, seq_len)
    causal = 8 * seq_len * (seq_len + 1) / 2
    assert index.density(seq_len).item() == pytest.approx(mask.sum().item() / causal, rel=1e-12)


@pytest.mark.parametrize("seq_len", [1, 63, 257])
def test_dense_has_density_one(seq_len):
    index = DistanceIndex.keep_all(2, 3, -(-seq_len // 16), 16, "cpu")
    assert index.density(seq_len).item() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("seq_len", [2, 70, 257, 384])
def test_the_work_of_all_ranks_is_the_whole_work(kind, seq_len):
    layout = Layout(kind=kind, world=3, seq_len=seq_len, block=16, granularity=32)
    index = make_index(seq_len, 3, 16, share=0.2, blocks=layout.global_blocks)
    mask = index_mask(index, seq_len)
    for rank in range(3):
        real = layout.positions(rank)[layout.positions(rank) < seq_len]
        work = index.kept_pairs(layout.block_starts(rank), seq_len).item()
        assert work == mask[:, :, real].sum().item()


def row_index(layout: Layout, rank: int, span: int, *, bits: bool, rows: int | None = None) -> RowIndex:
    """Random, 2 sequences of 3 heads; with bits, the mask is their union."""
    nq, m = layout.local_blocks, -(-layout.padded_len // span)
    row_bits = None
    mask = random_mask(2, 3, nq, m, seed=rank)
    if bits:
        flags = random_mask(2, 3, layout.local_len, m, share=0.1, seed=rank)
        own = layout.positions(rank) // span
        flags[:, :, torch.arange(layout.local_len), own] = True
        mask = flags.unflatten(2, (nq, layout.block)).any(3)
        row_bits = packed(torch.nn.functional.pad(flags, (0, -m % 32)))[:, :, : rows or layout.local_len]
    return RowIndex(mask=mask, starts=layout.block_starts(rank), block=layout.block, span=span, row_bits=row_bits)


def row_pairs(index: RowIndex, layout: Layout, rank: int, seq_len: int) -> torch.Tensor:
    """bool [B, N, real rows of the rank, S]: the pairs that the fields are documented to keep, one by one."""
    positions = layout.positions(rank)
    real = (positions < seq_len).nonzero()[:, 0].tolist()
    pairs = torch.zeros(*index.mask.shape[:2], len(real), seq_len, dtype=torch.bool)
    for number, row in enumerate(real):
        position = int(positions[row])
        for key in range(position + 1):
            if key // index.block == position // index.block:
                pairs[:, :, number, key] = True
                continue
            seen = index.mask[:, :, row // index.block, key // index.span]
            if index.row_bits is not None:
                word, bit = divmod(key // index.span, 32)
                seen = seen & (index.row_bits[:, :, row, word] >> bit & 1).bool()
            pairs[:, :, number, key] = seen
    return pairs


ROWS = pytest.mark.parametrize(("span", "bits"), [(16, False), (48, False), (48, True), (16, True)])


@ROWS
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ring_steps_keep_the_rows_of_the_rank(kind, world, span, bits):
    layout = Layout(kind=kind, world=world, seq_len=300, block=16, granularity=32)
    for rank in range(world):
        index, q_starts = row_index(layout, rank, span, bits=bits), layout.block_starts(rank)
        for source in range(world):
            k_starts = layout.block_starts(source)
            expected = torch.zeros(2, 3, len(q_starts), len(k_starts), dtype=torch.bool)
            for i, start in enumerate(q_starts.tolist()):
                for j, key in enumerate(k_starts.tolist()):
                    expected[:, :, i, j] = index.mask[:, :, i, key // span] & (key < start)
            step = index.blocks(q_starts, k_starts, diagonal=rank == source)
            assert torch.equal(step.by_query.to_mask(len(k_starts)), expected)
            assert torch.equal(step.by_key.to_mask(len(q_starts)), expected.transpose(-1, -2))
            assert step.q_starts is q_starts and step.k_starts is k_starts and step.block == 16
            assert step.row_bits is index.row_bits and (not bits or step.row_chunk == span)
            assert step.diagonal == (rank == source) and not step.dense


@ROWS
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("seq_len", [2, 70, 257])
def test_work_and_density_of_the_rows_of_each_rank(kind, seq_len, span, bits):
    layout = Layout(kind=kind, world=3, seq_len=seq_len, block=16, granularity=32)
    for rank in range(3):
        index = row_index(layout, rank, span, bits=bits)
        pairs = row_pairs(index, layout, rank, seq_len)
        assert index.kept_pairs(index.starts, seq_len).item() == pairs.sum()
        positions = layout.positions(rank)
        causal = 6 * (positions[positions < seq_len] + 1).sum().item()
        density = pairs.sum().item() / causal if causal else 0.0
        assert index.density(seq_len).item() == pytest.approx(density, rel=1e-12)


def test_rows_of_a_sequence_that_ends_within_a_block():
    """One rank may hold no padding: fewer rows than its blocks have."""
    layout = Layout(seq_len=70, block=16)
    index = row_index(layout, 0, 16, bits=True, rows=70)
    assert index.row_bits.shape[2] == 70
    assert index.kept_pairs(index.starts, 70).item() == row_pairs(index, layout, 0, 70).sum()


def test_row_example():
    mask = torch.tensor([[[[False, False, False], [True, False, False]]]])
    index = RowIndex(mask=mask, starts=torch.tensor([0, 32], dtype=torch.int32), block=16, span=16)
    own = index.blocks(index.starts, index.starts, diagonal=True)
    assert own.by_query.to_mask(2)[0, 0].nonzero().tolist() == [[1, 0]]
    other = index.blocks(index.starts, torch.tensor([16], dtype=torch.int32), diagonal=False)
    assert other.by_query.count.tolist() == [[[0, 0]]]


def test_heads_of_rows_and_moving_them():
    index = row_index(Layout(seq_len=100, block=16), 0, 32, bits=True)
    some = index.heads(slice(1, 3))
    assert torch.equal(some.mask, index.mask[:, 1:3]) and torch.equal(some.row_bits, index.row_bits[:, 1:3])
    moved = index.to("meta")
    assert all(x.device.type == "meta" for x in (moved.mask, moved.starts, moved.row_bits)) and not moved.dense
    assert row_index(Layout(seq_len=100, block=16), 0, 32, bits=False).to("meta").row_bits is None


def test_packed_bits():
    flags = random_mask(2, 3, 5, 96, seed=5)
    words = packed(flags)
    assert words.dtype == torch.int32 and words.shape == (2, 3, 5, 3)
    assert torch.equal((words[..., None] >> torch.arange(32) & 1).bool().flatten(-2), flags)


def test_moving_an_index_moves_its_tensors():
    index = make_index(100, 2, 16).to("meta")
    tensors = index.hit, index.columns.hit, index.columns.position, index.columns.count
    assert all(x.device.type == "meta" for x in tensors)
    assert DistanceIndex.keep_all(1, 1, 4, 16, "cpu").to("meta").columns is None


def test_makers_agree_with_the_fields():
    """The brute-force helpers of other tests, on a case small enough to read."""
    hit = torch.tensor([[[True, False, True]]])
    position = torch.tensor([[[3, 20, NO_COLUMN]]], dtype=torch.int32)
    columns = ColumnIndex(position=position, count=torch.tensor([[2]], dtype=torch.int32), hit=hit, block=16)
    assert column_table(columns, 48)[0, 0].nonzero()[:, 0].tolist() == [3, 20]
    mask = index_mask(DistanceIndex(hit=hit, block=16, columns=columns), 40)[0, 0]
    assert mask[17].nonzero()[:, 0].tolist() == [3, 16, 17]
    assert mask[33].nonzero()[:, 0].tolist() == [*range(16), 20, 32, 33]
