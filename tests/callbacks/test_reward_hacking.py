"""Reward hacking is named: each sign by a run that shows it, and no sign by healthy ones."""

import inspect
import itertools
import json
import random
import time

import lightning.pytorch as pl
import pytest
import torch
from flow import fit, make_data, make_module

import lit_async_rl as rl
from lit_async_rl.callbacks.monitors.bottleneck_verdict import BottleneckVerdict
from lit_async_rl.callbacks.monitors.reward_hacking import length_pay, means_of
from lit_async_rl.callbacks.parts import signs_of
from lit_async_rl.errors import RewardSetupError
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.hacking import HackingWatch, Seen, repetition
from lit_async_rl.rewards.success import Success
from lit_async_rl.runtime.retries import MAX_CONSECUTIVE_FAILURES
from lit_async_rl.types import Rollout, RolloutGroup

STEPS = 150
RNG = random.Random(0)


def noisy(value, scale=0.05):
    return value * (1 + RNG.uniform(-scale, scale))


def ramp(step, begin, end, start=60, stop=120):
    """From one value to another between two steps."""
    share = min(1.0, max(0.0, (step - start) / (stop - start)))
    return begin + share * (end - begin)


def healthy(step, **changes):
    """A run that learns: accuracy, length and its format's part rise, groups become equal as they are solved."""
    accuracy = ramp(step, 0.3, 0.95, start=0, stop=100)
    values = dict(
        length=noisy(ramp(step, 100, 180, start=0, stop=100)),
        reward=accuracy,
        accuracy=noisy(accuracy, 0.02),
        length_pay=noisy(0.1, 0.9),
        repetition=noisy(0.05, 0.5),
        special_tokens=noisy(0.01, 0.9),
        group_std=noisy(ramp(step, 0.4, 0.02, start=0, stop=120)),
        answer=noisy(accuracy, 0.02),
        parts={"format": min(1.0, noisy(ramp(step, 0.5, 1.0, start=0, stop=40)))},
    )
    return Seen(**(values | {name: change(step) for name, change in changes.items()}))


STUCK = dict(accuracy=lambda step: noisy(0.5, 0.02), length=lambda step: noisy(100), group_std=lambda step: 0.4)
HACKED = {
    "length": STUCK | dict(length=lambda step: noisy(ramp(step, 100, 260))),
    "repetition": dict(repetition=lambda step: ramp(step, 0.05, 0.8)),
    "special_tokens": dict(special_tokens=lambda step: ramp(step, 0.0, 0.5)),
    "format": STUCK | dict(answer=lambda step: noisy(ramp(step, 0.6, 0.2), 0.02)),
    "group_std": STUCK | dict(group_std=lambda step: ramp(step, 0.4, 0.0)),
}


@pytest.mark.parametrize("sign", HACKED)
def test_each_sign_is_found_and_no_other(sign):
    watch = HackingWatch()
    begun = [(step, name) for step in range(STEPS) for name in watch.observe(healthy(step, **HACKED[sign]))]
    assert [name for _, name in begun] == [sign]
    assert 60 < begun[0][0] < STEPS
    assert set(watch.found) == {sign}


def test_a_run_that_learns_has_no_sign():
    watch = HackingWatch()
    for step in range(3 * STEPS):
        assert watch.observe(healthy(step)) == []


def test_what_holds_from_the_first_step_on_is_the_task():
    """Texts that repeat, special tokens and a solved task are no news."""
    watch = HackingWatch()
    same = dict(repetition=lambda step: 0.8, special_tokens=lambda step: 0.9, answer=lambda step: 0.5)
    assert not any(watch.observe(healthy(step, **same)) for step in range(STEPS))


@pytest.mark.parametrize(("pay", "signs"), [(0.9, ["length"]), (0.0, [])])
def test_a_reward_that_is_no_grader_has_to_pay_for_length(pay, signs):
    grown = dict(length=lambda step: ramp(step, 100, 300), accuracy=lambda step: None, length_pay=lambda step: pay)
    watch = HackingWatch()
    assert [name for step in range(STEPS) for name in watch.observe(healthy(step, **grown))] == signs


