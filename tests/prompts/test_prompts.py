"""Prompt streams are exactly resumable; sources read what people have, and say clearly what is wrong with it."""

import json
import subprocess
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import HuggingFacePrompts, JsonlPrompts, ParquetPrompts, PromptSource
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.tasks import SortDigits

ROWS = [{"question": f"q{n}", "answer": n, "level": n % 2} for n in range(5)]
FIELDS = {"prompt_field": "question"}


class Numbers(PromptSource):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        assert 0 <= index < self.size
        return Prompt(text=str(index))


def take(stream, count):
    return [int(stream.next().text) for _ in range(count)]


@given(size=st.integers(1, 40), seed=st.integers(0, 2**63), done=st.integers(0, 200), more=st.integers(0, 100))
def test_a_stream_resumed_anywhere_continues_as_if_never_interrupted(size, seed, done, more):
    stream = PromptStream(Numbers(size), seed)
    take(stream, done)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = PromptStream(Numbers(size), seed)
    take(resumed, more % 7)  # wherever it was
    resumed.load_state_dict(state)
    assert take(resumed, more) == take(stream, more)


@given(size=st.integers(1, 40), seed=st.integers(0, 2**63), epochs=st.integers(1, 4))
def test_each_epoch_holds_every_prompt_once(size, seed, epochs):
    stream = PromptStream(Numbers(size), seed)
    for _ in range(epochs):
        assert sorted(take(stream, size)) == list(range(size))


def test_order_differs_between_epochs_and_seeds():
    orders = [take(PromptStream(Numbers(100), seed), 200) for seed in (0, 1, 2)]
    halves = [tuple(order[n : n + 100]) for order in orders for n in (0, 100)]
    assert len(set(halves)) == 6


@pytest.mark.slow
def test_order_is_the_same_in_another_process():
    code = """
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.tasks import SortDigits
stream = PromptStream(SortDigits(size=20), 3)
print(*(stream.next().text for _ in range(50)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    stream = PromptStream(SortDigits(size=20), 3)
    assert done.stdout.split() == [stream.next().text for _ in range(50)], done.stderr


def test_millions_of_prompts_cost_little_to_resume():
    stream = PromptStream(Numbers(3_000_000))
    stream.load_state_dict({"position": 10**10})
    assert 0 <= take(stream, 1)[0] < 3_000_000


def test_an_empty_source_is_refused():
    with pytest.raises(ValueError, match="Numbers holds no prompts"):
        PromptStream(Numbers(0))


# -- sources ----------------------------------------------------------------------------------------------------------


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path, rows=ROWS):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Writes rows in a format and opens them."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def open_rows(kind, rows=ROWS, **settings):
        settings = {**FIELDS, **settings}
        if kind == "jsonl":
            return JsonlPrompts(write_jsonl(tmp_path / "rows.jsonl", rows), **settings)
        if kind == "parquet":
            return ParquetPrompts(write_parquet(tmp_path / "rows.parquet", rows), **settings)
        folder = tmp_path / "data"
        folder.mkdir()
        if kind == "folder of jsonl":
            write_jsonl(folder / "train.jsonl", rows)
        if kind == "folder of parquet":
            write_parquet(folder / "train.parquet", rows)
        if kind == "saved dataset":
            datasets.Dataset.from_list(rows).save_to_disk(folder)
        if kind == "saved splits":
            datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(folder)
        return HuggingFacePrompts(str(folder), **settings)

    return open_rows


KINDS = ["jsonl", "parquet", "folder of jsonl", "folder of parquet", "saved dataset", "saved splits"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_prompts(kind, make):
    source = make(kind, template="Q: {prompt} {{x}}")
    expected = [Prompt(text=f"Q: q{n} {{x}}", answer=str(n), metadata={"level": n % 2}) for n in range(5)]
    assert list(source) == expected
    assert len(source) == 5
    with pytest.raises(IndexError):
        source[-1]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder of jsonl", "saved dataset"])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompt_field": "prompt"}, ["prompt_field='prompt'", "['answer', 'level', 'question']"]),
        ({"answer_field": "solution"}, ["answer_field='solution'", "['answer', 'level', 'question']"]),
        ({"template": "no place"}, ["template", "'no place'"]),
    ],
)
def test_a_wrong_setting_is_named_with_what_there_is(kind, settings, words, make):
    with pytest.raises(ValueError) as error:  # noqa: PT011  words are checked below
        make(kind, **settings)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_text_is_no_prompt(kind, make):
    with pytest.raises(ValueError, match=r"prompt_field='question': the field must hold text, .* messages, not"):
        make(kind, [{"question": None, "answer": "1"}])


def test_answers_may_be_absent(make):
    assert make("jsonl", [{"question": "q"}], answer_field=None)[0] == Prompt(text="q")


@pytest.mark.parametrize("source", [JsonlPrompts, ParquetPrompts])
def test_a_missing_file_is_named(source, tmp_path):
    with pytest.raises(FileNotFoundError, match="path='nowhere/rows' is not a file"):
        source("nowhere/rows")
    with pytest.raises(FileNotFoundError, match="is not a file"):
        source(str(tmp_path))


@pytest.mark.parametrize("path", ["nobody/nothing", "./nowhere/at/all"])
def test_a_missing_dataset_is_named(path):
    with pytest.raises(FileNotFoundError, match=f"path='{path}'"):
        HuggingFacePrompts(path)


@pytest.mark.parametrize("kind", ["folder of jsonl", "saved splits"])
def test_a_part_of_a_split_can_be_asked_for(kind, make):
    assert [p.text for p in make(kind, split="train[1:3]")] == ["q1", "q2"]


def test_a_missing_split_is_named(make, tmp_path):
    make("folder of jsonl")
    with pytest.raises(ValueError, match="split='test'"):
        HuggingFacePrompts(str(tmp_path / "data"), split="test", **FIELDS)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_empty_file_is_refused(kind, make):
    with pytest.raises(ValueError, match="holds no prompts"):
        make(kind, [])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"question": "q", "answer": 1}\n\n{"question": \n', "line 3 is not valid JSON"),
        (b'{"question": "q", "answer": 1}\n[1, 2]\n', "line 2 is not a JSON object"),
        (b'\n{"question": "q", "answer": 1}\n{"answer": 1}\n', "line 3, prompt_field='question'"),
        (b'{"question": "q\xff"}\n', "line 1 is not UTF-8"),
    ],
)
def test_a_wrong_line_is_numbered(content, words, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        JsonlPrompts(str(file), **FIELDS)


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    with pytest.raises(ValueError, match="is not a Parquet file"):
        ParquetPrompts(write_jsonl(tmp_path / "rows.parquet"))


def test_unusual_text_survives(make):
    text = "ümläut\u2028 line, \N{GRINNING FACE}\nnext"
    for kind in ("jsonl", "parquet"):
        assert make(kind, [{"question": text, "answer": "1"}])[0].text == text


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_field_may_be_nested_and_a_name_with_a_dot_comes_first(make, kind):
    """As in the data of verl: the answer lies in `reward_model.ground_truth`."""
    record = {"question": "1 + 1 =", "reward_model": {"ground_truth": "2", "style": "rule"}}
    assert make(kind, [record], answer_field="reward_model.ground_truth")[0].answer == "2"
    plain = {"question": "1 + 1 =", "reward_model.ground_truth": "two", "reward_model": {"ground_truth": "2"}}
    assert make(kind, [plain], answer_field="reward_model.ground_truth")[0].answer == "two"
    with pytest.raises(ValueError, match=r"'reward_model.truth'.*no such field, only \['ground_truth'"):
        make(kind, [record], answer_field="reward_model.truth")
