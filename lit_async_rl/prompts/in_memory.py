"""Prompts from Python objects: a list of texts or dictionaries, a `datasets.Dataset`, or a `PromptSource`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_rl.prompts.records import Records, field_text
from lit_async_rl.prompts.sources import OnBadPrompt, PromptSource, RecordPrompts
from lit_async_rl.types import Prompt
from lit_async_rl.utils.plain import is_missing

WANTED = "a list of texts or dictionaries, a datasets.Dataset, or a PromptSource"


class InMemoryPrompts(RecordPrompts):
    """Prompts from a list or a `datasets.Dataset`.

    Args:
        records: texts, `Prompt` objects or mappings. A mapping has its prompt under `prompt` (text or messages) or
            `messages`, and may have an `answer` (None and NaN are none); its other keys become the prompt's metadata.
        origin: name of the setting, for messages.
        as_chat: make each prompt that is text a user's message, for the tokenizer's chat template.
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
    ) -> None:
        fields = "prompt", "answer", "{prompt}"
        super().__init__(records, *fields, origin, max_prompt_tokens, on_bad_prompt, as_chat)
        if on_bad_prompt == "error" and isinstance(
            records, Sequence
        ):  # a data set may be large, and is checked where it is used
            for index in range(len(records)):
                self[index]

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        try:
            record = self._records[index]
        except KeyError:  # of a pandas DataFrame, which is indexed by its columns
            given = f"got a {type(self._records).__name__} without record {index}"
            raise ValueError(f"{self.origin} must be {WANTED}, {given}; prompts.to_dict('records') is a list") from None
        if isinstance(record, Prompt):
            return record
        if isinstance(record, str):
            return self._from_mapping({"prompt": record}, index)
        if not isinstance(record, Mapping):
            raise ValueError(f"{self.where(index)} must be a text or a dictionary, got {str(record)[:80]!r}")
        return self._from_mapping(record, index)

    def _from_mapping(self, record: Mapping[str, Any], index: int) -> Prompt:
        fields = {name: value for name, value in record.items() if name not in ("prompt", "messages", "answer")}
        found = [name for name in ("prompt", "messages") if not is_missing(record.get(name))]
        if len(found) != 1:
            raise ValueError(f"{self.where(index)} must have 'prompt' or 'messages', got the keys {sorted(record)}")
        content = record[found[0]]
        where = f"{self.where(index)}[{found[0]!r}]"
        try:
            answer = None if is_missing(record.get("answer")) else field_text(record["answer"])
        except ValueError as error:
            raise ValueError(f"{self.where(index)}['answer'] must be a text or a number, got {error}") from None
        given: dict[str, Any] = dict(answer=answer, metadata=fields)
        if found == ["prompt"] and isinstance(content, str):
            as_messages = dict(messages=[{"role": "user", "content": content}])
            return Prompt(**(as_messages if self.as_chat else dict(text=content)), **given)
        if isinstance(content, Mapping) or not isinstance(content, Sequence) or isinstance(content, str):
            wanted = "a text or a list of messages" if found == ["prompt"] else "a list of messages"
            raise ValueError(f"{where} must be {wanted}, got {str(content)[:80]!r}")
        try:
            return Prompt(messages=content, **given)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def where(self, index: int) -> str:
        """Setting and index of the prompt."""
        return f"{self.origin}[{index}]"


def as_source(prompts: Any, setting: str) -> PromptSource:
    """Converts prompts to a `PromptSource`.

    Args:
        prompts: a source, which is returned unchanged, or records of `InMemoryPrompts`.
        setting: name of the argument, for messages.

    Raises:
        ValueError: it is None or something else, or one of a list is bad.
    """
    if isinstance(prompts, PromptSource):
        return prompts
    if isinstance(prompts, str):
        raise ValueError(f"{setting} must be {WANTED}, got the text {prompts[:80]!r}; JsonlPrompts(path) reads a file")
    if isinstance(prompts, Mapping):  # also a `datasets.DatasetDict`
        keys = ", ".join(map(str, list(prompts)[:5]))
        raise ValueError(f"{setting} must be {WANTED}, got a {type(prompts).__name__} with the keys {keys}: choose one")
    if prompts is None:
        raise ValueError(f"{setting} is not set")
    if not isinstance(prompts, Records):
        raise ValueError(f"{setting} must be {WANTED}, got {type(prompts).__name__}")
    return InMemoryPrompts(prompts, setting)
