"""Let nnScaler trace shapes alone (trace_strategy="meta"): seconds for 524288 tokens, and no memory for them.

    keep_types(), keep_devices()        once, before anything is traced; `nnscaler_ops` calls them

While it traces, nnScaler replaces builtins such as `bool` by stand-ins. Some of torch's own shape functions are Python
and ask for the very types. And it says that every x.device is cuda, so that x.to(y.device) would leave the shapes.
"""

import builtins
import importlib
import sys

import torch

SHAPE_FUNCTIONS = ("torch._prims", "torch._refs", "torch._decomp", "torch._meta_registrations", "torch.fx.experimental")
FIRST_USED_LATE = ("torch._refs", "torch._meta_registrations", "torch.fx.experimental.symbolic_shapes")
TYPES = ("bool", "int", "float", "complex")


def keep_types() -> None:
    """Give the modules of torch's shape functions names of their own for Python's types."""
    for name in FIRST_USED_LATE:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name.startswith(SHAPE_FUNCTIONS):
            for kind in TYPES:
                vars(module).setdefault(kind, getattr(builtins, kind))


def keep_devices() -> None:
    """Let x.to(y.device) stay where the tracer runs: on meta or on the CPU."""
    from nnscaler.graph.tracer import pytree_utils, trace_strategy

    place = trace_strategy.BaseTraceStrategy._place_tensors_to

    def place_and_map(*args, device):
        def here(wanted: torch.device) -> torch.device:
            return torch.device(device) if wanted.type == "cuda" else wanted

        placed = place(*args, device=device)
        return pytree_utils.tree_map_only(torch.device, here, placed) if device in ("cpu", "meta") else placed

    trace_strategy.BaseTraceStrategy._place_tensors_to = staticmethod(place_and_map)
