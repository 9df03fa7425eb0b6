"""Lists made by kernels against their definitions: on the CPU through Triton's interpreter, on a GPU larger ones, too.

They are stated here in plain torch and Python. Memory that the kernels are given is poisoned, and lists are
compared up to their counts, so an entry that nobody wrote is seen.
"""

from itertools import product

import pytest
import torch
from helpers import never_waiting
from kernel_cases import DEVICES

from mtraining_nns.ops.config import LAYOUTS
from mtraining_nns.ops.index import NO_COLUMN, BlockIndex, ColumnIndex, ColumnTiles, DistanceIndex, Lists
from mtraining_nns.ops.kernels import cute_lists, triton_lists
from mtraining_nns.ops.layout import Layout

pytestmark = pytest.mark.usefixtures("poison_lists")
POISON = 77_777_777


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def poison_lists(monkeypatch):
    """torch.empty gives numbers that no list, word or state may hold."""
    make = torch.empty

    def filled(*args, **kwargs):
        x = make(*args, **kwargs)
        return x.fill_(POISON if x.dtype == torch.int32 else 99)

    monkeypatch.setattr(torch, "empty", filled)


def check_lists(lists: Lists, mask: torch.Tensor) -> None:
    """The set entries of each row of a bool mask [B, N, rows, width], in ascending order."""
    count, index, mask = lists.count.cpu(), lists.index.cpu(), mask.cpu()
    assert count.dtype == index.dtype == torch.int32 and lists.count.is_contiguous() and lists.index.is_contiguous()
    assert torch.equal(count, mask.sum(-1, dtype=torch.int32)), "counts differ"
    assert index.shape[:-1] == count.shape and index.shape[-1] >= count.max()
    width = mask.shape[-1]
    expected = torch.where(mask, torch.arange(width), width).sort(-1).values[..., : index.shape[-1]]
    valid = torch.arange(index.shape[-1]) < count[..., None]
    padded = torch.nn.functional.pad(expected, (0, index.shape[-1] - expected.shape[-1]))
    assert torch.equal(index[valid].long(), padded[valid]), "entries differ"


def random_hit(batch, heads, blocks, *, share=0.4, seed=0) -> torch.Tensor:
    """bool [B, N, n]; the last head keeps nothing but the diagonal."""
    hit = torch.rand(batch, heads, blocks, generator=torch.Generator().manual_seed(seed)) < share
    hit[..., 0] = True
    hit[:, -1, 1:] = False
    return hit


def step_mask(hit, q_starts, k_starts, block) -> torch.Tensor:
    """bool [B, N, nq, nk]: earlier key blocks at a distance that is hit."""
    distance = q_starts[:, None].long() // block - k_starts.long() // block
    return hit[..., distance.clamp_min(0)] & (distance > 0)


def random_columns(hit, width, block, *, seed=0) -> ColumnIndex:
    """Each head its own number of columns, from a random part of the sequence; one head has none, one has all."""
    batch, heads, blocks = hit.shape
    g = torch.Generator().manual_seed(seed)
    position = torch.full((batch, heads, width), NO_COLUMN, dtype=torch.int32)
    count = torch.randint(0, width + 1, (batch, heads), generator=g, dtype=torch.int32)
    count[:, 0], count[:, -1] = width, 0 if heads > 1 else width
    for b, n in product(range(batch), range(heads)):
        chosen = torch.randperm(blocks * block, generator=g)[: count[b, n]].sort().values
        position[b, n, : count[b, n]] = chosen
    return ColumnIndex(position=position, count=count, hit=hit, block=block)


