"""Records of supervised fine-tuning as prompts with the text to learn.

| a record has | the model learns |
|---|---|
| `messages` (and `tools`, `chat_template_kwargs`) | what the assistant says |
| `prompt` and `completion` (or `answer`), each a text or messages | the completion |
| `segments`: a list of `{"text": ..., "train": true}` | the texts that train, written without a chat template |
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.records import Records, csv_records, field_text, jsonl_records, load_dataset, parquet_records
from lit_async_rl.prompts.sources import (
    WANTED,
    CsvPrompts,
    HuggingFacePrompts,
    ParquetPrompts,
    PromptSource,
    source_class,
)
from lit_async_rl.utils.plain import as_lists, is_missing

SEGMENTS = "segments"
FORMS = "messages, prompt and completion, or segments"
FIELDS = frozenset({"messages", "prompt", "completion", "answer", SEGMENTS})


class Demonstrations(PromptSource):
    """Records of supervised fine-tuning, by their keys, see the table of this module.

    Args:
        records: list of dictionaries, `datasets.Dataset`, or dictionaries by line number.
        origin: name of the records in messages.

    Raises:
        ValueError: there are none.
    """

    def __init__(self, records: Records | Mapping[int, Any], origin: str) -> None:
        self._lines = list(records) if isinstance(records, Mapping) else None
        self._records = list(records.values()) if isinstance(records, Mapping) else records
        self._origin = origin
        if len(records) == 0:
            raise ValueError(f"{origin} holds no records")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        record = self._records[index]
        if isinstance(record, Prompt):
            return record
        if not isinstance(record, Mapping):
            raise ValueError(f"{self.where(index)}: a record must be a dictionary, got {str(record)[:80]!r}")
        try:
            given = {name: value for name, value in record.items() if not is_missing(value)}
            return _as_prompt(given | {name: as_lists(given[name]) for name in FIELDS & given.keys()})
        except ValueError as error:
            raise ValueError(f"{self.where(index)}: {error}") from error

    def where(self, index: int) -> str:
        """File and line of a record, or its index."""
        return f"{self._origin}[{index}]" if self._lines is None else f"{self._origin}, line {self._lines[index]}"


def _as_prompt(record: Mapping[str, Any]) -> Prompt:
    others = {name: value for name, value in record.items() if name not in FIELDS}
    prompt = record.get("prompt")
    completion = record.get("completion", record.get("answer"))
    if "messages" in record:
        return Prompt(messages=record["messages"], metadata=others)
    if SEGMENTS in record:
        return Prompt(text="", metadata=others | {SEGMENTS: _checked_segments(record[SEGMENTS])})
    if prompt is None or completion is None:
        keys = ", ".join(sorted(map(str, record))) or "none"
        raise ValueError(f"a record must have {FORMS}, got the keys {keys}")
    if _is_list(completion):
        before = prompt if _is_list(prompt) else [{"role": "user", "content": field_text(prompt)}]
        return Prompt(messages=[*before, *completion], metadata=others)
    try:
        text = field_text(completion)
    except ValueError as error:
        raise ValueError(f"the completion must be text or messages, not {error}") from None
    if _is_list(prompt):
        return Prompt(messages=prompt, answer=text, metadata=others)
    return Prompt(text=field_text(prompt), answer=text, metadata=others)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _checked_segments(segments: Any) -> list[tuple[str, bool]]:
    wanted = 'segments must be a list of {"text": ..., "train": true or false}'
    if not _is_list(segments):
        raise ValueError(f"{wanted}, got {str(segments)[:80]!r}")
    for segment in segments:
        is_mapping = isinstance(segment, Mapping)
        if not (is_mapping and isinstance(segment.get("text"), str) and isinstance(segment.get("train"), bool)):
            raise ValueError(f"{wanted}, got {str(segment)[:80]!r}")
    return [(segment["text"], segment["train"]) for segment in segments]


class RecordFile(Demonstrations):
    """Records of a file (`.jsonl`, `.json`, `.parquet`, `.csv`) or of a hub dataset, split `train`.

    Args:
        path: of the file, or name of the dataset.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read.
    """

    def __init__(self, path: str) -> None:
        path = os.path.expanduser(path)
        super().__init__(_read(path), path)


def as_demonstrations(records: Any, setting: str) -> PromptSource:
    """Records in any form as a source: a source itself, the name of a file or data set, a list, a `datasets.Dataset`.

    A source's prompts that have an answer are learned with it. `setting` is the argument's name, for messages.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: they are of another type, or the file cannot be read.
    """
    if isinstance(records, PromptSource):
        return records
    if isinstance(records, str | os.PathLike):
        try:
            return RecordFile(os.fspath(records))
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"{setting}: {error}") from None
    if records is None:
        raise ValueError(f"{setting} is not set")
    if isinstance(records, Mapping) or not isinstance(records, Records):
        raise ValueError(f"{setting} must be {WANTED}, got {type(records).__name__}")
    return Demonstrations(records, setting)


def _read(name: str) -> Records | Mapping[int, Any]:
    kind = source_class(name)
    if kind is None:
        raise ValueError(f"{name!r} must be the name of a file (.jsonl, .json, .parquet, .csv) or of a dataset")
    if kind is HuggingFacePrompts:
        return load_dataset(name, None, "train")
    if kind is ParquetPrompts:
        return parquet_records(name)
    return csv_records(name, "\t" if name.endswith(".tsv") else ",") if kind is CsvPrompts else jsonl_records(name)
