"""Servers that answer nonsense with status 200: a failure of theirs, never of the run. No vLLM."""

import json
import logging
import re

import pytest
from aiohttp import web
from flow import MODEL
from http_servers import MisbehavingServer
from test_server_fleet import QUICK, publish, requests, wait_for

from lit_async_rl.engines.base import Probe, probe_tokens
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.vllm.engine import VLLMEngine
from lit_async_rl.engines.vllm.servers.engine import VLLMServerEngine
from lit_async_rl.errors import EngineError

pytestmark = pytest.mark.timeout(120)
HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"


def raw(body: bytes, status: int = 200, content_type: str = "application/json") -> web.Response:
    return web.Response(body=body, status=status, headers={"Content-Type": content_type})


def changed(change):
    """A response whose choices are changed."""

    def answer(body, right):
        change(right["choices"])
        return web.json_response(right)

    return answer


def at_first(name, value):
    return changed(lambda choices: choices[0].update({name: value}))


HOSTILE = {
    "html": (lambda body, right: raw(HTML, content_type="text/html"), "Invalid JSON.*502 Bad Gateway"),
    "no utf-8": (lambda body, right: raw(b'{"choices": "\xff\xfe"}'), "Invalid JSON"),
    "no known charset": (lambda body, right: raw(b"{}", content_type="application/json; charset=x-none"), "choices"),
    "nothing": (lambda body, right: raw(b""), "an empty answer"),
    "an empty object": (lambda body, right: raw(b"{}"), "choices: Field required"),
    "a list": (lambda body, right: raw(b"[]"), "Input should be an object"),
    "null": (lambda body, right: raw(b"null"), "malformed answer"),
    "deeply nested": (lambda body, right: raw(b"[" * 100_000), "malformed answer"),
    "far too much": (lambda body, right: raw(b" " * 2_000_000), "more than [0-9]+ bytes"),
    "an error": (lambda body, right: raw(b'{"error": {"message": "out of luck"}}'), "choices: Field required"),
    "a redirection": (
        lambda body, right: web.Response(status=307, headers={"Location": "http://127.0.0.1:9/"}),
        "HTTP 307",
    ),
    "short token_ids": (changed(lambda choices: choices[0]["token_ids"].pop()), "2 tokens and log-probabilities of 3"),
    "fewer choices": (changed(lambda choices: choices.pop()), r"has samples \[0\], asked for 2"),
    "more choices": (changed(lambda choices: choices.append(choices[0] | {"index": 2})), "asked for 2"),
    "one choice twice": (changed(lambda choices: choices[1].update(index=0)), r"has samples \[0, 0\]"),
    "an odd end": (at_first("finish_reason", "tool_calls"), "finish_reason: Input should be 'stop' or 'length'"),
    "a stop that is none": (at_first("finish_reason", "stop"), "stopped at token .*, which ends no completion"),
    "a text": (at_first("token_ids", ["a", "b", "c"]), "token_ids.0: Input should be a valid integer, got 'a'"),
    "true": (at_first("token_ids", [True, True, True]), "should be a valid integer"),
    "no version": (at_first("weight_versions", None), "does not say which weights sampled which token"),
    "another's": (at_first("weight_versions", [{"version": "x-1", "start": 0, "end": 3}]), "another trainer"),
    "a newer version": (
        lambda body, right: web.json_response(json.loads(re.sub(r'-0"', '-9"', json.dumps(right)))),
        r"versions\[2\]=9, newer than the policy's newest version 0",
    ),
    "a version's end": (
        changed(lambda choices: choices[0]["weight_versions"][0].update(end=10**12)),
        "has versions of tokens 0 to 1000000000000",
    ),
    "not in the vocabulary": (
        changed(
            lambda choices: choices[0].update(
                token_ids=[98] * 3, logprobs={"content": [{"token_id": 98, "logprob": -1.0}] * 3}
            )
        ),
        "which is not in the vocabulary of 98 tokens",
    ),
    "too likely": (
        changed(lambda choices: choices[0]["logprobs"]["content"][0].update(logprob=0.5)),
        "logprob: Input should be less than",
    ),
    "NaN": (lambda body, right: raw(json.dumps(right).replace("-1.0", "NaN").encode()), "finite number"),
    "cut off": (lambda body, right: raw(json.dumps(right).encode()[:-40]), "Invalid JSON"),
}


def shorter(body, right):
    """As by a server whose `--max-model-len` is too small: ends for its length before `max_tokens`."""
    for choice in right["choices"]:
        del choice["token_ids"][1:], choice["logprobs"]["content"][1:]
        choice["weight_versions"][0]["end"] = 1
    return web.json_response(right)


HOSTILE["too short"] = (shorter, "ended for its length after 1 of max_tokens=3 tokens")


