"""Which kernel backend runs: a pure function of the device, the shape and what is installed.

The model never depends on the answer: every backend computes the same attention over the same index. A backend is
chosen only where its gradients were proven against the reference (tests/test_kernels_gpu.py); where it was not, the
next one serves and the reason says so.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass, replace

import torch

KERNELS = {name: f"mtraining_nns.ops.kernels.{name}" for name in ("torch", "triton", "cute", "cuda")}
# Lists and compile keys changed between builds of the one, the order in which tiles are unrolled is the other's.
CUTE_VERSIONS = {"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.1"}
CUTE_CAPABILITIES = (9,)  # Hopper; Blackwell's kernels are others and unproven
# What cute and cuda are proven for; block-sparse-attn leaves head dims above 128 unwritten, without an error.
BLOCK = 128
HEAD_DIMS = (64, 128)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)  # query heads a key head
SHORT = 8192  # up to so many sparse queries of a rank triton is as fast as cute, docs/benchmarks.md


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where kernels run: "cpu" or "cuda", the compute capability, and why a package cannot be used ("" if it can)."""

    type: str
    capability: tuple[int, int] = (0, 0)
    without_triton: str = ""
    without_cute: str = ""
    without_cuda: str = ""

    @classmethod
    def here(cls, device_type: str, backend: str = "auto") -> "Device":
        """The device of this process. backend: what is asked for; packages that only it needs are imported for it.

        Raises ValueError for a device that has no kernels, or that is not there.
        """
        try:
            kind = torch.device(device_type).type
        except (RuntimeError, TypeError):
            kind = None
        if kind == "cpu":
            return cls(type=kind)
        if kind != "cuda":
            raise ValueError(f"attention runs on devices of type cpu and cuda, got {device_type!r}")
        if not torch.cuda.is_available():
            raise ValueError(f"got device {device_type}, but torch {torch.__version__} sees no CUDA device; use cpu")
        capability = torch.cuda.get_device_capability(torch.device(device_type))
        found = cls(type=kind, capability=capability, without_triton=_triton_fault())
        if backend == "cuda":
            found = replace(found, without_cuda=_cuda_fault())
        # importing flash-attn-4 takes seconds: only where it could serve
        return replace(found, without_cute=_cute_fault()) if found.capability[0] in CUTE_CAPABILITIES else found


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a backend is asked for. None is not known yet: the model's shape, or how many queries a rank has.

    dense: every block is kept. row_bits: the index masks keys row by row (BlockIndex.row_bits).
    """

    block: int
    deterministic: bool = False
    dense: bool = False
    row_bits: bool = False
    queries: int | None = None
    head_dim: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    dtype: torch.dtype | None = None


@functools.cache
def choose(device: Device, work: Work, backend: str = "auto") -> tuple[str, str]:
    """(name, reason). Raises ValueError where the backend that was asked for, or every one, cannot do the work."""
    if backend != "auto":
        fault = FAULTS[backend](device, work)
        if fault:
            slow = device.type == "cuda" and _cute(device, work) and _triton(device, work) and not _torch(device, work)
            other = "torch, which runs anything, slowly" if slow else "auto"
            raise ValueError(f"attention.backend={backend} cannot run: {fault}; use attention.backend={other}")
        return backend, "asked for"
    if device.type != "cuda":
        return "torch", f"the backend for {device.type} devices"
    faults = {name: FAULTS[name](device, work) for name in ("cute", "triton")}
    short = not work.dense and work.queries is not None and work.queries <= SHORT
    if not faults["cute"] and (faults["triton"] or not short):
        return "cute", "the fastest on this device, FlashAttention-4"
    if not faults["triton"]:
        faster = f"as fast as cute for at most {SHORT} sparse queries a rank, got {work.queries}"
        return "triton", f"portable; cute cannot: {faults['cute']}" if faults["cute"] else faster
    slowly = _torch(device, work) or "attention.backend=torch runs anything, slowly"
    raise ValueError(f"no fast attention kernels here: triton: {faults['triton']}; cute: {faults['cute']}; {slowly}")


def load(backend: str):
    """The module of a backend by its name in KERNELS."""
    return importlib.import_module(KERNELS[backend])


def _torch(device: Device, work: Work) -> str:
    if device.type != "cuda":
        return ""
    if fault := _lists_fault(device):
        return fault
    return "the torch backend is not deterministic on CUDA devices" if work.deterministic else ""


def _triton(device: Device, work: Work) -> str:
    return _lists_fault(device) or triton_shape_fault(work.block, work.head_dim)


def _lists_fault(device: Device) -> str:
    """Why lists of blocks, which Triton's kernels make for every backend, cannot be made on a GPU."""
    if device.type != "cuda":
        return f"it needs a CUDA device, got {device.type}"
    if device.without_triton:
        return f"lists of blocks are made by Triton: {device.without_triton}"
    if device.capability < (8, 0):
        return f"lists of blocks are made by Triton, for compute capability 8.0 or newer, got {device.capability}"
    return ""


