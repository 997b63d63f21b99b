"""`lit-async-rl grade`: what a reward makes of references and answers, on a screen of 80 columns."""

import json
import signal

import pytest

from lit_async_rl.cli.console import main

ROWS = [
    {"answer": "18 dollars", "completion": r"so \boxed{18 \text{ cents}}"},
    {"answer": "18 dollars", "completion": r"so \boxed{1800 \text{ cents}}"},
    {"answer": "1/2", "completion": "\x1b[31m\\boxed{0.5}\x1b[0m [bold]x[/bold] \u202e"},
    {"answer": "Paris", "completion": "The answer is London."},
]
OWN = '''
import asyncio
import os
import signal
import time


def length(prompt, completion):
    """Half a point for each of two characters."""
    return min(1.0, len(completion) / 2)


def broken(prompt, completion):
    return 1 / len(completion)


async def slow(prompt, completion):
    await asyncio.sleep(0)
    return prompt.metadata["worth"]


class Explained:
    def __call__(self, prompt, completion):
        return self.explain(prompt, completion)[0]

    def explain(self, prompt, completion):
        return float(completion == "b"), completion.upper(), "because"


def stopped(prompt, completion):
    os.kill(os.getpid(), signal.SIGINT)  # as a terminal does
    time.sleep(1)
    return 0.0


def batch(completions, answer, **kwargs):
    return [float(one == other) for one, other in zip(completions, answer)]


def columns(completions, reference, **kwargs):
    return batch(completions, reference)


class Needs:
    def __init__(self, word):
        self.word = word
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grade_rewards.py").write_text(OWN)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "ab.csv").write_text("reference,response,worth\nb,a,0.5\nb,b,1\nb,,0\n")
    return tmp_path


def grade(capsys, *words):
    """Status, lines, and the end of the error."""
    status = 0
    try:
        main(["grade", *words])
    except SystemExit as end:
        status = end.code
    return status, capsys.readouterr().out.splitlines()


def test_each_answer_is_shown_with_what_was_extracted_and_why(folder, capsys):
    status, lines = grade(capsys, "rows.jsonl", "--out", "graded.jsonl")
    text = "\n".join(lines)
    assert status == 0
    assert lines[-1] == "4 answers: 2 right, 2 wrong, mean score 0.5"
    assert max(map(len, lines)) <= 80
    assert "18 cents" in text
    assert "[bold]x" in text, "markup of a completion is shown as it is"
    assert not {"\x1b", "\u202e"} & set(text), "nothing of a completion reaches the terminal as a command"
    rows = list(map(json.loads, (folder / "graded.jsonl").read_text().splitlines()))
    assert [row["kind"] for row in rows] == ["wrong", "right", "right", "wrong"]
    assert rows[0]["why"] == "not equal: cents and dollars"
    assert rows[2]["answer"] == ROWS[2]["completion"]


def test_only_one_kind_is_shown(folder, capsys):
    _, lines = grade(capsys, "rows.jsonl", "--only", "wrong", "--num", "1")
    assert "London" not in "\n".join(lines)
    assert lines[-2:] == ["... and 1 more rows (--num 2)", "4 answers: 2 right, 2 wrong, mean score 0.5"]


@pytest.mark.parametrize(
    ("reward", "last", "status"),
    [
        ("exact_match", "3 answers: 1 right, 2 wrong, mean score 0.3333", 0),
        ("lit_async_rl.exact_match", "3 answers: 1 right, 2 wrong, mean score 0.3333", 0),
        ("grade_rewards.length", "3 answers: 0 right, 2 partial, 1 wrong, mean score 0.3333", 0),
        ("grade_rewards.broken", "3 answers: 2 right, 0 wrong, 1 refused, mean score 1", 1),
        ("grade_rewards.slow", "3 answers: 0 right, 0 wrong, 3 refused", 1),
        ("grade_rewards.Explained", "3 answers: 1 right, 2 wrong, mean score 0.3333", 0),
        ("grade_rewards.batch", "3 answers: 1 right, 2 wrong, mean score 0.3333", 0),
        ("grade_rewards.columns", "3 answers: 1 right, 2 wrong, mean score 0.3333", 0),
    ],
)
def test_a_reward_of_ones_own_in_any_form(reward, last, status, folder, capsys):
    found, lines = grade(capsys, "ab.csv", "--reward", reward)
    assert (found, lines[-1]) == (status, last)


def test_ctrl_c_ends_with_its_status_and_nothing_is_printed(folder, capsys):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    try:
        assert grade(capsys, "ab.csv", "--reward", "grade_rewards.stopped") == (130, [])
    finally:
        signal.signal(signal.SIGINT, before)


def test_references_are_graded_for_themselves_where_there_are_no_answers(folder, capsys):
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "?", "answer": "x y"}\n')
    status, lines = grade(capsys, "prompts.jsonl", "--reward", "last_number")
    assert status == 1
    assert lines[-1] == "2 references, each for itself: 1 right, 0 wrong, 1 refused, mean score 1"
    assert grade(capsys, "prompts.jsonl", "--reward", "exact_match")[0] == 0


@pytest.mark.parametrize(
    ("records", "last"),
    [
        (
            [{"answer": "4"}, {"answer": "5", "completion": "7"}, {"answer": "6", "completion": "6"}],
            "3 answers: 1 right, 1 wrong, 1 refused, mean score 0.5",
        ),
        (
            [{"completion": "4", "solution": "4"}, {"completion": "5", "solution": "x", "answer": "5"}],
            "2 answers: 1 right, 0 wrong, 1 refused, mean score 1",
        ),
        ([{"completion": None, "answer": "4"}, {"answer": "4", "completion": "4"}], "2 answers: 1 right, 1 wrong"),
    ],
)
def test_no_record_decides_for_the_others_which_fields_there_are(records, last, folder, capsys):
    (folder / "some.jsonl").write_text("\n".join(map(json.dumps, records)))
    _, lines = grade(capsys, "some.jsonl", "--reward", "exact_match")
    assert lines[-1].startswith(last)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no.jsonl"], "no.jsonl"),
        (["rows.txt"], "rows.txt must end with .jsonl, .json, .csv, .tsv or .parquet"),
        (["empty.jsonl"], "empty.jsonl has no records"),
        (["bad.jsonl"], "bad.jsonl, line 1 is not valid JSON"),
        (["odd.jsonl"], "odd.jsonl has the fields a, b: use --reference and --completion"),
        (["rows.jsonl", "--completion", "respons"], "--completion respons: rows.jsonl has answer, completion"),
        (["rows.jsonl", "--reward", "exact_mach"], "lit_async_rl has no exact_mach; did you mean exact_match?"),
        (["rows.jsonl", "--reward", "nowhere.f"], "there is no module nowhere"),
        (["rows.jsonl", "--reward", "grade_rewards.lenth"], "grade_rewards has no lenth; did you mean length?"),
        (
            ["rows.jsonl", "--reward", "grade_rewards.Needs"],
            "needs the arguments word: write a module with `reward = Needs(...)`",
        ),
        (["rows.jsonl", "--reward", "grade_rewards.asyncio"], "must be a function"),
        (["rows.jsonl", "--num", "-1"], "num must be >= 0, got -1"),
        (["prompts.jsonl", "--reward", "grade_rewards.length"], "the reward does not say which answer is correct"),
        (["rows.jsonl", "--out", "nowhere/x.jsonl"], "nowhere/x.jsonl"),
    ],
)
def test_misuse_is_one_line(words, message, folder, capsys):
    (folder / "empty.jsonl").write_text("")
    (folder / "bad.jsonl").write_text("{")
    (folder / "odd.jsonl").write_text('{"a": 1, "b": 2}')
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    status, _ = grade(capsys, *words)
    assert isinstance(status, str)
    assert status.startswith("error: ")
    assert message in status
    assert "\n" not in status
