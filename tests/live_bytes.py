"""Bytes of all tensors that live at one time, counted as torch makes and frees them: what a memory model is held to.

    with LiveBytes() as live:
        step()
    live.peak, live.bytes

Counts CPU storages, those that were there before `include` included; storages that FSDP empties count for nothing.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    @property
    def bytes(self) -> int:
        return sum(
            storage.nbytes() for storage in map(lambda ref: ref(), self.storages.values()) if storage is not None
        )

    def include(self, tensors) -> None:
        for x in tensors:
            storage = getattr(x, "_local_tensor", x).untyped_storage()
            self.storages[storage._cdata] = weakref.ref(storage)

    def reset(self) -> None:
        self.peak = self.bytes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.include(x for x in tree_leaves(found) if isinstance(x, torch.Tensor))
        self.storages = {key: ref for key, ref in self.storages.items() if ref() is not None}
        self.peak = max(self.peak, self.bytes)
        return found