@pytest.fixture(scope="module")
def pair():
    """A hostile server, a good one, and an engine that has given them version 0."""
    servers = [MisbehavingServer(MODEL), MisbehavingServer(MODEL)]
    engine = VLLMServerEngine([server.address for server in servers], **(QUICK | dict(recovery_timeout_s=60.0)))
    engine.setup(MODEL)
    publish(engine, 0)
    yield engine, *servers
    for part in [engine, *servers]:
        part.close()


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_malformed_answer_is_that_servers_failure_and_its_requests_are_sampled_again(pair, kind, caplog):
    caplog.set_level(logging.WARNING)
    engine, hostile, _ = pair
    wait_for(lambda: len(engine._fleet.pool.servers_in) == 2, 30.0)
    hostile.answer, message = HOSTILE[kind]
    first = 1000 * list(HOSTILE).index(kind)
    results = run_requests(engine, requests(6, first=first))
    assert [[c.sample_index for c in completions] for completions in results] == [[0, 1]] * 6
    hostile.answer = None
    lines = [record.getMessage() for record in caplog.records if "is out" in record.getMessage()]
    assert lines, "nobody noticed"
    for line in lines:
        assert re.search(rf"vLLM server http://{hostile.address} is out: .*{message}", line), line
        assert "\n" not in line
        assert len(line) < 450
    assert engine.poll(0.05) == []


# -- servers that come back otherwise than they were ------------------------------------------------------------------


def come_back(server, change):
    """A server that is stopped, changed, and started again."""
    server.hangs = True
    change()
    server.tag = "default"
    server.hangs = False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda server: server.report["model"]["rope_parameters"].update(rope_theta=500.0),
            r"serves another model: its rope_parameters\.rope_theta is 500\.0, ours 10000\.0",
        ),
        (
            lambda server: server.report["model"].update(rms_norm_eps=1e-2),
            r"serves another model: its rms_norm_eps is 0\.01, ours 1e-0[56]",
        ),
        (
            lambda server: setattr(server, "max_model_len", 40),
            "takes only 40 tokens of prompt and completion, and the run needs 256: start it with the --max-model-len",
        ),
        (
            lambda server: server.report.update(problems=["--speculative-config: vLLM reports wrong"]),
            "was started with --speculative-config: vLLM reports wrong.*scripts/serve.py",
        ),
        (lambda server: server.report.pop("dtype"), "install the trainer's there"),
        (
            lambda server: setattr(server, "logprobs", [-1.36] * 47),
            r"other log-probabilities than the trainer with the weights of version 0.* is 0\.36, and float32 explains",
        ),
    ],
    ids=["rope_theta", "rms_norm_eps", "max_model_len", "speculation", "another package", "another model's weights"],
)
def test_a_server_that_comes_back_as_another_is_refused_by_name(change, message, caplog):
    caplog.set_level(logging.WARNING)
    servers = [MisbehavingServer(MODEL), MisbehavingServer(MODEL)]
    engine = VLLMServerEngine([server.address for server in servers], **QUICK)
    try:
        engine.setup(MODEL)
        engine.probe = Probe(0, probe_tokens(98), (-1.0,) * 47, "float32")
        publish(engine, 0)
        come_back(servers[0], lambda: change(servers[0]))
        expected = rf"vLLM server http://{servers[0].address} is still out: .*{message}"
        wait_for(lambda: re.search(expected, caplog.text), 20.0)
        run_requests(engine, requests(4))
        assert engine._fleet.pool.servers_in == {f"http://{servers[1].address}"}
        assert caplog.text.count("still out") == 1
    finally:
        for part in [engine, *servers]:
            part.close()


def test_at_the_first_weights_a_server_with_other_log_probabilities_ends_the_run():
    server = MisbehavingServer(MODEL)
    engine = VLLMServerEngine([server.address], **QUICK)
    engine.setup(MODEL)
    engine.probe = Probe(0, probe_tokens(98), (-1.0,) * 46 + (-2.0,), "float32")
    with pytest.raises(EngineError, match=rf"vLLM server http://{server.address} .*other log-probabilities"):
        publish(engine, 0)
    engine.close()
    server.close()


def test_an_unreachable_server_is_named_without_a_raw_dump():
    engine = VLLMServerEngine(["127.0.0.1:9"], **(QUICK | dict(startup_timeout_s=0.1)))
    with pytest.raises(EngineError) as error:
        engine.setup(MODEL)
    engine.close()
    assert re.fullmatch(
        r"vLLM server http://127\.0\.0\.1:9 cannot be reached \([^()\[\]]*\); "
        r"waited data\.engine\.startup_timeout_s=0\.1 for it",
        str(error.value),
    )


# -- settings that break a promise ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("speculative_config", {"method": "ngram"}, "wrong log-probabilities"),
        ("logprobs_mode", "raw_logprobs", "only processed_logprobs"),
        ("load_format", "auto", "the weights are the trainer's"),
        ("hf_overrides", {"rope_theta": 1.0}, "different models"),
        ("max_num_seqs", 4, r"see data\.engine\.max_num_seqs"),
        ("scheduler_cls", "x.Y", "the engine sets it itself"),
        ("kv_transfer_config", {}, "keys and values of older weights"),
    ],
)
def test_engine_arguments_that_break_a_promise_are_refused_by_name(name, value, why):
    with pytest.raises(ValueError, match=rf"^data\.engine\.engine_args\.{name}=.* cannot be set: .*{why}"):
        VLLMEngine(engine_args={name: value})
