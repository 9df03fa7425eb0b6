"""Run a function on several processes of this machine, as a test would call it on one.

    results = run_workers(check_ring, 4, seq_len)        # check_ring(rank, world, seq_len) on ranks 0..3
    assert results[0] == results[3]

Every worker joins one process group (gloo, file rendezvous, so no port is needed), runs on one thread, and sees the
environment a launcher would give it (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE). The function must be importable
(top level of a test module). Workers are forked from a clean server that has imported torch once, so a call costs
tenths of a second, not the seconds of `torch.multiprocessing.spawn`; only where they use GPUs must they be spawned.
"""

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

FORKING, SPAWNING = (multiprocessing.get_context(method) for method in ("forkserver", "spawn"))
FORKING.set_forkserver_preload(["mtraining_nns.engines.torch", "transformers.models.llama.modeling_llama"])


def run_workers(fn, world, *args, timeout_s=120, backend="gloo", may_die=()):
    """`fn(rank, world, *args)` on `world` processes; returns the list of their results in rank order.

    The first worker that raises ends the others, and its traceback is raised here as a RuntimeError. A rank in
    `may_die` may exit without a result (a test kills it): its result is None. Past `timeout_s` all are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = pickle.dumps((fn, args))
        context = SPAWNING if backend == "nccl" else FORKING
        pipes, processes = [], []
        for rank in range(world):
            receiver, sender = context.Pipe()
            place = {"rank": rank, "world": world, "store": os.path.join(folder, "store"), "backend": backend}
            process = context.Process(target=_worker, args=(place, timeout_s, job, sender), daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, deadline=time.monotonic() + timeout_s, may_die=may_die)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes, deadline, may_die):
    results, open_ranks = [None] * len(pipes), set(range(len(pipes)))
    while open_ranks:
        ready = wait([pipes[rank] for rank in open_ranks], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(open_ranks)} of {len(pipes)} are still running at the time limit")
        for rank in [rank for rank in open_ranks if pipes[rank] in ready]:
            open_ranks.remove(rank)
            try:
                ok, value = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                if rank not in may_die:
                    raise RuntimeError(f"worker {rank} of {len(pipes)} died without a result") from None
                continue
            if not ok:
                raise RuntimeError(f"worker {rank} of {len(pipes)} failed:\n{value}")
            results[rank] = value
    return results


def _worker(place, timeout_s, job, sender):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, world = str(place["rank"]), str(place["world"])
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if place["backend"] == "nccl":
        torch.cuda.set_device(place["rank"])
    try:
        dist.init_process_group(
            place["backend"],
            init_method="file://" + place["store"],
            rank=place["rank"],
            world_size=place["world"],
            timeout=timedelta(seconds=timeout_s),
        )
        fn, args = pickle.loads(job)
        answer = True, fn(place["rank"], place["world"], *args)
    except BaseException:
        answer = False, traceback.format_exc()
    sender.send_bytes(pickle.dumps(answer))
    # A worker that leaves early closes sockets under its peers, so it waits; the parent ends all of them together.
    sender.poll(timeout_s)
