"""Finite prompt sources: JSON, Parquet and CSV files, Hugging Face datasets, and the base class."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from lit_async_rl.problem import TEMPLATE_KWARGS, Prompt, checked_messages
from lit_async_rl.prompts.records import (
    Records,
    answer_fields,
    check_template,
    csv_records,
    field_text,
    fill_template,
    jsonl_records,
    load_dataset,
    parquet_records,
)
from lit_async_rl.utils.checks import check_choice, check_range
from lit_async_rl.utils.plain import as_lists, is_missing

T = TypeVar("T")
OnBadPrompt = Literal["error", "skip"]


class PromptSource(Records, ABC):
    """Finite, indexable set of prompts.

    Attributes:
        max_prompt_tokens: largest prompt length in tokens; None is the limit of the engine.
        on_bad_prompt: `error` raises at a bad prompt (too long, incomplete, refused by the chat template), before
            training or at its first use; `skip` skips such prompts and logs their number.
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
        prompt_field: field of the prompt: text, or a list of messages with `role` and `content`.
        answer_field: field of the reference answer (`reward_model.ground_truth` is nested): text, number or list of
            accepted ones; None if none.
        template: text around text prompts, with `{prompt}` and, by name, other fields; `{{name}}` gives `{name}`.
        origin: name of the source in messages.
        max_prompt_tokens: largest prompt length in tokens, see `PromptSource`.
        on_bad_prompt: `error` or `skip`, see `PromptSource`.
        as_chat: turn text prompts into one user message for the chat template.
        chat_template_kwargs: arguments of the chat template, such as `{"enable_thinking": false}`; a record's override
            them.

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
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_template(template)
        check_range(type(self).__name__, "integer >= 1", max_prompt_tokens=max_prompt_tokens)
        check_choice(type(self).__name__, ("error", "skip"), on_bad_prompt=on_bad_prompt)
        self.prompt_field = prompt_field
        self.answer_field = answer_field
        self.template = template
        self.origin = origin
        self.max_prompt_tokens = max_prompt_tokens
        self.on_bad_prompt = on_bad_prompt
        self.as_chat = as_chat
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self._records = records
        if len(records) == 0:
            raise ValueError(f"{origin} holds no prompts")
        if on_bad_prompt == "error":
            self[0]  # raises for a wrong field now instead of in the middle of a run

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        record = self._records[index]
        where = f"{self.where(index)}, prompt_field={self.prompt_field!r}"
        answers: dict[str, Any] = {}
        if self.answer_field is not None:
            answers = self._read(
                record, "answer_field", index=index, read=answer_fields, wanted="text, a number or a list of them"
            )
        content = self._read(
            record, "prompt_field", index=index, read=_text_or_messages, wanted="text, a number or messages"
        )
        if isinstance(content, str):
            try:
                content = fill_template(self.template, content, record, hidden=self.answer_field)
            except ValueError as error:
                raise ValueError(f"{self.where(index)}: {error}") from None
        elif self.template != "{prompt}":
            raise ValueError(f"{where}: the field holds messages, but template={self.template!r} is for text prompts")
        others = {k: v for k, v in record.items() if k not in (self.prompt_field, self.answer_field)}
        return self._prompt(content, answers, others=others, where=where)

    def _read(self, record: Mapping[str, Any], setting: str, *, index: int, read: Callable[[Any], T], wanted: str) -> T:
        """Reads the field that a setting names."""
        field = getattr(self, setting)
        where = f"{self.where(index)}, {setting}={field!r}"
        try:
            return read(_field(record, field))
        except KeyError as error:
            raise ValueError(f"{where}: there is no such field, only {error.args[0]}") from None
        except ValueError as error:
            raise ValueError(f"{where}: the field must hold {wanted}, not {error}") from None

    def _prompt(
        self, content: str | Sequence[Any], answers: Mapping[str, Any], *, others: dict[str, Any], where: str
    ) -> Prompt:
        """The prompt of a record.

        Args:
            content: text or messages.
            answers: see `answer_fields`; empty without an answer.
            others: the other fields of the record.
            where: name of the content, for messages.
        """
        if isinstance(content, str) and self.as_chat:
            content = [{"role": "user", "content": content}]
        given: dict[str, Any] = {**answers, "metadata": with_template_kwargs(others, self.chat_template_kwargs)}
        if isinstance(content, str):
            return Prompt(text=content, **given)
        try:
            return Prompt(messages=checked_messages(content), **given)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def where(self, index: int) -> str:
        """Source and number of the record."""
        return f"{self.origin}, record {index}"


