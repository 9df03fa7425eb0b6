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
CUTE_VERSION = "4.0.0b36"  # of flash-attn-4: lists and compile keys changed between its builds
CUTE_CAPABILITIES = (9,)  # Hopper; Blackwell's kernels are others and unproven
CUTE_HEAD_DIMS = (64, 128)
CUTE_BLOCK = 128
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)  # query heads a key head that cute and cuda are proven for
SHORT = 16384  # sparse queries of a rank up to which triton is faster than cute: docs/benchmarks.md, hops of a ring
CUDA_HEAD_DIMS = (64, 128)  # block-sparse-attn leaves those above 128 unwritten, without an error
CUDA_BLOCK = 128
NO_ROW_BITS = "it cannot mask single rows, as attention.pattern=moba does"


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
        kind = torch.device(device_type).type
        if kind == "cpu":
            return cls(type=kind)
        if kind != "cuda":
            raise ValueError(f"attention runs on devices of type cpu and cuda, got {device_type}")
        if not torch.cuda.is_available():
            raise ValueError(f"got device {device_type}, but torch {torch.__version__} sees no CUDA device; use cpu")
        found = cls(type=kind, capability=torch.cuda.get_device_capability(), without_triton=_triton_fault())
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
            raise ValueError(f"attention.backend={backend} cannot run: {fault}; use attention.backend=auto")
        return backend, "asked for"
    if device.type != "cuda":
        return "torch", f"the backend for {device.type} devices"
    faults = {name: FAULTS[name](device, work) for name in ("cute", "triton")}
    short = not work.dense and work.queries is not None and work.queries <= SHORT
    if not faults["cute"] and (faults["triton"] or not short):
        return "cute", "the fastest on this device, FlashAttention-4"
    if not faults["triton"]:
        faster = f"faster than cute for at most {SHORT} sparse queries a rank, got {work.queries}"
        return "triton", f"portable; cute cannot: {faults['cute']}" if faults["cute"] else faster
    raise ValueError(
        f"no fast attention kernels here: triton: {faults['triton']}; cute: {faults['cute']};"
        " attention.backend=torch runs anything, slowly"
    )


def load(backend: str):
    """The module of a backend by its name in KERNELS."""
    return importlib.import_module(KERNELS[backend])


def _torch(device: Device, work: Work) -> str:
    if device.type == "cuda" and work.deterministic:
        return "the torch backend is not deterministic on CUDA devices"
    return ""


def _triton(device: Device, work: Work) -> str:
    if device.type != "cuda":
        return f"it needs a CUDA device, got {device.type}"
    if device.without_triton:
        return device.without_triton
    if device.capability < (8, 0):
        return f"it needs compute capability 8.0 or newer, got {device.capability}"
    return triton_shape_fault(work.block, work.head_dim)


def triton_shape_fault(block: int, head_dim: int | None) -> str:
    """Why Triton's kernels cannot do a shape on any device, "" if they can."""
    if head_dim not in (None, 16, 32, 64, 128):
        return f"it does head dims 16, 32, 64 and 128, got {head_dim}"
    if block > 128 and block % 128:
        return f"it needs attention.block of 16 to 128 or a multiple of 128, got {block}"
    return ""


def _cute(device: Device, work: Work) -> str:
    if device.type != "cuda":
        return f"it needs a CUDA device, got {device.type}"
    if device.capability[0] not in CUTE_CAPABILITIES:
        return f"it is proven on compute capability 9.x only, got {device.capability}"
    if device.without_cute:
        return device.without_cute
    if work.row_bits:
        return NO_ROW_BITS
    if work.block != CUTE_BLOCK:
        return f"it needs attention.block={CUTE_BLOCK}, got {work.block}"
    if work.deterministic:
        return "its backward pass adds in any order, attention.deterministic asks for one"
    if work.head_dim not in (None, *CUTE_HEAD_DIMS):
        return f"it is proven for head dims 64 and 128, got {work.head_dim}"
    if fault := _group_fault(work):
        return fault
    if work.dtype not in (None, torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, got {work.dtype}"
    return ""


def _cuda(device: Device, work: Work) -> str:
    if device.type != "cuda":
        return f"it needs a CUDA device, got {device.type}"
    if device.capability < (8, 0):
        return f"it needs compute capability 8.0 or newer, got {device.capability}"
    if device.without_cuda or device.without_triton:
        return device.without_cuda or device.without_triton
    if work.row_bits:
        return NO_ROW_BITS
    if work.block != CUDA_BLOCK:
        return f"it needs attention.block={CUDA_BLOCK}, got {work.block}"
    if work.deterministic:
        return "its backward pass adds in any order, attention.deterministic asks for one"
    if work.head_dim not in (None, *CUDA_HEAD_DIMS):
        return f"it is proven for head dims 64 and 128, got {work.head_dim}"
    if fault := _group_fault(work):
        return fault
    if work.dtype not in (None, torch.bfloat16):
        return f"it is proven in bfloat16, got {work.dtype}"
    return ""


def _group_fault(work: Work) -> str:
    if work.heads is None or work.heads // work.kv_heads in GROUPS:
        return ""
    return f"it is proven for {', '.join(map(str, GROUPS))} query heads a key head, got {work.heads}/{work.kv_heads}"


FAULTS = {"torch": _torch, "triton": _triton, "cute": _cute, "cuda": _cuda}


@functools.cache
def _triton_fault() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    try:
        importlib.import_module("triton")
    except Exception as error:  # noqa: BLE001
        return f"triton does not import: {type(error).__name__}: {error}"
    return ""


@functools.cache
def _cute_fault() -> str:
    """Why flash-attn-4 cannot be used; a broken installation fails in many ways, not by ImportError alone."""
    try:
        found = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return f"flash-attn-4 is not installed; pip install flash-attn-4=={CUTE_VERSION}"
    if found != CUTE_VERSION:
        return f"it is proven with flash-attn-4 {CUTE_VERSION}, got {found}"
    try:
        load("cute")
    except Exception as error:  # noqa: BLE001
        return f"flash-attn-4 does not import: {type(error).__name__}: {error}"
    return ""


@functools.cache
def _cuda_fault() -> str:
    """Why block-sparse-attn cannot be used."""
    if importlib.util.find_spec("block_sparse_attn") is None:
        return "block-sparse-attn is not installed; pip install 'mtraining-nns[cuda]' compiles it"
    try:
        load("cuda")
    except Exception as error:  # noqa: BLE001
        return f"block-sparse-attn or flash-attn does not import: {type(error).__name__}: {error}"
    return ""
