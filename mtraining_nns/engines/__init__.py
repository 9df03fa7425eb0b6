"""Engines: who runs the training loop of a recipe. Choosing one imports neither torch nor nnScaler."""

import importlib
import importlib.metadata
import importlib.util

from mtraining_nns import resume
from mtraining_nns.environment import Process
from mtraining_nns.errors import UserError

ENGINES = {"torch": "mtraining_nns.engines.torch", "nnscaler": "mtraining_nns.engines.nnscaler"}
VERSION = "0.9"  # of nnScaler: 0.8 has no plans of operators and no ZeRO 3
WHERE = "https://github.com/msrasys/nnscaler says how to install it"


def default() -> tuple[str, str]:
    """(name, reason) of the engine that `auto` takes here, as far as no recipe says more."""
    fault = nnscaler_fault()
    return ("torch", fault) if fault else ("nnscaler", "nnScaler is importable")


def choose(recipe) -> tuple[str, str]:
    """(name, reason) of the engine that runs a recipe; UserError if the one that it asks for cannot run here.

    `auto` takes the one that alone can do what the recipe says, else that of the newest checkpoint in the run's folder.
    """
    wanted, fault = recipe.parallel.engine, nnscaler_fault()
    if wanted == "nnscaler" and fault:
        raise UserError(f"parallel.engine=nnscaler cannot run: {fault}")
    if wanted != "auto":
        return wanted, "as the recipe says"
    if fault:
        return "torch", fault
    for name, other in zip(ENGINES, reversed(ENGINES)):
        if reason := beyond(recipe, other):
            return name, reason
    if (found := resume.latest(recipe.checkpoint.dir)) is not None:
        return found.engine, f"checkpoint.dir={recipe.checkpoint.dir} holds its checkpoints"
    return default()


def check(recipe) -> None:
    """UserError for a recipe that its engine cannot do, and for a checkpoint that it cannot go on from."""
    name = choose(recipe)[0]
    if reason := beyond(recipe, name):
        raise UserError(f"{reason}, got {name}; leave one out")
    found, fault = resume.find(recipe.checkpoint.dir, recipe.checkpoint.resume, name), nnscaler_fault()
    if found is not None and found.engine == "nnscaler" and fault:
        raise UserError(f"{found.path} is a checkpoint of nnScaler, which reads it: {fault}")


def beyond(recipe, name: str) -> str:
    """What of a recipe an engine cannot do, "" if it can do all."""
    train, zero = recipe.train, recipe.parallel.zero
    if name == "torch":
        return f"parallel.zero={zero} is for parallel.engine=nnscaler (torch has 2 and 3)" if zero not in (2, 3) else ""
    for key, asked in (("offload_inputs=true", train.offload_inputs), ("kernels=liger", train.kernels == "liger")):
        if asked:
            return f"train.{key} is for parallel.engine=torch"
    return ""


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
