"""A plan against independent arithmetic: published sizes of models, bytes by hand, the paper's table 4, torch's counts.

Memory against real allocations is in test_plan_memory.py.
"""

import json

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from mtraining_nns import cli, flops
from mtraining_nns.errors import UserError
from mtraining_nns.ops.layout import Layout
from mtraining_nns.plan import attention_memory, planner, ring_time
from mtraining_nns.plan.candidates import candidates
from mtraining_nns.plan.constants import Constants, Number, kinds
from mtraining_nns.plan.estimate import Estimate
from mtraining_nns.plan.memory import GIB, memory, resting
from mtraining_nns.plan.setting import Setting
from mtraining_nns.plan.times import attention_parts, step_time
from mtraining_nns.recipe import Recipe

QWEN = {  # Qwen/Qwen2.5-3B, config.json
    "model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA = {  # meta-llama/Llama-3.1-8B, config.json
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
LONG = 524288
LAYER = 2 * 2048**2 + 2048 + 2 * (2048 * 256 + 256) + 3 * 2048 * 11008 + 2 * 2048  # q, o, bias, k, v, MLP, norms
HEAD = "gpu: x\nmatch: x\ncapability: [9, 0]\ngpus_per_node: {}\nnumbers: {}"


def write(folder, init, *overrides):
    """Path of a recipe whose data are not there."""
    tree = {
        "model": {"init": init},
        "data": {"path": str(folder / "not prepared yet")},
        "train": {"steps": 30, "seq_len": LONG, "accumulation": 64, "lr": 1e-5},
        "checkpoint": {"dir": str(folder / "run")},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    return {
        name: planner.shape_of(Recipe.load(write(folder, init))) for name, init in (("qwen", QWEN), ("llama", LLAMA))
    }


@pytest.fixture
def setting(tmp_path, shapes):
    """A Setting of Qwen2.5-3B at 512K on a kind of GPU."""

    def make(*overrides, world=32, kind="h200", density=0.05):
        recipe = Recipe.load(write(tmp_path, QWEN), overrides).shared_by(world)
        return Setting.of(recipe, shapes["qwen"], Constants.of(kind), density)

    return make


def test_sizes_are_the_published_ones(shapes):
    assert shapes["qwen"].parameters == 3_085_938_688 and shapes["llama"].parameters == 8_030_261_248
    assert shapes["qwen"].tied and not shapes["llama"].tied
    # 3.09 billion, 0.31 of them embedding: 2.77 in layers, as the model's own page says
    assert round(shapes["qwen"].layers * shapes["qwen"].layer_parameters / 1e9, 2) == 2.77


@pytest.mark.parametrize("kind, layers, tied", [("llama", 1, False), ("qwen2", 3, True)])
def test_operations_are_those_that_torch_counts(kind, layers, tied):
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"num_hidden_layers": layers, "vocab_size": 100, "head_dim": 12, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(kind, **sizes, **more)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = 24
    with FlopCounterMode(display=False) as counter:
        lm(input_ids=torch.arange(tokens)[None], labels=torch.arange(tokens)[None]).loss.backward()
    shape = flops.Shape.of(lm)
    all_pairs = layers * 4 * tokens**2  # eager attention computes later keys, too
    assert counter.get_total_flops() == flops.training_flops(shape, tokens=tokens, pairs=all_pairs)
    assert flops.causal_pairs(shape, tokens) == layers * 4 * tokens * (tokens + 1) // 2


def test_a_rank_holds_what_arithmetic_says(setting):
    """Qwen2.5-3B, 32 ranks: 16,384 tokens a rank; bytes by hand."""
    held = memory(setting())
    parts = held.parts
    assert held.peak_phase == "first backward"
    assert parts["gathered weights"] == 2 * 3_085_938_688
    assert parts["layer inputs"] == 36 * 16384 * 2048 * 2
    # every weight's rows divide by 32, but for some biases of 256 elements
    assert parts["weights, fp32 shards"] == pytest.approx(4 * 3_085_938_688 / 32, rel=1e-6)
    assert parts["moments"] == 2 * parts["weights, fp32 shards"] == 2 * parts["gradients, fp32 shards"]
    assert attention_memory.hop_bytes(setting()) == 16384 * 2 * 2 * 128 * 2  # tokens, k and v, heads, dim, bytes
    logits = (4 + 2) * 1024 * 151936
    assert held.phases["loss"]["loss"] >= 4 * 151936 * 2048 + 2 * 16384 * 2048 + logits


@pytest.mark.parametrize(
    "key, part, expected",
    [
        ("parallel.offload=true", "moments", 0),
        ("parallel.zero=3", "gathered weights", 2 * (3_085_938_688 - 34 * LAYER)),
        ("train.offload_inputs=true", "layer inputs", 2 * 16384 * 2048 * 2),
        ("attention.keep_output=true", "attention outputs", 36 * 16384 * 16 * (128 * 2 + 4)),
        ("train.recompute=false", "layer inputs", 0),
    ],
)
def test_keys_that_save_memory_take_their_part_away(setting, key, part, expected):
    before, after = memory(setting()), memory(setting(key))
    assert after.phases["first backward"].get(part, 0) == expected != before.phases["first backward"].get(part, 0)
    saves = key.startswith("parallel") or "offload" in key
    assert (after.total < before.total) == saves


def test_weights_that_do_not_divide_are_rounded_up(shapes):
    shape = shapes["qwen"]
    assert shape.sharded(1) == shape.parameters
    assert shape.sharded(7) > shape.parameters / 7
    each = 2 * 2048 + 36 * (2 * 2048)  # norms and biases cut in 4096 parts keep one element each
    assert shape.sharded(4096) < shape.parameters / 4096 + 4096 * each


def paper_constants(**changed) -> Constants:
    """Of the paper's cluster, with the times of its table 4: links without latency, kernels at the rate of 0.51 ms."""
    packaged = Constants.of("a100-40gb")
    numbers = packaged.numbers | {name: Number(value, "assumed", "test") for name, value in changed.items()}
    return Constants(**{**vars(packaged), "numbers": numbers})


def test_one_call_takes_the_times_of_the_papers_table(setting):
    """34.10 ms flat and 19.53 hierarchical from keys of 16.8 MB, 0.51 ms a hop, on perfectly even work."""
    keys = 2 * 16384 * 2 * 128 * 2
    constants = paper_constants(intra_gb_s=keys / 0.13e6, inter_gb_s=keys / 0.98e6)
    for ring, expected in (("flat", 34.10), ("hierarchical", 19.53)):
        way = setting(
            f"parallel.ring={ring}",
            "parallel.inner_mode=ring",
            "attention.layout=zigzag",
            kind="a100-40gb",
            density=0.05,
        )
        on = ring_time.links(way, constants, backward=False)
        assert (on.intra_ms, on.inter_ms) == pytest.approx((0.13, 0.98))
        found = ring_time.call_ms(way, 32 * 0.51, on, dense=True)  # of dense work zigzag shares all hops evenly
        assert found + 1.13 + 2.08 == pytest.approx(expected, abs=0.02)
    # the packaged numbers say the same of kernels and index, within their rounding
    parts = attention_parts(way, Constants.of("a100-40gb"))
    assert parts["index"] / 36 * 1e3 == pytest.approx(1.13, abs=0.01)
    assert parts["attention forward"] / 36 * 1e3 == pytest.approx(32 * 0.51 + 2.08, rel=0.01)


def test_two_levels_within_one_machine_take_its_links(setting):
    constants = Constants.of("h200")
    way = setting("parallel.ring=hierarchical", "parallel.inner=4", "parallel.inner_mode=ring", world=8)
    on = ring_time.links(way, constants, backward=False)
    assert on.inter_ms == on.intra_ms > 0
    assert ring_time.links(setting(world=8), constants, backward=False).inter_ms == 0


def test_kernels_take_what_was_measured(setting):
    """docs/benchmarks.md, one H200: 131,072 tokens, 4.49 % in 6.05 and 17.8 ms, dense 107.3 and 288.4."""
    one = setting("train.seq_len=131072", "parallel.zero=3", world=1, density=0.0449)
    parts = attention_parts(one, Constants.of("h200"))
    assert parts["attention forward"] / 36 * 1e3 == pytest.approx(6.05, rel=0.01)
    assert parts["attention backward"] / 36 * 1e3 == pytest.approx(17.8, rel=0.01)
    assert parts["index"] / 36 * 1e3 == pytest.approx(0.68, abs=0.1)
    assert parts["imbalance"] == parts["ring, exposed"] == 0
    dense = attention_parts(setting("train.seq_len=131072", "attention.pattern=dense", world=1), Constants.of("h200"))
    assert dense["attention forward"] / 36 * 1e3 == pytest.approx(107.3, rel=0.01)
    assert dense["index"] == 0


def test_recomputation_and_kept_outputs_cost_and_save_time(setting):
    constants = Constants.of("h200")
    steps = {
        key: step_time(setting(key), constants)
        for key in ("train.recompute=true", "train.recompute=false", "attention.keep_output=true")
    }
    again, never, kept = steps.values()
    assert again.parts["matrix products"] == pytest.approx(4 / 3 * never.parts["matrix products"])
    assert again.parts["attention recomputed"] == again.parts["attention forward"]
    assert kept.parts["attention recomputed"] == never.parts["attention recomputed"] == 0
    assert never.seconds < kept.seconds < again.seconds
    assert again.model_flops == never.model_flops  # MFU does not pay for doing things twice


def test_generated_indices_keep_the_density_that_is_asked_for():
    for density in (0.01, 0.05, 0.2):
        index = ring_time.of_density(131072, 128, density).index()
        assert index.density(131072).item() == pytest.approx(density, rel=0.2)


def test_moba_density_is_counted(shapes):
    from mtraining_nns.ops.config import AttentionConfig

    config = AttentionConfig(pattern="moba", block=16, chunk=32, top_k=3)
    kept = sum(i % 32 + 1 + 32 * min(i // 32, 2) for i in range(1000))
    assert planner.moba_density(config, 1000) == pytest.approx(kept / (1000 * 1001 / 2))
    assert planner.moba_density(config, 90) == 1.0


def test_best_first_and_a_line_for_what_does_not_fit(tmp_path, shapes):
    recipe = Recipe.load(write(tmp_path, LLAMA)).shared_by(8)
    found = candidates(recipe, shapes["llama"], Constants.of("a100-40gb"), world=8, density=0.05)
    speeds = [estimate.time.tokens_per_s for estimate in found.fitting]
    assert speeds == sorted(speeds, reverse=True)
    assert all(estimate.memory.total <= 37.4 * GIB for estimate in found.fitting)
    assert all(estimate.setting.recipe.batch == 64 for estimate in found.fitting)
    refused = [line for line in found.refused if line.startswith("cp 1 x dp 8") and "GiB of 37.4" in line]
    assert len(refused) == len(set(refused)) == 16 and all(
        "recompute" in line or "activations" in line for line in refused
    )


def test_rings_follow_the_machines(setting):
    assert setting().ring == "4 x 8, gathered" and setting(world=8).ring == "flat, gathered"
    assert setting("parallel.ring=flat").ring == "flat, hop by hop" and setting("parallel.ring=flat").leaves_node
    assert setting(world=1).ring == "none" and memory(setting(world=1)).total > memory(setting()).total
    with pytest.raises(UserError, match="needs every ring on several nodes"):
        setting("parallel.ring=hierarchical", world=12)


@pytest.mark.parametrize("kind", kinds())
def test_packaged_constants_serve_every_backend(kind, shapes, tmp_path):
    constants = Constants.of(kind)
    assert all(number.source for number in constants.numbers.values())
    assert constants["matmul_tflops"] < constants["peak_tflops"]
    for backend in ("triton", "cuda") if constants.capability < (9, 0) else ("triton", "cuda", "cute"):
        for name in ("dense_forward", "dense_backward", "sparse_forward", "sparse_backward"):
            assert 0 < constants[f"{backend}_{name}_tflops"] < constants["peak_tflops"]
    copy = tmp_path / "copy.yaml"
    constants.save(copy)
    assert Constants.load(copy) == constants


@pytest.mark.parametrize(
    "text, fault",
    [
        (None, "cannot be read"),
        ("numbers: [", "write it again"),
        ("gpu: x", "lacks"),
        ("- 1", "write it again"),
        (HEAD.format(0, "{}"), "gpus_per_node from 1"),
        (HEAD.format(8, "{a: {value: .nan, how: measured, source: x}}"), "from 0"),
        (HEAD.format(8, "{a: {value: 1, how: guessed, source: x}}"), "guessed"),
    ],
)
def test_constants_from_elsewhere_are_checked(tmp_path, text, fault):
    path = tmp_path / "constants.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=fault):
        Constants.load(path)


def test_plan_as_a_user_meets_it(tmp_path, capsys):
    path = write(tmp_path, QWEN)
    assert cli.main(["plan", path, "--gpus", "8", "--gpu", "h200", "--density", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "3,085,938,688 parameters" in text and "density: 0.1000" in text and "as given" in text
    assert "fits:" in text and "no: cp 1" in text and "assumed, not measured" in text
    assert cli.main(["plan", path, "--gpus", "32", "--gpu", "a100-40gb", "--table", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"]["cp"] == 32 and found["density"]["sparse_layers"] == 0.05
    assert sum(found["recipe"]["memory"]["parts_bytes"].values()) == max(
        found["recipe"]["memory"]["peaks_bytes"].values()
    )
    assert sum(found["recipe"]["time"]["parts_s"].values()) == pytest.approx(found["recipe"]["time"]["step_s"])
    by_gpus = {row["gpus"]: row["times_faster_than"] for row in found["table"]}
    assert set(by_gpus) == {8, 16, 32, 64, 128}
    assert 1 < by_gpus[32]["striped"] <= by_gpus[32]["zigzag"] < by_gpus[32]["dense"] < 20


@pytest.mark.parametrize(
    "words, fault",
    [
        (["--gpu", "b300"], "knows a100-40gb"),
        (["--gpus", "0"], "at least 1"),
        (["--density", "1.5"], "(0, 1]"),
        (["--gpus", "8", "parallel.cp=32"], "needs 32 processes"),
        (["--gpus", "8", "parallel.zero=9"], "parallel.zero"),
        (["--gpus", "8", "parallel.zero=1"], "nnScaler's own"),
        (["--gpus", "8192"], "at least"),
        (["model.init=null", "model.path=/nowhere"], "config.json"),
        (["model.init.vocab_size=null"], "vocab_size"),
        (["--indices", "/nowhere"], "no readable"),
        (["attention.dense_layers=[99]"], "layer 99"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, words, fault):
    assert cli.main(["plan", write(tmp_path, QWEN), *words]) == 2
    error = capsys.readouterr().err
    assert fault in error and error.count("\n") == 1


def test_estimates_of_stripes_need_no_more_than_the_layout(setting):
    way = setting("train.seq_len=500000", "train.micro_batch=2")
    assert way.tokens == 2 * Layout(seq_len=500000, world=32, inner=8).local_len
    assert Estimate.of(way, Constants.of("h200")).time.tokens == 64 * 2 * 500000
    assert resting(way) == resting(setting())
