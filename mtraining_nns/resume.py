"""Where a run goes on: the checkpoints of both engines in a folder. Loads neither engine.

    checkpoint.dir/
      step-000020/               manifest.json        torch (`checkpoint.py`)
      nnscaler/states/
        0000-0020/               complete.json        nnScaler (`nnscaler_states.py`): epoch and step

The file beside the name lists all files with their sizes and is written last: without it, or with another size, a
checkpoint does not count. Either engine goes on from the other's (`handover.py`).
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass

from mtraining_nns.errors import UserError
from mtraining_nns.recipe import Recipe

MANIFEST, COMPLETE = "manifest.json", "complete.json"
STATES = os.path.join("nnscaler", "states")  # in checkpoint.dir
NAMES = {"torch": re.compile(r"step-(\d{6,})$"), "nnscaler": re.compile(r"\d{4,}-(\d{4,})$")}
LISTS = {"torch": MANIFEST, "nnscaler": COMPLETE}


@dataclass(frozen=True)
class Found:
    """A checkpoint that an engine has made after `step` optimizer steps, complete or not."""

    engine: str
    path: str
    step: int

    @classmethod
    def at(cls, path: str) -> "Found | None":
        """By the name of its folder; None for another one."""
        path = os.path.normpath(path)
        for engine, name in NAMES.items():
            if match := name.match(os.path.basename(path)):
                return cls(engine, path, int(match[1]))
        return None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def run(self) -> str:
        """The checkpoint.dir that it lies in."""
        above = os.path.abspath(self.path).split(os.sep)[: -1 if self.engine == "torch" else -3]
        return os.sep.join(above)

    def fault(self) -> str | None:
        """Why it cannot be used, None if it is complete."""
        return incomplete(self.path, LISTS[self.engine])


def find(folder: str, resume: str, engine: str, tell: Callable[[str], None] | None = None) -> Found | None:
    """The checkpoint that `checkpoint.resume` means: auto (latest complete one or none), never, or a path.

    A path is where a run begins: the same command goes on from what the run itself has saved since. Of two after the
    same step `engine`'s own counts; tell is given a line for each that is passed over.
    """
    newest = next(iter(steps(folder, engine)), None)
    if resume == "never":
        if newest is not None:
            raise UserError(
                f"checkpoint.dir={folder} holds {newest.name} of another run; continue it with"
                " checkpoint.resume=auto, remove it, or take an empty folder"
            )
        return None
    if resume == "auto":
        return latest(folder, engine, tell)
    found = Found.at(resume) or latest(resume, engine, tell)
    if found is None:
        raise UserError(f"{resume} holds no complete checkpoint; give a checkpoint.dir or one of its step folders")
    if fault := found.fault():
        raise UserError(f"{found.path} is not complete: {fault}; take another checkpoint")
    if newest is not None and newest.step > found.step:
        own = latest(folder, engine, tell)
        if own is not None and _began_at(own) == os.path.abspath(resume):
            return own
        raise UserError(
            f"{found.path} is older than {newest.name} in checkpoint.dir={folder}, which would be mistaken for its"
            " continuation; remove that or take another checkpoint.dir"
        )
    return found


def latest(folder: str, engine: str = "torch", tell: Callable[[str], None] | None = None) -> Found | None:
    """Newest complete checkpoint of a run's folder, of two after the same step that of `engine`."""
    for found in steps(folder, engine):
        fault = found.fault()
        if not fault:
            return found
        if tell is not None:
            tell(f"checkpoint {found.path} is passed over: {fault}")
    return None


def steps(folder: str, engine: str) -> list[Found]:
    """All checkpoints of a run's folder, complete or not, newest first, those of `engine` before others of a step."""
    places = [os.path.join(above, name) for above in (folder, os.path.join(folder, STATES)) for name in _names(above)]
    found = [one for one in map(Found.at, places) if one is not None]
    return sorted(found, key=lambda one: (one.step, one.engine == engine), reverse=True)


def prune(folder: str, step: int, keep: int, but: str | None = None) -> None:
    """Leave `keep` complete checkpoints of both engines up to that of `step`; those of the engine `but` stay anyway."""
    older = [found for found in steps(folder, "torch") if found.step < step and not found.fault()]
    for found in older[keep - 1 :]:
        if found.engine != but:
            shutil.rmtree(found.path)


def changes(path: str, recipe: Recipe) -> list[str]:
    """What a recipe changes in that of the checkpoint `path`, in words; UserError for another model."""
    before, now = (_flat(asdict(r)) for r in (Recipe.load(os.path.join(path, "recipe.yaml")), recipe))
    changed = {key: f"{key} {before[key]} -> {now[key]}" for key in now if now[key] != before.get(key)}
    model = [text for key, text in changed.items() if key.startswith("model.") and key != "model.dtype"]
    if model:
        raise UserError(f"{path} is of another model ({model[0]}); take another checkpoint.dir")
    return list(changed.values())


def incomplete(path: str, manifest: str) -> str | None:
    """Why a checkpoint cannot be used, or None if every file of its manifest is there with its size."""
    try:
        sizes = read_json(path, manifest)["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"no readable {manifest} ({type(error).__name__})"
    for name, size in sizes.items():
        file = os.path.join(path, name)
        found = os.path.getsize(file) if os.path.isfile(file) else None
        if found != size:
            return f"{name} has {found} bytes instead of {size}" if found is not None else f"{name} is missing"
    return None


def read_json(path: str, name: str) -> dict:
    """A JSON file of a checkpoint."""
    with open(os.path.join(path, name), encoding="utf-8") as stream:
        return json.load(stream)


def _began_at(found: Found) -> str:
    """The path from which a checkpoint's run was told to go on, "" for none."""
    wanted = Recipe.load(os.path.join(found.path, "recipe.yaml")).checkpoint.resume
    return "" if wanted in ("auto", "never") else os.path.abspath(wanted)


def _names(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _flat(sections: dict) -> dict:
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
