"""Engines: who runs the training loop of a recipe. Choosing one imports neither torch nor nnScaler."""

import glob
import importlib
import importlib.metadata
import importlib.util
import os

from mtraining_nns.environment import Process
from mtraining_nns.errors import UserError

ENGINES = {"torch": "mtraining_nns.engines.torch", "nnscaler": "mtraining_nns.engines.nnscaler"}
CHECKPOINTS = {  # of each engine, complete ones, in checkpoint.dir
    "torch": os.path.join("step-*", "manifest.json"),
    "nnscaler": os.path.join("nnscaler", "states", "*", "complete.json"),
}
VERSION = "0.9"  # of nnScaler: 0.8 has no plans of operators and no ZeRO 3
WHERE = "https://github.com/msrasys/nnscaler says how to install it"


def default() -> tuple[str, str]:
    """(name, reason) of the engine that `auto` takes here, as far as no recipe says more."""
    fault = nnscaler_fault()
    return ("torch", fault) if fault else ("nnscaler", "nnScaler is importable")


def choose(recipe) -> tuple[str, str]:
    """(name, reason) of the engine that runs a recipe; UserError if the one that it asks for cannot run here.

    `auto` goes on with the engine whose checkpoints the run's folder holds, and leaves to torch what it alone can do.
    """
    wanted, fault = recipe.parallel.engine, nnscaler_fault()
    if wanted == "nnscaler" and fault:
        raise UserError(f"parallel.engine=nnscaler cannot run: {fault}")
    if wanted != "auto":
        return wanted, "as the recipe says"
    if fault:
        return "torch", fault
    for name in ENGINES:
        if _newest(recipe, name):
            return name, f"checkpoint.dir={recipe.checkpoint.dir} holds its checkpoints"
    beyond = _beyond(recipe, "nnscaler")
    return ("torch", beyond) if beyond else default()


def check(recipe) -> None:
    """UserError for a recipe that its engine cannot do, and where the other engine has trained in its folder."""
    name = choose(recipe)[0]
    if beyond := _beyond(recipe, name):
        raise UserError(f"{beyond}, got {name}; leave one out")
    for other in ENGINES:
        found = _newest(recipe, other)
        if other != name and found:
            raise UserError(
                f"checkpoint.dir={recipe.checkpoint.dir} holds {found} of the {other} engine, which"
                f" parallel.engine={name} does not read; go on with parallel.engine={other}, or take another"
                " checkpoint.dir"
            )


def _beyond(recipe, name: str) -> str:
    """What of a recipe an engine cannot do, "" if it can do all."""
    train, zero = recipe.train, recipe.parallel.zero
    if name == "torch":
        return f"parallel.zero={zero} is for parallel.engine=nnscaler (torch has 2 and 3)" if zero not in (2, 3) else ""
    for key, asked in (("offload_inputs=true", train.offload_inputs), ("kernels=liger", train.kernels == "liger")):
        if asked:
            return f"train.{key} is for parallel.engine=torch"
    return ""


def _newest(recipe, name: str) -> str | None:
    """A complete checkpoint of an engine in the folder of a run."""
    found = glob.glob(os.path.join(glob.escape(recipe.checkpoint.dir), CHECKPOINTS[name]))
    return os.path.basename(os.path.dirname(max(found))) if found else None


def nnscaler_fault() -> str:
    """Why nnScaler cannot be used here, "" if it can; does not import it."""
    if importlib.util.find_spec("nnscaler") is None:
        return f"nnScaler is not importable; {WHERE}"
    try:
        found = importlib.metadata.version("nnscaler")
    except importlib.metadata.PackageNotFoundError:
        found = "unknown"
    if found.split(".")[:2] != VERSION.split("."):
        return f"it is proven with nnScaler {VERSION}, got {found}; {WHERE}"
    return ""


def train(recipe) -> dict:
    """Train a resolved recipe in this worker; returns the run's summary."""
    check(recipe)
    name, reason = choose(recipe)
    if (Process.launched() or Process()).rank == 0:
        print(f"engine {name}: {reason}", flush=True)
    return importlib.import_module(ENGINES[name]).train(recipe)
