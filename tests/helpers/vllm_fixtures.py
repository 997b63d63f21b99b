"""A pytest plugin: real vLLM servers, engines that use them, models of several versions."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flow import MODEL
from tiny_models import save
from vllm_servers import PATIENT, Server

from lit_async_rl.engines.vllm.servers.engine import VLLMServerEngine
from lit_async_rl.models.loading import load_policy, load_tokenizer


@pytest.fixture(scope="session")
def started_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("servers")
    found = [Server(MODEL, folder / f"{n}.log") for n in range(2)]
    found.append(Server(MODEL, folder / "plain.log", plain=True, key="secret"))
    try:
        yield found
    finally:
        for server in found:
            server.signal(signal.SIGCONT)
            server.kill()


@pytest.fixture
def servers(started_servers: list[Server]) -> list[Server]:
    """Two that we use, and one that knows nothing of us and has a key; all are there, whatever the last test did."""
    for server in started_servers:
        server.make_ready()
    return [server.wait() for server in started_servers]


@pytest.fixture(scope="session")
def lms() -> dict[int, Any]:
    """One for each of nine versions."""
    found = {version: load_policy(MODEL) for version in range(9)}
    for version, lm in found.items():
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return found


@pytest.fixture(scope="session")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model, but nothing ends a completion before its limit."""
    lm: Any = load_policy(MODEL)
    lm.generation_config.eos_token_id = []
    return save(lm, tmp_path_factory.mktemp("endless"), load_tokenizer(MODEL))


@pytest.fixture
def start(servers: list[Server]) -> Iterator[Callable[..., VLLMServerEngine]]:
    """Makes engines; with models of versions, version 0 is loaded."""
    engines = []

    def make(lms: dict[int, Any] | None = None, model: str = MODEL, **settings: Any) -> VLLMServerEngine:
        engine = VLLMServerEngine([server.address for server in servers[:2]], **(PATIENT | settings))
        engines.append(engine)
        if lms is not None:
            engine.setup(model)
            engine.load_weights(0, lms[0].named_parameters())
        return engine

    yield make
    for engine in engines:
        engine.close()
        engine.close()
