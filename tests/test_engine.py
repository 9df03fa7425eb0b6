"""The torch engine: the same loss, gradients and updates on any number of ranks, and what it refuses."""

import json
import math
import os
import time

import pytest
import torch
import yaml
from distributed import run_workers
from tiny import write_recipe

from mtraining_nns.errors import UserError
from mtraining_nns.loss import IGNORE, token_losses
from mtraining_nns.recipe import Recipe

TOLERANCE = 1e-5  # RMS error ratio, fp32

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def ratio(x, ref):
    return ((x - ref).square().mean() / ref.square().mean()).sqrt().item()


def build(recipe, world):
    from mtraining_nns.engines.torch import build_sharded

    model, operator = build_sharded(recipe, world, load=False)
    model.train()
    return model, operator


def gradients(rank, world_size, path, overrides=(), labels=None):
    """(loss, {name: full gradient}) of step 0; labels: changes (sample, from, to) that the collator's labels get."""
    from mtraining_nns import hf
    from mtraining_nns.engines.feed import Feed
    from mtraining_nns.engines.world import layout_of, start

    recipe = Recipe.load(path, overrides).resolve(world_size)
    with start(recipe.parallel) as world:
        model, _ = build(recipe, world)
        layout = layout_of(recipe, world.ring)
        batches = Feed(recipe, world, layout).batches(0)
        for turn, batch in enumerate(batches):
            position = layout.positions(world.ring.rank, world.device)
            sample = turn * recipe.parallel.dp + world.dp_rank
            for changed, first, last in labels or ():
                if sample == changed:
                    batch["labels"][:, (position >= first) & (position < last)] = IGNORE
        valid = world.sum(torch.stack([(b["labels"] != IGNORE).sum() for b in batches]).sum())
        total = torch.zeros((), device=world.device)
        with hf.sequence(model.lm, seq_len=recipe.train.seq_len):
            for batch in batches:
                loss = model(**batch) / valid
                loss.backward()
                total += loss.detach()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        grads = {name: p.grad.full_tensor().cpu() for name, p in model.lm.named_parameters()}
        return world.sum(total).cpu(), grads if rank == 0 else None


def same(found, expected, tolerance=TOLERANCE):
    assert ratio(found[0], expected[0]) < tolerance
    worst = {name: ratio(grad, expected[1][name]) for name, grad in found[1].items()}
    assert max(worst.values()) < tolerance, worst


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engine")


@pytest.mark.parametrize("pattern", ["dense", "vertical_slash"])
def test_every_split_gives_the_gradients_of_one_process(folder, pattern):
    path = write_recipe(folder, f"attention.pattern={pattern}")
    expected = run_workers(gradients, 1, path, ["train.accumulation=2"])[0]
    for cp, dp, zero in ((2, 1, 3), (4, 1, 2), (2, 2, 3)):
        split = [f"parallel.cp={cp}", f"parallel.dp={dp}", f"parallel.zero={zero}", f"train.accumulation={2 // dp}"]
        same(run_workers(gradients, cp * dp, path, split)[0], expected)


@pytest.mark.parametrize("mode", ["ring", "gather"])
def test_hierarchical_rings_give_the_gradients_of_one_process(folder, mode):
    """Two rings of 2 x 2, each on nodes of its own, with recomputation."""
    path = write_recipe(folder, "train.seq_len=600", "train.recompute=true")
    expected = run_workers(gradients, 1, path, ["train.accumulation=2"])[0]
    split = ["parallel.cp=4", "parallel.dp=2", "parallel.inner=2", f"parallel.inner_mode={mode}"]
    same(run_workers(gradients, 8, path, split)[0], expected)


def on_nodes(rank, world_size, path, nodes, overrides):
    """The ring of a rank that a launcher's agent started on a node."""
    from mtraining_nns.engines.world import start

    os.environ["GROUP_RANK"] = nodes[rank]
    try:
        with start(Recipe.load(path, overrides).resolve(world_size).parallel) as world:
            ring = world.ring
            return world.about, ring.ranks, ring.inner and ring.inner.ranks, ring.outer and ring.outer.ranks
    except UserError as error:
        return str(error)


