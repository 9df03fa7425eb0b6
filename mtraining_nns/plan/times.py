"""Time of an optimizer step, part by part, from the operations of the model and the numbers of a kind of GPU.

    matrix products     operations / matmul_tflops, backward twice, recomputed once more
    other work          bytes of norms, rotations, activations and sums / memory_gb_s
    attention           kept pairs of a rank / rate of its backend, no less than the host needs for a call
    index               once a call: vertical-slash by local tokens and heads, xattention by its antidiagonals
    imbalance           what a call's busiest ranks take beyond the mean one (`ring_time.py`)
    ring, exposed       transfers of keys, columns and gradients that nothing covers
    loss                three products of tokens x words x hidden, and the passes over the logits
    sharding, exposed   gathered weights and summed gradients beyond what the layers' own time covers
    optimizer           passes over shards and moments, or moments over the host's link

Not in it: reading data, logging, saving, evaluation, stragglers, the first steps.
"""

from dataclasses import dataclass
from typing import NamedTuple

from mtraining_nns import flops
from mtraining_nns.plan import ring_time
from mtraining_nns.plan.constants import Constants
from mtraining_nns.plan.setting import Setting

ATTENTION = ("attention forward", "attention recomputed", "attention backward", "index", "imbalance", "ring, exposed")
LOGIT_BYTES = 36  # of a token and word, besides products: logits, maximum, exponent, sum, gradient, rounding
# bytes of a token and layer, forward, by the unit that they count: hidden, heads x head dim of q and k, intermediate
OTHER_BYTES = {"torch": (84, 18, 10), "liger": (20, 8, 6)}


@dataclass(frozen=True)
class StepTime:
    """parts: seconds of an optimizer step by what they are spent on; the rest are figures of the whole step."""

    parts: dict[str, float]
    tokens: int
    world: int
    model_flops: float
    dense_flops: float
    peak_tflops: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def mfu(self, *, dense: bool) -> float:
        """Operations of the model over what the GPUs could do; dense: as if all causal pairs had been kept."""
        done = self.dense_flops if dense else self.model_flops
        return done / self.seconds / (self.world * self.peak_tflops * 1e12)


def step_time(setting: Setting, constants: Constants, indices=()) -> StepTime:
    """Of a step as `setting` says. indices: (length, recorded ones), for how evenly a ring shares them."""
    train, shape = setting.train, setting.shape
    turns = train.accumulation
    parts = {name: turns * seconds for name, seconds in micro_batch(setting, constants, indices).items()}
    parts["optimizer"] = _optimizer(setting, constants)
    sequences = setting.recipe.batch
    causal = sequences * flops.causal_pairs(shape, train.seq_len)
    tokens = setting.step_tokens
    return StepTime(
        parts,
        tokens,
        setting.world,
        flops.training_flops(shape, tokens=tokens, pairs=setting.kept * causal),
        flops.training_flops(shape, tokens=tokens, pairs=causal),
        constants["peak_tflops"],
    )


def micro_batch(setting: Setting, constants: Constants, indices=()) -> dict[str, float]:
    """Seconds of a forward and a backward pass by part."""
    layers = _layers(setting, constants)
    attention = attention_parts(setting, constants, indices)
    found = {**layers, **attention, "loss": _loss(setting, constants)}
    runs = 2 if setting.train.recompute else 1
    forward = sum(layers.values()) / (runs + flops.BACKWARD) + sum(attention.values()) / (runs + flops.KERNEL_BACKWARD)
    backward = sum(layers.values()) + sum(attention.values()) - forward
    found["sharding, exposed"] = _sharding(setting, constants, forward, backward)
    if setting.train.offload_inputs:
        copied = setting.shape.layers * setting.tokens * setting.shape.hidden * setting.element_bytes
        found["inputs to the host, exposed"] = 2 * max(0.0, copied / constants["host_gb_s"] / 1e9 - forward)
    return found


def attention_parts(setting: Setting, constants: Constants, indices=()) -> dict[str, float]:
    """Seconds of all layers of a micro-batch."""
    again = setting.train.recompute and not setting.attention.keep_output
    parts = dict.fromkeys(ATTENTION, 0.0)
    for dense, layers in ((True, setting.dense_layers), (False, setting.shape.layers - setting.dense_layers)):
        if layers == 0:
            continue
        forward, backward = (
            _call(setting, constants, dense=dense, backward=way, indices=indices) for way in (False, True)
        )
        parts["attention forward"] += layers * forward.kernels
        parts["attention recomputed"] += layers * forward.kernels * again
        parts["attention backward"] += layers * backward.kernels
        parts["imbalance"] += layers * (forward.imbalance * (1 + again) + backward.imbalance)
        parts["ring, exposed"] += layers * (forward.exposed * (1 + again) + backward.exposed)
        parts["index"] += 0.0 if dense else layers * index_ms(setting, constants)
    return {name: ms / 1e3 for name, ms in parts.items()}


