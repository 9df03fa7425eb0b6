"""Tables, saved datasets and MDS shards give the same tokens as text, and name what they leave out as it does."""

import builtins
import json
from pathlib import Path

import numpy as np
import pytest

from mtraining_nns.data import mds, store, tokenizer
from mtraining_nns.data.prepare import PrepareConfig, prepare
from mtraining_nns.data.records import SkipLog
from mtraining_nns.data.source_ids import SourceTokenizer
from mtraining_nns.data.sources import Sources
from mtraining_nns.errors import UserError

TEXTS = [f"chapter {i}: naïve 漢字\r\n" + "ring attention " * (i * 7 % 200) for i in range(150)] + [
    "<|endoftext|> quoted"
]


def write_text(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:04d}.txt").write_bytes(text.encode())
    return folder


def write_jsonl(folder: Path, texts: list[str]) -> Path:
    path = folder.with_suffix(".jsonl")
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_parquet(folder: Path, texts: list) -> Path:
    pa, path = pytest.importorskip("pyarrow"), folder.with_suffix(".parquet")
    pytest.importorskip("pyarrow.parquet").write_table(
        pa.table({"id": range(len(texts)), "text": texts}), path, row_group_size=40
    )
    return path


def write_dataset(folder: Path, texts: list) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"id": list(range(len(texts))), "text": texts}).save_to_disk(folder, num_shards=3)
    return folder


