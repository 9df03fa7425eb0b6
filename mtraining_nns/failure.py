"""How the error of a worker reaches the launcher and the user."""

import json
import sys
import time
import traceback

from mtraining_nns import environment
from mtraining_nns.errors import UserError


class NoRoom(RuntimeError):
    """A GPU is full; says of what, and which keys of the recipe help."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether torch found no memory on a device, be it under errors of an engine."""
    seen = []
    while error is not None and error not in seen:  # a cause may have come of its own effect
        if type(error).__name__ == "OutOfMemoryError":
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def explain_memory(error: Exception, recipe, local_world: int) -> str:
    """torch's own words, and what the plan of the recipe says about them."""
    import torch

    from mtraining_nns.ops import kernels
    from mtraining_nns.plan.advice import Gpu, explain

    device, capacity, allocated = "cpu", 0, 0
    if torch.cuda.is_available():
        device = "cuda"
        capacity, allocated = torch.cuda.mem_get_info()[1], torch.cuda.max_memory_allocated()
    work = kernels.Work(block=recipe.attention.block)
    backend, _ = kernels.choose(kernels.Device.here(device), work, recipe.attention.backend)
    return f"{error}\n{explain(recipe, Gpu(backend, local_world, capacity, allocated))}"


def leave(error: Exception, rank: int) -> int:
    """Leave the error for the launcher, print it where nobody else will, return the exit code."""
    user = isinstance(error, UserError)
    text = "".join(traceback.format_exception(error))
    file = environment.error_file()
    if file is not None:  # the format that torchrun reads; `seconds` is ours, its own timestamp is too coarse to order
        extra = {"py_callstack": text, "timestamp": str(int(time.time())), "seconds": time.time(), "user": user}
        message = str(error) if user else f"{type(error).__name__}: {error}"
        with open(file, "w", encoding="utf-8") as stream:
            json.dump({"message": {"message": message, "extraInfo": extra}}, stream)
    if not environment.has_parent() and not (user and rank):
        print(f"mtraining: error: {error}" if user else f"rank {rank}: {text}", file=sys.stderr)
    return UserError.exit_code if user else 1
