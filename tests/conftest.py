"""What every test shares: Triton's interpreter where there is no GPU, marks that need hardware, poisoned memory."""

import os
import tempfile

import pytest
import torch
from helpers import poisoned

from mtraining_nns import environment

torch.set_num_threads(1)  # tests run side by side, and their tensors are small

# Triton reads this when its kernels are decorated, so it must stand before the first import of a Triton file.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def poison(monkeypatch):
    """torch.empty and torch.empty_like give NaN, so that a result nobody wrote is seen."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


@pytest.fixture
def own_tmp(tmp_path, monkeypatch):
    """A temporary folder of its own, and no compiler told yet where to keep kernels."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in environment.CACHES:
        monkeypatch.setenv(name, "")  # so that it is set back
        monkeypatch.delenv(name)
    return tmp_path