def test_a_sign_begins_and_ends_once_though_its_value_swings_around_the_threshold():
    watch = HackingWatch(window=2, patience=3)
    values = [0.1] * 10 + [0.42, 0.56] * 20 + [0.9] * 20 + [0.42, 0.56] * 20 + [0.1] * 20
    begun = []
    held = []
    for value in values:
        begun += watch.observe(healthy(0, repetition=lambda step, value=value: value))
        held.append("repetition" in watch.found)
    assert begun == ["repetition"]
    assert sum(a != b for a, b in itertools.pairwise(held)) == 2
    assert not held[-1]


def test_signs_that_are_switched_off_stay_off():
    names = ["length_growth", "repetition", "special_tokens", "answer_drop", "group_std", "disagreement"]
    watch = HackingWatch(**dict.fromkeys(names))
    for _ in range(100):
        watch.compare(is_right=False)
    for sign in HACKED:
        assert not any(watch.observe(healthy(step, **HACKED[sign])) for step in range(STEPS))


def test_a_watch_goes_on_from_its_state_as_json():
    one, other = HackingWatch(), HackingWatch()
    rows = [healthy(step, **HACKED["length"]) for step in range(STEPS)]
    found = [one.observe(row) for row in rows[:80]]
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert [one.observe(row) for row in rows[80:]] == [other.observe(row) for row in rows[80:]]
    assert one.state_dict() == other.state_dict()
    assert sum(map(len, found)) == 0
    assert "length" in other.found


def test_what_steps_are_compared_with_is_the_mean_of_the_first_window():
    watch = HackingWatch(window=4)
    for step in range(9):
        watch.observe(healthy(step, repetition=lambda step: step / 10))
    assert watch.state_dict()["first"]["repetition"] == pytest.approx((0.0 + 0.1 + 0.2 + 0.3) / 4)


@pytest.mark.parametrize("name", ["repetition", "special_tokens"])
def test_a_value_that_begins_late_in_the_first_window_is_compared_with_its_own_steps(name):
    """The share of repeated 4-grams is absent while completions are short; absent was as good as 0."""
    watch = HackingWatch()
    late = {name: lambda step: 0.55 if step >= 12 else None}
    assert not any(watch.observe(healthy(step, **late)) for step in range(STEPS))
    assert watch.state_dict()["first"][name] == pytest.approx(0.55)
    grown = {name: lambda step: 0.8}
    assert [sign for step in range(STEPS) for sign in watch.observe(healthy(STEPS, **grown))] == [name]


@pytest.mark.parametrize("also", [60, 19])
def test_loops_of_completions_that_were_short_before_are_a_sign(also):
    """They must not become their own baseline, nor one of them."""
    watch = HackingWatch()
    late = {"repetition": lambda step: 0.95 if step >= 60 or step == also else None}
    assert [sign for step in range(STEPS) for sign in watch.observe(healthy(step, **late))] == ["repetition"]


@pytest.mark.parametrize("num_rows", [3, 80])
def test_a_checkpoint_with_one_number_of_first_steps_goes_on(num_rows):
    old = HackingWatch()
    for step in range(num_rows):
        old.observe(healthy(step, repetition=lambda step: 0.5))
    state = old.state_dict() | {"num_first": min(num_rows, 20)}
    new = HackingWatch()
    new.load_state_dict(json.loads(json.dumps(state)))
    for step in range(num_rows, 2 * num_rows):
        assert new.observe(healthy(step, repetition=lambda step: 0.5)) == []
    assert new.state_dict()["first"]["repetition"] == pytest.approx(0.5)


def test_repetition_counts_n_grams_that_were_there_before():
    ids = list(range(100, 150))
    assert repetition(ids) == 0.0
    assert repetition(ids[:15]) is None
    text = [RNG.randrange(5) for _ in range(200)]
    grams = [tuple(text[n : n + 4]) for n in range(197)]
    assert repetition(text) == pytest.approx(1 - len(set(grams)) / len(grams))
    assert repetition([7] * 100) == pytest.approx(1 - 1 / 97)


def rollout(ids, reward=0.0, mask=None, turns=None):
    return Rollout(
        token_ids=tuple(ids),
        logprobs=(0.0,) * len(ids),
        versions=(0,) * len(ids),
        finish_reason="stop",
        reward=reward,
        loss_mask=mask,
    )


