"""Memory of a rank, part by part, at the moments of a step that can be its peak.

    loss            all layers are behind: their inputs (or all activations), final norm, a chunk of logits
    head            the way back begins: the head's gradient is rounded, the final norm is gone back through
    first backward  the last layer is recomputed and gone back through, everything else still waits
    last backward   the first layer, whose inputs are the last ones; the gradients of all others are there
    root            embedding and head: their gradients are summed over the ranks
    update          AdamW

The torch engine: FSDP2 over all ranks, weights fp32 at rest and in `train.precision` at work (`engines/step.py`); the
layers are those of transformers' Qwen2 and Llama. nnScaler's plans keep other buffers. Letters of the formulas:

    T tokens of a rank, D hidden, F intermediate, N query heads, H key heads, d head dim, V words, C tokens of a chunk
    of the loss, b bytes of an element at work
"""

from dataclasses import dataclass

from mtraining_nns.loss import WEIGHT_ROWS
from mtraining_nns.plan import attention_memory
from mtraining_nns.plan.setting import Setting

MIB, GIB = 1 << 20, 1 << 30
MOMENTS_ON_THE_WAY = 3 * 2 * 4 << 24  # parallel.offload: three pieces of 2^24 elements of both moments


@dataclass(frozen=True)
class Memory:
    """phases: bytes by part at each moment; margin: bytes that the allocator takes beyond what tensors hold."""

    phases: dict[str, dict[str, int]]
    margin: int = 0

    @property
    def peaks(self) -> dict[str, int]:
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def peak_phase(self) -> str:
        return max(self.peaks, key=self.peaks.get)

    @property
    def parts(self) -> dict[str, int]:
        """Of the largest moment."""
        return {name: size for name, size in self.phases[self.peak_phase].items() if size}

    @property
    def tensors(self) -> int:
        """What torch calls the peak of allocated memory."""
        return max(self.peaks.values())

    @property
    def total(self) -> int:
        return self.tensors + self.margin


def memory(setting: Setting, allocator_share: float = 0.0) -> Memory:
    """Of the fullest rank. allocator_share: what the allocator takes beyond tensors, of what they hold."""
    at_rest = resting(setting)
    phases = {
        "loss": at_rest | _loss(setting),
        "head": at_rest | _head(setting),
        "first backward": at_rest | _backward(setting, first=True),
        "last backward": at_rest | _backward(setting, first=False),
        "root": at_rest | _root(setting),
        "update": at_rest | _update(setting),
    }
    found = Memory(phases)
    return Memory(phases, int(found.tensors * allocator_share))


def resting(setting: Setting) -> dict[str, int]:
    """Weights and moments: there all the time."""
    sharded = setting.shape.sharded(setting.world)
    return {"weights, fp32 shards": 4 * sharded, "moments": 0 if setting.parallel.offload else 8 * sharded}


def norm_bytes(setting: Setting) -> int:
    """What a norm keeps for its backward pass: its input in fp32, its normalised input, its output, a root a token."""
    tokens, b = setting.tokens, setting.element_bytes
    if setting.train.kernels == "liger":
        return tokens * (setting.shape.hidden * 2 * b + 4)
    return tokens * (setting.shape.hidden * (4 + 2 * b) + 4)


def attention_kept_bytes(setting: Setting) -> int:
    """q, k, v, out and lse."""
    return _qkv_bytes(setting) + output_bytes(setting)


def output_bytes(setting: Setting) -> int:
    """out [T, N, d] and lse [N, T]."""
    shape = setting.shape
    return setting.tokens * shape.heads * (shape.head_dim * setting.element_bytes + 4)


def mlp_bytes(setting: Setting) -> int:
    """Gate, its activation, up, and their product, which liger computes again."""
    kept = 3 if setting.train.kernels == "liger" else 4
    return kept * setting.tokens * setting.shape.intermediate * setting.element_bytes


def layer_bytes(setting: Setting) -> int:
    """All activations of a layer: without recomputation of every layer, with it of one."""
    return 2 * norm_bytes(setting) + attention_kept_bytes(setting) + mlp_bytes(setting)


def kept_bytes(setting: Setting) -> dict[str, int]:
    """What all layers keep from their forward to their backward passes, on the GPU."""
    train, layers = setting.train, setting.shape.layers
    kept = {"index": attention_memory.index_bytes(setting)}
    if not train.recompute:
        return kept | {"activations": layers * layer_bytes(setting)}
    there = min(2, layers) if train.offload_inputs else layers
    kept["layer inputs"] = there * _hidden_bytes(setting)
    if setting.attention.keep_output:
        kept["attention outputs"] = layers * output_bytes(setting)
    return kept


def host_bytes(setting: Setting) -> int:
    """Pinned memory of the host, of one rank."""
    moments = 8 * setting.shape.sharded(setting.world) if setting.parallel.offload else 0
    return moments + (setting.shape.layers * _hidden_bytes(setting) if setting.train.offload_inputs else 0)


def _loss(setting: Setting) -> dict[str, int]:
    shape, tokens, b = setting.shape, setting.tokens, setting.element_bytes
    chunk = min(setting.train.loss_chunk, tokens)
    weight = shape.hidden * (4 * shape.vocabulary + b * min(WEIGHT_ROWS, shape.vocabulary))
    logits = chunk * shape.vocabulary * (4 + (b if b < 4 else 0))  # fp32 ones are written over
    loss = weight + _hidden_bytes(setting) + logits
    return {**_forward_parts(setting), "final norm": norm_bytes(setting), "loss": loss}


