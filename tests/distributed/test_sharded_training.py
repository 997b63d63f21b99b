"""Several processes train as one does, whatever shards the policy; and what ends one of them ends all of them."""

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from flow import make_data, make_module
from launch import consolidate, finish, launch, start

from lit_async_rl.distributed.scatter import pack, unpack
from lit_async_rl.types import RolloutBatch

SCRIPT = Path(__file__).parents[1] / "helpers" / "sharded_training.py"


def make_batch(rows: int) -> RolloutBatch:
    shape = (rows, 5)
    return RolloutBatch(
        input_ids=torch.randint(9, shape),
        attention_mask=torch.rand(shape) > 0.5,
        loss_mask=torch.rand(shape) > 0.5,
        behavior_logprobs=torch.randn(shape),
        versions=torch.randint(9, shape),
        advantages=torch.randn(shape),
        token_weights=torch.rand(shape),
        rewards=torch.rand(rows),
        group_index=torch.arange(rows),
        temperature=0.7,
    )


def test_a_share_arrives_as_it_was_sent():
    sent = [make_batch(3), make_batch(1)]
    received = unpack(pack(sent))
    assert len(received) == 2
    for a, b in zip(sent, received, strict=True):
        assert vars(a).keys() == vars(b).keys()
        assert b.temperature == 0.7
        for name, value in vars(a).items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == getattr(b, name).dtype
                assert torch.equal(value, getattr(b, name)), name


def test_a_rank_timeout_must_be_positive():
    with pytest.raises(ValueError, match=r"data\.limits\.rank_timeout_s"):
        make_data(rank_timeout_s=0.0)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    path = tmp_path_factory.mktemp("single") / "single.json"
    launch(SCRIPT, ["single:0x1,2x2,0x2s,2x2d", str(path)], 1, timeout_s=200)
    return json.loads(path.read_text())


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "strategy",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp2")),
        *(pytest.param(name, marks=pytest.mark.sweep) for name in ("fsdp1", "tp")),
    ],
)
def test_two_processes_reach_the_losses_of_one(strategy, single, tmp_path):
    """Ten steps: synchronous (the two processes with compiled and checkpointed blocks); two versions stale with two
    micro-batches (the two processes with checkpointed ones); synchronous with streamed groups; and two versions stale
    with a teacher beside the reward.
    """
    launch(SCRIPT, [f"{strategy}:0x1,2x2,0x2s,2x2d", str(tmp_path / "two.json")], 2, timeout_s=200)
    two = json.loads((tmp_path / "two.json").read_text())
    assert two.keys() == single.keys()
    for setting, one in single.items():
        assert len(one["losses"]) == 10
        assert any(abs(loss) > 1e-3 for loss in one["losses"]), "the comparison should have seen real losses"
        assert sum(norm > 0.01 for norm in one["norms"]) > 5, "and real gradients"
        assert two[setting]["losses"] == pytest.approx(one["losses"], abs=1e-5), setting
        assert two[setting]["norms"] == pytest.approx(one["norms"], rel=1e-3, abs=1e-5), setting
        assert two[setting]["rewards"] == one["rewards"], "the same rollouts"
        assert two[setting]["version"] == one["version"]
        assert two[setting]["weights"] == pytest.approx(one["weights"], abs=1e-4), setting


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2", "tp"])
def test_mixed_precision_leaves_behavior_logprobs_in_float32(strategy, tmp_path):
    launch(SCRIPT, [f"{strategy}:mixed", str(tmp_path / "out.json")], 2, timeout_s=200)
    seen = json.loads((tmp_path / "out.json").read_text())
    assert len(seen) == 3
    for step in seen:
        assert step["computed"] == "torch.bfloat16", "or nothing was tested"
        assert step["behavior"] == step["log_ratio"] == "torch.float32"
        assert step["same"], "to the bit what the engine drew from"
        assert 0 < step["spread"] < 1


def cross(folder: Path, num_processes: int, *legs: str) -> dict[str, dict]:
    """What came out of each leg; checkpoints are in `kept`."""
    out = folder / "out.json"
    launch(SCRIPT, ["crossing", str(out), str(folder / "kept"), *legs], num_processes, timeout_s=600)
    return json.loads(out.read_text())


