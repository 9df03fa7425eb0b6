"""The HuggingFace engine and `mtraining eval` on a tiny random Llama: greedy is greedy, losses equal the plain ones."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from tiny_model import save_llama
from transformers import AutoModelForCausalLM

from mtraining_nns import cli, digest
from mtraining_nns.cli.eval import parse_overrides
from mtraining_nns.cli.words import parse_length
from mtraining_nns.errors import UserError
from mtraining_nns.eval import huggingface
from mtraining_nns.eval.attentions import load_attention
from mtraining_nns.eval.huggingface import HuggingFaceEngine, load_tokenizer
from mtraining_nns.eval.perplexity import PerplexityConfig, position_nll
from mtraining_nns.recording import Recording

SPARSE = {"block": 64, "budget": "fixed", "k_v": 8, "k_s": 1, "sinks": 4, "local": 64, "last_q": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"), attention=SPARSE)


@pytest.fixture(scope="module")
def dense(folder):
    return HuggingFaceEngine(folder, device="cpu")


@pytest.fixture(scope="module")
def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def argmax_decode(model, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding without a cache and without generate()."""
    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


@torch.no_grad()
def full_nll(model, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="none")


def test_greedy_equals_argmax_of_the_plain_model(dense, plain):
    prompts = [tokens(100).tolist(), tokens(33).tolist()]
    assert dense.generate(prompts, 32) == [argmax_decode(plain, prompt, 32) for prompt in prompts]
    prompt = torch.tensor(prompts[:1])
    hf = plain.generate(prompt, max_new_tokens=32, do_sample=False, num_beams=1)
    assert dense.generate(prompts[:1], 32)[0] == hf[0, 100:].tolist()


@pytest.mark.parametrize("attention", ["dense", "mtraining"])
def test_prompts_that_decode_together_are_as_alone(folder, tmp_path, monkeypatch, attention):
    """Unequal lengths, one that ends at once, one that ends early; then no room for two at a time."""
    prompts = [tokens(length).tolist() for length in (300, 33, 150, 64, 299)]
    alone = HuggingFaceEngine(folder, attention=attention, device="cpu")
    whole = [alone.generate([prompt], 12)[0] for prompt in prompts]
    assert alone.generate(prompts, 12) == whole and alone.generate(prompts, 1) == [tokens[:1] for tokens in whole]
    shutil.copytree(folder, tmp_path / "ends")
    ends = [whole[1][0], whole[2][5]]
    (tmp_path / "ends" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    engine = HuggingFaceEngine(tmp_path / "ends", attention=attention, device="cpu")
    expected = [tokens[: min((tokens.index(end) + 1 for end in ends if end in tokens), default=12)] for tokens in whole]
    assert len(expected[1]) == 1 and 1 < len(expected[2]) <= 6
    assert engine.generate(prompts, 12) == expected
    monkeypatch.setattr(huggingface, "BATCH_TOKENS", 1)
    assert engine.generate(prompts, 12) == expected


def test_the_folders_generation_config_changes_nothing(tmp_path, plain):
    folder, prompt = save_llama(tmp_path), tokens(50).tolist()
    expected = argmax_decode(plain, prompt, 16)
    wild = {"do_sample": True, "temperature": 5.0, "top_k": 3, "repetition_penalty": 3.0, "no_repeat_ngram_size": 1}
    wild |= {"suppress_tokens": expected[:1], "num_beams": 4, "max_length": 51, "min_new_tokens": 3}
    (folder / "generation_config.json").write_text(json.dumps(wild))
    engine = HuggingFaceEngine(folder, device="cpu")
    assert engine.generate([prompt], 16) == [expected]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": expected[2]}))
    ended = HuggingFaceEngine(folder, device="cpu").generate([prompt], 16)[0]
    assert ended == expected[: expected.index(expected[2]) + 1]


@pytest.mark.parametrize("chunk", (1, 7, 99, 1024))
def test_nll_equals_full_logits(dense, plain, monkeypatch, chunk):
    monkeypatch.setattr(huggingface, "LOSS_CHUNK", chunk)
    ids = tokens(100)
    nll = dense.nll(ids)
    assert nll.shape == (99,) and nll.dtype == torch.float32
    torch.testing.assert_close(nll, full_nll(plain, ids), rtol=1e-5, atol=1e-5)


def test_logits_of_the_whole_sequence_never_exist(dense, monkeypatch):
    monkeypatch.setattr(huggingface, "LOSS_CHUNK", 16)
    rows = []
    hook = dense.model.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.shape[-2]))
    dense.nll(tokens(100))
    hook.remove()
    assert max(rows) == 16 and sum(rows) == 99