class FilePrompts(RecordPrompts):
    """Prompts from a file; errors name the line, where the file has lines.

    Args:
        path: path of the file.
        prompt_field: as of `RecordPrompts`, and so are all further arguments.
        answer_field: likewise.
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
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        records = self._records_of(path, answer_field)
        self._lines = list(records) if isinstance(records, Mapping) else None
        super().__init__(
            list(records.values()) if isinstance(records, Mapping) else records,
            prompt_field,
            answer_field,
            template=template,
            origin=path,
            max_prompt_tokens=max_prompt_tokens,
            on_bad_prompt=on_bad_prompt,
            as_chat=as_chat,
            chat_template_kwargs=chat_template_kwargs,
        )
        if self._lines is not None and on_bad_prompt == "error":
            for index in range(len(self)):
                self[index]

    @abstractmethod
    def _records_of(self, path: str, answer_field: str | None) -> Records | Mapping[int, Any]:
        """Records of a file; where it has lines, by their number."""

    def where(self, index: int) -> str:
        """File and line of the record, or its number."""
        return super().where(index) if self._lines is None else f"{self.origin}, line {self._lines[index]}"


class JsonlPrompts(FilePrompts):
    """Prompts from a JSON Lines file, one object per line, or from a JSON array of objects.

    Example:
        ```python
        from pathlib import Path

        import lit_async_rl as rl

        Path("sums.jsonl").write_text('{"question": "1 + 1", "solution": "2"}')
        prompts = rl.JsonlPrompts("sums.jsonl", prompt_field="question", answer_field="solution", template="{prompt} =")
        assert prompts[0].text == "1 + 1 ="
        assert prompts[0].answer == "2"
        ```

    Args:
        path: path of the file.
        prompt_field: field of the prompt: text, or a list of messages with `role` and `content`.
        answer_field: field of the reference answer (`reward_model.ground_truth` is nested): text, number or list of
            accepted ones; None if none.
        template: text around text prompts, with `{prompt}` and, by name, other fields; `{{name}}` gives `{name}`.
        max_prompt_tokens: largest prompt length in tokens, see `PromptSource`.
        on_bad_prompt: `error` or `skip`, see `PromptSource`.
        as_chat: turn text prompts into one user message for the chat template.
        chat_template_kwargs: arguments of the chat template, such as `{"enable_thinking": false}`; a record's override
            them.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a JSON object, a field is missing, or the file is empty.
    """

    def _records_of(self, path: str, answer_field: str | None) -> Mapping[int, Any]:
        return jsonl_records(path)


class ParquetPrompts(FilePrompts):
    """Prompts from the rows of a Parquet file.

    Args:
        path: path of the file.
        prompt_field: column of the prompt: text, or a list of messages.
        answer_field: column of the reference answer (`reward_model.ground_truth` is nested): text, number or list of
            accepted ones; None if none.
        template: text around text prompts, with `{prompt}` and, by name, other fields; `{{name}}` gives `{name}`.
        max_prompt_tokens: largest prompt length in tokens, see `PromptSource`.
        on_bad_prompt: `error` or `skip`, see `PromptSource`.
        as_chat: turn text prompts into one user message for the chat template.
        chat_template_kwargs: arguments of the chat template, such as `{"enable_thinking": false}`; a record's override
            them.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a Parquet file, a column is missing, or there are no rows.
    """

    def _records_of(self, path: str, answer_field: str | None) -> Records:
        return parquet_records(path)


class CsvPrompts(FilePrompts):
    """Prompts from the rows of a CSV file; the first row names the fields.

    Args:
        path: path of the file, in UTF-8.
        prompt_field: column of the prompt.
        answer_field: column of the reference answer; None if none.
        template: text around text prompts, with `{prompt}` and, by name, other fields; `{{name}}` gives `{name}`.
        max_prompt_tokens: largest prompt length in tokens, see `PromptSource`.
        on_bad_prompt: `error` or `skip`, see `PromptSource`.
        as_chat: turn text prompts into one user message for the chat template.
        chat_template_kwargs: arguments of the chat template, such as `{"enable_thinking": false}`.
        delimiter: separator of values; None is a tab in `.tsv` files, and a comma in others.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row does not fit the first line, a column or an answer is missing, or there are no rows.
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
        chat_template_kwargs: dict[str, Any] | None = None,
        delimiter: str | None = None,
    ) -> None:
        if delimiter is not None and len(delimiter) != 1:
            raise ValueError(f"CsvPrompts.delimiter must be one character, got {delimiter!r}")
        self._delimiter = delimiter or ("\t" if path.endswith(".tsv") else ",")
        super().__init__(
            path,
            prompt_field,
            answer_field,
            template=template,
            max_prompt_tokens=max_prompt_tokens,
            on_bad_prompt=on_bad_prompt,
            as_chat=as_chat,
            chat_template_kwargs=chat_template_kwargs,
        )

    def _records_of(self, path: str, answer_field: str | None) -> Mapping[int, Any]:
        return _with_answers(csv_records(path, self._delimiter), answer_field)


