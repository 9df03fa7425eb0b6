"""An exported folder: what plain transformers loads is the model that was trained."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from distributed import run_workers
from tiny import MODEL, write_recipe
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from mtraining_nns import nnscaler_states
from mtraining_nns.data.dataset import PackedDataset
from mtraining_nns.errors import UserError
from mtraining_nns.export import export
from mtraining_nns.model import greedy_generation
from mtraining_nns.ops.config import AttentionConfig
from mtraining_nns.recipe import Recipe

LENGTH = 384  # one and a half buckets of positions
LONG = {"rope_type": "yarn", "rope_theta": 1e6, "original_max_position_embeddings": 64}


def run_engine(rank, world_size, path, overrides):
    from mtraining_nns import engines

    return engines.train(Recipe.load(path, overrides).resolve(world_size))


def trained(folder, tied: bool, rope: dict):
    """(export folder, summary) of two steps on two ranks."""
    init = json.dumps({**MODEL, "tie_word_embeddings": tied})
    path = write_recipe(folder, f"model.init={init}", f"model.rope={json.dumps(rope)}")
    overrides = ["train.steps=2", f"train.seq_len={LENGTH}", f"data.eval_path={folder / 'data'}"]
    return folder / "run" / "hf", run_workers(run_engine, 2, path, overrides)[0]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def run(request, tmp_path_factory):
    rope = LONG if request.param else {"rope_theta": 2.5e7}
    return *trained(tmp_path_factory.mktemp("export"), request.param, rope), request.param, rope


def test_strict_load_gives_the_trainers_loss(run):
    folder, summary, tied, _ = run
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    dataset = PackedDataset(folder.parents[1] / "data", LENGTH)
    ids = torch.stack([dataset[i] for i in range(len(dataset))])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    assert losses.mean().item() == pytest.approx(summary["eval/loss_dense"], rel=1e-5)
    by_position = {tag: value for tag, value in summary.items() if tag.startswith("eval_by_position/dense")}
    assert by_position == {
        "eval_by_position/dense_from_0000001": pytest.approx(losses[:, :255].mean().item(), rel=1e-5),
        "eval_by_position/dense_from_0000256": pytest.approx(losses[:, 255:].mean().item(), rel=1e-5),
    }
    assert summary["eval_by_position/sparse_from_0000256"] != by_position["eval_by_position/dense_from_0000256"]


def test_whoever_reads_one_file_reads_all(run):
    """safetensors leaves its own to their owner alone."""
    folder = run[0]
    assert {file.stat().st_mode for file in folder.iterdir()} == {(folder / "config.json").stat().st_mode}


def test_config_means_the_same_to_every_transformers(run):
    folder, _, _, rope = run
    fields = json.loads((folder / "config.json").read_text())
    assert fields["rope_theta"] == rope["rope_theta"] == fields["rope_parameters"]["rope_theta"]
    if rope is LONG:
        assert fields["rope_scaling"]["rope_type"] == "yarn" and fields["rope_scaling"]["factor"] == LENGTH / 64
    else:
        assert fields["rope_scaling"] is None
    assert fields["max_position_embeddings"] == LENGTH and fields["architectures"] == ["LlamaForCausalLM"]
    assert fields["eos_token_id"] == 0 and fields["bos_token_id"] is None
    config = AutoConfig.from_pretrained(folder)
    both = hasattr(config, "standardize_rope_params")  # version 5 reads either spelling, version 4 the old one
    for dropped in ["rope_parameters", "rope_theta"] if both else ["rope_parameters"]:
        spelled = {key: value for key, value in fields.items() if key != dropped}
        again = type(config)(**spelled)
        tables = [AutoModelForCausalLM.from_config(c).model.rotary_emb for c in (config, again)]
        assert torch.equal(tables[0].inv_freq, tables[1].inv_freq)
        assert tables[0].attention_scaling == tables[1].attention_scaling


def test_generation_is_greedy_whatever_the_base_model_says(run, tmp_path):
    config = GenerationConfig.from_pretrained(run[0])
    assert config.do_sample is False and config.repetition_penalty == 1.0 and config.eos_token_id == 0
    base = {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.05, "eos_token_id": [7, 8], "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(base))
    found = greedy_generation(AutoConfig.from_pretrained(run[0]), str(tmp_path))
    assert found == {"eos_token_id": [7, 8], "do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}


def test_attention_of_training_is_written(run):
    fields = json.loads((run[0] / "mtraining.json").read_text())
    recipe = Recipe.load(str(run[0].parents[1] / "recipe.yaml")).resolve(2)
    assert fields["format"] == 1 and fields["trained_length"] == LENGTH
    assert AttentionConfig(**fields["attention"]) == recipe.attention


def test_export_of_a_checkpoint_or_of_the_latest_one_and_nothing_else(run, tmp_path):
    source = run[0].parent
    (source / "tokenizer").mkdir(exist_ok=True)
    (source / "tokenizer" / "tokenizer.json").write_text("{}")
    export(str(source), str(tmp_path / "a"))
    export(str(source / "step-000002"), str(tmp_path / "b"))
    export(str(source), str(tmp_path / "b"))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (run[0], tmp_path / "a", tmp_path / "b")]
    assert weights[0] == weights[1] == weights[2]
    assert (tmp_path / "b" / "tokenizer.json").exists()
    shutil.rmtree(source / "tokenizer")
    for wrong in (str(tmp_path), str(tmp_path / "none")):
        with pytest.raises(UserError, match="is no checkpoint|holds no complete checkpoint"):
            export(wrong, str(tmp_path / "c"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="would be replaced"):
        export(str(source), str(tmp_path / "mine"))


def test_bf16_export_rounds_weights_and_keeps_the_rope_tables(run, tmp_path):
    source = shutil.copytree(run[0].parent, tmp_path / "run")
    recipe = source / "step-000002" / "recipe.yaml"
    text = recipe.read_text()
    recipe.write_text(text.replace("dtype: float32", "dtype: bfloat16"))
    export_size = json.loads((source / "step-000002" / "manifest.json").read_text())
    export_size["files"]["recipe.yaml"] = recipe.stat().st_size
    (source / "step-000002" / "manifest.json").write_text(json.dumps(export_size))
    export(str(source), str(tmp_path / "hf"))
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    exact = AutoModelForCausalLM.from_pretrained(run[0])
    assert rounded.dtype == torch.bfloat16
    pairs = zip(rounded.parameters(), exact.parameters())
    assert all(torch.equal(x, ref.to(torch.bfloat16)) for x, ref in pairs)


def test_an_export_never_replaces_a_file(run, tmp_path):
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(UserError, match="mine is a file, expected a folder"):
        export(str(run[0].parent), str(tmp_path / "mine"))
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_checkpoint_of_nnscaler_is_read_by_nnscaler(tmp_path, monkeypatch):
    step = tmp_path / "run" / "nnscaler" / "states" / "0000-0004"
    step.mkdir(parents=True)
    texts = {
        "recipe.yaml": Path(write_recipe(tmp_path)).read_text(),
        "config.json": json.dumps({"model_type": "llama"}),
    }
    nnscaler_states.mark(str(step.parent), 4, texts)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="0000-0004 is a checkpoint of nnScaler, which reads it: nnScaler is not imp"):
        export(str(tmp_path / "run"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_of_a_folder_of_both_engines_the_newest_is_taken(tmp_path):
    folder, _ = trained(tmp_path, True, {"rope_theta": 1e4})
    states = tmp_path / "run" / "nnscaler" / "states"
    for step in ("0000-0001", "0000-0002"):
        (states / step).mkdir(parents=True)
        nnscaler_states.mark(str(states), int(step[-1]), {"recipe.yaml": Path(write_recipe(tmp_path)).read_text()})
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
