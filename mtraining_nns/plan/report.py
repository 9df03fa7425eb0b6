"""A plan as text for people and as plain values.

Sizes are GiB, tokens/s whole numbers; every number that nobody measured is named at the end.
"""

from mtraining_nns.plan.candidates import Candidates
from mtraining_nns.plan.constants import Constants
from mtraining_nns.plan.estimate import Estimate
from mtraining_nns.plan.memory import GIB, host_bytes
from mtraining_nns.plan.shape import Shape
from mtraining_nns.tables import align

SHOWN = 10  # of the ways that fit


def head(shape: Shape, constants: Constants, estimate: Estimate, density_source: str) -> str:
    """What is planned, and what was taken for granted."""
    setting = estimate.setting
    sparse = shape.layers - setting.dense_layers
    return "\n".join(
        [
            f"{shape.parameters:,} parameters, {shape.layers} layers; {setting.world} x {constants.gpu},"
            f" {setting.node} a machine",
            f"{setting.recipe.batch} x {setting.train.seq_len} tokens a step, {setting.tokens} of a micro-batch on a"
            f" rank; {estimate.name}; attention {setting.attention.pattern}, backend {setting.backend}",
            f"density: {setting.density:.4f} of the causal pairs in {sparse} sparse layers, {density_source};"
            f" {setting.kept:.4f} over all layers",
        ]
    )


def body(estimate: Estimate) -> str:
    """Memory and time of a setting, part by part."""
    memory, step, train = estimate.memory, estimate.time, estimate.setting.train
    rows = [["GiB a rank", "at " + memory.peak_phase]]
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    rows += [[name, f"{size / GIB:.2f}"] for name, size in parts]
    rows += [["allocator", f"{memory.margin / GIB:.2f}"], ["sum", f"{memory.total / GIB:.2f}"]]
    verdict = "fits" if estimate.fits else "DOES NOT FIT"
    moments = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.peaks.items())
    lines = [
        align(rows),
        f"{verdict}: {memory.total / GIB:.1f} of {estimate.room_bytes / GIB:.1f} GiB; host {_gib(estimate)} GiB a rank",
        f"peaks without the allocator's margin: {moments}",
        "",
    ]
    times = sorted(step.parts.items(), key=lambda part: -part[1])
    lines.append(
        align([["seconds a step", "", ""]] + [[n, f"{s:.3f}", f"{s / step.seconds:.1%}"] for n, s in times if s])
    )
    speed, mfu = step.tokens_per_s, (step.mfu(dense=True), step.mfu(dense=False))
    hours = step.seconds * train.steps / 3600
    lines.append(
        f"step {step.seconds:.2f} s, {speed:,.0f} tokens/s, {speed / step.world:,.0f} a GPU, MFU {mfu[0]:.1%}"
        f" dense-equivalent, {mfu[1]:.1%} of kept pairs"
    )
    lines.append(
        f"{train.steps} steps: {hours:.1f} hours ({hours / 24:.2f} days), {hours * step.world:,.0f} GPU hours, without"
        " start, evaluation and checkpoints"
    )
    return "\n".join(lines)


def ways(found: Candidates) -> str:
    """What fits, best first, and what does not."""
    rows = [["tokens/s", "GiB", "settings"]]
    rows += [[f"{e.time.tokens_per_s:,.0f}", f"{e.memory.total / GIB:.1f}", e.name] for e in found.fitting[:SHOWN]]
    hidden = len(found.fitting) - SHOWN
    more = [f"and {hidden} slower ones that fit"] if hidden > 0 else []
    lines = [_left(rows)] if found.fitting else ["nothing fits"]
    return "\n".join([*lines, *more, *(f"no: {line}" for line in found.refused)])


def assumed(constants: Constants) -> str:
    """Names of the numbers that nobody measured."""
    names = constants.assumed
    if not names:
        return f"all numbers of {constants.gpu} are measured"
    return f"assumed, not measured, for {constants.gpu}: {', '.join(names)}"


def _gib(estimate: Estimate) -> str:
    return f"{host_bytes(estimate.setting) / GIB:.1f}"


def _left(rows: list[list[str]]) -> str:
    """Numbers to the right, the last column of words to the left."""
    numbers = align([row[:-1] for row in rows]).splitlines()
    return "\n".join(f"{line}  {row[-1]}" for line, row in zip(numbers, rows))
