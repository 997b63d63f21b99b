"""OpenEnv servers: episodes train, every session is closed, and what does not fit says so. `make test-adapters`."""

from __future__ import annotations

import asyncio
import runpy
import threading

import pytest

pytest.importorskip("openenv", reason="openenv is not installed: `make test-adapters`")

from markdown_blocks import ROOT

import lit_async_rl as rl
from lit_async_rl.environments.openenv import RESET, OpenEnvEnvironment, OpenEnvPrompts

pytestmark = pytest.mark.timeout(300)
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "openenv_sums.py"))
PLANTED = "hf-planted-51ab02"


class Counted(EXAMPLE["Sums"]):
    """Counts sessions; its first observation is another one each time, where `seed` is 13."""

    lock = threading.Lock()
    num_open = 0
    num_reset = 0

    def __init__(self):
        super().__init__()
        with self.lock:
            Counted.num_open += 1

    def reset(self, seed=None, episode_id=None, split=None, index=None, **_):
        with self.lock:
            Counted.num_reset += 1
        if split is not None:
            return EXAMPLE["Seen"](text=f"{split} {index}")
        return super().reset(seed=Counted.num_reset if seed == 13 else seed)

    def close(self):
        with self.lock:
            Counted.num_open -= 1


@pytest.fixture(scope="module")
def url():
    serve = EXAMPLE["serve"]
    serve.__globals__["Sums"] = Counted
    return serve(max_concurrent_envs=64)


def play(environment, prompt, *turns):
    async def episode():
        found = await environment.start(prompt)
        try:
            return [await found.step(turn) for turn in turns]
        finally:
            await found.close()

    return asyncio.run(asyncio.wait_for(episode(), 60.0))


def test_prompts_are_first_observations_and_repeatable(url):
    prompts = OpenEnvPrompts(url, size=3, first=5)
    assert len(prompts) == 3
    assert prompts[0].metadata == {RESET: {"seed": 5}}
    assert prompts[0] == prompts[0]
    assert len({prompts[n].text for n in range(3)}) == 3
    assert OpenEnvPrompts(url, size=2, split="test")[1].text == "test 1"
    with pytest.raises(IndexError):
        prompts[3]


def test_an_episode_is_played_on_the_server(url):
    prompt = OpenEnvPrompts(url)[7]
    a, b = map(int, prompt.text.rstrip("=").split("+"))
    said = play(OpenEnvEnvironment(url), prompt, f"[{a}+{b}]", str(a + b))
    assert [(one.text, one.reward, one.done) for one in said] == [(f"{a + b}:", 0.0, False), ("", 1.0, True)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(text_field="board"), "text_field='board': the observation of http.* has metadata, text|text, metadata"),
        (dict(action_field="code"), "(?s)message"),
    ],
)
def test_fields_that_do_not_exist_are_named(url, settings, message):
    with pytest.raises(Exception, match=message):
        play(OpenEnvEnvironment(url, **settings), OpenEnvPrompts(url)[1], "1")


def test_a_server_that_repeats_nothing_is_refused(url):
    with pytest.raises(ValueError, match="is not repeatable"):
        play(OpenEnvEnvironment(url), OpenEnvPrompts(url, first=13)[0], "1")
    with pytest.raises(ValueError, match=r"needs data\.prompts of class OpenEnvPrompts"):
        play(OpenEnvEnvironment(url), rl.Prompt(text="1+1="), "1")


def test_no_server_is_an_error_that_names_the_address():
    with pytest.raises(ConnectionError, match=r"ws://127\.0\.0\.1:9"):
        OpenEnvPrompts("http://127.0.0.1:9", timeout_s=5.0)[0]


def test_a_key_comes_from_the_environment(url, monkeypatch):
    monkeypatch.delenv("MY_HF_TOKEN", raising=False)
    with pytest.raises(ValueError, match="api_key_env='MY_HF_TOKEN' is not set"):
        OpenEnvEnvironment(url, api_key_env="MY_HF_TOKEN")
    monkeypatch.setenv("MY_HF_TOKEN", PLANTED)
    environment = OpenEnvEnvironment(url, api_key_env="MY_HF_TOKEN")
    assert environment.server.client()._headers == {"Authorization": f"Bearer {PLANTED}"}
    assert PLANTED not in str(vars(environment))
    assert play(environment, OpenEnvPrompts(url, api_key_env="MY_HF_TOKEN")[0], "1")[0].done


def test_the_example_trains_and_leaves_no_session(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = Counted.num_reset
    metrics = EXAMPLE["main"](max_steps=2, url=url)
    assert 0.0 <= metrics["reward/mean"] <= 1.0
    assert Counted.num_reset >= before + 2 * 4 * 4
    for _ in range(200):
        if not Counted.num_open:
            break
        threading.Event().wait(0.05)
    assert Counted.num_open == 0
