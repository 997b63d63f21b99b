"""Prompts that are named by one text (a file, a data set), several accepted answers, and arguments of templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger

from lit_async_rl import FromTape, PolicyModule, RolloutDataModule, Trainer, asset
from lit_async_rl.cli.config_checks import expand_home_folders, name_prompt_classes, write_out_flags
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import (
    CsvPrompts,
    HuggingFacePrompts,
    InMemoryPrompts,
    JsonlPrompts,
    ParquetPrompts,
    as_source,
    source_class,
)
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rewards.calls import score
from lit_async_rl.rewards.functions import exact_match, last_number, share_correct
from lit_async_rl.utils.checks import with_home
from lit_async_rl.utils.config_files import own_settings
from lit_async_rl.utils.identity import reward_identity

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
WANTED = [Prompt(text=row["prompt"], answer=row["answer"]) for row in ROWS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
FILES = {
    "a.jsonl": LINES.encode(),
    "windows.jsonl": b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n").encode(),
    "array.json": json.dumps(ROWS, indent=1).encode(),
    "lines.json": LINES.encode(),
    "a.csv": b"prompt,answer\n1+1=,2\n2+2=,4\n",
    "excel.csv": b'\xef\xbb\xbf"prompt","answer"\r\n"1+1=","2"\r\n\r\n"2+2=","4"\r\n',
    "a.tsv": b"prompt\tanswer\n1+1=\t2\n2+2=\t4\n",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_by_its_ending(name, tmp_path):
    (tmp_path / name).write_bytes(FILES[name])
    for given in (str(tmp_path / name), tmp_path / name):
        source = as_source(given, "data.prompts")
        assert [source[n] for n in range(len(source))] == WANTED


def test_a_parquet_file_and_a_folder_in_the_home(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    (tmp_path / "set").mkdir()
    pandas.DataFrame(ROWS).to_parquet(tmp_path / "set" / "train.parquet")
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("~/set/train.parquet", "~/set"):
        source = as_source(given, "data.prompts")
        assert [source[n] for n in range(len(source))] == WANTED


def test_names_of_classes_are_no_files_and_names_of_the_hub_are_data_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert source_class("openai/gsm8k") is HuggingFacePrompts
    assert source_class("nowhere/x.parquet") is ParquetPrompts
    for name in ("JsonlPrompts", "my_prompts.Squares", "lit_async_rl.JsonlPrompts", "a/b/c", "/a/b", "", "null"):
        assert source_class(name) is None


def test_a_cell_of_any_length_is_read(tmp_path):
    (tmp_path / "a.csv").write_text(f"prompt,answer,,\n{'1' * 200_000},2,,\n")
    assert len(as_source(str(tmp_path / "a.csv"), "data.prompts")[0].text) == 200_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"prompt,answer\n1+1=,2,3\n", "a.csv, line 2 has 3 values, but the first line has 2 names"),
        ("a.csv", b"prompt,answer\n1+1=\n", "a.csv, line 2 has 1 values, but the first line has 2 names"),
        ("a.csv", b'prompt,answer\n"1+1=,2\n', "a.csv is not valid CSV after line 1: unexpected end of data"),
        ("a.csv", b"prompt,answer\n\xe4,2\n", "a.csv is not UTF-8"),
        ("a.csv", b"question,answer\n1,2\n", r"line 2, prompt_field='prompt': there is no such field"),
        ("a.csv", b"prompt,answer,answer\n1,2,3\n", "a.csv, line 1 has the column 'answer' more than once"),
        ("a.csv", b"", "a.csv holds no prompts"),
        ("a.json", b'[{"prompt": "1", "answer": "1"}, 3]', "item 2 of the array is not a JSON object: '3'"),
        ("a.json", b'{\n"data": []\n}', "line 1 is not valid JSON: .*; the file is a single object"),
        ("a.json", "[]".encode("utf-16"), "a.json is UTF-16: save it as UTF-8"),
        ("a.parquet", b"no", "is not a Parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"(?s)data.prompts: .*{message}"):
        as_source(str(tmp_path / name), "data.prompts")


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"data.prompts: path='nowhere.csv' is not a file"):
        as_source("nowhere.csv", "data.prompts")
    with pytest.raises(ValueError, match=r"CsvPrompts.delimiter must be one character, got ', '"):
        CsvPrompts("nowhere.csv", delimiter=", ")


def test_words_and_configurations_get_the_class():
    words = ["--data.prompts", "a.jsonl", "--data.validation.prompts=b.csv", "--data.prompts.template", "{prompt}"]
    assert write_out_flags(words) == [
        *("--data.prompts", '{"class_path": "JsonlPrompts", "init_args": {"path": "a.jsonl"}}'),
        *("--data.validation.prompts", '{"class_path": "CsvPrompts", "init_args": {"path": "b.csv"}}'),
        *("--data.prompts.template", "{prompt}"),
    ]
    for left_alone in (["--data.prompts", "SortDigits"], ["--data.prompts"], ["--data.prompts.path", "a.jsonl"]):
        assert write_out_flags(left_alone) == left_alone
    text = "model: {model: a/b}\ndata:\n  prompts: a.jsonl\n  validation: {prompts: org/name, num_samples: 2}\n"
    assert yaml.safe_load(own_settings(text, name_prompt_classes)) == {
        "model": {"model": "a/b"},
        "data": {
            "prompts": {"class_path": "JsonlPrompts", "init_args": {"path": "a.jsonl"}},
            "validation": {
                "prompts": {"class_path": "HuggingFacePrompts", "init_args": {"path": "org/name"}},
                "num_samples": 2,
            },
        },
    }
    for untouched in ("data: {prompts: SortDigits}\n", "data: {prompts: {class_path: X}}\n", "data: 3\n", "{}"):
        assert own_settings(untouched, name_prompt_classes) == own_settings(untouched)


# -- several accepted answers -----------------------------------------------------------------------------------------


def test_each_accepted_answer_counts(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "2+2=", "answer": ["4", "four", 4.0]}))
    for source in (
        JsonlPrompts(str(tmp_path / "a.jsonl")),
        as_source([{"prompt": "2+2=", "answer": ("4", "four", 4.0)}], "p"),
    ):
        prompt = source[0]
        assert prompt.answer == "4"
        assert prompt.answers == ("4", "four", "4")
        assert [exact_match(prompt, text) for text in ("4", " four ", "4.0", "5")] == [1.0, 1.0, 0.0, 0.0]
        assert share_correct(prompt, "fous") == 0.75
    dozens = Prompt(text="x", answer="12", other_answers=("1 dozen",))
    assert [last_number(dozens, text) for text in ("it is 12", "just 1", "none")] == [1.0, 0.0, 0.0]
    numbers = Prompt(text="x", answer="12", other_answers=("1 box",))
    assert [last_number(numbers, text) for text in ("it is 12", "just 1", "none")] == [1.0, 1.0, 0.0]
    assert score(exact_match, prompt, "four") == 1.0
    assert reward_identity(exact_match) == "lit_async_rl.rewards.functions.exact_match"
    assert Prompt(text="x").answers == ()


# -- arguments of chat templates, and order ---------------------------------------------------------------------------


def test_arguments_of_the_chat_template_are_those_of_the_source_under_those_of_the_record(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b", "chat_template_kwargs": {"enable_thinking": True, "other": 1}}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kwargs = {"enable_thinking": False}
    file = JsonlPrompts(str(tmp_path / "a.jsonl"), answer_field=None, as_chat=True, chat_template_kwargs=kwargs)
    for source in (file, InMemoryPrompts(rows, as_chat=True, chat_template_kwargs=kwargs)):
        assert source[0].metadata == {"chat_template_kwargs": {"enable_thinking": False}}
        assert source[1].metadata == {"chat_template_kwargs": {"enable_thinking": True, "other": 1}}


def test_prompts_in_the_order_of_the_source():
    source = as_source([str(n) for n in range(5)], "p")
    stream = PromptStream(source, seed=3, shuffle=False)
    assert [stream.next().text for _ in range(12)] == [str(n % 5) for n in range(12)]
    resumed = PromptStream(source, seed=3, shuffle=False)
    resumed.load_state_dict(stream.state_dict())
    assert resumed.next().text == "2"


def test_a_nested_field_may_hold_messages(tmp_path):
    row = {"input": {"messages": [{"role": "user", "content": "2+2?"}]}, "gold": {"answers": ["4", "four"]}}
    Path(tmp_path / "a.jsonl").write_text(json.dumps(row))
    source = JsonlPrompts(str(tmp_path / "a.jsonl"), prompt_field="input.messages", answer_field="gold.answers")
    assert source[0].messages == ({"role": "user", "content": "2+2?"},)
    assert source[0].answers == ("4", "four")


# -- the home folder --------------------------------------------------------------------------------------------------


def test_paths_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert with_home("~/model") == with_home("--out=~/model").removeprefix("--out=") == f"{tmp_path}/model"
    for word in ("--out", "a~/b", "--data.prompts.template={prompt} ~/", "~nobody-of-this-name/x"):
        assert with_home(word) == word
    text = "model: {model: ~/m}\ndata: {prompts: ~/a.jsonl, sampling: {stop: [~/x]}}\nckpt_path: ~/last.ckpt\n"
    made = yaml.safe_load(own_settings(text, expand_home_folders, name_prompt_classes))
    assert made == {
        "model": {"model": f"{tmp_path}/m"},
        "data": {
            "prompts": {"class_path": "JsonlPrompts", "init_args": {"path": f"{tmp_path}/a.jsonl"}},
            "sampling": {"stop": ["~/x"]},
        },
        "ckpt_path": f"{tmp_path}/last.ckpt",
    }
    (tmp_path / "model").symlink_to(asset("small_sort_policy"))
    assert (
        PolicyModule("~/model").model == RolloutDataModule("~/model", ["a"], exact_match).model == f"{tmp_path}/model"
    )
    assert FromTape("~/tape").folder == f"{tmp_path}/tape"
    trainer = Trainer(max_steps=1, accelerator="cpu", logger=CSVLogger("~/runs"))
    assert trainer.log_dir == f"{tmp_path}/runs/lightning_logs/version_0"
