"""Time and memory of compiling the plan of Qwen2.5-3B with nnScaler, on a CPU.

    python tests/bench/plan.py --layers 4 --gpus 32            524288 tokens, recomputation, ZeRO 1
    python tests/bench/plan.py --layers 36 --gpus 8

Full width, random weights in bf16. Shapes alone are traced.
"""

import argparse
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from mtraining_nns import hf, nnscaler_cpu

nnscaler_cpu.install()

from nnscaler.parallel import ComputeConfig, parallelize  # noqa: E402

from mtraining_nns.nnscaler_hf import TracedLoss  # noqa: E402
from mtraining_nns.ops.config import AttentionConfig  # noqa: E402
from mtraining_nns.parallelize import COLLECTIVE  # noqa: E402
from mtraining_nns.policy import context_parallel  # noqa: E402

WIDTH = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=524288)
    args = parser.parse_args()
    hf.register()
    config = Qwen2Config(**WIDTH, num_hidden_layers=args.layers, max_position_embeddings=args.seq_len)
    lm = Qwen2ForCausalLM._from_config(config, attn_implementation="mtraining", dtype=torch.bfloat16)
    model = TracedLoss(lm, AttentionConfig(), seq_len=args.seq_len)
    names = ("input_ids", "labels", "position_ids")
    samples = {"samples": {name: torch.zeros(1, args.seq_len, dtype=torch.long) for name in names}}
    options = {"trace_strategy": "meta", "use_end2end": True, "constant_folding": True, "use_zero": 1}
    compute = ComputeConfig(args.gpus, args.gpus, **options, pas_config={"recompute": True})
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        parallelize(model, samples, context_parallel, compute, gen_savedir=folder, load_module=False)
        seconds = time.perf_counter() - began
        code = next(Path(folder).rglob("gencode0.py")).read_text(encoding="utf-8")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{args.layers} layers, {args.gpus} GPUs, {args.seq_len} tokens: {seconds:.0f} s, {memory:.1f} GB at most,"
        f" collectives of activations {dict(Counter(COLLECTIVE.findall(code)))}"
    )


if __name__ == "__main__":
    main()