def triton_shape_fault(block: int, head_dim: int | None) -> str:
    """Why Triton's kernels cannot do a shape on any device, "" if they can."""
    if head_dim not in (None, 16, 32, 64, 128):
        return f"it does head dims 16, 32, 64 and 128, got {head_dim}"
    if block > 128 and block % 128:
        return f"it needs attention.block of 16 to 128 or a multiple of 128, got {block}"
    return ""


def _cute(device: Device, work: Work) -> str:
    if fault := _lists_fault(device):
        return fault
    if device.capability[0] not in CUTE_CAPABILITIES:
        return f"it is proven on compute capability 9.x only, got {device.capability}"
    if device.without_cute:
        return device.without_cute
    if fault := _package_shape_fault(work):
        return fault
    if work.dtype not in (None, torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, got {work.dtype}"
    return ""


def _cuda(device: Device, work: Work) -> str:
    if fault := _lists_fault(device) or device.without_cuda or _package_shape_fault(work):
        return fault
    if work.dtype not in (None, torch.bfloat16):
        return f"it is proven in bfloat16, got {work.dtype}"
    if None not in (work.queries, work.heads, work.head_dim) and work.queries * work.heads * work.head_dim >= 1 << 31:
        # block-sparse-attn's backward pass moves from one listed block to the next by a 32-bit offset
        return (
            f"it takes fewer than 2^31 elements of the queries of a rank, got {work.queries} tokens of"
            f" {work.heads} x {work.head_dim}"
        )
    return ""


def _package_shape_fault(work: Work) -> str:
    """What neither package of block-sparse kernels does, whatever the dtype."""
    if work.row_bits:
        return "it cannot mask single rows, as attention.pattern=moba does"
    if work.block != BLOCK:
        return f"it needs attention.block={BLOCK}, got {work.block}"
    if work.deterministic:
        return "its backward pass adds in any order, attention.deterministic asks for one"
    if work.head_dim not in (None, *HEAD_DIMS):
        return f"it is proven for head dims {' and '.join(map(str, HEAD_DIMS))}, got {work.head_dim}"
    if work.heads is not None and work.heads // work.kv_heads not in GROUPS:
        proven = ", ".join(map(str, GROUPS))
        return f"it is proven for {proven} query heads a key head, got {work.heads}/{work.kv_heads}"
    return ""


FAULTS = {"torch": _torch, "triton": _triton, "cute": _cute, "cuda": _cuda}


@functools.cache
def _triton_fault() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    return _import_fault("triton", importlib.import_module, "triton")


@functools.cache
def _cute_fault() -> str:
    """Why flash-attn-4 cannot be used."""
    for package, proven in CUTE_VERSIONS.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed; pip install {package}=={proven}"
        if found != proven:
            return f"it is proven with {package} {proven}, got {found}; pip install {package}=={proven}"
    return _import_fault("flash-attn-4", load, "cute")


@functools.cache
def _cuda_fault() -> str:
    """Why block-sparse-attn cannot be used."""
    if importlib.util.find_spec("block_sparse_attn") is None:
        return "block-sparse-attn is not installed; pip install 'mtraining-nns[cuda]' compiles it"
    return _import_fault("block-sparse-attn or flash-attn", load, "cuda")


def _import_fault(package: str, load_module, name: str) -> str:
    """A broken installation fails in many ways, not by ImportError alone."""
    try:
        load_module(name)
    except Exception as error:  # noqa: BLE001
        return f"{package} does not import: {type(error).__name__}: {error}"
    return ""
