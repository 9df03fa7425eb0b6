"""Recipes: keys, types, ranges, overrides, and what depends on the launch; every mistake is one line."""

import json
from pathlib import Path

import pytest

from mtraining_nns import engines
from mtraining_nns.errors import UserError
from mtraining_nns.recipe import Recipe

MINIMAL = """
model: {init: {model_type: llama}}
data: {path: DATA}
train: {steps: 2, seq_len: 256, lr: 1e-3}
attention: {block: 64}
checkpoint: {dir: out}
"""


@pytest.fixture
def recipe(tmp_path):
    """A function that loads the minimal recipe, its data prepared, with overrides."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "manifest.json").write_text(json.dumps({"format": 1, "dtype": "uint16", "vocab_size": 300, "tokens": 512}))
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL.replace("DATA", str(data)))
    return lambda *overrides: Recipe.load(str(path), overrides)


def test_defaults_types_and_overrides(recipe):
    overrides = [
        "train.lr=2e-4",
        "train.betas=[0.8, 0.9]",
        "model.init.rope_theta=1e6",
        "attention.dense_layers=[0, 2]",
    ]
    loaded = recipe(*overrides)
    assert loaded.train.lr == 2e-4 and loaded.train.betas == (0.8, 0.9) and loaded.train.clip == 1.0
    assert loaded.model.init == {"model_type": "llama", "rope_theta": 1e6}
    assert loaded.attention.dense_layers == (0, 2) and loaded.parallel.cp is None


def test_resolve_fills_what_the_launch_decides(recipe):
    resolved = recipe("parallel.dp=2").resolve(world=4)
    assert (resolved.parallel.cp, resolved.attention.granularity) == (2, 64)
    assert (resolved.log.dir, resolved.export.dir) == ("out/tensorboard", "out/hf")
    assert resolved.model.init["vocab_size"] == 300
    assert resolved.resolve(world=4) == resolved


def test_yaml_round_trip(recipe, tmp_path):
    resolved = recipe("attention.dense_layers=[1]", "train.eps=1e-8").resolve(world=2)
    again = tmp_path / "again.yaml"
    again.write_text(resolved.to_yaml())
    assert Recipe.load(str(again)) == resolved


def test_the_demo_recipe_loads_and_splits_in_many_stripes():
    demo = Recipe.load("recipes/demo.yaml")
    assert demo.train.seq_len // (demo.parallel.cp * demo.attention.stripe) >= 2


def test_inputs_are_offloaded_where_layers_are_recomputed():
    with pytest.raises(UserError, match="offload_inputs=true is for train.recompute=true, got false"):
        Recipe.load("recipes/demo.yaml", ["train.recompute=false", "train.offload_inputs=true"])


# override, words that the one line must hold: the key, what was got, what to do
MISTAKES = [
    ("train.lr=.inf", ["train.lr", "finite", "inf"]),
    ("train.weight_decay=.nan", ["train.weight_decay", "finite", "nan"]),
    ("train.sequence_len=4", ["train.sequence_len", "did you mean", "seq_len"]),
    ("trian.steps=4", ["trian", "did you mean train"]),
    ("train.steps=many", ["train.steps", "int", "'many'"]),
    ("train.steps=2.5", ["train.steps", "int", "2.5"]),
    ("train.steps=true", ["train.steps", "int", "True"]),
    ("train.steps=0", ["train.steps", "at least 1", "0"]),
    ("train.lr=nan", ["train.lr"]),
    ("train.lr=.nan", ["train.lr"]),
    ("train.betas=[0.9]", ["train.betas", "2 float"]),
    ("train.recompute=1", ["train.recompute", "bool"]),
    ("train.precision=fp16", ["train.precision", "bf16, fp32", "fp16"]),
    ("train=5", ["train", "section"]),
    ("attention.stride=48", ["attention.stride", "block=64", "stride=48"]),
    ("attention.pattern=spiral", ["attention.pattern", "spiral", "vertical_slash"]),
    ("attention.backend=fast", ["attention.backend", "cute, cuda", "fast"]),
    ("attention.granularity=96", ["granularity=96", "block=64"]),
    ("attention.dense_layers=[a]", ["attention.dense_layers", "int"]),
    ("parallel.ring=star", ["parallel.ring", "flat, hierarchical", "star"]),
    ("parallel.inner=0", ["parallel.inner", "at least 1", "0"]),
    ("parallel.zero=4", ["parallel.zero", "2, 3"]),
    ("model.path=some/model", ["exactly one", "model.path"]),
    ("model.init=null", ["exactly one", "model.init"]),
    ("model.init={hidden_size: 8}", ["model_type"]),
    ("data.path=null", ["data.path", "data.mix"]),
    ("data.mix={a: 1}", ["exactly one", "data.path", "data.mix"]),
    ("steps=4", ["section.key=value"]),
    ("train.steps", ["section.key=value"]),
    ("train.steps.more=1", ["steps", "no section"]),
    ("train.steps=[1", ["not YAML"]),
    ("train.lr=2020-13-45", ["not YAML", "month"]),
]


@pytest.mark.parametrize("override, words", MISTAKES, ids=[override for override, _ in MISTAKES])
def test_a_mistake_is_one_line(recipe, override, words):
    with pytest.raises(UserError) as caught:
        recipe(override)
    line = str(caught.value)
    assert "\n" not in line and all(word in line for word in words), line


@pytest.mark.parametrize(
    "mix, words",
    [
        ("{}", ["data.mix", "no folder"]),
        ("{a: 0}", ["data.mix.a", "positive", "0"]),
        ("{a: .inf}", ["data.mix.a", "positive", "inf"]),
        ("{a: lots}", ["data.mix", "a mapping of str to float", "lots"]),
        ("[a, b]", ["data.mix", "a mapping of str to float"]),
    ],
)
def test_a_mix_is_folders_with_weights(recipe, mix, words):
    with pytest.raises(UserError) as caught:
        recipe("data.path=null", f"data.mix={mix}")
    assert all(word in str(caught.value) for word in words), caught.value


# overrides, processes, words
LAUNCHES = [
    (["parallel.inner=3"], 4, ["parallel.inner=3", "parallel.cp=4"]),
    (["parallel.inner=2", "parallel.ring=flat"], 4, ["parallel.inner=2", "parallel.ring=flat"]),
    (["parallel.cp=2"], 4, ["parallel.cp=2", "needs 2 processes", "launched with 4"]),
    (["parallel.dp=3"], 4, ["parallel.dp=3", "divide the 4"]),
    (["train.seq_len=255"], 4, ["striped", "train.seq_len must be at least 256", "got 255"]),
    (["train.seq_len=500", "attention.granularity=128"], 4, ["a stripe of 128 tokens", "at least 512"]),
    (["train.seq_len=500", "attention.layout=zigzag"], 4, ["zigzag", "at least 512", "got 500"]),
    (["train.seq_len=257", "attention.layout=contiguous"], 4, ["contiguous", "got 257"]),
    (["data.path=nowhere"], 1, ["data.path", "nowhere", "mtraining prepare"]),
    (["data.eval_path=nowhere"], 1, ["data.eval_path", "nowhere", "mtraining prepare"]),
    (["data.path=null", "data.mix.nowhere=1"], 1, ["data.mix.nowhere", "mtraining prepare"]),
    (["train.seq_len=1024"], 1, ["data.path", "512 tokens", "1024"]),
    (["log.eval_every=5"], 1, ["log.eval_every=5", "data.eval_path"]),
    (["checkpoint.resume=nowhere"], 1, ["checkpoint.resume=nowhere"]),
    (["model.init=null", "model.path=./nowhere"], 1, ["model.path=./nowhere", "hf download"]),
    (["model.init.vocab_size=200"], 1, ["vocab_size=200", "300"]),
]


@pytest.mark.parametrize("overrides, world, words", LAUNCHES, ids=[" ".join(case[0]) for case in LAUNCHES])
def test_a_launch_that_does_not_fit_is_one_line(recipe, overrides, world, words):
    loaded = recipe(*overrides)
    with pytest.raises(UserError) as caught:
        loaded.resolve(world)
    line = str(caught.value)
    assert "\n" not in line and all(word in line for word in words), line


def test_a_mix_is_overridden_folder_by_folder(recipe):
    """Also a folder whose name has dots, once the recipe has it."""
    mixed = [
        "data.path=null",
        "data.mix={data/v1.5/books: 1, code: 2}",
        "data.mix.data/v1.5/books=0.5",
        "data.mix.code=3",
    ]
    loaded = recipe(*mixed, "data.mix.web=1")
    assert loaded.data.weights == {"data/v1.5/books": 0.5, "code": 3.0, "web": 1.0}
    assert recipe().data.weights == {recipe().data.path: 1.0}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"vocab_size": 400}, ["vocab_size 300", "400"]),
        ({"eos_id": 2}, ["eos_id 0", "2"]),
        ({"tokenizer": {"sha256": "f00"}}, ["tokenizer c0de", "f00"]),
        ({"tokens": 100}, ["data.mix.", "100 tokens", "256"]),
        ({"packing": {}, "seq_len": 512}, ["packed for sequences of 512", "--seq-len 256"]),
    ],
)
def test_folders_of_a_mix_fit_together(tmp_path, recipe, changes, words):
    folders = [tmp_path / "one", tmp_path / "other"]
    made = {"format": 1, "dtype": "uint16", "vocab_size": 300, "tokens": 512, "eos_id": 0}
    for folder, manifest in zip(folders, (made, made | changes)):
        folder.mkdir()
        manifest = {"tokenizer": {"sha256": "c0de", "source": str(folder)}} | manifest
        (folder / "manifest.json").write_text(json.dumps(manifest))
    recipe("data.path=null", f"data.mix={{{folders[0]}: 1}}").resolve(1)
    with pytest.raises(UserError) as caught:
        recipe("data.path=null", f"data.mix={{{folders[0]}: 1, {folders[1]}: 1}}").resolve(1)
    assert all(word in str(caught.value) for word in words), caught.value


def test_one_folder_is_not_mixed_with_itself(tmp_path, recipe):
    with pytest.raises(UserError, match="one folder"):
        recipe("data.path=null", f"data.mix={{{tmp_path}/data: 1, {tmp_path}/./data: 1}}").resolve(1)


@pytest.mark.parametrize(
    "text, words",
    [
        ("train: [", ["not valid YAML"]),
        ("- a\n- b\n", ["must hold sections", "list"]),
        ("train: {steps: 1, steps: 2}", ["given twice", "steps"]),
        ("train: {lr: 2020-13-45}", ["not valid YAML", "month"]),
        ("{model: {path: x}, data: {path: y}, train: 0}", ["train", "section", "0"]),
        ("model: {path: x}", ["data.path", "data.mix"]),
    ],
)
def test_a_broken_file_is_one_line(tmp_path, text, words):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        Recipe.load(str(path))
    line = str(caught.value)
    assert "\n" not in line and all(word in line for word in words), line


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot read the recipe .*nowhere.yaml"):
        Recipe.load(str(tmp_path / "nowhere.yaml"))


def test_a_run_folder_that_cannot_be_made_is_a_mistake(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="checkpoint.dir=.*run cannot be created: Not a directory"):
        recipe(f"checkpoint.dir={tmp_path / 'file' / 'run'}").make_run_folder()


@pytest.mark.parametrize(
    ("found", "version", "message"),
    [
        (False, "0.9", "nnScaler is not importable; https://github.com/msrasys/nnscaler says how"),
        (True, "0.8", "proven with nnScaler 0.9, got 0.8"),
        (True, "0.9", ""),
    ],
)
def test_the_engine_needs_its_nnscaler(recipe, tmp_path, monkeypatch, found, version, message):
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: object() if found else None)
    monkeypatch.setattr(engines.importlib.metadata, "version", lambda name: version)
    asked = {
        name: recipe(f"parallel.engine={name}", f"checkpoint.dir={tmp_path}") for name in ("torch", "auto", "nnscaler")
    }
    assert engines.choose(asked["torch"]) == ("torch", "as the recipe says")
    if message:
        assert engines.choose(asked["auto"])[0] == "torch" and message in engines.choose(asked["auto"])[1]
        with pytest.raises(UserError, match=message):
            engines.choose(asked["nnscaler"])
    else:
        assert engines.choose(asked["auto"]) == ("nnscaler", "nnScaler is importable")
        assert engines.choose(asked["nnscaler"]) == ("nnscaler", "as the recipe says")


@pytest.mark.parametrize("path", sorted(Path("recipes").glob("*_*.yaml")), ids=str)
def test_the_recipes_load_and_the_paper_s_have_its_tokens(path):
    loaded = Recipe.load(str(path))
    tokens = {"qwen2.5_3b_512k": 30 * 64 * 524288, "llama3.1_8b_512k": 60 * 64 * 524288}
    if path.stem in tokens:
        train = loaded.train
        assert (train.seq_len, train.accumulation, loaded.parallel.cp, loaded.parallel.zero) == (524288, 64, 32, 2)
        assert train.steps * loaded.batch * train.seq_len == tokens[path.stem]
        assert loaded.model.rope["rope_theta"] > 1e7 and train.precision == "bf16" and train.recompute
