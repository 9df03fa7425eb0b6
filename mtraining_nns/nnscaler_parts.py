"""What nnScaler's Trainer is given by name to run a recipe: model, data, schedule, hook, ring.

    mtraining resolve RECIPE --nproc 8 --out run.yaml       writes the file that names them (`nnscaler_args.py`)
    torchrun --nproc-per-node 8 -m nnscaler.cli.train -f run.yaml

All of them read one resolved recipe, whose path stands in the file. The data of a run is one epoch of
`steps * accumulation * micro_batch * dp` visits in the order of the torch engine, so both engines see the same batches.
"""

import contextlib
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn

import nnscaler
import torch
from nnscaler.cli.train_hook import TrainHook
from nnscaler.cli.trainer_args import AggregatedOutputs
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mtraining_nns import nnscaler_cpu, nnscaler_ops, nnscaler_states, resume, signals, spikes
from mtraining_nns import nnscaler_held_out as held_out
from mtraining_nns.data.guard import told
from mtraining_nns.data.mixture import Mixture
from mtraining_nns.data.store import read_manifest
from mtraining_nns.engines import faults
from mtraining_nns.engines.batch_log import BatchLog
from mtraining_nns.engines.feed import check_same_tokens
from mtraining_nns.engines.pace import Pace
from mtraining_nns.engines.step import NotFinite
from mtraining_nns.engines.world import World, settle, start
from mtraining_nns.errors import UserError
from mtraining_nns.export import keep_tokenizer, texts_of
from mtraining_nns.host_adamw import HostAdamW
from mtraining_nns.metrics import Gauges, Log, Meter, peak_memory_bytes, step_values
from mtraining_nns.model import build_config, build_model, materialize
from mtraining_nns.needles import needles
from mtraining_nns.nnscaler_held_out import sample
from mtraining_nns.nnscaler_hf import TracedLoss
from mtraining_nns.ops.layout import Layout
from mtraining_nns.optim import learning_rate
from mtraining_nns.plan.shape import Shape
from mtraining_nns.recipe import Recipe
from mtraining_nns.speed import Profile, Speed

nnscaler_cpu.install()


class RecipeLoss(nn.Module):
    """The causal LM of a recipe: samples -> (summed loss, valid tokens of each sequence)."""

    def __init__(self, recipe: str):
        super().__init__()
        resolved = Recipe.load(recipe)
        config, path = build_config(resolved, read_manifest(resolved.data.first)), resolved.model.path
        lm = build_model(config, seed=None if path else resolved.train.seed)
        if path:
            materialize(lm, "cpu", path, alone=True)
        train = resolved.train
        self.traced = TracedLoss(lm, resolved.attention, seq_len=train.seq_len, chunk=train.loss_chunk)
        for name, parameter in self.named_parameters():
            if decay_class(name)[0] != int(parameter.ndim <= 1):
                raise UserError(f"{name} of shape {tuple(parameter.shape)}: weight decay goes by names of weights")

    def forward(self, samples):
        return self.traced(samples), samples["count"]


class HostMixedPrecisionAdamW(nnscaler.MixedPrecisionAdamW, HostAdamW):
    """nnScaler's AdamW over fp32 copies of bf16 weights, with the moments in host memory."""


def decay_class(name: str) -> tuple[int, int]:
    """(optimizer, parameter group) of a weight: norms and biases, of optimizer 1, are not decayed."""
    return int(name.endswith(".bias") or "norm" in name.split(".")[-2]), 0


def aggregate(outputs: list, group) -> AggregatedOutputs:
    """Loss and valid tokens of a step's micro-batches, over all replicas of the plan."""
    return AggregatedOutputs.aggregate(outputs, group, lambda output: output[0], lambda output: output[1].sum())


