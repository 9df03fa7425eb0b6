"""The torch engine: FSDP2 over all ranks, the ring inside the attention operator, one process per device.

    torchrun --nproc-per-node 8 -m mtraining_nns.train recipes/demo.yaml

Runs on gloo and the CPU as on NCCL and GPUs; on the CPU a resumed run repeats the straight run to the bit.
Files: `world.py` processes and ring, `feed.py` batches, `step.py` one step, `held_out.py` evaluation.
"""

import json
from dataclasses import dataclass

import torch

from mtraining_nns import checkpoint, handover, hf, resume, signals, spikes
from mtraining_nns.checkpoint import State
from mtraining_nns.data.store import read_manifest
from mtraining_nns.engines import faults
from mtraining_nns.engines.batch_log import BatchLog
from mtraining_nns.engines.feed import Feed
from mtraining_nns.engines.held_out import check_held_out, evaluate, find_needles
from mtraining_nns.engines.pace import Pace
from mtraining_nns.engines.step import NotFinite, StepResult, shard, train_step
from mtraining_nns.engines.world import World, layout_of, settle, start
from mtraining_nns.errors import UserError
from mtraining_nns.export import finish, keep_tokenizer, texts_of
from mtraining_nns.metrics import Gauges, Log, Meter, peak_memory_bytes, step_values, summary
from mtraining_nns.model import CausalLMLoss, build_config, build_model, materialize
from mtraining_nns.needles import Needle, needles
from mtraining_nns.ops.attention import Operator
from mtraining_nns.optim import build_optimizer, learning_rate, set_learning_rate
from mtraining_nns.plan.shape import Shape
from mtraining_nns.recipe import Recipe
from mtraining_nns.speed import Profile, Speed


def train(recipe: Recipe) -> dict:
    """Train a resolved recipe to its last step, export it, and return the summary (also in checkpoint.dir).

    Every rank of the launch calls it. A run that is complete already is only evaluated and exported again.
    """
    with start(recipe.parallel) as world:
        run = Run.build(recipe, world)
        first = run.first_step
        run.stop_before(first)
        for step in range(first, recipe.train.steps):
            run.step(step)
            if step == first:
                settle(world, recipe.parallel)
        signals.all_is_saved("all steps are done and saved, the same command evaluates and exports")
        found = run.finish()
    if world.rank == 0:
        finish(recipe, resume.latest(recipe.checkpoint.dir).path, found)
    return found


