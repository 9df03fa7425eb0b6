"""Which backend is chosen, for every device and shape; nothing runs here."""

import importlib.metadata
import re

import pytest
import torch

from mtraining_nns.ops import attention, config, kernels
from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.kernels import Device, Work, backends, choose
from mtraining_nns.ops.ring import Ring

CPU, H200 = Device(type="cpu"), Device(type="cuda", capability=(9, 0))
A100 = Device(type="cuda", capability=(8, 0))
NO_CUDA_PACKAGE = Device(type="cuda", capability=(8, 0), without_cuda="no package")
NO_TRITON = Device(type="cuda", capability=(9, 0), without_triton="no triton")
QWEN = {"head_dim": 128, "heads": 16, "kv_heads": 2, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    "device,work,expected",
    [
        (CPU, Work(block=128), ("torch", "the backend for cpu devices")),
        (H200, Work(block=128), ("cute", "the fastest on this device")),
        (H200, Work(block=128, **QWEN), ("cute", "the fastest on this device")),
        (H200, Work(block=64, **QWEN), ("triton", "cute cannot: it needs attention.block=128, got 64")),
        (H200, Work(block=128, deterministic=True), ("triton", "attention.deterministic")),
        (H200, Work(block=128, **QWEN | {"head_dim": 32}), ("triton", "proven for head dims 64 and 128, got 32")),
        (H200, Work(block=128, **QWEN | {"dtype": torch.float32}), ("triton", "got torch.float32")),
        (H200, Work(block=128, **QWEN | {"heads": 22}), ("triton", "query heads a key head, got 22/2")),
        (H200, Work(block=128, queries=8192, **QWEN), ("triton", "as fast as cute .* got 8192")),
        (H200, Work(block=128, queries=8192, dense=True, **QWEN), ("cute", "the fastest on this device")),
        (H200, Work(block=128, queries=16512, **QWEN), ("cute", "the fastest on this device")),
        (H200, Work(block=128, row_bits=True, **QWEN), ("triton", "cute cannot: it cannot mask single rows.*moba")),
        (CPU, Work(block=128, row_bits=True), ("torch", "the backend for cpu devices")),
        (A100, Work(block=128, **QWEN), ("triton", r"compute capability 9.x only, got \(8, 0\)")),
        (Device(type="cuda", capability=(10, 0)), Work(block=128), ("triton", r"got \(10, 0\)")),
        (Device(type="cuda", capability=(9, 0), without_cute="no FA4"), Work(block=128), ("triton", "no FA4")),
    ],
)
def test_auto(device, work, expected):
    name, reason = choose(device, work)
    assert name == expected[0]
    assert re.search(expected[1], reason), reason


@pytest.mark.parametrize(
    "device,work,backend,message",
    [
        (CPU, Work(block=128), "triton", "backend=triton cannot run: it needs a CUDA device, got cpu; use .*auto"),
        (CPU, Work(block=128), "cute", "backend=cute cannot run: it needs a CUDA device"),
        (H200, Work(block=64), "cute", "needs attention.block=128, got 64"),
        (H200, Work(block=128, deterministic=True), "cute", "attention.deterministic"),
        (H200, Work(block=128, deterministic=True), "torch", "not deterministic on CUDA"),
        (H200, Work(block=192), "triton", "block of 16 to 128 or a multiple of 128, got 192"),
        (A100, Work(block=64), "cuda", "needs attention.block=128, got 64"),
        (A100, Work(block=128, **QWEN | {"head_dim": 256}), "cuda", "head dims 64 and 128, got 256"),
        (A100, Work(block=128, **QWEN | {"dtype": torch.float16}), "cuda", "bfloat16, got torch.float16"),
        (A100, Work(block=128, deterministic=True), "cuda", "attention.deterministic"),
        (H200, Work(block=128, row_bits=True), "cute", "backend=cute cannot run: it cannot mask single rows"),
        (NO_TRITON, Work(block=128), "torch", "lists of blocks are made by Triton: no triton; use .*auto"),
        (NO_TRITON, Work(block=128), "cute", "lists of blocks are made by Triton: no triton"),
        (Device(type="cuda", capability=(7, 5)), Work(block=128), "torch", r"8.0 or newer, got \(7, 5\)"),
        (
            H200,
            Work(block=128, **QWEN, queries=1 << 20),
            "cuda",
            "fewer than 2.31 elements .* 1048576 tokens of 16 x 128",
        ),
        (H200, Work(block=128, **QWEN | {"head_dim": 80}), "triton", "got 80; use attention.backend=torch, which runs"),
        (H200, Work(block=128, **QWEN | {"head_dim": 32}), "cute", "got 32; use attention.backend=auto"),
        (A100, Work(block=128, row_bits=True), "cuda", "backend=cuda cannot run: it cannot mask single rows"),
        (NO_TRITON, Work(block=128, row_bits=True), "auto", "triton: .* no triton; cute: .* no triton; .* no triton"),
        (NO_CUDA_PACKAGE, Work(block=128), "cuda", "backend=cuda cannot run: no package; use .*auto"),
        (CPU, Work(block=128), "cuda", "backend=cuda cannot run: it needs a CUDA device"),
        (
            A100,
            Work(block=64, **QWEN | {"head_dim": 80}),
            "auto",
            "no fast attention kernels.*got 80",
        ),
        (Device(type="cuda", capability=(7, 5)), Work(block=128), "auto", "compute capability 8.0 or newer"),
    ],
)
def test_what_cannot_run_is_refused(device, work, backend, message):
    with pytest.raises(ValueError, match=message):
        choose(device, work, backend)


