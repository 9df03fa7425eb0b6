"""Says which transfer a GPU is stuck in.

On GPUs a wait for a peer is queued and nobody sees it: the host goes on, and the library that moves the bytes ends the
process after its time-out, naming neither layer nor hop. So each queued wait is followed by an event here, and a thread
looks on: where none of them completes for `timeout_s`, the oldest one names the transfer that does not end.
"""

import collections
import threading
import time
from collections.abc import Callable
from typing import Protocol


class Event(Protocol):
    """What is watched: a torch.cuda.Event, or anything that knows whether it is over."""

    def query(self) -> bool: ...


class Watch:
    """A thread that calls `stalled(what)` once, if for `timeout_s` none of the expected events completes.

    stalled runs in the thread of the watch; the main thread may be blocked in the driver for good.
    """

    def __init__(self, timeout_s: float, stalled: Callable[[str], None], poll_s: float = 1.0):
        self.timeout_s, self.stalled, self.poll_s = timeout_s, stalled, poll_s
        self.expected: collections.deque[tuple[Event, str]] = collections.deque()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._look, name="ring watch", daemon=True)
        self.thread.start()

    def expect(self, event: Event, what: str) -> None:
        """An event that the transfer `what` precedes; events complete in the order in which they are given."""
        self.expected.append((event, what))

    def close(self) -> None:
        self.closed.set()
        self.thread.join()

    def _look(self) -> None:
        moved = time.monotonic()
        while not self.closed.wait(self.poll_s):
            now = time.monotonic()
            waiting = len(self.expected)
            while self.expected and self.expected[0][0].query():
                self.expected.popleft()
            # progress counts, not age: the host may be far ahead of the device
            if not self.expected or len(self.expected) < waiting:
                moved = now
            elif now - moved > self.timeout_s:
                self.stalled(f"{self.expected[0][1]}: nothing arrived for {self.timeout_s:.0f} s")
                return
