"""Sparse prefill on vLLM's CPU backend."""

from vllm.v1.attention.backends import cpu_attn

from mtraining_nns.vllm_plugin.prefill import PrefillMixin, PromptsMixin


class Impl(PrefillMixin, cpu_attn.CPUAttentionBackendImpl):
    """Decodes and dense prompts are the stock class's."""

    device_type = "cpu"


class Builder(PromptsMixin, cpu_attn.CPUAttentionMetadataBuilder):
    """Of the metadata of a step."""


class Backend(cpu_attn.CPUAttentionBackend):
    """In place of the only backend that the CPU has, under its name."""

    @staticmethod
    def get_impl_cls():
        """vLLM asks."""
        return Impl

    @staticmethod
    def get_builder_cls():
        """vLLM asks."""
        return Builder
