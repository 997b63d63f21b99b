"""Runs with recorded sampling distributions: two micro-batches, interrupted and resumed, taped and replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flow import barrier_engine, fit, make_data, make_module, parameters
from groups import group
from tiny_models import save, tiny_qwen3_moe

from lit_async_rl.advantages.group import GroupMean
from lit_async_rl.callbacks import RolloutTape
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.losses import ESTR, ImportanceWeight, PolicyLoss, ScoreCentering
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.models.packing import SharedPromptPacking
from lit_async_rl.problem import Prompt
from lit_async_rl.replay.tape import TapeWriter
from lit_async_rl.replay.tape_source import NoEngine
from lit_async_rl.rules import of_engine, of_estimates, refuse
from lit_async_rl.scheduling.admission import Bounded

TRUNCATED = SamplingParams(max_tokens=10, top_p=0.9, head=16)


def data(**changes: Any):
    settings: dict[str, Any] = dict(
        engine=barrier_engine(), schedule="fixed_lag", max_staleness=1, micro_batches_per_step=2, sampling=TRUNCATED
    )
    return make_data(**(settings | changes))


@pytest.mark.slow
@pytest.mark.parametrize("loss", [ScoreCentering(weight=ImportanceWeight.TRUNCATED), ESTR(tau=0.2)], ids=str)
def test_a_run_that_is_resumed_or_replayed_ends_with_the_same_weights(loss: PolicyLoss, tmp_path: Path) -> None:
    whole = make_module(loss=loss)
    fit(whole, data(), 4, [RolloutTape(str(tmp_path / "tape"))])
    half = make_module(loss=loss)
    fit(half, data(), 2).save_checkpoint(tmp_path / "half.ckpt")
    resumed = make_module(loss=loss)
    fit(resumed, data(), 4, ckpt_path=str(tmp_path / "half.ckpt"))
    assert torch.equal(parameters(resumed), parameters(whole))
    replayed = make_module(loss=loss)
    fit(replayed, make_data(tape=str(tmp_path / "tape"), micro_batches_per_step=2, sampling=TRUNCATED), 4)
    assert torch.equal(parameters(replayed), parameters(whole))


def test_a_loss_that_needs_what_is_not_recorded_is_refused_by_the_settings_name() -> None:
    with pytest.raises(ValueError, match=r"data\.sampling\.head must be >= 1 with model\.loss=ScoreCentering"):
        fit(make_module(loss=ScoreCentering()), make_data(sampling=SamplingParams(max_tokens=10, head=0)), 1)


def digits(prompt: Prompt, text: str) -> float:
    return sum(character.isdigit() for character in text) / 6


def test_a_run_with_replayed_experts_is_repeated_from_its_tape(tmp_path: Path) -> None:
    model = save(tiny_qwen3_moe(), tmp_path / "model")
    settings: dict[str, Any] = dict(model=model, sampling=SamplingParams(max_tokens=6, experts=True))
    settings |= dict(prompts=[Prompt(text=text) for text in ("3412", "785", "96", "9988")], reward=digits)
    whole, start = make_module(model=model), make_module(model=model)
    engine = barrier_engine()
    fit(whole, make_data(engine=engine, schedule="fixed_lag", **settings), 3, [RolloutTape(str(tmp_path / "tape"))])
    replayed = make_module(model=model)
    fit(replayed, make_data(tape=str(tmp_path / "tape"), **settings), 3)
    assert torch.equal(parameters(replayed), parameters(whole))
    assert not torch.equal(parameters(start), parameters(whole))


class Deaf(NoEngine):
    records_heads = records_entropy = records_experts = False

    def __init__(self) -> None:
        super().__init__(scores=True)


def test_an_engine_that_cannot_record_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"data\.sampling\.head=4 with data\.engine=Deaf"):
        refuse(of_engine(Deaf(), None, Bounded(), SamplingParams(head=4)))
    with pytest.raises(ValueError, match=r"data\.sampling\.experts=true with data\.engine=Deaf"):
        refuse(of_engine(Deaf(), None, Bounded(), SamplingParams(experts=True)))
    refuse(of_engine(Deaf(), None, Bounded(), SamplingParams()))
    with pytest.raises(ValueError, match=r"model\.loss=ESTR with data\.engine=Deaf: it needs the entropy"):
        refuse(of_estimates(ESTR(), GroupMean(), TokenMean(), 0, Deaf()))


def test_a_tape_without_what_is_to_be_replayed_is_refused(tmp_path: Path) -> None:
    """The ratios of a truncated sampler, or of another choice of experts, would be trained on in silence."""
    writer = TapeWriter(tmp_path)
    writer.append(0, 0, [group([0.0, 1.0], [2, 3], 0)])
    writer.close(1.0)
    for asked in (dict(top_p=0.9), dict(head=16, top_p=0.9), dict(head=0), dict(experts=True)):
        said = rf"data\.sampling\.(head|experts)=\w+ with data\.admission\.folder='{tmp_path}': .* recorded without"
        with pytest.raises(ValueError, match=said):
            make_data(tape=str(tmp_path), sampling=SamplingParams(max_tokens=10, **asked))


@pytest.mark.parametrize("loss", [ScoreCentering(), ESTR()], ids=str)
def test_a_micro_batch_without_rows_has_what_the_loss_needs(loss: PolicyLoss) -> None:
    module = make_module(loss=loss, packing=SharedPromptPacking())  # keeps groups whole: one for four micro-batches
    before = parameters(module).clone()
    fit(module, data(groups_per_step=1, micro_batches_per_step=4), 2)
    assert not torch.equal(parameters(module), before)
