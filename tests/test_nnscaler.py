"""Plans of stock nnScaler equal one process: loss and every gradient; on CPUs through nnscaler_cpu."""

import importlib.util
import os
import re
import subprocess
import sys
import traceback
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
ROOT = Path(__file__).parents[1]
SEARCH = {  # of nnScaler's own policy, which others do not read
    "partition_constraints_path": str(ROOT / "recipes" / "autodist.yaml"),
    "mem_constraint": 8,
    "parallel_profile": False,
}
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


def make(family: str, settings: dict, **fields):
    """What nnScaler compiles, with weights that depend on the family alone."""
    import custom_model

    from mtraining_nns.nnscaler_hf import TracedLoss

    config = AttentionConfig(**settings)
    if hasattr(custom_model, family):
        return getattr(custom_model, family)(config, seq_len=SEQ_LEN)
    return TracedLoss(build(family, settings=settings, **fields), config, seq_len=SEQ_LEN)


def run_one_process(rank: int, world: int, family: str, settings: dict, replicas: int, fields: dict):
    """(loss of replica 0, gradients of the sum of all replicas' losses), without nnScaler's tracer."""
    from mtraining_nns import nnscaler_ops
    from mtraining_nns.model import CausalLMLoss

    nnscaler_ops.connect(1)
    model, losses = make(family, settings, **fields), []
    if hasattr(model, "lm"):  # the operator itself, plain transformers around it
        lm = build(family, settings=settings, **fields)
        loss_of = CausalLMLoss(lm)
        model.lm = lm
    for sample in samples(AttentionConfig(**settings), 1, replicas):
        if hasattr(model, "lm"):
            loss = loss_of(*(sample[name][:, :SEQ_LEN] for name in ("input_ids", "labels", "position_ids")))
        else:
            loss = model(sample)
        loss.backward()
        losses.append(loss.item())
    return losses[0], {name: p.grad for name, p in model.named_parameters()}


def policy_of(name: str):
    from nnscaler.policies import OpPlan, get_pas_ops

    from mtraining_nns import policy

    if name == "autodist":
        return name
    if name == "replicated":
        return lambda graph, cfg: (OpPlan(node) for node in get_pas_ops(graph))
    return getattr(policy, name)


