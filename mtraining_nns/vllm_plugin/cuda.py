"""Sparse prefill on vLLM's FlashAttention backend. It has not run on a GPU yet: only its CPU twin was tested."""

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn

from mtraining_nns.vllm_plugin.prefill import BackendMixin, PrefillMixin, PromptsMixin


class Impl(PrefillMixin, flash_attn.FlashAttentionImpl):
    """Decodes and dense prompts are the stock class's."""

    device_type = "cuda"


class Builder(PromptsMixin, flash_attn.FlashAttentionMetadataBuilder):
    """Of the metadata of a step."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE  # steps with prompts run Python


class Backend(BackendMixin, flash_attn.FlashAttentionBackend):
    """LLM(attention_backend="CUSTOM")."""

    impl, builder = Impl, Builder

    @staticmethod
    def get_name() -> str:
        """A name that vLLM knows."""
        return "CUSTOM"
