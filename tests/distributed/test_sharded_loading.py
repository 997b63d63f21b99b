"""Weights that are read after the policy was divided are those of the plain load, and no process holds all of them."""

import json
from pathlib import Path

import pytest
import torch
from launch import launch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import FSDPPrecision
from tiny_models import ALL, save, tiny_llama
from torch.distributed.fsdp.wrap import wrap

from lit_async_rl import CurrentProximal, OptimalBaseline, Reinforce, SequenceTruncatedIS
from lit_async_rl.models.end_tokens import eos_token_ids
from lit_async_rl.models.loading import WeightFiles, is_on_meta, load_policy, parameters_on_meta
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.sharding import FSDPStrategy, ModelParallelStrategy, Sharding
from lit_async_rl.training.module import PolicyModule

SCRIPT = Path(__file__).parents[1] / "helpers" / "sharded_loading.py"


@pytest.mark.parametrize("family", sorted(ALL.keys() - {"gpt-neox"}))
def test_later_reading_gives_what_transformers_loads(family, tmp_path):
    folder = save(ALL[family](), tmp_path)
    plain, later = load_policy(folder), load_policy(folder, device="meta")
    assert all(p.is_meta for p in later.parameters())
    WeightFiles(folder).read(later, later, torch.device("cpu"))
    expected, own = plain.state_dict(), later.state_dict()
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], expected[name]) for name in expected)
    assert all(torch.equal(a, b) for a, b in zip(later.buffers(), plain.buffers(), strict=True))
    assert len(list(later.parameters())) == len(list(plain.parameters())), "tied weights are one parameter"
    assert eos_token_ids(later) == eos_token_ids(plain)
    ids = torch.arange(2, 14)[None]
    assert torch.equal(later(ids).logits, plain(ids).logits)


def test_fsdp1_in_bfloat16_leaves_rotary_frequencies_precise(tmp_path):
    """Rounded to 8 bits they are other positions: 0.5 nats on average at position 4000 of a tiny Llama."""
    folder = save(tiny_llama(), tmp_path / "model")
    settings = dict(parallel_devices=[torch.device("cpu")], cluster_environment=LightningEnvironment())
    strategy = FSDPStrategy(**settings, precision_plugin=FSDPPrecision("bf16-mixed"), state_dict_type="sharded")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with strategy.model_sharded_context():
            policy = wrap(CausalPolicy(load_policy(folder)))
        ids = torch.arange(2, 14)[None]
        with torch.no_grad():
            policy(ids, torch.ones_like(ids, dtype=torch.bool))
        plain = dict(load_policy(folder).named_buffers())
        found = {name.rpartition(".lm.")[2]: buffer for name, buffer in policy.named_buffers()}
        assert policy.mixed_precision.param_dtype == torch.bfloat16
        assert {name: buffer.dtype for name, buffer in found.items()} == dict.fromkeys(plain, torch.float32)
        assert all(torch.equal(found[name], plain[name]) for name in plain)
    finally:
        torch.distributed.destroy_process_group()


def test_an_export_reads_the_weights_of_an_fsdp2_run_whose_baseline_needs_them(tmp_path):
    """It has no strategy, whatever the run had."""
    folder = save(tiny_llama(), tmp_path)
    parts = dict(loss=Reinforce(), proximal=CurrentProximal(), correction=SequenceTruncatedIS())
    module = PolicyModule(folder, **parts, baseline=OptimalBaseline(), sharding=Sharding(meta_device=True))
    module.configure_model()
    assert not is_on_meta(module)


def test_only_what_is_made_inside_has_no_memory_and_nothing_else_changes(tmp_path):
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    with pytest.raises(KeyError), parameters_on_meta():
        raise KeyError
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    with parameters_on_meta():
        mixed = torch.nn.Module()
        mixed.register_parameter("inside", frozen)
        mixed.register_parameter("none", None)
    assert mixed.inside.is_meta
    assert not mixed.inside.requires_grad
    mixed.register_parameter("outside", frozen)
    assert not mixed.outside.is_meta
    assert is_on_meta(mixed), "one is enough"
    assert not is_on_meta(torch.nn.Linear(2, 2))
    folder = save(tiny_llama(), tmp_path)
    later = load_policy(folder, device="meta")
    files, block = WeightFiles(folder), later.model.layers[0]
    files.read(later, block, torch.device("cpu"))
    assert not is_on_meta(block)
    assert is_on_meta(later.model.layers[1]), "read only when it is its turn"
    with torch.no_grad():
        block.input_layernorm.weight.fill_(7.0)
    files.read(later, later, torch.device("cpu"))
    assert not is_on_meta(later)
    assert (block.input_layernorm.weight == 7.0).all(), "what has values keeps them"
    assert torch.__future__.get_swap_module_params_on_conversion() == swaps


def test_a_lower_precision_is_that_of_the_plain_load(tmp_path):
    folder = save(tiny_llama(), tmp_path)
    plain, later = load_policy(folder, dtype="bfloat16"), load_policy(folder, dtype="bfloat16", device="meta")
    WeightFiles(folder).read(later, later, torch.device("cpu"))
    for a, b in zip(later.parameters(), plain.parameters(), strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.equal(a, b)


def test_a_model_that_cannot_be_read_in_pieces_is_refused(tmp_path):
    lm = tiny_llama()
    (tmp_path / "none").mkdir()
    lm.config.save_pretrained(tmp_path / "none")
    with pytest.raises(ValueError, match=r"meta_device.*has none"):
        WeightFiles(str(tmp_path / "none"))
    folder = save(tiny_llama(layers=1), tmp_path / "small")
    lm = load_policy(save(tiny_llama(layers=2), tmp_path / "large"), device="meta")
    with pytest.raises(ValueError, match=r"no weight 'model\.layers\.1"):
        WeightFiles(folder).read(lm, lm, torch.device("cpu"))
    renamed = save(ALL["gpt-neox"](), tmp_path / "renamed")
    lm = load_policy(renamed, device="meta")
    with pytest.raises(ValueError, match=r"transformers renames weights while it loads them"):
        WeightFiles(renamed).read(lm, lm, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"model\.sharding\.meta_device"):
        PolicyModule(folder, random_init=True, sharding=Sharding(meta_device=True))


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("fsdp2", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.sweep) for name in ("fsdp1", "tp", "ddp")),
    ],
)
def test_two_processes_never_hold_a_whole_policy(strategy, tmp_path, monkeypatch):
    """25 MB of weights; allocations are given back at once, so that memory says what is held."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    lm = tiny_llama(hidden=256, layers=10)
    whole = sum(p.numel() * p.element_size() for p in lm.parameters()) / 2**20
    folder = save(lm, tmp_path / "model")
    launch(SCRIPT, [strategy, folder, str(tmp_path / "out")], 2, timeout_s=150, anew=True)
    for rank in range(2):
        result = json.loads((tmp_path / f"out.{rank}").read_text())
        assert result["equal"], strategy
        assert result["buffers"], strategy
        assert result["logprob_error"] < 1e-5, strategy
        assert result["built_mb"] < whole / 10
        if strategy != "ddp":
            assert result["kept_mb"] < 0.6 * whole
            assert result["peak_mb"] < 0.8 * whole, f"{strategy}: {result}, all weights are {whole:.0f} MB"


def test_a_mesh_of_another_size_is_refused_before_any_process_waits():
    strategy = ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=2)
    strategy.parallel_devices = [torch.device("cpu")] * 2
    with pytest.raises(ValueError, match=r"data_parallel_size=4 times tensor_parallel_size=2 .* which is 2"):
        strategy.setup_environment()
