"""Preparing data: every document is kept or named, control tokens stay text, and a killed run blocks nothing."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mtraining_nns.cli import prepare as verb
from mtraining_nns.data import store, tokenise, tokenizer
from mtraining_nns.data.atomic import new_folder
from mtraining_nns.data.dataset import PackedDataset
from mtraining_nns.data.prepare import PrepareConfig, prepare
from mtraining_nns.data.records import SkipLog
from mtraining_nns.data.sources import Sources
from mtraining_nns.errors import UserError

EOS = tokenizer.BPE_EOS
WORDS = [
    "stripe",
    "ring",
    "block",
    "naïve",
    "ключ",
    "漢字",
    "def f(x):",
    "\treturn x + 1\n",
    "\r\n",
    "e = 2.71",
    "\x00",
]
QUOTES_CONTROL = f"a file that quotes {EOS} and <|fim_prefix|> and <think>"


def text(seed: int, words: int = 200) -> str:
    return " ".join(np.random.RandomState(seed).choice(WORDS, words))


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    """A small byte-level BPE with one control token that is marked special and one that is not."""
    folder = tmp_path_factory.mktemp("tokenizer")
    trained = tokenizer.train_bpe((text(seed) for seed in range(20)), 400)
    trained.add_tokens(["<|fim_prefix|>"])
    tokenizer.save(trained, folder)
    return folder


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Thirty readable documents in sorted order, and one of each kind that cannot be read."""
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    for i in range(30):
        (folder / ("sub" if i % 3 else ".") / f"{i:02d}.txt").write_bytes(text(i).encode())
    (folder / "07-quotes.txt").write_text(QUOTES_CONTROL)
    (folder / "empty.txt").write_text(" \n")
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (folder / "dangling.txt").symlink_to(folder / "nowhere")
    (folder / ".hidden").mkdir()
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def config(corpus: Path, tmp_path: Path, **changes) -> PrepareConfig:
    fields = {"sources": (str(corpus),), "out": str(tmp_path / "out"), "glob": "*.txt"} | changes
    if "train_bpe" not in fields and "tokenizer" not in fields:
        fields["train_bpe"] = 300
    return PrepareConfig(**fields)


def documents_of(folder: Path) -> list[str]:
    """Decoded documents of a prepared folder; each must end with its only EOS."""
    manifest = store.read_manifest(folder)
    tokens, starts = store.open_tokens(folder, manifest), store.read_boundaries(folder, manifest)
    decoder = AutoTokenizer.from_pretrained(folder / "tokenizer")
    documents = [tokens[start:end].tolist() for start, end in zip(starts, starts[1:])]
    assert all(ids[-1] == manifest["eos_id"] and manifest["eos_id"] not in ids[:-1] for ids in documents)
    return [decoder.decode(ids[:-1], clean_up_tokenization_spaces=False) for ids in documents]


def test_a_tokenizer_is_trained_on_text_without_a_break():
    """One word of 2,000,000 characters: counting its pairs as a whole would take hours."""
    began = time.monotonic()
    trained = tokenizer.train_bpe(["a" * 2_000_000, " " * 500_000, "and words"], 300)
    assert time.monotonic() - began < 60 and trained.decode(trained("aaaa and").input_ids) == "aaaa and"


def test_everything_left_out_is_counted_and_named(corpus):
    log = SkipLog()
    names = [document.name for document in Sources([str(corpus), str(corpus / "00.txt")], glob="*.txt").documents(log)]
    assert names == sorted(names) and len(names) == 31
    skipped = log.to_manifest()
    assert skipped["count"] == 5 == len(skipped["names"]) and skipped["names_omitted"] == 0
    reasons = {Path(entry["name"]).name: entry["reason"] for entry in skipped["names"]}
    assert reasons["empty.txt"] == "empty" and reasons["latin.txt"] == "not UTF-8"
    assert set(reasons) == {"empty.txt", "latin.txt", "dangling.txt", ".hidden", "00.txt"}


