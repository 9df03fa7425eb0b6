"""One setting on one kind of GPU: its memory, its time, and whether it fits.

estimate = Estimate.of(setting, constants)
estimate.fits, estimate.memory.parts, estimate.time.tokens_per_s
"""

from dataclasses import dataclass

from mtraining_nns.plan.constants import Constants
from mtraining_nns.plan.memory import GIB, Memory, host_bytes, memory
from mtraining_nns.plan.setting import Setting
from mtraining_nns.plan.times import StepTime, step_time


@dataclass(frozen=True)
class Estimate:
    """memory, time: of a rank and of a step; room_bytes: what tensors and the allocator may take of a GPU."""

    setting: Setting
    memory: Memory
    time: StepTime
    room_bytes: int

    @classmethod
    def of(cls, setting: Setting, constants: Constants, indices=()) -> "Estimate":
        """indices: (length, recorded ones)."""
        room = int((constants["memory_gib"] - constants["context_gib"]) * GIB)
        found = memory(setting, constants["allocator_share"])
        return cls(setting, found, step_time(setting, constants, indices), room)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.room_bytes

    @property
    def name(self) -> str:
        """The keys that tell it from other ways to run the recipe."""
        parallel, train = self.setting.parallel, self.setting.train
        words = [f"cp {parallel.cp} x dp {parallel.dp}", f"ring {self.setting.ring}", f"zero {parallel.zero}"]
        keys = (("offload", parallel.offload), ("recompute", train.recompute), ("offload_inputs", train.offload_inputs))
        keys += (("keep_output", train.recompute and self.setting.attention.keep_output),)
        return ", ".join(words + [key for key, on in keys if on])

    @property
    def reason(self) -> str:
        """Why it does not fit, with the largest part of what it holds."""
        parts = self.memory.parts
        largest = max(parts, key=parts.get)
        return (
            f"{self.memory.total / GIB:.1f} GiB of {self.room_bytes / GIB:.1f} at {self.memory.peak_phase}:"
            f" {largest} {parts[largest] / GIB:.1f}"
        )

    def as_dict(self) -> dict:
        """Plain values; bytes and seconds."""
        parallel, train, step = self.setting.parallel, self.setting.train, self.time
        hours = step.seconds * train.steps / 3600
        return {
            "cp": parallel.cp,
            "dp": parallel.dp,
            "ring": self.setting.ring,
            "zero": parallel.zero,
            "offload": parallel.offload,
            "recompute": train.recompute,
            "offload_inputs": train.offload_inputs,
            "keep_output": self.setting.attention.keep_output,
            "accumulation": train.accumulation,
            "backend": self.setting.backend,
            "density": self.setting.kept,
            "fits": self.fits,
            "memory": {
                "room_bytes": self.room_bytes,
                "total_bytes": self.memory.total,
                "allocator_margin_bytes": self.memory.margin,
                "host_bytes": host_bytes(self.setting),
                "peak_moment": self.memory.peak_phase,
                "peaks_bytes": self.memory.peaks,
                "parts_bytes": self.memory.parts,
            },
            "time": {
                "step_s": step.seconds,
                "parts_s": step.parts,
                "tokens_per_s": step.tokens_per_s,
                "tokens_per_s_per_gpu": step.tokens_per_s / step.world,
                "mfu_dense_equivalent": step.mfu(dense=True),
                "mfu_kept": step.mfu(dense=False),
                "run_hours": hours,
                "run_days": hours / 24,
                "gpu_hours": hours * step.world,
            },
        }
