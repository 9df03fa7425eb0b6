"""What one call of the attention operator holds beside q, k, v and its results: `ops/passes.py` in bytes.

    forward     keys on their way, columns, lists and copies of the heads that are treated at once, fp32 sums of out
    backward    the same, dQ sums of all chunks, dK and dV and what comes home of them
    index       what stays of every layer from the forward pass to its backward pass

Letters: T tokens of a rank, W ranks of an inner circle, N query heads, H key heads, d head dim, C columns, b bytes of
an element.
"""

from mtraining_nns.ops.index import COLUMN_TILE
from mtraining_nns.ops.kernels import Size, sizes
from mtraining_nns.ops.passes import key_heads_at_once
from mtraining_nns.plan.setting import Setting


def forward_bytes(setting: Setting) -> int:
    """Beside q, k, v, out and lse."""
    return _keys_on_their_way(setting, backward=False) + _columns(setting) + _at_work(setting, backward=False)


def backward_bytes(setting: Setting) -> int:
    """Beside q, k, v, out, lse and dout; the gradients of q, k and v included."""
    shape, tokens, b = setting.shape, setting.tokens, setting.element_bytes
    dim = shape.head_dim
    gradients = b * tokens * (shape.heads + 2 * shape.kv_heads) * dim
    delta = 4 * tokens * shape.heads
    # fp32 sums at home, and what the ranks of the circle send for this rank's keys
    home = 2 * tokens * shape.kv_heads * dim * (4 + (4 if setting.cp > 1 else 0))
    if setting.mode == "gather" and setting.cp > 1:
        home += 2 * tokens * shape.kv_heads * dim * b * (setting.within - 1)
    columns = _columns(setting) * (1 + 2 * 4 // b)  # with fp32 sums of their gradients, sent and received
    ways = _keys_on_their_way(setting, backward=True) + _at_work(setting, backward=True)
    return gradients + delta + home + columns + ways


def hop_bytes(setting: Setting) -> int:
    """Keys and values of a rank: what a hop of the forward pass sends."""
    return 2 * setting.tokens * setting.shape.kv_heads * setting.shape.head_dim * setting.element_bytes


def index_bytes(setting: Setting) -> int:
    """Of all sparse layers."""
    attention, heads, layout = setting.attention, setting.shape.heads, setting.layout
    batch = setting.train.micro_batch
    if attention.pattern in ("vertical_slash", "dense"):
        each = batch * heads * (layout.global_blocks + 4 * setting.columns)
    else:  # a byte a query block and span, and for moba a bit a query and chunk
        span = attention.chunk if attention.pattern == "moba" else attention.block
        spans = -(-setting.train.seq_len // span)
        each = batch * heads * layout.local_blocks * spans
        if attention.pattern == "moba":
            each += 4 * batch * heads * layout.local_len * -(-spans // 32)
    return (setting.shape.layers - setting.dense_layers) * each


def _size(setting: Setting) -> Size:
    """Of a sparse call, or of a dense one where no layer is sparse."""
    shape = setting.shape
    sparse = setting.dense_layers < shape.layers
    columns = -(-setting.columns // COLUMN_TILE) * COLUMN_TILE if sparse else 0
    local = setting.layout.local_len
    keys = local * (setting.within if setting.mode == "gather" else 1)
    batch, group = setting.train.micro_batch, shape.heads // shape.kv_heads
    return Size(batch, local, keys, columns, group, shape.head_dim, setting.attention.block)


def _chunk(setting: Setting, *, backward: bool) -> tuple[int, int]:
    """(key heads that are treated at once, bytes of the workspace of one)."""
    size, sparse = _size(setting), setting.dense_layers < setting.shape.layers
    workspace = sizes.WORKSPACE[setting.backend](size, backward=backward)
    gathers = setting.mode == "gather" and setting.cp > 1
    return key_heads_at_once(size, setting.shape.kv_heads, workspace if sparse else 0, gathers=gathers), workspace


def _at_work(setting: Setting, *, backward: bool) -> int:
    """Workspaces of the heads that are treated at once, and sums of all heads where a pass has several hops."""
    heads, workspace = _chunk(setting, backward=backward)
    shape, tokens = setting.shape, setting.tokens
    sums = 0
    if setting.cp > 1:  # out or dQ in fp32, and q and dout head by head of backends that want them so
        sums = tokens * shape.heads * shape.head_dim * 4
        if backward and setting.backend == "cute":
            sums += tokens * shape.heads * shape.head_dim * 2 * setting.element_bytes
    return heads * workspace + sums


def _keys_on_their_way(setting: Setting, *, backward: bool) -> int:
    """Gathered: those of a chunk at work and of the next one. Hop by hop: those at work and the next ones."""
    if setting.cp == 1:
        return 0
    one = hop_bytes(setting)
    between = 2 * one if setting.inner is not None and setting.inner < setting.cp else 0
    if setting.mode == "ring":
        sent = 2 * one * 4 // setting.element_bytes if backward else 0  # fp32 sums that travel, too
        return 2 * one + sent + between
    heads, _ = _chunk(setting, backward=backward)
    return 2 * setting.within * one * heads // setting.shape.kv_heads + between


def _columns(setting: Setting) -> int:
    """Keys and values of the columns of all heads, and who sees them."""
    size, heads = _size(setting), setting.shape.heads
    kv = 2 * size.batch * heads * size.columns * size.dim * setting.element_bytes
    bits = size.batch * heads * (-(-size.queries // size.block)) * size.columns // 8
    return kv + bits
