"""Records of prompt sources: JSON lines, Parquet files, Hugging Face datasets."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import pyarrow

PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")  # a literal {{name}}, or {name}
NUMBERS = (int, float, Decimal, np.integer, np.floating, np.bool_)


@runtime_checkable
class Records(Protocol):
    """Protocol of indexable records, such as a list or a Hugging Face dataset (which is not a `Sequence`)."""

    def __len__(self) -> int:
        """Number of records."""

    def __getitem__(self, index: int, /) -> Any:
        """Record `index`, a mapping."""


def field_text(value: Any) -> str:
    """A text or number of a record as text: whole, without the exponent of small and large floats.

    Raises:
        ValueError: it is neither, is missing (None, NaN, pandas' NA), or is infinite.
    """
    if isinstance(value, str):
        return str(value)
    if not isinstance(value, NUMBERS):
        raise ValueError(repr(str(value)[:80]))
    if not math.isfinite(value):
        raise ValueError(f"{value}, which is not finite")
    text = str(value)
    return text if "e" not in text.lower() else np.format_float_positional(float(value), trim="-")


def fill_template(template: str, prompt: str, others: Mapping[str, Any], hidden: str | None) -> str:
    """Fills the fields of a prompt's template: `{prompt}`, and others of the record by name; `{{name}}` is `{name}`.

    Args:
        template: with placeholders.
        prompt: text of `{prompt}`.
        others: fields of the record.
        hidden: field of the reference answer, which no prompt may hold.

    Raises:
        ValueError: a placeholder names the reference answer, no field, or one without text or number.
    """

    def value(match: re.Match[str]) -> str:
        literal, name = match.groups()
        if literal is not None:
            return f"{{{literal}}}"
        if name == "prompt":
            return prompt
        if name == hidden:
            raise ValueError(
                f"template={template!r}: {{{name}}} is the reference answer, which would stand in the prompt; "
                f"{{{{{name}}}}} is the literal text {{{name}}}"
            )
        if name not in others:
            known = ", ".join(["prompt", *sorted(str(field) for field in others if field not in ("prompt", hidden))])
            raise ValueError(
                f"template={template!r}: there is no field {{{name}}}, only {known}; "
                f"{{{{{name}}}}} is the literal text {{{name}}}"
            )
        try:
            return field_text(others[name])
        except ValueError as error:
            raise ValueError(f"template={template!r}: {{{name}}} must be text or a number, not {error}") from None

    return PLACEHOLDER.sub(value, template)


def jsonl_records(path: str) -> dict[int, Mapping[str, Any]]:
    """Reads JSON objects by line number, from 1; empty lines are skipped.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a JSON object.
    """
    file = _existing_file(path)
    records: dict[int, Mapping[str, Any]] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if b"\\u" in line:
                json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(f"{file}, line {number} holds half of a character (a lone surrogate, \\ud800)") from None
        except RecursionError:
            raise ValueError(f"{file}, line {number} is nested too deeply") from None
        except ValueError as error:  # no JSON, or no UTF-8
            raise ValueError(f"{file}, line {number} is not valid JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{file}, line {number} is not a JSON object: {line[:80]!r}")
        records[number] = record
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
    where = f"HuggingFacePrompts: path={path!r}, name={name!r}, split={split!r}"
    try:
        if (folder / "state.json").is_file():  # one split, whatever its name
            return datasets.load_from_disk(folder)
        return datasets.load_dataset(str(folder) if folder.is_dir() else path, name, split=split)
    except OSError as error:  # what the hub and the file system raise
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
