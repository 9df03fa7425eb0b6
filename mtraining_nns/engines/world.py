"""The processes of a run: device, process group, ring, and the one mesh over which everything is sharded.

    8 processes, cp 4, dp 2        ring of dp rank 0: 0 1 2 3     ring of dp rank 1: 4 5 6 7

A ring shares each sequence, rings share the batch; weights are sharded over all of them.
"""

import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mtraining_nns import failure, signals
from mtraining_nns.engines.pulse import Pulse
from mtraining_nns.environment import Process
from mtraining_nns.errors import UserError
from mtraining_nns.ops.layout import Layout
from mtraining_nns.ops.ring import Ring, RingError
from mtraining_nns.ops.watch import Watch
from mtraining_nns.topology import Shape, inner_mode, ring_shape

GRACE = timedelta(seconds=60)


@dataclass(frozen=True)
class World:
    """Where this rank stands. `dp_rank` counts rings; the rank inside the ring is `ring.rank`. about: of the ring.

    nodes: the node of every rank. pulse: None for one rank.
    """

    device: torch.device
    rank: int
    dp_rank: int
    ring: Ring
    mesh: DeviceMesh
    about: str
    nodes: list[str]
    pulse: Pulse | None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        dist.all_reduce(x)
        return x

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Largest value over all ranks, in place."""
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x

    def asked(self) -> torch.Tensor:
        """1 at the signal that asked this rank to stop, fp32 [signals.SIGNALS]; made without waiting for the device."""
        return torch.stack([torch.full((), flag, device=self.device) for flag in signals.asked()])

    def at(self, what: str) -> None:
        """This rank comes to a part of the run, which is named where it hangs; all ranks come to the same ones."""
        if self.pulse is not None:
            self.pulse.at(what)

    def again(self, error: RuntimeError) -> NoReturn:
        """Raise the error of an exchange once more, with the rank that hangs where one does."""
        found = "" if self.pulse is None else self.pulse.blamed()
        if found:
            raise type(error)(f"{error}; {found}") from error
        raise error

    def leave(self, farewell: str) -> NoReturn:
        """Stopped on all ranks, once rank 0 has said why. Collective."""
        self.say(farewell)
        dist.barrier()
        signals.stop(farewell)

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)


@contextlib.contextmanager
def start(parallel):
    """Join the process group (or use the one that exists), build the ring and the mesh; leaves the group at the end.

    parallel: a resolved ParallelConfig. Groups are created here, in one order on all ranks, and never later.
    """
    process = Process.launched() or Process()
    device = _device(process)
    joined = not dist.is_initialized()
    seconds, watch, pulse = max(parallel.timeout_s, parallel.warmup_timeout_s), None, None
    timeout = _library_timeout(seconds, device)
    if joined:
        _join(process, device, timeout)
    try:
        nodes = _nodes(process)
        shape = ring_shape(parallel, nodes)
        if device.type == "cuda" and parallel.cp > 1:
            watch = _watch(seconds)
        mode = inner_mode(parallel, shape.inner, nodes)
        ring = Ring.create(parallel.cp, timeout, inner=shape.inner, mode=mode, watch=watch)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
        rank = dist.get_rank()
        if len(nodes) > 1:
            pulse = _pulse(rank, nodes, parallel.timeout_s)
            pulse.timeout_s = seconds
        world = World(device, rank, rank // parallel.cp, ring, mesh, _about(ring, shape), nodes, pulse)
        try:
            yield world
        except RuntimeError as error:
            world.again(error)
    finally:
        for thread in (watch, pulse):
            if thread is not None:
                thread.close()
        if joined:
            dist.destroy_process_group()


def settle(world: World, parallel) -> None:
    """After the first step, when every rank has compiled its kernels: from now on an exchange takes `timeout_s`."""
    dist.barrier()
    timeout = _library_timeout(parallel.timeout_s, world.device)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    for thread in (world.ring.watch, world.pulse):
        if thread is not None:
            thread.timeout_s = parallel.timeout_s
    for group in {
        None,
        world.ring.group,
        world.mesh.get_group(),
        *(circle.group for circle in world.ring.levels if circle.world > 1),
    }:
        distributed_c10d._set_pg_timeout(timeout, group)  # torch has no public name for it


def _library_timeout(seconds: int, device: torch.device) -> timedelta:
    """Of the library that moves the bytes; on GPUs it ends the process, so those that know a name speak before it."""
    return timedelta(seconds=seconds) + (GRACE if device.type == "cuda" else timedelta(0))


def _watch(timeout_s: int) -> Watch:
    """A stalled ring ends this process: its main thread may wait in the driver for good."""
    rank = dist.get_rank()
    return Watch(timeout_s, lambda what: os._exit(failure.leave(RingError(what), rank)))


def _pulse(rank: int, nodes: list[str], timeout_s: int) -> Pulse:
    """So does a rank that hangs elsewhere."""
    store = dist.PrefixStore("pulse", distributed_c10d._get_default_store())  # torch has no public name for it
    pulse = Pulse(store.clone(), rank, nodes, timeout_s, lambda what: os._exit(failure.leave(RuntimeError(what), rank)))
    dist.barrier()  # every rank has written its first beat
    return pulse


def _nodes(process: Process) -> list[str]:
    """The node of every rank."""
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, process.node)
    return names


def _about(ring: Ring, shape: Shape) -> str:
    within = {"ring": "hop by hop", "gather": "gathered"}[ring.mode]
    if ring.outer is None:
        return f"ring of {ring.world}: flat, {within} ({shape.reason})"
    return f"ring of {ring.world}: {ring.outer.world} nodes x {ring.inner.world}, {within} within ({shape.reason})"


def layout_of(recipe, ring: Ring) -> Layout:
    """How the ranks of a ring share a sequence: the layout of the operator, for the collator."""
    return Layout.of(recipe.attention, recipe.train.seq_len, ring.world, ring.node_size)


def _device(process: Process) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if process.local_rank >= gpus:
        raise UserError(f"{process.local_world} processes on this machine need as many GPUs, it has {gpus}")
    torch.cuda.set_device(process.local_rank)
    return torch.device("cuda", process.local_rank)


def _join(process: Process, device: torch.device, timeout: timedelta) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    place = {"device_id": device} if device.type == "cuda" else {}
    if process.world == 1:
        place.update(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group(backend, timeout=timeout, **place)
