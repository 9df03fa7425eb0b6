"""vLLM answers what HuggingFace answers, with dense attention and with sparse prefill."""

import importlib.util
import json
import os
import string
from itertools import product

import pytest
import torch
from tiny_model import save_llama

from mtraining_nns import cli
from mtraining_nns.errors import UserError

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default vLLM takes nearly all memory
SPARSE = {"block": 16, "budget": "fixed", "k_v": 4, "k_s": 1, "sinks": 2, "local": 16, "last_q": 8}
TASKS = "niah_single_1,niah_multikey_2,niah_multikey_3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model whose tokenizer knows the words of the tasks, so that 1,024 tokens hold them."""
    from mtraining_nns.data.tokenizer import train_bpe
    from mtraining_nns.eval import ruler_tasks, words

    names = " ".join(map("".join, product(string.ascii_uppercase, repeat=2))) + " "
    corpus = [" ".join(part) for part in words.words()] + [names * 50, json.dumps(ruler_tasks.tables())]
    return save_llama(
        tmp_path_factory.mktemp("model"), attention=SPARSE, tokenizer=train_bpe(corpus, 3000), head_dim=32
    )


def records(folder, out, engine: str, attention: str, *words: str) -> list[dict]:
    text = out.parent / "text.txt"
    text.write_text("The road was long. Nobody came. " * 400)
    asked = ["--model", folder, "--lengths", "1k", "--samples", "2", "--out", out, "--engine", engine, *words]
    asked += ["--attention", attention, "--text", text, "--dtype", "float32", "--depths", "0,100"]
    asked += [] if engine == "vllm" else ["--device", "cpu"]
    assert cli.main(["eval", *map(str, asked)]) == 0
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("attention", ["dense", "mtraining"])
def test_answers_and_scores_are_those_of_huggingface(folder, tmp_path, attention):
    """The same greedy tokens, so the same records; the loss of every token to rounding."""
    suites = ("--suite", "ruler,niah,perplexity", "--tasks", TASKS)
    found, expected = (records(folder, tmp_path / name, name, attention, *suites) for name in ("vllm", "hf"))
    assert len(found) == 3 * 2 + 2 * 2 + 2 and found[:10] == expected[:10]
    assert len({record["generated"] for record in found[:10]}) > 5
    for one, other in zip(found[10:], expected[10:], strict=True):
        for part, same in zip(one["buckets"], other["buckets"], strict=True):
            assert part["tokens"] == same["tokens"] and part["nll_sum"] == pytest.approx(same["nll_sum"], rel=1e-5)
    manifest = json.loads((tmp_path / "vllm" / "manifest.json").read_text())
    assert manifest["engine"] == "vllm" and manifest["vllm"].startswith("0.32") and manifest["attention"] == attention


def test_sparse_prefill_is_not_dense(folder):
    """Whole prompts up to the model's limit, against the other attention and against HuggingFace."""
    from mtraining_nns.eval.huggingface import HuggingFaceEngine
    from mtraining_nns.eval.vllm import VllmEngine

    ids = torch.randint(0, 256, (2048,), generator=torch.Generator().manual_seed(0))
    engine = VllmEngine(folder, max_tokens=2048, attention="mtraining", dtype="float32")
    sparse = engine.nll(ids)
    with pytest.raises(UserError, match="2049 tokens exceed what the engine was made for=2048"):
        engine.generate([ids.tolist()[:2040]], 9)
    assert len(engine.generate([ids.tolist()[:2040]], 8)[0]) == 8
    engine.close()
    reference = HuggingFaceEngine(folder, attention="mtraining", device="cpu").nll(ids)
    torch.testing.assert_close(sparse, reference, rtol=1e-4, atol=1e-4)
    dense = HuggingFaceEngine(folder, device="cpu").nll(ids)
    assert (sparse - dense).abs().max() > 0.1


def test_a_plugin_that_was_not_taken_is_an_error(folder, monkeypatch):
    """vLLM itself would say so in its log and answer densely."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from mtraining_nns.eval.vllm import VllmEngine

    monkeypatch.setattr(AttentionBackendEnum, "get_path", lambda self, **options: "vllm.v1.stock.Backend")
    with pytest.raises(UserError, match="has not taken the plugin of sparse prefill, got vllm.v1.stock.Backend"):
        VllmEngine(folder, max_tokens=512, attention="mtraining", dtype="float32")


def test_texts_end_where_the_folder_says(folder, tmp_path):
    """At the tokens of generation_config.json and no other, in the dtype of the weights."""
    import shutil

    from mtraining_nns.eval.huggingface import HuggingFaceEngine
    from mtraining_nns.eval.vllm import VllmEngine

    prompt = [[5, 6, 7, 8] * 8]
    model = shutil.copytree(folder, tmp_path / "model")
    whole = HuggingFaceEngine(model, device="cpu").generate(prompt, 12)[0]
    fields = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(fields | {"eos_token_id": [2999, whole[5]]}))
    expected = HuggingFaceEngine(model, device="cpu").generate(prompt, 12)[0]
    engine = VllmEngine(model, max_tokens=512)
    assert engine.generate(prompt, 12)[0] == expected == whole[: whole.index(whole[5]) + 1]
    assert engine.dtype == "float32"
    engine.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_prefix_caching": True}, "enable_prefix_caching=False, got True"),
        ({"enable_chunked_prefill": True}, "enable_chunked_prefill=False, got True"),
        ({"max_num_seqs": 2}, "max_num_seqs=1, got 2"),
        ({"enforce_eager": False}, "enforce_eager=True, got False"),
        ({"additional_config": {"mtraining": {"block": 7}}}, "block must be a power of two"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_an_engine_that_would_cut_prompts_is_refused(folder, changes, message):
    """Whoever uses vLLM's LLM without our engine."""
    import vllm

    options = {"additional_config": {"mtraining": SPARSE}, "enable_prefix_caching": False, "enforce_eager": True}
    options |= {"enable_chunked_prefill": False, "max_num_seqs": 1, "max_model_len": 512, **changes}
    with pytest.raises((ValueError, RuntimeError), match=message):
        vllm.LLM(model=str(folder), dtype="float32", disable_log_stats=True, **options)


def test_lengths_are_checked_before_the_model_is_loaded(folder, capsys):
    assert cli.main(["eval", "--model", str(folder), "--engine", "vllm", "--lengths", "4k"]) == 2
    assert "4096 tokens exceed max_position_embeddings=2048" in capsys.readouterr().err
    assert cli.main(["eval", "--model", str(folder), "--engine", "vllm", "--lengths", "1k", "--device", "cpu"]) == 2
    assert "--device is for --engine hf" in capsys.readouterr().err
