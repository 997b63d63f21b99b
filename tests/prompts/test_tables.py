"""One table has one answer, whatever reads it: numbers of a column with a gap, and cells without an answer."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lit_async_rl import CsvPrompts, HuggingFacePrompts, InMemoryPrompts, JsonlPrompts, ParquetPrompts
from lit_async_rl.cli.console import main
from lit_async_rl.prompts.records import field_text
from lit_async_rl.prompts.sources import as_source

pandas = pytest.importorskip("pandas")
datasets = pytest.importorskip("datasets")
TABLE = {"prompt": ["8 * 9", "?", "2 + 3", "1 / 2"], "answer": [72, None, -5, 0.5]}
WANTED = ["72", None, "-5", "0.5"]


def of_files(frame, folder):
    """The same table in each form that a source reads."""
    frame.to_json(folder / "a.jsonl", orient="records", lines=True)
    frame.to_csv(folder / "a.csv", index=False)
    frame.to_csv(folder / "a.tsv", index=False, sep="\t")
    frame.to_parquet(folder / "a.parquet")
    set_of = datasets.Dataset.from_pandas(frame)
    set_of.save_to_disk(folder / "set")
    skip = {"on_bad_prompt": "skip"}
    return {
        "jsonl": JsonlPrompts(str(folder / "a.jsonl"), **skip),
        "csv": CsvPrompts(str(folder / "a.csv"), **skip),
        "tsv": CsvPrompts(str(folder / "a.tsv"), **skip),
        "parquet": ParquetPrompts(str(folder / "a.parquet"), **skip),
        "folder": HuggingFacePrompts(str(folder / "set"), **skip),
        "dataset": InMemoryPrompts(set_of),
        "frame": InMemoryPrompts(frame.to_dict("records")),
        "pandas' csv": InMemoryPrompts(pandas.read_csv(folder / "a.csv").to_dict("records")),
    }


def answer_of(source, index):
    try:
        return source[index].answer
    except ValueError as error:  # sources of files refuse a prompt without the answer that they are told to read
        return None if "answer_field='answer': the field must hold text, a number" in str(error) else str(error)


def test_truth_has_one_spelling_through_all_loaders(tmp_path):
    frame = pandas.DataFrame({"prompt": ["a", "b"], "answer": [True, False]})
    found = {name: [one[n].answer for n in range(2)] for name, one in of_files(frame, tmp_path).items()}
    assert found == {name: ["True", "False"] for name in found}


@pytest.mark.parametrize("whole", [True, False], ids=["integers", "floats too"])
def test_one_table_has_the_same_answers_through_all_loaders(tmp_path, whole):
    number = 3 if whole else 4
    frame = pandas.DataFrame({name: values[:number] for name, values in TABLE.items()})
    assert frame["answer"].dtype == float  # what pandas makes of integers with a gap
    found = {name: [answer_of(one, n) for n in range(number)] for name, one in of_files(frame, tmp_path).items()}
    assert found == dict.fromkeys(found, WANTED[:number])


def test_a_whole_float_is_written_as_an_integer():
    given = [72.0, -5.0, 0.0, np.float32(3), np.float64(2**53), 0.5, 1e22, 7, True, "72.0"]
    assert [*map(field_text, given)] == [
        *("72", "-5", "0", "3", "9007199254740992", "0.5", "10000000000000000000000", "7", "True", "72.0")
    ]


def test_an_empty_cell_is_refused_at_the_start_with_its_line(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("prompt,answer\n1 + 1,2\nnothing,  \n")
    with pytest.raises(ValueError, match=r"line 3, answer_field='answer': the field must hold text, .*, not 'None'"):
        as_source(str(file), "data.prompts")
    assert as_source([{"prompt": "nothing", "answer": None}], "data.prompts")[0].answer is None


@pytest.mark.parametrize("text", ["72.0\nParis", "1.10\n2.0.0", "A\n72.0"])
def test_a_column_that_is_no_numbers_keeps_its_text(tmp_path, text):
    file = tmp_path / "a.csv"
    file.write_text("prompt,answer\n" + "".join(f"p,{one}\n" for one in text.split("\n")))
    source = as_source(str(file), "data.prompts")
    assert [source[n].answer for n in range(2)] == text.split("\n")


def test_grade_reads_a_table_as_a_run_does(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = pandas.DataFrame({"answer": [72, None], "completion": [72, None]})
    frame.to_parquet("a.parquet")
    frame.to_csv("a.csv", index=False)
    frame.to_json("a.jsonl", orient="records", lines=True)
    for name in ("a.parquet", "a.csv", "a.jsonl"):
        with pytest.raises(SystemExit):  # of the row without an answer
            main(["grade", name, "--reward", "exact_match", "--out", "rows.jsonl"])
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        assert [row["kind"] for row in rows] == ["right", "refused"]
    capsys.readouterr()
