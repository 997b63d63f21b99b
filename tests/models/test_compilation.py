"""Compiled blocks: the same log-probabilities and gradients, compiled once, and in steps of training only."""

import pytest
import torch
import torch.distributed as dist
from flow import make_module
from tiny_models import save, tiny_gpt2, tiny_qwen3_moe
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import lit_async_rl as rl
from lit_async_rl.baselines.optimal import Norms
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.losses import Reinforce
from lit_async_rl.models.compilation import is_compiled
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.self_check import check_policy
from lit_async_rl.models.sharding import _divide_layers

SHAPES = [(6, 20), (4, 31), (1, 17), (6, 6)]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def results(policy, rows, width):
    """Log-probabilities of random completions, and the gradient of a sum of them."""
    torch.manual_seed(rows)
    ids = torch.randint(12, (rows, width))
    ids[1::2, : width // 2] = ids[: rows // 2 * 2 : 2, : width // 2]  # two completions of a prompt
    mask = torch.arange(width).expand(rows, -1) >= width // 2
    policy.zero_grad()
    stats = policy(ids, mask, group_index=torch.arange(rows) // 2)
    (stats.logprobs * torch.randn(rows, width)).sum().backward()
    return stats.logprobs.detach(), torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"packing": rl.PrefixTreePacking(), "lora": rl.LoRA(rank=2), "gradient_checkpointing": True}],
    ids=["all weights", "trees, adapters, checkpointing"],
)
def test_compiled_blocks_compute_the_same_for_every_number_of_rows_and_tokens(settings):
    found = {}
    names = {}
    for compiled in (False, True):
        torch.manual_seed(0)  # of the adapters
        policy = make_module(torch_compile=compiled, **settings).policy
        assert is_compiled(policy.causal_lm) == compiled
        names[compiled] = list(policy.state_dict())
        found[compiled] = [results(policy, *SHAPES[0])]
        graphs = counters["stats"]["unique_graphs"]
        assert bool(graphs) == compiled
        found[compiled] += [results(policy, *shape) for shape in SHAPES[1:]]
    assert names[True] == names[False], "checkpoints stay the same"
    assert counters["stats"]["unique_graphs"] <= 2 * graphs, "again for a single row, and for no other number"
    assert not counters["graph_break"]
    for eager, compiled in zip(found[False], found[True], strict=True):
        for expected, values in zip(eager, compiled, strict=True):
            assert expected.abs().max() > 0.01
            torch.testing.assert_close(values, expected, rtol=1e-4, atol=2e-5)


def test_without_gradients_the_blocks_run_as_they_were_written(tmp_path):
    """Self-check, probe, and validation of a model that is sampled from by its own modules."""
    policy = make_module(model=save(tiny_gpt2(), tmp_path), torch_compile=True).policy
    engine = EmbeddedEngine.from_module(policy.causal_lm, num_slots=4)
    sampling = rl.SamplingParams(max_tokens=4)
    found = run_requests(engine, [rl.GenerationRequest(id=0, prompt_ids=(3, 4), num_samples=2, sampling=sampling)])
    assert len(found[0]) == 2
    check_policy(policy, 1e-4)
    with torch.inference_mode():
        policy(torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.bool))
    assert counters["stats"]["calls_captured"] == 0


def test_what_cannot_be_compiled_is_refused(tmp_path):
    folder = save(tiny_qwen3_moe(), tmp_path)
    with pytest.raises(ValueError, match=r"model.torch_compile must be False with Qwen3Moe.*, got True: .* experts"):
        make_module(model=folder, torch_compile=True)
    assert not is_compiled(load_policy(folder))
    for norms in (Norms.GHOST, Norms.PER_TRAJECTORY):
        with pytest.raises(ValueError, match=rf"torch_compile=true with model.baseline.norms={norms.name}"):
            make_module(torch_compile=True, loss=Reinforce(), baseline=rl.OptimalBaseline(norms=norms))
    module = make_module(torch_compile=True, loss=Reinforce(), baseline=rl.OptimalBaseline(norms=Norms.SCORE))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ValueError, match=r"tensor_parallel_size=2 cannot be combined with model.torch_compile"):
            _divide_layers(module.policy, init_device_mesh("cpu", (2,)))
    finally:
        dist.destroy_process_group()