def seen_columns(columns: ColumnIndex, q_starts) -> tuple[torch.Tensor, torch.Tensor]:
    """(bool [B, N, nq, C] columns seen, int32 [B, N, nq] leading columns of earlier blocks)."""
    batch, heads, width = columns.position.shape
    seen = torch.zeros(batch, heads, len(q_starts), width, dtype=torch.bool)
    visible = torch.zeros(batch, heads, len(q_starts), dtype=torch.int32)
    for b, n in product(range(batch), range(heads)):
        covered = columns.hit[b, n]
        position = columns.position[b, n, : columns.count[b, n]]
        for i, start in enumerate(q_starts):
            distance = start // columns.block - position // columns.block
            seen[b, n, i, : len(position)] = (distance > 0) & ~covered[distance.clamp_min(0)]
            visible[b, n, i] = (distance > 0).sum()
    return seen, visible


def check_tiles(tiles: ColumnTiles, columns: ColumnIndex, q_starts) -> None:
    seen, visible = seen_columns(columns, q_starts)
    count = -(-seen.shape[-1] // 128)
    padded = torch.zeros(*seen.shape[:-1], count * 128, dtype=torch.bool)
    padded[..., : seen.shape[-1]] = seen
    bits, state = tiles.bits.cpu(), tiles.state.cpu()
    assert bits.dtype == torch.int32 and state.dtype == torch.uint8
    assert bits.shape == (*seen.shape[:-1], 4 * count) and state.shape == (*seen.shape[:-1], count)
    assert torch.equal((bits[..., None] >> torch.arange(32) & 1).flatten(-2).bool(), padded)
    assert torch.equal(state, padded.unflatten(-1, (-1, 128)).sum(-1).apply_(lambda c: (c > 0) + (c == 128)).byte())
    assert torch.equal(tiles.visible.cpu(), visible)


def on(columns: ColumnIndex, device) -> ColumnIndex:
    tensors = (x.to(device) for x in (columns.position, columns.count, columns.hit))
    return ColumnIndex(**dict(zip(("position", "count", "hit"), tensors)), block=columns.block)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("block", "chunk"), [(16, 4), (128, 512)])
def test_blocks_of_every_ring_step(device, kind, world, block, chunk, monkeypatch):
    """Walked in several chunks and in one."""
    monkeypatch.setattr(triton_lists, "CHUNK", chunk)
    layout = Layout(kind=kind, world=world, seq_len=11 * block - 5, block=block, granularity=2 * block)
    hit = random_hit(1, 2, layout.global_blocks)
    for rank, source in product(range(world), repeat=2):
        q_starts, k_starts = layout.block_starts(rank), layout.block_starts(source)
        mask, args = step_mask(hit, q_starts, k_starts, block), (q_starts.to(device), k_starts.to(device))
        by_query = triton_lists.distance_lists(hit.to(device), *args, block, 1)
        check_lists(by_query, mask)
        check_lists(triton_lists.distance_lists(hit.to(device), *args[::-1], block, -1), mask.transpose(-1, -2))
        assert by_query.index.shape == mask.shape


def test_the_worked_example(device):
    hit, starts = torch.tensor([[[True, False, True]]], device=device), torch.tensor([0, 16, 32], device=device).int()
    earlier = triton_lists.distance_lists(hit, starts, starts, 16, 1)
    later = triton_lists.distance_lists(hit, starts, starts, 16, -1)
    assert earlier.count.tolist() == [[[0, 0, 1]]] and earlier.index[0, 0, 2, 0] == 0
    assert later.count.tolist() == [[[1, 0, 0]]] and later.index[0, 0, 0, 0] == 2


def test_lists_of_sliced_heads(device):
    """A slice of heads is not contiguous."""
    hit = random_hit(2, 5, 9)
    starts = Layout(seq_len=9 * 16, block=16).block_starts(0)
    lists = triton_lists.distance_lists(hit.to(device)[:, 1:3], starts.to(device), starts.to(device), 16, 1)
    check_lists(lists, step_mask(hit[:, 1:3], starts, starts, 16))


