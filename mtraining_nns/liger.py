"""Fused kernels of liger-kernel for what surrounds attention: RMSNorm, SwiGLU and the rotation of queries and keys.

    use_liger(lm)        in place, before the model is sharded

They read and write each activation once, where torch keeps and moves several copies of it. For GPUs alone. liger-kernel
also replaces functions of transformers' module for the model type, so the whole process uses them afterwards.
"""

import importlib.util

from mtraining_nns.errors import UserError


def use_liger(lm, device_type: str) -> None:
    """Let a causal LM compute with liger-kernel; UserError where that cannot be."""
    if device_type == "cpu":
        raise UserError("train.kernels=liger needs a GPU, this run has none; use torch")
    if importlib.util.find_spec("liger_kernel") is None:
        raise UserError("train.kernels=liger needs the package liger-kernel: pip install liger-kernel, or use torch")
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if lm.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(f"train.kernels=liger knows no {lm.config.model_type} model; use torch")
    # the loss is our own: it is chunked, and needs no logits
    _apply_liger_kernel_to_instance(model=lm, cross_entropy=False, fused_linear_cross_entropy=False)