@dataclass
class Run:
    """Everything that a training run holds on one rank."""

    recipe: Recipe
    world: World
    feed: Feed
    model: CausalLMLoss
    state: State
    losses: list[float]
    log: Log
    gauges: Gauges
    last: dict  # latest logged and evaluated values by tag
    needles: list[Needle]
    batch_log: BatchLog | None
    pace: Pace

    @classmethod
    def build(cls, recipe: Recipe, world: World) -> "Run":
        """Data, sharded model and optimizer, from the checkpoint that `checkpoint.resume` means if there is one."""
        feed = Feed(recipe, world, layout_of(recipe, world.ring))
        if recipe.data.eval_path is not None:
            check_held_out(recipe, feed.data.manifest)
        hidden = needles(recipe) if recipe.log.niah_every else []
        found = resume.find(recipe.checkpoint.dir, recipe.checkpoint.resume, "torch", world.say)
        try:
            model, operator = build_sharded(recipe, world, load=found is None)
        except UserError:
            raise
        except ValueError as error:  # the operator or the adapter cannot do what the recipe asks for
            raise UserError(" ".join(str(error).split())) from error
        state = State(model.lm, build_optimizer(model, recipe.train, offload=recipe.parallel.offload))
        trainer = _resume(found, state, recipe, feed) if found else {"losses": [], "values": {}}
        if world.rank == 0:
            keep_tokenizer(recipe)
        if world.ring.world > 1:
            world.say(world.about)
        world.say(operator.describe(recipe.train.seq_len))
        for line in feed.data.plan(recipe.train.steps * feed.batch):
            world.say(line)
        losses, last = trainer["losses"], trainer["values"]
        log = Log(recipe.log.dir, start=len(losses) + 1, steps=recipe.train.steps, rank=world.rank)
        meter, profile = Meter(feed.batch * recipe.train.seq_len), Profile(recipe.log.profile_every, world.device)
        gauges = Gauges(meter, Speed.of(Shape.of(model.lm), recipe, world), profile, operator, world)
        batch_log = BatchLog(recipe.checkpoint.dir, world) if recipe.log.batches else None
        own = Pace(world.device)
        own.watch([layer.mlp for layer in model.lm.model.layers if hasattr(layer, "mlp")])
        return cls(recipe, world, feed, model, state, losses, log, gauges, last, hidden, batch_log, own)

    @property
    def first_step(self) -> int:
        return len(self.losses)

    def step(self, step: int) -> None:
        """One optimizer step with its logging, evaluation and checkpoint. `step` counts from 0."""
        recipe, done, final = self.recipe, step + 1, step + 1 == self.recipe.train.steps
        set_learning_rate(self.state.optimizer, learning_rate(step, recipe.train))
        self.pace.begin()
        with self.gauges.meter, self.gauges.profile.step(done):
            self.world.at(f"step {done}, reading")
            with self.pace.reading():
                batches = self.feed.batches(step)
            self.world.at(f"step {done}, computing")
            if self.batch_log is not None:
                samples = self.feed.data.samples(self.feed.visits(step))
                self.batch_log.add(step, samples, [batch["input_ids"] for batch in batches])
            try:
                result = train_step(self.model, self.state.optimizer, batches, self.world, recipe=recipe, step=step)
            except NotFinite as error:
                first = faults.first_not_finite(self.model, batches, self.world, recipe=recipe, step=step)
                raise NotFinite(f"{error}, {self.feed.told(step)}; {first}") from error
        self.spike(step, result)
        self.losses.append(result.loss)
        if done % recipe.log.every == 0 or final or step == 0 or self.gauges.profile.found is not None:
            self.report(step, result)
        between = not (final or result.stop)
        if between and recipe.log.eval_every and done % recipe.log.eval_every == 0:
            self.evaluate(done)
        if between and self.needles and done % recipe.log.niah_every == 0:
            self.find_needles(done)
        if not between or (recipe.checkpoint.every and done % recipe.checkpoint.every == 0):
            self.save(done)
        if result.stop:
            self.leave(f"stopped by {result.stop} after step {done}/{recipe.train.steps}; the same command goes on")

    def spike(self, step: int, result: StepResult) -> None:
        """Say it where the loss of a step is far above those before; training goes on."""
        found = spikes.limit(self.losses, self.recipe.log)
        if self.world.rank == 0 and found is not None and result.loss > found[1]:
            told = spikes.told(result.loss, result.grad_norm, found, self.feed.told(step))
            self.world.say(f"step {step + 1}: {told}")
            self.log.write(step + 1, {"train/loss_spike": result.loss / found[0]})

    def stop_before(self, step: int) -> None:
        """End a run that was asked to while it was built. Collective."""
        counts = self.world.sum(self.world.asked()).tolist()
        if signals.name(counts):
            self.leave(f"stopped by {signals.name(counts)} before step {step + 1}, no step was made")

    def leave(self, farewell: str) -> None:
        """Stopped on all ranks. Collective."""
        self.log.close()
        self.world.leave(farewell)

    def report(self, step: int, result: StepResult) -> None:
        """Progress line and scalars of a step. Collective."""
        lr = learning_rate(step, self.recipe.train)
        peak = peak_memory_bytes(self.world.device)
        values = step_values(self.gauges, loss=result.loss, grad_norm=result.grad_norm, lr=lr, peak_bytes=peak)
        values |= self.pace.tell(step + 1, self.gauges.meter, self.world, self.recipe.log.slow_factor)
        self._say(step + 1, values)

    def evaluate(self, done: int) -> None:
        """Held-out losses of the weights after `done` steps. Collective."""
        self.world.at(f"step {done}, held-out losses")
        self._say(done, evaluate(self.model, self.gauges.operator, self.recipe, self.world))

    def find_needles(self, done: int) -> None:
        """Needles under the weights after `done` steps. Collective."""
        self.world.at(f"step {done}, needles")
        self._say(done, find_needles(self.model, self.needles, self.recipe, self.world))

    def _say(self, done: int, values: dict) -> None:
        self.last.update(values)
        self.log.write(done, values)
        self.log.line(done, values)

    def save(self, done: int) -> None:
        """Checkpoint after `done` steps. Collective."""
        self.world.at(f"step {done}, saving")
        data = self.feed.data.identity
        trainer = {"format": 1, "step": done, "losses": self.losses, "values": self.last, "data": data}
        files = {
            checkpoint.TRAINER: json.dumps(trainer),
            **texts_of(self.recipe, self.model.lm.config),
        }
        config = self.recipe.checkpoint
        path = checkpoint.save(config.dir, done, self.state, files=files, keep=config.keep)
        self.world.say(f"saved {path}")

    def finish(self) -> dict:
        """Evaluate, close the log, and sum the run up. Collective."""
        if self.recipe.data.eval_path is not None:
            self.evaluate(len(self.losses))
        if self.needles:
            self.find_needles(len(self.losses))
        self.log.close()
        tokens = self.gauges.meter.tokens_per_step
        found = summary(self.losses, self.last, world=self.world.mesh.size(), tokens_per_step=tokens)
        return found | {"data": self.feed.data.visited(len(self.losses) * self.feed.batch)}


def build_sharded(recipe: Recipe, world: World, *, load: bool) -> tuple[CausalLMLoss, Operator]:
    """The model of a recipe on its ranks with the operator attached; `load` False leaves a model.path's weights out."""
    config = build_config(recipe, read_manifest(recipe.data.first))
    path = recipe.model.path
    lm = build_model(config, seed=None if path else recipe.train.seed)
    model = CausalLMLoss(lm, chunk=recipe.train.loss_chunk)
    operator = Operator(recipe.attention, world.ring, world.device.type)
    hf.attach(lm, operator, getattr(torch, recipe.model.dtype))
    shard(model, recipe, world)
    if path:
        materialize(lm, world.device, path if load else None)
    return model, operator


def _resume(found: resume.Found, state: State, recipe: Recipe, feed: Feed) -> dict:
    """Load a checkpoint of either engine and return its trainer.json; says what changed in the recipe since."""
    world, changes = feed.world, resume.changes(found.path, recipe)
    path = found.path
    if found.engine != "torch":
        world.at("taking over a checkpoint")
        path = handover.to_torch(found, recipe.checkpoint.dir)
    data = resume.read_json(path, checkpoint.TRAINER)["data"]
    feed.data.check_resumed(path, data, recipe.checkpoint.resume)
    trainer = checkpoint.load(path, state)
    world.say(f"resumed {found.path} after step {trainer['step']}" + "".join(f"; {text}" for text in changes))
    return trainer
