"""Prompts as Python values: lists, dictionaries, messages, data sets; errors name the index and the field."""

import datasets
import numpy as np
import pandas
import pytest

from lit_async_rl.callbacks import Evaluation
from lit_async_rl.data.settings import Validation
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.records import fill_template
from lit_async_rl.prompts.sources import InMemoryPrompts, as_source
from lit_async_rl.sandbox.code_cases import read_cases
from lit_async_rl.supervised.records import as_demonstrations
from lit_async_rl.tasks import SortDigits

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
ROWS = [{"prompt": "1+1=", "answer": 2, "level": "easy"}, {"prompt": "2+2=", "answer": "4", "level": "hard"}]


def prompts(given):
    source = as_source(given, "data.prompts")
    return [source[n] for n in range(len(source))]


def test_texts():
    assert prompts(["a", "b"]) == [Prompt(text="a"), Prompt(text="b")]
    assert prompts(("a",)) == [Prompt(text="a")]


@pytest.mark.parametrize("kind", [list, datasets.Dataset.from_list], ids=["list", "Dataset"])
def test_dictionaries_with_answer_and_metadata(kind):
    given = ROWS if kind is list else [{**row, "answer": str(row["answer"])} for row in ROWS]
    wanted = [Prompt(text=r["prompt"], answer=str(r["answer"]), metadata={"level": r["level"]}) for r in ROWS]
    assert prompts(kind(given)) == wanted


@pytest.mark.parametrize("kind", [list, datasets.Dataset.from_list], ids=["list", "Dataset"])
@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_messages(kind, field):
    assert prompts(kind([{field: MESSAGES, "answer": "4"}])) == [Prompt(messages=MESSAGES, answer="4")]


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_table_has_arrays_in_the_place_of_lists(field, tmp_path):
    given = [{field: MESSAGES, "answer": ["4", "four"]}]
    pandas.DataFrame(given).to_parquet(tmp_path / "a.parquet")
    records = pandas.read_parquet(tmp_path / "a.parquet").to_dict("records")
    assert isinstance(records[0][field], np.ndarray)
    assert prompts(records)[0].messages == tuple(MESSAGES)
    assert prompts(records)[0].answers == ("4", "four")
    if field == "messages":
        assert as_demonstrations(records, "data.records")[0].messages == tuple(MESSAGES)


def test_the_tests_of_a_problem_may_be_an_array():
    tests = ["assert double(2) == 4", "assert double(3) == 6"]
    prompt = prompts([{"prompt": "Write it.", "test_list": np.array(tests), "inputs": np.array([])}])[0]
    assert read_cases(prompt).asserts == tuple(tests)
    nested = np.array([{"input": np.array(["1", "2"]), "output": "3"}], dtype=object)
    assert read_cases(Prompt(text="x", metadata={"test_cases": nested})).streams == [("1\n2", "3")]
    assert fill_template("{prompt} {tests}", "x", {"tests": np.array(tests)}, None) == "x " + "\n".join(tests)


def test_kinds_may_be_mixed_and_answers_left_out():
    given = ["a", {"prompt": "b"}, {"messages": MESSAGES, "answer": None}, Prompt(text="c", answer="d")]
    wanted = [Prompt(text="a"), Prompt(text="b"), Prompt(messages=MESSAGES), Prompt(text="c", answer="d")]
    assert prompts(given) == wanted


def test_a_source_is_taken_as_it_is():
    source = SortDigits(4, size=10)
    assert as_source(source, "data.prompts") is source
    assert Validation(prompts=source).source is source
    assert Validation(prompts=["a"]).source[0] == Prompt(text="a")
    assert Validation().source is None


def test_a_table_that_is_indexed_by_its_columns_is_refused_by_name():
    table = pandas.DataFrame(ROWS)
    with pytest.raises(ValueError, match=r"data\.prompts must be a list .*got a DataFrame.*to_dict\('records'\)"):
        as_source(table, "data.prompts")
    assert prompts(table.to_dict("records")) == prompts(ROWS)


def test_held_out_prompts_of_an_evaluation_may_be_records():
    evaluation = Evaluation({"mine": ["a", {"prompt": "b", "answer": 2}], "sorted": SortDigits(4, size=3)})
    assert evaluation.datasets["mine"][1] == Prompt(text="b", answer="2")
    assert len(evaluation.datasets["sorted"]) == 3
    with pytest.raises(ValueError, match=r"Evaluation\.datasets\['mine'\]\[0\] must be a string or a dictionary"):
        Evaluation({"mine": [3]})


def test_texts_as_messages_of_a_user():
    assert InMemoryPrompts(["hi"], as_chat=True)[0] == Prompt(messages=[{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "data.prompts holds no prompts"),
        (["a", 3], r"data.prompts\[1\] must be a string or a dictionary, got '3'"),
        ([{"question": "a"}], r"data.prompts\[0\] must have 'prompt' or 'messages', got the keys \['question'\]"),
        (["a", {"prompt": 3}], r"data.prompts\[1\]\['prompt'\] must be a string or a list of messages, got '3'"),
        ([{"messages": "hi"}], r"data.prompts\[0\]\['messages'\] must be a list of messages, got 'hi'"),
        ([{"messages": [{"role": "me"}]}], r"data.prompts\[0\]\['messages'\]: message 0 must have a role"),
        ([{"prompt": "a", "messages": MESSAGES}], r"data.prompts\[0\] must have 'prompt' or 'messages'"),
        (
            [{"prompt": "a", "answer": {}}],
            r"data.prompts\[0\]\['answer'\] must be a string, a number or a list of them, got '\{\}'",
        ),
        ([{"prompt": "a", "answer": []}], r"data.prompts\[0\]\['answer'\] must be .*, got an empty list"),
        ("train.txt", "data.prompts must be a list .*, or the name of a file .*, got the string 'train.txt'"),
        ((text for text in "ab"), "data.prompts must be a list .* got generator"),
        (None, "data.prompts is not set"),
        (
            datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS[1:])),
            "data.prompts must be .* got a DatasetDict with the keys train: pass the value of one key",
        ),
    ],
)
def test_errors_name_index_and_field(given, message):
    with pytest.raises(ValueError, match=message):
        as_source(given, "data.prompts")


def test_bad_prompts_can_be_left_out():
    source = InMemoryPrompts(["a", {"prompt": 3}], on_bad_prompt="skip")
    assert source[0] == Prompt(text="a")


def test_a_held_out_prompt_is_named_as_such():
    with pytest.raises(ValueError, match=r"data.validation.prompts\[1\] must be a string"):
        Validation(prompts=["a", None])
