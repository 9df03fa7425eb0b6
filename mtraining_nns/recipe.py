"""A recipe: everything that one training run depends on, as one frozen object.

    recipe = Recipe.load("recipes/demo.yaml", ["train.steps=20"])   # file, then overrides; types and ranges checked
    recipe = recipe.resolve(world=2)                                # what depends on the launch; files checked

Loads neither torch nor a model, so that a mistake is reported before anything is started. The sections are in
`sections.py`, the attention section is the operator's own `AttentionConfig`, the YAML border is `recipe_yaml.py`.
Paths are relative to the current directory. Every rank resolves the same recipe to the same values.
"""

import os
from dataclasses import asdict, dataclass, field, replace

from mtraining_nns import recipe_yaml
from mtraining_nns.data import shares, store
from mtraining_nns.errors import UserError
from mtraining_nns.ops.config import AttentionConfig, shortest
from mtraining_nns.sections import (
    CheckpointConfig,
    DataConfig,
    ExportConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run; every section is a frozen dataclass that checks itself."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    log: LogConfig = field(default_factory=LogConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    @classmethod
    def load(cls, path: str, overrides: list[str] | tuple[str, ...] = ()) -> "Recipe":
        """Read a YAML file, apply `section.key=value` overrides, check keys, types and ranges; raises UserError."""
        tree = recipe_yaml.read(path)
        for override in overrides:
            recipe_yaml.override(tree, override)
        return recipe_yaml.build(cls, tree)

    def to_yaml(self) -> str:
        """The recipe with every default written out; `load` reads it back to an equal recipe."""
        return recipe_yaml.dump(asdict(self))

    def make_run_folder(self) -> None:
        """Create `checkpoint.dir`; raises UserError where it cannot be written."""
        try:
            os.makedirs(self.checkpoint.dir, exist_ok=True)
        except OSError as error:
            raise UserError(f"checkpoint.dir={self.checkpoint.dir} cannot be created: {error.strerror}") from error
        if not os.access(self.checkpoint.dir, os.W_OK):
            raise UserError(f"checkpoint.dir={self.checkpoint.dir} is not writable; choose another folder")

    @property
    def batch(self) -> int:
        """Sequences of an optimizer step, over all rings."""
        return self.parallel.dp * self.train.micro_batch * self.train.accumulation

    def visits(self, step: int) -> range:
        """What a step reads over all ranks, by place in the run."""
        return range(step * self.batch, (step + 1) * self.batch)

    def shared_by(self, world: int) -> "Recipe":
        """The recipe with its ring and attention settled for `world` processes; reads no file; raises UserError."""
        cp = _context_parallel(self.parallel, world)
        _check_inner(self.parallel, cp)
        _check_every_rank_has_tokens(self.attention, self.train.seq_len, cp)
        return replace(self, attention=self.attention.resolved(), parallel=replace(self.parallel, cp=cp))

    def resolve(self, world: int) -> "Recipe":
        """The recipe of a run with `world` processes: no default left open, lengths and data checked; raises UserError.

        >>> recipe.resolve(world=8).parallel.cp       # parallel.cp not given, parallel.dp=2
        4
        """
        recipe = self.shared_by(world)
        check_folders(self)
        manifest = _check_data(self.data, self.train.seq_len)
        if self.data.eval_path is not None:
            _manifest("data.eval_path", self.data.eval_path, self.train.seq_len)
        elif self.log.eval_every:
            raise UserError(f"log.eval_every={self.log.eval_every} needs data.eval_path, a prepared folder")
        return replace(
            recipe,
            model=_with_vocabulary(self.model, manifest),
            log=replace(self.log, dir=self.log.dir or os.path.join(self.checkpoint.dir, "tensorboard")),
            export=replace(self.export, dir=self.export.dir or os.path.join(self.checkpoint.dir, "hf")),
        )


def _context_parallel(parallel: ParallelConfig, world: int) -> int:
    if parallel.cp is None:
        if world % parallel.dp:
            raise UserError(f"parallel.dp={parallel.dp} must divide the {world} launched processes; change either")
        return world // parallel.dp
    needed = parallel.cp * parallel.dp
    if needed != world:
        raise UserError(
            f"parallel.cp={parallel.cp} x parallel.dp={parallel.dp} needs {needed} processes, launched with {world};"
            f" use --nproc {needed} or change parallel.cp"
        )
    return parallel.cp


def _check_inner(parallel: ParallelConfig, cp: int) -> None:
    inner = parallel.inner
    if inner is not None and parallel.ring == "flat":
        raise UserError(f"parallel.inner={inner} is of a hierarchical ring, got parallel.ring=flat; leave one out")
    if inner is not None and cp % inner:
        raise UserError(f"parallel.inner={inner} must divide the ring, parallel.cp={cp}; change either")


def _check_every_rank_has_tokens(attention: AttentionConfig, seq_len: int, cp: int) -> None:
    needed, share = shortest(attention, seq_len, cp)
    if seq_len < needed:
        raise UserError(
            f"layout {attention.layout} gives each of parallel.cp={cp} ranks {share}, so train.seq_len must be at least"
            f" {needed}, got {seq_len}; use fewer ranks, a smaller attention.block or attention.granularity, or longer"
            " sequences"
        )


def check_folders(recipe: Recipe) -> None:
    """UserError where a folder that the recipe names is missing; those of data are looked at elsewhere."""
    path, resume = recipe.model.path, recipe.checkpoint.resume
    if path is not None and not os.path.isfile(os.path.join(path, "config.json")):
        raise UserError(
            f"model.path={path} has no config.json; for a hub model run: hf download {path} --local-dir DIR"
        )
    if resume not in ("auto", "never") and not os.path.isdir(resume):
        raise UserError(f"checkpoint.resume={resume} is no folder; use auto, never or the path of a checkpoint")


def _check_data(data: DataConfig, seq_len: int) -> dict:
    """Manifest of the data to train on; UserError where folders cannot be read, are one, or had other tokenizers."""
    if data.mix is None:
        return _manifest("data.path", data.path, seq_len)
    seen: dict[str, str] = {}
    for folder in data.mix:
        same = seen.setdefault(os.path.realpath(folder), folder)
        if same != folder:
            raise UserError(f"data.mix: {same} and {folder} are one folder; give it once with the sum of its weights")
    manifests = {folder: _manifest(f"data.mix.{folder}", folder, seq_len) for folder in data.mix}
    first = manifests[data.first]
    for folder, manifest in manifests.items():
        for name in ("vocab_size", "eos_id", "tokenizer"):
            one, other = (_identity(found.get(name)) for found in (first, manifest))
            if one != other:
                raise UserError(
                    f"data.mix: {data.first} was prepared with {name} {one}, {folder} with {other}; prepare all"
                    " folders with the same tokenizer"
                )
    shares.whole_shares(list(data.mix.values()))
    return first


def _identity(value):
    return value.get("sha256") if isinstance(value, dict) else value


def _manifest(key: str, path: str, seq_len: int) -> dict:
    try:
        manifest = store.read_manifest(path)
        store.sequences_of(path, manifest, seq_len)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    return manifest


def _with_vocabulary(model: ModelConfig, manifest: dict) -> ModelConfig:
    """A fresh model without `vocab_size` takes that of the data; one that is too small is refused."""
    vocabulary = manifest.get("vocab_size")
    if model.init is None or vocabulary is None:
        return model
    size = model.init.get("vocab_size", vocabulary)
    if size < vocabulary:
        raise UserError(f"model.init.vocab_size={size} is below the data's {vocabulary}; raise it or leave it out")
    return replace(model, init={**model.init, "vocab_size": size})
