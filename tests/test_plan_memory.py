"""The memory model against what torch makes and frees: real training steps on the CPU, counted storage by storage.

The engine's own step runs on one rank with FSDP2 in bf16 and fp32, with recomputation and without. Attention is a
stand-in that keeps what the operator keeps and needs nothing beside its results: what the operator's kernels need on a
GPU cannot be seen here.
"""

import pytest
import torch
from distributed import run_workers
from live_bytes import LiveBytes
from transformers import AutoConfig

from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.ring import Ring
from mtraining_nns.plan import attention_memory
from mtraining_nns.plan.memory import memory, resting
from mtraining_nns.plan.setting import Setting
from mtraining_nns.plan.shape import Shape
from mtraining_nns.recipe import Recipe
from mtraining_nns.sections import CheckpointConfig, DataConfig, ModelConfig, ParallelConfig, TrainConfig

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


class StandIn(torch.autograd.Function):
    """Saves q, k, v, out and lse; gradients of their shapes."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.zeros_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_zeros(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors  # all alive meanwhile, as in the operator
        return tuple(map(torch.zeros_like, (q, k, v)))


class Attention:
    def prepare(self, *shape):
        pass

    def __call__(self, q, k, v, **call):
        return StandIn.apply(*(x.contiguous() for x in (q, k, v)))


def planned(tokens, shape, train, zero):
    recipe = Recipe(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        train=TrainConfig(steps=3, seq_len=tokens, lr=1e-3, loss_chunk=64, **train),
        checkpoint=CheckpointConfig(dir="none"),
        attention=AttentionConfig(pattern="dense"),
        parallel=ParallelConfig(cp=1, zero=zero),
    )
    return Setting(recipe=recipe, shape=shape, world=1, node=1, backend="torch", density=1.0)


def measured_step(rank, world_size, tokens, sizes, train, zero):
    """(peaks by moment, planned peaks by moment) beyond weights and moments, in bytes."""
    from mtraining_nns import hf
    from mtraining_nns.engines.step import DTYPES, shard, train_step
    from mtraining_nns.engines.world import start
    from mtraining_nns.model import CausalLMLoss, build_model

    torch.set_num_threads(1)
    kind = "llama" if not sizes["tie_word_embeddings"] else "qwen2"
    lm = build_model(AutoConfig.for_model(kind, **SIZES, **sizes), seed=0)
    model, shape = CausalLMLoss(lm, chunk=64), Shape.of(lm)
    setting = planned(tokens, shape, train, zero)
    attention_memory.backward_bytes = lambda setting: (
        setting.tokens * (shape.heads + 2 * shape.kv_heads) * shape.head_dim * setting.element_bytes
    )
    attention_memory.forward_bytes = attention_memory.index_bytes = lambda setting: 0
    with start(setting.parallel) as world:
        hf.attach(lm, Attention(), DTYPES[setting.train.precision])
        shard(model, setting.recipe, world)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.arange(tokens)[None]
        batches = [{"input_ids": ids % sizes["vocab_size"], "labels": ids % sizes["vocab_size"], "position_ids": ids}]
        train_step(model, optimizer, batches, world, recipe=setting.recipe, step=0)
        live, peaks = LiveBytes(), {}
        live.include(model.parameters())
        live.include(x for state in optimizer.state.values() for x in state.values())
        before = live.bytes

        def moment(name):
            def mark(*args):
                peaks[name] = live.peak - before
                live.reset()

            return mark

        layers = lm.model.layers
        layers[-1].register_forward_hook(moment("forward"))
        layers[-1].register_full_backward_pre_hook(moment("head"))
        model.register_forward_hook(moment("loss"))
        layers[-1].register_full_backward_hook(moment("first backward"))
        layers[0].register_full_backward_pre_hook(moment("others"))
        layers[0].register_full_backward_hook(moment("last backward"))
        optimizer.register_step_pre_hook(moment("root"))
        with live:
            train_step(model, optimizer, batches, world, recipe=setting.recipe, step=1)
    at_rest = sum(resting(setting).values())
    return before / at_rest, peaks, {name: peak - at_rest for name, peak in memory(setting).peaks.items()}


WIDE = {"intermediate_size": 192, "head_dim": 16, "vocab_size": 1000, "tie_word_embeddings": True}
NARROW = {"intermediate_size": 16, "head_dim": 64, "vocab_size": 1000, "tie_word_embeddings": False}
WORDS = {"intermediate_size": 192, "head_dim": 16, "vocab_size": 20000, "tie_word_embeddings": False}


CASES = [  # sizes, tokens, recompute, precision, zero
    (WIDE, 2048, True, "bf16", 2),
    (WIDE, 2048, False, "bf16", 3),
    (WIDE, 2048, True, "fp32", 3),
    (NARROW, 2048, True, "bf16", 3),
    (NARROW, 2048, False, "fp32", 2),
    (WORDS, 1024, True, "bf16", 3),
    (WORDS, 1024, False, "fp32", 2),
]


@pytest.mark.parametrize("sizes, tokens, recompute, precision, zero", CASES)
def test_peaks_of_a_real_step_are_those_of_the_plan(sizes, tokens, recompute, precision, zero):
    train = {"recompute": recompute, "precision": precision}
    at_rest, found, expected = run_workers(measured_step, 1, tokens, sizes, train, zero)[0]
    assert at_rest == pytest.approx(1, rel=1e-3)
    # the plan keeps the sum of a layer's gradients under way, which is over at once on a CPU
    for moment in ("loss", "head", "first backward", "last backward"):
        assert 0.975 < expected[moment] / found[moment] < 1.05, (moment, found, expected)
    assert 0.975 < max(expected.values()) / max(found.values()) < 1.05, (found, expected)
    if sizes is WORDS:  # the moment that only large vocabularies see
        assert expected["root"] / found["root"] == pytest.approx(1, rel=0.02)


def test_the_index_of_a_call_takes_its_bytes():
    shape = Shape(
        layers=1, hidden=64, intermediate=64, heads=4, kv_heads=2, head_dim=16, vocabulary=10, tied=True, linear=1,
        layer_weights=((1,),), root_weights=((1,),),
    )  # fmt: skip
    q, k = torch.randn(1, 512, 4, 16), torch.randn(1, 512, 2, 16)
    for changes in ({}, {"pattern": "xattention"}, {"pattern": "moba", "chunk": 64, "top_k": 2}):
        config = AttentionConfig(block=32, cap=64, sinks=8, local=32, **changes)
        operator = Operator(config, Ring.single(), "cpu")
        operator(q, k, k)
        index = operator.last[0][0]
        tensors = [index.mask, index.row_bits] if hasattr(index, "mask") else [index.hit, index.columns.position]
        held = sum(x.nbytes for x in tensors if x is not None)
        setting = planned(512, shape, {}, 2)
        recipe = Recipe(**{**vars(setting.recipe), "attention": config})
        setting = Setting(recipe=recipe, shape=shape, world=1, node=1, backend="torch", density=0.5)
        assert attention_memory.index_bytes(setting) == held
