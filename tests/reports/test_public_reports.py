"""Public reports of users of other trainers, tried here: each test calculates the right value on its own.

`log.yaml` beside this file lists every report in the order in which its project closed it, with what was tried and what
came of it; reports of things that do not exist here have a reason there instead of a test.
"""

import csv
import functools
import json
import math
import re
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml
from chat_models import chat_model
from every_family import load, model_types, tiny_config
from flow import MODEL, barrier_engine, fit, make_data, make_module, parameters
from groups import collate, group
from launch import launch
from tiny_models import save, tiny_llama, tiny_tokenizer

import lit_async_rl as rl
from lit_async_rl.models import packing as packing_module
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.prompts.sources import as_source
from lit_async_rl.rollouts.group_book import SampleRequests
from lit_async_rl.types import Completion

ROOT = Path(__file__).parents[2]


class Batches(pl.Callback):
    """Everything that a run trained on, and what it logged after each step."""

    def __init__(self):
        self.batches, self.metrics, self.signals = [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches.append(batch)
        self.signals.append(dict(module.stabilizer_signals))
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def varied(prompt, completion):
    """A reward that differs between nearly all completions."""
    return sum(map(ord, completion)) % 17 / 17


def run(steps=2, module=None, callbacks=(), **data):
    """A short run of the shipped policy; returns module, data module, and what it trained on."""
    watch = Batches()
    module = module or make_module()
    small = dict(groups_per_step=2, group_size=2, sampling=rl.SamplingParams(max_tokens=6), reward=varied)
    data = make_data(**(small | data))
    fit(module, data, steps, [*callbacks, watch])
    return module, data, watch


# -- TRL ---------------------------------------------------------------------------------------------------------------


def test_trl_6489_the_wait_for_rollouts_is_the_time_that_the_trainer_waited():
    """Their metric was the time since the last batch, forward passes included."""

    class Slow(pl.Callback):
        def on_train_batch_end(self, *_):
            time.sleep(0.3)

        def on_train_end(self, trainer, module):
            self.stats = trainer.datamodule.stats()

    slow = Slow()
    _, _, watch = run(4, callbacks=[slow, rl.ThroughputMonitor()], max_staleness=3)
    waits = [metrics["perf/rollout_wait_s"] for metrics in watch.metrics if "perf/rollout_wait_s" in metrics]
    assert len(waits) == 4
    assert sum(waits) == pytest.approx(slow.stats.wait_s, rel=1e-6, abs=1e-6)
    assert slow.stats.run_s - sum(waits) > 3 * 0.3  # the time in which training slept is none of it


def test_trl_6439_cut_completions_leave_numerator_and_denominator():
    groups = [group([1.0, 0.0], [3, 5], reasons=["stop", "length"]), group([0.0, 1.0], [2, 4], index=1)]
    kept = [rl.OverlongFilter()(one) for one in groups]
    batches = collate(kept, 2)
    trained = sum(int(batch.loss_mask.sum()) for batch in batches)
    assert trained == 3 + 2 + 4
    for batch in batches:
        assert torch.allclose(batch.token_weights[batch.loss_mask], torch.tensor(1 / trained))
        assert not batch.token_weights[~batch.loss_mask].any()


def test_trl_6357_an_end_token_that_also_pads_is_trained_on(tmp_path):
    """Masking by `ids == pad` would drop it."""
    lm = tiny_llama(vocab=64)
    lm.config.pad_token_id = lm.config.eos_token_id
    lm.generation_config.pad_token_id = lm.config.eos_token_id
    tokenizer = tiny_tokenizer(64)
    tokenizer.pad_token = tokenizer.eos_token
    folder = save(lm, tmp_path / "model", tokenizer)
    _, data, watch = run(
        3,
        module=make_module(model=folder),
        model=folder,
        prompts=["a b c", "d e"],
        reward=lambda prompt, completion: float(len(completion) % 3),
        sampling=rl.SamplingParams(max_tokens=60),
        groups_per_step=4,
        group_size=8,
    )
    eos = lm.config.eos_token_id
    assert data.codec.pad_token_id == eos
    ends = sum(int((batch.input_ids[batch.loss_mask] == eos).sum()) for batch in watch.batches)
    rows = [(batch.input_ids[n], batch.attention_mask[n]) for batch in watch.batches for n in range(len(batch))]
    stopped = sum(int(ids[mask][-1] == eos) for ids, mask in rows)
    assert ends == stopped > 0


@pytest.mark.slow
def test_trl_6313_partials_and_instances_are_rewards():
    def longer(prompt, completion, scale):
        return scale * len(completion)

    class Longer:
        def __call__(self, prompt, completion):
            return float(len(completion))

    for reward in (functools.partial(longer, scale=0.5), Longer(), Longer().__call__):
        _, _, watch = run(1, reward=reward)
        assert torch.isfinite(watch.batches[0].rewards).all()


def test_trl_6324_iterable_datasets_are_refused_by_name_or_read():
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "31=", "answer": "13"}, {"prompt": "21=", "answer": "12"}]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"data\.prompts must be .* got IterableDataset"):
        as_source(stream, "data.prompts")
    make_data(prompts=datasets.Dataset.from_list(rows))


