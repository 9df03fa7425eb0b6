"""Where the time of a step goes, measured while it runs: CUDA events on a GPU, wall time on a CPU.

    with clock.running(device) as found:
        step()
    found.seconds()           {"step": 4.1, "attention forward": 0.6, "index": 0.1, "wait": 0.02, ...}

Code names its spans by `clock.span(name)`, which costs nothing while no clock runs. Spans of one name add up; those of
different names may lie inside one another ("wait" lies in "attention forward"). On a GPU a span is what passes on the
compute stream: a wait for a transfer that has arrived takes nothing.
"""

import time
from collections import defaultdict
from contextlib import contextmanager

import torch

_running: "Clock | None" = None  # global, since backward passes run in threads of their own


class Clock:
    """Spans of one step by name."""

    def __init__(self, device: torch.device):
        self.on_gpu, self.spans = device.type == "cuda", defaultdict(list)

    def now(self):
        """A moment: an event on the compute stream, or seconds."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        """Sums by name; waits for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return {name: sum(self._between(*span) for span in spans) for name, spans in self.spans.items()}

    def _between(self, before, after) -> float:
        return before.elapsed_time(after) / 1e3 if self.on_gpu else after - before


@contextmanager
def running(device: torch.device):
    """Within it spans are measured, and the whole as "step"; one clock at a time."""
    global _running
    assert _running is None, "a clock runs already"
    _running = Clock(device)
    try:
        with span("step"):
            yield _running
    finally:
        _running = None


@contextmanager
def span(name: str):
    """Measure what happens within it, if a clock runs."""
    clock = _running
    if clock is None or (clock.on_gpu and torch.cuda.current_stream() != torch.cuda.default_stream()):
        yield  # beside the compute stream nothing stands still
        return
    before = clock.now()
    try:
        yield
    finally:
        clock.spans[name].append((before, clock.now()))
