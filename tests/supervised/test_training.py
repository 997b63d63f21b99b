"""The loss is the mean over the trained tokens of the step, in any order that resumes, and what it makes goes on."""

from __future__ import annotations

import contextlib
import json
import logging
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from every_family import TABLE, load, model_types, params, tiny_config
from flow import MODEL, parameters
from flow import make_module as make_policy
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from transformers import AutoTokenizer
from tuning import RECORDS, fit, make_data, make_module, slow_loss

import lit_async_rl as rl
from lit_async_rl.api.arguments import in_folder
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.lora import LoRA
from lit_async_rl.models.packing import PrefixTreePacking
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.weights import stream_weights
from lit_async_rl.runtime.files import part_name
from lit_async_rl.tasks import SortDigits


class Gradient(pl.Callback):
    """That of each step, and the logged loss."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in pl_module.policy.parameters()]
        self.gradients.append(torch.cat([one.flatten() for one in found]))
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


@pytest.mark.parametrize("packing", [None, PrefixTreePacking(), PrefixTreePacking(row_tokens=40)])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.usefixtures("in_float64")
def test_the_gradient_of_a_step_is_that_of_a_slow_loop(packing, micro_batches, monkeypatch):
    """Of rows of different lengths, in micro-batches with different numbers of tokens."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        data = make_data(records=RECORDS, samples_per_step=5, micro_batches_per_step=micro_batches, shuffle=False)
        module = make_module(packing=packing, optimizer=partial(torch.optim.SGD, lr=0.0)).double()
        slow = slow_loss(module.policy, data.rows[0]._rows)
        slow.backward()
        expected = torch.cat([p.grad.flatten() for p in module.policy.parameters()])
        module.zero_grad()
        seen = Gradient()
        fit(module, data, 1, callbacks=[seen])
    finally:
        torch.set_default_dtype(before)
    assert (seen.gradients[0] - expected).norm() <= 1e-9 * expected.norm()
    assert seen.losses[0] == pytest.approx(float(slow), rel=1e-6)


def packable() -> list:
    """Types that packing computes rightly, by the table of the documentation: a few, and all of them in a sweep."""
    known = json.loads(TABLE.read_text())["types"]
    no_float64 = {"gpt_bigcode", "xglm"}  # compile or mask in float32; tests/models/test_every_family.py has them
    right = {name for name, parts in known.items() if not parts["trainer"] and not parts["packing"]}
    names = right - no_float64
    return params(names, usual={"llama", "gemma2", "gpt2"}, sampled=pytest.mark.sweep, rest=pytest.mark.sweep)


@pytest.mark.parametrize("name", packable())
@pytest.mark.usefixtures("in_float64")
def test_packed_rows_equal_separate_rows(name, tmp_path):
    """Loss and gradient of several rows in one, on every type that packing supports."""
    lm = load(tiny_config(model_types()[name]), tmp_path).double()
    with contextlib.suppress(AttributeError, ValueError):
        lm.set_experts_implementation("eager")  # the kernel of experts has no float64
    packed = CausalPolicy(lm, packing=PrefixTreePacking(row_tokens=40))
    lengths = [5, 7, 3, 6]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (4, 7), generator=generator)
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    mask &= torch.rand(mask.shape, generator=generator) < 0.7
    mask[:, 0] = False

    def of(policy, rows, **packing):
        policy.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for row in rows:
            length = int(torch.tensor(lengths)[row].max())
            total = total - policy(ids[row, :length], mask[row, :length], **packing).logprobs.sum()
        total.backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]
        return total, torch.cat([gradient.flatten() for gradient in found])

    found = of(packed, [slice(0, 4)], group_index=torch.arange(4))
    expected = of(CausalPolicy(lm), [slice(n, n + 1) for n in range(4)])
    for value, right in zip(found, expected, strict=True):
        assert (value - right).norm() <= 1e-6 * right.norm()


def texts(data, begin, number):
    return [data.codec.tokenizer.decode(row.ids.tolist()) for row in data._mixture.at(begin, number)]


