"""Evaluate a HuggingFace model folder: needle in a haystack over depth x length, and perplexity by position.

    mtraining eval --model runs/demo/sparse/hf --lengths 1k,2k --depths 0,50,100 --attention mtraining
    mtraining eval --model runs/demo/sparse/hf --tasks niah,perplexity --lengths 1k,2k --data runs/demo/data --out OUT

Lengths take k (1024) and m (1024 x 1024) and count the prompt and what is generated. --data is a text file, a folder
of text, or a prepared data folder, whose held-out part is read; without it the needle is hidden in built-in sentences.
Whatever can be wrong with the request (lengths, text, attention) is found before the weights are loaded.
"""

import argparse
import re
import sys

from mtraining_nns.errors import UserError

UNITS = {"": 1, "k": 1024, "m": 1024**2}
BYTES_PER_TOKEN = 16  # text read for a token of the longest request; tokenizers make 3 to 5 bytes of text a token


def add_parser(subparsers) -> None:
    """Declare the verb and its arguments."""
    parser = subparsers.add_parser("eval", help="needle in a haystack and perplexity of a model folder")
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="an exported model folder")
    add("--tasks", default="niah", metavar="LIST", help=f"of {', '.join(TASKS)} (default niah)")
    add("--lengths", required=True, metavar="LIST", help="tokens, such as 1k,4k,128k")
    add("--depths", default="0,25,50,75,100", metavar="LIST", help="niah: needle depths in percent")
    add("--samples", type=int, default=1, metavar="N", help="prompts per niah cell, sequences per perplexity length")
    add("--seed", type=int, default=0, metavar="N", help="niah: of needles and haystacks (default 0)")
    add("--max-new-tokens", type=int, default=32, metavar="N", help="niah: generation budget (default 32)")
    add("--window", metavar="N", help="perplexity: tokens read at once (default: the whole sequence)")
    add("--stride", metavar="N", help="perplexity: tokens scored per further window (default: half the window)")
    add("--attention", choices=("dense", "mtraining"), default="dense", help="dense, or as trained (default dense)")
    add("--attention-config", nargs="+", default=[], metavar="K=V", help="changes to the folder's mtraining.json")
    add("--data", metavar="PATH", help="text to read: a file, a folder, or a prepared data folder")
    add("--out", metavar="DIR", help="where results.json goes (default: tables only)")
    add("--device", metavar="NAME", help="cpu or cuda (default: cuda if there is one)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the dtype of the weights")


def run(args: argparse.Namespace) -> int:
    """Check the request, load the model, run the tasks, print tables and write results."""
    names = _tasks(args.tasks)
    overrides = parse_overrides(args.attention_config)
    # Imported here because torch and transformers take seconds and other verbs need none of it.
    from mtraining_nns.eval import huggingface, report
    from mtraining_nns.eval.text import read_source

    limit = huggingface.context_limit(args.model)
    configs = {name: TASKS[name].configure(args) for name in names}
    for name, config in configs.items():
        huggingface.check_length(TASKS[name].reach(config), limit, args.model)
    tokenizer = huggingface.load_tokenizer(args.model)
    text = None
    if args.data is not None:
        longest = max(max(config.lengths) * config.samples for config in configs.values())
        text = read_source(args.data, max_bytes=BYTES_PER_TOKEN * longest)
    tasks = [TASKS[name](config, tokenizer, text) for name, config in configs.items()]
    out = None if args.out is None else report.make_folder(args.out)
    engine = huggingface.HuggingFaceEngine(
        args.model, attention=args.attention, attention_config=overrides or None, device=args.device, dtype=args.dtype
    )
    results = {task.name: task.run(engine) for task in tasks}
    manifest = report.manifest(args.model, engine.describe(), {task.name: task.settings for task in tasks})
    if out is not None:
        print("results:", report.write_results(out, {"manifest": manifest, **results}))
    return 0


class Niah:
    """Needle in a haystack, ready to run."""

    name = "niah"

    @staticmethod
    def configure(args):
        from mtraining_nns.eval.niah import NiahConfig

        return NiahConfig(
            lengths=_list("--lengths", args.lengths, parse_length),
            depths=_list("--depths", args.depths, _percent),
            samples=args.samples,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
        )

    @staticmethod
    def reach(config) -> int:
        return max(config.lengths)

    def __init__(self, config, tokenizer, text):
        from mtraining_nns.eval import niah

        self.builder = niah.PromptBuilder(tokenizer, config, None if text is None else text.documents)
        self.builder.check()
        self.settings = {
            **vars(config),
            "template": niah.TEMPLATE,
            "haystack": "built-in sentences" if text is None else text.describe(),
        }

    def run(self, engine) -> dict:
        from mtraining_nns.eval import niah, report

        result = niah.run_niah(engine, self.builder, progress=_say)
        print(report.niah_table(result))
        return result.as_dict()


class Perplexity:
    """Perplexity by position, ready to run."""

    name = "perplexity"

    @staticmethod
    def configure(args):
        from mtraining_nns.eval.perplexity import PerplexityConfig

        return PerplexityConfig(
            lengths=_list("--lengths", args.lengths, parse_length),
            samples=args.samples,
            window=None if args.window is None else parse_length(args.window),
            stride=None if args.stride is None else parse_length(args.stride),
        )

    @staticmethod
    def reach(config) -> int:
        return max(map(config.reach, config.lengths))

    def __init__(self, config, tokenizer, text):
        from mtraining_nns.eval.perplexity import cut_sequences

        if text is None:
            raise UserError("perplexity needs text; give --data a file, a folder or a prepared data folder")
        stream = tokenizer.stream(text.documents)
        self.config = config
        self.inputs = [cut_sequences(stream, length, config.samples, tokenizer.first) for length in config.lengths]
        self.settings = {**vars(config), "text": text.describe()}

    def run(self, engine) -> list[dict]:
        from mtraining_nns.eval import perplexity, report

        results = [perplexity.run_perplexity(engine, token_ids, self.config) for token_ids in self.inputs]
        print(report.perplexity_table(results))
        return [result.as_dict() for result in results]


TASKS = {task.name: task for task in (Niah, Perplexity)}


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


def _tasks(text: str) -> list[str]:
    names = _list("--tasks", text, str)
    for name in names:
        if name not in TASKS:
            raise UserError(f"unknown task {name!r}; --tasks takes {', '.join(TASKS)}")
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


def _say(score) -> None:
    case = score.case
    verdict = "found" if score.correct else "missed"
    print(f"niah length {case.length} depth {case.depth:g} % sample {case.sample}: {verdict}", file=sys.stderr)
