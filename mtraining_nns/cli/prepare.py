"""Tokenise text files, .jsonl, .parquet, saved HuggingFace datasets, MDS shards and folders of them for `data.path`.

  mtraining prepare books/ --glob '*.txt' --tokenizer Qwen/Qwen2.5-3B --seq-len 524288 --holdout 0.01 --out data/books
  mtraining prepare code.jsonl pages.parquet --train-bpe 4096 --out data/code
  mtraining prepare prolong/book-65536 --source-tokenizer MODEL_DIR --tokenizer Qwen/Qwen2.5-3B --out data/prolong
  mtraining prepare books/ --tokenizer MODEL_DIR --seq-len 524288 --pack best_fit --plot lengths.png --out data/books

Whatever is left out is counted and named in DIR/manifest.json. A killed run goes on when it is started again as it was.
"""

import sys


def add_parser(subparsers) -> None:
    """Declare the verb and its arguments."""
    parser = subparsers.add_parser("prepare", help="tokenise text into a folder to train on")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="file of text, .jsonl or .parquet, or a folder")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; appears only when complete")
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--tokenizer", metavar="PATH_OR_NAME", help="a tokenizer folder or HuggingFace name")
    tokenizer.add_argument("--train-bpe", type=int, metavar="VOCAB", help="train a byte-level BPE on the sources")
    parser.add_argument("--seq-len", type=int, metavar="S", help="report how many sequences of S tokens there are")
    parser.add_argument(
        "--pack",
        choices=("stream", "best_fit"),
        default="stream",
        help="stream: cut the tokens every S; best_fit: cut no document that fits into S tokens, pad the sequences",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw how much of the text is in documents of a length")
    parser.add_argument(
        "--holdout", type=float, default=0.0, metavar="FRACTION", help="share of documents in DIR/heldout"
    )
    parser.add_argument("--glob", default="*", metavar="PATTERN", help="which files and datasets of a folder, '*.py'")
    parser.add_argument("--max-bytes", type=int, metavar="N", help="read only the first N bytes of text")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="field or column that holds the text")
    parser.add_argument("--source-tokenizer", metavar="PATH_OR_NAME", help="what made the ids of MDS shards")
    parser.add_argument("--overwrite", action="store_true", help="replace a folder prepared with other settings")


def run(args) -> int:
    """Prepare the folder and print what is in it."""
    # Imported here because transformers takes seconds and other verbs need none of it.
    from mtraining_nns.data import lengths
    from mtraining_nns.data.prepare import PrepareConfig, prepare

    names = PrepareConfig.__dataclass_fields__
    options = {name: value for name, value in vars(args).items() if name in names}
    config = PrepareConfig(**{**options, "sources": tuple(args.sources)})
    manifest, did = prepare(config)
    print(_summary(config.out, manifest, did, lengths.table(manifest["retention"])))
    heldout = manifest.get("heldout")
    if heldout and args.seq_len and config.pack == "stream" and heldout["tokens"] < args.seq_len:
        print(f"warning: the held-out part is shorter than one sequence of {args.seq_len} tokens", file=sys.stderr)
    return 0


DID = {
    "prepared": "prepared",
    "kept": "kept, the sources and settings are the same",
    "rearranged": "kept, the sources and settings are the same; its sequences are new",
}


def _summary(out: str, manifest: dict, did: str, table: list[str]) -> str:
    lines = [
        f"{out}: {DID[did]}",
        f"  {manifest['tokens']:,} tokens of {manifest['documents']:,} documents, {manifest['bytes']:,} bytes of text",
        f"  vocabulary {manifest['vocab_size']:,} ({manifest['dtype']}), EOS {manifest['eos_id']}",
    ]
    if manifest["seq_len"]:
        sequences, remainder = manifest["sequences"], manifest["remainder"]
        lines.append(f"  {sequences:,} sequences of {manifest['seq_len']:,} tokens, {remainder:,} tokens remain")
    if packing := manifest.get("packing"):
        lines.append(
            f"  packed best-fit: {packing['cut_documents']:,} documents are longer than a sequence and cut,"
            f" {packing['padding']:,} tokens of padding ({packing['padding_share']:.3%})"
        )
    if heldout := manifest.get("heldout"):
        lines.append(f"  held out: {heldout['tokens']:,} tokens of {heldout['documents']:,} documents")
    skipped = manifest["skipped"]
    if skipped["count"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped["reasons"].items())
        lines.append(f"  left out: {reasons}; named in {out}/manifest.json")
    changed = manifest.get("changed", {"count": 0})
    if changed["count"]:
        lines.append(
            f"  kept, but not exactly the text of their ids: {changed['count']:,}; named in {out}/manifest.json"
        )
    lines += [f"  {line}" for line in table]
    return "\n".join(lines)
