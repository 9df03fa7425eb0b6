"""Sparse prefill on vLLM's CPU backend."""

from vllm.v1.attention.backends import cpu_attn

from mtraining_nns.vllm_plugin.prefill import BackendMixin, PrefillMixin, PromptsMixin


class Impl(PrefillMixin, cpu_attn.CPUAttentionBackendImpl):
    """Decodes and dense prompts are the stock class's."""

    device_type = "cpu"


class Builder(PromptsMixin, cpu_attn.CPUAttentionMetadataBuilder):
    """Of the metadata of a step."""


class Backend(BackendMixin, cpu_attn.CPUAttentionBackend):
    """In place of the only backend that the CPU has, under its name."""

    impl, builder = Impl, Builder
