"""Bytes that each backend needs for one key head and its query heads, without the package that the backend is made of.

    WORKSPACE[backend](size, backward=...)       beside their results: lists, copies, sums
    front_rows(size, backward=...)               of cute: rows of its extended keys before the keys

A backend's module takes its function from here, and so does who plans a run on a machine without GPUs.
"""

from mtraining_nns.ops.kernels.contract import Size

QUERIES_PER_COPY = 128  # query blocks that one program of cute's backward pass takes of a column tile
MOST_COPIES = 8


def lists_alone(size: Size, *, backward: bool) -> int:
    """Of torch and triton: lists by query, and by key in a backward pass."""
    return size.list_bytes() * (1 + backward)


def cute(size: Size, *, backward: bool) -> int:
    """Lists of keys and of extended keys, and these."""
    extended = size._replace(keys=size.keys + front_rows(size, backward=backward))
    rows = 2 * 2 * extended.keys
    if backward:
        # dK and dV in 16 bits and in 32; q and dout head by head, and the accumulator of dQ
        rows += extended.keys * 2 * (2 + 4) + size.group * size.queries * (2 * 2 + 4)
    return size.list_bytes() + extended.list_bytes() + size.batch * size.dim * rows


def cuda(size: Size, *, backward: bool) -> int:
    """Lists in both orders; in a backward pass one of them the other way round, too, and sums of every query head."""
    if not backward:
        return 2 * size.list_bytes()
    # dQ in fp32 and 16 bits; dK and dV of every query head
    rows = size.group * (size.queries * (4 + 2) + size.keys * 2 * 2) + size.keys * 2 * 4
    return 3 * size.list_bytes() + size.batch * size.dim * rows


def front_rows(size: Size, *, backward: bool) -> int:
    """Rows of the extended keys before the keys."""
    return size.group * size.columns * (copies(size.queries, size.block) if backward else 1)


def copies(queries: int, block: int) -> int:
    """Programs that share a column tile's queries, a power of two; a tile sees thousands, a key block some dozens."""
    return min(MOST_COPIES, 1 << max(0, (queries // block // QUERIES_PER_COPY).bit_length() - 1))


WORKSPACE = {"torch": lists_alone, "triton": lists_alone, "cute": cute, "cuda": cuda}