def check_same(whole: dict, legs: dict[str, dict]) -> None:
    assert len(whole["losses"]) == 10
    assert any(abs(loss) > 1e-3 for loss in whole["losses"][5:])
    for leg, result in legs.items():
        steps = 5 if ":" in leg else 10
        assert len(result["losses"]) == steps, leg
        assert result["losses"] == pytest.approx(whole["losses"][-steps:], abs=1e-5), leg
        assert result["rewards"] == whole["rewards"][-steps:], leg
        assert result["weights"] == pytest.approx(whole["weights"], abs=1e-5), leg
        assert result["version"] == whole["version"], leg


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_goes_on_under_another_strategy_as_if_it_had_not_been_interrupted(tmp_path):
    """Ten steps on one device, against five under one strategy and five under another."""
    folder = str(tmp_path / "kept")
    whole = cross(tmp_path, 1, "single")["single"]
    sharded = ["ddp", "fsdp2", "fsdp1", "tp"]
    there = cross(tmp_path, 2, *sharded, *(f"{name}:single/step=5.ckpt" for name in sharded), "tp:fsdp2/step=5.ckpt")
    consolidate(f"{folder}/fsdp1/step=5.ckpt")
    names = [f"{name}/step=5.ckpt" for name in ("ddp", "fsdp2", "tp")] + ["fsdp1/step=5.ckpt.consolidated"]
    back = cross(tmp_path, 1, *(f"single:{name}" for name in names))
    check_same(whole, there | back)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["lora", "saved"])
def test_adapters_go_on_under_another_strategy(tmp_path, kind):
    one, sharded, ddp = (f"{strategy}+{kind}" for strategy in ("single", "fsdp2", "ddp"))
    whole = cross(tmp_path, 1, one)[one]
    there = cross(tmp_path, 2, sharded, f"{sharded}:{one}/step=5.ckpt", f"{ddp}:{one}/step=5.ckpt")
    check_same(whole, there | cross(tmp_path, 1, f"{one}:{sharded}/step=5.ckpt"))
    for strategy in ("fsdp1", "tp"):
        with pytest.raises(AssertionError, match=r"ValueError: .*model\.lora"):
            cross(tmp_path, 2, f"{strategy}+{kind}")


def end_one_rank(strategy: str, rank: int, how: str) -> tuple[list[int], list[str], float]:
    """Exit codes, outputs, and seconds from the end of one rank to that of the last."""
    processes = start(SCRIPT, [f"{strategy}:endless", str(rank) if how == "raise" else ""], 2)
    for line in processes[rank].stdout:
        if ("failing now" if how == "raise" else "step 3") in line:
            break
    began = time.monotonic()
    if how != "raise":
        processes[rank].send_signal(getattr(signal, how))
    outputs = finish(processes, 60)
    return [process.returncode for process in processes], outputs, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), ("ddp", 1), ("fsdp2", 1)])
def test_an_error_on_one_rank_ends_all_and_says_why(strategy, rank):
    codes, outputs, seconds = end_one_rank(strategy, rank, "raise")
    assert all(code != 0 for code in codes)
    assert seconds < 30
    assert f"rank {rank} (" in outputs[1 - rank]
    assert "failed: OSError: planted" in outputs[1 - rank]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_request_on_one_rank_ends_all_in_order(rank):
    codes, outputs, seconds = end_one_rank("ddp", rank, "SIGTERM")
    assert codes == [0, 0], outputs
    assert seconds < 40


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_other_one(rank):
    codes, outputs, seconds = end_one_rank("ddp", rank, "SIGKILL")
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] != 0
    assert seconds < 30
    assert "RankError" in outputs[1 - rank] or "ending it, because" in outputs[1 - rank]


def test_a_trained_parameter_costs_sixteen_bytes():
    """The formula of docs/hardware.md: float32 weight, gradient and two moments of AdamW."""
    module = make_module()
    parameters = list(module.policy.parameters())
    optimizer = torch.optim.AdamW(parameters)
    sum(p.sum() for p in parameters).backward()
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    kept = [*parameters, *(p.grad for p in parameters), *moments]
    assert sum(t.nbytes for t in kept) == 16 * sum(p.numel() for p in parameters)
