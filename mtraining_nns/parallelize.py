"""Compile a model with nnScaler, without GPUs and without running it: what a plan cuts, sends and holds.

    plan = compile_plan(Request(model="my_package.model:Model", world=4, seq_len=8192))
    print(plan.table())

The model is a class or a function of a Python module: called with an AttentionConfig and seq_len=, it returns a module
whose forward takes samples (input_ids, labels, position_ids) and returns the summed loss. There is one in
`recipes/custom_model/model.py`, and `nnscaler_hf.TracedLoss` wraps a HuggingFace model.
"""

import importlib
import logging
import os
import re
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mtraining_nns.data.collator import collate_ring
from mtraining_nns.engines import nnscaler_fault
from mtraining_nns.errors import UserError
from mtraining_nns.ops.config import AttentionConfig, shortest
from mtraining_nns.ops.layout import Layout

COLLECTIVE = re.compile(r"runtime\.adapter\.(?:nn\.)?([a-z_]+)\(")
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to compile. world: GPUs of the plan, all of them on one sequence. zero: of nnScaler, 0, 1 or 3."""

    model: str
    world: int
    seq_len: int
    out: str
    batch: int = 1
    zero: int = 1
    recompute: bool = True
    attention: AttentionConfig = field(default_factory=AttentionConfig)

    def __post_init__(self):
        for name in ("world", "seq_len", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        needed, share = shortest(self.attention.resolved(), self.seq_len, self.world)
        if self.seq_len < needed:
            raise UserError(
                f"--world {self.world} gives each GPU {share}, so --seq-len must be at least {needed}, got"
                f" {self.seq_len}; use fewer GPUs, a smaller attention.block or longer sequences"
            )
        if self.model.count(":") != 1:
            raise UserError(f"expected package.module:Model, got {self.model!r}")


@dataclass(frozen=True)
class Plan:
    """What was compiled. cut, whole: operators by name; collectives: of activations, by name, of rank 0's code."""

    request: Request
    padded: int
    cut: Counter
    whole: Counter
    collectives: Counter
    parameters: int
    folder: str

    def table(self) -> str:
        """Rows of text for people."""
        request, weights = self.request, 4 * self.parameters
        shards = request.world if request.zero else 1
        kept = weights // (request.world if request.zero == 3 else 1)
        rows = [
            ["model", f"{request.model}, {self.parameters:,} parameters"],
            ["tokens", f"{request.seq_len} in {self.padded} places, {self.padded // request.world} a GPU"],
            ["cut along the tokens", _counted(self.cut)],
            ["whole on every GPU", _counted(self.whole)],
            ["collectives of activations", _counted(self.collectives)],
            ["weights and gradients, fp32", f"{2 * kept / GIB:.2f} GiB a GPU"],
            ["Adam states, fp32", f"{2 * weights / shards / GIB:.2f} GiB a GPU"],
            ["code", self.folder],
        ]
        return "\n".join(f"{name:28s}  {value}" for name, value in rows)


def compile_plan(request: Request) -> Plan:
    """Trace, cut, generate code. UserError for a model that cannot be found, called, traced or cut."""
    if fault := nnscaler_fault():
        raise UserError(fault)
    from mtraining_nns import nnscaler_cpu

    nnscaler_cpu.install()
    from nnscaler.parallel import ComputeConfig, parallelize

    from mtraining_nns.policy import context_parallel

    module, layout = _model(request), Layout.of(request.attention, request.seq_len, request.world)
    parameters = sum(p.numel() for p in module.parameters())
    seen = {"cut": Counter(), "whole": Counter()}

    def policy(graph, config):
        for plan in context_parallel(graph, config):
            name = plan.op.signature.rpartition(".")[2]
            seen["whole" if plan.partition is None else "cut"][name] += 1
            yield plan

    options = {"trace_strategy": "meta", "use_end2end": True, "constant_folding": True, "use_zero": request.zero}
    config = ComputeConfig(request.world, request.world, **options, pas_config={"recompute": request.recompute})
    samples = {"samples": collate_ring(torch.zeros(request.batch, request.seq_len, dtype=torch.long), layout)}
    logging.getLogger("nnscaler.parallel").setLevel(logging.CRITICAL)  # it shows a traceback of what is said below
    try:
        parallelize(module, samples, policy, config, gen_savedir=request.out, reuse="override", load_module=False)
    except RuntimeError as error:
        cause = error.__cause__ or error
        told = f"{request.model} cannot be parallelised: {' '.join(str(cause).split())}"
        raise UserError(told + _where(cause, request)) from error
    code = next(Path(request.out).rglob("gencode0.py"))
    found = Counter(COLLECTIVE.findall(code.read_text(encoding="utf-8")))
    return Plan(request, layout.padded_len, seen["cut"], seen["whole"], found, parameters, str(code.parent))


def _where(error: BaseException, request: Request) -> str:
    """The line of the model's own file at which tracing ended, "" where that says nothing."""
    file = sys.modules[request.model.partition(":")[0]].__file__
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if not lines or "; from " in str(error):
        return ""
    return (
        f"; from {file}, line {lines[-1].lineno}: {lines[-1].line}; a traced model may not look at values of tensors,"
        " as if, .item() and .tolist() do"
    )


def _model(request: Request) -> torch.nn.Module:
    name, _, attribute = request.model.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(name), attribute)
        module = make(request.attention, seq_len=request.seq_len)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{request.model} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(module, torch.nn.Module):
        raise UserError(f"{request.model} must return a torch.nn.Module, got {type(module).__name__}")
    return module


def _counted(names: Counter) -> str:
    return ", ".join(f"{count} {name}" for name, count in names.most_common()) or "none"
