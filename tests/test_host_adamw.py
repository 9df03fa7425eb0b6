"""AdamW with its moments in host memory: torch's AdamW to the bit, whatever the pieces, and no more GPU memory."""

import copy

import pytest
import torch

from mtraining_nns import checkpoint, host_adamw
from mtraining_nns.host_adamw import MOMENTS, HostAdamW
from mtraining_nns.optim import make_room

SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}
SHAPES = ((31, 5), (1,), (64,), (3, 4, 2))


def pair(device, seed=0):
    """The same weights twice, each under its optimizer; the first is torch's."""
    g = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=g).to(device) for shape in SHAPES]
    made = []
    for cls, options in ((torch.optim.AdamW, {"fused": True} if device == "cuda" else {}), (HostAdamW, {})):
        mine = [torch.nn.Parameter(weight.clone()) for weight in weights]
        groups = [{"params": mine[:2], "weight_decay": 0.1}, {"params": mine[2:], "weight_decay": 0.0}]
        made.append((mine, cls(groups, **SETTINGS, **options)))
    return made


def update(pairs, steps, *, skip=None):
    """The same gradients for all; the learning rate changes, and a weight without a gradient stays."""
    g = torch.Generator().manual_seed(7)
    for step in range(steps):
        grads = [torch.randn(shape, generator=g) for shape in SHAPES]
        for mine, optimizer in pairs:
            for number, (weight, grad) in enumerate(zip(mine, grads, strict=True)):
                weight.grad = None if number == skip else grad.to(weight.device)
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 / (step + 1)
            optimizer.step()


def check_same(pairs):
    (expected, theirs), (found, ours) = pairs
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    for x, y in zip(found, expected, strict=True):
        for name in MOMENTS if y in theirs.state else ():
            assert ours.state[x][name].device.type == "cpu"
            assert torch.equal(ours.state[x][name], theirs.state[y][name].cpu())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("piece", [7, 1 << 24])
def test_updates_are_those_of_torch(device, piece, monkeypatch):
    monkeypatch.setattr(host_adamw, "PIECE", piece)
    pairs = pair(device)
    update(pairs, 5)
    check_same(pairs)


def test_a_weight_without_a_gradient_stays():
    pairs = pair("cpu")
    update(pairs, 2, skip=1)
    check_same(pairs)
    assert pairs[1][0][1] not in pairs[1][1].state


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_states_go_from_one_to_the_other_and_back(device):
    pairs, others = pair(device), pair(device)
    update(pairs, 3)
    for (_, optimizer), (mine, other) in zip(pairs, reversed(others), strict=True):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        source = pairs[0][0]
        with torch.no_grad():
            for weight, value in zip(mine, source, strict=True):
                weight.copy_(value)
    update([*pairs, *others], 3)
    check_same(pairs)
    check_same(others)
    assert all(torch.equal(x, y) for x, y in zip(others[0][0], pairs[0][0], strict=True))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_serves_both(tmp_path):
    model = torch.nn.Linear(3, 2)
    model(torch.ones(3)).sum().backward()
    plain = torch.optim.AdamW(model.parameters())
    plain.step()
    path = checkpoint.save(
        str(tmp_path), 1, checkpoint.State(model, plain), files={checkpoint.TRAINER: '{"step": 1}'}, keep=1
    )
    twin = torch.nn.Linear(3, 2)
    found = checkpoint.State(twin, HostAdamW(twin.parameters(), lr=1e-3))
    assert checkpoint.load(path, found)["step"] == 1
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert all(torch.equal(found.optimizer.state[mine][name], plain.state[theirs][name]) for name in MOMENTS)
        assert found.optimizer.state[mine]["step"] == 1


@pytest.mark.gpu
def test_sharded_moments_lie_in_pinned_memory_and_take_none_of_the_gpu(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        mesh = init_device_mesh("cuda", (1,))
        models = [torch.nn.Linear(8192, 8192, bias=False, device="cuda") for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        for model in models:
            fully_shard(model, mesh=mesh)
        plain = torch.optim.AdamW(models[0].parameters(), fused=True, **SETTINGS)
        ours = HostAdamW(models[1].parameters(), **SETTINGS)
        x = torch.randn(4, 8192, device="cuda")
        for _ in range(2):
            for model, optimizer in zip(models, (plain, ours), strict=True):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
        (theirs,), (mine,) = (list(model.parameters()) for model in models)
        assert torch.equal(mine.to_local(), theirs.to_local())
        for name in MOMENTS:
            moment = ours.state[mine][name]
            assert moment.to_local().is_pinned() and moment.placements == mine.placements
            assert torch.equal(moment.to_local(), plain.state[theirs][name].to_local().cpu())
        files = {checkpoint.TRAINER: '{"step": 2}'}
        path = checkpoint.save(str(tmp_path), 2, checkpoint.State(models[1], ours), files=files, keep=1)
        expected = {name: ours.state[mine][name].to_local().clone() for name in MOMENTS}
        make_room(ours, 0)
        assert not ours.state[mine]["exp_avg"].to_local().any()
        before = torch.cuda.memory_allocated()
        checkpoint.load(path, checkpoint.State(models[1], ours))
        assert torch.cuda.memory_allocated() == before
        for name in MOMENTS:
            assert ours.state[mine][name].to_local().is_pinned()
            assert torch.equal(ours.state[mine][name].to_local(), expected[name])
    finally:
        dist.destroy_process_group()
