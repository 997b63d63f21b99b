"""Our scheduler under asynchronous scheduling, pauses and preemption, with a worker that only keeps account.

vLLM's real scheduler and block pool run; the worker is a stand-in that remembers, for each place of the KV cache, which
weights wrote it and for which token. Two batches are in flight with asynchronous scheduling, as on GPUs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tiny_models import save, tiny_llama
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from lit_async_rl.vllm.scheduler import make_scheduler

BLOCK = 4
NUM_BLOCKS = 24  # few, so that requests are preempted
MAX_LEN = 64
SEEDS = range(25)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save(tiny_llama(), tmp_path_factory.mktemp("model"))


def scheduler_of(make: Callable[..., Any], model: str, is_async: bool) -> Any:
    """A scheduler with prefix caching and chunked prefill."""
    scheduling = SchedulerConfig(
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=MAX_LEN,
        enable_chunked_prefill=True,
        async_scheduling=is_async,
        is_encoder_decoder=False,
    )
    cache = CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.9, enable_prefix_caching=True)
    cache.num_gpu_blocks = NUM_BLOCKS
    config = VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_LEN),
        scheduler_config=scheduling,
        cache_config=cache,
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return make(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


def own(vllm_config: Any, **arguments: Any) -> Any:
    """The scheduler that vLLM itself has for this configuration."""
    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return kind(vllm_config=vllm_config, **arguments)


@dataclass
class Account:
    """The worker: what is in the cache, and what was read from it.

    Attributes:
        version: of the weights.
        cache: (version, token) by block and place.
        blocks: of each request.
        first_version: version of each request's first token.
        faults: prompts read that other weights, or another prompt, had written.
    """

    version: int = 0
    cache: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    first_version: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    num_preemptions: int = 0

    def execute(self, step: Any, requests: dict[str, Any]) -> ModelRunnerOutput:
        """Computes the scheduled tokens, and samples where a request's last known token is among them."""
        begins: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            self.blocks[new.req_id] = list(new.block_ids[0])
            begins[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for name, blocks, begin in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            added = [] if blocks is None else list(blocks[0])
            self.num_preemptions += name in cached.resumed_req_ids
            self.blocks[name] = added if name in cached.resumed_req_ids else self.blocks[name] + added
            begins[name] = begin
        names = list(step.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            end = begins[name] + step.num_scheduled_tokens[name]
            prompt = requests[name].prompt_token_ids
            for position in range(begins[name], end):
                token = prompt[position] if position < len(prompt) else -1
                self.cache[self._place(name, position)] = (self.version, token)
            is_sampled = not requests[name].is_prefill_chunk
            if is_sampled:
                self._check(name, prompt, is_first=end == len(prompt))
            sampled.append([7] if is_sampled else [])
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={n: i for i, n in enumerate(names)}, sampled_token_ids=sampled
        )

    def _place(self, name: str, position: int) -> tuple[int, int]:
        return self.blocks[name][position // BLOCK], position % BLOCK

    def _check(self, name: str, prompt: list[int], is_first: bool) -> None:
        if is_first:
            self.first_version[name] = self.version
        read = [self.cache[self._place(name, position)] for position in range(len(prompt))]
        if [token for _, token in read] != list(prompt):
            self.faults.append(f"{name} read another prompt")
        if min(version for version, _ in read) < self.first_version.get(name, 0):
            self.faults.append(f"{name} read a prompt of older weights than its first token's")


def simulate(make: Callable[..., Any], model: str, is_async: bool, seed: int) -> tuple[Account, int]:
    """Groups of samples of one prompt, and updates at random moments; returns the account and the tokens delivered."""
    chance = random.Random(seed)
    init_none_hash(sha256)
    scheduler = scheduler_of(make, model, is_async)
    hasher = get_request_block_hasher(BLOCK, sha256)
    account = Account()
    requests: dict[str, Any] = {}
    in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
    num_tokens = number = 0

    def deliver() -> None:
        nonlocal num_tokens
        for outputs in scheduler.update_from_output(*in_flight.popleft()).values():
            num_tokens += sum(len(output.new_token_ids) for output in outputs.outputs)

    for _ in range(160):
        if number < 48 and chance.random() < 0.15:
            prompt = [chance.randrange(2, 60) for _ in range(chance.randrange(3, 22))]
            for _ in range(4):
                sampling = SamplingParams(max_tokens=chance.randrange(1, 14), ignore_eos=True)
                request = Request(str(number), prompt, sampling, None, block_hasher=hasher)
                requests[str(number)] = request
                scheduler.add_request(request)
                number += 1
        if scheduler.has_requests():
            step = scheduler.schedule()
            in_flight.append((step, account.execute(step, requests)))
        while len(in_flight) > (1 if is_async else 0):
            deliver()
        if chance.random() < 0.06:
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
            while in_flight and chance.random() < 0.7:  # results of batches that were computed before the update
                deliver()
            account.version += 1
            scheduler.set_pause_state(PauseState.UNPAUSED)
    while scheduler.has_unfinished_requests() or in_flight:
        if scheduler.has_unfinished_requests():
            step = scheduler.schedule()
            in_flight.append((step, account.execute(step, requests)))
        while len(in_flight) > (1 if is_async and scheduler.has_unfinished_requests() else 0):
            deliver()
    wanted = sum(request.max_tokens for request in requests.values())
    assert num_tokens == wanted, f"{num_tokens} of {wanted} tokens were delivered"
    return account, number


@pytest.mark.parametrize("is_async", [False, True], ids=["one batch", "two batches in flight"])
def test_no_sample_reads_its_prompt_from_a_cache_of_older_weights(model, is_async):
    versions = preemptions = 0
    for seed in SEEDS:
        account, _ = simulate(make_scheduler, model, is_async=is_async, seed=seed)
        assert not account.faults, f"seed {seed}: {account.faults[0]}"
        versions += account.version
        preemptions += account.num_preemptions
    assert versions > 100
    assert preemptions > 20


@pytest.mark.parametrize("is_async", [False, True], ids=["one batch", "two batches in flight"])
def test_the_simulation_finds_that_vllms_own_schedulers_do(model, is_async):
    found = sum(bool(simulate(own, model, is_async=is_async, seed=seed)[0].faults) for seed in SEEDS)
    assert found > len(SEEDS) // 2
