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


def choose(engine: str) -> tuple[str, str]:
    """(name, reason) of the engine that a recipe's `parallel.engine` means here; UserError if it cannot run."""
    fault = nnscaler_fault()
    if engine == "nnscaler" and fault:
        raise UserError(f"parallel.engine=nnscaler cannot run: {fault}")
    if engine != "auto":
        return engine, "as the recipe says"
    return "torch", fault or "parallel.engine=nnscaler asks for the other one"


def check(recipe) -> None:
    """UserError for a recipe that its engine cannot do, and where the other engine has trained in its folder."""
    name, zero = choose(recipe.parallel.engine)[0], recipe.parallel.zero
    if name == "torch" and zero not in (2, 3):
        raise UserError(
            f"parallel.zero={zero} is for parallel.engine=nnscaler, the torch engine does 2 and 3; use one of these"
        )
    train = recipe.train
    for key, asked in (("offload_inputs=true", train.offload_inputs), ("kernels=liger", train.kernels == "liger")):
        if name == "nnscaler" and asked:
            raise UserError(f"train.{key} is for parallel.engine=torch, got nnscaler; leave one out")
    folder = recipe.checkpoint.dir
    for other, place in CHECKPOINTS.items():
        found = glob.glob(os.path.join(glob.escape(folder), place))
        if other != name and found:
            raise UserError(
                f"checkpoint.dir={folder} holds {os.path.basename(os.path.dirname(max(found)))} of the {other} engine,"
                f" which parallel.engine={name} does not read; go on with parallel.engine={other}, or take another"
                " checkpoint.dir"
            )


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
    name, reason = choose(recipe.parallel.engine)
    if (Process.launched() or Process()).rank == 0:
        print(f"engine {name}: {reason}", flush=True)
    return importlib.import_module(ENGINES[name]).train(recipe)