class Visits(torch.utils.data.Dataset):
    """The sequences of a run in the order in which it reads them, whole and in the order of the ring."""

    def __init__(self, recipe: str):
        self.recipe = Recipe.load(recipe)
        self.data = Mixture.of(self.recipe)
        self.layout, self.batch = layout_of(self.recipe), self.recipe.batch

    def __len__(self) -> int:
        return self.recipe.train.steps * self.batch

    def __getitem__(self, visit: int) -> dict[str, torch.Tensor]:
        tokens, length = self.data[visit]
        return sample(tokens, self.layout, length)


def layout_of(recipe: Recipe) -> Layout:
    """The layout of the ring that the recipe's run has; before there is one, a flat ring's."""
    world = _Joined.world
    inner = None if world is None else world.ring.node_size
    return Layout.of(recipe.attention, recipe.train.seq_len, recipe.parallel.cp, inner)


class InOrder(torch.utils.data.Sampler):
    """The visits of one ring: every `num_replicas`-th micro-batch."""

    def __init__(self, dataset: Visits, num_replicas: int, rank: int):
        self.visits, self.micro = len(dataset), dataset.recipe.train.micro_batch
        self.replicas, self.rank = num_replicas, rank

    def __len__(self) -> int:
        return self.visits // self.replicas

    def __iter__(self):
        for first in range(self.rank * self.micro, self.visits, self.replicas * self.micro):
            yield from range(first, first + self.micro)


def dummy_sample(args) -> dict[str, torch.Tensor]:
    """A micro-batch of the right shape, for tracing."""
    recipe = Recipe.load(args.get_resolved_var("recipe"))
    one = sample(torch.zeros(recipe.train.seq_len, dtype=torch.long), layout_of(recipe))
    return {name: torch.stack([x] * recipe.train.micro_batch) for name, x in one.items()}


def schedule(optimizer, recipe: str) -> LambdaLR:
    """The learning rate of the recipe, step by step."""
    train = Recipe.load(recipe).train
    return LambdaLR(optimizer, lambda step: learning_rate(step, train) / train.lr)


class _Joined:
    """The ring of this process, between `join` and `leave`."""

    world: World | None = None
    stack = contextlib.ExitStack()


def join(trainer) -> None:
    """Trainer's init_env_fn: build the rings of the run. Collective."""
    if trainer.train_args.compile_mode:
        return
    recipe = Recipe.load(trainer.train_args.get_resolved_var("recipe"))
    _Joined.world = _Joined.stack.enter_context(start(recipe.parallel))
    nnscaler_ops.use(_Joined.world.ring)


def again(error: RuntimeError) -> NoReturn:
    """Raise the error of an exchange once more, with the rank that hangs where one does."""
    if _Joined.world is not None:
        _Joined.world.again(error)
    raise error


def leave() -> None:
    """Give the rings up."""
    _Joined.stack.close()
    _Joined.world = None


@dataclass
class Progress:
    """What a run has said so far; travels in its checkpoints."""

    losses: list[float] = field(default_factory=list)
    values: dict = field(default_factory=dict)
    data: dict | None = None  # identity; None in checkpoints of before there was one