def write_mds(
    folder: Path, samples: list[dict[str, bytes]], encodings: dict[str, str], shard_samples: int = 60
) -> Path:
    """Shards as mosaicml-streaming writes them; every column has a variable size."""
    folder.mkdir()
    shards = []
    for number, start in enumerate(range(0, len(samples), shard_samples)):
        part = samples[start : start + shard_samples]
        blobs = [
            np.array([len(s[k]) for k in encodings], "<u4").tobytes() + b"".join(s[k] for k in encodings) for s in part
        ]
        first = 4 * (len(part) + 2) + 5
        offsets = first + np.cumsum([0, *map(len, blobs)])
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(np.array([len(part), *offsets], "<u4").tobytes() + b"{   }" + b"".join(blobs))
        shards.append(
            {"format": "mds", "version": 2, "samples": len(part), "raw_data": {"basename": name}, "zip_data": None}
            | {"column_names": list(encodings), "column_encodings": list(encodings.values())}
            | {"column_sizes": [None] * len(encodings)}
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def write_mds_text(folder: Path, texts: list[str]) -> Path:
    return write_mds(
        folder, [{"domain": b"book", "text": text.encode()} for text in texts], {"domain": "str", "text": "str"}
    )


def array(values, dtype: str = "<u4") -> bytes:
    """`ndarray:uint32`: the shape in uint32, then the values."""
    values = np.array(values, dtype)
    return bytes([values.ndim << 2 | 2]) + np.array(values.shape, "<u4").tobytes() + values.tobytes()


WRITERS = {
    "text": write_text,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "dataset": write_dataset,
    "mds": write_mds_text,
}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(tokenizer.train_bpe(TEXTS, 320), folder)
    return folder


def config(source: Path, out: Path, tokenizer_folder: Path, **changes) -> PrepareConfig:
    return PrepareConfig(sources=(str(source),), out=str(out), tokenizer=str(tokenizer_folder), **changes)


@pytest.mark.parametrize("options", [{}, {"holdout": 0.2, "max_bytes": 50_001}], ids=["all", "limited"])
@pytest.mark.parametrize("kind", list(WRITERS)[1:])
def test_every_kind_gives_the_tokens_of_text(tmp_path, tokenizer_folder, kind, options):
    expected, _ = prepare(config(write_text(tmp_path / "a", TEXTS), tmp_path / "text", tokenizer_folder, **options))
    again = config(WRITERS[kind](tmp_path / "b", TEXTS), tmp_path / kind, tokenizer_folder, **options)
    got, _ = prepare(again)
    for part in (".", store.HELDOUT) if options else (".",):
        for name in (store.TOKENS, store.BOUNDARIES):
            assert (tmp_path / kind / part / name).read_bytes() == (tmp_path / "text" / part / name).read_bytes()
    same = ("sources_sha256", "tokens", "documents", "bytes", "settings")
    assert {key: got[key] for key in same} == {key: expected[key] for key in same}
    assert got["documents"] and got["skipped"]["reasons"] == expected["skipped"]["reasons"]
    assert prepare(again)[1] == "kept", "the same sources are kept"


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_rows_without_text_are_named(tmp_path, kind):
    path = WRITERS[kind](tmp_path / "a", ["one", None, " \n", "two"])
    log = SkipLog()
    documents = list(Sources([str(path)]).documents(log))
    assert [(document.name, document.text) for document in documents] == [(f"{path}:1", "one"), (f"{path}:4", "two")]
    assert log.names == [
        {"name": f"{path}:2", "reason": "no text under the key 'text'"},
        {"name": f"{path}:3", "reason": "empty"},
    ]


def test_columns_that_are_not_text(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    not_utf8 = pa.array([b"ok", b"\xff"]).view(pa.string())
    tables = {
        "a": {"text": [1, 2]},
        "b": {"text": not_utf8},
        "c": {"body": ["x"]},
        "d": {"text": pa.array(["in a dictionary", None]).dictionary_encode()},
        "e": {"text": [b"bytes"]},
    }
    for name, columns in tables.items():
        parquet.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    (tmp_path / "f.parquet").write_bytes(b"PAR1 damaged")
    (tmp_path / "g.txt").write_text("left out by the glob")
    log = SkipLog()
    documents = list(Sources([str(tmp_path)], glob="*.parquet").documents(log))
    assert [document.text for document in documents] == ["ok", "in a dictionary"]
    names = {Path(entry["name"]).name: entry["reason"] for entry in log.names}
    key = "no text under the key 'text'"
    assert names.pop("f.parquet").startswith("cannot be read: damaged")
    assert names == {
        "a.parquet:1": key,
        "a.parquet:2": key,
        "b.parquet:2": "not UTF-8",
        "c.parquet": key,
        "d.parquet:2": key,
        "e.parquet:1": key,
    }


def test_datasets_inside_a_folder_are_read_whole(tmp_path):
    (tmp_path / "all").mkdir()
    write_mds_text(tmp_path / "all" / "b", ["mds"])
    write_text(tmp_path / "all" / "a", ["before"])
    write_text(tmp_path / "all" / "c", ["after"])
    (tmp_path / "all" / "c" / "index.json").write_text('{"name": "of something else"}')
    texts = [document.text for document in Sources([str(tmp_path / "all")]).documents(SkipLog())]
    assert texts == ["before", "mds", "after", '{"name": "of something else"}']
    texts = [document.text for document in Sources([str(tmp_path / "all")], glob="*.txt").documents(SkipLog())]
    assert texts == ["before", "after"]


def test_a_dataset_dict_names_its_splits(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="splits train, test; name the folder of one"):
        Sources([str(tmp_path)])


@pytest.mark.parametrize("kind, package", [("parquet", "pyarrow"), ("dataset", "datasets")])
def test_a_missing_library_is_one_line_before_any_work(tmp_path, tokenizer_folder, monkeypatch, kind, package):
    path = tmp_path / "a.parquet"
    if kind == "dataset":
        path = tmp_path / "a"
        path.mkdir()
        (path / "state.json").write_text("{}")
        (path / "dataset_info.json").write_text("{}")
    else:
        path.write_bytes(b"PAR1")
    real = builtins.__import__

    def refuse(name, *rest):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"pip install 'mtraining-nns\[") as caught:
        prepare(config(path, tmp_path / "out", tokenizer_folder))
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def ids_of(tokenizer_folder: Path, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in tokenizer.Encoder(tokenizer.load(str(tokenizer_folder))).encode(texts)]


def write_packed(folder: Path, tokenizer_folder: Path) -> Path:
    """Samples of three documents, each begun and ended by EOS, with where each starts."""
    eos, samples = tokenizer.load(str(tokenizer_folder)).eos_token_id, []
    documents = [[eos, *ids, eos] for ids in ids_of(tokenizer_folder, TEXTS)]
    for first in range(0, len(documents), 3):
        packed = documents[first : first + 3]
        ends = np.cumsum([len(ids) for ids in packed])
        spans = np.stack([ends - [len(ids) for ids in packed], ends], axis=1)
        samples.append({"input_ids": array(np.concatenate(packed)), "indices": array(spans)})
    return write_mds(folder, samples, {"input_ids": "ndarray:uint32", "indices": "ndarray:uint32"}, 20)


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    tokenizer.save(tokenizer.train_bpe(TEXTS[:9], 270), folder)
    return folder


def test_packed_ids_become_the_tokens_of_their_texts(tmp_path, tokenizer_folder, other_tokenizer):
    source = write_packed(tmp_path / "packed", other_tokenizer)
    expected, _ = prepare(config(write_text(tmp_path / "a", TEXTS), tmp_path / "text", tokenizer_folder))
    settings = config(source, tmp_path / "out", tokenizer_folder, source_tokenizer=str(other_tokenizer))
    got, _ = prepare(settings)
    assert got["sha256"] == expected["sha256"] and got["sources_sha256"] == expected["sources_sha256"]
    assert got["changed"] == {
        "source_tokenizer": str(other_tokenizer),
        "count": 0,
        "reasons": {},
        "names": [],
        "names_omitted": 0,
    }
    assert prepare(settings)[1] == "kept"
    with pytest.raises(UserError, match="source_tokenizer="):
        prepare(config(source, tmp_path / "out", tokenizer_folder, source_tokenizer=str(tokenizer_folder)))


def test_text_that_does_not_give_its_ids_again_is_kept_and_named(tmp_path, other_tokenizer):
    whole, byte = ids_of(other_tokenizer, ["ring"])[0], ids_of(other_tokenizer, ["漢"])[0][:1]
    samples = [{"input_ids": array(ids)} for ids in (whole, whole + byte)]
    source = write_mds(tmp_path / "ids", samples, {"input_ids": "ndarray:uint32"})
    log, changed = SkipLog(), SkipLog()
    sources = Sources([str(source)], source_tokenizer=SourceTokenizer(str(other_tokenizer)))
    assert [document.text for document in sources.documents(log, changed)] == ["ring", "ring\ufffd"]
    assert not log.reasons and [entry["name"] for entry in changed.names] == [f"{source}/shard.00000.mds:2"]


def test_mistakes_with_shards_are_one_line(tmp_path, other_tokenizer):
    ids = write_mds(tmp_path / "ids", [{"input_ids": array([1, 60_000])}], {"input_ids": "ndarray:uint32"})
    with pytest.raises(UserError, match="name the tokenizer that made them with --source-tokenizer"):
        Sources([str(ids)])
    with pytest.raises(UserError, match="ids 1 to 60000, the vocabulary of .* has 2"):
        list(Sources([str(ids)], source_tokenizer=SourceTokenizer(str(other_tokenizer))).documents(SkipLog()))
    pickled = write_mds(tmp_path / "pickled", [{"input_ids": b"?"}], {"input_ids": "pkl"})
    with pytest.raises(UserError, match="input_ids as pkl; only ndarray"):
        Sources([str(pickled)], source_tokenizer=SourceTokenizer(str(other_tokenizer)))
    with pytest.raises(UserError, match="has the fields domain, text; .* --text-key"):
        Sources([str(write_mds_text(tmp_path / "text", ["one"]))], text_key="body")
    (tmp_path / "text" / "shard.00000.mds").rename(tmp_path / "text" / "shard.00000.mds.zstd")
    with pytest.raises(UserError, match="lacks shard.00000.mds; .*decompress"):
        Sources([str(tmp_path / "text")])
    index = json.loads((tmp_path / "text" / "index.json").read_text())
    for shard in (index["shards"][0] | {"version": 3}, {"format": "mds"}):
        (tmp_path / "text" / "index.json").write_text(json.dumps({"shards": [shard]}))
        with pytest.raises(UserError, match="only mds 2|not an index of MDS"):
            Sources([str(tmp_path / "text")])


def test_damaged_shards_are_named(tmp_path):
    source = write_mds_text(tmp_path / "a", ["one", "two", "three"])
    shard = source / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-3])
    log = SkipLog()
    assert not list(Sources([str(source)]).documents(log))
    assert log.names[0]["name"] == str(shard) and "its offsets do not fit" in log.names[0]["reason"]


