"""A folder that appears complete or not at all: it is written under another name and renamed.

    .NAME.partial-3f2a...   written here, locked by its run          -- rename -->   NAME
    .NAME.partial-77c0...   no lock: a killed run left it, removed by the next run

Needs a local or network file system with flock; the folder and its sibling are on the same one.
"""

import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtraining_nns.errors import UserError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary sibling of `out` that takes its place when the block ends without an error, and is gone otherwise.

    A run holds a lock on its sibling. What a killed run left has no lock any more and is removed by the next run.
    """
    partial = _sibling(out)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write into {out.parent} ({error.strerror}); choose another --out") from error
    lock = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for sibling in out.parent.glob(f".{glob.escape(out.name)}.partial-*"):
            _remove_unless_locked(sibling)
        yield partial
        _put_in_place(partial, out)
    finally:
        os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)


def _sibling(out: Path) -> Path:
    return out.parent / f".{out.name}.partial-{uuid.uuid4().hex}"


def _remove_unless_locked(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return  # another run was faster
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass  # another run is writing it
    finally:
        os.close(lock)


def _put_in_place(partial: Path, out: Path) -> None:
    if not out.exists():
        os.replace(partial, out)
        return
    # A full folder cannot be replaced by a rename: move it aside under a name that the next run would clean up.
    old = _sibling(out)
    os.replace(out, old)
    os.replace(partial, out)
    shutil.rmtree(old)
