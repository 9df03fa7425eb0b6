"""What to change after a run has found no room on its GPU: the plan's parts, and what each key would take away.

print(explain(recipe, gpu))
"""

from dataclasses import dataclass, replace

from mtraining_nns.errors import UserError
from mtraining_nns.plan.memory import GIB, memory
from mtraining_nns.plan.planner import shape_of
from mtraining_nns.plan.setting import Setting
from mtraining_nns.recipe import Recipe


@dataclass(frozen=True)
class Gpu:
    """Where it happened: bytes of the GPU and the most that tensors held, 0 where unknown; node: ranks of a machine."""

    backend: str
    node: int
    capacity_bytes: int = 0
    allocated_bytes: int = 0


def explain(recipe: Recipe, gpu: Gpu) -> str:
    """The largest moment of a step by part, then the changes that help, best first. recipe: a resolved one."""
    shape = shape_of(recipe)

    def setting(changed: Recipe) -> Setting:
        world = changed.parallel.cp * changed.parallel.dp
        return Setting(recipe=changed, shape=shape, world=world, node=gpu.node, backend=gpu.backend, density=1.0)

    now = memory(setting(recipe))
    parts = sorted(now.parts.items(), key=lambda part: -part[1])
    lines = [
        f"the plan (of the torch engine) counts {_gib(now.tensors)} a rank at its largest moment, {now.peak_phase}:"
        f" {', '.join(f'{name} {_gib(size)}' for name, size in parts)}"
    ]
    if gpu.capacity_bytes:
        lines.append(f"the GPU has {_gib(gpu.capacity_bytes)}; tensors held {_gib(gpu.allocated_bytes)} of it at most")
    helping = []
    for words, changed in changes(recipe):
        try:
            after = memory(setting(changed))
        except UserError:
            continue  # no ring of this size on these machines
        if after.tensors < 0.99 * now.tensors:
            helping.append((after.tensors, f"  {words}: {_gib(after.tensors)} at {after.peak_phase}"))
    found = [line for _, line in sorted(helping)]
    lines += ["what to change, each alone:", *found] if found else ["no key of the recipe helps; use more GPUs"]
    return "\n".join(lines)


def changes(recipe: Recipe) -> list[tuple[str, Recipe]]:
    """(what to write, the recipe with it) of every key that can take memory away."""
    train, parallel, attention = recipe.train, recipe.parallel, recipe.attention
    found, flat = [], {} if parallel.inner is None else {"inner": None}

    def change(section: str, **keys) -> None:
        changed = replace(recipe, **{section: replace(getattr(recipe, section), **keys)})
        words = " ".join(f"{section}.{key}={_word(value)}" for key, value in keys.items())
        found.append((words, changed))

    if not parallel.offload:
        change("parallel", offload=True)
    if parallel.zero < 3:
        change("parallel", zero=3)
    if not train.recompute:
        change("train", recompute=True)
    elif attention.keep_output:
        change("attention", keep_output=False)
    elif not train.offload_inputs:
        change("train", offload_inputs=True)
    if train.loss_chunk > 256:
        change("train", loss_chunk=256)
    if train.micro_batch > 1:
        change("train", micro_batch=1, accumulation=train.accumulation * train.micro_batch)
    if parallel.dp % 2 == 0:
        change("parallel", cp=2 * parallel.cp, dp=parallel.dp // 2, **flat)
    change("parallel", cp=2 * parallel.cp, **flat)
    words, more = found.pop()
    return [*found, (f"{words} on twice as many GPUs", more)]


def _word(value) -> str:
    return "null" if value is None else str(value).lower()


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