def test_a_mixture_keeps_its_shares_and_every_row_of_an_epoch_and_has_no_memory():
    sources = [SortDigits(3, size=6, seed=1), SortDigits(5, size=8, seed=2)]
    data = make_data(records=sources, weights=[1, 3])
    all_of = texts(data, 0, 96)
    shorts = [text for text in all_of if len(text) < 14]
    assert [sum(len(t) < 14 for t in all_of[:n]) for n in (4, 8, 48, 96)] == [1, 2, 12, 24]
    for epoch in range(4):
        assert sorted(shorts[6 * epoch : 6 * epoch + 6]) == sorted(shorts[:6])
    assert shorts[:6] != shorts[6:12], "each epoch is shuffled anew"
    for begin in (50, 7, 95, 0):
        assert texts(data, begin, 1) == all_of[begin : begin + 1]
    plain = make_data(records=sources)  # every row once in an epoch
    assert len(set(texts(plain, 0, 14))) == 14
    assert plain.num_steps == 4
    ordered = make_data(shuffle=False)
    assert texts(ordered, 0, 10) == texts(ordered, 10, 10)


def test_an_evaluation_reads_no_training_records():
    data = make_data(records=[{"prompt": "1", "completion": None}], validation_records=RECORDS)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    (found,) = trainer.validate(make_module(), datamodule=data, verbose=False)
    assert found["val/loss"] > 0
    with pytest.raises(ValueError, match=r"data\.records\[0\]"):
        fit(make_module(), data, 1)


def test_an_evaluation_renders_records_at_the_time_of_the_run(tmp_path):
    data = make_data(validation_records=RECORDS)
    fit(make_module(), data, 1).save_checkpoint(tmp_path / "run.ckpt")
    later = make_data(validation_records=RECORDS)
    assert later._began != data._began
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.validate(make_module(), datamodule=later, ckpt_path=str(tmp_path / "run.ckpt"), verbose=False)
    assert later._began == data._began, "which templates may write"
    assert "rows" not in vars(later)


def test_rows_that_are_too_long_are_refused_cut_or_dropped_and_counted(caplog):
    with pytest.raises(
        ValueError,
        match=r"data.records\[1\]: the record has 20 tokens, but the limit is data.max_tokens=12: shorten",
    ):
        make_data(records=RECORDS, max_tokens=12).read_records()
    with caplog.at_level(logging.WARNING):
        cut = make_data(records=RECORDS, max_tokens=12, too_long="truncate")
        assert sorted(len(row.ids) for row in cut.rows[0]) == [6, 8, 9, 12, 12]
        assert "2 of 5 records were cut at 12 tokens" in caplog.text
        dropped = make_data(records=RECORDS, max_tokens=12, too_long="drop")
        assert len(dropped.rows[0]) == 3
        assert "2 of 5 records were left out: longer than 12 tokens, data.too_long=drop" in caplog.text
        shorter = make_data(records=RECORDS, max_tokens=10, too_long="truncate")
        assert len(shorter.rows[0]) == 4, "of one nothing is left that trains"
        assert "1 of 5 records were left out: longer than 10 tokens, data.too_long=truncate" in caplog.text
        make_data(records=[{"prompt": "é=", "completion": "12"}, {"prompt": "21=", "completion": "1ü"}]).read_records()
        assert "1 of 2 records have training text that the tokenizer cannot encode (unknown token 0)" in caplog.text
    with pytest.raises(ValueError, match="all records were left out"):
        make_data(records=RECORDS[1:2], max_tokens=12, too_long="drop").read_records()


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_within_an_epoch_and_within_a_step(tmp_path):
    settings = dict(records=[SortDigits(3, size=7), SortDigits(6, size=12)], weights=[1, 2], micro_batches_per_step=2)
    rate = dict(scheduler=rl.Cosine(), packing=PrefixTreePacking())

    class Within(pl.Callback):  # between the two micro-batches of step 3
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 6:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = make_module(**rate)
    fit(whole, make_data(**settings), 7, callbacks=[save, Within()], enable_checkpointing=True)
    for name in ("step=3.ckpt", "step=6.ckpt", "within.ckpt"):
        resumed = make_module(**rate)
        fit(resumed, make_data(**settings), 7, ckpt_path=str(tmp_path / name))
        assert torch.equal(parameters(resumed), parameters(whole)), name
    path = str(tmp_path / "step=3.ckpt")
    for change, said in [
        (dict(seed=1), "data.seed is 1, but was 0 in the checkpoint"),
        (dict(weights=[2, 1]), r"data.weights is \[2, 1\], but was \[1, 2\]"),
        (
            dict(records=[SortDigits(3, size=7, seed=3), SortDigits(6, size=12)]),
            "data.records, their tokens",
        ),
    ]:
        with pytest.raises(ValueError, match=said):
            fit(make_module(**rate), make_data(**(settings | change)), 7, ckpt_path=path)


