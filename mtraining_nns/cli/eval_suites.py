"""The suites of `mtraining eval`, made of its arguments.

A suite here has `configure(args)`, which checks them; `reach(config)`, the longest sequence that it asks a model for;
`suite`, which asks; `settings` for the manifest; `notes`, lines below its tables; and `report(records)`, which gives
its table, its part of results.json and its cells of scores.csv.
"""

from mtraining_nns.cli.words import parse_length, parse_list
from mtraining_nns.errors import UserError


class _Prompts:
    """What suites of prompts share. notes: lines below a suite's tables."""

    notes: list[str] = []

    @staticmethod
    def reach(config) -> int:
        return max(config.lengths)

    @staticmethod
    def shortest(config) -> int:
        return min(config.lengths)

    @staticmethod
    def sequences(config) -> int:
        return 1


class Niah(_Prompts):
    """Needle in a haystack, ready to run."""

    @staticmethod
    def configure(args):
        from mtraining_nns.eval.niah import NiahConfig

        return NiahConfig(
            lengths=parse_list("--lengths", args.lengths, parse_length),
            depths=parse_list("--depths", args.depths, _percent),
            samples=1 if args.samples is None else args.samples,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
            chat=args.prompt == "chat",
            needles=args.needles,
        )

    def __init__(self, config, tokenizer, text, args):
        from mtraining_nns.eval import niah

        self.suite = niah.Niah(config, tokenizer, None if text is None else text.documents)
        self.suite.check()
        self.settings = {
            **vars(config),
            **self.suite.form.describe(),
            "template": self.suite.template,
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
        from mtraining_nns.eval.ruler_sources import source_of
        from mtraining_nns.eval.ruler_tasks import tables

        config = RulerConfig(
            lengths=parse_list("--lengths", args.lengths, parse_length),
            tasks=_tasks(args, "ruler"),
            samples=20 if args.samples is None else args.samples,
            seed=args.seed,
            chat=args.prompt == "chat",
        )
        read = {source_of(tables()["tasks"][task]) for task in config.tasks}
        read |= {"text"} if {"niah", "perplexity"} & set(chosen_names(args.suite)) else set()
        for source in {"text", "squad", "hotpotqa"} - read:
            if getattr(args, source) is not None:
                raise UserError(f"--{source} is for other tasks of ruler than --tasks {args.tasks}; leave it out")
        return config

    def __init__(self, config, tokenizer, text, args):
        from mtraining_nns.eval import report, ruler, ruler_sources, ruler_tasks

        documents = None if text is None else text.documents
        self.suite = ruler.Ruler(config, tokenizer, ruler_sources.Sources(documents, args.squad, args.hotpotqa))
        self.suite.check()
        self.notes = report.notes(self.suite.not_run)
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


class InfiniteBench(_Prompts):
    """InfiniteBench, ready to run."""

    @staticmethod
    def configure(args):
        from mtraining_nns.eval.infinitebench import InfiniteBenchConfig

        if args.infinitebench is None:
            raise UserError("infinitebench needs its files; give their folder with --infinitebench DIR")
        return InfiniteBenchConfig(
            lengths=parse_list("--lengths", args.lengths, parse_length),
            tasks=_tasks(args, "infinitebench"),
            samples=args.samples,
            chat=args.prompt == "chat",
        )

    def __init__(self, config, tokenizer, text, args):
        from mtraining_nns.eval import infinitebench, report

        self.suite = infinitebench.InfiniteBench(config, tokenizer, args.infinitebench)
        self.suite.check()
        self.missing = self.suite.not_run, self.suite.not_asked
        self.notes = report.notes(*self.missing)
        self.settings = {
            **vars(config),
            **self.suite.form.describe(),
            "definition": infinitebench.tables(),
            "not_run": self.suite.not_run,
            "files": self.suite.describe(),
        }

    def report(self, records):
        from mtraining_nns.eval import report

        result = report.infinitebench_result(records, *self.missing)
        return report.infinitebench_table(records, *self.missing), result, result["cells"]


class Perplexity:
    """Perplexity by position, ready to run."""

    notes: list[str] = []

    @staticmethod
    def configure(args):
        from mtraining_nns.eval.perplexity import PerplexityConfig

        return PerplexityConfig(
            lengths=parse_list("--lengths", args.lengths, parse_length),
            samples=1 if args.samples is None else args.samples,
            window=None if args.window is None else parse_length(args.window),
            stride=None if args.stride is None else parse_length(args.stride),
        )

    @staticmethod
    def reach(config) -> int:
        return max(map(config.reach, config.lengths))

    @staticmethod
    def shortest(config) -> int:
        return min(map(config.reach, config.lengths))

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
        table = "\n".join([report.perplexity_table(found, self.suite.name), *self.notes])
        return table, [result.as_dict() for result in found], []


class Pg19(Perplexity):
    """Perplexity by position in books, ready to run."""

    @staticmethod
    def sequences(config) -> int:
        return 1

    def __init__(self, config, tokenizer, text, args):
        from mtraining_nns.data.records import SkipLog
        from mtraining_nns.eval import perplexity
        from mtraining_nns.eval.text import left_out, read_books

        if args.pg19 is None:
            raise UserError("pg19 needs books; give --pg19 a folder of text files, such as PG-19's test")
        log = SkipLog()
        books = read_books(args.pg19, log)
        self.suite = perplexity.Books(config, tokenizer, books, tokenizer.first, log.reasons)
        self.settings = {**vars(config), "books": self.suite.used, "skipped": dict(log.reasons)}
        self.notes = [f"books of {args.pg19}{left_out(log.reasons)}"] if log.reasons else []


READING = {"perplexity", "pg19"}  # suites that generate nothing
SUITES = {"niah": Niah, "ruler": Ruler, "infinitebench": InfiniteBench, "perplexity": Perplexity, "pg19": Pg19}


def chosen_names(text: str) -> list[str]:
    """The suites of --suite, each once."""
    names = parse_list("--suite", text, str)
    for name in names:
        if name not in SUITES:
            raise UserError(f"unknown suite {name!r}; --suite takes {', '.join(SUITES)}")
    return list(names)


def _tasks(args, suite: str) -> tuple[str, ...] | None:
    """Of --tasks, all that no other suite of the request has; None without --tasks."""
    from mtraining_nns.eval import infinitebench_rows, ruler_tasks

    if args.tasks is None:
        return None
    known = {"ruler": ruler_tasks.tables()["tasks"], "infinitebench": infinitebench_rows.tables()}
    others = {task for name in chosen_names(args.suite) if name != suite for task in known.get(name, ())}
    tasks = tuple(task for task in parse_list("--tasks", args.tasks, str) if task not in others)
    if not tasks:
        raise UserError(f"--tasks names no task of {suite}, got {args.tasks}; name some, or leave it out of --suite")
    return tasks


def _percent(text: str) -> float:
    try:
        return float(f"{float(text):g}")  # as it stands in the names of questions
    except ValueError as error:
        raise UserError(f"--depths takes percentages, got {text!r}; give e.g. 0,50,100") from error
