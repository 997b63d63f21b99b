"""Small HTTP servers that answer like vLLM and misbehave on demand: what a fleet does about it, without vLLM."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from weakref import WeakSet

import transformers
from aiohttp import web

from lit_async_rl.engines.vllm.engine_arguments import describe_config
from lit_async_rl.models.loading import load_config
from lit_async_rl.utils.guarded_calls import LoopThread


class MisbehavingServer:
    """Each method may be changed while it runs; all state is changed in the loop's thread only.

    Args:
        model: architecture that it says it has.
        outcome: called for each request: `ok`, `error` (500), `abort`, `drop` (closes the connection) or `hang`.
        num_bad_loads: times that it will fail to load weights.
    """

    def __init__(self, model: str, outcome: Callable[[str], str] = lambda number: "ok", num_bad_loads: int = 0) -> None:
        self.report = {
            "model": describe_config(load_config(model).get_text_config()),
            "transformers": transformers.__version__,
            "dtype": "float32",
            "can_sleep": True,
            "problems": [],
        }
        self.max_model_len = 256
        self.answer: Callable[[dict, dict], web.Response] | None = None  # in place of the right one to a request
        self.logprobs: list[float] | None = None  # of the tokens of a prompt; None is as the trainer has them
        self.outcome = outcome
        self.delay_s = 0.005
        self.num_bad_loads = num_bad_loads
        self._spoilt = WeakSet()  # connections that brought an error; uvicorn closes them, sooner or later
        self.hangs = False  # as after SIGSTOP: nothing is answered
        self.tag = "default"
        self.is_asleep = False
        self.num_loads = 0
        self.calls: list[str] = []  # that change it, with their queries
        self.served: Counter[int] = Counter()  # answers per request, by the first token of its prompt
        self._going_on = asyncio.Event()
        self.thread = LoopThread("test server")
        self.address = self.thread.call(self._start(), 10.0, "start")

    async def _start(self) -> str:
        app = web.Application(middlewares=[self._maybe_hang])
        app.router.add_get("/health", self._ok)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/is_paused", self._ok)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_get("/is_sleeping", self._is_sleeping)
        for path in ("/pause", "/resume", "/sleep", "/wake_up"):
            app.router.add_post(path, self._change)
        app.router.add_post("/collective_rpc", self._rpc)
        app.router.add_post("/update_weight_version", self._set_tag)
        app.router.add_post("/inference/v1/generate", self._generate)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        host, port = self.runner.addresses[0]
        return f"{host}:{port}"

    def close(self) -> None:
        self.thread.close(self.runner.cleanup())

    @web.middleware
    async def _maybe_hang(self, request, handler):
        while self.hangs:
            await asyncio.sleep(0.02)
        if request.transport in self._spoilt:
            request.transport.abort()
        answer = await handler(request)
        if answer.status == 500:
            self._spoilt.add(request.transport)
        return answer

    async def _ok(self, request):
        return web.json_response({})

    async def _is_sleeping(self, request):
        return web.json_response({"is_sleeping": self.is_asleep})

    async def _change(self, request):
        self.calls.append(request.path_qs)
        if request.path == "/sleep":
            self.is_asleep = True
        elif request.path_qs in ("/wake_up", "/wake_up?tags=kv_cache"):
            self.is_asleep = False
        return web.json_response({})

    async def _models(self, request):
        return web.json_response({"data": [{"max_model_len": self.max_model_len}]})

    async def _weight_info(self, request):
        return web.json_response({"weight_version": self.tag})

    async def _set_tag(self, request):
        self.tag = (await request.json())["new_version"]
        return web.json_response({})

    async def _rpc(self, request):
        if (await request.json())["method"] == "describe_policy":
            return web.json_response({"results": [self.report]})
        method = (await request.json())["method"]
        self.calls.append(method)
        if method == "policy_weights_state":
            return web.json_response({"results": [{"loaded": True}]})
        if method == "swap_policy_weights":
            return web.json_response({"results": [None]})
        if self.num_bad_loads:
            self.num_bad_loads -= 1
            return web.json_response({"error": {"message": "half loaded"}}, status=500)
        self.num_loads += 1
        return web.json_response({"results": [None]})

    async def _generate(self, request):
        body = await request.json()
        if not body:
            return web.json_response({}, status=400)
        number = body["token_ids"][0]
        params = body["sampling_params"]
        if "prompt_logprobs" in params:
            return self._scored(body["token_ids"])
        outcome = self.outcome(number) if not body["cache_salt"].endswith("proof") else "ok"
        await asyncio.sleep(self.delay_s * random.random())
        while self.hangs or outcome == "hang":
            await asyncio.sleep(0.02)
        if outcome == "drop":
            request.transport.abort()
        if outcome == "error":
            return web.json_response({"error": {"message": "out of luck"}}, status=500)
        self.served[number] += 1
        length = params["max_tokens"]  # 1 would end it
        token = number + (number == 1)
        choice = {
            "finish_reason": "abort" if outcome == "abort" else "length",
            "token_ids": [token] * length,
            "logprobs": {"content": [{"token_id": token, "logprob": -1.0}] * length},
            "weight_versions": [{"version": self.tag, "start": 0, "end": length}],
        }
        answer = {"choices": [choice | {"index": n} for n in range(params["n"])]}
        if self.answer is not None and not body["cache_salt"].endswith("proof"):
            return self.answer(body, answer)
        return web.json_response(answer)

    def _scored(self, token_ids):
        values = self.logprobs or [-1.0] * (len(token_ids) - 1)
        found = [None] + [{str(t): {"logprob": x}} for t, x in zip(token_ids[1:], values, strict=True)]
        return web.json_response({"choices": [], "prompt_logprobs": found})