def test_held_out_loss_and_accuracy_are_those_of_a_slow_loop():
    held_out = SortDigits(8, size=9, split="held_out", min_digits=2)
    data = make_data(validation_records=held_out, micro_batches_per_step=2)
    module = make_module()
    runner = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    (found,) = runner.validate(module, data, verbose=False)
    rows = data.held_out_rows._rows
    with torch.no_grad():
        assert found["val/loss"] == pytest.approx(float(slow_loss(module.policy, rows)), rel=1e-5)
        right = []
        for row in rows:
            ids = torch.from_numpy(row.ids).long()
            greedy = module.policy.causal_lm(input_ids=ids[None]).logits[0].argmax(-1)
            right += [bool(greedy[place - 1] == ids[place]) for place in row.trains.nonzero()[0]]
    assert found["val/token_accuracy"] == pytest.approx(sum(right) / len(right))
    assert set(found) == {"val/loss", "val/token_accuracy"}


SHORT = dict(samples_per_step=2, learning_rate=1e-2, accelerator="cpu", enable_progress_bar=False)
SORTED = [{"prompt": "21=", "completion": "12"}, {"prompt": "31=", "completion": "13"}]


def weights_of(lm):
    return torch.cat([weight.detach().flatten() for _, weight in sorted(lm.named_parameters())])