def test_what_is_asked_for_runs():
    assert choose(H200, Work(block=128), "torch") == ("torch", "asked for")
    assert choose(H200, Work(block=128), "triton") == ("triton", "asked for")
    assert choose(A100, Work(block=128, **QWEN), "cuda") == ("cuda", "asked for")
    assert set(kernels.KERNELS) == set(backends.FAULTS)


def on_h200(monkeypatch, **settings) -> Operator:
    monkeypatch.setattr(Device, "here", lambda *args: H200)
    operator = Operator(AttentionConfig(**settings), Ring.single(), "cuda")
    operator.prepare(128, 16, 2, torch.bfloat16)
    return operator


def test_moba_runs_on_triton_and_its_dense_layers_on_cute(monkeypatch):
    operator = on_h200(monkeypatch, pattern="moba", dense_layers=(1,), dense_below=4096)
    assert operator.choice(65536, 0)[0] == "triton" and operator.choice(65536, 1)[0] == "cute"
    assert operator.choice(4095, 0)[0] == "cute"
    assert "triton: portable; cute cannot: it cannot mask single rows" in operator.describe(65536)
    assert on_h200(monkeypatch, pattern="xattention").choice(65536, 0)[0] == "cute"


@pytest.mark.parametrize("backend", ["cute", "cuda"])
def test_moba_is_refused_at_construction_by_backends_without_row_bits(monkeypatch, backend):
    with pytest.raises(ValueError, match=f"backend={backend} cannot run: it cannot mask single rows.*moba"):
        on_h200(monkeypatch, pattern="moba", backend=backend)
    on_h200(monkeypatch, pattern="xattention", backend=backend)


def test_every_pattern_of_the_config_is_known():
    assert tuple(attention.PATTERNS) == config.PATTERNS


def test_every_backend_of_the_config_is_known():
    for backend in kernels.KERNELS:
        AttentionConfig(backend=backend)


@pytest.mark.parametrize("package", backends.CUTE_VERSIONS)
@pytest.mark.parametrize("version,message", [(None, "is not installed; pip install "), ("4.0.0b1", "got 4.0.0b1; pip")])
def test_another_flash_attention_is_not_used(monkeypatch, package, version, message):
    def found(name):
        if name == package and version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version if name == package else backends.CUTE_VERSIONS[name]

    monkeypatch.setattr(importlib.metadata, "version", found)
    fault = backends._cute_fault.__wrapped__()
    assert message in fault and fault.endswith(f"pip install {package}=={backends.CUTE_VERSIONS[package]}")


def test_a_broken_flash_attention_is_a_reason_not_a_crash(monkeypatch):
    """A wrong nvidia-cutlass-dsl fails with an AttributeError at import."""

    def broken(name):
        raise AttributeError("module 'cutlass' has no attribute 'cute'")

    monkeypatch.setattr(importlib.metadata, "version", backends.CUTE_VERSIONS.get)
    monkeypatch.setattr(backends, "load", broken)
    assert "does not import: AttributeError" in backends._cute_fault.__wrapped__()


def breaking(error: Exception):
    def broken(name):
        raise error

    return broken


def test_block_sparse_attn_is_a_reason_not_a_crash(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "block-sparse-attn is not installed" in backends._cuda_fault.__wrapped__()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(backends, "load", breaking(ImportError("undefined symbol")))
    assert "does not import: ImportError: undefined symbol" in backends._cuda_fault.__wrapped__()


def test_a_broken_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", breaking(OSError("no ptxas")))
    assert "triton does not import: OSError: no ptxas" in backends._triton_fault.__wrapped__()


def test_devices_are_cpu_and_cuda(monkeypatch):
    assert Device.here("cpu") == Device.here(torch.device("cpu")) == CPU
    with pytest.raises(ValueError, match="cpu and cuda, got 'mps'"):
        Device.here("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:0", torch.device("cuda", 1)):
        with pytest.raises(ValueError, match="got device cuda.* sees no CUDA device; use cpu"):
            Device.here(name)


def test_packages_of_a_backend_are_imported_for_it_alone(monkeypatch):
    """A package that breaks at import must not end a run that never asked for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    asked = []
    monkeypatch.setattr(backends, "_cuda_fault", lambda: asked.append("cuda") or "broken")
    assert Device.here("cuda:0").type == "cuda" and not asked
    assert Device.here("cuda", "cuda").without_cuda == "broken"


def test_a_backend_module_hides_no_library():
    kernels.load("torch")
    assert backends.torch is torch
