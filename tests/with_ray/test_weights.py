"""Weights through the object store: what travels, what a replica reads, and what its checksums prove."""

import numpy as np
import pytest
import torch
from torch import nn

from lit_async_rl.errors import EngineError
from lit_async_rl.models.weights import UNCHANGED
from lit_async_rl.ray.weights import WeightReader, WeightStore, checksum, find_difference


class Store:
    """In place of Ray's object store: read-only arrays by number."""

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self):
        self.objects = []
        self.num_reads = 0
        self.is_full = False

    def put(self, bucket):
        if self.is_full:
            raise self.exceptions.RayError("no room")
        copies = [part.copy() for part in bucket]
        for part in copies:
            part.flags.writeable = False
        self.objects.append(copies)
        return len(self.objects) - 1

    def get(self, ref):
        self.num_reads += 1
        return self.objects[ref]


def parameters(seed=0):
    torch.manual_seed(seed)
    found = {"a": torch.randn(4, 3), "b": torch.randn(5), "c": torch.arange(6), "d": torch.tensor(2.5)}
    return {name: nn.Parameter(t, requires_grad=t.is_floating_point()) for name, t in found.items()}


def read(reader, table):
    received = {}
    found = dict(reader.stream(table.contents, table.buckets, received))
    return found, received


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 2**28])
def test_what_is_read_is_what_was_sent_and_only_what_has_changed_travels(dtype, bucket_bytes):
    ray = Store()
    store, reader = WeightStore(ray, dtype, bucket_bytes), WeightReader(ray.get, takes_changes=True)
    weights = parameters()
    table = store.publish(0, weights.items())
    assert len(ray.objects) == (4 if bucket_bytes == 1 else 1)
    found, received = read(reader, table)
    for name, tensor in weights.items():
        expected = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        assert torch.equal(found[name], expected)
        assert found[name].dtype == expected.dtype
    assert find_difference(table.sums, {name: checksum(tensor) for name, tensor in received.items()}) == ""
    before = store.num_bytes
    with torch.no_grad():
        weights["b"] += 1
    again = store.publish(1, ((name, UNCHANGED if name == "c" else tensor) for name, tensor in weights.items()))
    assert store.num_bytes - before == weights["b"].numel() * (2 if dtype else 4)
    found, received = read(reader, again)
    assert list(received) == ["b"]
    assert {name for name, tensor in found.items() if tensor is UNCHANGED} == {"a", "c", "d"}
    late, _ = read(WeightReader(ray.get, takes_changes=True), again)  # a replica that was started meanwhile
    assert torch.equal(late["b"], weights["b"].to(dtype) if dtype else weights["b"])
    assert all(tensor is not UNCHANGED for tensor in late.values())
    whole, _ = read(WeightReader(ray.get, takes_changes=False), again)
    assert torch.equal(whole["c"], weights["c"])


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_shard_that_is_only_valid_until_the_next_is_copied():
    ray = Store()
    memory = torch.zeros(3)

    def shards():
        for n in range(4):
            memory.fill_(n)
            yield f"w{n}", memory

    table = WeightStore(ray, None).publish(0, shards())
    found, _ = read(WeightReader(ray.get, takes_changes=True), table)
    assert [float(found[f"w{n}"][0]) for n in range(4)] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_of_adapters_only_the_factors_travel_and_the_layer_comes_whole_from_the_store():
    ray = Store()
    store, reader = WeightStore(ray, None), WeightReader(ray.get, takes_changes=True)
    base = nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def stream(scale):
        yield "l.lora_A", torch.ones(1, 8) * scale
        yield "l.lora_B", torch.ones(8, 1)
        yield "l.weight", base

    read(reader, store.publish(0, stream(1)))
    before = store.num_bytes
    found, _ = read(reader, store.publish(1, stream(2)))
    assert store.num_bytes - before == 8 * 4
    assert torch.equal(found["l.weight"], base)
    assert float(found["l.lora_A"][0, 0]) == 2


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("takes_changes", [True, False])
def test_of_weights_of_which_little_has_changed_little_travels_and_all_is_as_it_was_sent(dtype, takes_changes):
    ray = Store()
    store = WeightStore(ray, dtype, delta=True)
    readers = [WeightReader(ray.get, takes_changes)]
    weights = {"w": nn.Parameter(torch.randn(64, 50)), "b": nn.Parameter(torch.randn(50)), "n": torch.arange(6)}
    before, sizes, was_changed, has_been_whole_again = 0, [], False, False
    for version in range(40):
        table = store.publish(version, weights.items())
        sizes.append(store.num_bytes - before)
        before = store.num_bytes
        was_changed |= "b" in table.changes
        has_been_whole_again |= was_changed and "b" not in table.changes
        if version % 7 == 3:
            readers.append(WeightReader(ray.get, takes_changes))  # a replica that joins
        for number, reader in enumerate(readers):
            if (number + version) % 3 == 2 and version < 39:
                continue  # misses this one
            found, received = read(reader, table)
            for name, tensor in received.items():
                assert checksum(tensor) == table.sums[name], (version, number, name)
            assert all(found[name] is UNCHANGED for name in found.keys() - received.keys())
        with torch.no_grad():  # most versions change few, some a half of the bias, none the numbers
            weights["w"].view(-1)[torch.randperm(3200)[:20]] += 1.0
            weights["b"][: 25 if version % 4 == 0 else 0] *= -2.0
    whole = sum(t.numel() * (2 if dtype and t.is_floating_point() else t.element_size()) for t in weights.values())
    assert sizes[0] == whole
    assert sorted(sizes)[len(sizes) // 2] < 0.1 * whole
    assert has_been_whole_again, "changes would take more and more room"
    held = sum(part.nbytes for ref in table.buckets.values() for part in ray.objects[ref])
    assert held < 4 * whole


@pytest.mark.parametrize(("bucket_bytes", "number"), [(15, 4), (16, 2), (31, 2), (32, 1)])
def test_a_bucket_is_as_large_as_it_may_be_and_no_larger(bucket_bytes, number):
    ray = Store()
    WeightStore(ray, None, bucket_bytes).publish(0, ((f"w{n}", torch.ones(2)) for n in range(4)))
    assert len(ray.objects) == number


def test_buckets_that_nothing_is_in_any_more_are_let_go():
    ray = Store()
    store = WeightStore(ray, None)
    for version in range(5):
        table = store.publish(version, parameters(version).items())
        assert max(table.buckets) == version
    assert set(table.buckets) == {0, 4}  # c and d never change


def test_a_difference_is_named():
    sums = {"a": 1, "b": 2}
    assert find_difference(sums, {"a": 1, "b": 2, "tied": 3}) == ""
    assert find_difference(sums, {"a": 1}) == "weight 'b' was not loaded"
    assert "weight 'b' is not the one that was sent" in find_difference(sums, {"a": 1, "b": 3})
    tensor = torch.randn(4, 5)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    bit = tensor.clone()
    bit.view(torch.int32)[2, 2] ^= 1
    assert checksum(bit) != checksum(tensor)
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(0))
    assert checksum(tensor.bfloat16()) != checksum(tensor)


def test_a_full_store_and_a_weight_that_was_never_sent_are_errors_that_say_so():
    ray = Store()
    ray.is_full = True
    with pytest.raises(EngineError, match=r"no room for .* MiB of weights .*--object-store-memory"):
        WeightStore(ray, None).publish(0, parameters().items())
    with pytest.raises(EngineError, match="'a' is reported as unchanged, but was never sent"):
        WeightStore(ray, None).publish(0, [("a", UNCHANGED)])


def test_bytes_are_those_of_the_tensor():
    ray = Store()
    store = WeightStore(ray, None)
    store.publish(0, [("x", torch.tensor([1, 2], dtype=torch.int16))])
    assert ray.objects[0][0].tolist() == np.array([1, 2], dtype=np.int16).view(np.uint8).tolist()
