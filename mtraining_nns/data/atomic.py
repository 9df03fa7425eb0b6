"""A folder that appears complete or not at all: it is written under another name and renamed.

    .NAME.partial-3f2a...   written here, locked by its run          -- rename -->   NAME
    .NAME.partial-77c0...   no lock: a killed run left it; the next run removes it, or goes on in it (`work_folder`)

Needs a local or network file system with flock; the folder and its sibling are on the same one.
"""

import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mtraining_nns.errors import UserError

RESULT = "data"  # in a work folder: what becomes NAME


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary sibling of `out` that takes its place when the block ends without an error, and is gone otherwise.

    A run holds a lock on its sibling. What a killed run left has no lock any more and is removed by the next run.
    """
    partial, lock = _take(out, lambda _: False)
    try:
        yield partial
        _put_in_place(partial, out)
    finally:
        os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def work_folder(out: Path, resumable: Callable[[Path], bool]) -> Iterator[Path]:
    """A temporary sibling of `out` whose RESULT takes its place when the block ends without an error.

    It is one that a killed run left, where `resumable(sibling)` says so; all others without a lock are removed. After
    an error other than the user's a resumable one stays for the next run.
    """
    work, lock = _take(out, resumable)
    stays = False
    try:
        yield work
        _put_in_place(work / RESULT, out)
    except UserError:
        raise
    except BaseException:
        stays = resumable(work)
        raise
    finally:
        os.close(lock)
        if not stays:
            shutil.rmtree(work, ignore_errors=True)


def _take(out: Path, resumable: Callable[[Path], bool]) -> tuple[Path, int]:
    """A sibling of `out` and the lock on it: the first resumable one, or a new one."""
    found = None
    for sibling in sorted(out.parent.glob(f".{glob.escape(out.name)}.partial-*")):
        lock = _lock(sibling)
        if lock is None:
            continue
        if found is None and resumable(sibling):
            found = sibling, lock
        else:
            shutil.rmtree(sibling, ignore_errors=True)
            os.close(lock)
    return found or _new(out)


def _new(out: Path) -> tuple[Path, int]:
    partial = _sibling(out)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write into {out.parent} ({error.strerror}); choose another --out") from error
    lock = os.open(partial, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return partial, lock


def _lock(folder: Path) -> int | None:
    """A lock on a folder that no run holds, None for one that is being written or is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None  # another run was faster
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    if folder.exists():  # not removed by the run that held the lock just now
        return lock
    os.close(lock)
    return None


def _sibling(out: Path) -> Path:
    return out.parent / f".{out.name}.partial-{uuid.uuid4().hex}"


def _put_in_place(partial: Path, out: Path) -> None:
    if not out.exists():
        os.replace(partial, out)
        return
    # A full folder cannot be replaced by a rename: move it aside under a name that the next run would clean up.
    old = _sibling(out)
    os.replace(out, old)
    os.replace(partial, out)
    shutil.rmtree(old)
