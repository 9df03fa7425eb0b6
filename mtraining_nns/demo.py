"""The whole way in minutes on two CPU processes: prepare, train, extend, export, evaluate, one table at the end.

    python -m mtraining_nns.demo                    real text: the sources of Python's standard library
    python -m mtraining_nns.demo --source DIR       any folder of text

Everything goes through the verbs of the command line, so each line it prints can be run by hand. Results: runs/demo.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

RUN = Path("runs/demo")
PACKAGES = "asyncio concurrent ctypes email http importlib json logging multiprocessing unittest urllib xml".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source", nargs="+", help="text files or folders (default: part of Python's standard library)"
    )
    parser.add_argument("--glob", default="*.py", help="files of a folder that are documents (default *.py)")
    args = parser.parse_args()
    stdlib = Path(sysconfig.get_path("stdlib"))
    sources = args.source or [str(stdlib / package) for package in PACKAGES if (stdlib / package).is_dir()]
    data, model = RUN / "data", RUN / "sparse" / "hf"

    mtraining("doctor")
    mtraining("prepare", *sources, "--glob", args.glob, "--train-bpe", 4096, "--seq-len", 2048, "--holdout", 0.04,
              "--out", data, "--overwrite")  # fmt: skip
    mtraining("train", "recipes/demo_base.yaml", "--nproc", 2)
    mtraining("train", "recipes/demo.yaml", "--nproc", 2)
    mtraining("eval", "--model", model, "--suite", "niah,perplexity", "--lengths", "1k,2k", "--depths", "0,50,100",
              "--attention", "mtraining", "--text", data / "heldout", "--out", RUN / "eval")  # fmt: skip
    print(table(model), flush=True)


def mtraining(*words) -> None:
    """Run one verb, shown as it would be typed; a failing verb ends the demo with its exit code."""
    words = [str(word) for word in words]
    print("\n$ mtraining " + shlex.join(words), flush=True)
    # The demo is small enough for CPUs and hides the GPUs, so that it is the same everywhere.
    done = subprocess.run(
        [sys.executable, "-m", "mtraining_nns.cli", *words], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    if done.returncode:
        sys.exit(done.returncode)


def table(model: Path) -> str:
    """The run in one table, from the files that the verbs left."""
    base, sparse = (json.loads((RUN / stage / "summary.json").read_text()) for stage in ("base", "sparse"))
    results = json.loads((RUN / "eval" / "results.json").read_text())
    rows = [
        ("base stage, dense, 1024 tokens: loss at first and last step", ends(base)),
        ("sparse stage, 2048 tokens: loss at first and last step", ends(sparse)),
        ("held-out loss, dense attention", f"{sparse['eval/loss_dense']:.4f}"),
        ("held-out loss, sparse attention, same weights", f"{sparse['eval/loss_sparse']:.4f}"),
        ("density of the kept pairs, mean over layers", f"{sparse['attention/density']:.3f}"),
        ("work per worker, max / mean", f"{sparse['attention/work_max_over_mean']:.3f}"),
        ("needle in a haystack, percent (0 is expected of so small a model)", f"{results['niah']['score']:.1f}"),
        ("tokens/s, dense base stage and sparse stage",
         f"{base['speed/tokens_per_s']:,.0f} {sparse['speed/tokens_per_s']:,.0f}"),
        ("largest logit difference, exported model against the checkpoint", f"{export_difference(model):.1e}"),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    files = f"model {model}, logs {RUN / 'sparse' / 'tensorboard'}, resolved recipe {RUN / 'sparse' / 'recipe.yaml'}"
    return "\n" + "\n".join(f"{name:{width}}  {value}" for name, value in rows) + "\n" + files


def ends(summary: dict) -> str:
    return f"{summary['first_loss']:.4f} {summary['last_loss']:.4f}"


def export_difference(model: Path) -> float:
    """Largest difference of logits between plain transformers on the export and the weights in training."""
    import torch
    from transformers import AutoModelForCausalLM

    from mtraining_nns.export import read_trained

    exported = AutoModelForCausalLM.from_pretrained(model).eval()
    trained = read_trained(str(RUN / "sparse"), torch.float32)
    trained.set_attn_implementation("sdpa")
    tokens = torch.arange(256)[None]
    with torch.no_grad():
        return (exported(tokens).logits - trained(tokens).logits).abs().max().item()


if __name__ == "__main__":
    main()
