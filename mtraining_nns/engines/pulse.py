"""Says which rank hangs, where the library that moves the bytes would only say that it waited too long.

    every few seconds each rank writes (beat, place) into the launcher's store and reads those of all
    the beat stands still            its process is stopped, its machine gone or cut off
    the place is behind the others'  its main thread hangs: others wait for it in a later part of the step

A thread does this, so a step costs nothing. gloo raises after the time-out and is given the name (`blamed`). On GPUs
the main thread may wait in the driver for good: there the thread itself ends the process, before NCCL's watchdog does.
"""

import threading
import time
from collections.abc import Callable

BEATS = 6  # in a time-out
LONGEST_S = 10.0  # between two beats
LEFT = -1  # the beat of a rank that is done, or has an error of its own
SILENT_BEATS = 3  # after an error, a rank that missed as many is named


class Pulse:
    """The places of all ranks, kept by a thread of this one until `close`.

    store: of torch.distributed, alive as long as this is. nodes: of every rank. stalled(text) is called once, in the
    thread, when a rank is silent or behind for `timeout_s`, which may be set to a longer time for a while.
    """

    def __init__(self, store, rank: int, nodes: list[str], timeout_s: float, stalled: Callable[[str], None]):
        self.store, self.rank, self.nodes, self.timeout_s, self.stalled = store, rank, nodes, timeout_s, stalled
        self.place, self.beat, self.interval_s = (0, "start"), 0, min(LONGEST_S, timeout_s / BEATS)
        now = time.monotonic()
        self.seen = [(0, 0, "start")] * len(nodes)  # beat, number and name of the place of each rank
        self.beaten, self.reached = [now] * len(nodes), (0, now)  # when a beat was new; farthest place and since when
        self.store.set(str(rank), "0|0|start")
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="pulse", daemon=True)
        self.thread.start()

    def at(self, what: str) -> None:
        """The main thread comes to a place; all ranks pass the same places in one order."""
        self.place = (self.place[0] + 1, what)

    def close(self) -> None:
        self.closed.set()
        self.thread.join(timeout=1)  # it may wait for a store that is gone

    def blamed(self) -> str:
        """After an error: which rank hangs, "" where none is silent or behind."""
        return self.verdict(SILENT_BEATS * self.interval_s)

    def verdict(self, patience_s: float) -> str:
        """Which ranks have been silent, else behind, for that long; "" for none."""
        now, (farthest, since) = time.monotonic(), self.reached
        silent = [rank for rank, at in enumerate(self.beaten) if now - at > patience_s and rank != self.rank]
        if silent:
            return self._told(silent, f"not answered for {now - min(self.beaten[rank] for rank in silent):.0f} s")
        behind = [rank for rank, (_, number, _) in enumerate(self.seen) if number < farthest]
        if behind and now - since > patience_s:
            return self._told(behind, f"hung for {now - since:.0f} s, the others wait")
        return ""

    def _told(self, ranks: list[int], what: str) -> str:
        names = ", ".join(f"rank {rank} on {self.nodes[rank]} (in {self.seen[rank][2]})" for rank in ranks)
        return f"{names} {'has' if len(ranks) == 1 else 'have'} {what}"

    def _watch(self) -> None:
        keys, looked = [str(rank) for rank in range(len(self.nodes))], time.monotonic()
        while not self.closed.wait(self.interval_s):
            self.beat += 1
            self.store.set(str(self.rank), f"{self.beat}|{self.place[0]}|{self.place[1]}")
            values = self.store.multi_get(keys)
            now = time.monotonic()
            if now - looked > SILENT_BEATS * self.interval_s:  # this process was stopped itself
                self.beaten, self.reached = [now] * len(keys), (self.reached[0], now)
            looked = now
            self._read(values, now)
            if found := self.verdict(self.timeout_s):
                self.stalled(found)
                return
        self.store.set(str(self.rank), f"{LEFT}|{self.place[0]}|{self.place[1]}")

    def _read(self, values: list[bytes], now: float) -> None:
        for rank, value in enumerate(values):
            beat, number, name = value.decode().split("|", 2)
            if int(beat) == LEFT or int(beat) != self.seen[rank][0]:
                self.beaten[rank] = now
            self.seen[rank] = (int(beat), int(number), name)
        farthest = max(number for _, number, _ in self.seen)
        if farthest > self.reached[0]:
            self.reached = (farthest, now)
