"""Top-p: the fewest largest masses that together reach a share of a total, the one that crosses it included."""

import torch


def descending(mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(order, mass in that order) along the last dim, largest first, equal entries in their own order."""
    mass, order = mass.sort(dim=-1, descending=True, stable=True)
    return order, mass


def within_share(mass: torch.Tensor, total: torch.Tensor, share: float) -> torch.Tensor:
    """bool like mass (descending): the entries that are kept; share 1 keeps every entry.

    >>> within_share(torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor(10.0), 0.7).tolist()
    [True, True, False, False]
    """
    if share == 1.0:
        return torch.ones_like(mass, dtype=torch.bool)
    mass = mass.clamp_min(0).double()  # in fp32 the order of a parallel sum could move the cut between two runs
    return mass.cumsum(-1) - mass < share * total


def fewest(mass: torch.Tensor, share: float) -> torch.Tensor:
    """bool like mass: the fewest largest entries along the last dim that reach a share of its sum."""
    order, ranked = descending(mass)
    kept = within_share(ranked, mass.sum(-1, keepdim=True, dtype=torch.float64), share)
    return torch.zeros_like(kept).scatter_(-1, order, kept)