def run_plan(rank: int, world: int, family: str, settings: dict, plan: int, folder: str, options: dict):
    """(loss of this rank's replica, {parameter: gradient}) of one step of nnScaler."""
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")  # by which nnScaler knows a launched process
    from mtraining_nns import nnscaler_cpu

    nnscaler_cpu.install()
    import nnscaler
    import torch.distributed as dist
    from nnscaler.parallel import ComputeConfig, build_optimizer, parallelize

    from mtraining_nns import nnscaler_ops

    nnscaler.init()
    nnscaler_ops.connect(options.get("ring", plan))
    config = AttentionConfig(**settings)
    model = make(family, settings, **options.get("fields", {}))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sample = samples(config, plan, world // plan, striped=options.get("striped", True))[rank // plan]
    compute = ComputeConfig(
        plan, world, trace_strategy="cpu", use_end2end=True, constant_folding=True,
        use_zero=options.get("zero", 0), pas_config={"recompute": options.get("recompute", False), **SEARCH},
    )  # fmt: skip
    policy = policy_of(options.get("policy", "context_parallel"))
    built = parallelize(model, {"samples": sample}, policy, compute, gen_savedir=folder, reuse="override")
    optimizer = build_optimizer(built, torch.optim.SGD, lr=1.0)
    loss = built.train_step([sample])[0].item()
    optimizer.sync_shard_grad()
    optimizer.step()
    states = [None] * world
    dist.all_gather_object(states, built.state_dict())
    merged, _ = nnscaler.merge_state_dicts(states, None)
    return loss, {name: p - merged[name] for name, p in before.items()}


def same(found, expected, tolerance=1e-5):
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    errors = {name: rms_ratio(found[1][name], grad) for name, grad in expected[1].items()}
    assert max(errors.values()) < tolerance, errors


PLANS = [
    ("qwen2", "sparse", 2, 2, {}),
    ("llama", "sparse", 2, 2, {"recompute": True, "zero": 1}),
    ("llama", "dense", 4, 4, {"recompute": True, "zero": 3}),
    ("qwen2", "sparse", 4, 2, {"zero": 1}),
    ("qwen2", "sparse", 2, 2, {"fields": {"tie_word_embeddings": True}}),
    ("Custom", "sparse", 2, 2, {"recompute": True}),
    ("Custom", "dense", 4, 4, {"zero": 1}),
    ("Custom", "sparse", 2, 2, {"policy": "autodist"}),
    ("llama", "sparse", 2, 2, {"policy": "autodist"}),
]


@pytest.mark.parametrize(("family", "pattern", "world", "plan", "options"), PLANS, ids=str)
def test_a_plan_is_one_process(family, pattern, world, plan, options, tmp_path):
    settings = SETTINGS[pattern]
    found = run_workers(run_plan, world, family, settings, plan, str(tmp_path), options)
    replicas, fields = world // plan, options.get("fields", {})
    same(found[0], run_workers(run_one_process, 1, family, settings, replicas, fields)[0])
    code = "\n".join(path.read_text() for path in Path(tmp_path).rglob("gencode0.py"))
    assert "nnscaler_ops.attention" in code and not re.search(r"adapter\.all_gather", code)
    assert code.count("ckpt.checkpoint(") == (2 if options.get("recompute") else 0)


REFUSED = [
    ("llama", {"striped": False}, "order the data by Layout.permutation of a ring of plan_ngpus ranks"),
    ("Custom", {"striped": False, "policy": "autodist"}, "order the data by Layout.permutation"),
    ("llama", {"ring": 1}, r"no ring of ranks \(0, 1\), there are .*call nnscaler_ops.connect\(plan_ngpus\)"),
    ("llama", {"policy": "replicated"}, "is replicated over 2 GPUs, expected its tokens"),
    ("Unknown", {}, "does not know how torch.unflatten can be cut .*register_op; from .*custom_model.py"),
    ("Numbered", {}, "would cut its input .* make it of samples.'position_ids'.*custom_model.py"),
    ("Mixing", {}, "softmax cannot be cut along the tokens .*custom_model.py"),
]


def run_refused(*args) -> str:
    """The error of `run_plan` on this rank, with its cause."""
    try:
        run_plan(*args)
    except RuntimeError:
        return traceback.format_exc()
    return "nothing was refused"


@pytest.mark.parametrize(("family", "options", "message"), REFUSED, ids=str)
def test_what_would_train_something_else_is_refused(family, options, message, tmp_path):
    errors = run_workers(run_refused, 2, family, SETTINGS["sparse"], 2, str(tmp_path), options)
    assert any(re.search(message, error, re.DOTALL) for error in errors), errors


def test_the_example_trains(tmp_path):
    """20 steps on two processes under torchrun: the loss falls."""
    from mtraining_nns.data.prepare import PrepareConfig, prepare

    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "squares.txt").write_text("".join(f"{n * n} is the square of {n}. " for n in range(4000)))
    prepare(PrepareConfig(sources=(str(tmp_path / "text"),), out=str(tmp_path / "data"), train_bpe=300))
    script = Path(__file__).parents[1] / "recipes" / "custom_model" / "train.py"
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), str(tmp_path / "data")]
    line += ["--code", str(tmp_path / "code")]
    # then another length, and the first again: code and initial weights are those of the length
    told = []
    for length, steps in ((500, 20), (256, 1), (500, 1)):
        run = [*line, "--seq-len", str(length), "--steps", str(steps)]
        done = subprocess.run(run, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        told.append([float(x) for x in re.findall(r"loss ([0-9.]+)", done.stdout)])
    assert len(told[0]) == 20 and told[0][-1] < told[0][0] - 1
    assert told[2] == told[0][:1] != told[1]


def test_the_verb_prints_the_plan(tmp_path):
    """In a process of its own, since the shim stays."""
    line = [sys.executable, "-m", "mtraining_nns.cli", "parallelize", "custom_model:Custom", "--world", "4"]
    line += ["--seq-len", "500", "--out", str(tmp_path), "attention.block=16"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    for words in ("500 in 512 places, 128 a GPU", "2 attention", "3 chunk, 1 allreduce_identity", "parameters"):
        assert words in done.stdout, done.stdout
    assert len(list(tmp_path.rglob("gencode?.py"))) == 4


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("custom_model:Mixing", ["cannot be parallelised: torch", "softmax cannot be cut", "custom_model.py"]),
        (
            "custom_model:Looking",
            ["cannot be parallelised", "custom_model.py, line", "if x.mean() > 0", "may not look"],
        ),
        ("custom_model:Nothing", ["cannot be made", "has no attribute 'Nothing'"]),
        ("custom_model", ["expected package.module:Model, got 'custom_model'"]),
        ("os:getcwd", ["os:getcwd cannot be made: TypeError"]),
    ],
)
def test_what_cannot_be_parallelised_is_one_line(model, words, tmp_path):
    line = [sys.executable, "-m", "mtraining_nns.cli", "parallelize", model, "--world", "2", "--seq-len", "500"]
    done = subprocess.run([*line, "--out", str(tmp_path)], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 2 and all(word in done.stderr.splitlines()[-1] for word in words), done.stderr
    assert "Traceback" not in done.stderr