def test_unreadable_file_is_named(corpus, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    log = SkipLog()
    assert not list(Sources([str(corpus / "00.txt")]).documents(log))
    assert log.reasons == {"cannot be read: Permission denied": 1}


def test_json_lines(tmp_path):
    lines = ['{"body": "one"}', "", '{"body": 3}', "{broken", '["body"]', '{"body": "\\ud800"}', '{"body": "two\\n"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    log = SkipLog()
    documents = list(Sources([str(tmp_path)], text_key="body").documents(log))
    assert [document.text for document in documents] == ["one", "two\n"]
    assert log.reasons == {"no text under the key 'body'": 2, "not a JSON line": 1, "not UTF-8": 1}
    assert log.names[0]["name"].endswith("a.jsonl:3")


def test_glob_with_a_slash_matches_the_path(corpus):
    names = [document.name for document in Sources([str(corpus)], glob="sub/*.txt").documents(SkipLog())]
    assert len(names) == 20 and all("/sub/" in name for name in names)


@pytest.mark.parametrize("max_bytes, kept", [(1, ""), (2, "é"), (5, "éab"), (6, "éabц"), (7, "éabцz")])
def test_max_bytes_cuts_at_a_character_and_says_so(tmp_path, max_bytes, kept):
    for name, content in {"1": "éab", "2": "ц", "3": "z"}.items():
        (tmp_path / name).write_text(content)
    log = SkipLog()
    texts = [document.text for document in Sources([str(tmp_path)], max_bytes=max_bytes).documents(log)]
    assert "".join(texts) == kept
    assert log.reasons.total() == (max_bytes < 7)


def test_control_tokens_in_text_are_plain_text(tokenizer_folder):
    loaded = tokenizer.load(str(tokenizer_folder))
    before = loaded(QUOTES_CONTROL).input_ids
    encoder = tokenizer.Encoder(loaded)
    (ids,) = encoder.encode([QUOTES_CONTROL])
    assert loaded.eos_token_id in before and loaded.convert_tokens_to_ids("<|fim_prefix|>") in before
    assert not encoder.has_control_token(ids)
    assert loaded.decode(ids.tolist()) == QUOTES_CONTROL
    assert loaded(QUOTES_CONTROL).input_ids == before, "the tokenizer itself must not change"


def test_truncation_and_bos_of_the_tokenizer_are_not_applied(tokenizer_folder, tmp_path):
    rules = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    limits = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules | {"truncation": limits}))
    (tmp_path / "tokenizer_config.json").write_bytes((tokenizer_folder / "tokenizer_config.json").read_bytes())
    whole, cut = (tokenizer.Encoder(tokenizer.load(str(folder))) for folder in (tokenizer_folder, tmp_path))
    assert len(cut.encode([text(0)])[0]) == len(whole.encode([text(0)])[0]) > 8


def test_long_texts_are_cut_without_changing_a_token(tokenizer_folder, monkeypatch):
    encoder = tokenizer.Encoder(tokenizer.load(str(tokenizer_folder)))
    long = "\n".join(text(seed, 50) for seed in range(60))
    texts = ["", long, "x" * 5000, "short", text(1)]
    whole = encoder.encode(texts)
    monkeypatch.setattr(tokenizer, "PIECE_CHARS", 700)
    monkeypatch.setattr(tokenizer, "BATCH_CHARS", 2000)
    assert len(list(encoder._pieces(long))) > 10
    for expected, got in zip(whole, encoder.encode(texts)):
        np.testing.assert_array_equal(expected, got)


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern: str):
    """The pre-tokenizer of the Llama-3 kind."""
    pieces = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-3": lambda: split_by(LLAMA_3),
    "metaspace": lambda: pre_tokenizers.Metaspace(),
}
MARKS = ["don't", "It's", "é", "e\u0301x", "12345", "  ", "\n\n", "--"]
LONG = {
    "lines": lambda rng: "\n".join(text(seed, 50) for seed in range(60)),
    "windows": lambda rng: "\r\n".join(f"def f{i}(x):\r\n\treturn x's or {i}\r\n  " for i in range(900)),
    "one line": lambda rng: ",".join(f'"key{i}":{{"it\'s":{i**3}}}' for i in range(1500)),
    "chinese": lambda rng: "。".join("".join(rng.choice(list("漢字中文書籍長"), 30)) for _ in range(600)),
    "digits and rules": lambda rng: "".join(rng.choice(list("0123456789-= \n"), 20_000)),
    "mixed": lambda rng: "".join(
        rng.choice([*WORDS, "don't", "It's", "é", "e\u0301x", "12345", "  ", "\n\n", "--"], 9000)
    ),
}


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_long_documents_of_any_kind_keep_their_ids(kind, monkeypatch):
    """Compared with the library's own encoding of the whole text."""
    rng = np.random.RandomState(0)
    texts = {name: make(rng) for name, make in LONG.items()}
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = PRE_TOKENIZERS[kind]()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[EOS, "<unk>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator([text[:4000] for text in texts.values()], trainer)
    encoder = tokenizer.Encoder(PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=EOS, unk_token="<unk>"))
    monkeypatch.setattr(tokenizer, "PIECE_CHARS", 1000)
    for name, long in texts.items():
        (found,) = encoder.encode([long])
        assert found.tolist() == trained.encode(long, add_special_tokens=False).ids, name
        pieces = list(encoder._pieces(long))
        assert "".join(pieces) == long
        if kind != "metaspace" and name != "digits and rules":
            assert max(map(len, pieces)) < 3000, name