def test_nodes_make_the_ring(folder):
    path = write_recipe(folder)
    about, ring, inner, outer = run_workers(on_nodes, 6, path, "000111", [])[4]
    assert "2 nodes x 3, gathered within" in about
    assert (ring, inner, outer) == ((0, 1, 2, 3, 4, 5), (3, 4, 5), (1, 4))
    about, _, _, outer = run_workers(on_nodes, 5, path, "00111", [])[0]
    assert outer is None and "flat" in about and ":0 2" in about and ":1 3" in about
    refused = run_workers(on_nodes, 5, path, "00111", ["parallel.ring=hierarchical"])
    assert all("needs every ring on several nodes" in error and ":1 3" in error for error in refused)


def slow_steps(rank, world_size, path):
    """Rank 1 is late in every step: (step, seconds, error) in which rank 0 gives up on it."""
    from mtraining_nns.engines import torch as engine

    train_step, begun = engine.train_step, []

    def late(*args, step, **more):
        begun.append((step, time.monotonic()))
        if rank == 1:
            time.sleep(6 if step == 0 else 12)
        return train_step(*args, step=step, **more)

    engine.train_step = late
    try:
        engine.train(Recipe.load(path).resolve(world_size))
    except RuntimeError as error:
        return begun[-1][0], time.monotonic() - begun[-1][1], str(error)
    raise AssertionError("no error")


def test_the_first_step_may_take_longer_than_others(tmp_path):
    """A rank that compiles for longer than the time-out of an exchange; later the same is an error."""
    path = write_recipe(tmp_path, "parallel.timeout_s=3", "parallel.warmup_timeout_s=60")
    step, seconds, error = run_workers(slow_steps, 2, path)[0]
    assert step == 1 and seconds < 10, error
    assert "rank" in error or "imed out" in error, error


def test_recompute_and_zigzag_change_nothing(folder):
    path = write_recipe(folder, "attention.pattern=dense")
    expected = run_workers(gradients, 1, path)[0]
    same(run_workers(gradients, 2, path, ["attention.layout=zigzag", "train.recompute=true"])[0], expected)


def test_bf16_is_as_exact_on_two_ranks_as_on_one(folder):
    path = write_recipe(folder, "attention.pattern=dense")
    exact = run_workers(gradients, 1, path)[0]
    one, two = (run_workers(gradients, world, path, ["train.precision=bf16"])[0] for world in (1, 2))
    for name, ref in exact[1].items():
        assert 0 < ratio(two[1][name], ref) < 1.5 * ratio(one[1][name], ref), name


