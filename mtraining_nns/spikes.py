"""Losses far above those of the steps before.

    last 8 losses   2.1 2.0 2.2 2.1 2.0 2.1 2.3 2.1     median 2.1, median distance to it (MAD) 0.05
    limit           2.1 + 10 * 0.05 = 2.6               log.spike_factor 10

Median and MAD do not move with the spike itself. A MAD below half a percent of the median counts as that: a rise that
small is no event, however smooth the curve is.
"""

from statistics import median

LEAST_MAD = 0.005  # of the median


def limit(losses: list[float], log) -> tuple[float, float] | None:
    """(median, limit) for the next loss from all losses so far; None in the warm-up, or where the recipe wants none."""
    if log.spike_window == 0 or len(losses) < max(log.spike_warmup, 2):
        return None
    last = losses[-log.spike_window :]
    middle = median(last)
    spread = max(median(abs(loss - middle) for loss in last), LEAST_MAD * abs(middle))
    return middle, middle + log.spike_factor * spread


def told(loss: float, grad_norm: float, found: tuple[float, float], batch: str) -> str:
    """A spike in words; batch: what the step read."""
    middle, most = found
    return f"loss spike: loss {loss:.4f} above {most:.4f}, median {middle:.4f}, norm {grad_norm:.2f}, {batch}"