def _with_answers(records: Mapping[int, Mapping[str, Any]], field: str | None) -> Mapping[int, Mapping[str, Any]]:
    """Rows of a CSV file with the answers that pandas and Arrow read from it.

    An empty cell is no answer, since an empty completion would equal it. In a column of numbers 72.0 is 72, since
    tables with gaps write integers so.
    """
    if field is None or not all(field in record for record in records.values()):
        return records
    cells = {line: record[field].strip() for line, record in records.items()}
    if all(re.fullmatch(r"[-+]?\d+(?:\.\d+)?", cell) for cell in cells.values() if cell):
        answers = {line: cell.removesuffix(".0") for line, cell in cells.items()}
    else:
        answers = {line: record[field] for line, record in records.items()}
    return {line: {**record, field: answers[line] if cells[line] else None} for line, record in records.items()}


class HuggingFacePrompts(RecordPrompts):
    """Prompts from a split of a Hugging Face dataset: hub name, or folder (data files, or written by `save_to_disk`).

    Args:
        path: name or folder of the dataset.
        split: such as `train` or `train[:1000]`; ignored for a single split written by `save_to_disk`.
        name: configuration of the dataset, if it has several.
        prompt_field: column of the prompt: text, or a list of messages.
        answer_field: column of the reference answer (`reward_model.ground_truth` is nested): text, number or list of
            accepted ones; None if none.
        template: text around text prompts, with `{prompt}` and, by name, other fields; `{{name}}` gives `{name}`.
        max_prompt_tokens: largest prompt length in tokens, see `PromptSource`.
        on_bad_prompt: `error` or `skip`, see `PromptSource`.
        as_chat: turn text prompts into one user message for the chat template.
        chat_template_kwargs: arguments of the chat template, such as `{"enable_thinking": false}`; a record's override
            them.

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
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            load_dataset(path, name, split),
            prompt_field,
            answer_field,
            template=template,
            origin=f"path={path!r}, split={split!r}",
            max_prompt_tokens=max_prompt_tokens,
            on_bad_prompt=on_bad_prompt,
            as_chat=as_chat,
            chat_template_kwargs=chat_template_kwargs,
        )


def _field(record: Mapping[str, Any], field: str) -> Any:
    """A field by its name, or by a path of nested fields, such as `reward_model.ground_truth`.

    Raises:
        KeyError: there is no such field; its argument is the list of existing fields.
    """
    if field in record:
        return record[field]
    outer, _, inner = field.partition(".")
    if inner and isinstance(nested := record.get(outer), Mapping):
        return _field(nested, inner)
    raise KeyError(sorted(map(str, record)))


def _text_or_messages(value: Any) -> str | list[Any]:
    value = as_lists(value)
    return value if isinstance(value, list) else field_text(value)


def with_template_kwargs(metadata: dict[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt's metadata with default arguments for its chat template; the record's override them."""
    if not kwargs:
        return metadata
    own = metadata.get(TEMPLATE_KWARGS)
    if is_missing(own):
        own = {}
    if not isinstance(own, Mapping):  # the codec refuses values that are not mappings
        return metadata
    return metadata | {TEMPLATE_KWARGS: {**kwargs, **own}}


# -- Prompts from Python objects: a list of texts or dictionaries, a `datasets.Dataset`, or a `PromptSource` ----------


WANTED = "a list of strings or dictionaries, a datasets.Dataset, or a PromptSource"
FILE_SOURCES: dict[str, type[RecordPrompts]] = {
    ".jsonl": JsonlPrompts,
    ".ndjson": JsonlPrompts,
    ".json": JsonlPrompts,
    ".parquet": ParquetPrompts,
    ".csv": CsvPrompts,
    ".tsv": CsvPrompts,
}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def source_class(text: str) -> type[RecordPrompts] | None:
    """The source class of a path or name: by a file's suffix, or a dataset for a folder or `org/name`.

    None for anything else, such as the name of a class.
    """
    path = Path(text).expanduser()
    if path.suffix in FILE_SOURCES:
        return FILE_SOURCES[path.suffix]
    is_dataset_folder = path.is_dir() and "/" in text  # a folder may have the same name as a class
    is_hub_name = HUB_NAME.fullmatch(text) and not path.exists()
    return HuggingFacePrompts if is_dataset_folder or is_hub_name else None


