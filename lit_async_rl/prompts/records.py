"""Records of files and data sets, by line or row, and their fields as texts, answers and templates of prompts."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from lit_async_rl.utils.plain import as_lists

if TYPE_CHECKING:
    import pyarrow


PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")  # a literal {{name}}, or {name}
MAX_CELL_CHARS = 2**31 - 1  # of a CSV file; more do not fit in a C long on Windows
NUMBERS = (int, float, Decimal, np.integer, np.floating, np.bool_)


@runtime_checkable
class Records(Protocol):
    """Protocol of indexable records, such as a list or a Hugging Face dataset (which is not a `Sequence`)."""

    def __len__(self) -> int:
        """Number of records."""

    def __getitem__(self, index: int, /) -> Any:
        """Record `index`, a mapping."""


def field_text(value: Any) -> str:
    """A string or number of a record as text; floats have no exponent, and whole ones no fraction.

    A table turns integers into floats in a column with a gap: 72.0 is written `72`, as without gaps.

    Raises:
        ValueError: the value is of another type, missing (None, NaN, pandas' NA), or infinite.
    """
    if isinstance(value, str):
        return str(value)
    if not isinstance(value, NUMBERS):
        raise ValueError(repr(str(value)[:80]))
    if not math.isfinite(value):
        raise ValueError(f"{value}, which is not finite")
    text = str(value).removesuffix("" if isinstance(value, Decimal) else ".0")
    has_exponent = "e" in text.lower() and not isinstance(value, bool | np.bool_)
    return np.format_float_positional(float(value), trim="-") if has_exponent else text


def answer_fields(value: Any) -> dict[str, Any]:
    """Arguments of a `Prompt` for the answer of a record: a string, a number, or a list of accepted ones.

    Raises:
        ValueError: the value is of another type, or an empty list.
    """
    is_list = isinstance(value, list | tuple | np.ndarray)
    if is_list and len(value) == 0:
        raise ValueError("an empty list")
    answer, *others = map(field_text, value if is_list else [value])
    plain = value.tolist() if isinstance(value, np.ndarray | np.generic) else value  # types that any checkpoint holds
    plain = float(plain) if isinstance(plain, Decimal) else plain
    return {"answer": answer, "other_answers": tuple(others), "answer_value": plain}


def fill_template(template: str, prompt: str, others: Mapping[str, Any], hidden: str | None) -> str:
    """Fills the placeholders of a template: `{prompt}`, and fields of the record by name; `{{name}}` is `{name}`.

    Args:
        template: text with placeholders.
        prompt: text of `{prompt}`.
        others: fields of the record.
        hidden: field of the reference answer, which must not appear in a prompt.

    Raises:
        ValueError: a placeholder names the reference answer, an unknown field, or one that is no text, texts or number.
    """

    def value(match: re.Match[str]) -> str:
        literal, name = match.groups()
        if literal is not None:
            return f"{{{literal}}}"
        if name == "prompt":
            return prompt
        if name == hidden:
            raise ValueError(
                f"template={template!r}: {{{name}}} is the reference answer, which would then appear in the prompt; "
                f"for the literal text {{{name}}}, write {{{{{name}}}}}"
            )
        if name not in others:
            known = ", ".join(["prompt", *sorted(str(field) for field in others if field not in ("prompt", hidden))])
            raise ValueError(
                f"template={template!r}: there is no field {{{name}}}, only {known}; for the literal text {{{name}}}, "
                f"write {{{{{name}}}}}"
            )
        found = as_lists(others[name])
        if isinstance(found, list) and found and all(isinstance(one, str) for one in found):
            return "\n".join(found)  # such as the tests of a problem
        try:
            return field_text(found)
        except ValueError as error:
            raise ValueError(f"template={template!r}: {{{name}}} must be text or a number, not {error}") from None

    return PLACEHOLDER.sub(value, template)


def check_template(template: str) -> None:
    """Checks that a template has the placeholder `{prompt}`.

    Raises:
        ValueError: the placeholder is missing.
    """
    if "{prompt}" not in template:
        raise ValueError(f"template must contain {{prompt}}, got {template!r}")


def jsonl_records(path: str) -> dict[int, Mapping[str, Any]]:
    """Reads JSON objects by line number, from 1, skipping empty lines; those of an array by item number.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line or an item is not a JSON object.
    """
    file = _existing_file(path)
    data = file.read_bytes()
    if data[:2] in UTF_16:
        raise ValueError(f"{file} is UTF-16: save it as UTF-8")
    if (array := _as_array(data)) is not None:
        for number, record in enumerate(array, start=1):
            if not isinstance(record, dict):
                raise ValueError(f"{file}, item {number} of the array is not a JSON object: {str(record)[:80]!r}")
        return dict(enumerate(array, start=1))
    records: dict[int, Mapping[str, Any]] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if b"\\u" in line:
                json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{file}, line {number} holds half of a character (a lone surrogate such as \\ud800)"
            ) from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}, line {number} {_not_utf8(error)}") from None
        except RecursionError:
            raise ValueError(f"{file}, line {number} is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"{file}, line {number} is not valid JSON: {error}{_about_lines(data)}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{file}, line {number} is not a JSON object: {line[:80]!r}")
        records[number] = record
    return records


UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # byte order marks


def _as_array(data: bytes) -> list[Any] | None:
    """The items of a file that consists of one JSON array; None for other files, such as one array per line."""
    if not data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return None
    try:
        items = json.loads(data)
    except (ValueError, RecursionError):  # reading the lines one by one will name the line in error
        return None
    return items if isinstance(items, list) and not all(isinstance(item, str) for item in items) else None


def _about_lines(data: bytes) -> str:
    """Hint for a file that consists of a single JSON object; empty for other files."""
    try:
        is_object = isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return ""
    return "; the file is a single object: write one object per line, or a list of them" if is_object else ""


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"is not UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start}): save the file as UTF-8"


def csv_records(path: str, delimiter: str) -> dict[int, Mapping[str, Any]]:
    """Reads the rows of a CSV file by line number. The first row names the fields; all values are strings.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row has more or fewer values than the first, the first has a name twice, or the file is not UTF-8
            or not valid CSV.
    """
    file = _existing_file(path)
    records: dict[int, Mapping[str, Any]] = {}
    line = 1
    csv.field_size_limit(MAX_CELL_CHARS)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:  # spreadsheet programs write a byte order mark
            rows = csv.reader(lines, delimiter=delimiter, strict=True)
            names = next(rows, [])
            if repeated := [name for name, number in Counter(names).items() if name and number > 1]:
                raise ValueError(f"{file}, line 1 has the column {repeated[0]!r} more than once: rename or remove one")
            for row in rows:
                line = rows.line_num
                if row and len(row) != len(names):
                    raise ValueError(
                        f"{file}, line {line} has {len(row)} values, but the first line has {len(names)} names"
                    )
                if row:
                    records[line] = dict(zip(names, row, strict=True))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} {_not_utf8(error)}") from None
    except csv.Error as error:
        raise ValueError(f"{file} is not valid CSV after line {line}: {error}") from None
    return records


def parquet_records(path: str) -> Records:
    """Reads a Parquet file into memory, as the rows of an Arrow table.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a Parquet file.
    """
    import pyarrow
    import pyarrow.parquet

    file = _existing_file(path)
    try:
        return _Rows(pyarrow.parquet.read_table(file, memory_map=True))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"path={path!r} is not a Parquet file: {error}") from error


def load_dataset(path: str, name: str | None, split: str) -> Records:
    """Loads a split of a Hugging Face dataset, from the hub or a folder; it stays on disk.

    Raises:
        FileNotFoundError: the dataset cannot be found or reached.
        ModuleNotFoundError: `datasets` is not installed.
        ValueError: there is no such configuration or split.
    """
    try:
        import datasets
    except ImportError:
        raise ModuleNotFoundError('HuggingFacePrompts needs: pip install "lit-async-rl[data]"') from None
    folder = Path(path).expanduser()
    if not folder.is_dir():
        from lit_async_rl.models.hub import (
            go_offline_if_unreachable,  # imports torch, which reading files does not need
        )

        go_offline_if_unreachable()
    where = f"HuggingFacePrompts: path={path!r}, name={name!r}, split={split!r}"
    try:
        if (folder / "state.json").is_file():  # a single split written by `save_to_disk`
            return datasets.load_from_disk(folder)
        return datasets.load_dataset(str(folder) if folder.is_dir() else path, name, split=split)
    except OSError as error:  # includes errors of the hub
        raise FileNotFoundError(f"{where}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


class _Rows:
    """An Arrow table, row by row."""

    def __init__(self, table: pyarrow.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._table.slice(index, 1).to_pylist()[0]


def _existing_file(path: str) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"path={path!r} is not a file (working directory {Path.cwd()})")
    return file