def test_trl_6418_a_run_raises_no_deprecation_warning_of_its_own():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(1)
    own = [
        w for w in caught if issubclass(w.category, DeprecationWarning | FutureWarning) and "lit_async" in w.filename
    ]
    assert not own, [str(w.message) for w in own]


# -- OpenRLHF ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
def test_openrlhf_1299_ragged_steps_train_on_every_completion_once(micro_batches):
    groups = [group([1.0, 0.0, 0.5], [3, 7, 2], index=n) for n in range(3)]
    batches = collate(groups, micro_batches)
    rows = sum(int((batch.group_index >= 0).sum()) for batch in batches)
    assert rows == 9
    assert sum(int(batch.loss_mask.sum()) for batch in batches) == 36
    assert math.isclose(sum(float(batch.token_weights.sum()) for batch in batches), 1.0, rel_tol=1e-6)


@pytest.mark.parametrize("bound", [0, 2])
def test_openrlhf_1300_the_last_step_is_trained_and_nothing_beyond_it(bound):
    module, _, watch = run(3, max_staleness=bound)
    assert module.trainer.global_step == 3
    assert module.version >= 2
    assert len(watch.batches) == 3
    trained = sorted({int(n) for batch in watch.batches for n in batch.group_index if n >= 0})
    assert len(trained) == 6


@pytest.mark.parametrize("advantage", [rl.GroupMeanStd(), rl.GroupMean()])
def test_openrlhf_1250_groups_of_one_are_refused_where_their_advantage_is_always_zero(advantage):
    with pytest.raises(ValueError, match=r"data\.group_size=1 with data\.advantage"):
        run(1, group_size=1, advantage=advantage)
    _, _, watch = run(1, group_size=1, advantage=rl.Raw())
    assert watch.batches[0].advantages.abs().sum() > 0


def test_openrlhf_token_loss_of_a_micro_batch_without_trained_tokens_is_zero():
    module = make_module(model=rl.asset("small_sort_policy"))
    groups = [rl.OverlongFilter()(group([1.0, 0.0], [3, 5], reasons=["length", "length"]))]
    (batch,) = collate(groups, 1)
    loss, _ = module.objective(module.policy, None, batch, version=0)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(p.grad is None or torch.equal(p.grad, torch.zeros_like(p)) for p in module.policy.parameters())


@pytest.mark.parametrize("reward", [0.0, -0.0, 0, -3.5])
def test_openrlhf_1219_a_reward_of_zero_is_a_reward(reward):
    _, _, watch = run(1, reward=lambda prompt, completion: reward)
    assert torch.equal(watch.batches[0].rewards, torch.full((4,), float(reward)))


@pytest.mark.slow
def test_openrlhf_1238_every_schedule_takes_the_arguments_that_it_is_given():
    for schedule in (rl.ConstantRate(), rl.Linear(), rl.Cosine(), rl.StableDecay(), rl.OneCycle()):
        module, _, _ = run(3, module=make_module(scheduler=schedule))
        assert torch.isfinite(parameters(module)).all(), type(schedule).__name__


# -- AReaL -------------------------------------------------------------------------------------------------------------


