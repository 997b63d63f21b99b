"""A teacher behind vLLM's server, or another that returns `prompt_logprobs` for token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from lit_async_rl.errors import EngineError, SetupError
from lit_async_rl.models.loading import load_tokenizer
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.runtime.loop import LoopThread
from lit_async_rl.training.distillation import OpenTeacher, RemoteTeacher, Teacher, check_same_tokens, vocabulary_of
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.secrets import CONCEALED, check_address, key_of_variable

MAX_TRIES = 4  # of the official client, for connections and statuses that may pass
START_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ServerTeacher(Teacher):
    """A teacher that a server holds: `vllm serve MODEL --max-logprobs K`. Needs `pip install "lit-async-rl[agents]"`.

    It is asked while a step trains, for all rows of a micro-batch at a time. The gradient is the sampled one, or the
    analytic one of its `top_k` likeliest tokens.

    Args:
        base_url: such as `http://127.0.0.1:8000/v1`.
        model: as the server calls it.
        tokenizer: Hugging Face name or folder of the teacher's tokenizer, compared with the student's; None is `model`.
        api_key_env: environment variable with the key; empty is none.
        timeout_s: of one micro-batch.
        max_concurrent: requests at a time.
    """

    base_url: str
    model: str
    tokenizer: str | None = None
    api_key_env: str = ""
    timeout_s: float = 300.0
    max_concurrent: int = 32

    sees_all = False
    any_temperature = False

    def __post_init__(self) -> None:
        check_address("ServerTeacher.base_url", self.base_url, "ServerTeacher.api_key_env")
        check_range("ServerTeacher", "positive", timeout_s=self.timeout_s)
        check_range("ServerTeacher", "integer positive", max_concurrent=self.max_concurrent)

    def check(self, model: str) -> None:
        check_same_tokens(model, self.tokenizer or self.model, setting="ServerTeacher.tokenizer")

    def open(self, student: CausalPolicy, device: torch.device, mesh: DeviceMesh | None = None) -> OpenTeacher:
        return _OpenServerTeacher(self, vocabulary_of(student))


class _OpenServerTeacher(RemoteTeacher):
    def __init__(self, settings: ServerTeacher, student_size: int) -> None:
        super().__init__(f"ServerTeacher.base_url={settings.base_url}", student_size)
        self._settings = settings
        self._tokenizer = load_tokenizer(settings.tokenizer or settings.model)
        self._has_same_texts = False  # known from the first answer on
        self._loop = LoopThread("teacher")
        try:
            self._client = self._loop.call(self._connect(), START_S, "the client of a teacher")
        except BaseException:
            self._loop.close()
            raise

    async def _connect(self) -> Any:
        try:
            from openai import AsyncOpenAI
        except ImportError as error:
            raise SetupError('ServerTeacher needs openai: pip install "lit-async-rl[agents]"') from error
        settings = self._settings
        key = key_of_variable("ServerTeacher.api_key_env", settings.api_key_env or None)
        return AsyncOpenAI(
            base_url=settings.base_url, api_key=key or "none", max_retries=MAX_TRIES - 1, timeout=settings.timeout_s
        )

    def ask(self, sequences: Sequence[Sequence[int]], num: int) -> list[list[dict[int, float]]]:
        asking = self._ask_all(sequences, num)
        timeout_s = self._settings.timeout_s
        return self._loop.call(asking, timeout_s, f"the answer of {self.name}", setting="ServerTeacher.timeout_s")

    async def _ask_all(self, sequences: Sequence[Sequence[int]], num: int) -> list[list[dict[int, float]]]:
        places = asyncio.Semaphore(self._settings.max_concurrent)

        async def one(ids: Sequence[int]) -> list[dict[int, float]]:
            async with places:
                return await self._ask_one(list(ids), num)

        return await asyncio.gather(*map(one, sequences))

    async def _ask_one(self, ids: list[int], num: int) -> list[dict[int, float]]:
        from openai import OpenAIError

        try:
            answer = await self._client.completions.create(
                model=self._settings.model, prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": num}
            )
        except (OpenAIError, ValueError) as error:  # the latter of an answer that is no JSON
            text = f"{self.name}: {type(error).__name__}: {error}"
            if self._settings.api_key_env:  # some servers repeat the key that they refuse
                text = text.replace(self._client.api_key, CONCEALED)
            raise EngineError(text) from None
        try:
            given: Any = answer.choices[0].prompt_logprobs
            found = [{int(token): float(one["logprob"]) for token, one in place.items()} for place in given[1:]]
            fits = len(found) == len(ids) - 1 and all(token in one for token, one in zip(ids[1:], found, strict=True))
        except (TypeError, KeyError, ValueError, AttributeError, IndexError):
            fits = False
        if not fits:
            raise EngineError(
                f"{self.name} returned no log-probabilities of the prompt's tokens (vLLM's `prompt_logprobs`)"
            )
        if not self._has_same_texts:
            self._check_texts(
                {int(token): one.get("decoded_token") for place in given[1:] for token, one in place.items()}
            )
        return found

    def _check_texts(self, texts: Mapping[int, str | None]) -> None:
        """Checks that most tokens are the same text on the server; some are written differently by themselves."""
        own = {token: str(self._tokenizer.decode([token])) for token, text in texts.items() if text}
        other = [token for token, text in own.items() if text.strip() != str(texts[token]).strip()]
        if 2 * len(other) > len(own):
            raise EngineError(
                f"{self.name} has a different tokenizer from ServerTeacher.tokenizer="
                f"{self._settings.tokenizer or self._settings.model!r}: token {other[0]} is {texts[other[0]]!r} on "
                f"the server, but {own[other[0]]!r} in this tokenizer"
            )
        self._has_same_texts = bool(own)

    def close(self) -> None:
        self._loop.close(self._client.close())
