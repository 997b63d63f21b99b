"""Servers and proxies that break HTTP itself: a failure of that server, in time. No vLLM."""

import asyncio
import gzip
import json
import random
import re
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from test_fuzzed_answers import ASKED, RIGHT, RUN, SEEDS

from lit_async_rl.engines.vllm.servers.client import ServerClient
from lit_async_rl.engines.vllm.servers.connection import ServerFailure, ServerRefusal

pytestmark = pytest.mark.timeout(120)
LIMIT_S = 0.5
BODY = json.dumps(RIGHT).encode()


def answer(body: bytes = BODY, *headers: str, length: int | None = None) -> bytes:
    head = ["HTTP/1.1 200 OK", "Content-Type: application/json", *headers]
    if length is not None or not headers:
        head.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*head, "", ""]).encode() + body


def chunked(body: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return answer(b"%x\r\n%s\r\n%s" % (len(body), body, end), "Transfer-Encoding: chunked")


def talk(raw: bytes, closes: bool = True) -> str:
    """The failure of a request that is answered with these bytes; empty if it was good."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        if closes:
            writer.close()
        else:
            await asyncio.sleep(3 * LIMIT_S)

    async def scenario():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        client = ServerClient(f"http://{host}:{port}", None, LIMIT_S, LIMIT_S, LIMIT_S)
        try:
            found = await client.generate(ASKED, (1,), "salt", RUN)
            assert [(c.sample_index, c.token_ids) for c in found] == [(n, (8, 9, 10)) for n in range(2)]
            return ""
        except (ServerFailure, ServerRefusal) as error:
            return str(error)
        finally:
            await client.close()
            server.close()

    return asyncio.run(asyncio.wait_for(scenario(), 20 * LIMIT_S))


BROKEN = {
    "nothing": (b"", "cannot be reached"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", "broken HTTP"),
    "random bytes": (random.Random(0).randbytes(500), "broken HTTP"),
    "no status": (b"HTTP/1.1\r\n\r\n", "broken HTTP"),
    "an early end": (answer(length=len(BODY) + 1), "broken HTTP"),
    "a negative length": (answer(length=-1), "broken HTTP"),
    "a length that is no number": (answer(BODY, "Content-Length: many"), "broken HTTP"),
    "two lengths": (answer(BODY, "Content-Length: 3", f"Content-Length: {len(BODY)}"), "broken HTTP|malformed"),
    "no end of its chunks": (chunked(BODY, b""), "broken HTTP"),
    "a chunk size that is none": (answer(b"xyz\r\n" + BODY, "Transfer-Encoding: chunked"), "broken HTTP"),
    "gzip that is none": (answer(BODY, "Content-Encoding: gzip", length=len(BODY)), "broken HTTP"),
    "gzip that ends early": (chunked(gzip.compress(BODY)[:-20]), "malformed"),
    "deflate that is none": (answer(BODY, "Content-Encoding: deflate", length=len(BODY)), "broken HTTP"),
    "an endless header": (b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 10**6, "broken HTTP"),
    "endless headers": (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10**5, "broken HTTP|no answer"),
    "a text of unknown length": (answer(b"<html>Bad Gateway</html>", "Connection: close"), "malformed"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_http_is_that_servers_failure(kind):
    raw, message = BROKEN[kind]
    failure = talk(raw)
    assert re.search(message, failure), failure
    assert "\n" not in failure
    assert len(failure) < 400


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 200 OK\r\n", answer(BODY[:50], length=len(BODY))], ids=len)
def test_an_answer_that_never_ends_is_given_up_in_time(raw):
    assert re.fullmatch(r"no answer to /inference/v1/generate within 0\.5 s", talk(raw, closes=False))


def test_a_small_answer_that_unpacks_to_far_too_much_is_not_unpacked():
    bomb = zlib.compress(b" " * 10**8)
    assert len(bomb) < 10**6
    failure = talk(answer(bomb, "Content-Encoding: deflate", length=len(bomb)))
    assert re.search("more than [0-9]+ bytes|broken HTTP", failure), failure


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=SEEDS)
def test_fuzzed_http_is_a_good_answer_or_that_servers_failure(seed):
    rng = random.Random(seed)
    whole = rng.choice([answer(), chunked(BODY), answer(gzip.compress(BODY), "Content-Encoding: gzip", length=None)])
    raw = bytearray(whole)
    head = raw.index(b"\r\n\r\n") + 4
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(head if rng.random() < 0.7 else len(raw))
        action = rng.choice(["change", "remove", "insert", "cut"])
        if action == "change":
            raw[place] = rng.randrange(256)
        elif action == "remove":
            del raw[place : place + rng.randint(1, 9)]
        elif action == "insert":
            raw[place:place] = rng.randbytes(rng.randint(1, 9))
        elif rng.random() < 0.2:
            del raw[place:]
        head = min(head, len(raw) or 1)
        if not raw:
            break
    failure = talk(bytes(raw))
    assert "\n" not in failure