def test_areal_1346_padding_changes_no_sequence_loss():
    groups = [group([1.0, 0.0, 0.2], [3, 7, 2]), group([0.0, 0.0, 1.0], [2, 4, 6], index=1)]
    (batch,) = collate(groups, 1)
    module = make_module(model=rl.asset("small_sort_policy"), loss=rl.GSPO())
    loss, _ = module.objective(module.policy, None, batch, version=0)
    noise = torch.where(batch.loss_mask, 0.0, torch.randn(batch.advantages.shape) * 100)
    changed = batch.replace(
        advantages=batch.advantages + noise,
        behavior_logprobs=batch.behavior_logprobs + noise.clamp(max=0.0),
        versions=torch.where(batch.loss_mask, batch.versions, -7),
    )
    again, _ = module.objective(module.policy, None, changed, version=0)
    assert torch.equal(loss, again)


def test_areal_1289_a_schedule_reaches_its_end_at_the_last_step():
    rates = []

    class Rates(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    run(6, module=make_module(scheduler=rl.Linear(warmup=2)), callbacks=[Rates()])
    assert max(rates) == pytest.approx(1e-3)
    assert rates.index(max(rates)) <= 2
    assert 0 < rates[-1] <= 1e-3 / 4 + 1e-9  # four steps of decay: the last one is not wasted at 0


@pytest.mark.slow
def test_areal_1273_gradients_do_not_depend_on_the_number_of_micro_batches():
    norms = {}
    for micro_batches in (1, 2, 4):

        class Norm(pl.Callback):
            def __init__(self, seen):
                self.seen = seen

            def on_before_optimizer_step(self, trainer, module, optimizer):
                grads = [p.grad for p in module.policy.parameters() if p.grad is not None]
                self.seen.append(float(torch.stack([g.norm() for g in grads]).norm()))

        seen = norms.setdefault(micro_batches, [])
        run(1, max_staleness=0, micro_batches_per_step=micro_batches, callbacks=[Norm(seen)], groups_per_step=4)
    assert norms[2] == pytest.approx(norms[1], rel=1e-5)
    assert norms[4] == pytest.approx(norms[1], rel=1e-5)


# -- slime -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_slime_2297_temperatures_that_cannot_be_trained_on_are_refused_before_sampling(temperature):
    """0 is greedy, which validation may be: all completions of a prompt are the same."""
    with pytest.raises(ValueError, match="temperature"):
        run(
            1,
            sampling=rl.SamplingParams(max_tokens=6, temperature=temperature),
            reward=lambda *_: pytest.fail("sampled"),
        )


def test_slime_2085_reference_logprobs_have_the_sampling_temperature():
    """At temperature 2, policy equal to reference: the log-ratio to the reference is 0."""
    _, _, watch = run(
        1,
        module=make_module(kl_coefficient=0.1),
        max_staleness=0,
        sampling=rl.SamplingParams(max_tokens=6, temperature=2.0),
    )
    signals = watch.signals[0]
    assert signals["ref_log_ratio"][watch.batches[0].loss_mask].abs().max() < 1e-5


def test_slime_2296_validation_alone_makes_no_optimizer(monkeypatch):
    module, data = make_module(), make_data(val_prompts=["31=", "42="], reward=lambda prompt, completion: 0.5)
    monkeypatch.setattr(type(module), "configure_optimizers", lambda self: pytest.fail("an optimizer was made"))
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    (result,) = trainer.validate(module, datamodule=data, verbose=False)
    assert "val/reward" in result


def test_slime_2242_validation_uses_every_setting_of_its_sampling():
    seen = []

    def reward(prompt, completion):
        seen.append(completion)
        return 0.0

    sampling = rl.SamplingParams(max_tokens=3)
    data = make_data(reward=reward, val_prompts=["31=", "42="], val_sampling=sampling, num_val_samples=4)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.validate(make_module(), datamodule=data, verbose=False)
    assert len(seen) == 8
    assert all(len(text) <= 3 for text in seen)


def test_slime_2238_every_completed_group_is_trained_on_in_asynchronous_runs():
    scored = []

    def reward(prompt, completion):
        scored.append(prompt.text)
        return float(len(scored) % 3)

    _, _, watch = run(6, reward=reward, max_staleness=3)
    trained = [int(n) for batch in watch.batches for n in batch.group_index if n >= 0]
    assert len(trained) == 6 * 4
    assert len(set(trained)) == 12
    assert max(trained) - min(trained) + 1 - len(set(trained)) <= 2 * 4  # only what is under way at the end is left


def test_slime_2237_prompts_that_are_too_long_are_skipped_in_order(tmp_path):
    path = tmp_path / "prompts.jsonl"
    texts = [str(n) * (3 if n % 3 else 60) + "=" for n in range(1, 10)]
    path.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
    source = rl.JsonlPrompts(str(path), on_bad_prompt="skip", max_prompt_tokens=20)
    seen = []

    def reward(prompt, completion):
        seen.append(prompt.text)
        return 0.0

    run(3, prompts=source, reward=reward, max_staleness=0, groups_per_step=2)
    assert set(seen) == {text for text in texts if len(text) < 20}


def test_slime_2247_dual_clip_bounds_the_loss_of_negative_advantages():
    loss = rl.PPOClip(dual_clip=3.0)
    module = make_module(model=rl.asset("small_sort_policy"), loss=loss)
    plain = make_module(model=rl.asset("small_sort_policy"))
    (batch,) = collate([group([1.0, 0.0], [3, 5])], 1)
    far = batch.replace(behavior_logprobs=torch.where(batch.loss_mask, -60.0, 0.0))
    bounded, _ = module.objective(module.policy, None, far, version=0)
    unbounded, _ = plain.objective(plain.policy, None, far, version=0)
    assert float(bounded) < float(unbounded)
    assert float(bounded) <= 3.0 * float(batch.advantages.abs().max()) + 1e-4


# -- NeMo RL -----------------------------------------------------------------------------------------------------------


def test_nemo_3635_an_answer_that_cannot_be_read_scores_once():
    grader = rl.MathVerify()
    prompt = rl.Prompt(text="1 + 1?", answer="2")
    for text in ("", "no idea", "\\boxed{", "\\frac{1}{0}", "x" * 5000, "\x00\x01", "$$$$$"):
        score = grader(prompt, text)
        assert isinstance(score, float)
        assert score == 0.0


def test_nemo_3271_keys_that_nobody_reads_are_named():
    with pytest.raises((ValueError, TypeError), match="max_tokns"):
        rl.SamplingParams(max_tokns=3)
    with pytest.raises((ValueError, TypeError), match="prompt_fild"):
        rl.JsonlPrompts("x.jsonl", prompt_fild="question")


def test_nemo_2368_an_engine_that_fails_ends_the_run_with_its_cause():
    class Failing(rl.EmbeddedEngine):
        def poll(self, timeout_s):
            raise RuntimeError("the generation worker is out of paper")

    with pytest.raises(Exception, match="out of paper"):
        run(2, engine=Failing(), engine_restarts=0)


# -- SkyRL -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_skyrl_2076_nothing_of_a_trainer_imports_vllm(process, tmp_path):
    code = "import sys, lit_async_rl as rl; rl.PolicyModule; rl.RolloutDataModule; rl.VLLMEngine; rl.fit; "
    code += "sys.exit(any(name.split('.')[0] in ('vllm', 'ray') for name in sys.modules))"
    assert process.run([], tmp_path, code=code).status == 0


def test_skyrl_1928_cispo_has_the_published_bounds():
    """ScaleRL and MiniMax-M1: the weight is cut above only."""
    (batch,) = collate([group([1.0, 0.0], [3, 5])], 1)
    module = make_module(model=rl.asset("small_sort_policy"), loss=rl.CISPO())
    near_zero = batch.replace(behavior_logprobs=torch.where(batch.loss_mask, 5.0, 0.0))
    _, signals = module.objective(module.policy, None, near_zero, version=0)
    assert not signals["clipped"].any()


# -- prime-rl ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_prime_3332_a_resumed_run_goes_on_in_the_prompts(tmp_path):
    """Theirs began again with the first prompt, and saved that position."""
    texts = [f"{n}=" for n in range(10, 90)]

    def trained(ckpt_path, steps):
        seen = []

        class Seen(Batches):
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                seen.extend(int(n) for n in batch.group_index[::2])

            def on_train_end(self, trainer, module):
                trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")

        data = make_data(
            prompts=texts,
            reward=lambda prompt, completion: float(len(completion)),
            groups_per_step=2,
            group_size=2,
            max_staleness=0,
            sampling=rl.SamplingParams(max_tokens=4),
        )
        fit(make_module(), data, steps, [Seen()], ckpt_path=ckpt_path)
        return seen

    first = trained(None, 3)
    second = trained(str(tmp_path / "3.ckpt"), 6)
    third = trained(str(tmp_path / "6.ckpt"), 8)
    assert [*first, *second, *third] == list(range(16))


def test_prime_3328_pass_at_k_is_named_by_the_completions_that_were_sampled():
    data = make_data(reward=lambda prompt, completion: 1.0, val_prompts=["31=", "42="], num_val_samples=3)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    (result,) = trainer.validate(make_module(), datamodule=data, verbose=False)
    assert {name for name in result if "pass@" in name} == {"val/pass@1", "val/pass@3"}
    assert result["val/pass@1"] == result["val/pass@3"] == 1.0


def test_prime_3333_persistent_buffers_keep_what_was_saved(tmp_path):
    """Theirs were made anew after the weights had been loaded; here: through a checkpoint, and a model's folder."""
    folder = tmp_path / "deepseek"
    lm = load(tiny_config(model_types()["deepseek_v3"], vocab_size=64), folder)
    buffers = {name: b for name, b in lm.named_buffers() if name in lm.state_dict()}
    assert buffers, "router biases are persistent buffers"
    with torch.no_grad():
        for buffer in buffers.values():
            buffer.copy_(torch.randn_like(buffer))
    lm.save_pretrained(folder)
    loaded = dict(load_policy(str(folder)).named_buffers())
    for name, buffer in buffers.items():
        assert torch.equal(loaded[name], buffer), name


@pytest.mark.slow
def test_prime_3123_validation_that_was_due_at_the_step_of_a_checkpoint(tmp_path):
    """A run that is resumed at a step at which validation is due validates then, or did before it was saved."""
    reports = []

    class When(pl.Callback):
        def on_validation_end(self, trainer, module):
            if not trainer.sanity_checking:
                reports.append(trainer.global_step)

        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    def go(steps, ckpt_path=None):
        data = make_data(
            reward=lambda prompt, completion: 0.5,
            val_prompts=["31="],
            groups_per_step=1,
            group_size=2,
            advantage=rl.Raw(),
            sampling=rl.SamplingParams(max_tokens=3),
        )
        more = dict(val_check_interval=2, limit_val_batches=1, num_sanity_val_steps=0)
        fit(make_module(), data, steps, [When()], ckpt_path=ckpt_path, check_val_every_n_epoch=None, **more)

    go(4)
    go(6, str(tmp_path / "last.ckpt"))
    assert reports == [2, 4, 6]


# -- more of AReaL, slime, NeMo RL and SkyRL ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["free", "fixed_lag"])
def test_areal_1345_a_resumed_run_admits_no_more_than_its_bound(schedule, tmp_path):
    """Theirs counted admitted groups from 0 and versions from the checkpoint: the bound grew by the version."""
    ages = []

    class Ages(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            ages.append(int(module.stabilizer_signals["staleness"].max()))

        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    def data():
        sampling = rl.SamplingParams(max_tokens=4)
        given = dict(groups_per_step=2, group_size=2, max_staleness=1, sampling=sampling, schedule=schedule)
        return make_data(engine=barrier_engine(), **given)

    fit(make_module(), data(), 6, [Ages()])
    fit(make_module(), data(), 10, [Ages()], ckpt_path=str(tmp_path / "last.ckpt"))
    assert len(ages) == 10
    assert max(ages) <= 1
    if schedule == "fixed_lag":
        assert ages == [0] + [1] * 9


def test_areal_1280_chat_templates_give_token_ids_with_this_transformers(tmp_path):
    codec = TextCodec(chat_model(tmp_path / "chat"))
    ids = codec.encode(rl.Prompt(messages=[{"role": "user", "content": "a b"}]))
    assert all(isinstance(n, int) for n in ids)
    assert codec.tokenizer.decode(ids) == "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"


def test_slime_2261_a_continued_completion_keeps_its_token_budget():
    """A completion that an interruption cut is continued to `max_tokens` in all, and not by as many again."""
    requests = SampleRequests(group_size=2, sampling=rl.SamplingParams(max_tokens=6), replicate_prompts=False)
    cut = Completion(
        request_id=3, sample_index=1, token_ids=(4, 5), logprobs=(-1.0, -1.0), versions=(0, 0), finish_reason="abort"
    )
    fresh, continued = requests.make(3, rl.Prompt(text="p"), (1, 2), lacking=[0, 1], partials=[cut])
    assert fresh.sampling.max_tokens == 6
    assert (continued.sampling.max_tokens, continued.prompt_ids) == (4, (1, 2, 4, 5))


def test_slime_2234_rewards_of_a_batch_are_those_of_its_rows():
    def reward(prompt, completion):
        return sum(map(ord, completion)) / 7

    _, data, watch = run(3, reward=reward, groups_per_step=4, micro_batches_per_step=2)
    for batch in watch.batches:
        for n in range(len(batch)):
            if batch.group_index[n] < 0:
                continue
            text = data.codec.tokenizer.decode(batch.input_ids[n][batch.loss_mask[n]], skip_special_tokens=True)
            assert float(batch.rewards[n]) == pytest.approx(reward(None, text))


def test_nemo_3660_gradients_are_clipped_once_per_step_and_not_per_micro_batch():
    moved = {}
    for micro_batches in (1, 4):
        module = make_module(optimizer=functools.partial(torch.optim.SGD, lr=1.0))
        before = parameters(module).clone()
        data = make_data(
            reward=varied,
            max_staleness=0,
            groups_per_step=4,
            group_size=2,
            micro_batches_per_step=micro_batches,
            sampling=rl.SamplingParams(max_tokens=6),
        )
        fit(module, data, 1, gradient_clip_val=1e-3)
        moved[micro_batches] = float((parameters(module) - before).norm())
    assert moved[1] == pytest.approx(1e-3, rel=1e-4)
    assert moved[4] == pytest.approx(1e-3, rel=1e-4)


def test_nemo_2372_the_optimizer_moves_the_weights_that_publish():
    """Theirs stepped on a copy with random weights; here: what the engine gets is what was trained."""
    sent = []

    class Engine(rl.EmbeddedEngine):
        def load_weights(self, version, weights):
            weights = [(name, tensor.clone()) for name, tensor in weights]
            sent.append((version, dict(weights)))
            super().load_weights(version, weights)

    module, _, _ = run(3, engine=Engine(), max_staleness=0)
    state = dict(module.policy.causal_lm.named_parameters())
    version, last = sent[-1]
    assert any(not torch.equal(sent[0][1][name], last[name]) for name in last)
    if version == module.version:
        assert all(torch.equal(state[name], tensor) for name, tensor in last.items() if name in state)


def test_skyrl_1962_settings_that_look_like_yaml_keep_their_type(tmp_path):
    """`null`, `true`, `1e5`, `[a]` and `a: b` as texts of prompts, answers and stop strings."""
    texts = ["null", "true", "1e5", "[a]", "a: b", "", "~", "0x10", "1_000", "2026-01-01", "${oc.env:HOME}"]
    prompts = [{"prompt": f"p{n}", "answer": text} for n, text in enumerate(texts) if text]
    data = make_data(prompts=prompts)
    assert [data.prompts[n].answer for n in range(len(prompts))] == [p["answer"] for p in prompts]
    assert rl.SamplingParams(stop=("null", "true", "1e5")).stop == ("null", "true", "1e5")


def test_skyrl_2008_a_step_in_parts_is_the_step_as_a_whole():
    weights = {}
    for micro_batches in (1, 2):
        module = make_module(optimizer=functools.partial(torch.optim.SGD, lr=0.5))
        data = make_data(
            reward=varied,
            max_staleness=0,
            groups_per_step=4,
            group_size=2,
            micro_batches_per_step=micro_batches,
            sampling=rl.SamplingParams(max_tokens=6),
        )
        fit(module, data, 2)
        weights[micro_batches] = parameters(module)
    assert torch.allclose(weights[1], weights[2], atol=1e-6)


@pytest.mark.slow
def test_skyrl_1929_validation_has_the_step_of_the_weights_that_it_measured(tmp_path, monkeypatch):
    """In `metrics.csv` the value of a validation stands at the step after which it ran."""
    scores = iter(range(1, 10_000))

    class Count(pl.Callback):
        def __init__(self):
            self.at = {}

        def on_validation_end(self, trainer, module):
            if not trainer.sanity_checking:
                self.at[trainer.global_step] = float(trainer.callback_metrics["val/reward"])

    monkeypatch.chdir(tmp_path)
    count = Count()
    trainer = rl.fit(
        MODEL,
        [{"prompt": f"{n}=", "answer": "1"} for n in range(10, 60)],
        lambda prompt, completion: float(next(scores)),
        max_steps=6,
        groups_per_step=1,
        group_size=2,
        sampling=rl.SamplingParams(max_tokens=3),
        validation=rl.Validation(prompts=["31=", "42="]),
        val_check_interval=2,
        log_every_n_steps=3,
        accelerator="cpu",
        enable_progress_bar=False,
        callbacks=[count],
    )
    with Path(trainer.log_dir, "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/reward")]
    logged = {int(row["step"]): float(row["val/reward"]) for row in rows}
    assert {step: count.at[step] for step in (2, 4, 6)} == {step: logged.get(step) for step in (2, 4, 6)}, logged


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["all_weights", "adapters"])
def test_nemo_3605_a_checkpoint_right_after_a_validation_holds_the_trained_weights(lora, tmp_path):
    """Validation decodes merged weights in evaluation mode; neither reaches the file or the steps that follow."""
    weights, files = {}, {}
    for validates in (False, True):
        pl.seed_everything(0, verbose=False)  # adapters begin at random
        module = make_module(lora=rl.LoRA(rank=2) if lora else None)
        data = make_data(
            reward=varied,
            max_staleness=0,
            groups_per_step=2,
            group_size=2,
            sampling=rl.SamplingParams(max_tokens=6),
            val_prompts=["31=", "42="] if validates else None,
        )
        path = tmp_path / f"{validates}.ckpt"

        class Save(pl.Callback):
            def __init__(self, path):
                self.path = path

            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                if trainer.global_step == 3:
                    trainer.save_checkpoint(self.path)

        more = dict(val_check_interval=1, check_val_every_n_epoch=None, limit_val_batches=int(validates))
        fit(module, data, 4, [Save(path)], num_sanity_val_steps=0, **more)
        weights[validates] = parameters(module)
        files[validates] = torch.load(path, weights_only=True)["state_dict"]
    assert torch.equal(weights[False], weights[True])
    assert files[False].keys() == files[True].keys()
    assert all(torch.equal(files[False][name], files[True][name]) for name in files[False])


