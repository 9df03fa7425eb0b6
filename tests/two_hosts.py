"""Two hosts in network namespaces: each rank has a link of its own to the other host, slower than anything within one.

    host A   rank 0  10.0.0.1 ---- 10.0.0.2  rank 2   host B
             rank 1  10.0.1.1 ---- 10.0.1.2  rank 3

    unshare -rnm python tests/two_hosts.py measure_rings 200        calls test_two_hosts.measure_rings(rank, world)
                                                                    on every rank, 200 Mbit/s; results as JSON

As in a cluster, what goes to a rank of the other host goes over the link of that rank; ranks of a host reach each other
without one.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

HOSTS, LINKS = 2, 2
LIMIT = "root tbf rate {}mbit burst 256kb latency 400ms"
SHELL = ["unshare", "-rnm"]  # a user namespace in which this process may make networks


def permitted() -> bool:
    """Whether this machine lets a user make namespaces with limited links."""
    try:
        commands = f"ip link add a0 type veth peer name b0 && tc qdisc add dev a0 {LIMIT.format(1)}"
        return subprocess.run([*SHELL, "sh", "-c", commands], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def run(function: str, mbit: int, timeout_s: int = 240) -> list:
    """Results of `test_two_hosts.<function>(rank, world)` by rank."""
    command = [*SHELL, sys.executable, __file__, function, str(mbit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"two hosts failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def network(mbit: int) -> subprocess.Popen:
    """Make the links; the process that is returned holds host B."""
    hold = "echo ready; exec sleep 3600 2> /dev/null"  # or it would keep the pipes of this process open
    other = subprocess.Popen(["unshare", "-n", "sh", "-c", hold], stdout=subprocess.PIPE, text=True)
    other.stdout.readline()
    there = ["nsenter", "-t", str(other.pid), "-n"]
    commands = [([], "ip link set lo up"), (there, "ip link set lo up")]
    for link in range(LINKS):
        commands.append(([], f"ip link add a{link} type veth peer name b{link} netns {other.pid}"))
        for place, device, host in (([], f"a{link}", 1), (there, f"b{link}", 2)):
            commands.append((place, f"ip addr add 10.0.{link}.{host}/24 dev {device}"))
            commands.append((place, f"ip link set {device} up"))
            commands.append((place, f"tc qdisc add dev {device} {LIMIT.format(mbit)}"))
    for place, command in commands:
        subprocess.run([*place, *command.split()], check=True)
    return other


def start(function: str, rank: int, folder: str, other: subprocess.Popen) -> subprocess.Popen:
    host, link = divmod(rank, LINKS)
    place = ["nsenter", "-t", str(other.pid), "-n"] if host else []
    env = {"GLOO_SOCKET_IFNAME": "ab"[host] + str(link), "GROUP_RANK": str(host), "OMP_NUM_THREADS": "1"}
    command = [*place, sys.executable, __file__, function, "--rank", str(rank), folder]
    return subprocess.Popen(command, env={**os.environ, **env})


def work(function: str, rank: int, folder: str) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    world = HOSTS * LINKS
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    result = getattr(importlib.import_module("test_two_hosts"), function)(rank, world)
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()


def main(function: str, mbit: int) -> None:
    world, other = HOSTS * LINKS, network(mbit)
    try:
        with tempfile.TemporaryDirectory() as folder:
            ranks = [start(function, rank, folder, other) for rank in range(world)]
            codes = [rank.wait() for rank in ranks]
            if any(codes):
                sys.exit(f"ranks ended with {codes}")
            print(json.dumps([json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]))
    finally:
        other.kill()


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    if rest[0] == "--rank":
        work(name, int(rest[1]), rest[2])
    else:
        main(name, int(rest[0]))
