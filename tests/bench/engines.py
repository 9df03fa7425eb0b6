"""One recipe on both engines, one after the other: losses, tokens a second and memory side by side.

    python tests/bench/engines.py recipes/smollm2_135m_32k.yaml --nproc 2 train.steps=10 train.accumulation=1

Each engine trains in a folder of its own under --out. Tokens a second leave the first two steps out.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ENGINES = ("torch", "nnscaler")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("--nnscaler", nargs="+", default=[], metavar="K=V", help="of nnScaler alone: parallel.zero=1")
    parser.add_argument("--out", type=Path, default=Path("runs/engines"))
    args = parser.parse_intermixed_args()
    found = {engine: run(engine, args) for engine in ENGINES}
    ours, theirs = (found[engine] for engine in ENGINES)
    pairs = list(zip(ours["losses"], theirs["losses"], strict=True))
    for step, (a, b) in enumerate(pairs, 1):
        print(f"step {step:3d}  loss torch {a:.5f}  nnscaler {b:.5f}  ratio - 1 {b / a - 1:+.1e}")
    for tag in ("speed/tokens_per_s", "memory/peak_gb"):
        a, b = ours[tag], theirs[tag]
        print(f"{tag:20s}  torch {a:,.1f}  nnscaler {b:,.1f}  ratio {b / a:.3f}")
    print(f"largest difference of a loss {max(abs(b / a - 1) for a, b in pairs):.1e}")


def run(engine: str, args) -> dict:
    """summary.json of the recipe on an engine."""
    folder = args.out / engine
    changes = [*args.overrides, f"parallel.engine={engine}", f"checkpoint.dir={folder}", "checkpoint.resume=never"]
    changes += args.nnscaler if engine == "nnscaler" else []
    line = [sys.executable, "-m", "mtraining_nns.cli", "train", args.recipe, "--nproc", str(args.nproc), *changes]
    subprocess.run(line, check=True)
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