@pytest.mark.parametrize("encoding", ["ndarray:uint32", "ndarray", "ndarray:int64:6", "ndarray:uint16"])
def test_shards_of_the_library_are_read_as_it_reads_them(tmp_path, encoding):
    streaming = pytest.importorskip("streaming", exc_type=ImportError)
    dtype = (encoding.split(":") + ["uint32"])[1]
    columns = {"text": "str", "length": "uint64", "input_ids": encoding, "indices": "ndarray:uint32"}
    with streaming.MDSWriter(out=str(tmp_path / "a"), columns=columns, size_limit=2000) as writer:
        for i in range(40):
            ids = np.arange(i, i + 6).astype(dtype)
            spans = np.array([[0, 2], [2, 6]], np.uint32)
            writer.write({"text": f"sample {i} é", "length": 6, "input_ids": ids, "indices": spans})
    expected = streaming.LocalDataset(str(tmp_path / "a"))
    shards = mds._shards(tmp_path / "a")
    got = [sample for shard in shards for sample in mds._samples(shard)]
    assert len(shards) > 1 and len(got) == len(expected) == 40
    for sample, reference in zip(got, expected):
        assert sample["text"].decode() == reference["text"]
        np.testing.assert_array_equal(mds._array(sample["input_ids"], encoding), reference["input_ids"])
        spans = mds._array(sample["indices"], "ndarray:uint32").reshape(-1, 2)
        np.testing.assert_array_equal(spans, reference["indices"])
