"""Methods of attention by name: what an engine computes while it reads a prompt. Decoding is always dense.

    dense        PyTorch's or vLLM's own
    mtraining    what the folder was trained with, its mtraining.json
    minference   columns and slashes of fixed number, each head its own, from a file of `mtraining record --budgets`
    flexprefill  blocks by query or by columns and slashes, as each head needs (`ops/patterns/flexprefill.py`)

The last three take changes as a dict of AttentionConfig's fields.
"""

import dataclasses
import json
from pathlib import Path

from mtraining_nns.errors import UserError
from mtraining_nns.ops.config import AttentionConfig

ATTENTIONS = ("dense", "mtraining", "minference", "flexprefill")
DTYPES = ("bfloat16", "float16", "float32")
BUDGETS_FORMAT = 2
ANY = {"pattern", "block", "layout", "granularity", "dense_layers", "dense_below", "backend", "deterministic"}
READ = {  # settings that a pattern reads besides, those of vertical_slash by its budget as well
    "dense": set(),
    "vertical_slash": {"budget", "cap", "last_q", "sinks", "local"},
    "xattention": {"stride", "threshold"},
    "moba": {"chunk", "top_k"},
    "flexprefill": {"threshold", "tau", "sinks", "local"},
    "top_p": {"p_v", "p_s"},
    "fixed": {"k_v", "k_s", "head_budgets"},
    "budgets of each head": {"head_budgets"},
}
SET = {  # settings that a method is made of, which no change may touch
    "mtraining": set(),
    "minference": {"pattern", "budget", "head_budgets"},
    "flexprefill": {"pattern"},
}
RECORDED = ("block", "cap", "last_q", "sinks", "local")  # what budgets of each head are read with, as they were counted


def check_names(attention: str, dtype: str | None) -> None:
    """UserError for a method of attention or a dtype that no engine knows."""
    if attention not in ATTENTIONS or dtype not in (None, *DTYPES):
        raise UserError(
            f"attention must be one of {', '.join(ATTENTIONS)} and dtype one of {', '.join(DTYPES)}, "
            f"got attention={attention!r}, dtype={dtype!r}"
        )


def attention_of(
    folder: Path, attention: str, given: AttentionConfig | dict | None, budgets: str | Path | None = None
) -> AttentionConfig | None:
    """What a method computes: None for "dense"; given: a config, or changes; budgets: minference's file."""
    if attention == "dense" and given is not None:
        raise UserError(f"changes are for a sparse attention, got {given} for attention='dense'; drop them")
    if (attention == "minference") != (budgets is not None):
        raise UserError(
            f"budgets are a file of mtraining record --budgets, needed by minference and no other method, got"
            f" {budgets} for attention={attention!r}"
        )
    if attention == "dense":
        return None
    if isinstance(given, AttentionConfig):
        return given
    fixed = sorted(SET[attention] & (given or {}).keys())
    if fixed:
        raise UserError(f"attention={attention!r} sets {', '.join(fixed)} itself; leave it out, or use mtraining")
    if attention == "mtraining":
        return load_attention(folder, given)
    fields = {"pattern": "flexprefill"} if attention == "flexprefill" else read_budgets(budgets)
    return _build(fields, given, attention)


def load_attention(folder: str | Path, overrides: dict | None = None) -> AttentionConfig:
    """The attention a folder was trained with: its mtraining.json, with `overrides` on top.

    Without a mtraining.json the overrides alone say it; without either it is a UserError, never a default.
    """
    path = Path(folder) / "mtraining.json"
    if not path.is_file() and not overrides:
        raise UserError(
            f"{path} does not exist, so the trained attention is unknown; evaluate an exported folder, "
            "say it with --attention-config k=v, or use --attention dense"
        )
    try:
        fields = dict(json.loads(path.read_text())["attention"]) if path.is_file() else {}
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is no record of an attention ({reason}); export the model again") from error
    return _build(fields, overrides, str(folder))


def read_budgets(path: str | Path) -> dict:
    """Fields of AttentionConfig from a file of `write_budgets`: each head's budget, and what it was counted beside."""
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); write one with mtraining record --budgets") from error
    try:
        recorded = {name: tree["attention"][name] for name in RECORDED}
        if tree["format"] != BUDGETS_FORMAT or not tree["budgets"]:
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} holds no budgets of format {BUDGETS_FORMAT} with their attention; write it with mtraining record"
            " --budgets"
        ) from error
    return {"pattern": "vertical_slash", "budget": "fixed", "head_budgets": tree["budgets"], **recorded}


def write_budgets(path: str | Path, recording) -> None:
    """How many columns and slash bins each head took in a recording of vertical_slash, as JSON."""
    told = {name: recording.about[name] for name in ("model", "text", "attention", "budgets")}
    tree = {"format": BUDGETS_FORMAT, "seq_len": recording.seq_len, **told}
    try:
        Path(path).write_text(json.dumps(tree) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); choose another --budgets") from error


def _build(fields: dict, changes: dict | None, what: str) -> AttentionConfig:
    """Fields with changes on top; UserError for a value that is not known, or a change that would do nothing."""
    fields, known = {**fields, **(changes or {})}, [field.name for field in dataclasses.fields(AttentionConfig)]
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise UserError(f"unknown attention key {unknown[0]!r}; known are {', '.join(known)}")
    try:
        config = AttentionConfig(**fields)
    except (ValueError, TypeError) as error:
        raise UserError(f"attention of {what}: {error}") from error
    kinds = [config.pattern]
    if config.pattern == "vertical_slash":
        kinds.append("budgets of each head" if config.head_budgets else config.budget)
    read = ANY.union(*map(READ.get, kinds))
    for name in sorted((changes or {}).keys() - read):
        raise UserError(
            f"attention setting {name} does nothing with {' and '.join(kinds)}, which reads"
            f" {', '.join(sorted(read - ANY)) or 'none'}; leave it out"
        )
    return config