def group(*rollouts):
    return RolloutGroup(
        index=0, prompt=Prompt(text="", answer="x"), prompt_ids=(1,), rollouts=rollouts, admitted_version=0
    )


def test_special_tokens_count_before_the_end_and_only_those_of_the_policy():
    cases = [rollout([5, 6, 2]), rollout([5, 6]), rollout([5, 3, 6, 2]), rollout([5, 2, 2]), rollout([5, 3])]
    masked = rollout([5, 3, 6, 2], mask=(True, False, True, True))
    found = [means_of([group(one)], Success(), True, special=frozenset([2, 3])) for one in (*cases, masked)]
    assert [seen.special_tokens for seen in found] == [0, 0, 1, 1, 0, 0]


def test_reward_and_length_correlate_within_groups_only():
    grows = group(rollout([1] * 2, 1.0), rollout([1] * 4, 2.0))
    falls = group(rollout([1] * 20, 11.0), rollout([1] * 22, 10.0))
    assert length_pay([grows]) == pytest.approx(1.0)
    assert length_pay([falls]) == pytest.approx(-1.0)
    assert length_pay([grows, falls]) == pytest.approx(0.0)
    assert length_pay([group(rollout([1], 1.0), rollout([1], 2.0))]) is None


def test_an_agent_that_is_paid_for_calling_its_tool_is_not_paid_for_length():
    asks = (True, True, False, True)  # two replies, with the tool's answer between them
    guesses = [rollout([1] * length, 0.0) for length in (2, 3)]
    calls = [rollout([1] * (2 + length), 1.0, mask=asks[:3] + (True,) * (length - 1)) for length in (2, 3)]
    assert length_pay([group(*guesses, *calls)]) is None, "among as many replies nothing differs in reward"
    wordy = rollout([1] * 9, 2.0, mask=asks + (True,) * 5)
    assert length_pay([group(*guesses, *calls, wordy)]) > 0.9


# -- runs that really train --------------------------------------------------------------------------------------------


def sevens(prompt, completion):
    return completion.count("7") / 16


def length(prompt, completion):
    return len(completion) / 16


QUICK = dict(window=4, patience=2)


class Until(pl.Callback):
    """Ends a run once these signs have begun."""

    def __init__(self, monitor, signs):
        self.monitor, self.signs = monitor, signs

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = self.signs <= set(self.monitor.begun)


def hacked_run(reward, monitor, signs, steps=40, **settings):
    data = make_data(reward=reward, sampling=rl.SamplingParams(max_tokens=24), group_size=8, **settings)
    module = make_module(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3))
    verdict = BottleneckVerdict(every_n_steps=steps)
    trainer = fit(module, data, steps, [monitor, verdict, Until(monitor, signs)])
    return trainer, verdict


@pytest.mark.slow
def test_a_policy_that_is_paid_for_length_is_named(caplog):
    monitor = rl.RewardHackingMonitor(**QUICK)
    trainer, verdict = hacked_run(length, monitor, {"length"})
    assert "length" in monitor.begun
    assert "a sign of reward hacking at step" in caplog.text
    assert set(signs_of(trainer)) == set(monitor.signs)
    summary = rl.RunSummary()
    summary.on_fit_start(trainer, trainer.lightning_module)
    labels = list(summary.table(trainer).columns[0].cells)
    assert "signs of reward hacking" in labels
    assert verdict.collapse is None, "which would be said alone"
    assert "signs of reward hacking: " in verdict.words


@pytest.mark.slow
def test_a_policy_that_is_paid_for_a_character_repeats_it_and_a_second_grader_disagrees():
    monitor = rl.RewardHackingMonitor(check=rl.exact_match, check_success=1.0, **QUICK)
    signs = {"repetition", "disagreement"}
    hacked_run(sevens, monitor, signs, success_reward=0.2)
    assert signs <= set(monitor.begun)


def broken(prompt, completion):
    raise RuntimeError("no")


def refused(prompt, completion):
    raise RewardSetupError("the key is refused")


