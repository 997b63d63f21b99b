"""The promises of the flow: synchronous is synchronous, fixed lags repeat, and the bound holds."""

import random
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from flow import MODEL, barrier_engine, fit, make_data, make_module, parameters
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lit_async_rl
from lit_async_rl.advantages.group import GroupMeanStd
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.loading import load_policy, load_tokenizer
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rewards.functions import exact_match
from lit_async_rl.scheduling.admission import Admission


def plain_synchronous_loop(steps: int) -> torch.Tensor:
    """GRPO as one would write it on a page: no threads, no Lightning, nothing of the trainer's data path or loss."""
    policy, tokenizer = load_policy(MODEL).train(), load_tokenizer(MODEL)
    engine = EmbeddedEngine()
    engine.setup(MODEL)
    stream = PromptStream(make_data().prompts)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    sampling = SamplingParams(max_tokens=10)
    for step in range(steps):
        engine.load_weights(step, policy.named_parameters())
        prompts = [stream.next() for _ in range(4)]
        requests = [
            GenerationRequest(id=n, prompt_ids=tuple(tokenizer(p.text)["input_ids"]), num_samples=4, sampling=sampling)
            for n, p in enumerate(prompts)
        ]
        rows = []
        for prompt, request, completions in zip(prompts, requests, engine.run(requests), strict=True):
            texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
            rewards = [exact_match(prompt, text) for text in texts]
            (advantages,) = GroupMeanStd()([rewards], [[1] * 4])
            rows += [
                (request.prompt_ids, c.token_ids, c.logprobs, a) for c, a in zip(completions, advantages, strict=True)
            ]
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))  # stable, as the trainer sorts
        width = max(len(p) + len(c) for p, c, _, _ in rows)
        ids = torch.tensor([[*p, *c, *[0] * (width - len(p) - len(c))] for p, c, _, _ in rows])
        behavior = torch.tensor([[*[0.0] * len(p), *lp, *[0.0] * (width - len(p) - len(c))] for p, c, lp, _ in rows])
        mask = torch.tensor([[t >= len(p) and t < len(p) + len(c) for t in range(width)] for p, c, _, _ in rows])
        advantage = torch.tensor([a for *_, a in rows])[:, None]
        hidden = policy.model(input_ids=ids, use_cache=False).last_hidden_state
        log_p = torch.log_softmax(policy.lm_head(hidden[:, :-1][mask[:, 1:]]).float() / 1.0, -1)
        taken = log_p.gather(-1, ids[:, 1:][mask[:, 1:]][:, None])[:, 0]
        logprobs = torch.zeros(ids.shape).masked_scatter(mask, taken)
        ratio = torch.where(mask, logprobs - behavior, 0.0).exp()
        loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
        optimizer.zero_grad()
        (torch.where(mask, loss, 0.0) * (mask / float(mask.sum()))).sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


@pytest.mark.slow
def test_staleness_zero_is_bit_for_bit_the_plain_synchronous_loop():
    module = make_module()
    before = parameters(module).clone()
    fit(module, make_data(max_staleness=0), 5)
    expected = plain_synchronous_loop(5)
    assert not torch.equal(before, expected)
    assert torch.equal(parameters(module), expected)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1, 4])