def random_rows(heads, nq, m, *, batch=1, seed=0) -> torch.Tensor:
    """bool [B, N, nq, m]; the last head keeps nothing, the first query block everything."""
    mask = torch.rand(batch, heads, nq, m, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask[:, :, 0] = True
    mask[:, -1] = False
    return mask


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("block", "span", "chunk"), [(16, 16, 4), (128, 384, 512)])
def test_blocks_of_every_ring_step_of_a_rank_with_its_own_rows(device, kind, world, block, span, chunk, monkeypatch):
    monkeypatch.setattr(triton_lists, "CHUNK", chunk)
    layout = Layout(kind=kind, world=world, seq_len=9 * block - 5, block=block)
    for rank, source in product(range(world), repeat=2):
        q_starts, k_starts = layout.block_starts(rank), layout.block_starts(source)
        rows = random_rows(2, len(q_starts), -(-layout.padded_len // span), seed=rank)
        mask = torch.zeros(1, 2, len(q_starts), len(k_starts), dtype=torch.bool)
        for (i, q), (j, k) in product(enumerate(q_starts.tolist()), enumerate(k_starts.tolist())):
            mask[:, :, i, j] = rows[:, :, i, k // span] & (k < q)
        args = q_starts.to(device), k_starts.to(device)
        by_query = triton_lists.mask_lists(rows.to(device), *args, span, 1)
        check_lists(by_query, mask)
        assert by_query.index.shape == mask.shape
        check_lists(triton_lists.mask_lists(rows.to(device), *args[::-1], span, -1), mask.transpose(-1, -2))


def test_the_worked_example_of_rows(device):
    mask = torch.tensor([[[[True, True], [True, False]]]], device=device)
    q_starts, k_starts = (torch.tensor(x, device=device).int() for x in ([0, 32], [0, 16]))
    earlier = triton_lists.mask_lists(mask, q_starts, k_starts, 16, 1)
    later = triton_lists.mask_lists(mask, k_starts, q_starts, 16, -1)
    assert earlier.count.tolist() == [[[0, 1]]] and earlier.index[0, 0, 1, 0] == 0
    assert later.count.tolist() == [[[1, 0]]] and later.index[0, 0, 0, 0] == 1


def test_lists_of_sliced_heads_of_rows(device):
    rows, starts = random_rows(5, 9, 9, batch=2), Layout(seq_len=9 * 16, block=16).block_starts(0)
    mask = rows[:, 1:3] & (starts < starts[:, None])
    lists = triton_lists.mask_lists(rows.to(device)[:, 1:3], starts.to(device), starts.to(device), 16, 1)
    check_lists(lists, mask)


def test_dense_lists_are_made_once_for_all_heads(device):
    layout = Layout(seq_len=300, world=2, block=16)
    hit = DistanceIndex.keep_all(2, 3, layout.global_blocks, 16, device).hit
    starts = layout.block_starts(1), layout.block_starts(0)
    mask = (starts[0][:, None] > starts[1])[None, None]
    for sign, expected in ((1, mask), (-1, mask.transpose(-1, -2))):
        lists = triton_lists.distance_lists(hit, *(x.to(device) for x in starts[::sign]), 16, sign)
        assert lists.count.shape[:2] == (1, 1)
        check_lists(lists, expected)


def test_broadcast_over_one_dim_is_no_dense_index(device):
    hit = random_hit(1, 3, 5).expand(2, -1, -1)
    starts = Layout(seq_len=80, block=16).block_starts(0)
    lists = triton_lists.distance_lists(hit.to(device), starts.to(device), starts.to(device), 16, 1)
    check_lists(lists, step_mask(hit, starts, starts, 16))


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("width", [1, 31, 33, 127, 128, 129, 300])
def test_columns(device, width, block):
    blocks = -(-384 // block)
    columns = random_columns(random_hit(2, 3, blocks), width, block, seed=width)
    starts = Layout(seq_len=blocks * block, block=block).block_starts(0)
    check_tiles(triton_lists.column_tiles(on(columns, device), starts.to(device)), columns, starts)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("world", [2, 3])
def test_columns_of_a_shard_of_queries(device, kind, world):
    layout = Layout(kind=kind, world=world, seq_len=500, block=16)
    columns = random_columns(random_hit(1, 2, layout.global_blocks), 200, 16)
    for rank in range(world):
        starts = layout.block_starts(rank)
        check_tiles(triton_lists.column_tiles(on(columns, device), starts.to(device)), columns, starts)


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("first", [0, 64, 127, 128, 255])
def test_whole_tiles(device, first, width):
    """Neighbouring columns, nothing covered: tiles that are seen whole, and blocks that begin where a tile ends."""
    position = torch.arange(first, first + width).int()[None, None]
    hit = torch.zeros(1, 1, 600 // 16 + 1, dtype=torch.bool)
    columns = ColumnIndex(position=position, count=torch.tensor([[width]]), hit=hit, block=16)
    starts = Layout(seq_len=600, block=16).block_starts(0)
    tiles = triton_lists.column_tiles(on(columns, device), starts.to(device))
    check_tiles(tiles, columns, starts)
    assert set(tiles.state.flatten().tolist()) == {0, 1, 2}


def test_more_query_blocks_than_a_program_holds(device):
    columns = random_columns(random_hit(1, 1, 2 * triton_lists.QUERIES + 3), 140, 16)
    starts = torch.arange(0, columns.hit.shape[-1] * 16, 16).int()
    check_tiles(triton_lists.column_tiles(on(columns, device), starts.to(device)), columns, starts)


def step(hit, q_starts, k_starts, block, device, diagonal) -> BlockIndex:
    """One ring step whose lists hold poison past their counts."""
    args = (q_starts.to(device), k_starts.to(device))
    lists = [triton_lists.distance_lists(hit.to(device), *args[::sign], block, sign) for sign in (1, -1)]
    names = ("by_query", "by_key", "q_starts", "k_starts")
    return BlockIndex(**dict(zip(names, (*lists, *args))), block=block, diagonal=diagonal)


def random_tiles(batch, heads, blocks, count, device, seed=0) -> ColumnTiles:
    """Tiles of any state; the other fields are not read."""
    state = torch.randint(0, 3, (batch, heads, blocks, count), generator=torch.Generator().manual_seed(seed))
    return ColumnTiles(None, state.byte().to(device), None)


def extended(mask, state, *, group, copies, diagonal) -> tuple[torch.Tensor, torch.Tensor]:
    """(mask, full) bool [B, N, nq, G * T * R + nk]: what each query block sees of the extended key blocks.

    mask: bool [B, N, nq, nk] kept earlier blocks; state [B, N, nq, T] or None.
    """
    batch, heads, nq, nk = mask.shape
    columns = 0 if state is None else group * state.shape[-1] * copies
    some, whole = (torch.zeros(batch, heads, nq, columns + nk, dtype=torch.bool) for _ in range(2))
    whole[..., columns:] = mask
    if diagonal:
        some[..., columns:] = torch.eye(nq, nk, dtype=torch.bool)
    if columns:
        for b, n, i, t in product(*map(range, state.shape)):
            block = (n % group * state.shape[-1] + t) * copies + i % copies
            some[b, n, i, block], whole[b, n, i, block] = state[b, n, i, t] == 1, state[b, n, i, t] == 2
    return some, whole


def check_cute(blocks: BlockIndex, tiles, mask, *, group, copies) -> None:
    state = None if tiles is None else tiles.state.cpu()
    got = cute_lists.by_query(blocks, tiles, group)
    for lists, expected in zip(got, extended(mask, state, group=group, copies=1, diagonal=blocks.diagonal)):
        check_lists(lists, expected)
    count = 0 if state is None else state.shape[-1]
    assert got.mask.index.shape[-1] == count + 1 and got.full.index.shape[-1] == count + mask.shape[-1]
    folds = [n for n in range(1, group + 1) if group % n == 0 and (n == 1 or not cute_lists.shared(blocks.by_key))]
    for fold in folds:
        got = cute_lists.by_key(blocks, tiles, group, copies, fold)
        for lists, expected in zip(got, extended(mask, state, group=group, copies=copies, diagonal=blocks.diagonal)):
            check_lists(lists, expected.unflatten(1, (-1, fold)).flatten(2, 3).transpose(-1, -2))
        assert got.full.index.shape[-1] == fold * mask.shape[-2]


@pytest.mark.parametrize(("group", "copies"), [(1, 1), (1, 4), (3, 2), (4, 4)])
@pytest.mark.parametrize(("diagonal", "others"), [(True, 0), (True, 2), (False, 2)])
@pytest.mark.parametrize(("batch", "nq", "count", "chunk"), [(2, 1, 1, 512), (2, 3, 3, 512), (1, 7, 2, 2)])
def test_cute_lists(device, group, copies, diagonal, others, batch, nq, count, chunk, monkeypatch):
    """others: key blocks that are not the queries' own; own ones come first."""
    monkeypatch.setattr(triton_lists, "CHUNK", chunk)
    starts, heads = torch.arange(0, nq * 128, 128).int(), max(group, 3)
    k_starts = torch.arange(0, (nq + others) * 128, 128).int()
    hit = random_hit(batch, heads, nq + 2)
    blocks, tiles = step(hit, starts, k_starts, 128, device, diagonal), random_tiles(batch, heads, nq, count, device)
    check_cute(blocks, tiles, step_mask(hit, starts, k_starts, 128), group=group, copies=copies)


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("with_columns", [True, False])
def test_cute_lists_of_broadcast_blocks_and_without_columns(device, diagonal, dense, with_columns):
    """Without columns, what is the same for all heads stays so; with them each head has its own lists."""
    layout = Layout(seq_len=9 * 16, world=1 if diagonal else 2, block=16)
    q_starts, k_starts = layout.block_starts(layout.world - 1), layout.block_starts(0)
    whole = DistanceIndex.keep_all(2, 4, layout.global_blocks, 16, device).hit  # moved, it would lose its broadcast
    hit = whole if dense else random_hit(2, 4, layout.global_blocks)
    blocks, hit = step(hit, q_starts, k_starts, 16, device, diagonal), hit.cpu()
    tiles = random_tiles(2, 4, len(q_starts), 2, device) if with_columns else None
    mask = step_mask(hit[:1, :1] if dense and not with_columns else hit, q_starts, k_starts, 16)
    check_cute(blocks, tiles, mask, group=2, copies=2)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1024, 4160])
def test_at_full_size(width):
    """131072 tokens, 16 heads of 2 kv heads."""
    hit = random_hit(1, 16, 1024, share=0.1)
    starts = Layout(seq_len=131072).block_starts(0)
    columns = random_columns(hit, width, 128)
    mask, tiles = step_mask(hit, starts, starts, 128), triton_lists.column_tiles(on(columns, "cuda"), starts.to("cuda"))
    check_tiles(tiles, columns, starts)
    blocks = step(hit, starts, starts, 128, "cuda", True)
    check_lists(blocks.by_query, mask)
    check_lists(blocks.by_key, mask.transpose(-1, -2))
    check_cute(blocks, tiles, mask, group=8, copies=4)


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    hit = random_hit(1, 16, 1024)
    starts = Layout(seq_len=131072).block_starts(0, "cuda")
    columns = on(random_columns(hit, 1000, 128), "cuda")
    hit, rows = hit.to("cuda"), random_rows(16, 1024, 1024).to("cuda")

    def build():
        by_query = triton_lists.distance_lists(hit, starts, starts, 128, 1)
        by_key = triton_lists.distance_lists(hit, starts, starts, 128, -1)
        triton_lists.mask_lists(rows, starts, starts, 128, 1)
        triton_lists.mask_lists(rows, starts, starts, 128, -1)
        names = ("by_query", "by_key", "q_starts", "k_starts")
        blocks = BlockIndex(**dict(zip(names, (by_query, by_key, starts, starts))), block=128, diagonal=True)
        for tiles in (None, triton_lists.column_tiles(columns, starts)):
            cute_lists.by_query(blocks, tiles, 8)
            cute_lists.by_key(blocks, tiles, 8, 4)

    build()  # compiles
    with never_waiting():
        build()