class InMemoryPrompts(RecordPrompts):
    """Prompts from a list or a `datasets.Dataset`.

    Args:
        records: texts, `Prompt` objects or mappings. A mapping has its prompt under `prompt` (text or messages) or
            `messages`, and may have an `answer`, or a list of accepted ones (None and NaN are none); other keys become
            metadata.
        origin: name of the setting, for messages.
        as_chat: make text prompts a user's message for the chat template.
        chat_template_kwargs: arguments of that template; a record's override them.
        max_prompt_tokens: see `PromptSource`; likewise `on_bad_prompt`.

    Raises:
        ValueError: there are no records, or one of a list is bad; names its index and field.
    """

    def __init__(
        self,
        records: Records,
        origin: str = "prompts",
        as_chat: bool = False,
        max_prompt_tokens: int | None = None,
        on_bad_prompt: OnBadPrompt = "error",
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            records,
            prompt_field="prompt",
            answer_field="answer",
            template="{prompt}",
            origin=origin,
            max_prompt_tokens=max_prompt_tokens,
            on_bad_prompt=on_bad_prompt,
            as_chat=as_chat,
            chat_template_kwargs=chat_template_kwargs,
        )
        # not a `datasets.Dataset`: it may be large, and its records are checked on first use
        if on_bad_prompt == "error" and isinstance(records, Sequence):
            for index in range(len(records)):
                self[index]

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        try:
            record = self._records[index]
        except KeyError:  # raised by a pandas DataFrame, which is indexed by its columns
            given = f"got a {type(self._records).__name__} without record {index}"
            raise ValueError(
                f"{self.origin} must be {WANTED}, {given}. For a DataFrame, pass prompts.to_dict('records')"
            ) from None
        if isinstance(record, Prompt):
            return record
        if isinstance(record, str):
            record = {"prompt": record}
        if not isinstance(record, Mapping):
            raise ValueError(f"{self.where(index)} must be a string or a dictionary, got {str(record)[:80]!r}")
        return self._from_mapping(record, index)

    def _from_mapping(self, record: Mapping[str, Any], index: int) -> Prompt:
        fields = {name: value for name, value in record.items() if name not in ("prompt", "messages", "answer")}
        found = [name for name in ("prompt", "messages") if not is_missing(record.get(name))]
        if len(found) != 1:
            raise ValueError(f"{self.where(index)} must have 'prompt' or 'messages', got the keys {sorted(record)}")
        content = as_lists(record[found[0]])
        where = f"{self.where(index)}[{found[0]!r}]"
        try:
            answers = {} if is_missing(record.get("answer")) else answer_fields(record["answer"])
        except ValueError as error:
            wanted = "a string, a number or a list of them"
            raise ValueError(f"{self.where(index)}['answer'] must be {wanted}, got {error}") from None
        is_text = isinstance(content, str) and found == ["prompt"]
        is_list = isinstance(content, Sequence) and not isinstance(content, str)
        if not is_text and not is_list:
            wanted = "a string or a list of messages" if found == ["prompt"] else "a list of messages"
            raise ValueError(f"{where} must be {wanted}, got {str(content)[:80]!r}")
        return self._prompt(content, answers, others=fields, where=where)

    def where(self, index: int) -> str:
        """Setting and index of the prompt."""
        return f"{self.origin}[{index}]"


def as_source(prompts: Any, setting: str) -> PromptSource:
    """Converts prompts to a `PromptSource`.

    Args:
        prompts: a source, returned unchanged; records of `InMemoryPrompts`; or the name of a file or dataset
            (`source_class`).
        setting: name of the argument, for messages.

    Raises:
        ValueError: `prompts` is None or of another type, or a record of a list is bad.
    """
    if isinstance(prompts, PromptSource):
        return prompts
    if isinstance(prompts, str | os.PathLike):
        name = os.fspath(prompts)
        if (source := source_class(name)) is None:
            endings = ", ".join(FILE_SOURCES)
            files = f"the name of a file ({endings}) or of a dataset on the hub (org/name)"
            raise ValueError(f"{setting} must be {WANTED}, or {files}, got the string {name[:80]!r}")
        try:
            return source(name)  # type: ignore[call-arg]
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{setting}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{setting}: {error}") from None
    if isinstance(prompts, Mapping):  # also a `datasets.DatasetDict`
        keys = ", ".join(map(str, list(prompts)[:5]))
        raise ValueError(
            f"{setting} must be {WANTED}, got a {type(prompts).__name__} with the keys {keys}: pass the value of one "
            "key"
        )
    if prompts is None:
        raise ValueError(f"{setting} is not set")
    if not isinstance(prompts, Records):
        raise ValueError(f"{setting} must be {WANTED}, got {type(prompts).__name__}")
    return InMemoryPrompts(prompts, setting)
