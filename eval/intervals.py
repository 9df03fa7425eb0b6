"""95 % intervals of the mean of paired differences that hold for few pairs, too.

    of_scores([0, 0, 1, 0])         right or wrong: Bonett and Price, as if two more questions differed, one each way
    of_scores([0, 0.25, 0.5])       otherwise as `of_mean`
    of_mean([0.3, 0.1, 0.2])        mean +- t_(n-1) * standard deviation / sqrt(n)

Of differences -1, 0 and 1 the standard deviation says little: twenty pairs that agree have none, and yet one in ten of
all pairs may differ. With one more pair each way, d~ = sum d / (n + 2), Bonett and Price take

    d~ +- 1.96 * sqrt((sum d^2 + 2) / (n + 2) - d~^2) / sqrt(n + 2)

Sources: Bonett and Price 2012, recommended by Fagerland, Lydersen and Laake 2014 (Statistics in Medicine 33); the
distribution of t in closed form, Abramowitz and Stegun 26.7.3 and 26.7.4.
"""

import math
from statistics import NormalDist

import numpy as np

SURE = 0.95


def of_scores(differences: np.ndarray) -> tuple[float, float] | None:
    """Of the mean of [n] differences of scores from 0 to 1; None of a single one."""
    count = len(differences)
    if count < 2 or not np.isin(differences, (-1, 0, 1)).all():
        return of_mean(differences)
    mean = differences.sum() / (count + 2)
    variance = ((differences**2).sum() + 2) / (count + 2) - mean**2
    reach = NormalDist().inv_cdf(0.5 + SURE / 2) * math.sqrt(variance / (count + 2))
    return max(-1.0, float(mean - reach)), min(1.0, float(mean + reach))


def of_mean(differences: np.ndarray) -> tuple[float, float] | None:
    """Of the mean of [n] differences of any size; None of a single one."""
    count = len(differences)
    if count < 2:
        return None
    mean, reach = differences.mean(), t_quantile(count - 1) * differences.std(ddof=1) / math.sqrt(count)
    return float(mean - reach), float(mean + reach)


def t_quantile(degrees: int) -> float:
    """What |T| of Student's distribution stays below with probability SURE.

    >>> round(t_quantile(1), 3), round(t_quantile(19), 3)
    (12.706, 2.093)
    """
    low, high = 0.0, math.pi / 2  # T = sqrt(degrees) * tan(angle)
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _below(angle, degrees) < SURE else (low, angle)
    return math.sqrt(degrees) * math.tan(angle)


def _below(angle: float, degrees: int) -> float:
    """P(|T| < sqrt(degrees) * tan(angle))."""
    odd = degrees % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
