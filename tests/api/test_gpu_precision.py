"""Default precision on a GPU; there is none here, so that torch's answers are stand-ins."""

from __future__ import annotations

import logging

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

from lit_async_rl import Trainer
from lit_async_rl.api import precision, trainer
from lit_async_rl.api.precision import gpu_precision


@pytest.fixture
def card(monkeypatch):
    """A GPU with bfloat16; returns the settings of products in float32."""
    settings = ["highest"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: settings[-1])
    monkeypatch.setattr(torch, "set_float32_matmul_precision", settings.append)
    return settings


@pytest.mark.parametrize(
    "settings",
    [{}, {"accelerator": "auto"}, {"accelerator": "gpu", "strategy": "ddp"}, {"strategy": DDPStrategy()}],
    ids=["nothing", "auto", "ddp", "DDPStrategy"],
)
def test_mixed_precision_is_the_default_on_a_gpu_and_said_in_one_line(settings, card, caplog):
    with caplog.at_level(logging.WARNING):
        assert gpu_precision(settings) == {"precision": "bf16-mixed"}
    assert card == ["highest", "high"]
    assert len(caplog.messages) == 1
    assert "products in bfloat16; weights, gradients, optimizer and log-probabilities in float32" in caplog.text
    assert "trainer.precision=32-true" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [{"precision": "32-true"}, {"accelerator": "cpu"}, {"plugins": [MixedPrecision("bf16-mixed", "cpu")]}],
    ids=["named", "CPU", "plugin"],
)
def test_a_choice_of_the_user_and_cpus_are_left_alone(settings, card, caplog):
    assert gpu_precision(settings) == {}
    assert card == ["highest"]
    assert not caplog.messages


@pytest.mark.parametrize("strategy", ["fsdp", FSDPStrategy], ids=["fsdp", "FSDPStrategy"])
def test_strategies_with_a_dtype_of_their_own_keep_float32(strategy, card, caplog):
    strategy = strategy if isinstance(strategy, str) else strategy()
    assert gpu_precision({"strategy": strategy}) == {}
    assert "precision: float32, products in TF32" in caplog.text


def test_cards_without_bfloat16_keep_float32(card, caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    assert gpu_precision({}) == {}
    assert "precision: float32" in caplog.text


def test_products_that_a_user_has_set_stay(card):
    card.append("medium")
    assert gpu_precision({}) == {"precision": "bf16-mixed"}
    assert card == ["highest", "medium"]


def test_the_trainer_takes_the_default(monkeypatch):
    assert Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).precision == "32-true"
    monkeypatch.setattr(trainer, "gpu_precision", lambda settings: {"precision": precision.MIXED})
    assert Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).precision == "bf16-mixed"
