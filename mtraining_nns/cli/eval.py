"""Evaluate a HuggingFace model folder: RULER, a needle in a haystack over depth x length, perplexity by position.

    mtraining eval --model runs/demo/sparse/hf --lengths 1k,2k --depths 0,50,100 --attention mtraining
    mtraining eval --model MODEL --suite ruler --lengths 4k,16k --text essays/ --squad dev-v2.0.json --out OUT
    mtraining eval --model runs/demo/sparse/hf --suite niah,perplexity --lengths 1k,2k --text runs/demo/data --out OUT

Lengths take k (1024) and m (1024 x 1024) and count the prompt and what is generated. --text is a text file, a folder
of text, or a prepared data folder, whose held-out part is read; without it needles are hidden in built-in sentences and
RULER's tasks that need text are not run. OUT gets every answer as it comes (records.jsonl; a run that was stopped goes
on there), a manifest, results.json, scores.csv, report.html and, with the extra `plots`, niah.png; `mtraining compare`
sets two such folders side by side. Whatever can be wrong with the request (lengths, text, attention) is found before
the weights are loaded.
"""

import argparse
import re
import sys

from mtraining_nns.errors import UserError
from mtraining_nns.eval.attentions import ATTENTIONS

UNITS = {"": 1, "k": 1024, "m": 1024**2}
BYTES_PER_TOKEN = 16  # text read for a token of the longest request; tokenizers make 3 to 5 bytes of text a token


def add_parser(subparsers) -> None:
    """Declare the verb and its arguments."""
    parser = subparsers.add_parser("eval", help="RULER, needle in a haystack and perplexity of a model folder")
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="an exported model folder")
    add("--suite", default="niah", metavar="LIST", help=f"of {', '.join(SUITES)} (default niah)")
    add("--lengths", required=True, metavar="LIST", help="tokens, such as 1k,4k,128k")
    add("--samples", type=int, metavar="N", help="of each cell (default: ruler 20, the others 1)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts (default 0)")
    add("--prompt", choices=("base", "chat"), default="base", help="plain text, or the tokenizer's chat template")
    add("--tasks", metavar="LIST", help="ruler: some of its 13 tasks (default: all)")
    add("--depths", default="0,25,50,75,100", metavar="LIST", help="niah: needle depths in percent")
    add("--max-new-tokens", type=int, default=32, metavar="N", help="niah: generation budget (default 32)")
    add("--window", metavar="N", help="perplexity: tokens read at once (default: the whole sequence)")
    add("--stride", metavar="N", help="perplexity: tokens scored per further window (default: half the window)")
    add("--text", metavar="PATH", help="text to read: a file, a folder, or a prepared data folder")
    add("--squad", metavar="FILE", help="ruler qa_1: SQuAD's JSON file, such as dev-v2.0.json")
    add("--hotpotqa", metavar="FILE", help="ruler qa_2: HotpotQA's JSON file, such as hotpot_dev_distractor_v1.json")
    add("--engine", choices=("hf", "vllm"), default="hf", help="HuggingFace transformers, or vLLM (default hf)")
    add("--gpus", type=int, default=1, metavar="N", help="vllm: GPUs that share the model (default 1)")
    add("--attention", choices=ATTENTIONS, default="dense", help="how prompts are read (default dense)")
    add("--attention-config", nargs="+", default=[], metavar="K=V", help="changes to a sparse attention's settings")
    add("--budgets", metavar="FILE", help="minference: what mtraining record --budgets wrote")
    add("--out", metavar="DIR", help="where answers and results go (default: tables only)")
    add("--device", metavar="NAME", help="cpu or cuda (default: cuda if there is one)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the dtype of the weights")


def run(args: argparse.Namespace) -> int:
    """Check the request, load the model, ask what is missing, print tables and write results."""
    names = _suites(args.suite)
    overrides = parse_overrides(args.attention_config)
    # Imported here because torch and transformers take seconds and other verbs need none of it.
    from mtraining_nns.eval import html, huggingface, report, runner
    from mtraining_nns.eval.text import read_source

    limit = huggingface.context_limit(args.model)
    configs = {name: SUITES[name].configure(args) for name in names}
    reach = max(SUITES[name].reach(config) for name, config in configs.items())
    huggingface.check_length(reach, limit, args.model)
    tokenizer = huggingface.load_tokenizer(args.model)
    text = None
    if args.text is not None:
        longest = max(max(config.lengths) * SUITES[name].sequences(config) for name, config in configs.items())
        text = read_source(args.text, max_bytes=BYTES_PER_TOKEN * longest)
    chosen = [SUITES[name](config, tokenizer, text, args) for name, config in configs.items()]
    out = None if args.out is None else report.make_folder(args.out)
    engine = _engine(args, overrides or None, reach)
    manifest = report.manifest(args.model, engine.describe(), {one.suite.name: one.settings for one in chosen})
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
        print("report:", html.write(out, manifest, found, results.get("ruler", {}).get("not_run", {})))
        if "niah" in found:
            _draw(out, found["niah"])
    return 0


def _draw(out, records: list[dict]) -> None:
    from mtraining_nns.eval import plots

    try:
        print("heat map:", plots.niah(out, records))
    except ImportError:
        print("no niah.png: it needs matplotlib; pip install 'mtraining-nns[plots]'", file=sys.stderr)