def test_window_perplexity_of_a_model(dense, plain):
    ids = tokens(300)
    whole = position_nll(dense, ids, PerplexityConfig(lengths=(300,)))[0]
    assert torch.equal(whole, position_nll(dense, ids, PerplexityConfig(lengths=(300,), window=300, stride=10))[0])
    windowed = position_nll(dense, ids, PerplexityConfig(lengths=(300,), window=100, stride=40))[0]
    torch.testing.assert_close(windowed[:99], whole[:99])
    torch.testing.assert_close(windowed[99:139], full_nll(plain, ids[40:140])[-40:])  # the second window's last 40


@pytest.mark.parametrize("keep_all", ({"pattern": "dense"}, {"local": 4096}, {"dense_below": 4096}))
def test_sparse_attention_that_keeps_all_equals_dense(folder, dense, keep_all):
    engine = HuggingFaceEngine(folder, attention="mtraining", attention_config=keep_all, device="cpu")
    ids = tokens(200)
    torch.testing.assert_close(engine.nll(ids), dense.nll(ids), rtol=1e-4, atol=1e-4)
    assert engine.generate([ids.tolist()], 16) == dense.generate([ids.tolist()], 16)


def test_sparse_attention_comes_from_the_folder_and_differs(folder, dense):
    engine = HuggingFaceEngine(folder, attention="mtraining", device="cpu")
    assert engine.describe()["attention_config"]["k_v"] == 8
    ids = tokens(1000)
    assert not torch.allclose(engine.nll(ids), dense.nll(ids), atol=1e-3)
    assert len(engine.generate([ids.tolist()], 4)[0]) == 4


def test_where_the_attention_comes_from(folder, tmp_path):
    assert load_attention(folder, {"k_v": 9}).k_v == 9
    bare = save_llama(tmp_path)
    with pytest.raises(UserError, match="mtraining.json does not exist.*--attention-config"):
        load_attention(bare)
    assert load_attention(bare, {"block": 64}).block == 64
    for wrong in ({"kv": 3}, {"p_v": 2.0}, {"p_v": "much"}, {"pattern": "stripes"}):
        with pytest.raises(UserError):
            load_attention(folder, wrong)
    with pytest.raises(UserError, match="changes are for a sparse attention"):
        HuggingFaceEngine(bare, attention_config={"block": 64})


@pytest.mark.parametrize("text", ["{not json", "[]", "{}", '{"attention": 3}'])
def test_a_broken_record_of_the_attention_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "mtraining.json").write_text(text)
    with pytest.raises(UserError, match="mtraining.json is no record of an attention .*export the model again"):
        load_attention(tmp_path)


def test_the_engine_never_truncates(tmp_path):
    engine = HuggingFaceEngine(save_llama(tmp_path, limit=64), device="cpu")
    assert len(engine.generate([tokens(60).tolist()], 4)[0]) == 4
    with pytest.raises(UserError, match="65 tokens exceed max_position_embeddings=64"):
        engine.generate([tokens(61).tolist()], 4)
    with pytest.raises(UserError, match="65 tokens exceed"):
        engine.nll(tokens(65))


def test_broken_folders_are_one_line(tmp_path):
    folder = save_llama(tmp_path / "model")
    for kwargs in ({"device": "tpu"}, {"attention": "sparse"}, {"dtype": "int8"}):
        with pytest.raises(UserError):
            HuggingFaceEngine(folder, **kwargs)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UserError, match="lacks 9 weights, first model.layers.2"):
        HuggingFaceEngine(folder, device="cpu")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be loaded"):
        HuggingFaceEngine(folder, device="cpu")
    with pytest.raises(UserError, match="no model folder"):
        HuggingFaceEngine(tmp_path)


def test_the_fingerprint_tells_exports_apart(tmp_path):
    folder = save_llama(tmp_path)
    before = digest.of_model(folder)
    assert before == digest.of_model(folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config + " ")
    assert before != digest.of_model(folder)


