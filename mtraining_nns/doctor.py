"""What this machine has and what therefore runs: the facts behind `mtraining doctor`.

Optional packages are imported in a process of their own: a broken one raises anything at import, or crashes, and some
are slow. A package that does not work is reported with its reason and is nobody's error until a recipe asks for it.
"""

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys

from mtraining_nns import __version__, engines, environment

# label, module, distribution, what for
OPTIONAL = (
    ("triton", "triton", "triton", "GPU kernels"),
    ("flash-attn-4", "flash_attn.cute", "flash-attn-4", "dense and block-sparse kernels on Hopper"),
    ("flash-attn", "flash_attn.flash_attn_interface", "flash-attn", "dense kernels on Ampere and newer"),
    ("block-sparse-attn", "block_sparse_attn", "block-sparse-attn", "block-sparse kernels on Ampere and newer"),
    ("vllm", "vllm", "vllm", "evaluation"),
    ("nnscaler", "nnscaler", "nnscaler", "the nnScaler engine"),
)
IMPORT_TIMEOUT_S = 180


def report() -> str:
    """The whole report: sections of aligned `label  value` lines."""
    sections = {
        "versions": versions(),
        "devices": devices(),
        "optional packages": [(label, probe(module, dist, use)) for label, module, dist, use in OPTIONAL],
        "what runs": decisions(),
        "ring": ring(),
    }
    lines = []
    for title, rows in sections.items():
        lines.append(title)
        lines += [f"  {label:<18} {value}" for label, value in rows]
    return "\n".join(lines)


def versions() -> list[tuple[str, str]]:
    """Python and the packages that are always there."""
    found = [(name, version_of(name)) for name in ("torch", "transformers", "tokenizers", "safetensors")]
    return [("mtraining-nns", __version__), ("python", platform.python_version()), *found]


def devices() -> list[tuple[str, str]]:
    """The CUDA devices, or the CPU with its cores."""
    import torch

    if not torch.cuda.is_available():
        why = "this torch is a CPU build" if torch.version.cuda is None else "no CUDA device is visible"
        return [("cpu", f"{os.cpu_count()} cores"), ("cuda", why)]
    rows = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        rows.append((f"cuda:{index}", f"{device.name}, capability {device.major}.{device.minor}, {memory}"))
    return rows


def probe(module: str, distribution: str, use: str) -> str:
    """The version of an optional package, or why it cannot be used."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return f"not installed ({use})"
    command = [sys.executable, "-c", "import importlib, sys; importlib.import_module(sys.argv[1])", module]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"not usable: import took more than {IMPORT_TIMEOUT_S} s"
    if done.returncode < 0:
        return f"not usable: import died of signal {-done.returncode}"
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"not installed ({use})" if why.endswith(f"No module named '{module}'") else f"not usable: {why}"
    return version_of(distribution)


def version_of(distribution: str) -> str:
    """Version of an installed package; one that was only put on the path has none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "version unknown"


def decisions() -> list[tuple[str, str]]:
    """What `auto` means here: the attention backend and the engine, each with its reason."""
    import torch

    from mtraining_nns.ops import kernels

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    work = kernels.Work(block=128)
    rows = [("attention.backend", _outcome(lambda: kernels.choose(kernels.Device.here(device_type), work)))]
    for name, fault in kernels.backends.FAULTS.items():
        why = fault(kernels.Device.here(device_type, name), work)
        rows.append((f"  {name}", f"cannot run: {why}" if why else "runs"))
    return [*rows, ("parallel.engine", _outcome(engines.default))]


def _outcome(choose) -> str:
    try:
        name, reason = choose()
    except ValueError as error:
        return f"auto -> nothing runs: {error}"
    return f"auto -> {name}: {reason}"


def ring() -> list[tuple[str, str]]:
    """The processes that a ring would join, and how the GPUs of this machine reach each other."""
    import torch

    process = environment.Process.launched()
    gpus = torch.cuda.device_count()
    if process is not None:
        processes = f"rank {process.rank} of {process.world}, {process.local_world} of them on this machine"
    elif gpus:
        processes = f"none launched; mtraining train starts one a GPU, {gpus} here, or as many as parallel.cp x dp"
    else:
        processes = "none launched; mtraining train starts --nproc or parallel.cp x dp of them on the CPU"
    rows = [("processes", processes)]
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    direct = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    if pairs:
        rows.append(("peer access", f"{len(direct)} of {len(pairs)} ordered GPU pairs reach each other directly"))
    return rows