@pytest.mark.gpu
def test_inputs_in_host_memory_change_no_gradient(folder):
    path = write_recipe(folder, "attention.block=64", "train.recompute=true")
    plain, offloaded = (
        run_workers(gradients, 1, path, [f"train.offload_inputs={on}"], backend="nccl")[0] for on in ("false", "true")
    )
    assert torch.equal(plain[0], offloaded[0])
    assert all(torch.equal(grad, offloaded[1][name]) for name, grad in plain[1].items())


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["false", "true"])
def test_liger_kernels_give_the_gradients_of_torch(folder, recompute):
    pytest.importorskip("liger_kernel")
    path = write_recipe(folder, "attention.block=64", f"train.recompute={recompute}")
    expected, found = (
        run_workers(gradients, 1, path, [f"train.kernels={kernels}"], backend="nccl")[0]
        for kernels in ("torch", "liger")
    )
    same(found, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("key", ["train.offload_inputs=true", "train.kernels=liger"])
def test_what_needs_a_gpu_says_so(folder, key):
    path = write_recipe(folder, "train.recompute=true", key)
    with pytest.raises(RuntimeError, match=f"UserError: {key} .* GPU, this run has none; "):
        run_workers(gradients, 1, path)


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("pattern", ["dense", "vertical_slash"])
def test_two_gpus_give_the_gradients_of_one(folder, pattern):
    path = write_recipe(folder, f"attention.pattern={pattern}", "train.recompute=true", "train.accumulation=2")
    expected = run_workers(gradients, 1, path, backend="nccl")[0]
    for dp in (1, 2):
        split = [f"parallel.dp={dp}", f"train.accumulation={2 // dp}"]
        same(run_workers(gradients, 2, path, split, backend="nccl")[0], expected, tolerance=1e-3)


@pytest.mark.gpu
@two_gpus
def test_two_gpus_train_resume_and_export(tmp_path):
    path = write_recipe(tmp_path, "train.precision=bf16", f"data.eval_path={tmp_path / 'data'}", "train.recompute=true")
    run_workers(run_engine, 2, path, ["train.steps=2"], backend="nccl")
    summary = run_workers(run_engine, 2, path, backend="nccl")[0]
    assert len(summary["losses"]) == 4 and all(map(math.isfinite, summary["losses"]))
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


@pytest.mark.parametrize("seq_len, world", [(999, 4), (263, 8)])
def test_ragged_lengths_are_padded_and_masked(folder, seq_len, world):
    path = write_recipe(folder, f"train.seq_len={seq_len}", "attention.block=16")
    same(run_workers(gradients, world, path)[0], run_workers(gradients, 1, path)[0])


@pytest.mark.parametrize("seq_len, world", [(10, 3), (2, 3)])
def test_too_short_a_sequence_is_refused_before_the_launch(folder, seq_len, world):
    recipe = Recipe.load(write_recipe(folder), [f"train.seq_len={seq_len}"])
    with pytest.raises(UserError, match="train.seq_len must be at least"):
        recipe.resolve(world)


# Sample 0: two valid labels. Sample 1: everything on ring rank 0 (stripes 0, 2, ...) ignored. Sample 2: all ignored.
UNEVEN = [(0, 0, 253), *((1, start, start + 32) for start in range(0, 256, 64)), (2, 0, 256)]


@pytest.mark.parametrize("split", [["parallel.dp=2", "train.accumulation=2"], ["train.accumulation=4"]])
def test_unequal_label_counts(folder, split):
    path = write_recipe(folder)
    expected = run_workers(gradients, 1, path, ["train.accumulation=4"], UNEVEN)[0]
    found = run_workers(gradients, 4 if "parallel.dp=2" in split else 2, path, split, UNEVEN)[0]
    assert math.isfinite(found[0])
    same(found, expected)


def local_token_losses(rank, world_size, path):
    """This rank's labels and token losses of sample 0."""
    from mtraining_nns import hf
    from mtraining_nns.engines.feed import place
    from mtraining_nns.engines.world import layout_of, start

    recipe = Recipe.load(path, ["train.seq_len=300", "model.init.vocab_size=512"]).resolve(world_size)
    with start(recipe.parallel) as world:
        model, _ = build(recipe, world)
        layout = layout_of(recipe, world.ring)
        batch = place(torch.arange(300).unsqueeze(0), layout, world)
        model.forward = lambda input_ids, labels, position_ids: token_losses(
            model.lm.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)[0],
            model.lm.lm_head.weight,
            labels,
            chunk=50,
        )
        with hf.sequence(model.lm, seq_len=300), torch.no_grad():
            return layout, batch["labels"], model(**batch)


def test_each_token_predicts_the_next_global_token(folder):
    path = write_recipe(folder)
    [(alone, _, expected)] = run_workers(local_token_losses, 1, path)
    ranks = run_workers(local_token_losses, 3, path)
    layout = ranks[0][0]
    labels = layout.unshard([labels for _, labels, _ in ranks])
    assert labels[0, :-1].tolist() == list(range(1, 300)) and labels[0, -1] == IGNORE
    assert sum((labels != IGNORE).sum().item() for _, labels, _ in ranks) == 299
    assert ratio(layout.unshard([losses for _, _, losses in ranks]), alone.unshard([expected])) < TOLERANCE


