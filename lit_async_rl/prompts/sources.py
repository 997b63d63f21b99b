"""Finite prompt sources: JSON lines, Parquet files, Hugging Face datasets, and the base class of custom ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lit_async_rl.messages import checked_messages
from lit_async_rl.prompts.records import (
    Records,
    field_text,
    fill_template,
    jsonl_records,
    load_dataset,
    parquet_records,
)
from lit_async_rl.types import Prompt
from lit_async_rl.utils.checks import check_range

OnBadPrompt = Literal["error", "skip"]


class PromptSource(Records, ABC):
    """Finite, indexable set of prompts.

    Attributes:
        max_prompt_tokens: largest prompt length in tokens; None is the limit of the engine.
        on_bad_prompt: `error` raises at a bad prompt (too long, incomplete, refused by the chat template), before
            training or when the prompt is first used; `skip` skips such prompts and logs their number.
    """

    max_prompt_tokens: int | None = None
    on_bad_prompt: OnBadPrompt = "error"

    @abstractmethod
    def __len__(self) -> int:
        """Number of prompts."""

    @abstractmethod
    def __getitem__(self, index: int) -> Prompt:
        """Prompt `index`; deterministic."""

    def where(self, index: int) -> str:
        """Name of prompt `index` in messages, if possible with file and line."""
        return f"{type(self).__name__}, prompt {index}"


class RecordPrompts(PromptSource):
    """Prompts from records (mappings), converted on access, so that datasets stay on disk.

    Args:
        records: one mapping per prompt.
        prompt_field: field that holds the prompt: text, or a list of messages with `role` and `content`.
        answer_field: field that holds the reference answer; None if there is none.
        template: text around text prompts, with `{prompt}` and, by name, other fields; `{{name}}` is the text `{name}`.
        origin: name of the source in messages.
        max_prompt_tokens: largest prompt length in tokens, see `PromptSource`.
        on_bad_prompt: `error` or `skip`, see `PromptSource`.
        as_chat: turn text prompts into one user message, to which the chat template is applied.

    Raises:
        ValueError: there are no records, or the first one is bad and `on_bad_prompt` is `error`.
    """

    def __init__(
        self,
        records: Records,
        prompt_field: str,
        answer_field: str | None,
        template: str,
        origin: str,
        max_prompt_tokens: int | None = None,
        on_bad_prompt: OnBadPrompt = "error",
        as_chat: bool = False,
    ) -> None:
        check_template(template)
        check_range(type(self).__name__, "integer >= 1", max_prompt_tokens=max_prompt_tokens)
        if on_bad_prompt not in ("error", "skip"):
            raise ValueError(f"{type(self).__name__}.on_bad_prompt must be error or skip, got {on_bad_prompt!r}")
        self.prompt_field, self.answer_field, self.template, self.origin = prompt_field, answer_field, template, origin
        self.max_prompt_tokens, self.on_bad_prompt, self.as_chat = max_prompt_tokens, on_bad_prompt, as_chat
        self._records = records
        if len(records) == 0:
            raise ValueError(f"{origin} holds no prompts")
        if on_bad_prompt == "error":
            self[0]  # a wrong field is an error now, not in the middle of a run

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        record = self._records[index]
        answer = None
        if self.answer_field is not None:
            answer = self._text(record, "answer_field", self.answer_field, index)
        metadata = {k: v for k, v in record.items() if k not in (self.prompt_field, self.answer_field)}
        if isinstance(record.get(self.prompt_field), list):
            return Prompt(messages=self._messages(record, index), answer=answer, metadata=metadata)
        text = self._text(record, "prompt_field", self.prompt_field, index)
        try:
            text = fill_template(self.template, text, record, self.answer_field)
        except ValueError as error:
            raise ValueError(f"{self.where(index)}: {error}") from None
        if self.as_chat:
            return Prompt(messages=[{"role": "user", "content": text}], answer=answer, metadata=metadata)
        return Prompt(text=text, answer=answer, metadata=metadata)

    def _text(self, record: Mapping[str, Any], setting: str, field: str, index: int) -> str:
        where = f"{self.where(index)}, {setting}={field!r}"
        if field not in record:
            raise ValueError(f"{where}: there is no such field, only {sorted(record)}")
        try:
            return field_text(record[field])
        except ValueError as error:
            what = "text, a number or messages" if setting == "prompt_field" else "text or a number"
            raise ValueError(f"{where}: it must hold {what}, not {error}") from None

    def _messages(self, record: Mapping[str, Any], index: int) -> Sequence[Mapping[str, Any]]:
        where = f"{self.where(index)}, prompt_field={self.prompt_field!r}"
        if self.template != "{prompt}":
            raise ValueError(f"{where}: it holds messages, but template={self.template!r} is for prompts that are text")
        try:
            return checked_messages(record[self.prompt_field])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def where(self, index: int) -> str:
        """Source and number of the record."""
        return f"{self.origin}, record {index}"


class JsonlPrompts(RecordPrompts):
    """Prompts from a JSON Lines file, one object per line.

    Args:
        path: path of the file.
        prompt_field: field that holds the prompt: text, or a list of messages with `role` and `content`.
        answer_field: field that holds the reference answer; None if there is none.
        template: text around text prompts, with `{prompt}` and, by name, other fields; `{{name}}` is the text `{name}`.
        max_prompt_tokens: largest prompt length in tokens, see `PromptSource`.
        on_bad_prompt: `error` or `skip`, see `PromptSource`.
        as_chat: turn text prompts into one user message, to which the chat template is applied.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a JSON object, a field is missing, or the file is empty.
    """

    def __init__(
        self,
        path: str,
        prompt_field: str = "prompt",
        answer_field: str | None = "answer",
        template: str = "{prompt}",
        max_prompt_tokens: int | None = None,
        on_bad_prompt: OnBadPrompt = "error",
        as_chat: bool = False,
    ) -> None:
        records = jsonl_records(path)
        self._lines = list(records)
        values = list(records.values())
        super().__init__(values, prompt_field, answer_field, template, path, max_prompt_tokens, on_bad_prompt, as_chat)
        for index in range(len(self) if on_bad_prompt == "error" else 0):
            self[index]

    def where(self, index: int) -> str:
        """File and line of the record."""
        return f"{self.origin}, line {self._lines[index]}"


class ParquetPrompts(RecordPrompts):
    """Prompts from the rows of a Parquet file.

    Args:
        path: path of the file.
        prompt_field: column that holds the prompt: text, or a list of messages.
        answer_field: column that holds the reference answer; None if there is none.
        template: text around text prompts, with `{prompt}` and, by name, other fields; `{{name}}` is the text `{name}`.
        max_prompt_tokens: largest prompt length in tokens, see `PromptSource`.
        on_bad_prompt: `error` or `skip`, see `PromptSource`.
        as_chat: turn text prompts into one user message, to which the chat template is applied.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a Parquet file, a column is missing, or there are no rows.
    """

    def __init__(
        self,
        path: str,
        prompt_field: str = "prompt",
        answer_field: str | None = "answer",
        template: str = "{prompt}",
        max_prompt_tokens: int | None = None,
        on_bad_prompt: OnBadPrompt = "error",
        as_chat: bool = False,
    ) -> None:
        records = parquet_records(path)
        super().__init__(records, prompt_field, answer_field, template, path, max_prompt_tokens, on_bad_prompt, as_chat)


class HuggingFacePrompts(RecordPrompts):
    """Prompts from a split of a Hugging Face dataset: hub name, or folder (data files, or written by `save_to_disk`).

    Args:
        path: name or folder of the dataset.
        split: split, for example `train` or `train[:1000]`; ignored for a single split written by `save_to_disk`.
        name: configuration of the dataset, if it has several.
        prompt_field: column that holds the prompt: text, or a list of messages.
        answer_field: column that holds the reference answer; None if there is none.
        template: text around text prompts, with `{prompt}` and, by name, other fields; `{{name}}` is the text `{name}`.
        max_prompt_tokens: largest prompt length in tokens, see `PromptSource`.
        on_bad_prompt: `error` or `skip`, see `PromptSource`.
        as_chat: turn text prompts into one user message, to which the chat template is applied.

    Raises:
        FileNotFoundError: the dataset cannot be found or reached.
        ModuleNotFoundError: `datasets` is not installed.
        ValueError: a column is missing, or the split is unknown or empty.
    """

    def __init__(
        self,
        path: str,
        split: str = "train",
        name: str | None = None,
        prompt_field: str = "prompt",
        answer_field: str | None = "answer",
        template: str = "{prompt}",
        max_prompt_tokens: int | None = None,
        on_bad_prompt: OnBadPrompt = "error",
        as_chat: bool = False,
    ) -> None:
        records, origin = load_dataset(path, name, split), f"path={path!r}, split={split!r}"
        super().__init__(
            records, prompt_field, answer_field, template, origin, max_prompt_tokens, on_bad_prompt, as_chat
        )


def check_template(template: str) -> None:
    """Checks that a template has the placeholder `{prompt}`.

    Raises:
        ValueError: it has no placeholder.
    """
    if "{prompt}" not in template:
        raise ValueError(f"template must contain {{prompt}}, got {template!r}")
