"""One run a folder: two would remove each other's checkpoints, or write every answer twice.

The lock goes with its process, however that ends.
"""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator

from mtraining_nns.errors import UserError

NAME = ".lock"  # in the folder


@contextlib.contextmanager
def held(folder: str | os.PathLike, option: str) -> Iterator[None]:
    """Hold the lock of a folder that an option names, such as checkpoint.dir.

    UserError where another run holds it, a warning where there are no locks.
    """
    try:
        file = os.open(os.path.join(folder, NAME), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"{option}={folder} cannot be written ({error.strerror}); take another folder") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
    except BlockingIOError as error:
        holder = os.pread(file, 1000, 0).decode(errors="replace")
        os.close(file)
        raise UserError(
            f"{option}={folder} is that of a run at work ({holder}); wait for its end, or take another folder"
        ) from error
    except OSError as error:
        print(f"{option}={folder} takes no lock ({error.strerror}): start no second run in it", flush=True)
    try:
        yield
    finally:
        os.close(file)
