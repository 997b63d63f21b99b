"""What an update that fails means for an engine around vLLM, here without it; with it: test_vllm_*.py."""

import asyncio
import dataclasses
from unittest.mock import Mock

import pytest
import torch
from flow import MODEL, make_data

from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.models.loading import load_config
from lit_async_rl.tasks import Calculator
from lit_async_rl.vllm.engine import VLLMEngine
from lit_async_rl.vllm.file_transfer import FileTransfer
from lit_async_rl.vllm.process import VLLMProcess
from lit_async_rl.vllm.requests import RequestBook, RequestRunner


class InstantEngine(VLLMEngine):
    """Answers at once; takes the first tensor of an update and then raises `error`, if there is one."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(transfer=FileTransfer())
        self.error = error

    def setup(self, model: str) -> None:
        self._vocab_size = load_config(model).vocab_size
        self._max_model_len = 20
        self._process = Mock(spec=VLLMProcess, is_dead=False)
        self._runner = Mock(spec=RequestRunner)

    def _publish(self, version, weights):
        next(weights)
        if self.error is not None:
            raise self.error
        return 0.5

    def _start(self, requests, version):
        for request in requests:
            self._book.begin([request.id])
            done = Completion(
                request_id=request.id,
                sample_index=0,
                token_ids=(1,),
                logprobs=(0.0,),
                versions=(0,),
                finish_reason="stop",
            )
            self._book.add(request.id, 1, [done])
            self._book.end([request.id])


def engine_with(error: BaseException | None = None) -> InstantEngine:
    engine = InstantEngine(error)
    engine.setup(MODEL)
    return engine


def request(prompt_ids=(1, 2)) -> GenerationRequest:
    return GenerationRequest(id=0, prompt_ids=prompt_ids, num_samples=1, sampling=SamplingParams(max_tokens=4))


def weights(read: list[int]):
    for number in range(5):
        read.append(number)
        yield "weight", torch.zeros(2)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("half loaded"),
            "^vLLM did not take the weights of version 3 and was stopped: half loaded$",
        ),
        (MemoryError(), "of version 3 and was stopped: MemoryError$"),
        (OSError(28, "No space left on device"), r"was stopped: \[Errno 28\] No space left on device$"),
        (EngineError("it died"), "^it died$"),
    ],
)
def test_after_a_failed_update_nothing_is_sampled_and_every_call_says_why(error, message):
    engine, read = engine_with(error), []
    engine.submit([request()])
    with pytest.raises(EngineError, match=message) as raised:
        engine.load_weights(3, weights(read))
    assert raised.value is error or raised.value.__cause__ is error
    assert read == list(range(5)), "other ranks would wait for this one"
    again = []
    for call in (lambda: engine.poll(1.0), lambda: engine.submit([]), lambda: engine.load_weights(4, weights(again))):
        with pytest.raises(EngineError, match=r"^vLLM broke and was stopped: "):
            call()
    assert again == list(range(5))
    assert engine.update_pauses_s == []


def test_a_step_that_takes_too_long_stays_what_it_is():
    engine = engine_with(StalledError("too long"))
    with pytest.raises(StalledError, match="too long"):
        engine.load_weights(1, weights([]))
    with pytest.raises(EngineError, match="broke and was stopped: too long"):
        engine.poll(1.0)


def test_ctrl_c_in_the_middle_of_an_update_stays_ctrl_c_and_is_not_made_to_wait():
    engine, read = engine_with(KeyboardInterrupt()), []
    with pytest.raises(KeyboardInterrupt):
        engine.load_weights(1, weights(read))
    assert read == [0]
    with pytest.raises(EngineError, match="broke and was stopped"):
        engine.poll(1.0)


def test_what_could_never_run_is_refused_and_the_rest_is_counted():
    engine = engine_with()
    engine.load_weights(1, weights([]))
    with pytest.raises(ValueError, match="max_model_len=20"):
        engine.submit([request(prompt_ids=(1,) * 17)])
    with pytest.raises(ValueError, match="vocabulary has only 98"):
        engine.submit([request(prompt_ids=(98,))])
    engine.submit([request()])
    assert [c.token_ids for c in engine.poll(1.0)] == [(1,)]
    engine.submit([request()])
    engine.abort([0])
    engine._process.soon.assert_called_once_with(engine._runner.cancel, {0})  # vLLM samples no more of it
    assert engine.poll(0.01) == []
    assert engine.num_tokens == 2
    assert engine.update_pauses_s == [0.5]
    engine.close()
    with pytest.raises(EngineError, match="vLLM was closed"):
        engine.submit([])


def test_a_request_that_is_cancelled_before_it_begins_leaves_nothing():
    runner = RequestRunner(VLLMProcess({}, 20.0), RequestBook(), (), model=MODEL, vocab_size=20)

    async def run() -> None:
        runner.launch([request()], "0")
        runner.cancel({request().id})
        await asyncio.sleep(0.05)

    asyncio.run(run())
    assert not runner._tasks
    assert not runner._requests


def test_a_request_that_ends_late_is_not_taken_for_the_next_of_its_number():
    runner = RequestRunner(VLLMProcess({}, 20.0), RequestBook(), (), model=MODEL, vocab_size=20)

    async def run() -> None:
        runner.launch([request()], "0")
        runner.cancel({request().id})
        runner.launch([request()], "0")
        late = runner._tasks[request().id]
        late.add_done_callback(lambda task: seen.append(task))
        await asyncio.sleep(0)  # the first one has been cancelled, and tells so in the next turn of the loop
        runner._tasks[request().id] = kept
        await asyncio.sleep(0.05)

    seen: list[object] = []
    kept: object = object()
    asyncio.run(run())
    assert seen
    assert runner._tasks == {request().id: kept}


def test_what_a_request_raises_before_it_begins_reaches_the_trainer():
    """Here vLLM is not installed, or not started: both are found when the request is made, in a task of the loop."""

    async def run() -> None:
        runner.launch([request()], "0")
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    book = RequestBook()
    runner = RequestRunner(VLLMProcess({}, 20.0), book, (), model=MODEL, vocab_size=20)
    book.begin([0])
    asyncio.run(run())
    with pytest.raises(EngineError, match=r"^vLLM broke and was stopped: "):
        book.take(20.0)
    assert not runner._tasks
    book = RequestBook()
    runner = RequestRunner(VLLMProcess({}, 20.0), book, (), model="no/such-model", vocab_size=20)
    stop = dataclasses.replace(request(), sampling=SamplingParams(max_tokens=4, stop=("end",)))
    runner.launch([stop], "0")
    with pytest.raises(EngineError, match=r"^vLLM broke and was stopped: .*no/such-model"):
        book.take(20.0)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": 3.0}, r"temperature must be 0 or in \[0\.01, 2\.0\] with vLLM, got 3\.0"),
        ({"temperature": 0.001}, r"temperature must be 0 or in \[0\.01, 2\.0\] with vLLM, got 0\.001"),
    ],
)
def test_sampling_that_vllm_refuses_or_changes_is_refused_at_the_start(sampling, message):
    params = SamplingParams(max_tokens=4, **sampling)
    with pytest.raises(ValueError, match=r"^data\.sampling\." + message):
        make_data(engine=VLLMEngine(), sampling=params)
    with pytest.raises(ValueError, match=r"^data\.sampling\." + message):
        make_data(engine=EpisodeEngine(VLLMEngine(), Calculator()), reward=None, sampling=params)
    with pytest.raises(ValueError, match=r"^data\.sampling\." + message):
        engine_with().submit([dataclasses.replace(request(), sampling=params)])
    make_data(sampling=params)  # the embedded engine takes any


def test_more_samples_than_vllm_takes_in_a_request_are_refused_at_the_start(monkeypatch):
    with pytest.raises(
        ValueError, match=r"at most 16384 samples of a prompt in one request, got 20000: lower data\.gro"
    ):
        make_data(engine=VLLMEngine(), group_size=20000)
    make_data(engine=VLLMEngine(), group_size=20000, replicate_prompts=True)
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "20000")
    make_data(engine=VLLMEngine(), group_size=20000)
