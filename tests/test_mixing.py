"""Mixing domains: any part of a run has their shares, each walks its own epochs, and every engine reads the same."""

import io
import shutil
from contextlib import redirect_stdout
from fractions import Fraction

import numpy as np
import pytest
from data_order import sample_ids
from distributed import run_workers
from test_engine import run_engine
from tiny import pack, prepare, write_recipe

from mtraining_nns.data import shares
from mtraining_nns.data.mixture import Mixture
from mtraining_nns.errors import UserError

SEQ_LEN = 256


@pytest.mark.parametrize(
    "weights, expected",
    [
        ([0.5, 0.3, 0.2], (5, 3, 2)),
        ([4, 2], (2, 1)),
        ([7.0], (1,)),
        ([1e-3, 0.999], (1, 999)),
        ([1, 1, 1], (1, 1, 1)),
    ],
)
def test_weights_become_the_smallest_whole_numbers(weights, expected):
    assert shares.whole_shares(weights) == expected


def test_weights_without_a_short_period_are_rounded_to_a_millionth():
    weights = [0.1234567891, 0.3333333333, 1.7]
    visits = shares.whole_shares(weights)
    assert sum(visits) <= shares.LONGEST_PERIOD
    for count, weight in zip(visits, weights):
        assert abs(count / sum(visits) - weight / sum(weights)) < 1e-6
    with pytest.raises(UserError, match="1e-09 is below one in"):
        shares.whole_shares([1e-9, 1 / 3])


def shares_cases():
    rng = np.random.RandomState(0)
    yield from [(1,), (1, 1), (5, 3, 2), (1, 999), (97, 1, 1, 1), (1,) * 13]
    yield from (tuple(rng.randint(1, 60, domains).tolist()) for domains in range(2, 12))
    # the domain with the largest deficit every time would be 1.4 visits off here
    yield (1, 5, 50, 1, 50, 5, 2, 50, 50, 1, 3, 3, 5, 1)


@pytest.mark.parametrize("visits", list(shares_cases()))
def test_after_any_number_of_visits_each_domain_is_within_one_of_its_share(visits):
    length, counted = sum(visits), [0] * len(visits)
    for visit in range(2 * length + 3):
        assert shares.counts(visit, visits) == counted
        for count, share in zip(counted, visits):
            assert abs(count - Fraction(visit * share, length)) < 1
        domain, before = shares.domain_of(visit, visits)
        assert before == counted[domain]
        counted[domain] += 1


def test_the_order_of_domains_is_the_same_in_every_version():
    """A resumed run may find another version of this file; these values must never change."""
    assert [shares.domain_of(v, (5, 3, 2))[0] for v in range(10, 20)] == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two prepared folders, of 20 and of 3 sequences."""
    folder = tmp_path_factory.mktemp("domains")
    return prepare(folder / "long", 20 * SEQ_LEN, seed=1), prepare(folder / "short", 3 * SEQ_LEN, seed=2)


def test_each_domain_walks_its_own_epochs(folders):
    mixture = Mixture({str(folders[0]): 0.75, str(folders[1]): 0.25}, SEQ_LEN, seed=3)
    read = {folder: [] for folder in mixture.folders}
    for visit in range(160):
        domain, sample = mixture.place(visit)
        read[mixture.folders[domain]].append(sample)
    for folder, size in zip(folders, (20, 3)):
        assert read[str(folder)] == [i for v in range(len(read[str(folder)])) for i in sample_ids(v, size, 1, seed=3)]
    assert [len(read[str(folder)]) for folder in folders] == [120, 40]
    visited = mixture.visited(160)[str(folders[1])]
    assert visited == {"sequences": 40, "tokens": 40 * SEQ_LEN, "epochs": 13.3333}
    assert any("short: 40 of 160 sequences, 13.33 epochs of its 3, so all are read" in x for x in mixture.plan(160))


def test_one_folder_is_read_as_without_a_mix(folders):
    mixture = Mixture({str(folders[0]): 5}, SEQ_LEN, seed=3)
    assert [mixture.place(v) for v in range(45)] == [(0, i) for v in range(45) for i in sample_ids(v, 20, 1, seed=3)]
    assert mixture.identity == mixture.manifest["sha256"]


def test_neither_names_nor_order_of_folders_matter_but_content_and_shares_do(folders, tmp_path):
    long, short = map(str, folders)
    mixture = Mixture({long: 3, short: 1}, SEQ_LEN, seed=0)
    moved = str(shutil.copytree(long, tmp_path / "zzz"))
    other = Mixture({short: 0.25, moved: 0.75}, SEQ_LEN, seed=0)
    assert mixture.identity == other.identity
    assert all((mixture[v][0] == other[v][0]).all() for v in range(40))
    changed = Mixture({long: 2, short: 1}, SEQ_LEN, seed=0)
    assert mixture.identity != changed.identity != Mixture({long: 3}, SEQ_LEN, seed=0).identity
    mixture.check_resumed("step-000002", other.identity, "auto")
    changed.check_resumed("step-000002", other.identity, "step-000002")
    with pytest.raises(UserError, match="data.mix holds other tokens or shares than step-000002"):
        changed.check_resumed("step-000002", other.identity, "auto")


def mixed(folder, folders, *overrides) -> str:
    """A recipe of 6 steps of two sequences from a stream and from a packed folder of three, one with padding."""
    short = folder / "short"
    if not short.exists():
        pack(prepare(short, 3 * SEQ_LEN - 30, seed=2), SEQ_LEN)
    data = ["data.path=null", f"data.mix={{{folders[0]}: 2, {short}: 1}}", f"data.eval_path={short}"]
    return write_recipe(folder, *data, "train.steps=6", "train.accumulation=2", "checkpoint.every=2", *overrides)


def test_splits_and_resumed_runs_read_the_same(folders, tmp_path):
    expected = run_workers(run_engine, 1, mixed(tmp_path, folders))[0]
    assert expected["data"][str(folders[0])]["sequences"] == 8
    assert expected["data"][str(tmp_path / "short")] == {"sequences": 4, "tokens": 4 * SEQ_LEN, "epochs": 1.3333}
    for step in (4, 6):
        shutil.rmtree(tmp_path / "run" / f"step-{step:06d}")
    assert run_workers(run_engine, 1, mixed(tmp_path, folders))[0]["losses"] == expected["losses"]
    with pytest.raises(RuntimeError, match="UserError: data.mix holds other tokens or shares than .*step-000006"):
        run_workers(run_engine, 1, mixed(tmp_path, folders, f"data.mix.{folders[0]}=1"))
    split = [f"checkpoint.dir={tmp_path / 'split'}", "parallel.cp=2", "parallel.dp=2", "train.accumulation=1"]
    found = run_workers(run_engine, 4, mixed(tmp_path, folders), split)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["eval/loss_dense"] == pytest.approx(expected["eval/loss_dense"], rel=1e-5)


def test_a_run_says_what_it_will_read(folders):
    said = io.StringIO()
    with redirect_stdout(said):
        print("\n".join(Mixture({str(folders[1]): 1}, SEQ_LEN, seed=0).plan(4)))
    assert "4 of 4 sequences, 1.33 epochs of its 3, so some are read again" in said.getvalue()
