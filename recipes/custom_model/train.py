"""Train the model of this folder over a ring of all processes, with nnScaler's own interface.

    mtraining prepare books/ --train-bpe 4096 --out data/books
    torchrun --nproc-per-node 2 recipes/custom_model/train.py data/books --seq-len 4096 --steps 100

Every sequence is shared by all processes; weights are replicated, their optimizer states sharded (use_zero=1). Without
GPUs it runs on CPUs and gloo.
"""

import argparse
import inspect

from mtraining_nns import nnscaler_cpu

nnscaler_cpu.install()  # before nnScaler looks for a device

import nnscaler  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from model import Custom  # noqa: E402
from nnscaler.parallel import ComputeConfig, build_optimizer, parallelize  # noqa: E402

from mtraining_nns import nnscaler_ops  # noqa: E402
from mtraining_nns.data.collator import IGNORED_LABEL, collate_ring  # noqa: E402
from mtraining_nns.data.mixture import Mixture  # noqa: E402
from mtraining_nns.ops.config import AttentionConfig  # noqa: E402
from mtraining_nns.ops.layout import Layout  # noqa: E402
from mtraining_nns.policy import context_parallel  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="a folder that mtraining prepare made")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--code", default="runs/custom_model/code", help="where generated code goes")
    args = parser.parse_args()

    nnscaler.init()
    world, device = dist.get_world_size(), torch.cuda.current_device()
    nnscaler_ops.connect(world)
    attention = AttentionConfig(block=64)
    layout = Layout.of(attention, args.seq_len, world)
    data = Mixture({args.data: 1.0}, args.seq_len, seed=0)

    def samples(step: int) -> dict[str, torch.Tensor]:
        tokens, length = data[step]
        return {name: x.to(device) for name, x in collate_ring(tokens[None], layout, [length]).items()}

    made_of = {"seq_len": args.seq_len, "words": data.manifest["vocab_size"], "places": args.seq_len}
    torch.manual_seed(0)
    model = Custom(attention, **made_of)
    config = ComputeConfig(
        world, world, use_end2end=True, constant_folding=True, use_zero=1, pas_config={"recompute": True},
        trace_strategy="cuda_run_cpu_offload" if torch.cuda.is_available() else "cpu",
        # all that the code and the initial weights beside it follow from: those of another model are not reused
        user_config={**made_of, "settings": nnscaler_ops.settings_of(attention), "model": inspect.getsource(Custom)},
    )  # fmt: skip
    model = parallelize(model, {"samples": samples(0)}, context_parallel, config, gen_savedir=args.code, reuse="moo")
    optimizer = build_optimizer(model.to(device), torch.optim.AdamW, lr=args.lr)
    for step in range(args.steps):
        batch = samples(step)
        tokens = (batch["labels"] != IGNORED_LABEL).sum().item()
        loss = model.train_step([batch])[0].item() / tokens
        optimizer.sync_shard_grad()
        optimizer.scale_grads(1 / tokens)
        norm = optimizer.clip_gnorm(1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss:.4f}  gradient norm {norm:.3f}", flush=True)
    nnscaler.uninit()


if __name__ == "__main__":
    main()