@pytest.mark.parametrize("gap", [60.0, 1e4])
def test_nemo_3671_one_token_that_the_engine_thought_impossible_breaks_no_step(gap):
    """One behavior log-probability of -60 or -10,000 among ordinary ones: every loss and correction stays finite."""
    (batch,) = collate([group([1.0, 0.0, 0.5], [3, 5, 4])], 1)
    first = batch.loss_mask.float().cumsum(-1) == 1
    behavior = torch.where(batch.loss_mask, -4.0, 0.0)
    far = batch.replace(behavior_logprobs=torch.where(first & batch.loss_mask, behavior - gap, behavior))
    corrections = [None, rl.TokenTruncatedIS(), rl.SequenceTruncatedIS(), rl.IcePop(), rl.SequenceMaskedIS()]
    losses = [rl.PPOClip(), rl.GSPO(), rl.CISPO(), rl.Reinforce()]
    for loss in losses:
        for correction in corrections:
            try:
                module = make_module(model=rl.asset("small_sort_policy"), loss=loss, correction=correction)
            except ValueError:  # the two weigh twice
                continue
            value, _ = module.objective(module.policy, None, far, version=0)
            value.backward()
            gradients = [p.grad for p in module.policy.parameters() if p.grad is not None]
            assert torch.isfinite(value), (loss, correction)
            assert all(torch.isfinite(g).all() for g in gradients), (loss, correction)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trl_6380_and_areal_1249_two_ranks_log_what_one_rank_logs(tmp_path):
    """Metrics of tokens are weighted by tokens over the whole step, whichever rank has them."""
    words = "--config configs/quickstart.yaml --data.max_staleness 0 --data.groups_per_step 4 --data.group_size 4"
    words += " --data.validation.prompts.init_args.size 16 --trainer.accelerator cpu --trainer.max_steps 4"
    words += " --trainer.val_check_interval 2 --trainer.enable_progress_bar false"
    logged = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        where = ["--trainer.logger.init_args.save_dir", str(folder), "--trainer.devices", str(ranks)]
        strategy = ["--config", "configs/strategies/ddp.yaml"] if ranks == 2 else []
        launch(ROOT / "scripts/train.py", [*words.split(), *strategy, *where], ranks, timeout_s=200)
        (path,) = folder.rglob("metrics.csv")
        with path.open() as file:
            rows = [(row["step"], name, value) for row in csv.DictReader(file) for name, value in row.items() if value]
        logged[ranks] = {(step, name): float(value) for step, name, value in rows if name != "step"}
    assert logged[1].keys() == logged[2].keys()
    for key, value in logged[1].items():
        if not key[1].startswith(("perf/", "engine/")):  # times, and rounding
            assert logged[2][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def test_trl_6434_several_validation_sets_are_refused_by_name_with_their_keys():
    with pytest.raises(
        ValueError, match=r"data\.validation\.prompts must be .* keys easy, hard: pass the value of one"
    ):
        as_source({"easy": ["31="], "hard": ["4231="]}, "data.validation.prompts")


def test_trl_6343_quantized_weights_are_refused_by_the_name_of_their_quantization(tmp_path):
    folder = Path(save(tiny_llama(), tmp_path / "model", tiny_tokenizer(64)))
    config = json.loads((folder / "config.json").read_text())
    for method in ("bitsandbytes", "gptq", "awq", "fp8", "mxfp4"):
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
        with pytest.raises(ValueError, match=rf"model\.model=.* quantized weights \({method}\)"):
            make_module(model=str(folder))


def test_prime_3247_a_random_beginning_needs_no_weights(tmp_path):
    folder = Path(save(tiny_llama(), tmp_path / "model", tiny_tokenizer(64)))
    (folder / "model.safetensors").unlink()
    module = make_module(model=str(folder), random_init=True)
    _, _, watch = run(1, module=module, model=str(folder), prompts=["a b", "c d"])
    assert len(watch.batches) == 1


@pytest.mark.slow
def test_openrlhf_1200_a_math_grader_works_in_threads():
    """Its library's limits are signals, which exist in main threads only."""
    with ThreadPoolExecutor(4) as pool:
        scores = list(pool.map(rl.MathVerify(), [rl.Prompt(text="", answer="1/2")] * 8, ["$0.5$", "$0.25$"] * 4))
    assert scores == [1.0, 0.0] * 4


def test_slime_2114_and_skyrl_1893_loss_and_kl_are_logged_as_they_are():
    """The penalty's coefficient and clipping are not in the logged KL; the loss is that whose gradient is taken."""
    module = make_module(kl_coefficient=0.1)
    _, _, watch = run(2, module=module, max_staleness=0, callbacks=[rl.RolloutMonitor()])
    for signals, batch, metrics in zip(watch.signals, watch.batches, watch.metrics, strict=True):
        log_ratio = signals["ref_log_ratio"][batch.loss_mask]
        kl = (torch.exp(-log_ratio) - 1 + log_ratio).mean()  # k3, without the coefficient of 0.1
        assert metrics["policy/reference_kl"] == pytest.approx(float(kl), rel=1e-4, abs=1e-7)
        assert metrics["policy/loss"] == pytest.approx(float(signals["loss"]), rel=1e-4, abs=1e-7)


def test_skyrl_2056_recurrent_layers_are_not_packed(tmp_path, caplog):
    lm = load(tiny_config(model_types()["mamba"], vocab_size=64, eos_token_id=1), tmp_path / "made")
    folder = save(lm, tmp_path / "mamba", tiny_tokenizer(64))
    packing_module._warn_once.cache_clear()
    assert make_module(model=folder, packing=rl.SharedPromptPacking()).policy.packing is None
    assert "model.packing: MambaForCausalLM has linear_attention layers" in caplog.text
    assert "rows are computed separately" in caplog.text


def test_the_log_names_tests_that_exist_and_at_least_sixty_reports():
    log = yaml.safe_load((Path(__file__).parent / "log.yaml").read_text())
    names = {name for name in globals() if name.startswith("test_")}
    tried = [(project, entry) for project, entries in log.items() for entry in entries if "tried" in entry]
    for project, entries in log.items():
        for entry in entries:
            assert ("tried" in entry) != ("left" in entry), (project, entry)
            assert ("tried" in entry) == ("result" in entry), (project, entry)
    for project, entry in tried:
        if entry["tried"].startswith("test_"):
            start = entry["tried"].split()[0].removesuffix("'s").rstrip(":")
            assert any(name.startswith(start) or start.removeprefix("test_") in name for name in names), (
                project,
                entry,
            )
        for path in re.findall(r"tests/[\w/]+\.(?:py|yaml)", entry["tried"]):
            assert (ROOT / path).exists(), path
    assert len(tried) >= 60
    assert len({project for project, _ in tried}) >= 6