def _engine(args, overrides: dict | None, reach: int):
    attention = {"attention": args.attention, "attention_config": overrides, "budgets": args.budgets}
    attention["dtype"] = args.dtype
    if args.engine == "vllm":
        from mtraining_nns.eval.vllm import VllmEngine

        if args.device is not None:
            raise UserError(f"--device is for --engine hf, vLLM takes the device it was built for, got {args.device}")
        return VllmEngine(args.model, max_tokens=reach, gpus=args.gpus, **attention)
    from mtraining_nns.eval.huggingface import HuggingFaceEngine

    return HuggingFaceEngine(args.model, device=args.device, **attention)


class _Prompts:
    """What suites of prompts share."""

    @staticmethod
    def reach(config) -> int:
        return max(config.lengths)

    @staticmethod
    def sequences(config) -> int:
        return 1


class Niah(_Prompts):
    """Needle in a haystack, ready to run."""

    @staticmethod
    def configure(args):
        from mtraining_nns.eval.niah import NiahConfig

        return NiahConfig(
            lengths=_list("--lengths", args.lengths, parse_length),
            depths=_list("--depths", args.depths, _percent),
            samples=1 if args.samples is None else args.samples,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
            chat=args.prompt == "chat",
        )

    def __init__(self, config, tokenizer, text, args):
        from mtraining_nns.eval import niah

        self.suite = niah.Niah(config, tokenizer, None if text is None else text.documents)
        self.suite.check()
        self.settings = {
            **vars(config),
            **self.suite.form.describe(),
            "template": niah.TEMPLATE,
            "haystack": "built-in sentences" if text is None else text.describe(),
        }

    def report(self, records):
        from mtraining_nns.eval import report

        result = report.niah_result(records)
        return report.niah_table(records), result, result["cells"]


class Ruler(_Prompts):
    """RULER, ready to run."""

    @staticmethod
    def configure(args):
        from mtraining_nns.eval.ruler import RulerConfig

        return RulerConfig(
            lengths=_list("--lengths", args.lengths, parse_length),
            tasks=None if args.tasks is None else _list("--tasks", args.tasks, str),
            samples=20 if args.samples is None else args.samples,
            seed=args.seed,
            chat=args.prompt == "chat",
        )

    def __init__(self, config, tokenizer, text, args):
        from mtraining_nns.eval import ruler, ruler_sources, ruler_tasks

        documents = None if text is None else text.documents
        self.suite = ruler.Ruler(config, tokenizer, ruler_sources.Sources(documents, args.squad, args.hotpotqa))
        self.suite.check()
        self.settings = {
            **vars(config),
            **self.suite.form.describe(),
            "definition": ruler_tasks.tables(),
            "not_run": self.suite.not_run,
            "sources": self.suite.sources.describe() | {"text": None if text is None else text.describe()},
        }

    def report(self, records):
        from mtraining_nns.eval import report

        result = report.ruler_result(records, self.suite.not_run)
        return report.ruler_table(records, self.suite.not_run), result, result["cells"]


class Perplexity:
    """Perplexity by position, ready to run."""

    @staticmethod
    def configure(args):
        from mtraining_nns.eval.perplexity import PerplexityConfig

        return PerplexityConfig(
            lengths=_list("--lengths", args.lengths, parse_length),
            samples=1 if args.samples is None else args.samples,
            window=None if args.window is None else parse_length(args.window),
            stride=None if args.stride is None else parse_length(args.stride),
        )

    @staticmethod
    def reach(config) -> int:
        return max(map(config.reach, config.lengths))

    @staticmethod
    def sequences(config) -> int:
        return config.samples

    def __init__(self, config, tokenizer, text, args):
        from mtraining_nns.eval import perplexity

        if text is None:
            raise UserError("perplexity needs text; give --text a file, a folder or a prepared data folder")
        self.suite = perplexity.Perplexity(config, tokenizer.stream(text.documents), tokenizer.first)
        self.settings = {**vars(config), "text": text.describe()}

    def report(self, records):
        from mtraining_nns.eval import perplexity, report

        found = perplexity.summed(records)
        return report.perplexity_table(found), [result.as_dict() for result in found], []


SUITES = {"niah": Niah, "ruler": Ruler, "perplexity": Perplexity}


def parse_length(text: str) -> int:
    """Tokens of `4k` (4096), `1m` (1048576) or a plain number."""
    match = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if match is None:
        raise UserError(f"a length is a number with k or m, got {text!r}; give e.g. 4k, 1m or 1000")
    return int(match[1]) * UNITS[match[2]]


def parse_overrides(words: list[str]) -> dict:
    """`["p_v=0.9", "dense_layers=[0, 1]"]` as a dict of YAML values."""
    import yaml

    fields = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise UserError(f"--attention-config takes key=value, got {word!r}; give e.g. p_v=0.9")
        try:
            fields[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--attention-config {word!r} has a value that is not YAML; give e.g. p_v=0.9") from error
    return fields


def _suites(text: str) -> list[str]:
    names = _list("--suite", text, str)
    for name in names:
        if name not in SUITES:
            raise UserError(f"unknown suite {name!r}; --suite takes {', '.join(SUITES)}")
    return list(names)


def _list(option: str, text: str, parse) -> tuple:
    """Values of a comma list, each once."""
    values = tuple(dict.fromkeys(parse(word.strip()) for word in text.split(",") if word.strip()))
    if not values:
        raise UserError(f"{option} is empty; give values separated by commas")
    return values


def _percent(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UserError(f"--depths takes percentages, got {text!r}; give e.g. 0,50,100") from error
