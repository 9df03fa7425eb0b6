"""Two GPUs: a ring over NCCL equals one GPU for every pattern, layout and backend, and a stalled peer is named."""

import json
import os
import time
from functools import partial

import pytest
import torch
from distributed import run_workers
from helpers import make_qkv, rms_ratio, with_grads
from kernel_cases import module_of
from test_row_patterns import FEW

from mtraining_nns.engines.world import settle, start
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import LAYOUTS, AttentionConfig
from mtraining_nns.ops.ring import Ring
from mtraining_nns.sections import ParallelConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SEQ_LEN, TIMEOUT_S = 4000, 5
PATTERNS = {
    "dense": {"pattern": "dense"},
    "vertical_slash": {"budget": "fixed", "k_v": 100, "k_s": 6, "local": 128, "last_q": 64},
    **{name: {**few, "stride": 16, "chunk": 384} for name, few in FEW.items()},
}
LEVELS = [{}, {"mode": "gather"}, {"inner": 1}, {"inner": 2}, {"inner": 1, "mode": "gather"}]


def settings_of(backend: str) -> list[dict]:
    names = ("dense", "vertical_slash") if backend == "cute" else PATTERNS
    return [{**PATTERNS[name], "layout": kind, "block": 128, "backend": backend} for name in names for kind in LAYOUTS]


def run_settings(rank: int, world: int, backend: str) -> list[tuple[str, float]]:
    """What was run, and the largest RMS ratio of this rank's out, dq, dk and dv against one GPU."""
    found, inputs = [], make_qkv(SEQ_LEN, 8, 2, 64, batch=2, dtype=torch.bfloat16, device="cuda")
    rings = [Ring.create(world, **levels) for levels in LEVELS]
    for settings in settings_of(backend):
        config = AttentionConfig(**settings)
        expected = with_grads(Operator(config, Ring.single(), "cuda"), *inputs)
        for levels, ring in zip(LEVELS, rings):
            op = Operator(config, ring, "cuda")
            layout = op.layout(SEQ_LEN)
            got = with_grads(partial(op, seq_len=SEQ_LEN), *(layout.shard(x, ring.rank) for x in inputs))
            real = layout.positions(ring.rank, "cuda") < SEQ_LEN
            wanted = {name: layout.shard(x, ring.rank) for name, x in expected.items()}
            worst = max(rms_ratio(x[:, real], wanted[name][:, real]) for name, x in got.items())
            found.append((f"{levels} {settings}", worst))
    return found


@pytest.mark.parametrize("backend", ["triton", "cute"])
def test_two_gpus_are_one(backend):
    module_of(backend)
    for found in run_workers(run_settings, 2, backend, backend="nccl", timeout_s=300):
        assert not [(case, worst) for case, worst in found if not worst < 5e-3]


def run_stalled(rank: int, world: int, folder: str) -> None:
    os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(folder, str(rank))
    parallel = ParallelConfig(cp=world, timeout_s=TIMEOUT_S, warmup_timeout_s=120)
    with start(parallel) as place:
        op = Operator(AttentionConfig(block=128, backend="triton", **PATTERNS["vertical_slash"]), place.ring, "cuda")
        local = [op.layout(SEQ_LEN).shard(x, rank) for x in make_qkv(SEQ_LEN, 2, 1, 64, device="cuda")]

        def layer(number: int) -> None:
            with_grads(partial(op, layer=number, seq_len=SEQ_LEN), *local)

        layer(0)
        settle(place, parallel)
        layer(1)
        torch.cuda.synchronize()
        if rank == 1:
            time.sleep(4 * TIMEOUT_S)
            os._exit(1)
        began = time.time()
        with open(os.path.join(folder, "began"), "w", encoding="utf-8") as file:
            json.dump(began, file)
        layer(2)
        torch.cuda.synchronize()


def test_a_stalled_gpu_is_named(tmp_path):
    run_workers(run_stalled, 2, str(tmp_path), backend="nccl", may_die=(0, 1))
    message = json.loads((tmp_path / "0").read_text())["message"]
    seconds = message["extraInfo"]["seconds"] - json.loads((tmp_path / "began").read_text())
    assert TIMEOUT_S <= seconds < 3 * TIMEOUT_S
    assert "layer 2" in message["message"]
    assert "rank 0" in message["message"] and ("rank 1" in message["message"] or "(0, 1)" in message["message"])
