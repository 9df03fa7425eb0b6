"""How the error of a worker reaches the launcher and the user."""

import json
import sys
import time
import traceback

from mtraining_nns import environment
from mtraining_nns.errors import UserError


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
