"""Shows the rewards of a file of references and answers.

    lit-async-rl grade answers.jsonl                                   # MathVerify
    lit-async-rl grade answers.csv --reward my_rewards.short --only wrong
    lit-async-rl grade prompts.jsonl --reward exact_match              # no answers: each reference for itself

The file (.jsonl, .json, .csv, .tsv, .parquet) has one answer per record. A grader of this library also shows what it
has extracted from the answer, and why it has this score; so does a reward with a method `explain(prompt, completion)`
that returns score, extracted text and reason. The status is 1 if an answer cannot be graded, or a reference fails for
itself.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_async_rl.utils.checks import OneLineParser, check_range, meant
from lit_async_rl.utils.visible import visible

REFERENCES = ("answer", "reference", "gold", "ground_truth", "solution")
COMPLETIONS = ("completion", "response", "prediction", "output", "text")
KINDS = ("right", "partial", "wrong", "refused")
NARROWEST = 60  # columns of the table
WIDEST = 140
CELL_CHARS = 160


@dataclass(frozen=True, kw_only=True)
class Graded:
    """One answer with its grade.

    Attributes:
        record: number of its line or item, from 1.
        reference: reference answer; None without one.
        answer: completion that was graded.
        extracted: compared part of it; empty if the reward does not say.
        score: reward; None if it cannot be graded.
        kind: `right` (full marks), `partial`, `wrong` or `refused`.
        why: reason, or error.
    """

    record: int
    reference: str | None
    answer: str
    extracted: str
    score: float | None
    kind: str
    why: str


def main(args: Sequence[str] | None = None) -> None:
    """Command line of the grade command."""
    parser = OneLineParser("grade", __doc__)
    parser.add_argument("file", help="references and answers")
    parser.add_argument("--reward", default="MathVerify", help="dotted path, or a name of this library (%(default)s)")
    parser.add_argument("--reference", help=f"field of the reference (the first of {', '.join(REFERENCES)})")
    parser.add_argument("--completion", help=f"field of the answer (the first of {', '.join(COMPLETIONS)})")
    parser.add_argument("--only", choices=KINDS, help="show these only")
    parser.add_argument("--num", type=int, default=40, help="rows to show (%(default)s)")
    parser.add_argument("--out", help="also write all rows to this file, as JSON lines")
    given = parser.parse_args(args)
    try:
        check_range("", ">= 0", num=given.num)
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # a module of rewards beside the file; last, so that it hides nothing
        reward = load_reward(given.reward)
        records = read_records(given.file)
        reference, completion = _fields(records, given)
        rows = list(grade(reward, records, reference, completion=completion))
        if given.out is not None:
            lines = [json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows]
            Path(given.out).expanduser().write_text("".join(lines), encoding="utf-8", errors="replace")
    except (ValueError, ImportError, AttributeError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    show([row for row in rows if given.only in (None, row.kind)], given.num)
    counts = Counter(row.kind for row in rows)
    scores = [row.score for row in rows if row.score is not None]
    mean = f", mean score {sum(scores) / len(scores):.4g}" if scores else ""
    found = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind] or kind in ("right", "wrong"))
    about = "answers" if completion is not None else "references, each for itself"
    print(f"{len(rows)} {about}: {found}{mean}")
    if counts["refused"] or (completion is None and counts["right"] < len(rows)):
        sys.exit(1)


def load_reward(path: str) -> Any:
    """A reward by dotted path or name in `lit_async_rl`; a class is made without arguments.

    Raises:
        ValueError: there is none, or it needs arguments or is no reward.
    """
    import lit_async_rl
    from lit_async_rl.rewards.calls import check_reward
    from lit_async_rl.rewards.forms import as_reward_function

    module, _, name = path.rpartition(".")
    owner: Any = lit_async_rl
    if module:
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
                raise  # of something that the user's module imports
            raise ValueError(f"--reward {path}: there is no module {error.name}") from None
    if not hasattr(owner, name):
        raise ValueError(f"--reward {path}: {owner.__name__} has no {name}{meant(name, dir(owner))}")
    reward = getattr(owner, name)
    if isinstance(reward, type):
        missing = [
            parameter.name
            for parameter in inspect.signature(reward).parameters.values()
            if parameter.default is parameter.empty and parameter.kind not in (2, 4)
        ]
        if missing:
            raise ValueError(
                f"--reward {path} needs the arguments {', '.join(missing)}: write a module with "
                f"`reward = {name}(...)`, and pass --reward your_module.reward"
            )
        reward = reward()
    check_reward(reward, f"--reward {path}")
    return as_reward_function(reward)


def read_records(path: str) -> Mapping[int, Mapping[str, Any]]:
    """Records of a file by line or item, from 1.

    Raises:
        ValueError: the file is of another kind, is empty, or a record is bad.
        FileNotFoundError: there is no such file.
    """
    from lit_async_rl.prompts.records import csv_records, jsonl_records, parquet_records

    suffix = Path(path).suffix.lower()
    records: Mapping[int, Mapping[str, Any]]
    if suffix in (".jsonl", ".ndjson", ".json"):
        records = jsonl_records(path)
    elif suffix in (".csv", ".tsv"):
        records = csv_records(path, "," if suffix == ".csv" else "\t")
    elif suffix == ".parquet":
        rows = parquet_records(path)
        records = {number + 1: dict(rows[number]) for number in range(len(rows))}
    else:
        raise ValueError(f"{path} must end with .jsonl, .json, .csv, .tsv or .parquet")
    if not records:
        raise ValueError(f"{path} has no records")
    return records


def _fields(records: Mapping[int, Mapping[str, Any]], given: argparse.Namespace) -> tuple[str | None, str | None]:
    """Fields of reference and answer; None for one that no record has.

    Raises:
        ValueError: a field that was named is missing in all records, or there is neither.
    """
    known = dict.fromkeys(name for record in records.values() for name in record)
    found: list[str | None] = []
    for option, usual in (("reference", REFERENCES), ("completion", COMPLETIONS)):
        name = getattr(given, option)
        if name is not None and name not in known:
            raise ValueError(f"--{option} {name}: {given.file} has {', '.join(map(str, known))}")
        found.append(name or next((one for one in usual if one in known), None))
    if found == [None, None]:
        raise ValueError(
            f"the file {given.file} has the fields {', '.join(map(str, known))}: use --reference and --completion to "
            "name the fields with the reference answers and the completions"
        )
    return found[0], found[1]


def grade(
    reward: Any,
    records: Mapping[int, Mapping[str, Any]],
    reference: str | None,
    completion: str | None,
) -> Iterator[Graded]:
    """Grades each record.

    Args:
        reward: of the form `reward(prompt, completion)`.
        records: by number.
        reference: field of the reference answer.
        completion: field of the answer; None grades each reference for itself. A record without the field is refused.

    Raises:
        ValueError: there are no answers, and the reward does not define a correct answer.
    """
    from lit_async_rl.problem import Prompt
    from lit_async_rl.prompts.records import NUMBERS, answer_fields, field_text
    from lit_async_rl.rewards.combined import name_answers
    from lit_async_rl.rewards.references import references_of
    from lit_async_rl.utils.plain import is_missing

    name_answers(reward, reference)
    references = references_of(reward)
    if completion is None and references is None:
        raise ValueError(
            "there is nothing to grade: the file has no completions (name their field with --completion), and the "
            "reward does not say which answer is correct, so the reference answers cannot be graded either"
        )
    full_marks = 1.0 if references is None else references.full_marks
    for number, record in records.items():
        try:
            if completion is not None and completion not in record:
                raise ValueError(f"there is no field {completion} here, unlike in other records")
            value = None if reference is None else record.get(reference)
            is_empty_cell = isinstance(value, str) and not value.strip()
            answers = {} if is_missing(value) or is_empty_cell else answer_fields(value)
            others = {name: one for name, one in record.items() if name not in (reference, completion, "prompt")}
            prompt = Prompt(text=str(record.get("prompt") or ""), metadata=others, **answers)
            if completion is not None:
                given = "" if is_missing(record.get(completion)) else record[completion]
                answer = field_text(given) if isinstance(given, NUMBERS) else str(given)
            else:
                answer = str(references.completion(prompt) or "") if references is not None else ""
        except ValueError as error:
            yield Graded(
                record=number, reference=None, answer="", extracted="", score=None, kind="refused", why=str(error)
            )
            continue
        yield _graded(reward, prompt, answer, number=number, full_marks=full_marks)


def _graded(reward: Any, prompt: Any, answer: str, *, number: int, full_marks: float) -> Graded:
    from lit_async_rl.errors import RewardError, describe
    from lit_async_rl.rewards.calls import score
    from lit_async_rl.utils.checks import as_reward

    extracted = why = ""
    value: float | None
    try:
        explain = getattr(reward, "explain", None)
        if explain is None:
            value = score(reward, prompt, answer)
        else:
            value, extracted, why = explain(prompt, answer)
            value = as_reward(value)
    except RewardError as error:
        value = None
        why = describe(error.__cause__ if isinstance(error.__cause__, Exception) else error)
    except Exception as error:  # of a user's `explain`
        value = None
        why = describe(error)
    if value is None:
        kind = "refused"
    elif value >= full_marks:
        kind = "right"
    else:
        kind = "partial" if value > 0 else "wrong"
    return Graded(
        record=number,
        reference=prompt.answer,
        answer=answer,
        extracted=str(extracted),
        score=value,
        kind=kind,
        why=str(why),
    )


# -- On the screen ----------------------------------------------------------------------------------------------------


def show(rows: Sequence[Graded], num: int) -> None:
    """Prints a table of the first rows, as wide as the terminal, but 60 to 140 columns; 80 without one."""
    from rich.console import Console
    from rich.table import Table

    if not rows or not num:
        return
    screen = Console()
    width = min(WIDEST, max(NARROWEST, screen.width)) if screen.is_terminal else 80
    table = Table(pad_edge=False, expand=True)
    shares = {"line": 0, "reference": 3, "answer": 4, "extracted": 3, "score": 0, "why": 4}
    for name, share in shares.items():
        table.add_column(name, ratio=share or None, no_wrap=not share, overflow="fold", justify="left")
    for row in rows[:num]:
        score = "-" if row.score is None else f"{row.score:.3g}"
        cells = [str(row.record), row.reference or "", row.answer, row.extracted, score, row.why]
        table.add_row(*map(printable, cells))
    Console(width=width).print(table)
    if len(rows) > num:
        print(f"... and {len(rows) - num} more rows (--num {len(rows)})")


def printable(text: str) -> Any:
    """Text for a cell: its end if it is long, without control characters."""
    from rich.text import Text

    if len(text) > CELL_CHARS:
        text = f"...{text[-CELL_CHARS:]}"
    return Text(visible(" ".join(text.split())))
