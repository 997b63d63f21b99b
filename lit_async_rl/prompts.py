"""Prompts: finite sources, and the endless, seeded, resumable order in which they are used."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

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
        self._epoch = -1
        self._order: torch.Tensor = torch.empty(0)

    def next(self) -> Prompt:
        """The next prompt."""
        epoch, offset = divmod(self.position, len(self.source))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(hash((self.seed, epoch)) % 2**63)
            self._order, self._epoch = torch.randperm(len(self.source), generator=generator), epoch
        self.position += 1
        return self.source[int(self._order[offset])]

    def state_dict(self) -> dict[str, int]:
        """The position; the order follows from the seed."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues where `state_dict` was taken."""
        self.position = state["position"]


class RecordPrompts(PromptSource):
    """Prompts from records (mappings) that are held in memory.

    Args:
        records: one mapping each.
        prompt_field: field that holds the prompt.
        answer_field: field that holds the reference answer; None if there is none.
        template: text around the prompt, with `{prompt}` where it goes.
        origin: what messages call the source.

    Raises:
        ValueError: there are no records, or a field is missing.
    """

    def __init__(
        self,
        records: Iterable[Mapping[str, Any]],
        prompt_field: str,
        answer_field: str | None,
        template: str,
        origin: str,
    ) -> None:
        if "{prompt}" not in template:
            raise ValueError(f"template must contain {{prompt}}, got {template!r}")
        self._prompts = []
        for number, record in enumerate(records):
            for field in (prompt_field, answer_field):
                if field is not None and field not in record:
                    raise ValueError(f"{origin}, record {number}: no field {field!r}, it has {sorted(record)}")
            self._prompts.append(
                Prompt(
                    text=template.replace("{prompt}", str(record[prompt_field])),
                    answer=None if answer_field is None else str(record[answer_field]),
                    metadata={k: v for k, v in record.items() if k not in (prompt_field, answer_field)},
                )
            )
        if not self._prompts:
            raise ValueError(f"{origin} holds no prompts")

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


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
        super().__init__(_jsonl_records(path), prompt_field, answer_field, template, path)


class ParquetPrompts(RecordPrompts):
    """Rows of a Parquet file; arguments as `JsonlPrompts`.

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
        import pyarrow
        import pyarrow.parquet

        _existing_file(path)
        try:
            records = pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} is no Parquet file: {error}") from error
        super().__init__(records, prompt_field, answer_field, template, path)


class HuggingFacePrompts(RecordPrompts):
    """A split of a Hugging Face dataset: hub name, or folder that `datasets.load_dataset` understands.

    Args:
        path: name or folder.
        split: for example `train`.
        name: configuration of the dataset, if it has several.
        prompt_field: field that holds the prompt.
        answer_field: field that holds the reference answer; None if there is none.
        template: text around the prompt, with `{prompt}` where it goes.

    Raises:
        FileNotFoundError: the dataset can't be found or reached.
        ModuleNotFoundError: `datasets` is not installed.
        ValueError: a field is missing, or the split is empty.
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
        try:
            import datasets
        except ImportError:
            raise ModuleNotFoundError('HuggingFacePrompts needs: pip install "lit-async-rl[data]"') from None
        try:
            records = datasets.load_dataset(path, name, split=split)
        except (OSError, ValueError) as error:
            raise FileNotFoundError(f"dataset {path!r}, split {split!r}: {error}") from error
        super().__init__(records, prompt_field, answer_field, template, f"dataset {path!r}, split {split!r}")


def _existing_file(path: str) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"prompts: there is no file {path!r} (in {Path.cwd()})")
    return file


def _jsonl_records(path: str) -> Iterable[Mapping[str, Any]]:
    with _existing_file(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number} is no JSON object: {line[:80]!r}")
            yield record
