"""A real engine whose answers to a judge's questions are written by the test: a random model states no verdict."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from judge_servers import quoted_responses

from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.loading import load_tokenizer

MARK = re.compile(r"VERDICT (\w+): VALUE")


class JudgingEngine(EmbeddedEngine):
    """Samples rollouts, and decodes answers to questions, whose tokens are then replaced.

    `judge(mark, responses)` gives the text of an answer. What was asked is kept in attributes of the class, as is how
    often an engine is to fail when an answer comes.
    """

    judge: ClassVar[Callable[[str, list[str]], str]] = lambda mark, responses: f"Well.\nVERDICT {mark}: 7"
    asked: ClassVar[list[tuple[str, list[str]]]] = []
    versions: ClassVar[list[int]] = []  # of the first token of each answer
    num_failures: ClassVar[int] = 0

    @classmethod
    def reset(cls) -> None:
        cls.judge = staticmethod(lambda mark, responses: f"Well.\nVERDICT {mark}: 7")
        cls.asked = []
        cls.versions = []
        cls.num_failures = 0

    def setup(self, model):
        self._tokenizer = load_tokenizer(model)
        self._questions = {}
        super().setup(model)

    def submit(self, requests):
        for request in requests:
            text = self._tokenizer.decode(list(request.prompt_ids))
            if found := MARK.search(text):
                self._questions[request.id] = (found[1], quoted_responses(text, found[1]))
        super().submit(requests)

    def poll(self, timeout_s):
        return [self._answered(completion) for completion in super().poll(timeout_s)]

    def _answered(self, completion):
        if completion.request_id not in self._questions:
            return completion
        if JudgingEngine.num_failures:
            JudgingEngine.num_failures -= 1
            raise RuntimeError("the engine was told to fail")
        mark, responses = self._questions.pop(completion.request_id)
        JudgingEngine.asked.append((mark, responses))
        JudgingEngine.versions.append(completion.versions[0])
        text = JudgingEngine.judge(mark, responses)
        ids = (*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id)
        return replace(
            completion,
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            versions=(completion.versions[0],) * len(ids),
            finish_reason="stop",
        )
