"""A plugin of vLLM: prompts are read with the sparse attention of training, every further token attends densely.

    LLM(model, additional_config={"mtraining": {...fields of AttentionConfig...}}, ...)

vLLM finds `register` by its entry point `vllm.general_plugins`. Without that key in additional_config everything is
vLLM's own. A prompt is read whole and alone: no chunked prefill, no prefix caching; `eval/vllm.py` sets what it needs.

    prefill.py    which prompts a step holds, the operator that reads them
    cpu.py        on vLLM's CPU backend
    cuda.py       on its FlashAttention backend, LLM(attention_backend="CUSTOM"); has not run on a GPU yet
"""


def register() -> None:
    """Make the backends known; vLLM calls it in each of its processes, perhaps more than once."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():  # it has one backend and takes no other
        register_backend(AttentionBackendEnum.CPU_ATTN, "mtraining_nns.vllm_plugin.cpu.Backend")
    elif current_platform.is_cuda():
        register_backend(AttentionBackendEnum.CUSTOM, "mtraining_nns.vllm_plugin.cuda.Backend")