def kernel_ms(setting: Setting, constants: Constants, *, dense: bool, backward: bool) -> float:
    """Kernels of one call on the mean rank."""
    shape, train = setting.shape, setting.train
    pairs = train.micro_batch * shape.heads * train.seq_len * (train.seq_len + 1) / 2 / setting.cp
    pairs *= 1.0 if dense else setting.density
    way = "backward" if backward else "forward"
    rate = constants[f"{setting.backend}_{'dense' if dense else 'sparse'}_{way}_tflops"]
    ms = flops.kernel_flops(shape.head_dim, pairs, backward=backward) / rate / 1e9
    return max(ms, constants[f"call_{way}_ms"])


def index_ms(setting: Setting, constants: Constants) -> float:
    """Of one sparse call: its estimate; lists are among the kernels."""
    shape, attention, train = setting.shape, setting.attention, setting.train
    ms = constants["index_call_ms"] + constants["index_ms_per_million"] * setting.tokens * shape.heads / 1e6
    if attention.pattern == "xattention":  # scores of groups of `stride` tokens, stride x head dim long
        scores = train.micro_batch * shape.heads * (train.seq_len / attention.stride) ** 2 / 2 / setting.cp
        ms += 2 * scores * attention.stride * shape.head_dim / constants["matmul_tflops"] / 1e9
    return ms


class Call(NamedTuple):
    """Milliseconds of one call: kernels of the mean rank with the host's part, and what comes on top of them."""

    kernels: float
    imbalance: float
    exposed: float


def _call(setting: Setting, constants: Constants, *, dense: bool, backward: bool, indices) -> Call:
    comp = kernel_ms(setting, constants, dense=dense, backward=backward)
    on = ring_time.links(setting, constants, backward=backward)
    alone, total = (
        ring_time.call_ms(setting, comp, links, dense=dense, indices=indices)
        for links in (ring_time.Links(0.0, 0.0), on)
    )
    total = max(total, 0.0 if dense else _columns_ms(setting, constants, backward=backward))
    return Call(comp + constants["cpu_ms"], alone - comp, total - alone)


def _columns_ms(setting: Setting, constants: Constants, *, backward: bool) -> float:
    """Sums of columns over the ring, which go on under the hops; those of gradients are fp32."""
    shape, ranks = setting.shape, setting.cp
    each = 4 if backward else setting.element_bytes
    sent = 2 * 2 * setting.train.micro_batch * shape.heads * setting.columns * shape.head_dim * each
    return sent * (ranks - 1) / ranks / _collective_gb_s(setting, constants, ranks) / 1e6


def _layers(setting: Setting, constants: Constants) -> dict[str, float]:
    shape, train, b = setting.shape, setting.train, setting.element_bytes
    passes = 1 + flops.BACKWARD + train.recompute
    units = shape.hidden, (shape.heads + shape.kv_heads) * shape.head_dim, shape.intermediate
    other = sum(each * unit for each, unit in zip(OTHER_BYTES[train.kernels], units)) * b / 2
    products = setting.tokens * flops.linear_flops(shape) / constants["matmul_tflops"] / 1e12
    moved = setting.tokens * shape.layers * other / constants["memory_gb_s"] / 1e9
    return {"matrix products": passes * products, "other work of layers": passes * moved}


def _loss(setting: Setting, constants: Constants) -> float:
    shape = setting.shape
    products = 3 * setting.tokens * flops.head_flops(shape) / constants["matmul_tflops"] / 1e12
    return products + setting.tokens * shape.vocabulary * LOGIT_BYTES / constants["memory_gb_s"] / 1e9


def _sharding(setting: Setting, constants: Constants, forward_s: float, backward_s: float) -> float:
    """What does not go on under the layers: at least the first layer's weights, and the last sum of gradients."""
    shape, ranks = setting.shape, setting.world
    if ranks == 1:
        return 0.0
    per_element = (ranks - 1) / ranks / _collective_gb_s(setting, constants, ranks) / 1e9
    gather, reduce = (size * shape.parameters * per_element for size in (setting.element_bytes, 4))
    back = reduce + (gather if setting.parallel.zero == 3 else 0.0)
    alone = (shape.layer_parameters + shape.root_parameters) * per_element
    first, last = setting.element_bytes * alone, 4 * alone
    return max(first, gather - forward_s) + max(last, back - backward_s)


def _collective_gb_s(setting: Setting, constants: Constants, ranks: int) -> float:
    """Of a collective over so many neighbouring ranks: between machines all their links work at once."""
    if ranks <= setting.node:
        return constants["intra_gb_s"]
    return min(constants["intra_gb_s"], constants["inter_gb_s"] * setting.node)


def _optimizer(setting: Setting, constants: Constants) -> float:
    """Norm and clipping read and write gradients; the update reads four and writes three numbers a weight."""
    sharded = setting.shape.sharded(setting.world)
    seconds = 4 * sharded * (3 + 7) / constants["memory_gb_s"] / 1e9
    return seconds + (16 * sharded / constants["host_gb_s"] / 1e9 if setting.parallel.offload else 0.0)