def _head(setting: Setting) -> dict[str, int]:
    shape, b = setting.shape, setting.element_bytes
    words = shape.vocabulary * shape.hidden
    rounded = 4 * words + (b * words if b < 4 else 0) + norm_bytes(setting)
    norm = b * words + norm_bytes(setting) + _norm_chain_bytes(setting) - (_hidden_bytes(setting) if b < 4 else 0)
    return {**_forward_parts(setting), "head and final norm": max(rounded, norm)}


def _norm_chain_bytes(setting: Setting) -> int:
    """Of a norm's backward pass, beside what it kept: the norms of transformers go through fp32 in several steps."""
    b = setting.element_bytes
    each = 2 * b if setting.train.kernels == "liger" else 12 + 3 * (4 - b)
    return each * setting.tokens * setting.shape.hidden


def _backward(setting: Setting, *, first: bool) -> dict[str, int]:
    shape, b = setting.shape, setting.element_bytes
    layers = shape.layers
    kept, gathered, gradients = kept_bytes(setting), _gathered_layers(setting, forward=False), 0
    if not first:
        kept = {name: size // layers for name, size in kept.items()}
        gathered, gradients = shape.layer_parameters, shape.sharded_layers(setting.world) * (layers - 1) // layers
    if setting.train.accumulation > 1:
        gradients = shape.sharded(setting.world)
    # beside the layer's own, in b bytes, the sum of the layer before is under way in fp32
    under_way = shape.layer_parameters * (b if first else b + 4)
    if not setting.train.recompute:
        kept["activations"] -= layer_bytes(setting)  # of the layer at work
    return {
        **kept,
        **_layer_at_work(setting),
        "gathered weights": b * (gathered + shape.root_parameters),
        "gradients, fp32 shards": 4 * gradients,
        "gradients under way": under_way + b * shape.vocabulary * shape.hidden,
        "gradient of hidden states": _hidden_bytes(setting),
        "tokens and rotations": _inputs_bytes(setting),
    }


def _layer_at_work(setting: Setting) -> dict[str, int]:
    """The largest of three moments of a layer's backward pass, with what is left of its activations."""
    shape, tokens, b = setting.shape, setting.tokens, setting.element_bytes
    liger = setting.train.kernels == "liger"
    whole, norm, attention = layer_bytes(setting), norm_bytes(setting), attention_kept_bytes(setting)
    kept_elsewhere = 0
    if setting.train.recompute:
        kept_elsewhere += output_bytes(setting) if setting.attention.keep_output else 0
        kept_elsewhere += _hidden_bytes(setting) if b == 4 or liger else 0  # the first norm's input is the layer's own
    # gradients of the product and of both its factors, the product itself is gone
    mlp = whole + (1 if liger else 2) * b * tokens * shape.intermediate
    # what is behind the second norm is gone
    second_norm = 2 * norm - _hidden_bytes(setting) + attention + _norm_chain_bytes(setting)
    call = norm + attention + b * tokens * shape.heads * shape.head_dim
    passes = max(attention_memory.backward_bytes(setting), attention_memory.forward_bytes(setting))
    if call + passes > max(mlp, second_norm):
        return {"layer": call - kept_elsewhere, "attention": passes}
    return {"layer": max(mlp, second_norm) - kept_elsewhere, "attention": 0}


def _root(setting: Setting) -> dict[str, int]:
    """Gradients of embedding and head: in fp32 on their way to the ranks, and in b bytes before or in shards after."""
    shape, world = setting.shape, setting.world
    layers = shape.sharded_layers(world) if setting.train.accumulation == 1 else shape.sharded(world)
    shards = 4 * (shape.sharded(world) - shape.sharded_layers(world))
    if world == 1:
        shards += 4 * shape.root_parameters  # FSDP's copy through a quotient, where nothing is summed
    return {
        "gradients, fp32 shards": 4 * layers,
        "gradients under way": 4 * shape.root_parameters + max(setting.element_bytes * shape.root_parameters, shards),
        "tokens and rotations": _inputs_bytes(setting),
    }


def _update(setting: Setting) -> dict[str, int]:
    on_the_way = MOMENTS_ON_THE_WAY if setting.parallel.offload else 0
    gradients = 4 * setting.shape.sharded(setting.world)
    return {"gradients, fp32 shards": gradients, "moments on their way": on_the_way}


def _forward_parts(setting: Setting) -> dict[str, int]:
    shape = setting.shape
    gradients = 4 * shape.sharded(setting.world) if setting.train.accumulation > 1 else 0
    layers = _gathered_layers(setting, forward=True)
    return {
        **kept_bytes(setting),
        "gathered weights": setting.element_bytes * (layers + shape.root_parameters),
        "gradients, fp32 shards": gradients,
        "tokens and rotations": _inputs_bytes(setting),
    }


def _gathered_layers(setting: Setting, *, forward: bool) -> int:
    """Weights of layers that are whole: all of them with ZeRO 2; with 3 none at the loss, else one and the next."""
    shape = setting.shape
    if setting.parallel.zero < 3:
        return shape.layers * shape.layer_parameters
    return 0 if forward else 2 * shape.layer_parameters


def _hidden_bytes(setting: Setting) -> int:
    return setting.tokens * setting.shape.hidden * setting.element_bytes


def _qkv_bytes(setting: Setting) -> int:
    shape = setting.shape
    return setting.tokens * (shape.heads + 2 * shape.kv_heads) * shape.head_dim * setting.element_bytes


def _inputs_bytes(setting: Setting) -> int:
    """input_ids, labels and position_ids of all micro-batches, cosines and sines of one."""
    ids = 3 * 8 * setting.tokens * setting.train.accumulation
    return ids + 2 * setting.tokens * setting.shape.head_dim * setting.element_bytes