@pytest.mark.parametrize("attention", ("dense", "mtraining"))
def test_eval_from_the_command_line(folder, tmp_path, capsys, attention):
    text = tmp_path / "text.txt"
    text.write_text("The road was long. Nobody came. " * 200)
    out = tmp_path / "out"
    words = (
        f"eval --model {folder} --suite niah,perplexity --lengths 512,1k --depths 0,100 --max-new-tokens 8 --device cpu"
    )
    words += f" --attention {attention} --text {text} --window 600 --stride 300 --out {out}"
    assert cli.main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "all depths" in printed and "all positions" in printed
    results = json.loads((out / "results.json").read_text())
    assert [(cell["length"], cell["depth"]) for cell in results["niah"]["cells"]] == [
        (512, 0),
        (512, 100),
        (1024, 0),
        (1024, 100),
    ]
    assert [entry["tokens"] for entry in results["perplexity"]] == [511, 1023]
    assert len((out / "records.jsonl").read_text().splitlines()) == 4 + 2
    assert (out / "scores.csv").read_text().splitlines()[1].startswith("niah,,512,0.0,1,")
    capsys.readouterr()
    assert cli.main(words.split()) == 0  # nothing is asked again
    assert json.loads((out / "results.json").read_text()) == results and capsys.readouterr().out == printed
    manifest = results["manifest"]
    assert manifest["attention"] == attention
    assert (manifest["attention_config"] or {}).get("k_v") == (8 if attention == "mtraining" else None)
    assert manifest["tasks"]["niah"]["max_new_tokens"] == 8 and manifest["tasks"]["niah"]["seed"] == 0
    assert "{city}" in manifest["tasks"]["niah"]["template"]["needle"]
    assert manifest["generation"]["do_sample"] is False and manifest["generation"]["repetition_penalty"] == 1.0
    assert manifest["model_sha256"] == digest.of_model(folder)
    assert set(manifest["versions"]) == {"mtraining_nns", "torch", "transformers"}


