"""Evaluation tasks on engines whose answers are known: what is asked, what is scored, how it is weighted."""

import json
import re

import pytest
import torch
from tiny_model import byte_tokenizer

from mtraining_nns.data.prepare import PrepareConfig, prepare
from mtraining_nns.errors import UserError
from mtraining_nns.eval import report
from mtraining_nns.eval.huggingface import TextTokenizer
from mtraining_nns.eval.niah import NOISE, Niah, NiahConfig, split_sentences
from mtraining_nns.eval.perplexity import Perplexity, PerplexityConfig, cut_sequences, position_nll, spans, summed
from mtraining_nns.eval.questions import Engine
from mtraining_nns.eval.runner import Records, run
from mtraining_nns.eval.scoring import METRICS, all_of, any_of, numbers
from mtraining_nns.eval.text import read_source

STORY = "It rained. Nobody came! Why?\nThe road was long, and the lamp was dim. Then it stopped.\n\nA new day began. "


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer(byte_tokenizer())


class Oracle(Engine):
    """Reads the needle out of the prompt."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def generate(self, prompts, max_new_tokens):
        texts = map(self.tokenizer.decode, prompts)
        return self.tokenizer.encode([f" {' '.join(re.findall(r'is ([0-9]{7})[.]', text))}. Next" for text in texts])


class Echo(Engine):
    """Repeats the prompt, needle and all, from `begin` on."""

    def __init__(self, begin, end):
        self.begin, self.end = begin, end

    def generate(self, prompts, max_new_tokens):
        return [prompt[self.begin : self.end] for prompt in prompts]


class Counter(Engine):
    """Loss 1 at every position but 100 where the token is 7; remembers the windows it was given."""

    def __init__(self):
        self.windows = []

    def nll(self, token_ids):
        self.windows.append(token_ids)
        return torch.where(token_ids[1:] == 7, 100.0, 1.0)


def records_of(engine, suite) -> list[dict]:
    return run([suite], engine, Records(None, {}))[suite.name]


def test_planted_answers_score_100_and_the_prompt_scores_nothing(tokenizer):
    config = NiahConfig(lengths=(600, 1000), depths=(0, 50, 100), samples=2)
    suite = Niah(config, tokenizer)
    records = records_of(Oracle(tokenizer), suite)
    assert len(records) == 12 and all(record["score"] == 1 for record in records)
    assert not any(record["score"] for record in records_of(Echo(0, config.max_new_tokens), suite))
    with pytest.raises(ValueError, match="new tokens only"):
        records_of(Echo(0, None), suite)


@pytest.mark.parametrize("depth", (0, 40, 100))
def test_several_needles_lie_between_the_depth_and_the_end(tokenizer, depth):
    config = NiahConfig(lengths=(3000,), depths=(depth,), needles=3, max_new_tokens=64)
    suite = Niah(config, tokenizer, (STORY * 3,))
    question = suite.build(suite.ids()[0])
    text, longest = tokenizer.decode(question.prompt), max(map(len, suite.sentences))
    first, second, third = (text.index(f" is {answer}.") for answer in question.references)
    assert first <= second <= third and text.endswith(f"magic numbers of {question.about['city']} in the text are")
    hay = len(text) - len(suite.opening)
    for place, share in ((second - first, 1 / 3), (third - second, 1 / 3)):
        assert place == pytest.approx(hay * (100 - depth) / 100 * share, abs=3 * longest)
    score = METRICS[question.metric]
    assert score(" and ".join(question.references), question.references) == 1
    assert score(question.references[1] + "0 " + question.references[2], question.references) == 1 / 3
    assert all(record["score"] == 1 for record in records_of(Oracle(tokenizer), suite))
    with pytest.raises(UserError, match="max_new_tokens=20 cannot hold an answer of"):
        Niah(NiahConfig(lengths=(3000,), needles=3, max_new_tokens=20), tokenizer).check()
    with pytest.raises(UserError, match="niah hides 1 to 12 needles, got 13"):
        NiahConfig(lengths=(3000,), needles=13)


def test_each_cell_has_its_own_score(tokenizer):
    class OnlyShort(Oracle):
        def generate(self, prompts, max_new_tokens):
            return super().generate(prompts, max_new_tokens) if len(prompts[0]) < 700 else [[]]

    records = records_of(OnlyShort(tokenizer), Niah(NiahConfig(lengths=(600, 1000), depths=(0, 100)), tokenizer))
    cells = {(cell["length"], cell["depth"]): cell["score"] for cell in report.niah_result(records)["cells"]}
    assert cells == {(600, 0): 100, (600, 100): 100, (1000, 0): 0, (1000, 100): 0}
    table = report.niah_table(records)
    assert table.count("100.0") == 3 and table.splitlines()[2].split() == ["0", "%", "100.0", "0.0"]


@pytest.mark.parametrize("bos", (False, True))
@pytest.mark.parametrize("length", (500, 777, 4096))
@pytest.mark.parametrize("documents", (None, (STORY * 3, STORY)))
def test_prompts_fill_their_length_with_the_needle_at_its_depth(length, documents, bos):
    tokenizer = TextTokenizer(byte_tokenizer(bos=bos))
    config = NiahConfig(lengths=(length,), depths=(0, 30, 100))
    suite = Niah(config, tokenizer, documents)
    longest = max(map(len, suite.sentences))
    for depth, name in zip(config.depths, suite.ids(), strict=True):
        question = suite.build(name)
        ids, city, begin = question.prompt, question.about["city"], question.about["needle_begin"]
        text, (answer,) = tokenizer.decode(ids), question.references
        needle = f" The magic number of {city} is {answer}."
        assert length - longest < len(ids) + config.max_new_tokens <= length
        assert text.count(answer) == 1 and question.about["depth"] == depth
        assert tokenizer.decode(ids[begin:]).startswith(needle)
        assert text.endswith(f"The magic number of {city} in the text is")
        assert (ids[0] == tokenizer.first) if bos else tokenizer.first is None
        before = begin - len(suite.opening)
        after = len(ids) - begin - len(needle) - text[::-1].index("\n\n") - 2
        assert abs(before - depth / 100 * (before + after)) <= longest / 2


def test_a_prompt_depends_on_its_coordinates_and_the_seed_alone(tokenizer):
    def build(seed, lengths, depths):
        config = NiahConfig(lengths=lengths, depths=depths, seed=seed, samples=2)
        return Niah(config, tokenizer).build("niah/600/50/1")

    assert build(1, (600,), (50,)) == build(1, (1000, 600), (0, 50.0))
    assert build(1, (600,), (50,)) != build(2, (600,), (50,))


def test_a_length_below_the_template_is_an_error(tokenizer):
    for length in (1, 100, 349):
        with pytest.raises(UserError, match=f"length {length} cannot hold the template.*use at least"):
            Niah(NiahConfig(lengths=(2000, length)), tokenizer).check()
    shortest = int(re.search(r"at least (\d+)", str(pytest.raises(UserError, _build, tokenizer, 100).value))[1])
    _build(tokenizer, shortest)
    with pytest.raises(UserError, match="max_new_tokens=3 cannot hold"):
        Niah(NiahConfig(lengths=(2000,), max_new_tokens=3), tokenizer).check()


def _build(tokenizer, length):
    return Niah(NiahConfig(lengths=(length,), depths=(50,)), tokenizer).build(f"niah/{length}/50/0")


def test_half_a_million_tokens(tokenizer):
    prompt = _build(tokenizer, 524288).prompt
    assert 524288 - max(map(len, NOISE)) < len(prompt) + 32 <= 524288


def test_sentences_join_to_their_text():
    for text in (STORY, "x" * 1000, "a b " * 300, "你好。再见！\n\n\nOne 3.14 two. ", "no end", "\n", ""):
        pieces = split_sentences(text)
        assert "".join(pieces) == text and all(0 < len(piece) <= 300 for piece in pieces)
    assert split_sentences("A b. C?\nD") == ["A b.", " C?\n", "D"]


def test_a_longer_number_is_not_the_answer():
    assert numbers("it is 1234567.", ["1234567"]) == 1
    assert numbers("it is 12345678", ["1234567"]) == numbers("", ["1234567"]) == 0


def test_metrics_count_what_an_answer_holds():
    """Case and control characters do not count; `all` gives shares, `any` takes the best reference."""
    assert all_of("Oslo,\x00 RIGA and 17", ["oslo", "riga", "18", "19"]) == 0.5
    assert all_of("", ["a"]) == any_of("nothing", ["oslo", "riga"]) == 0
    assert any_of("It was in Riga.", ["oslo", "riga"]) == 1


@pytest.mark.parametrize(("length", "window", "stride"), ((1000, 256, 64), (1000, 256, 255), (14, 8, 3), (257, 256, 1)))
def test_every_token_is_scored_once(length, window, stride):
    engine, ids = Counter(), torch.arange(length)
    config = PerplexityConfig(lengths=(length,), window=window, stride=stride)
    scored = [t for span in spans(length, window, stride) for t in range(span.score_from, span.end)]
    assert scored == list(range(1, length))
    nll = position_nll(engine, ids, config)[0]
    assert nll.tolist() == [100.0 if position == 7 else 1.0 for position in range(1, length)]
    assert all(len(seen) == window for seen in engine.windows)
    assert len(engine.windows) == 1 + -(-(length - window) // stride)


def test_a_window_that_covers_the_sequence_is_a_single_pass():
    for window, stride in ((None, None), (1000, 64), (4096, 1)):
        engine = Counter()
        position_nll(engine, torch.arange(1000), PerplexityConfig(lengths=(1000,), window=window, stride=stride))
        assert [len(seen) for seen in engine.windows] == [1000]


def test_means_are_weighted_by_token():
    stream = torch.full((2, 1000), 7)
    stream[:, 256:] = 1
    suite = Perplexity(PerplexityConfig(lengths=(1000,), samples=2), stream.flatten(), None)
    (result,) = summed(records_of(Counter(), suite))
    assert [(b.begin, b.end, b.tokens, b.nll) for b in result.buckets] == [
        (1, 256, 510, 100.0),
        (256, 512, 512, 1.0),
        (512, 1000, 976, 1.0),
    ]
    assert result.total.tokens == 1998 and result.total.nll == (510 * 100 + 1488) / 1998
    table = report.perplexity_table([result])
    assert len(table.splitlines()) == 2 + 3 + 3 and "1998" in table


class Killed(Exception):
    pass


@pytest.mark.parametrize("after", [0, 3, 7])
@pytest.mark.parametrize("torn", [b"", b'{"id": "niah/600/50/1", "sco'])
def test_a_run_that_was_killed_ends_with_the_same_files(tokenizer, tmp_path, after, torn):
    """A kill leaves whole lines, and perhaps one that is cut in two."""
    suite, manifest = Niah(NiahConfig(lengths=(600,), depths=(0, 50), samples=4), tokenizer), {"seed": 0}

    class Dying(Oracle):
        batch_size, left = 1, after

        def generate(self, prompts, max_new_tokens):
            if self.left == 0:
                raise Killed
            self.left -= 1
            return super().generate(prompts, max_new_tokens)

    for folder, engine in (("straight", Dying(tokenizer)), ("killed", Dying(tokenizer))):
        (tmp_path / folder).mkdir()
        engine.left = -1 if folder == "straight" else after
        records = Records(tmp_path / folder, manifest)
        try:
            run([suite], engine, records)
        except Killed:
            assert folder == "killed"
        records.close()
    path = tmp_path / "killed" / "records.jsonl"
    with path.open("ab") as stream:
        stream.write(torn)
    again = Dying(tokenizer)
    again.left = 8 - after  # what is there is not asked again
    records = Records(tmp_path / "killed", manifest)
    found = run([suite], again, records)["niah"]
    records.close()
    for name in ("manifest.json", "records.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()
    assert [record["id"] for record in found] == suite.ids()
    with pytest.raises(UserError, match="another run, which differs in seed; give another --out"):
        Records(tmp_path / "killed", {"seed": 1})


def test_what_perplexity_refuses():
    for settings in ({"window": 64, "stride": 64}, {"stride": 8}, {"window": 64, "stride": 0}, {"samples": 0}):
        with pytest.raises(UserError):
            PerplexityConfig(lengths=(100,), **settings)

    class Broken(Engine):
        def nll(self, token_ids):
            return torch.tensor([0.0, float("nan")])

    with pytest.raises(UserError, match="position 2 is nan"):
        position_nll(Broken(), torch.arange(3), PerplexityConfig(lengths=(3,)))


def test_sequences_open_with_bos_and_never_repeat_text():
    assert cut_sequences(torch.arange(10), 5, 2, None).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert cut_sequences(torch.arange(10), 5, 2, 99).tolist() == [[99, 0, 1, 2, 3], [99, 4, 5, 6, 7]]
    with pytest.raises(UserError, match="2 x 6 tokens needs 12 tokens of text, got 10"):
        cut_sequences(torch.arange(10), 6, 2, None)


def test_text_of_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "first"}) + "\n")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    source = read_source(tmp_path, max_bytes=1000)
    assert source.documents == ("first", "second") and sum(source.skipped.values()) == 1
    assert read_source(tmp_path / "b.txt", max_bytes=3).documents == ("sec",)
    with pytest.raises(UserError, match="no evaluation text in .*not UTF-8"):
        read_source(tmp_path / "c.bin", max_bytes=1000)
    with pytest.raises(UserError, match="does not exist"):
        read_source(tmp_path / "none", max_bytes=1000)


def test_prepared_data_gives_its_heldout_documents(tmp_path):
    texts = [f"document {i}. {STORY}" for i in range(20)]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sources, out = (str(tmp_path / "all.jsonl"),), tmp_path / "data"
    manifest, _ = prepare(PrepareConfig(sources=sources, out=str(out), train_bpe=300, holdout=0.5))
    heldout = read_source(out, max_bytes=10**6).documents
    assert set(heldout) < set(texts) and len(heldout) == manifest["heldout"]["documents"]
    assert read_source(out / "heldout", max_bytes=10**6).documents == heldout
    assert read_source(out, max_bytes=1).documents == heldout[:1]
    prepare(PrepareConfig(sources=sources, out=str(tmp_path / "plain"), train_bpe=300))
    with pytest.raises(UserError, match="no held-out part"):
        read_source(tmp_path / "plain", max_bytes=1000)


def test_text_is_never_a_control_token(tokenizer):
    (ids,) = tokenizer.encode(["a<eos>b"])
    assert tokenizer.eos not in ids and tokenizer.decode(ids) == "a<eos>b"
    assert tokenizer.stream(("ab", "c")).tolist()[2::2] == [tokenizer.eos, tokenizer.eos]
