"""What the backends share: the whole prompts among the tokens of a step, and the operator that reads them."""

import functools
import json

from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType

from mtraining_nns.ops.attention import Operator
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.ops.ring import Ring

KEY = "mtraining"  # in additional_config


@functools.cache
def operator(settings: str, device_type: str) -> Operator:
    """One for all layers; settings: JSON of AttentionConfig's fields."""
    return Operator(AttentionConfig(**json.loads(settings)), Ring.single(), device_type)


class BackendMixin:
    """Of a backend: which classes serve it."""

    impl: type
    builder: type

    @classmethod
    def get_impl_cls(cls):
        """vLLM asks."""
        return cls.impl

    @classmethod
    def get_builder_cls(cls):
        """vLLM asks."""
        return cls.builder


class PromptsMixin:
    """Of a metadata builder: notes in `prompts` where whole prompts lie among the tokens of a step."""

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        """As the class beside it."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        asked = KEY in self.vllm_config.additional_config and common_attn_metadata.max_query_len > 1
        metadata.prompts = whole_prompts(common_attn_metadata) if asked else []
        return metadata


def whole_prompts(metadata) -> list[tuple[int, int]]:
    """(first, last + 1) of each sequence that begins in this step, by host copies; ValueError for a part of one."""
    starts, lengths = metadata.query_start_loc_cpu.tolist(), metadata.seq_lens_cpu_upper_bound.tolist()
    found = []
    for begin, end, length in zip(starts[:-1], starts[1:], lengths):
        if end - begin > 1:
            if end - begin != length:
                raise ValueError(
                    f"sparse prefill reads whole prompts, got tokens {length - (end - begin)} to {length} of one;"
                    " switch chunked prefill and prefix caching off"
                )
            found.append((begin, end))
    return found


class PrefillMixin:
    """Of an attention implementation: whole prompts go through the operator, all else through the class beside it."""

    device_type: str

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        self.sparse = None
        if KEY in config.additional_config:
            check(config)
            self._check_layer()
            self.sparse = operator(json.dumps(config.additional_config[KEY], sort_keys=True), self.device_type)

    def _check_layer(self) -> None:
        unknown = {
            "alibi_slopes": self.alibi_slopes is not None,
            "sliding_window": self.sliding_window not in (-1, (-1, -1)),
            "logits_soft_cap": bool(self.logits_soft_cap),
            "kv_sharing_target_layer_name": self.kv_sharing_target_layer_name is not None,
            "attn_type": self.attn_type != AttentionType.DECODER,
            "sinks": getattr(self, "sinks", None) is not None,
        }
        for name in (name for name, given in unknown.items() if given):
            raise ValueError(f"sparse prefill does not do {name}, got a layer that has it; use attention dense")

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):
        """Attention of a step's tokens, written into `output`; keys and values lie in the cache already."""
        prompts = getattr(attn_metadata, "prompts", ()) if self.sparse is not None else ()
        if sum(end - begin for begin, end in prompts) < getattr(attn_metadata, "num_actual_tokens", 1):
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        for begin, end in prompts:
            q, k, v = (x[None, begin:end] for x in (query, key, value))
            number = extract_layer_index(layer.layer_name)
            output[begin:end] = self.sparse(q, k, v, layer=number, scale=self.scale)[0]
        return output


def check(config) -> None:
    """ValueError for an engine that would cut prompts into parts or hold keys in another form."""
    wrong = {
        "enable_chunked_prefill": (config.scheduler_config.enable_chunked_prefill, False),
        "enable_prefix_caching": (bool(config.cache_config.enable_prefix_caching), False),
        "enforce_eager": (config.model_config.enforce_eager, True),
        "max_num_seqs": (config.scheduler_config.max_num_seqs, 1),
        "speculative_config": (config.speculative_config, None),
        "kv_transfer_config": (config.kv_transfer_config, None),
        "decode_context_parallel_size": (config.parallel_config.decode_context_parallel_size, 1),
        "kv_cache_dtype": (config.cache_config.cache_dtype, "auto"),
    }
    for name, (got, expected) in wrong.items():
        if got != expected:
            raise ValueError(f"sparse prefill needs {name}={expected!r}, got {got!r}")
