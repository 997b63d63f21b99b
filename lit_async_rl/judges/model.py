"""A reward model: a sequence classifier with one logit, on its own thread and device.

| who | waits for | woken by |
|---|---|---|
| caller of the reward (the scorer's event loop) | its batch | the model's thread |
| model's thread | completions; `max_wait_s` for more of them | callers, `close` |
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jinja2 import TemplateError
from transformers import AutoModelForSequenceClassification

from lit_async_rl.errors import FinalRewardError, RewardError, RewardSetupError, describe
from lit_async_rl.judges.judge_questions import defused
from lit_async_rl.models.architecture import configured_length
from lit_async_rl.models.loading import (
    check_complete,
    check_finite,
    errors_naming,
    find_device,
    load_config,
    load_pretrained,
    load_tokenizer,
)
from lit_async_rl.models.run_clock import clock_options
from lit_async_rl.problem import Prompt
from lit_async_rl.runtime.threads import start_thread
from lit_async_rl.utils.checks import as_reward, check_choice, check_device, check_dtype, check_range
from lit_async_rl.utils.device_memory import own_stream
from lit_async_rl.utils.elsewhere import Rebuildable

JOIN_S = 10.0
RECENT = 1000  # completions in the latency statistics


@dataclass(eq=False)
class _Waiting:
    token_ids: list[int]
    future: concurrent.futures.Future[float]
    begun: Callable[[], None]
    since: float


class RewardModel(Rebuildable):
    """The logit of a Hugging Face sequence classifier for prompt and completion.

    Completions that wait at the same time share a forward pass, which rounds differently in batches of other sizes, by
    about 1e-6 in float32: with `batch_size` 1 equal completions have equal rewards to the bit.

    Example:
        ```python
        import lit_async_rl as rl

        try:
            rl.RewardModel(str(rl.asset("sort_policy")))
        except ValueError as error:
            assert "one logit" in str(error)
        ```

    Args:
        model: Hugging Face name or folder, with weights in safetensors.
        device: `auto` is the first accelerator, or the CPU.
        dtype: of weights and computation.
        batch_size: completions of one forward pass.
        max_wait_s: seconds that the first completion of a batch waits for others.
        max_length: tokens of prompt and completion; None is the model's own limit.
        form: how they are put together. `chat`: by the model's chat template; `joined`: as one text; `pair`: as the two
            texts of a cross-encoder; `auto`: `chat` for prompts of messages, else `joined`.
        on_too_long: result for a longer text: `error` (a failed completion, see `data.scoring.tries`), `none` (the
            reward does not apply), or a number.
        num_threads: torch threads on a CPU; None leaves it alone.
        name: first part of the names of its metrics.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: the model has more than one logit or is no classifier, or a setting is out of range.
    """

    def __init__(
        self,
        model: str,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 16,
        max_wait_s: float = 0.005,
        max_length: int | None = None,
        form: Literal["auto", "chat", "joined", "pair"] = "auto",
        on_too_long: Literal["error", "none"] | float = "error",
        num_threads: int | None = 1,
        name: str = "reward_model",
    ) -> None:
        check_range("RewardModel", "integer positive", batch_size=batch_size, num_threads=num_threads)
        check_range("RewardModel", "integer positive", max_length=max_length)
        check_range("RewardModel", ">= 0 and finite", max_wait_s=max_wait_s)
        check_device("RewardModel.device", device)
        check_dtype("RewardModel.dtype", dtype)
        check_choice("RewardModel", ("auto", "chat", "joined", "pair"), form=form)
        check_choice("RewardModel", ("error", "none"), or_number=True, on_too_long=on_too_long)
        if not name.isidentifier():
            raise ValueError(f"RewardModel.name must be a Python identifier, got {name!r}")
        # Arguments that rewards depend on are public under their own name, for `reward_identity`; all else is private.
        self.model = model
        self.dtype = dtype
        self.form = form
        self.on_too_long = on_too_long
        self._name = name
        with errors_naming("RewardModel.model"):
            config = load_config(model)
            self._tokenizer: Any = load_tokenizer(model)
        is_classifier = type(config) in AutoModelForSequenceClassification._model_mapping
        if not is_classifier or config.num_labels != 1:
            found = f"{config.num_labels} logits" if is_classifier else f"a {config.model_type!r} model"
            raise ValueError(f"RewardModel.model={model!r} must be a sequence classifier with one logit, got {found}")
        longest = configured_length(config)
        if max_length is not None and max_length > longest:
            raise ValueError(f"RewardModel.max_length={max_length} exceeds the model's {longest} positions")
        self.max_length = max_length or longest
        self._device = device
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s
        self._num_threads = num_threads
        self._lock = threading.Lock()  # guards the next two
        self._thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._num_scored = 0
        self._num_batches = 0
        self._num_too_long = 0
        self._latencies: deque[float] = deque(maxlen=RECENT)

    async def __call__(self, prompt: Prompt, completion: str, begun: Callable[[], None] = lambda: None) -> float | None:
        """Reward of one completion; None if it is too long and `on_too_long` is `none`.

        Args:
            prompt: text or messages.
            completion: text to score.
            begun: called from another thread when the forward pass begins.

        Raises:
            FinalRewardError: prompt and completion are too long, or cannot be put together.
            RewardError: the logit is not finite, or the forward pass failed.
            RewardSetupError: the model cannot be loaded.
        """
        token_ids = self._encode(prompt, completion)
        if len(token_ids) > self.max_length:
            self._num_too_long += 1
            if self.on_too_long == "error":
                raise FinalRewardError(
                    f"prompt and completion have {len(token_ids)} tokens, more than RewardModel.max_length="
                    f"{self.max_length}; RewardModel.on_too_long sets the reward of such completions"
                )
            return None if isinstance(self.on_too_long, str) else self.on_too_long
        waiting = _Waiting(token_ids, concurrent.futures.Future(), begun=begun, since=time.monotonic())
        with self._lock:
            if self._thread is None:
                self._inbox = queue.SimpleQueue()
                self._thread = start_thread(self._work, self._inbox, name="reward-model")
            self._inbox.put(waiting)
        return await asyncio.wrap_future(waiting.future)

    concurrency_setting = None  # one forward pass at a time

    @property
    def max_concurrent(self) -> int:
        """Concurrent completions; see `Scorer`."""
        return self._batch_size

    def metrics(self) -> dict[str, float]:
        """Totals so far, mean batch size, and latency of recent completions."""
        found = {
            f"{self._name}/num_scored": float(self._num_scored),
            f"{self._name}/num_too_long": float(self._num_too_long),
        }
        if self._num_batches:
            found[f"{self._name}/batch_size"] = self._num_scored / self._num_batches
        if latencies := list(self._latencies):
            found[f"{self._name}/latency_s"] = sum(latencies) / len(latencies)
        return found

    def close(self) -> None:
        """Ends the thread and frees the model; a later call loads it again."""
        with self._lock:
            thread = self._thread
            self._thread = None
            self._inbox.put(None)
        if thread is not None:
            thread.join(JOIN_S)

    # -- texts --------------------------------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt, completion: str) -> list[int]:
        form = self.form
        if form == "auto":
            form = "joined" if prompt.messages is None else "chat"
        if form == "joined":
            ids: Any = self._tokenizer(prompt.text + completion)["input_ids"]
        elif form == "pair":
            ids = self._tokenizer(prompt.text, completion)["input_ids"]
        else:
            # A template would let a completion end its own turn.
            answer = defused(completion, self._tokenizer.all_special_tokens)
            turns = [{"role": "user", "content": prompt.text}] if prompt.messages is None else list(prompt.messages)
            try:
                ids = self._tokenizer.apply_chat_template(
                    [*map(dict, turns), {"role": "assistant", "content": answer}],
                    return_dict=False,
                    **clock_options(self._tokenizer.chat_template),
                )
            except (TemplateError, ValueError, TypeError) as error:
                raise FinalRewardError(f"the chat template of RewardModel.model={self.model!r}: {error}") from error
        if not ids:
            raise FinalRewardError(f"RewardModel.model={self.model!r}: prompt and completion contain no tokens")
        return list(ids)

    # -- the model's thread -------------------------------------------------------------------------------------------

    def _work(self, inbox: queue.SimpleQueue[_Waiting | None]) -> None:
        problem: Exception = RewardError(f"RewardModel {self.model!r} was closed")
        try:
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
            with own_stream(find_device(self._device)):  # the default one waits for the trainer's step
                model = self._load()
                while (batch := self._take(inbox)) is not None:
                    self._score(model, batch)
        except Exception as error:
            problem = RewardSetupError(describe(error))
            with self._lock:  # otherwise the next call waits forever
                self._thread = None
        while not inbox.empty():
            if (left := inbox.get()) is not None:
                _fail([left], problem)

    def _load(self) -> Any:
        with errors_naming("RewardModel.model"):
            model, info = load_pretrained(
                AutoModelForSequenceClassification,
                self.model,
                dtype=getattr(torch, self.dtype),
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        check_complete(info, f"RewardModel.model={self.model!r}")
        check_finite(model.named_parameters(), f"RewardModel.model={self.model!r}")
        return model.eval().requires_grad_(False).to(find_device(self._device))

    def _take(self, inbox: queue.SimpleQueue[_Waiting | None]) -> list[_Waiting] | None:
        """The next batch; None at the end."""
        batch: list[_Waiting] = []
        deadline = math.inf
        while len(batch) < self._batch_size:
            try:
                left_s = None if not batch else max(0.0, deadline - time.monotonic())
                waiting = inbox.get(timeout=left_s)
            except queue.Empty:
                break
            if waiting is None:
                _fail(batch, RewardError(f"RewardModel {self.model!r} was closed"))
                return None
            if waiting.future.set_running_or_notify_cancel():  # otherwise its caller gave up
                batch.append(waiting)
                deadline = min(deadline, time.monotonic() + self._max_wait_s)
        return batch

    def _score(self, model: Any, batch: Sequence[_Waiting]) -> None:
        for waiting in batch:
            waiting.begun()
        try:
            logits = _logits(model, [waiting.token_ids for waiting in batch])
        except Exception as error:  # out of memory, say; another try may have a smaller batch
            _fail(batch, RewardError(f"RewardModel.model={self.model!r}: {describe(error)}"))
            return
        self._num_batches += 1
        self._num_scored += len(batch)
        now = time.monotonic()
        for waiting, logit in zip(batch, logits, strict=True):
            self._latencies.append(now - waiting.since)
            try:
                waiting.future.set_result(as_reward(logit))
            except ValueError as error:
                _fail([waiting], RewardError(f"RewardModel.model={self.model!r} gave {error}"))


def _fail(batch: Sequence[_Waiting], error: Exception) -> None:
    for waiting in batch:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # its caller gave up
            waiting.future.set_exception(error)


@torch.inference_mode()
def _logits(model: Any, rows: Sequence[Sequence[int]]) -> list[float]:
    """The logit of each row of token ids, padded on the right to the longest.

    Decoders score the last token that is not padding. If the configuration and that of its text model name none, or
    different ones, a token that is in no row replaces it for this batch, so a row has the same logit as alone.
    """
    width = max(map(len, rows))
    levels = (model.config, model.config.get_text_config())  # of which classifiers read either; often the same
    given = [getattr(level, "pad_token_id", None) for level in levels]
    named = set(given) - {None}
    used = {token for row in rows for token in row}
    padding = named.pop() if len(named) == 1 else next(token for token in range(len(used) + 1) if token not in used)
    ids = torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=model.device)
    try:
        for level in levels:
            level.pad_token_id = padding
        found = model(input_ids=ids, attention_mask=mask).logits
    finally:
        for level, token in zip(levels, given, strict=True):
            level.pad_token_id = token
    if found.shape != (len(rows), 1):
        raise ValueError(f"logits have shape {tuple(found.shape)}, expected {(len(rows), 1)}")
    return [float(logit) for logit in found[:, 0].float().cpu()]