@pytest.mark.parametrize("continued", [False, True])
def test_what_a_second_stage_writes_has_the_adapter_of_the_first(continued, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rl.sft(MODEL, SORTED, lora=LoRA(rank=2), epochs=2, **SHORT)
    first = load_policy("runs/version_0/adapter")
    lora = LoRA(rank=2, continue_adapter=continued)
    trainer = rl.sft("runs/version_0/adapter", SORTED, lora=lora, epochs=2, **SHORT)
    written = tmp_path / "runs" / "version_1" / ("adapter" if continued else "model")
    second = weights_of(load_policy(str(written)))
    tuned = dict(stream_weights(trainer.lightning_module.policy))
    torch.testing.assert_close(second, torch.cat([tuned[name].flatten() for name in sorted(tuned)]))
    assert not torch.allclose(second, weights_of(first))


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_what_a_run_from_memory_writes_can_be_used_when_it_is_over(lora, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    trainer = rl.sft(load_policy(MODEL), SORTED, lora=lora, tokenizer=tokenizer, epochs=1, **SHORT)
    tuned = dict(stream_weights(trainer.lightning_module.policy))
    written = load_policy(f"runs/version_0/{'model' if lora is None else 'adapter'}")
    torch.testing.assert_close(weights_of(written), torch.cat([tuned[name].flatten() for name in sorted(tuned)]))
    again = rl.SFTModule.load_from_checkpoint("runs/version_0/checkpoints/last.ckpt")
    assert again.version == trainer.lightning_module.version == 1


def test_a_resume_that_fails_leaves_the_base_that_adapter_and_checkpoints_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    memory = dict(tokenizer=AutoTokenizer.from_pretrained(MODEL), lora=LoRA(rank=2), epochs=2)
    resume = dict(ckpt_path="runs/version_0/checkpoints/last.ckpt")
    base = Path("runs/version_0/base")
    rl.sft(load_policy(MODEL), SORTED, max_steps=1, **memory, **SHORT)
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    other = load_policy(MODEL)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(0.5)
    with pytest.raises(ValueError, match=r"records\[0\]: a record must have"):
        rl.sft(other, [{"promt": "1", "completion": "2"}], **resume, **memory, **SHORT)
    with pytest.raises(ValueError, match=r"^model='runs/version_0/base': its files are in .*: leave tokenizer out"):
        rl.sft(base, SORTED, **resume, **memory, **SHORT)
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before
    load_policy("runs/version_0/adapter")
    part = part_name(base)
    for left in (part, part.with_suffix(".old.part")):  # by a killed process of the same number, in a container
        left.mkdir()
        (left / "junk").touch()
    trainer = rl.sft(load_policy(MODEL), SORTED, **resume, **memory, **SHORT)
    assert trainer.global_step == 2
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before
    assert not list(Path("runs/version_0").glob(".base*"))


def test_the_former_base_goes_when_a_step_is_done(tmp_path, monkeypatch):
    """A resumed run held two copies of the model on the disk until its end."""
    monkeypatch.chdir(tmp_path)
    memory = dict(tokenizer=AutoTokenizer.from_pretrained(MODEL), epochs=2)
    rl.sft(load_policy(MODEL), SORTED, max_steps=1, **memory, **SHORT)
    left = []
    look = LambdaCallback(on_save_checkpoint=lambda *_: left.extend(Path("runs/version_0").glob(".base*")))
    last = "runs/version_0/checkpoints/last.ckpt"
    trainer = rl.sft(load_policy(MODEL), SORTED, ckpt_path=last, callbacks=[look], **memory, **SHORT)
    assert trainer.global_step == 2
    assert not left


@pytest.mark.parametrize("model", [MODEL, None])
def test_the_leading_rank_writes_a_model_from_memory_and_the_others_have_one_each(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_async_rl.supervised.run.train", lambda *_, **__: None)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ranks = dict(devices=2, strategy="ddp")
    trainer = rl.sft(model or load_policy(MODEL), SORTED, tokenizer=tokenizer, epochs=1, **ranks, **SHORT)
    assert Path(trainer.log_dir, "base", "tokenizer_config.json").is_file()
    other = Mock(spec=pl.Trainer, loggers=trainer.loggers, is_global_zero=False, global_step=0)
    other.strategy = Mock(broadcast=lambda value: value)
    with in_folder(model or load_policy(MODEL), tokenizer, other, name="base") as folder:
        load_policy(folder)
        assert not Path(folder).is_relative_to(tmp_path / "runs")
        assert Path(folder).is_absolute()
    assert not Path(folder).exists()
    assert Path(trainer.log_dir, "base", "tokenizer_config.json").is_file()


def test_epochs_end_a_run_of_any_trainer():
    data = make_data(epochs=1.5)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(accelerator="cpu", devices=1, **quiet)
    trainer.fit(make_module(), data)
    assert trainer.global_step == data.num_steps


@pytest.mark.parametrize("lora", [None, LoRA(rank=2, target_modules=["q_proj", "v_proj"])])
def test_what_a_run_writes_is_what_rl_starts_from(lora, tmp_path, monkeypatch):
    """Behind held-out samples, which a run of RL would measure."""
    monkeypatch.chdir(tmp_path)
    trainer = rl.sft(
        MODEL,
        [{"prompt": "21=", "completion": "12"}, {"prompt": "31=", "completion": "13"}],
        samples_per_step=2,
        epochs=3,
        learning_rate=1e-2,
        lora=lora,
        accelerator="cpu",
        validation=dict(prompts=SortDigits(2, size=4, split="held_out")),
        reward=rl.exact_match,
        sampling=dict(max_tokens=4),
        enable_progress_bar=False,
    )
    assert trainer.global_step == 3
    assert {"val/pass@1", "train/loss", "train/tokens"} <= set(trainer.callback_metrics)
    tuned = trainer.lightning_module
    folder = tmp_path / "runs" / "version_0" / ("model" if lora is None else "adapter")
    again = make_policy(model=str(folder), lora=None if lora is None else LoRA(continue_adapter=True))
    ids = torch.randint(2, 20, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    with torch.no_grad():
        expected = tuned.policy(ids, mask).logprobs
        torch.testing.assert_close(again.policy(ids, mask).logprobs, expected, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(make_policy().policy(ids, mask).logprobs, expected, atol=1e-2)
    if lora is None:
        module = rl.SFTModule.load_from_checkpoint(tmp_path / "runs/version_0/checkpoints/last.ckpt")
        assert torch.equal(parameters(module), parameters(tuned))
        with pytest.raises(ValueError, match="the checkpoint holds 0 states of a RolloutDataModule"):
            rl.fit(MODEL, SortDigits(2), rl.exact_match, max_steps=4, ckpt_path="runs/version_0/checkpoints/last.ckpt")