def test_a_stretch_without_a_cut_does_not_keep_the_rest_whole(tokenizer_folder, monkeypatch):
    encoder = tokenizer.Encoder(tokenizer.load(str(tokenizer_folder)))
    monkeypatch.setattr(tokenizer, "PIECE_CHARS", 500)
    long = "x" * 5000 + text(0, 2000)
    pieces = list(encoder._pieces(long))
    assert len(pieces[0]) < 6500 and max(map(len, pieces[1:])) < 1500
    assert encoder.encode([long])[0].tolist() == encoder._backend.encode(long, add_special_tokens=False).ids


def test_saved_tokenizer_loads_in_transformers_4_and_5(tokenizer_folder):
    saved = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    loaded = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert loaded.is_fast and loaded.eos_token == EOS
    assert tokenizer.fingerprint(loaded) == tokenizer.fingerprint(tokenizer.load(str(tokenizer_folder)))


def test_tokenizers_that_cannot_be_used_are_refused(tokenizer_folder, tmp_path):
    with pytest.raises(UserError, match="no tokenizer at"):
        tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="no EOS token"):
        tokenizer.load(str(tmp_path))


def test_documents_whose_text_becomes_a_control_token_are_left_out(corpus, tmp_path):
    words = Tokenizer(models.WordLevel({"block": 0, "<unk>": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>"), tmp_path / "words"
    )
    (corpus / "07-quotes.txt").write_text("block </s> block")
    manifest, _ = prepare(config(corpus, tmp_path, tokenizer=str(tmp_path / "words")))
    assert manifest["documents"] == 30 and manifest["dtype"] == "uint16" and manifest["eos_id"] == 2
    assert manifest["skipped"]["reasons"]["the tokenizer reads some of its text as a control token"] == 1


@pytest.mark.parametrize(
    "vocab_size, dtype", [(300, "uint16"), (65536, "uint16"), (65537, "uint32"), (151936, "uint32")]
)
def test_token_type_holds_the_largest_id(vocab_size, dtype):
    assert store.dtype_name(vocab_size) == dtype
    assert np.array(vocab_size - 1).astype(store.DTYPES[dtype]) == vocab_size - 1


def test_documents_come_back_in_order(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenise, "BATCH_BYTES", 3000)
    manifest, kept = prepare(config(corpus, tmp_path, seq_len=64))
    expected = [path.read_bytes().decode() for path in sorted(corpus.rglob("*.txt")) if path.name[0].isdigit()]
    assert kept == "prepared" and documents_of(tmp_path / "out") == expected
    assert manifest == store.read_manifest(tmp_path / "out")
    assert manifest["documents"] == len(expected) == 31
    assert manifest["bytes"] == sum(len(document.encode()) for document in expected)
    assert manifest["sequences"] * 64 + manifest["remainder"] == manifest["tokens"]
    assert manifest["skipped"]["count"] == 4
    for name, sha256 in manifest["sha256"].items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == sha256


def test_heldout_documents_are_whole_and_apart(corpus, tmp_path):
    (corpus / "same-as-00.txt").write_bytes((corpus / "00.txt").read_bytes())
    manifest, _ = prepare(config(corpus, tmp_path, holdout=0.3))
    train, heldout = documents_of(tmp_path / "out"), documents_of(tmp_path / "out" / "heldout")
    assert len(train) + len(heldout) == 32 and 2 <= len(heldout) <= 20
    assert not set(train) & set(heldout)
    assert manifest["heldout"] == {
        "documents": len(heldout),
        "tokens": len(PackedDataset(tmp_path / "out/heldout", 2)._tokens),
    }


def test_prepare_is_deterministic_and_takes_its_own_tokenizer(corpus, tmp_path):
    first, _ = prepare(config(corpus, tmp_path, out=str(tmp_path / "a")))
    second, _ = prepare(config(corpus, tmp_path, out=str(tmp_path / "b")))
    third, _ = prepare(config(corpus, tmp_path, out=str(tmp_path / "c"), tokenizer=str(tmp_path / "a" / "tokenizer")))
    assert first == second
    assert first["sha256"] == third["sha256"] and first["tokenizer"]["sha256"] == third["tokenizer"]["sha256"]


def test_same_settings_are_kept_and_others_need_overwrite(corpus, tmp_path):
    first, _ = prepare(config(corpus, tmp_path, holdout=0.3))
    written = (tmp_path / "out" / store.TOKENS).stat().st_mtime_ns
    again, kept = prepare(config(corpus, tmp_path, holdout=0.3, seq_len=100))
    assert kept == "rearranged" and again["sequences"] == first["tokens"] // 100
    assert store.read_manifest(tmp_path / "out" / "heldout")["seq_len"] == 100
    with pytest.raises(UserError, match=r"holdout=0.3 \(now 0.2\).*--overwrite"):
        prepare(config(corpus, tmp_path, holdout=0.2))
    (corpus / "00.txt").write_text("changed")
    with pytest.raises(UserError, match="other text in its sources.*--overwrite"):
        prepare(config(corpus, tmp_path, holdout=0.3))
    assert (tmp_path / "out" / store.TOKENS).stat().st_mtime_ns == written
    replaced, kept = prepare(config(corpus, tmp_path, overwrite=True))
    assert kept == "prepared" and "heldout" not in replaced and not (tmp_path / "out" / "heldout").exists()
    assert sorted(os.listdir(tmp_path)) == ["corpus", "out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_not_prepared_is_never_replaced(corpus, tmp_path, overwrite):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not a prepared folder"):
        prepare(config(corpus, tmp_path, overwrite=overwrite))
    (tmp_path / "out" / "manifest.json").write_text('{"name": "another program"}')
    with pytest.raises(UserError, match="not a manifest of format"):
        prepare(config(corpus, tmp_path, overwrite=overwrite))
    assert (tmp_path / "out" / "thesis.tex").exists()


def test_an_error_in_the_middle_leaves_nothing(corpus, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("disk on fire")

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "save", fail)
        with pytest.raises(RuntimeError):
            prepare(config(corpus, tmp_path))
    assert os.listdir(tmp_path) == ["corpus"]
    assert prepare(config(corpus, tmp_path))[1] == "prepared"


def test_killed_run_starts_again_without_cleaning_up(corpus, tmp_path):
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from mtraining_nns.data.atomic import new_folder\n"
        "with new_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'tokens.bin').write_bytes(b'half')\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "out")], stdout=subprocess.PIPE)
    assert run.stdout.readline() == b"writing\n"
    (stale,) = tmp_path.glob(".out.partial-*")
    with new_folder(tmp_path / "out") as folder:
        assert stale.exists(), "a run that is alive keeps its folder"
        (folder / "from").write_text("the second run")
    (tmp_path / "out" / "from").unlink()
    run.send_signal(signal.SIGKILL)
    run.wait()
    prepare(config(corpus, tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["corpus", "out"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train_bpe": None}, "exactly one of"),
        ({"train_bpe": 256}, "bytes and EOS need 257"),
        ({"holdout": 1.0}, "not a fraction"),
        ({"holdout": 1e-9}, "leaves none for heldout"),
        ({"seq_len": 1}, "at least 2 tokens"),
        ({"seq_len": 10**9}, "fill no sequence"),
        ({"max_bytes": 0}, "at least 1"),
        ({"glob": "*.rst"}, "no document in .*left out: 1 hidden folder"),
        ({"glob": "latin*"}, "1 not UTF-8"),
        ({"sources": ("nowhere",)}, "does not exist"),
    ],
)
def test_mistakes_are_one_line(corpus, tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        prepare(config(corpus, tmp_path, **changes))
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["corpus"]


def test_out_and_source_do_not_nest(corpus, tmp_path):
    for out in (corpus, corpus / "sub" / "out", tmp_path):
        with pytest.raises(UserError, match="inside each other"):
            config(corpus, tmp_path, out=str(out))


def test_verb(corpus, tmp_path, capsys):
    parser = ArgumentParser()
    verb.add_parser(parser.add_subparsers(dest="verb"))
    words = ["prepare", str(corpus), "--out", str(tmp_path / "out"), "--train-bpe", "300", "--glob", "*.txt"]
    args = parser.parse_args([*words, "--seq-len", "2000", "--holdout", "0.1"])
    assert verb.run(args) == 0 and verb.run(args) == 0
    shown = capsys.readouterr()
    assert "kept" in shown.out and "sequences of 2,000 tokens" in shown.out and "1 not UTF-8" in shown.out
    assert "tokenise" in shown.err
