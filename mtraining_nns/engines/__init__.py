"""Engines: who runs the training loop of a recipe. Choosing one imports neither torch nor nnScaler."""

import importlib
import importlib.util

from mtraining_nns.environment import Process
from mtraining_nns.errors import UserError

ENGINES = {"torch": "mtraining_nns.engines.torch"}


def choose(engine: str) -> tuple[str, str]:
    """(name, reason) of the engine that a recipe's `parallel.engine` means here; UserError if it cannot run."""
    if engine in ENGINES:
        return engine, "as the recipe says"
    if engine == "nnscaler":
        raise UserError("parallel.engine=nnscaler is not available in this version; use auto or torch")
    missing = importlib.util.find_spec("nnscaler") is None
    return "torch", "nnscaler is not installed" if missing else "this version has no nnscaler engine"


def train(recipe) -> dict:
    """Train a resolved recipe in this worker; returns the run's summary."""
    name, reason = choose(recipe.parallel.engine)
    if (Process.launched() or Process()).rank == 0:
        print(f"engine {name}: {reason}", flush=True)
    return importlib.import_module(ENGINES[name]).train(recipe)
