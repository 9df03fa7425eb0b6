"""A preparation that is killed at any moment goes on when it is started again, and ends with the same bytes."""

import contextlib
import importlib
import io
import json
import os
import signal
from pathlib import Path

import pytest
from distributed import run_workers
from test_prepare import text, tokenizer_folder  # noqa: F401

from mtraining_nns.data import journal, store, tokenise, tokenizer
from mtraining_nns.data.prepare import PrepareConfig, prepare
from mtraining_nns.errors import UserError

SETTINGS = {"train_bpe": 300, "holdout": 0.3, "seq_len": 64, "pack": "best_fit"}


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Forty documents between files that are left out, also behind the last one."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(text(i, 50))
        if i % 4 == 0:
            (folder / f"{i:02d}-empty.txt").write_text(" ")
    (folder / "zz.txt").write_bytes(b"\xff\xfe")
    return folder


def preparing(rank, world, fields: dict, killed_at: tuple | None = None):
    """(documents tokenised, stderr); killed_at: ("module.function", n), before the n-th call of which it dies.

    Batches of two or three documents, parts of about six.
    """
    tokenise.BATCH_BYTES, tokenise.PART_BYTES = 800, 2000
    seen, encode = [], tokenizer.Encoder.encode
    tokenizer.Encoder.encode = lambda self, texts: seen.extend(texts) or encode(self, texts)
    if killed_at:
        place, left = killed_at[0], [killed_at[1]]
        module, *names, last = place.split(".")
        owner = importlib.import_module(f"mtraining_nns.data.{module}")
        for name in names:
            owner = getattr(owner, name)
        function = getattr(owner, last)

        def dying(*args, **more):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **more)

        setattr(owner, last, dying)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        prepare(PrepareConfig(**fields))
    return len(seen), said.getvalue()


def start(fields: dict, killed_at: tuple | None = None):
    try:
        return run_workers(preparing, 1, fields, killed_at)[0]
    except RuntimeError as error:
        if killed_at and "died without a result" in str(error):
            return None
        raise


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fields_of(corpus: Path, out: Path, **changes) -> dict:
    return {"sources": (str(corpus),), "out": str(out), **SETTINGS, **changes}


def test_killed_again_and_again_it_ends_with_the_same_files(corpus, tmp_path):
    expected, out = tmp_path / "straight", tmp_path / "out"
    assert start(fields_of(corpus, expected))[0] == 40
    kills = [
        ("tokenizer.save", 1),  # the tokenizer is trained
        ("journal.write", 1),
        ("journal.write", 2),  # after the first part, before it counts
        ("journal.write", 3),  # after the second part: the first one stays
        ("journal.ResumableWriter.commit", 2),  # one file of two is on disk
        ("journal.os.replace", 2),
        ("store.TokenWriter.append", 9),
        ("store.TokenWriter.close", 2),
        ("packing.Path.replace", 1),
        ("store.write_manifest", 1),
        ("store.write_manifest", 2),
        ("atomic._put_in_place", 1),
    ]
    for killed_at in kills:
        assert start(fields_of(corpus, out), killed_at) is None, killed_at
        assert not out.exists()
    tokenised, said = start(fields_of(corpus, out))
    assert files_of(out) == files_of(expected)
    assert tokenised <= 12 and "going on after" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out", "straight"]


def killed(corpus: Path, tmp_path: Path, **changes) -> Path:
    """The work folder of a run that was killed after three parts."""
    assert start(fields_of(corpus, tmp_path / "out", **changes), ("journal.write", 5)) is None
    (work,) = tmp_path.glob(".out.partial-*")
    return work


def test_the_progress_bar_starts_where_it_left_off(corpus, tmp_path):
    work = killed(corpus, tmp_path)
    done = json.loads((work / journal.JOURNAL).read_text())
    assert 0 < done["documents"] < 40
    _, said = start(fields_of(corpus, tmp_path / "out"))
    first = next(part for part in said.replace("\n", "\r").split("\r") if part.startswith("tokenise"))
    assert f"{done['bytes'] / 1000:.2f}k/" in first, said


