"""Evaluate a HuggingFace model folder: RULER, InfiniteBench, a needle over depth x length, perplexity by position.

    mtraining eval --model runs/demo/sparse/hf --lengths 1k,2k --depths 0,50,100 --attention mtraining
    mtraining eval --model MODEL --suite ruler --lengths 4k,16k --text essays/ --squad dev-v2.0.json --out OUT
    mtraining eval --model MODEL --suite infinitebench --lengths 64k,128k --infinitebench InfiniteBench/ --out OUT
    mtraining eval --model runs/demo/sparse/hf --suite niah,perplexity --lengths 1k,2k --text runs/demo/data --out OUT

Lengths take k (1024) and m (1024 x 1024) and count the prompt and what is generated. --text is a text file, a folder
of text, or a prepared data folder, whose held-out part is read; without it needles are hidden in built-in sentences and
RULER's tasks that need text are not run. InfiniteBench's questions are as long as they are: each is asked once, at the
smallest of the lengths that holds it. OUT gets every answer as it comes (records.jsonl; a run that was stopped goes on
there), a manifest, results.json, scores.csv, report.html and, with the extra `plots`, niah.png; `mtraining compare`
sets two such folders side by side. Whatever can be wrong with the request (lengths, text, attention) is found before
the weights are loaded.
"""

import argparse
import sys
from contextlib import nullcontext

from mtraining_nns import run_lock
from mtraining_nns.cli.eval_suites import READING, SUITES, chosen_names
from mtraining_nns.cli.words import parse_list
from mtraining_nns.errors import UserError
from mtraining_nns.eval.attentions import ATTENTIONS

SPARSE = tuple(name for name in ATTENTIONS if name != "dense")
READ_BY = {  # an option and the option, with its values, that reads it
    "seed": ("suite", ("niah", "ruler")),
    "prompt": ("suite", ("niah", "ruler", "infinitebench")),
    "tasks": ("suite", ("ruler", "infinitebench")),
    "depths": ("suite", ("niah",)),
    "needles": ("suite", ("niah",)),
    "max_new_tokens": ("suite", ("niah",)),
    "window": ("suite", ("perplexity", "pg19")),
    "stride": ("suite", ("perplexity", "pg19")),
    "text": ("suite", ("niah", "ruler", "perplexity")),
    "squad": ("suite", ("ruler",)),
    "hotpotqa": ("suite", ("ruler",)),
    "pg19": ("suite", ("pg19",)),
    "infinitebench": ("suite", ("infinitebench",)),
    "device": ("engine", ("hf",)),
    "attention_config": ("attention", SPARSE),
    "budgets": ("attention", ("minference",)),
}
DEFAULTS = {"seed": 0, "prompt": "base", "depths": "0,25,50,75,100", "needles": 1, "max_new_tokens": 32}
LEAST_BYTES = 1 << 24  # text read whatever the lengths, so that other lengths ask the same questions
BYTES_PER_TOKEN = 16  # text read for a token of the longest request; tokenizers make 3 to 5 bytes of text a token


def add_parser(subparsers) -> None:
    """Declare the verb and its arguments."""
    parser = subparsers.add_parser("eval", help="RULER, InfiniteBench, needles and perplexity of a model folder")
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="an exported model folder")
    add("--suite", default="niah", metavar="LIST", help=f"of {', '.join(SUITES)} (default niah)")
    add("--lengths", required=True, metavar="LIST", help="tokens, such as 1k,4k,128k")
    add("--samples", type=int, metavar="N", help="of each cell (default: ruler 20, infinitebench all, the others 1)")
    add("--seed", type=int, metavar="N", help="of prompts (default 0)")
    add("--prompt", choices=("base", "chat"), help="plain text (default), or the tokenizer's chat template")
    add("--tasks", metavar="LIST", help="ruler, infinitebench: some of their tasks (default: all)")
    add("--depths", metavar="LIST", help="niah: needle depths in percent (default 0,25,50,75,100)")
    add("--needles", type=int, metavar="N", help="niah: needles in a prompt, all asked for (default 1)")
    add("--max-new-tokens", type=int, metavar="N", help="niah: generation budget (default 32)")
    add("--window", metavar="N", help="perplexity: tokens read at once (default: the whole sequence)")
    add("--stride", metavar="N", help="perplexity: tokens scored per further window (default: half the window)")
    add("--text", metavar="PATH", help="text to read: a file, a folder, or a prepared data folder")
    add("--squad", metavar="FILE", help="ruler qa_1: SQuAD's JSON file, such as dev-v2.0.json")
    add("--hotpotqa", metavar="FILE", help="ruler qa_2: HotpotQA's JSON file, such as hotpot_dev_distractor_v1.json")
    add("--pg19", metavar="DIR", help="pg19: a folder of books, a text file each")
    add("--infinitebench", metavar="DIR", help="infinitebench: the folder of its JSONL files, such as passkey.jsonl")
    add("--engine", choices=("hf", "vllm"), default="hf", help="HuggingFace transformers, or vLLM (default hf)")
    add("--gpus", type=int, default=1, metavar="N", help="vllm: share the model; hf: share each sequence (default 1)")
    add("--attention", choices=ATTENTIONS, default="dense", help="how prompts are read (default dense)")
    add("--attention-config", nargs="+", metavar="K=V", help="changes to a sparse attention's settings")
    add("--budgets", metavar="FILE", help="minference: what mtraining record --budgets wrote")
    add("--out", metavar="DIR", help="where answers and results go (default: tables only)")
    add("--device", metavar="NAME", help="cpu or cuda (default: cuda if there is one)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the dtype of the weights")


