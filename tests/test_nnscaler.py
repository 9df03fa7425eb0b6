"""Plans of stock nnScaler equal one process: loss and every gradient; on CPUs through nnscaler_cpu."""

import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch
from distributed import run_workers
from helpers import rms_ratio
from hf_tiny import FEW, SIZES, build

from mtraining_nns.loss import IGNORE
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.layout import Layout

pytestmark = [
    pytest.mark.nnscaler,
    pytest.mark.skipif(importlib.util.find_spec("nnscaler") is None, reason="nnScaler is not importable"),
]
SEQ_LEN, BATCH = 250, 2
SETTINGS = {"dense": {"pattern": "dense", "block": 16}, "sparse": FEW}


def samples(config: AttentionConfig, plan: int, replicas: int, *, striped: bool = True) -> list[dict]:
    """What each replica of a plan reads: padded, in the order of the plan's ring."""
    layout, found = Layout.of(config, SEQ_LEN, plan), []
    order = layout.permutation() if striped else torch.arange(layout.padded_len)
    for replica in range(replicas):
        g = torch.Generator().manual_seed(replica)
        ids = torch.randint(SIZES["vocab_size"], (BATCH, SEQ_LEN + 1), generator=g)
        labels = ids[:, 1:].clone()
        labels[:, replica::7] = IGNORE
        padding = (0, layout.padded_len - SEQ_LEN)
        sample = {
            "input_ids": torch.nn.functional.pad(ids[:, :-1], padding),
            "labels": torch.nn.functional.pad(labels, padding, value=IGNORE),
            "position_ids": torch.arange(layout.padded_len).repeat(BATCH, 1),
        }
        found.append({name: x[:, order].contiguous() for name, x in sample.items()})
    return found


def one_process(family: str, settings: dict, replicas: int, **fields) -> tuple[list[float], dict]:
    """(loss of each replica, gradients of their sum) with plain transformers modules around the operator."""
    from mtraining_nns.model import CausalLMLoss

    lm = build(family, settings=settings, **fields)
    model, losses = CausalLMLoss(lm), []
    for sample in samples(AttentionConfig(**settings), 1, replicas):
        part = {name: x[:, :SEQ_LEN] for name, x in sample.items()}
        loss = model(part["input_ids"], part["labels"], part["position_ids"])
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad.clone() for name, p in lm.named_parameters()}


def run_plan(rank: int, world: int, family: str, settings: dict, plan: int, folder: str, options: dict):
    """(loss of this rank's replica, {parameter: gradient}) of one step of nnScaler."""
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")  # by which nnScaler knows a launched process
    from mtraining_nns import nnscaler_cpu

    nnscaler_cpu.install()
    import nnscaler
    import torch.distributed as dist
    from nnscaler.parallel import ComputeConfig, build_optimizer, parallelize

    from mtraining_nns import nnscaler_ops
    from mtraining_nns.nnscaler_hf import TracedLoss
    from mtraining_nns.policy import context_parallel

    nnscaler.init()
    nnscaler_ops.connect(plan)
    config = AttentionConfig(**settings)
    model = TracedLoss(build(family, settings=settings, **options.get("fields", {})), config, seq_len=SEQ_LEN)
    before = {name: p.detach().clone() for name, p in model.lm.named_parameters()}
    sample = samples(config, plan, world // plan, striped=options.get("striped", True))[rank // plan]
    compute = ComputeConfig(
        plan, world, trace_strategy="cpu", use_end2end=True, constant_folding=True,
        use_zero=options.get("zero", 0), pas_config={"recompute": options.get("recompute", False)},
    )  # fmt: skip
    built = parallelize(model, {"samples": sample}, context_parallel, compute, gen_savedir=folder, reuse="override")
    optimizer = build_optimizer(built, torch.optim.SGD, lr=1.0)
    loss = built.train_step([sample])[0].item()
    optimizer.sync_shard_grad()
    optimizer.step()
    states = [None] * world
    dist.all_gather_object(states, built.state_dict())
    merged, _ = nnscaler.merge_state_dicts(states, None)
    return loss, {name: before[name] - merged[f"lm.{name}"] for name in before}


def same(found, expected, tolerance=1e-5):
    losses, grads = found[0][0], found[0][1]
    assert losses == pytest.approx(expected[0][0], rel=tolerance)
    errors = {name: rms_ratio(grads[name], grad) for name, grad in expected[1].items()}
    assert max(errors.values()) < tolerance, errors


PLANS = [
    ("qwen2", "sparse", 2, 2, {}),
    ("llama", "sparse", 2, 2, {"recompute": True, "zero": 1}),
    ("llama", "dense", 4, 4, {"zero": 3, "recompute": True}),
    ("qwen2", "sparse", 4, 2, {"zero": 1}),
    ("qwen2", "sparse", 2, 2, {"fields": {"tie_word_embeddings": True}}),
]


@pytest.mark.parametrize(("family", "pattern", "world", "plan", "options"), PLANS, ids=str)
def test_a_plan_is_one_process(family, pattern, world, plan, options, tmp_path):
    settings = SETTINGS[pattern]
    found = run_workers(run_plan, world, family, settings, plan, str(tmp_path), options)
    same(found, one_process(family, settings, world // plan, **options.get("fields", {})))
    code = "\n".join(path.read_text() for path in Path(tmp_path).rglob("gencode0.py"))
    assert "nnscaler_ops.attention" in code and not re.search(r"adapter\.all_gather", code)
    assert code.count("ckpt.checkpoint(") == (2 if options.get("recompute") else 0)


def test_tokens_in_another_order_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match="order the data by Layout.permutation"):
        run_workers(run_plan, 2, "llama", SETTINGS["sparse"], 2, str(tmp_path), {"striped": False})
