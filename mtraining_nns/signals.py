"""Ending a run by a signal without losing work.

    SIGTERM or SIGUSR1      the step ends on all ranks, a checkpoint is saved, every worker leaves with exit code 75
    one more, 3 s later     the process ends at once, with exit code 128 + signal

One request may reach a worker twice, from a scheduler and from its launcher: what follows within 3 s is the same one.
Loads no torch, for the launcher passes signals on with it.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: not done, the same command goes on
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
REPEAT_S = 3.0


class Stopped(Exception):
    """The run ended early because a signal asked for it; what it had done is saved."""


class _Heard:
    """What this process was asked for so far."""

    number = 0
    since_s = 0.0
    farewell: str | None = None
    stopped = False


def listen() -> None:
    """Take the signals from now on, in a thread: the main one may wait in a driver for a peer. Main thread only."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_hear, args=(reader, writer), name="signals", daemon=True).start()


def asked() -> tuple[float, ...]:
    """1.0 at the signal that asked this process to stop, else 0.0, in the order of SIGNALS: a sum over ranks tells."""
    return tuple(float(number == _Heard.number) for number in SIGNALS)


def name(counts: list[float]) -> str:
    """Name of the signal that any rank heard, from the sums of `asked` over all ranks; "" for none."""
    return next((number.name for number, count in zip(SIGNALS, counts) if count > 0), "")


def all_is_saved(farewell: str) -> None:
    """From now on a signal ends this process at once, with exit code 75 and these words."""
    _Heard.farewell = farewell
    if _Heard.number:
        _leave(_Heard.number)


def stop(farewell: str) -> None:
    """End this run, which was asked for it and has saved: raises Stopped, and a further signal changes nothing."""
    _Heard.stopped = True
    raise Stopped(farewell)


@contextlib.contextmanager
def passed_on() -> Iterator[list[int]]:
    """Within it the signals go to the child processes of this one; yields those that came. Main thread only."""
    came: list[int] = []

    def pass_on(number, frame) -> None:
        came.append(number)
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hear(reader: socket.socket, writer: socket.socket) -> None:
    while True:
        number, now = reader.recv(1)[0], time.monotonic()  # Python writes every signal that it handles to `writer`
        if number not in SIGNALS:
            continue
        if _Heard.number and _Heard.stopped:
            os._exit(STOPPED)
        if _Heard.number and now - _Heard.since_s > REPEAT_S:
            print(f"{signal.Signals(number).name} again: ended at once", file=sys.stderr, flush=True)
            os._exit(128 + number)
        if not _Heard.number:
            _Heard.number, _Heard.since_s = number, now
            if _Heard.farewell is not None:
                _leave(number)


def _leave(number: int) -> None:
    print(f"stopped by {signal.Signals(number).name}: {_Heard.farewell}", flush=True)
    os._exit(STOPPED)


def _children() -> list[int]:
    """Process ids of the children that this process's main thread started."""
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as stream:
        return [int(word) for word in stream.read().split()]