def clipped_update(rank, world_size, path, overrides):
    """Norm that clipping reports, and the clipped gradient, for gradients of one on 100 weights."""
    from torch.distributed.fsdp import fully_shard

    from mtraining_nns.engines.world import start
    from mtraining_nns.optim import clip_gradients

    recipe = Recipe.load(path, overrides).resolve(world_size)
    with start(recipe.parallel) as world:
        model = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.Linear(5, 4), torch.nn.Linear(3, 2, bias=False))
        fully_shard(model, mesh=world.mesh, reshard_after_forward=recipe.parallel.zero == 3)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        norm = clip_gradients(model, 1.0)
        return norm, torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])


@pytest.mark.parametrize("zero", [2, 3])
def test_norm_of_known_gradients(folder, zero):
    path = write_recipe(folder)
    for norm, grad in run_workers(clipped_update, 4, path, ["parallel.dp=2", f"parallel.zero={zero}"]):
        assert norm == pytest.approx(10.0, rel=1e-6)
        assert torch.allclose(grad, torch.full((100,), 0.1))


def read_other_tokens(rank, world_size):
    from mtraining_nns.engines.feed import check_same_tokens
    from mtraining_nns.engines.world import start
    from mtraining_nns.sections import ParallelConfig

    with start(ParallelConfig(cp=2, dp=2)) as world:
        check_same_tokens(torch.full((1, 8), world.dp_rank), world, step=0)  # rings may differ, ranks of one may not
        check_same_tokens(torch.full((1, 8), rank // 3), world, step=1)


def test_ranks_of_one_ring_that_read_other_tokens_are_named():
    with pytest.raises(RuntimeError, match=r"step 1: ranks \[3\] read other tokens than rank 2"):
        run_workers(read_other_tokens, 4)


def test_recompute_with_ties_gives_the_gradients_to_the_bit(folder):
    path = write_recipe(folder, "attention.k_s=1")
    tokens = folder / "data" / "tokens.bin"
    before = tokens.read_bytes()
    tokens.write_bytes(b"\x05\x00" * (len(before) // 2))  # constant rows: every score ties with every other
    ways = (["train.recompute=false"], ["train.recompute=true"], ["train.recompute=true", "attention.keep_output=true"])
    try:
        plain, *others = (run_workers(gradients, 4, path, way)[0] for way in ways)
    finally:
        tokens.write_bytes(before)
    for again in others:
        assert torch.equal(plain[0], again[0])
        assert all(torch.equal(grad, again[1][name]) for name, grad in plain[1].items())


def run_engine(rank, world_size, path, overrides=()):
    from mtraining_nns import engines

    return engines.train(Recipe.load(path, overrides).resolve(world_size))


def test_a_run_writes_its_summary_and_both_held_out_losses(tmp_path):
    path = write_recipe(tmp_path, "parallel.dp=2", "train.recompute=true")
    overrides = [f"data.eval_path={tmp_path / 'data'}", "log.eval_every=2", "checkpoint.every=3"]
    ranks = run_workers(run_engine, 4, path, overrides)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == ranks[0] and summary["losses"] == ranks[3]["losses"] and len(summary["losses"]) == 4
    assert summary["eval/loss_dense"] != summary["eval/loss_sparse"]
    assert abs(summary["eval/loss_dense"] - summary["eval/loss_sparse"]) < 1
    assert 0 < summary["attention/density"] < 1 <= summary["attention/work_max_over_mean"] < 2
    assert any((tmp_path / "run" / "tensorboard").iterdir())
    assert sorted(p.name for p in (tmp_path / "run").glob("step-*")) == ["step-000003", "step-000004"]


def test_a_loss_that_is_not_finite_names_the_step_and_its_samples(tmp_path):
    path = write_recipe(tmp_path, "train.lr=1e30", "parallel.cp=1")
    with pytest.raises(RuntimeError, match=r"step 1: loss nan, gradient norm nan, samples \[\d\] of "):
        run_workers(run_engine, 1, path)


def test_a_model_that_the_operator_refuses_is_the_users_error(tmp_path):
    path = write_recipe(tmp_path)
    tree = yaml.safe_load(open(path))
    tree["model"]["init"].update(model_type="qwen2", use_sliding_window=True, max_window_layers=0)
    tree["model"]["init"].pop("head_dim")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(RuntimeError, match="UserError: the model uses sliding-window attention"):
        run_workers(run_engine, 1, path)
