"""Losses of sequences that one GPU cannot hold: every GPU has the whole model and its part of the tokens.

    engine = RingEngine("out/hf", ranks=8, shortest=262144, attention="mtraining")
    engine.nll(token_ids)                             # [S] -> [S-1] fp32 on the CPU

The keys go around the ring of training (`ops/ring.py`), dense or sparse. Answers of prompts need decoding, which this
engine does not do. Each rank is a process that loads the model folder by `HuggingFaceEngine`; a rank that fails ends
all of them.
"""

import contextlib
import multiprocessing
import os
import socket
import traceback
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from mtraining_nns.errors import UserError
from mtraining_nns.eval.attentions import attention_of, check_names
from mtraining_nns.eval.huggingface import usable_device
from mtraining_nns.eval.model_folder import model_folder
from mtraining_nns.eval.questions import Engine
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.config import shortest as shortest_of

DENSE = {"pattern": "dense", "layout": "striped"}


class RingEngine(Engine):
    """A model on `ranks` processes of this machine, one a GPU, or on CPUs where device is "cpu".

    shortest: tokens of the shortest sequence that will be read. Others as for HuggingFaceEngine.
    """

    def __init__(
        self,
        model_dir,
        *,
        ranks,
        shortest,
        attention="dense",
        attention_config=None,
        budgets=None,
        device=None,
        dtype=None,
    ):
        check_names(attention, dtype)
        config = attention_of(model_folder(model_dir), attention, attention_config, budgets) or AttentionConfig(**DENSE)
        least, share = shortest_of(config.resolved(), shortest, ranks)
        if shortest < least:
            raise UserError(
                f"{shortest} tokens give {ranks} ranks less than {share} each; use at least {least} tokens, fewer ranks"
                " or a smaller attention block"
            )
        self.model_dir, self.ranks, self.processes, self.pipes = model_dir, ranks, [], []
        on_cpu = usable_device(device).type == "cpu"
        if not on_cpu and torch.cuda.device_count() < ranks:
            raise UserError(
                f"{ranks} ranks need as many GPUs, this machine has {torch.cuda.device_count()}; lower --gpus"
            )
        told = {"model_dir": model_dir, "attention": attention, "attention_config": config, "dtype": dtype}
        told["on_cpu"] = on_cpu
        context, port = multiprocessing.get_context("spawn"), _free_port()
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            place = {"rank": rank, "world_size": ranks, "init_method": f"tcp://127.0.0.1:{port}"}
            process = context.Process(target=_serve, args=(place, told, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        self.about = self._answer()

    def nll(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihood of tokens 1 .. S-1 in nats: [S] int64 -> [S-1] fp32 on the CPU."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a rank that is gone is found below
                pipe.send(token_ids.tolist())
        nll, self.densities = self._answer()
        return torch.tensor(nll, dtype=torch.float32)

    def generate(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Not what this engine does."""
        raise UserError("several GPUs share a sequence for perplexity alone; use --engine vllm, or --gpus 1")

    def describe(self) -> dict:
        """Manifest entry: everything that decides what this engine answers."""
        return {**self.about, "ranks": self.ranks}

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()

    def _answer(self):
        """What rank 0 has sent; the first error of any rank is raised."""
        waiting = dict(enumerate(self.pipes))
        first = None
        while waiting:
            ready = wait(waiting.values())
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    kind, value = waiting.pop(rank).recv()
                except (EOFError, OSError):
                    kind, value = "error", "it was killed, perhaps for lack of memory"
                if kind != "answer":
                    self.close()
                    raise UserError(value if kind == "user" else f"rank {rank} of {self.ranks} failed: {value}")
                first = value if rank == 0 else first
        return first


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _serve(place: dict, told: dict, pipe) -> None:
    """A rank: load, then score whatever comes."""
    if told.pop("on_cpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from mtraining_nns.eval.huggingface import HuggingFaceEngine
    from mtraining_nns.ops.ring import Ring

    rank, cuda = place["rank"], torch.cuda.is_available()
    try:
        if cuda:
            torch.cuda.set_device(rank)
        dist.init_process_group("nccl" if cuda else "gloo", **place)
        device = f"cuda:{rank}" if cuda else "cpu"
        engine = HuggingFaceEngine(**told, device=device, ring=Ring.create(place["world_size"]))
        pipe.send(("answer", engine.describe()))
        while True:
            nll = engine.nll(torch.tensor(pipe.recv()))
            pipe.send(("answer", (nll.tolist(), engine.densities) if rank == 0 else None))
    except EOFError:
        pass  # the parent is gone
    except UserError as error:
        pipe.send(("user", str(error)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
