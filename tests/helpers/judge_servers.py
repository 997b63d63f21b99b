"""An OpenAI-compatible server on loopback, in its own thread, that judges as it is told to and misbehaves on demand."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from lit_async_rl.runtime.loop import LoopThread

MARK = re.compile(r"VERDICT (\w+): VALUE\Z")


def quoted_responses(text: str, mark: str) -> list[str]:
    """The responses that stand between lines with the mark."""
    form = rf"^BEGIN RESPONSE(?: [AB])? {mark}\n(.*?)\nEND RESPONSE(?: [AB])? {mark}$"
    return re.findall(form, text, re.S | re.M)


class Asked:
    """One request: its body, its `number` from 0, the mark, and the responses that stand between delimiters."""

    def __init__(self, number: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self.number = number
        self.body = body
        self.headers = headers
        self.text = body["messages"][-1]["content"]
        self.mark = MARK.search(self.text)[1]
        self.responses = quoted_responses(self.text, self.mark)


class JudgeServer:
    """Answers chat completions.

    Args:
        judge: text of the answer to a request; the default is grade 7.
        fault: status, headers and text of a failure, `drop` to close the connection, `hang`, or None for an answer.
        latency_s: seconds until an answer.
        usage: numbers of tokens of each answer.
        finish_reason: of each answer.

    Attributes:
        num_answers: by the first response.
        busy_s: seconds for which requests were held, all together.
        max_under_way: most requests at a time.
    """

    def __init__(
        self,
        judge: Callable[[Asked], str | None] = lambda asked: f"Well.\nVERDICT {asked.mark}: 7",
        fault: Callable[[Asked], tuple[int, dict[str, str], str] | str | None] = lambda asked: None,
        latency_s: Callable[[Asked], float] = lambda asked: 0.0,
        usage: dict[str, int] | None = None,
        finish_reason: str = "stop",
    ) -> None:
        self.judge = judge
        self.fault = fault
        self.latency_s = latency_s
        self.usage = {"prompt_tokens": 100, "completion_tokens": 10} if usage is None else usage
        self.finish_reason = finish_reason
        self.requests: list[Asked] = []
        self.num_answers: Counter[str] = Counter()
        self.busy_s = 0.0
        self.max_under_way = 0
        self._under_way = 0
        self._released = asyncio.Event()
        self.thread = LoopThread("judge server")
        self.url = self.thread.call(self._start(), 10.0, "start")

    async def _start(self) -> str:
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=2048)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = Asked(len(self.requests), await request.json(), request.headers)
        self.requests.append(asked)
        self._under_way += 1
        self.max_under_way = max(self.max_under_way, self._under_way)
        seconds = self.latency_s(asked)
        try:
            await asyncio.sleep(seconds)
            fault = self.fault(asked)
            if fault == "hang":
                await self._released.wait()
            if fault == "drop":
                request.transport.abort()
                return web.Response()
            if isinstance(fault, tuple):
                status, headers, text = fault
                return web.Response(status=status, headers=headers, text=text)
            self.num_answers[asked.responses[0]] += 1
            message = {"role": "assistant", "content": self.judge(asked)}
            choice = {"message": message, "finish_reason": self.finish_reason}
            return web.json_response({"choices": [choice], "usage": self.usage or None})
        finally:
            self._under_way -= 1
            self.busy_s += seconds

    def close(self) -> None:
        """Ends the server."""
        self.thread.soon(self._released.set)
        self.thread.close(self._runner.cleanup())