class Settled(pl.Callback):
    """Waits after each step until a second grader has done what it was given, or is not called any more."""

    def __init__(self, monitor):
        self.monitor = monitor

    def on_train_batch_end(self, *_):
        deadline = time.monotonic() + 60.0
        scorer = self.monitor._scorer
        while scorer is not None and scorer._error is None and time.monotonic() < deadline:
            if len(self.monitor._verdicts) == self.monitor._num_waiting:
                break
            time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "line"),
    [
        (broken, "RewardHackingMonitor.check: 10 calls in a row failed, and further failures are not logged"),
        (refused, "RewardHackingMonitor.check failed and will not be called again in this run: reward "),
    ],
)
def test_a_second_grader_that_fails_ends_nothing(check, line, caplog):
    monitor = rl.RewardHackingMonitor(check=check, num_checked=16, **QUICK)
    data = make_data(reward=sevens, success_reward=0.0, groups_per_step=4, group_size=4)
    trainer = fit(make_module(), data, 4, [monitor, Settled(monitor)])
    assert trainer.global_step == 4
    assert monitor.watch.disagreement is None
    lines = [record.getMessage() for record in caplog.records if "RewardHackingMonitor" in record.getMessage()]
    assert sum(one.startswith(line) for one in lines) == 1
    assert len(lines) <= MAX_CONSECUTIVE_FAILURES + 1
    assert not any("data.scoring" in one for one in lines)


def test_a_second_grader_may_be_called_in_batches():
    monitor = rl.RewardHackingMonitor(check=lambda prompts, completions: [0.0 for _ in prompts], **QUICK)
    data = make_data(reward=sevens, success_reward=0.0)
    fit(make_module(), data, 3, [monitor, Settled(monitor)])
    assert list(monitor.watch.state_dict()["compared"]) == [True] * 8


def test_a_second_grader_in_trls_form_knows_the_answers_column(tmp_path):
    def against_solutions(completions, solution):
        return [float(one == right) for one, right in zip(completions, solution, strict=True)]

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}=", "solution": str(n)}) + "\n" for n in range(10, 30)))
    monitor = rl.RewardHackingMonitor(check=against_solutions, **QUICK)
    prompts = rl.JsonlPrompts(str(path), answer_field="solution")
    fit(make_module(), make_data(prompts=prompts, reward=sevens, success_reward=0.0), 3, [monitor, Settled(monitor)])
    assert list(monitor.watch.state_dict()["compared"]) == [True] * 8


@pytest.mark.slow
def test_signs_go_on_after_a_resume(tmp_path):
    path = tmp_path / "last.ckpt"
    monitor = rl.RewardHackingMonitor(**QUICK)
    data = make_data(reward=length, group_size=2)
    trainer = fit(make_module(), data, 5, [monitor])
    trainer.save_checkpoint(path)
    other = rl.RewardHackingMonitor(**QUICK)
    fit(make_module(), make_data(reward=length, group_size=2), 6, [other], str(path))
    assert len(other.watch.state_dict()["rows"]) == 6
    assert other.watch.state_dict()["rows"][:5] == monitor.watch.state_dict()["rows"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length_growth": 1.0}, "RewardHackingMonitor.length_growth must be > 1, got 1.0"),
        ({"repetition": 1.5}, r"RewardHackingMonitor.repetition must be in \(0, 1\], got 1.5"),
        ({"window": 1}, "RewardHackingMonitor.window must be >= 2, got 1"),
        ({"patience": 0}, "RewardHackingMonitor.patience must be >= 1, got 0"),
        ({"num_checked": 0}, "RewardHackingMonitor.num_checked must be >= 1, got 0"),
        (
            {"check": lambda completion: 1.0},
            "RewardHackingMonitor.check=.* must be a function, .* a parameter is missing",
        ),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        rl.RewardHackingMonitor(**settings)


def test_the_monitor_has_the_thresholds_of_the_watch():
    watch = inspect.signature(HackingWatch).parameters
    monitor = inspect.signature(rl.RewardHackingMonitor).parameters
    assert {name: parameter.default for name, parameter in watch.items()}.items() <= {
        name: parameter.default for name, parameter in monitor.items()
    }.items()
