"""Let nnScaler trace shapes alone (trace_strategy="meta"): seconds for 524288 tokens, and no memory for them.

    keep_types()        once, before anything is traced; `nnscaler_ops` calls it

While it traces, nnScaler replaces builtins such as `bool` by stand-ins. Some of torch's own shape functions are Python
and ask for the very types.
"""

import builtins
import importlib
import sys

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
