"""Throughput of `mtraining prepare` beside that of the tokenizer alone, on the same text, one after the other.

    python tests/bench/prepare.py SOURCE... --tokenizer DIR DIR --glob '*.py' --seq-len 524288

The tokenizer alone: `encode_batch` of the tokenizers library on batches of documents, all its threads, without reading
the text. prepare: everything, from the start of the command to the finished folder. Other load on the machine disturbs
both; the ratio of their CPU times tells how much work there is beside the tokenizer's.
"""

import argparse
import contextlib
import resource
import tempfile
import time
from pathlib import Path

from mtraining_nns.data import tokenizer
from mtraining_nns.data.prepare import PrepareConfig, prepare
from mtraining_nns.data.sources import Sources
from mtraining_nns.data.tokenise import Unread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--tokenizer", nargs="+", required=True)
    parser.add_argument("--glob", default="*")
    parser.add_argument("--max-bytes", type=int)
    parser.add_argument("--seq-len", type=int, default=524288)
    parser.add_argument("--pack", default="stream")
    parser.add_argument("--out", type=Path, help="keep the prepared folders here")
    args = parser.parse_args()
    print(
        f"{'tokenizer':>24} {'MB':>7} {'alone MB/s':>10} {'prepare MB/s':>12} {'ratio':>6} {'of CPU':>6} {'peak GB':>7}"
    )
    for name in args.tokenizer:
        sources = Sources(args.sources, glob=args.glob, max_bytes=args.max_bytes)
        alone, alone_cpu = encode_batch_seconds(sources, name)
        with contextlib.nullcontext(args.out) if args.out else tempfile.TemporaryDirectory() as folder:
            began, began_cpu = time.perf_counter(), time.process_time()
            manifest, _ = prepare(
                PrepareConfig(
                    sources=tuple(args.sources), out=f"{folder}/{Path(name).name}", tokenizer=name, glob=args.glob,
                    max_bytes=args.max_bytes, seq_len=args.seq_len, pack=args.pack,
                )
            )  # fmt: skip
            whole, whole_cpu = time.perf_counter() - began, time.process_time() - began_cpu
        megabytes, peak = manifest["bytes"] / 1e6, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        speeds = (
            f"{megabytes / alone:>10.2f} {megabytes / whole:>12.2f} {alone / whole:>6.2f} {alone_cpu / whole_cpu:>6.2f}"
        )
        print(f"{Path(name).name:>24} {megabytes:>7.1f} {speeds} {peak:>7.1f}")
        out = manifest["sequences"] * args.seq_len - manifest.get("packing", {}).get("padding", 0)
        print(f"{manifest['tokens']:,} tokens = {out:,} in sequences + {manifest['remainder']:,} remaining", flush=True)


def encode_batch_seconds(sources: Sources, name: str) -> tuple[float, float]:
    """Seconds, and those of all cores, inside of encode_batch for all documents."""
    backend, seconds, cpu_seconds = tokenizer.load(name).backend_tokenizer, 0.0, 0.0
    for batch in Unread(sources).batches():
        texts = [document.text for document in batch.documents]
        began, began_cpu = time.perf_counter(), time.process_time()
        backend.encode_batch(texts, add_special_tokens=False)
        seconds += time.perf_counter() - began
        cpu_seconds += time.process_time() - began_cpu
    return seconds, cpu_seconds


if __name__ == "__main__":
    main()
