"""The watch names the oldest transfer once nothing moves any more, and nobody before."""

import threading

import pytest

from mtraining_nns.ops.watch import Watch


class Transfer:
    def __init__(self, done: bool = False):
        self.done = done

    def query(self) -> bool:
        return self.done


@pytest.fixture
def watched():
    stalled, named = threading.Event(), []

    def name(what: str) -> None:
        named.append(what)
        stalled.set()

    watch = Watch(0.3, name, poll_s=0.02)
    yield watch, stalled, named
    watch.close()


def test_the_oldest_transfer_is_named(watched):
    watch, stalled, named = watched
    for what, done in (("hop 1", True), ("hop 2", False), ("hop 3", False)):
        watch.expect(Transfer(done), what)
    assert stalled.wait(5)
    assert named == ["hop 2: nothing arrived for 0 s"]


def test_progress_counts_not_age(watched):
    watch, stalled, _ = watched
    transfers = [Transfer() for _ in range(5)]
    for i, transfer in enumerate(transfers):
        watch.expect(transfer, f"hop {i}")
    for transfer in transfers:  # a second in sum, each hop within the time-out
        assert not stalled.wait(0.2)
        transfer.done = True
    assert not stalled.wait(0.5), "nothing is expected any more"
    watch.expect(Transfer(), "hop 5")
    assert not stalled.wait(0.15), "idle time is nobody's stall"
    assert stalled.wait(5)