class RecipeHook(TrainHook):
    """Logging, guards, held-out losses and complete checkpoints of a run, as in the torch engine."""

    def __init__(self, args: dict):
        self.recipe = Recipe.load(args["recipe"])
        self.progress, self.unmarked, self.loss, self.peak_bytes = Progress(), None, None, 0
        self.needles, self.stop = needles(self.recipe) if self.recipe.log.niah_every else [], ""
        self.settled = False

    @cached_property
    def data(self) -> Mixture:
        """What the run reads."""
        return Mixture.of(self.recipe)

    def after_setup(self, trainer) -> None:
        """Open the log; the trainer has read its checkpoint."""
        self.world, train = _Joined.world, self.recipe.train
        self.place = held_out.Place(self.recipe, self.world, layout_of(self.recipe))
        first = len(self.progress.losses)
        self.log = Log(self.recipe.log.dir, start=first + 1, steps=train.steps, rank=self.world.rank)
        self.meter = Meter(self.recipe.batch * train.seq_len)
        config = build_config(self.recipe, read_manifest(self.recipe.data.first))
        self.speed = Speed.of(Shape.of(build_model(config, seed=None)), self.recipe, self.world)
        self.profile, self.profiled = Profile(self.recipe.log.profile_every, self.world.device), None
        self.batch_log = BatchLog(self.recipe.checkpoint.dir, self.world) if self.recipe.log.batches else None
        self.pace = Pace(self.world.device)
        nnscaler_ops.time_losses(self.pace.timed)
        self.guarded = self.recipe.parallel.data_guard_steps if self.world.ring.world > 1 else 0
        if self.world.rank == 0:
            keep_tokenizer(self.recipe)
            self.texts = texts_of(self.recipe, config)
        if self.world.ring.world > 1:
            self.world.say(self.world.about)
        for line in self.data.plan(train.steps * self.recipe.batch):
            self.world.say(line)

    def on_load_checkpoint(self, trainer, state: dict) -> None:
        """What the run had said before."""
        kept = state["mtraining"]
        self.progress = Progress(**json.loads(kept[0] if isinstance(kept, list) else kept))
        if self.progress.data is not None:
            config = self.recipe.checkpoint
            self.data.check_resumed(config.dir, self.progress.data, config.resume)
        self._set_optimizer(trainer, state)
        _Joined.world.say(f"resumed after step {len(self.progress.losses)}")

    def _set_optimizer(self, trainer, state: dict) -> None:
        """Learning rate, weight decay and the like are the recipe's, not the checkpoint's, as in the torch engine."""
        rate = learning_rate(len(self.progress.losses), self.recipe.train)
        for number, optimizer in enumerate(trainer.optimizer.optimizers):
            (stored,), (own,) = state["optimizer"]["param_groups"][0]["children"][number], optimizer.param_groups
            stored.update({**own, "lr": rate, "params": stored.get("params")})
        state["lr_scheduler"]["base_lrs"] = trainer.lr_scheduler.base_lrs

    def on_save_checkpoint(self, trainer, state: dict) -> None:
        """Called before the files are written."""
        self.progress.data = self.data.identity
        state["mtraining"] = json.dumps(vars(self.progress))
        self.unmarked = trainer.train_status.finished_train_steps

    def on_train_start(self, trainer) -> None:
        """A run that was asked to stop while it was built makes no step."""
        if name := signals.name(self.world.sum(self.world.asked()).tolist()):
            done = trainer.train_status.finished_train_steps
            self.world.leave(f"stopped by {name} before step {done + 1}, no step was made")

    def on_expire_checkpoint(self, trainer, step, checkpoint_dir) -> None:
        """An old checkpoint goes when the one that takes its place is complete; the first rank of each node asks."""
        if self.world.rank == 0:
            self._mark(trainer)
        elif self.unmarked is not None:
            nnscaler_states.wait(trainer.train_args.checkpoint.save_dir, self.unmarked, self.recipe.parallel.timeout_s)

    def on_step_start(self, trainer, epoch, index) -> None:
        """A save that came before is complete."""
        self._mark(trainer)
        self.world.at(f"step {trainer.train_status.finished_train_steps + 1}, computing")
        self.pace.begin()
        self.meter.__enter__()
        self.profiled = self.profile.step(trainer.train_status.finished_train_steps + 1)
        self.profiled.__enter__()

    def on_train_step_start(self, trainer, batches) -> None:
        """The ranks of a ring read the same tokens."""
        step = trainer.train_status.finished_train_steps
        if self.batch_log is not None:
            samples = self.data.samples(self.recipe.visits(step))
            self.batch_log.add(step, samples, [batch["input_ids"] for batch in batches])
        if self.guarded > 0:
            self.guarded -= 1
            check_same_tokens(torch.cat([batch["input_ids"] for batch in batches]), self.world, step)

    def after_aggregate_train_step_outputs(self, trainer, outputs, loss: float) -> None:
        """Loss a token of the step; which ranks were asked to stop is read with the norm."""
        self.loss, self.asked = loss, self.world.sum(self.world.asked())

    def after_gnorm_clip(self, trainer, norm) -> None:
        """Before the update: a step that is not finite ends the run on every rank."""
        norm, *counts = torch.cat([norm.float().view(1), self.asked]).tolist()
        self.stop = signals.name(counts)
        if not (math.isfinite(self.loss) and math.isfinite(norm)):
            step = trainer.train_status.finished_train_steps
            first = nnscaler_states.named(trainer.model)  # gradients as they are: the optimizer scales them in its step
            place = faults.first_weight(first, self.world) or faults.first_gradient(first, self.world)
            raise NotFinite(f"step {step}: loss {self.loss}, gradient norm {norm}, {self._told(step)}; {place}")

    def _told(self, step: int) -> str:
        return told(self.data, self.recipe.visits(step))

    def _spike(self, step: int, norm: float) -> None:
        found = spikes.limit(self.progress.losses, self.recipe.log)
        if self.world.rank == 0 and found is not None and self.loss > found[1]:
            self.world.say(f"step {step}: {spikes.told(self.loss, norm, found, self._told(step - 1))}")
            self.log.write(step, {"train/loss_spike": self.loss / found[0]})

    def after_optimizer_step(self, trainer) -> None:
        """Memory before the trainer sets its peak back."""
        self.peak_bytes = max(self.peak_bytes, peak_memory_bytes(self.world.device))

    def on_step_end(self, trainer, epoch, index, metrics, outputs) -> None:
        """Scalars and the progress line, held-out losses."""
        self.profiled.__exit__(None, None, None)
        self.meter.__exit__()
        if not self.settled:
            settle(self.world, self.recipe.parallel)
            self.settled = True
            self.world.say(nnscaler_ops.operator().describe(self.recipe.train.seq_len))
        done, log, train = trainer.train_status.finished_train_steps, self.recipe.log, self.recipe.train
        self._spike(done, metrics["gnorm"])
        self.progress.losses.append(self.loss)
        if done % log.every == 0 or done in (1, train.steps) or self.profile.found is not None:
            gauges = Gauges(self.meter, self.speed, self.profile, nnscaler_ops.operator(), self.world)
            measured = {"loss": self.loss, "grad_norm": metrics["gnorm"], "lr": learning_rate(done - 1, train)}
            values = step_values(gauges, **measured, peak_bytes=self.peak_bytes)
            self._say(done, values | self.pace.tell(done, self.meter, self.world, log.slow_factor))
        if self.stop:
            trainer.max_train_steps = done  # the trainer saves after its last step
            return
        if self.recipe.data.eval_path and (done == train.steps or (log.eval_every and done % log.eval_every == 0)):
            self._say(done, held_out.evaluate(trainer, self.place))
        if self.needles and (done == train.steps or done % log.niah_every == 0):
            self._say(done, held_out.find_needles(trainer, self.place, self.needles))

    def on_epoch_end(self, trainer, epoch) -> None:
        """After the save of a run that was asked to stop."""
        if self.stop:
            self._mark(trainer)
            done, steps = trainer.train_status.finished_train_steps, self.recipe.train.steps
            self.world.leave(f"stopped by {self.stop} after step {done}/{steps}; the same command goes on")

    def on_train_end(self, trainer) -> None:
        """The last save is complete."""
        self._mark(trainer)

    def on_finalize(self, trainer) -> None:
        """Write what is buffered."""
        if hasattr(self, "log"):
            self.log.close()

    def _say(self, step: int, values: dict) -> None:
        self.progress.values.update(values)
        self.log.write(step, values)
        self.log.line(step, values)

    def _mark(self, trainer) -> None:
        if self.unmarked is not None and self.world.rank == 0:
            path = nnscaler_states.mark(trainer.train_args.checkpoint.save_dir, self.unmarked, self.texts)
            config = self.recipe.checkpoint
            resume.prune(config.dir, self.unmarked, config.keep, but="nnscaler")  # the trainer removes its own
            self.world.say(f"saved {path}")
        self.unmarked = None
