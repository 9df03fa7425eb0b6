"""`mtraining balance` and `mtraining record` as a user meets them: a round trip, files from elsewhere, mistakes."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_balance import PAPER
from tiny_model import save_llama

from mtraining_nns import cli
from mtraining_nns.balance import Inputs, compare
from mtraining_nns.errors import UserError
from mtraining_nns.ops.index import RowIndex
from mtraining_nns.ops.ring import Ring
from mtraining_nns.recording import Recording


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(file, what the verb printed); a tiny Llama on a text of its own."""
    folder = tmp_path_factory.mktemp("recorded")
    save_llama(folder / "model", limit=128)
    (folder / "text.txt").write_text("".join(f"{n * n} is the square of {n}. " for n in range(40)))
    return folder


SETTINGS = [f"attention.{word}" for word in ("block=16", "local=16", "sinks=4", "last_q=16", "p_v=0.5", "p_s=0.5")]


@pytest.fixture(scope="module")
def file(recorded):
    out = recorded / "index.safetensors"
    words = [recorded / "model", recorded / "text.txt", "--out", out, "--seq-len", "200", "--rope-theta", "1e5"]
    assert cli.main(["record", *map(str, words), "--rows", "8", *SETTINGS]) == 0
    return out


def test_record_and_balance_round_trip(file, tmp_path, capsys):
    recording = Recording.load(file)
    assert list(recording.indices) == [0, 1] and recording.seq_len == 200 and recording.block == 16
    about = recording.about
    assert about["rope"]["rope_theta"] == 1e5 and about["attention"]["p_v"] == 0.5
    for (layer, index), found in zip(recording.indices.items(), about["layers"]):
        assert found["layer"] == layer and 0 < index.density(200).item() == found["density"] < 1
        assert all(0 < found[name] <= 1 for name in ("weights", "gradients", "inherited"))
    words = ["--world", "2,4", "--inner", "2", "--layout", "zigzag,striped", "--indices", str(file)]
    assert cli.main(["balance", *words, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "recorded" in printed and "generated" not in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["indices"]["kind"] == "recorded" and results["indices"]["layers"] == about["layers"]
    cases = compare(
        Inputs(indices=list(recording.indices.values()), seq_len=200), layouts=("striped",), worlds=(4,), inner=2
    )
    mine = [case for case in results["cases"] if (case["layout"], case["world"]) == ("striped", 4)]
    assert [case["schedule"] for case in mine] == ["flat", "2 x 2"]
    for case, expected in zip(mine, cases):
        assert tuple(case[name] for name in ("worker", "step", "critical")) == expected.measures
        assert case["density"] == pytest.approx(sum(x["density"] for x in about["layers"]) / 2)


ROWS = {
    "xattention": ["attention.pattern=xattention", "attention.stride=4", "attention.threshold=0.6"],
    "moba": ["attention.pattern=moba", "attention.chunk=32", "attention.top_k=2"],
}


@pytest.fixture(scope="module", params=ROWS)
def file_of_rows(recorded, request):
    out = recorded / f"{request.param}.safetensors"
    words = [recorded / "model", recorded / "text.txt", "--out", out, "--seq-len", "200", "--rope-theta", "1e5"]
    settings = ["--rows", "8", "attention.block=16", "attention.dense_layers=[0]", *ROWS[request.param]]
    assert cli.main(["record", *map(str, words), *settings]) == 0
    return out


def test_patterns_that_choose_for_every_row_are_recorded(file_of_rows, tmp_path, capsys):
    """Two layers, the first of them dense."""
    recording = Recording.load(file_of_rows)
    dense, index = recording.indices.values()
    found = recording.about["layers"]
    assert found[0]["density"] == dense.density(200).item() == 1 and isinstance(index, RowIndex)
    assert 0.1 < index.density(200).item() == found[1]["density"] < 0.9
    words = ["--world", "2,4", "--layout", "zigzag,striped", "--indices", str(file_of_rows), "--out", str(tmp_path)]
    assert cli.main(["balance", *words]) == 0
    for case in json.loads((tmp_path / "results.json").read_text())["cases"]:
        assert case["density"] == pytest.approx((1 + found[1]["density"]) / 2)
    recording.save(tmp_path / "again.safetensors")
    again = load_file(tmp_path / "again.safetensors")
    assert all(torch.equal(x, again[name]) for name, x in load_file(file_of_rows).items())


@pytest.mark.parametrize("part, change", [("span", 1), ("mask", 0), ("row_bits", 0)])
def test_damaged_rows_are_refused(file_of_rows, part, change, tmp_path, capsys):
    from safetensors import safe_open

    with safe_open(file_of_rows, "pt") as opened:
        metadata = opened.metadata()
    tensors, name = load_file(file_of_rows), f"layer_01.{part}"
    if name not in tensors:
        pytest.skip("this pattern chooses whole blocks")
    tensors[name] = tensors[name] + 1 if change else tensors[name][:, :, 1:].contiguous()
    save_file(tensors, tmp_path / "other.safetensors", metadata)
    error = fails(capsys, "balance", "--world", "2", "--indices", tmp_path / "other.safetensors")
    assert f"{name} must be" in error and "mtraining record" in error


def test_recorded_indices_are_those_of_the_operator(recorded, file):
    """The same model and text, run here without the recording."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mtraining_nns import hf, recipe_yaml
    from mtraining_nns.ops.attention import Operator
    from mtraining_nns.ops.config import AttentionConfig
    from mtraining_nns.rope import rope_of, with_rope

    tree = {"attention": {}}
    for word in SETTINGS:
        recipe_yaml.override(tree, word)
    operator = Operator(AttentionConfig(**tree["attention"]), Ring.single(), "cpu")
    hf.register()
    folder = recorded / "model"
    config = AutoModelForCausalLM.from_pretrained(folder).config
    config = with_rope(config, rope_of(config) | {"rope_theta": 1e5}, base_length=128, trained_length=200)
    lm = AutoModelForCausalLM.from_pretrained(folder, config=config, attn_implementation="mtraining")
    hf.attach(lm, operator)
    ids = AutoTokenizer.from_pretrained(folder)((recorded / "text.txt").read_text(), return_tensors="pt").input_ids
    with torch.no_grad():
        lm(ids[:, :200])
    for layer, index in Recording.load(file).indices.items():
        expected = operator.last[layer][0]
        assert torch.equal(index.hit, expected.hit)
        assert torch.equal(index.columns.position, expected.columns.position)
        assert torch.equal(index.columns.count, expected.columns.count)


def fails(capsys, *words: str) -> str:
    """The one line that a mistake gives."""
    assert cli.main([str(word) for word in words]) == UserError.exit_code
    error = capsys.readouterr().err
    assert error.startswith("mtraining: error: ") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--world", "64"], ["--world 64", "a part of", "got 1000", "fewer ranks"]),
        (["--world", "64", "--layout", "striped"], ["a stripe of 16 tokens", "1024", "got 1000"]),
        (["--world", "32", "--layout", "zigzag"], ["two chunks of at least 16 tokens", "1024", "got 1000"]),
        (["--world", "8", "--inner", "3"], ["--inner 3 must divide", "got 8"]),
        (["--world", "8", "--inner", "0"], ["--inner 0 must divide"]),
        (["--world", "8", "--layout", "spiral"], ["--layout", "'spiral'", "striped"]),
        (["--world", "0"], ["--world takes whole numbers of at least 1", "'0'"]),
        (["--world", "eight"], ["--world takes whole numbers", "'eight'"]),
        (["--world", ","], ["--world is empty"]),
        (["--world", "4", "--granularity", "24"], ["granularity=24", "block=16"]),
        (["--world", "4", "--pattern", "moba"], ["--pattern", "'moba'", "dense"]),
        (["--world", "4", "--heads", "0"], ["--heads must be at least 1, got 0"]),
        (["--world", "4", "--columns", "999"], ["--columns 999", "--seq-len 1000"]),
        (["--world", "4", "--local", "990"], ["--local 990", "--band-width 64", "--bands 0"]),
        (["--world", "4", "--seq-len", "long"], ["a length is a number", "'long'"]),
        (["--world", "4", "--comp-ms", "1"], ["needs --intra-ms", "got only --comp-ms"]),
        (["--world", "4", "--comp-ms", "-1"], ["--comp-ms must be a time", "-1"]),
        (["--world", "2,4", "--comp-ms", "1", "--intra-ms", "1", "--inter-ms", "1"], ["hold for one world", "2,4"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_request_is_one_line(words, expected, capsys):
    shape = {"--seq-len": "1000", "--heads": "2", "--block": "16", "--columns": "50", "--local": "32"}
    given = [word for name, value in shape.items() if name not in words for word in (name, value)]
    error = fails(capsys, "balance", *words, *given)
    assert all(word in error for word in expected), error


def test_indices_bring_their_own_numbers(file, capsys):
    assert "--heads is for generated indices" in fails(
        capsys, "balance", "--world", "2", "--indices", file, "--heads", 4
    )


def damage(name: str):
    """One wrong thing in a recording's tensors or metadata."""

    def wrong_position(tensors, metadata):
        tensors["layer_01.position"][0, 0, 0] = 200

    def wrong_type(tensors, metadata):
        tensors["layer_00.hit"] = tensors["layer_00.hit"].float()

    def wrong_length(tensors, metadata):
        metadata["seq_len"] = "100000"

    changes = {
        "lacks 'layer_01.hit'": lambda tensors, metadata: tensors.pop("layer_01.hit"),
        "lacks 'seq_len'": lambda tensors, metadata: metadata.pop("seq_len"),
        "got format 9": lambda tensors, metadata: metadata.update(format="9"),
        "got format none": lambda tensors, metadata: metadata.pop("format"),
        "layer_01.position must hold count columns from 0 to 199": wrong_position,
        "layer_00.hit must be bool": wrong_type,
        "at least 6250": wrong_length,
        "is damaged": lambda tensors, metadata: metadata.update(about="{"),
    }
    return changes[name]


@pytest.mark.parametrize(
    "complaint",
    [
        "lacks 'layer_01.hit'",
        "lacks 'seq_len'",
        "got format 9",
        "got format none",
        "layer_01.position must hold count columns from 0 to 199",
        "layer_00.hit must be bool",
        "at least 6250",
        "is damaged",
    ],
)
def test_a_damaged_recording_is_refused(file, complaint, tmp_path, capsys):
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    damage(complaint)(tensors, metadata)
    save_file(tensors, tmp_path / "other.safetensors", metadata)
    error = fails(capsys, "balance", "--world", "2", "--indices", tmp_path / "other.safetensors")
    assert complaint in error and "mtraining record" in error


def test_what_is_no_recording_is_refused(file, tmp_path, capsys):
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:100])
    for name in ("cut.safetensors", "missing.safetensors", "."):
        assert "no readable safetensors file" in fails(capsys, "balance", "--world", "2", "--indices", tmp_path / name)


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--seq-len", "200"], ["--seq-len 200", "128", "--rope-theta"]),
        (["--seq-len", "2"], ["--seq-len must be at least 4, got 2"]),
        (["--seq-len", "9k", "--rope-theta", "1e5"], ["tokens, expected 9216", "longer text"]),
        (["--rope-theta", "-1"], ["rope_theta must be a positive number"]),
        (["--rows", "0"], ["--rows must be at least 1"]),
        (["attention.p_v=2"], ["attention.p_v must lie in (0, 1], got 2"]),
        (["attention.pattern=longformer"], ["attention.pattern", "longformer", "xattention"]),
        (["attention.dense_layers=[9]"], ["dense_layers names layer 9", "layers 0 to 1"]),
        (["attention.pv=0.9"], ["attention.pv", "p_v"]),
        (["train.steps=2"], ["record takes attention.key=value", "train.steps=2"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_recording_is_one_line(recorded, words, expected, capsys, tmp_path):
    places = [recorded / "model", recorded / "text.txt", "--out", tmp_path / "index.safetensors"]
    error = fails(capsys, "record", *places, *words)
    assert all(word in error for word in expected), error
    assert not (tmp_path / "index.safetensors").exists()


def test_record_needs_a_model_a_text_and_a_place(recorded, capsys, tmp_path):
    model, text, out = recorded / "model", recorded / "text.txt", tmp_path / "index.safetensors"
    assert "no folder and no .gguf file" in fails(capsys, "record", "nowhere", text, "--out", out)
    assert "there is no file nowhere.gguf" in fails(capsys, "record", "nowhere.gguf", text, "--out", out)
    assert "nowhere.txt" in fails(capsys, "record", model, tmp_path / "nowhere.txt", "--out", out)
    assert "does not exist" in fails(capsys, "record", model, text, "--out", tmp_path / "no" / "index.safetensors")


GENERATED = ["--seq-len", "1000", "--heads", "2", "--block", "16", "--columns", "50", "--local", "32"]


def test_a_generated_index_says_so_and_draws_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words = ["--world", "2,4", "--inner", "2", "--out", str(tmp_path), *GENERATED]
    assert cli.main(["balance", *words]) == 0
    printed = capsys.readouterr().out
    assert "generated indices" in printed and "seed 0" in printed and "recorded" not in printed
    for name in ("work_by_worker.png", "work_by_step.png", "layout_maps.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_numbers_still_come(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["balance", "--world", "2", "--out", str(tmp_path), *GENERATED]) == 0
    captured = capsys.readouterr()
    assert "striped" in captured.out and "mtraining-nns[plots]" in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_the_verb_predicts_the_papers_times(capsys):
    """Dense zigzag is perfectly even, so its times are the paper's."""
    times = [word for name, value in vars(PAPER).items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = ["--world", "32", "--inner", "8", "--pattern", "dense", "--layout", "zigzag", "--seq-len", "64k"]
    assert cli.main(["balance", *words, *times]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "zigzag" in line]
    assert [row[-1] for row in rows] == ["34.10", "19.53"]
