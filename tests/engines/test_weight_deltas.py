"""Updates that hold only what has changed give the worker, bit for bit, the weights of the trainer."""

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_gpt2, tiny_llama

from lit_async_rl.engines.weight_deltas import INDEX, MASK, IncomingWeights, LoadedWeights, WeightStore
from lit_async_rl.engines.weight_files import read_folder
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.weights import stream_weights
from lit_async_rl.vllm.file_transfer import FileTransfer


class Worker:
    """Applies folders as vLLM's worker does, but keeps the tensors."""

    def __init__(self):
        self.held, self.model = LoadedWeights(), {}

    def load(self, folder: str) -> set[str]:
        incoming = IncomingWeights(folder, self.held)
        loaded = dict(incoming.weights())
        self.model |= {name: tensor.clone() for name, tensor in loaded.items()}
        self.held = incoming.loaded_weights()
        return set(loaded)


def same(model, weights, dtype=torch.bfloat16) -> bool:
    expected = {name: tensor.to(dtype) for name, tensor in weights.items()}
    return model.keys() == expected.keys() and all(
        torch.equal(model[n].nan_to_num(), expected[n].nan_to_num()) for n in expected
    )


def changed(weights, share: float, seed: int) -> None:
    """Adds noise to a share of the elements of each."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        where = torch.rand(tensor.shape, generator=generator) < share
        tensor += torch.where(where, torch.randn(tensor.shape, generator=generator), torch.zeros(()))


@pytest.mark.parametrize("shard_gb", [1.0, 1e-7], ids=["one file", "many files"])
def test_any_share_of_changes_arrives_exactly_and_in_the_smallest_encoding(tmp_path, shard_gb):
    generator = torch.Generator().manual_seed(0)
    weights = {f"layers.{n}.mlp.up.weight": torch.randn(40, 33, generator=generator) for n in range(5)}
    weights["norm.weight"] = torch.tensor(1.0)
    transfer, worker = FileTransfer(str(tmp_path), shard_gb, dtype="bfloat16", delta=True), Worker()
    sizes, kinds = [], []
    for seed, share in enumerate([1.0, 0.0, 0.002, 0.1, 1.0]):
        if seed:
            changed(weights, share, seed)
        transfer.stage(weights.items())
        kinds.append({name.partition(":")[0] for name, _ in read_folder(transfer.staged) if ":" in name})
        worker.load(transfer.staged)
        assert same(worker.model, weights)
        sizes.append(transfer.staged_bytes)
    assert kinds == [set(), set(), {INDEX[:-1], "value"}, {MASK[:-1], "value"}, set()]
    assert sizes[1] < sizes[2] < sizes[3] < sizes[4]
    transfer.close()


def test_numbers_that_are_not_finite_and_negative_zeros_count_as_what_they_are():
    kept, sent = WeightStore(), torch.tensor([float("nan"), 0.0, 1.0] * 20)
    kept.encode("x", sent.clone())
    assert kept.encode("x", sent.clone()) == {}, "a NaN that stays is no change"
    sent[1] = -0.0
    assert kept.encode("x", sent.clone())[INDEX + "x"].tolist() == [1]


def test_an_update_is_refused_by_whoever_lacks_the_weights_before_it_and_whole_ones_help(tmp_path):
    weights = {"a.weight": torch.randn(64, 64), "b.weight": torch.randn(64)}
    transfer, worker, late = FileTransfer(str(tmp_path), delta=True), Worker(), Worker()
    transfer.stage(weights.items())
    worker.load(transfer.staged)
    for seed in (1, 2):
        changed(weights, 0.01, seed)
        transfer.stage(weights.items())
        assert worker.load(transfer.staged) == set(weights)
        with pytest.raises(RuntimeError, match=r"has weights '', and .* updates "):
            late.load(transfer.staged)
    late.load(transfer.whole())
    assert same(late.model, weights, torch.float32)
    assert len(list(tmp_path.glob("lit_async_rl_weights_*"))) == 2
    changed(weights, 0.01, 3)
    transfer.stage(weights.items())
    assert len(list(tmp_path.glob("lit_async_rl_weights_*"))) == 1
    for each in (worker, late):
        each.load(transfer.staged)
        assert same(each.model, weights, torch.float32)
    transfer.close()
    assert not list(tmp_path.iterdir())
    transfer.stage(weights.items())  # of the next engine
    Worker().load(transfer.staged)
    transfer.close()


@pytest.mark.parametrize(
    "make", [tiny_llama, tiny_gpt2], ids=["llama", "gpt2: merged, because its layers are transposed"]
)
def test_adapters_travel_alone_and_are_merged_by_the_worker(tmp_path, make):
    policy = CausalPolicy(add_lora(make(hidden=128), LoRA(rank=2, target_modules=["q_proj", "c_attn"])))
    names = {name.replace(".base_layer", "") for name, _ in policy.causal_lm.named_parameters() if ".lora_" not in name}
    transfer, worker = FileTransfer(str(tmp_path), delta=True), Worker()
    sizes, loaded = [], []
    for seed in range(3):
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.1
        transfer.stage(stream_weights(policy, adapters=True))
        loaded.append(worker.load(transfer.staged))
        sizes.append(transfer.staged_bytes)
        expected = dict(stream_weights(policy))
        assert worker.model.keys() == names == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(worker.model[name], tensor, atol=1e-6, rtol=1e-5)
    assert loaded[0] == names
    assert loaded[1] < names, "weights that never change are loaded again"
    if make is tiny_llama:
        assert max(sizes[1:]) < 0.1 * sizes[0]
        assert {Path(name).suffixes[-2] for name in loaded[1]} <= {".q_proj", ".k_proj", ".v_proj", ".o_proj"}
    transfer.close()
