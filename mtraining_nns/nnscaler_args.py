"""A recipe as the arguments of nnScaler's Trainer, for the engine and for stock nnscaler-train.

    trainer_args(recipe, "runs/demo/recipe.yaml")        a dict for Trainer(train_args=...), or for a YAML file

Needs no nnScaler. Generated code lies in a folder for each plan and recipe that it follows from, so that no run meets
the code of another one.
"""

import hashlib
import json
import os
from dataclasses import asdict

from mtraining_nns import __version__, digest
from mtraining_nns.resume import STATES

PARTS = "mtraining_nns.nnscaler_parts"
OPTIMIZERS = {  # by precision and offload
    ("bf16", False): "nnscaler.MixedPrecisionAdamW",
    ("fp32", False): "torch.optim.AdamW",
    ("bf16", True): f"{PARTS}.HostMixedPrecisionAdamW",
    ("fp32", True): "mtraining_nns.host_adamw.HostAdamW",
}
ZERO = {0: 0, 1: 1, 2: 3, 3: 3}  # nnScaler has no stage 2


def folders(recipe) -> tuple[str, str]:
    """(generated code, checkpoints) of a run."""
    return os.path.join(recipe.checkpoint.dir, "nnscaler", "code"), os.path.join(recipe.checkpoint.dir, STATES)


def trainer_args(recipe, path: str, *, resume_from: dict | None = None) -> dict:
    """The arguments of a resolved recipe that lies at `path`, as plain values."""
    train, parallel, (code, states) = recipe.train, recipe.parallel, folders(recipe)
    read, bf16 = {"recipe": os.path.abspath(path)}, train.precision == "bf16"
    compute = {
        "plan_ngpus": parallel.cp,
        "runtime_ngpus": parallel.cp * parallel.dp,
        "trace_strategy": "meta",
        "constant_folding": True,
        "use_end2end": True,
        "use_zero": ZERO[parallel.zero] if parallel.cp * parallel.dp > 1 else 0,
        "pas_config": {"recompute": train.recompute},
        "user_config": {"mtraining": identity(recipe)},
    }
    adam = {"lr": train.lr, "betas": list(train.betas), "eps": train.eps}
    optimizer = OPTIMIZERS[train.precision, parallel.offload]
    # one for matrices, one for norms and biases, which are not decayed: decay_class tells them apart
    optimizers = [{"type": optimizer, "options": {**adam, "weight_decay": x}} for x in (train.weight_decay, 0.0)]
    return {
        "init_module": PARTS,
        "vars": read,
        "compute_config": compute,
        "run_mode": "run",
        "gen_savedir": os.path.join(code, _hash(compute)),
        "gen_reuse": "moo",  # what a killed run left incomplete is generated again
        "broadcast_strategy": "none",  # machines share checkpoint.dir
        "pas_policy": "mtraining_nns.policy.context_parallel",
        "init_env_fn": f"{PARTS}.join",
        "dummy_sample_gen_fn": f"{PARTS}.dummy_sample",
        # weights and compute in bf16, gradients summed in fp32, fp32 weights in the optimizer; rope tables stay fp32
        "precision": {"param": "bf16", "grad": "fp32"} if bf16 else "none",
        "model": {"type": f"{PARTS}.RecipeLoss", "args": read},
        "optimizer": {
            "type": "nnscaler.runtime.hybrid_optimizer.HybridOptimizer",
            "args": {"config": {"optimizers": optimizers}},
            "param_clss_fn": f"{PARTS}.decay_class",
            "clip_gnorm": train.clip,
            "loss_reduction": "per-token-mean",
            "grad_reduction": "per-token-mean",
            "aggregate_outputs_fn": f"{PARTS}.aggregate",
        },
        "lr_scheduler": {"type": f"{PARTS}.schedule", "args": read, "interval": "step"},
        "dataset": {"type": f"{PARTS}.Visits", "train_args": read},
        "dataset_sampler": {"type": f"{PARTS}.InOrder"},
        "dataloader": {"train_args": {"drop_last": True}},
        "micro_batch_size": train.micro_batch,
        "grad_accumulation_steps": train.accumulation,
        "max_train_steps": train.steps,
        "val_every_n_epochs": None,
        "checkpoint": {
            "save_dir": states,
            "save_type": "deduped",
            "save_last": False,
            "save_best": False,
            "every_n_train_steps": recipe.checkpoint.every or train.steps,
            "keep_last_n_checkpoints": recipe.checkpoint.keep,
            **({"resume_from": resume_from} if resume_from else {}),
        },
        "hook": {"type": f"{PARTS}.RecipeHook", "args": read},
        "debug": {"check_gradient_sync_cross_devices": False},
        "enable_progress_bar": False,
        "log_progress_every_n_train_steps": None,
        "seed": train.seed,
    }


def identity(recipe) -> str:
    """A hash of all that the generated code and the initial weights beside it follow from, but for what nnScaler itself
    compares. Reads the weights of model.path.
    """
    import torch
    import transformers

    model, train = asdict(recipe.model), recipe.train
    model["weights"] = train.seed if recipe.model.path is None else digest.of_model(recipe.model.path)
    told = {
        "model": model,
        "attention": asdict(recipe.attention),
        "train": [train.seq_len, train.micro_batch, train.recompute, train.precision, train.loss_chunk],
        "versions": [__version__, torch.__version__, transformers.__version__],
    }
    return _hash(told)


def _hash(told: dict) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]