@pytest.mark.parametrize("number, again", [(0, True), (39, False)])
def test_sources_that_were_read_and_changed_are_tokenised_anew(corpus, tmp_path, tokenizer_folder, number, again):  # noqa: F811
    """Those that were not read yet are read as they are now. Either way the result is that of a fresh run."""
    taken = {"tokenizer": str(tokenizer_folder), "train_bpe": None}
    killed(corpus, tmp_path, **taken)
    (corpus / f"{number:02d}.txt").write_text("something else")
    tokenised, said = start(fields_of(corpus, tmp_path / "out", **taken))
    assert ("sources have changed" in said) == (tokenised == 40) == again
    start(fields_of(corpus, tmp_path / "straight", **taken))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "straight")


def test_a_tokenizer_is_not_kept_that_was_trained_on_other_text(corpus, tmp_path):
    killed(corpus, tmp_path)
    (corpus / "39.txt").write_text("something else")
    tokenised, said = start(fields_of(corpus, tmp_path / "out"))
    assert tokenised == 40 and "training the tokenizer again" in said
    start(fields_of(corpus, tmp_path / "straight"))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "straight")


def test_sources_that_change_while_they_are_read_are_an_error(corpus, tmp_path, monkeypatch):
    train = tokenizer.train_bpe

    def train_and_change(texts, size):
        trained = train(texts, size)
        (corpus / "39.txt").write_text("something else")
        return trained

    monkeypatch.setattr(tokenizer, "train_bpe", train_and_change)
    with pytest.raises(UserError, match="the sources changed after the tokenizer was trained on them"):
        prepare(PrepareConfig(**fields_of(corpus, tmp_path / "out")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus"]


def test_other_settings_start_anew_and_say_so(corpus, tmp_path):
    killed(corpus, tmp_path)
    tokenised, said = start(fields_of(corpus, tmp_path / "out", holdout=0.2))
    assert tokenised == 40 and "a killed run that had other settings is dropped" in said
    start(fields_of(corpus, tmp_path / "straight", holdout=0.2))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "straight")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out", "straight"]


def test_another_length_goes_on(corpus, tmp_path):
    """Tokens do not depend on it."""
    killed(corpus, tmp_path)
    tokenised, _ = start(fields_of(corpus, tmp_path / "out", seq_len=100, pack="stream"))
    assert tokenised < 40 and store.read_manifest(tmp_path / "out")["seq_len"] == 100


@pytest.mark.parametrize("name", ["data/tokens.bin", "data/heldout/tokens.bin", "train.starts"])
@pytest.mark.parametrize("how", ["cut", "changed", "gone"])
def test_damaged_files_are_written_anew(corpus, tmp_path, name, how):
    file = killed(corpus, tmp_path) / name
    if how == "changed":
        file.write_bytes(bytes(file.stat().st_size))
    elif how == "cut":
        os.truncate(file, 100)
    else:
        file.unlink()
    tokenised, said = start(fields_of(corpus, tmp_path / "out"))
    assert tokenised == 40 and "starting from the first document again" in said
    start(fields_of(corpus, tmp_path / "straight"))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "straight")


def test_a_run_that_is_alive_is_not_taken_over(corpus, tmp_path):
    from mtraining_nns.data.atomic import RESULT, work_folder

    with work_folder(tmp_path / "out", lambda work: True) as work:
        (work / RESULT).mkdir()
        (work / RESULT / "manifest.json").write_text("its own")
        with work_folder(tmp_path / "out", lambda work: True) as other:
            assert other != work
            (other / RESULT).mkdir()
    assert (tmp_path / "out" / "manifest.json").read_text() == "its own"


def test_an_interrupted_run_stays_and_a_mistake_does_not(tmp_path):
    from mtraining_nns.data.atomic import work_folder

    for error, left in ((KeyboardInterrupt, 1), (OSError, 1), (UserError, 0)):
        with pytest.raises(error), work_folder(tmp_path / "out", lambda work: True):
            raise error("now")
        assert len(list(tmp_path.glob(".out.partial-*"))) == left
