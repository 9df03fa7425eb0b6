"""A recipe straight through, then the same recipe killed and started again: same weights, same order of data?

    python tests/bench/endurance.py recipes/demo_base.yaml --nproc 2 --kills 5 train.steps=100 checkpoint.every=10
    python tests/bench/endurance.py RECIPE_64K --nproc 8 --kills 5 --straight 3 train.steps=100 checkpoint.every=10

Every kill is a SIGKILL to the launcher's and its workers' process groups, at a random moment after a random step. On
CPUs the weights are equal to the bit. Where sums have no fixed order, as on GPUs, --straight 3 says how far straight
runs are from each other, and the killed run has to be as near to them: within twice their largest distance.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--straight", type=int, default=1, help="straight runs; more where sums have no fixed order")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--out", type=Path, default=Path("runs/endurance"))
    args = parser.parse_intermixed_args()
    if args.out.exists():
        parser.error(f"--out {args.out} exists; remove it or give another folder")
    runs = [args.out / f"straight-{number}" for number in range(args.straight)]
    seconds = [straight(folder, args) for folder in runs]
    killed = args.out / "killed"
    kills, wall_s = endure(killed, args, step_s=seconds[0] / steps_of(runs[0]))
    rows = [*kills, *compare(killed, runs), ("seconds, straight and killed", f"{seconds[0]:.0f} {wall_s:.0f}")]
    print("\n" + "\n".join(f"{name:52s}  {value}" for name, value in rows))
    return 0 if passed(killed, runs) else 1


def start(folder: Path, args) -> subprocess.Popen:
    """The recipe in a folder, in a process group of its own; its lines can be read."""
    changes = [*args.overrides, f"checkpoint.dir={folder}", "log.every=1", "log.batches=true"]
    line = [sys.executable, "-m", "mtraining_nns.cli", "train", args.recipe, "--nproc", str(args.nproc), *changes]
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, errors="replace"
    )


def straight(folder: Path, args) -> float:
    """A run that nobody disturbs; its seconds."""
    began, process = time.monotonic(), start(folder, args)
    said = process.stdout.read()
    if process.wait():
        sys.exit(f"the straight run failed:\n{said[-3000:]}")
    print(f"{folder}: {time.monotonic() - began:.0f} s", flush=True)
    return time.monotonic() - began


def endure(folder: Path, args, step_s: float) -> tuple[list[tuple[str, str]], float]:
    """Kill the run at random moments, then let it end: a row a kill, and the seconds of all."""
    chance, began, rows = random.Random(args.seed), time.monotonic(), []
    steps = steps_of(args.out / "straight-0")
    for number, at in enumerate(sorted(chance.sample(range(1, steps), args.kills))):
        wait_s = chance.uniform(0, 2 * step_s)
        process, said = start(folder, args), []
        for text in process.stdout:
            said.append(text)
            if text.startswith("step ") and "/" in text and int(text.split()[1].split("/")[0]) >= at:
                break
        else:
            sys.exit(f"the run ended before step {at}:\n{''.join(said)[-3000:]}")
        time.sleep(wait_s)
        kill(process)
        resumed = next((text.split(";")[0].strip() for text in said if text.startswith("resumed ")), "from the start")
        rows.append((f"kill {number + 1}, {wait_s:.2f} s after step {at}", resumed))
        print(*rows[-1], flush=True)
    process = start(folder, args)
    said = process.stdout.read()
    if process.wait():
        sys.exit(f"the run after the last kill failed:\n{said[-3000:]}")
    rows.insert(0, ("steps, kills, seed", f"{steps} {args.kills} {args.seed}"))
    return rows, time.monotonic() - began


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to the launcher's group and to its workers', all at once; returns when they are gone."""
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for group in (process.pid, *map(int, workers)):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    process.stdout.close()
    process.wait()
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        time.sleep(0.05)


def steps_of(folder: Path) -> int:
    return json.loads((folder / "summary.json").read_text())["steps"]


def weights(folder: Path) -> torch.Tensor:
    """All weights of a run's export, one after another."""
    files = sorted((folder / "hf").glob("*.safetensors"))
    return torch.cat([x.flatten().float() for file in files for _, x in sorted(load_file(file).items())])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def batches(folder: Path) -> dict[int, set[tuple]]:
    """What was read at each step, by all processes that made it."""
    found: dict[int, set[tuple]] = {}
    for line in (folder / "batches.jsonl").read_text().splitlines():
        with suppress(ValueError):  # the last line before a kill may be cut
            entry = json.loads(line)
            found.setdefault(entry["step"], set()).add((entry["samples"], entry["batch"]))
    return found


def spread(runs: list[Path]) -> float:
    """Largest distance of two straight runs, 0 for one."""
    return max((distance(weights(a), weights(b)) for a in runs for b in runs if a != b), default=0.0)


def passed(killed: Path, runs: list[Path]) -> bool:
    far = min(distance(weights(killed), weights(run)) for run in runs)
    return batches(killed) == batches(runs[0]) and far <= 2 * spread(runs)


def compare(killed: Path, runs: list[Path]) -> list[tuple[str, str]]:
    ours, theirs = (json.loads((folder / "summary.json").read_text())["losses"] for folder in (killed, runs[0]))
    far = min(distance(weights(killed), weights(run)) for run in runs)
    again = sum(1 for _ in (killed / "batches.jsonl").open()) - len(ours)
    differ = [step for step, read in batches(runs[0]).items() if batches(killed).get(step) != read]
    return [
        ("steps made twice", str(again)),
        ("steps that read other data than the straight run", str(len(differ))),
        ("largest difference of a loss", f"{max(abs(a - b) for a, b in zip(ours, theirs, strict=True)):.1e}"),
        ("weights, relative distance to the straight run", f"{far:.1e}" if far else "0, equal to the bit"),
        (f"the same among {len(runs)} straight runs", f"{spread(runs):.1e}" if len(runs) > 1 else "not measured"),
        ("passed", str(passed(killed, runs))),
    ]


if __name__ == "__main__":
    sys.exit(main())