def run(args: argparse.Namespace) -> int:
    """Check the request, load the model, ask what is missing, print tables and write results."""
    names = chosen_names(args.suite)
    check_options(args)
    if args.gpus < 1:
        raise UserError(f"--gpus must be at least 1, got {args.gpus}")
    if args.engine == "hf" and args.gpus != 1 and not set(names) <= READING:
        raise UserError(
            f"--gpus {args.gpus} with --engine hf shares sequences for {' and '.join(sorted(READING))} alone, got"
            f" --suite {args.suite}; use --engine vllm"
        )
    overrides = parse_overrides(args.attention_config or [])
    # Imported here because torch and transformers take seconds and other verbs need none of it.
    from mtraining_nns.eval import huggingface, model_folder, report
    from mtraining_nns.eval.text import read_source

    limit = model_folder.context_limit(args.model)
    configs = {name: SUITES[name].configure(args) for name in names}
    reach = max(SUITES[name].reach(config) for name, config in configs.items())
    model_folder.check_length(reach, limit, args.model)
    tokenizer = huggingface.load_tokenizer(args.model)
    text = None
    if args.text is not None:
        longest = max(max(config.lengths) * SUITES[name].sequences(config) for name, config in configs.items())
        text = read_source(args.text, max_bytes=max(LEAST_BYTES, BYTES_PER_TOKEN * longest))
    chosen = [SUITES[name](config, tokenizer, text, args) for name, config in configs.items()]
    out = None if args.out is None else report.make_folder(args.out)
    shortest = min(SUITES[name].shortest(config) for name, config in configs.items())
    with run_lock.held(out, "--out") if out else nullcontext():
        _ask(chosen, tokenizer, _engine(args, overrides or None, reach, shortest), out)
    return 0


def _ask(chosen: list, tokenizer, engine, out) -> None:
    """Ask what is missing, print tables and write results into the folder `out`, if there is one."""
    from mtraining_nns.eval import html, report, runner

    settings = {one.suite.name: one.settings for one in chosen}
    manifest = report.manifest(engine.model_dir, tokenizer, engine.describe(), settings)
    records = runner.Records(out, manifest)
    try:
        found = runner.run([one.suite for one in chosen], engine, records)
    finally:
        records.close()
        engine.close()
    results, scores = {}, {}
    for one in chosen:
        table, results[one.suite.name], cells = one.report(found[one.suite.name])
        print(table)
        if cells:
            scores[one.suite.name] = cells
    if out is not None:
        print("results:", report.write_results(out, {"manifest": manifest, **results}))
        report.write_csv(out, scores)
        print("report:", html.write(out, manifest, found, {one.suite.name: one.notes for one in chosen}))
        if "niah" in found:
            _draw(out, found["niah"])


def check_options(args: argparse.Namespace) -> None:
    """UserError for an option that nothing of the request reads; fills in the defaults of the others."""
    for name, (reader, values) in READ_BY.items():
        chosen = getattr(args, reader)
        if getattr(args, name) is not None and not set(parse_list(f"--{reader}", chosen, str)) & set(values):
            raise UserError(
                f"--{name.replace('_', '-')} is for --{reader} {' or '.join(values)}, got --{reader} {chosen};"
                " leave it out"
            )
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _draw(out, records: list[dict]) -> None:
    from mtraining_nns.eval import plots

    try:
        print("heat map:", plots.niah(out, records))
    except ImportError:
        print("no niah.png: it needs matplotlib; pip install 'mtraining-nns[plots]'", file=sys.stderr)


def _engine(args, overrides: dict | None, reach: int, shortest: int):
    attention = {"attention": args.attention, "attention_config": overrides, "budgets": args.budgets}
    attention["dtype"] = args.dtype
    if args.engine == "vllm":
        from mtraining_nns.eval.vllm import VllmEngine

        return VllmEngine(args.model, max_tokens=reach, gpus=args.gpus, **attention)
    if args.gpus > 1:
        from mtraining_nns.eval.ring_engine import RingEngine

        return RingEngine(args.model, ranks=args.gpus, shortest=shortest, device=args.device, **attention)
    from mtraining_nns.eval.huggingface import HuggingFaceEngine

    return HuggingFaceEngine(args.model, device=args.device, reach=reach, **attention)


def parse_overrides(words: list[str]) -> dict:
    """`["p_v=0.9", "dense_layers=[0, 1]"]` as a dict of YAML values."""
    import yaml

    fields = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise UserError(f"--attention-config takes key=value, got {word!r}; give e.g. p_v=0.9")
        if key in fields:
            raise UserError(f"--attention-config sets {key} twice; give it once")
        try:
            fields[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--attention-config {word!r} has a value that is not YAML; give e.g. p_v=0.9") from error
    return fields
