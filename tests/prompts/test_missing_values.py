"""Answers and fields of records: missing values, numbers written whole, and the fields of templates."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lit_async_rl import InMemoryPrompts, JsonlPrompts

RECORD = {"prompt": "q", "answer": "1", "hint": "h", "level": 3}


@pytest.mark.parametrize("missing", [None, float("nan"), np.float32("nan"), pd.NA, pd.NaT], ids=repr)
def test_a_missing_answer_is_none(missing: object) -> None:
    assert InMemoryPrompts([{"prompt": "q", "answer": missing}])[0].answer is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("nan", "nan"),
        (1e-05, "0.00001"),
        (1e22, "10000000000000000000000"),
        (0.5, "0.5"),
        (7, "7"),
        (np.int64(7), "7"),
        (np.float32(0.1), "0.1"),
        (Decimal("0.10"), "0.10"),
        (np.str_("x"), "x"),
    ],
)
def test_an_answer_is_written_whole(value: object, text: str) -> None:
    assert InMemoryPrompts([{"prompt": "q", "answer": value}])[0].answer == text


def test_a_data_frame_with_gaps() -> None:
    frame = pd.DataFrame({"prompt": ["a", "b"], "answer": ["1", None], "messages": [None, None]})
    frame.loc[1, "answer"] = float("nan")
    found = InMemoryPrompts(frame.to_dict("records"))
    assert [found[n].answer for n in range(2)] == ["1", None]


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), np.float64("inf")])
def test_an_infinite_answer_is_refused(value: float) -> None:
    with pytest.raises(
        ValueError, match=r"\['answer'\] must be a string, a number or a list of them, got -?inf, which is not finite"
    ):
        InMemoryPrompts([{"prompt": "q", "answer": value}])


@pytest.mark.parametrize("literal", ["NaN", "Infinity"])
def test_json_that_is_no_json_is_refused_with_its_line(tmp_path: Path, literal: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a", "answer": "1"}}\n{{"prompt": "a", "answer": {literal}}}\n')
    with pytest.raises(
        ValueError, match=r"line 2, answer_field='answer': the field must hold .*, not (nan|inf), which is not"
    ):
        JsonlPrompts(str(file))


def source(tmp_path: Path, template: str) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(RECORD))
    return JsonlPrompts(str(file), template=template)[0].text


def test_a_template_is_filled_with_the_fields_of_the_record(tmp_path: Path) -> None:
    template = r"Q: {prompt} Hint: {hint} ({level}) in \boxed{} as {{answer}} or {1}"
    assert source(tmp_path, template) == r"Q: q Hint: h (3) in \boxed{} as {answer} or {1}"


def test_an_unknown_field_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 1: template=.*there is no field \{hnt\}, only prompt, hint, level; "):
        source(tmp_path, "Q: {prompt} {hnt}")


def test_the_reference_answer_is_never_put_into_a_prompt(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"\{answer\} is the reference answer, which would then appear in the prompt; "
    ):
        source(tmp_path, r"{prompt} Write \boxed{answer}")
