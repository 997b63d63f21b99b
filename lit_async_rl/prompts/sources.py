"""Prompts: finite sources, and the endless, seeded, resumable order in which they are used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from lit_async_rl.prompts.records import Records, jsonl_records, load_dataset, parquet_records
from lit_async_rl.types import Prompt


class PromptSource(ABC):
    """A finite set of prompts, by number."""

    @abstractmethod
    def __len__(self) -> int:
        """How many."""

    @abstractmethod
    def __getitem__(self, index: int) -> Prompt:
        """Prompt number `index`; always the same one."""


class PromptStream:
    """A source's prompts for ever: each epoch a new permutation, which depends on nothing but seed and epoch.

    Args:
        source: where prompts come from.
        seed: of the order.

    Raises:
        ValueError: the source is empty.
    """

    def __init__(self, source: PromptSource, seed: int = 0) -> None:
        if len(source) == 0:
            raise ValueError(f"data.prompts: {type(source).__name__} holds no prompts")
        self.source = source
        self.seed = seed
        self.position = 0  # prompts handed out so far
        self._orders: dict[int, torch.Tensor] = {}  # of this epoch and the one before, which groups are still of

    def next(self) -> Prompt:
        """The next prompt."""
        return self.at(self.advance())

    def advance(self) -> int:
        """The position of the next prompt, which counts as handed out."""
        self.position += 1
        return self.position - 1

    def at(self, position: int) -> Prompt:
        """The prompt that is handed out at this position."""
        return self.source[self.number_at(position)]

    def number_at(self, position: int) -> int:
        """That prompt's number in the source."""
        epoch, offset = divmod(position, len(self.source))
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(hash((self.seed, epoch)) % 2**63)
            self._orders[epoch] = torch.randperm(len(self.source), generator=generator)
            if len(self._orders) > 2:
                del self._orders[min(set(self._orders) - {epoch})]
        return int(self._orders[epoch][offset])

    def state_dict(self) -> dict[str, int]:
        """The position; the order follows from the seed."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues where `state_dict` was taken."""
        self.position = state["position"]


class RecordPrompts(PromptSource):
    """Prompts from records (mappings), made when they are asked for: a data set on disk stays there.

    Args:
        records: one mapping each.
        prompt_field: field that holds the prompt.
        answer_field: field that holds the reference answer; None if there is none.
        template: text around the prompt, with `{prompt}` where it goes.
        origin: what messages call the source.

    Raises:
        ValueError: there are no records, or the first one lacks a field.
    """

    def __init__(
        self,
        records: Records,
        prompt_field: str,
        answer_field: str | None,
        template: str,
        origin: str,
    ) -> None:
        check_template(template)
        self.prompt_field, self.answer_field, self.template, self.origin = prompt_field, answer_field, template, origin
        self._records = records
        if len(records) == 0:
            raise ValueError(f"{origin} holds no prompts")
        self[0]  # a wrong field is an error now, not in the middle of a run

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        record = self._records[index]
        text = self._text(record, "prompt_field", self.prompt_field, index)
        answer = None
        if self.answer_field is not None:
            answer = self._text(record, "answer_field", self.answer_field, index)
        return Prompt(
            text=self.template.replace("{prompt}", text),
            answer=answer,
            metadata={k: v for k, v in record.items() if k not in (self.prompt_field, self.answer_field)},
        )

    def _text(self, record: Mapping[str, Any], setting: str, field: str, index: int) -> str:
        where = f"{self._where(index)}, {setting}={field!r}"
        if field not in record:
            raise ValueError(f"{where}: there is no such field, only {sorted(record)}")
        value = record[field]
        if not isinstance(value, (str, int, float)):
            raise ValueError(f"{where}: it must hold text or a number, not {str(value)[:80]!r}")
        return str(value)

    def _where(self, index: int) -> str:
        return f"{self.origin}, record {index}"


class JsonlPrompts(RecordPrompts):
    """One JSON object on each line of a file.

    Args:
        path: the file.
        prompt_field: field that holds the prompt.
        answer_field: field that holds the reference answer; None if there is none.
        template: text around the prompt, with `{prompt}` where it goes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no JSON object, a field is missing, or the file is empty.
    """

    def __init__(
        self,
        path: str,
        prompt_field: str = "prompt",
        answer_field: str | None = "answer",
        template: str = "{prompt}",
    ) -> None:
        records = jsonl_records(path)
        self._lines = list(records)
        super().__init__(list(records.values()), prompt_field, answer_field, template, path)
        for index in range(len(self)):
            self[index]

    def _where(self, index: int) -> str:
        return f"{self.origin}, line {self._lines[index]}"


class ParquetPrompts(RecordPrompts):
    """Rows of a Parquet file; arguments as `JsonlPrompts`.

    Args:
        path: the file.
        prompt_field: column that holds the prompt.
        answer_field: column that holds the reference answer; None if there is none.
        template: text around the prompt, with `{prompt}` where it goes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no Parquet, a column is missing, or there are no rows.
    """

    def __init__(
        self,
        path: str,
        prompt_field: str = "prompt",
        answer_field: str | None = "answer",
        template: str = "{prompt}",
    ) -> None:
        super().__init__(parquet_records(path), prompt_field, answer_field, template, path)


class HuggingFacePrompts(RecordPrompts):
    """A split of a Hugging Face dataset: hub name, or folder (of data files, or made by `save_to_disk`).

    Args:
        path: name or folder.
        split: for example `train`, or `train[:1000]`. A folder that `save_to_disk` made of one split is used
            whole.
        name: configuration of the dataset, if it has several.
        prompt_field: column that holds the prompt.
        answer_field: column that holds the reference answer; None if there is none.
        template: text around the prompt, with `{prompt}` where it goes.

    Raises:
        FileNotFoundError: the dataset can't be found or reached.
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
    ) -> None:
        super().__init__(
            load_dataset(path, name, split), prompt_field, answer_field, template, f"path={path!r}, split={split!r}"
        )


def check_template(template: str) -> None:
    """Refuses a template without a place for the prompt.

    Raises:
        ValueError: it has none.
    """
    if "{prompt}" not in template:
        raise ValueError(f"template must contain {{prompt}}, got {template!r}")