def test_fixed_lag_is_bit_for_bit_reproducible(lag):
    def run(delay: float) -> tuple[torch.Tensor, list[int]]:
        module, seen = make_module(), []
        chance = random.Random(delay)

        class Watch(pl.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                staleness = pl_module.stabilizer_signals["staleness"][batch.loss_mask]
                seen.append((int(staleness.min()), int(staleness.max())))
                time.sleep(chance.random() * delay)

        data = make_data(max_staleness=lag, schedule="fixed_lag", engine=barrier_engine())
        fit(module, data, 7, [Watch()])
        return parameters(module), seen

    (first, seen), (second, _) = run(0.0), run(0.08)
    assert torch.equal(first, second)
    assert seen == [(min(step, lag),) * 2 for step in range(7)]


class SlowEngine(EmbeddedEngine):
    """Polls at random speeds."""

    def __init__(self, chance: random.Random, delay: float, **settings) -> None:
        super().__init__(**settings)
        self.chance, self.delay = chance, delay

    def poll(self, timeout_s):
        time.sleep(self.chance.random() * self.delay)
        return super().poll(timeout_s)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1000),
    bound=st.integers(0, 3),
    sync_steps=st.integers(1, 2),
    groups=st.integers(1, 4),
    micro_batches=st.integers(1, 3),
    in_flight=st.booleans(),
    delays=st.tuples(*[st.sampled_from([0.0, 0.01, 0.03])] * 3),
)
def test_no_token_is_trained_on_beyond_the_bound(seed, bound, sync_steps, groups, micro_batches, in_flight, delays):
    chance, micro_batches = random.Random(seed), min(micro_batches, 2 * groups)
    worst, trained = [], []

    def reward(prompt, completion):
        time.sleep(chance.random() * delays[1])
        return chance.random()

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            worst.append(int(pl_module.stabilizer_signals["staleness"].max()))
            trained.extend(batch.group_index[batch.group_index >= 0].tolist())
            time.sleep(chance.random() * delays[2])

    data = make_data(
        max_staleness=bound,
        weight_sync_steps=sync_steps,
        groups_per_step=groups,
        group_size=2,
        micro_batches_per_step=micro_batches,
        reward=reward,
        reward_workers=2,
        sampling=SamplingParams(max_tokens=6),
        engine=SlowEngine(chance, delays[0], num_slots=5, in_flight_weight_updates=in_flight),
    )
    module = make_module(learning_rate=1e-5)
    fit(module, data, 6, [Watch()])
    assert max(worst) <= bound
    assert module.version == 6 // sync_steps
    assert all(trained.count(index) == 2 for index in trained), "each rollout of a group trains exactly once"
    assert len(set(trained)) == 6 * groups


@pytest.mark.slow
def test_skipped_updates_count_no_version_and_still_free_slots():
    class Skip(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if trainer.global_step % 2:
                optimizer.zero_grad(set_to_none=True)

    module = make_module()
    trainer = fit(module, make_data(max_staleness=1), 6, [Skip()])
    assert trainer.global_step == 6
    assert module.version == 3


@pytest.mark.slow
def test_trainer_and_engine_agree_on_fresh_tokens():
    worst = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            worst.append(float(pl_module.stabilizer_signals["log_ratio"][batch.loss_mask].abs().max()))

    sampling = SamplingParams(max_tokens=10, temperature=0.7)
    fit(make_module(), make_data(max_staleness=0, sampling=sampling), 4, [Watch()])
    assert len(worst) == 4
    assert max(worst) <= 1e-5


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_version_bound_and_prompts(tmp_path):
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            staleness = pl_module.stabilizer_signals["staleness"][batch.loss_mask]
            seen.append((pl_module.version, int(staleness.max())))

    first = fit(make_module(), make_data(max_staleness=1, schedule="fixed_lag", engine=barrier_engine()), 3)
    first.save_checkpoint(tmp_path / "step3.ckpt")
    module, data = make_module(), make_data(max_staleness=1, schedule="fixed_lag", engine=barrier_engine())
    fit(module, data, 6, [Watch()], ckpt_path=str(tmp_path / "step3.ckpt"))
    assert module.version == 6
    assert max(staleness for _, staleness in seen) <= 1
    assert data.stream.position == (6 + 1 + 1) * 4, "each prompt is sampled for one group, as without the interruption"


def test_checkpoints_load_without_pickle(tmp_path):
    trainer = fit(make_module(), make_data(), 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    checkpoint = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert checkpoint["version"] == 1


@pytest.mark.slow
def test_a_group_comes_from_admission_to_lightning_through_four_frames(monkeypatch):
    """Feed, source, producer, admission: one frame for each part of the way."""
    take = Admission.take
    ours, lightning = (str(Path(module.__file__).parent) for module in (lit_async_rl, pl))
    ways = set()

    def watched(admission, index):
        way, frame = ["take"], sys._getframe(1)
        while not frame.f_code.co_filename.startswith(lightning):
            if frame.f_code.co_filename.startswith(ours):  # not those of the type checker
                way.insert(0, frame.f_code.co_name)
            frame = frame.f_back
        ways.add(tuple(way))
        return take(admission, index)

    monkeypatch.setattr(Admission, "take", watched)
    fit(make_module(), make_data(), 2)
    fit(make_module(), make_data(stream_groups=True, micro_batches_per_step=2), 2)
    assert ways == {("__next__", "next_batches", "take", "take")}