@pytest.mark.parametrize(
    ("words", "message"),
    (
        ("--lengths 1k,4k", "4096 tokens exceed max_position_embeddings=2048"),
        ("--lengths 4k --suite perplexity", "4096 tokens exceed"),
        ("--lengths 4k --suite perplexity --window 1k", "needs text"),
        ("--lengths 100", "niah length 100 cannot hold the template"),
        ("--lengths many", "got 'many'"),
        ("--lengths 1k --depths 101", "0..100 percent"),
        ("--lengths 1k --suite niah,stars", "unknown suite 'stars'; --suite takes niah, ruler, infinitebench"),
        ("--lengths 1k --suite ruler --tasks vt,niah", "unknown RULER task 'niah'"),
        ("--lengths 300 --suite ruler", "ruler niah_single_1: length 300 cannot hold"),
        ("--lengths 2k --suite ruler --tasks qa_1 --squad none.json", "none.json cannot be read"),
        ("--lengths 1k --prompt chat", "no chat template; use --prompt base"),
        ("--lengths 1k --attention mtraining --attention-config p_v", "key=value"),
        ("--lengths 1k --attention-config p_v=0.5", "--attention-config is for --attention mtraining or minference or"),
        ("--lengths 1k --text missing", "does not exist"),
        ("--lengths 1k --out /dev/null/out", "results folder /dev/null/out cannot be made"),
        ("--lengths 1k --attention mtraining", "mtraining.json does not exist"),
    ),
)
def test_mistakes_end_before_the_weights_are_loaded(tmp_path, capsys, words, message):
    folder = save_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    capsys.readouterr()  # the progress bar of saving
    assert cli.main(["eval", "--model", str(folder), *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mtraining: error: ") and message in error and error.count("\n") == 1


def test_lengths_and_overrides():
    assert [parse_length(text) for text in ("4k", "1M", "1000", "512K")] == [4096, 1048576, 1000, 524288]
    assert parse_overrides(["p_v=0.9", "dense_layers=[0, 1]", "budget=fixed"]) == {
        "p_v": 0.9,
        "dense_layers": [0, 1],
        "budget": "fixed",
    }


def test_methods_of_attention_by_name(folder, dense, tmp_path, capsys):
    """Budgets that a recording counted; each method reads otherwise than the dense engine, and keeps all if told so."""
    text, budgets = tmp_path / "text.txt", tmp_path / "budgets.json"
    text.write_text("A plain sentence about nothing. " * 60)
    record = [str(folder), str(text), "--out", str(tmp_path / "index.safetensors"), "--budgets", str(budgets)]
    few = ["attention.p_v=0.2", "attention.p_s=0.2", "attention.sinks=4", "attention.local=0", "attention.block=64"]
    assert cli.main(["record", *record, "--seq-len", "1000", *few]) == 0, capsys.readouterr().err
    found = json.loads(budgets.read_text())["budgets"]
    config = dense.model.config
    assert len(found) == config.num_hidden_layers and {len(heads) for heads in found} == {config.num_attention_heads}
    assert all(1 <= columns < 1000 and 1 <= bins < 16 for heads in found for columns, bins in heads)
    ids = tokens(1000)
    methods = {
        "minference": ({"budgets": budgets}, {}, {"local": 4096}),
        "flexprefill": ({}, {"threshold": 0.3}, {"threshold": 1.0}),
    }
    for name, (given, few, all_of_them) in methods.items():
        small = {"block": 64, "sinks": 4, "local": 64}
        sparse = HuggingFaceEngine(folder, name, {**small, **few}, device="cpu", **given)
        assert not torch.allclose(sparse.nll(ids), dense.nll(ids), atol=1e-3)
        whole = HuggingFaceEngine(folder, name, {**small, **all_of_them}, device="cpu", **given)
        torch.testing.assert_close(whole.nll(ids), dense.nll(ids), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="needed by minference and no other method, got None"):
        HuggingFaceEngine(folder, "minference", device="cpu")
    whole = json.loads(budgets.read_text())
    budgets.write_text(json.dumps({**whole, "budgets": [[[1, 1]]]}))
    with pytest.raises(UserError, match="is for 1 layers, the model has 2"):
        HuggingFaceEngine(folder, "minference", budgets=budgets, device="cpu")
    lacks = {key: value for key, value in whole.items() if key != "attention"}
    for text in ({}, [], 3, {**whole, "budgets": []}, {**whole, "format": 1}, lacks, {**whole, "attention": {}}):
        budgets.write_text(json.dumps(text))
        with pytest.raises(UserError, match="holds no budgets of format 2 with their attention"):
            HuggingFaceEngine(folder, "minference", budgets=budgets, device="cpu")


def test_recorded_budgets_keep_what_was_recorded(folder, tmp_path, capsys):
    """On the text of the recording, with sinks, band and last queries that are not the defaults; a change is taken."""
    text, out, budgets = tmp_path / "text.txt", tmp_path / "index.safetensors", tmp_path / "budgets.json"
    text.write_text("".join(f"{number} is no other number than {number * number}. " for number in range(60)))
    few = [f"attention.{k}={v}" for k, v in {"block": 32, "sinks": 3, "local": 40, "last_q": 16, "cap": 100}.items()]
    few += ["attention.p_v=0.5", "attention.p_s=0.5"]
    record = ["record", folder, text, "--out", out, "--budgets", budgets, "--seq-len", "1000", *few]
    assert cli.main([*map(str, record)]) == 0, capsys.readouterr().err
    recorded = [layer["density"] for layer in Recording.load(out).about["layers"]]
    assert out.stat().st_mode == budgets.stat().st_mode, "safetensors leaves its files to their owner alone"
    ids = load_tokenizer(folder).stream((text.read_text(),))[:1000]
    engine = HuggingFaceEngine(folder, "minference", budgets=budgets, device="cpu")
    engine.nll(ids)
    assert engine.densities == pytest.approx([sum(recorded) / 2], abs=1e-6) and max(recorded) < 0.9
    config = engine.attention_config
    assert (config.block, config.sinks, config.local, config.last_q, config.cap) == (32, 3, 40, 16, 100)
    more = HuggingFaceEngine(folder, "minference", {"local": 400}, budgets, device="cpu")
    more.nll(ids)
    assert more.densities[0] > engine.densities[0] + 0.1
    with pytest.raises(UserError, match="attention='minference' sets head_budgets itself"):
        HuggingFaceEngine(folder, "minference", {"head_budgets": []}, budgets, device="cpu")
    assert cli.main([*map(str, record), "attention.dense_below=2000"]) == 2
    assert "--budgets needs vertical_slash in every layer" in capsys.readouterr().err
    record[6] = str(out.parent / "." / out.name)
    assert cli.main([*map(str, record)]) == 2
    assert "--out and --budgets are one file" in capsys.readouterr().err
    assert Recording.load(out).about["layers"]
