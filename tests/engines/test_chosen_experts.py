"""Router replay: what the engine records of mixture-of-experts models, and what the trainer makes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hostile_engines import changed
from replays import assert_exact, groups_of, requests_of
from tiny_models import SPARSE, tiny_llama, tiny_olmoe, tiny_qwen3_moe
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from lit_async_rl.advantages.group import GroupMean
from lit_async_rl.data.collate import collate_step
from lit_async_rl.engines.base import Completion
from lit_async_rl.engines.completion_check import find_fault
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.models.packing import SharedPromptPacking
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.routers import Replaying, checkpoint_contexts, replay_in, routers_of
from lit_async_rl.problem import Prompt
from lit_async_rl.replay.tape import from_rows, to_row
from lit_async_rl.rollouts.group_book import GroupEntry, pack_groups, unpack_groups
from lit_async_rl.sampler_records import OWN_CHOICE, ExpertChoices
from lit_async_rl.types import RolloutBatch

families = pytest.mark.parametrize("make", list(SPARSE.values()), ids=list(SPARSE))


def sampled(lm, num_slots: int = 4, **sampling):
    requests = requests_of([5, 2, 9], num_samples=3, max_tokens=14, experts=True, **sampling)
    return requests, EmbeddedEngine.from_module(lm, num_slots=num_slots).run(requests)


def choices_of(completion: Completion) -> ExpertChoices:
    assert completion.experts is not None
    return completion.experts


@torch.no_grad()
def chosen_by(lm, ids: Sequence[int]) -> Tensor:
    """Experts of one ordinary forward pass, [tokens, routers, k]."""
    seen: list[Tensor] = []
    handles = [router.register_forward_hook(lambda m, a, out: seen.append(out[2])) for router in routers_of(lm)]
    lm(input_ids=torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return torch.stack(seen, dim=1)


@families
def test_the_engine_records_the_experts_of_every_token_that_it_reads(make) -> None:
    lm = make()
    requests, results = sampled(lm)  # more samples than slots: rows move, and prompts are copied
    assert_exact(lm, requests, results)
    for request, completions in zip(requests, results, strict=True):
        for completion in completions:
            expected = chosen_by(lm, request.prompt_ids + completion.token_ids)[:-1]
            assert torch.equal(choices_of(completion).experts.sort(-1).values.long(), expected.sort(-1).values)


def batch_of(requests, results, num_micro_batches: int = 1) -> list[RolloutBatch]:
    settings = dict(advantage=GroupMean(), aggregation=TokenMean(), temperature=1.0, pad_token_id=0)
    return collate_step(groups_of(requests, results), **settings, num_micro_batches=num_micro_batches)


@families
@pytest.mark.parametrize("packing", [None, SharedPromptPacking()], ids=["rows", "packed"])
def test_replayed_experts_give_the_engines_log_probabilities(make, packing) -> None:
    lm = make()
    batches = batch_of(*sampled(lm), num_micro_batches=2)  # padding in both
    policy = CausalPolicy(lm, packing=packing)
    for batch in batches:
        group = None if packing is None else batch.group_index
        replayed = policy(batch.input_ids, batch.loss_mask, group_index=group, experts=batch.experts).logprobs
        assert (replayed - batch.behavior_logprobs)[batch.loss_mask].abs().max() < 1e-5
        others = policy(batch.input_ids, batch.loss_mask, group_index=group, experts=(batch.experts + 1) % 8).logprobs
        assert (others - batch.behavior_logprobs)[batch.loss_mask].abs().max() > 0.1


def slow_router(experts: Tensor, number: int, normalise: bool):
    """Forward pass of a router whose choice is given, one token after the other."""

    def forward(self, hidden: Tensor):
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits, rows = hidden @ self.weight.T, []
        for token, chosen in zip(logits, experts[:, number].tolist(), strict=True):
            weights = [token[e].exp() / token.exp().sum() for e in chosen]
            rows.append(torch.stack([w / sum(weights) if normalise else w for w in weights]))
        return logits, torch.stack(rows), experts[:, number]

    return forward


@families
def test_values_and_gradients_are_those_of_gates_on_given_experts(make) -> None:
    lm = make()
    ids = torch.randint(2, 64, (2, 6), generator=torch.Generator().manual_seed(0))
    experts = torch.stack([torch.randperm(8)[:2] for _ in range(2 * 6 * 2)]).reshape(2, 6, 2, 2)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    CausalPolicy(lm)(ids, mask, experts=experts).logprobs.sum().backward()
    found = {name: p.grad.clone() for name, p in lm.named_parameters()}
    lm.zero_grad()
    for number, router in enumerate(routers_of(lm)):
        normalise = getattr(router, "norm_topk_prob", True)
        router.forward = slow_router(experts.flatten(0, 1), number, normalise).__get__(router)
    log_p = lm(input_ids=ids).logits[:, :-1].log_softmax(-1)
    log_p.gather(-1, ids[:, 1:, None]).sum().backward()
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(
            found[name], parameter.grad, rtol=1e-4, atol=1e-5 * float(parameter.grad.abs().max())
        )
    assert all(found[name].norm() > 1e-3 for name in found if name.endswith("gate.weight"))


@pytest.mark.parametrize("kind", [Qwen3MoeTopKRouter, OlmoeTopKRouter])
@pytest.mark.parametrize("normalise", [False, True])
def test_in_float64_a_router_on_given_experts_equals_the_loops(kind, normalise) -> None:
    router = kind(Qwen3MoeConfig(hidden_size=6, num_experts=5, num_experts_per_tok=2, norm_topk_prob=normalise))
    layer = nn.ModuleList([router.double()])
    generator = torch.Generator().manual_seed(0)
    hidden, cotangent = (torch.randn(4, n, generator=generator, dtype=torch.float64) for n in (6, 2))
    weight = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    router.load_state_dict({"weight": weight})
    experts = torch.tensor([[0, 1], [4, 2], [3, 0], [1, 4]])
    replay_in(layer)
    with Replaying(experts[:, None]):
        _, found, chosen = router(hidden)
    assert torch.equal(chosen, experts)
    (cotangent * found).sum().backward()
    expected = torch.zeros(5, 6, dtype=torch.float64)
    for n in range(4):
        logits = [math.fsum(a * b for a, b in zip(row, hidden[n].tolist(), strict=True)) for row in weight.tolist()]
        among = experts[n].tolist() if normalise else range(5)
        total = math.fsum(math.exp(logits[e]) for e in among)
        share = {e: math.exp(logits[e]) / total for e in range(5)}
        for k, e in enumerate(experts[n].tolist()):
            assert math.isclose(float(found[n, k]), share[e], rel_tol=1e-9)
            for other in among:  # d share_e / d logit_other = share_e (1[e = other] - share_other)
                slope = cotangent[n, k] * share[e] * (float(e == other) - share[other])
                expected[other] += slope * hidden[n]
    torch.testing.assert_close(router.weight.grad, expected, rtol=1e-9, atol=1e-9)


def test_unknown_places_are_the_routers_own_choice() -> None:
    lm = tiny_olmoe()
    (batch,) = batch_of(*sampled(lm))
    policy = CausalPolicy(lm)
    blank = torch.full_like(batch.experts, OWN_CHOICE)
    plain = policy(batch.input_ids, batch.loss_mask).logprobs
    torch.testing.assert_close(policy(batch.input_ids, batch.loss_mask, experts=blank).logprobs, plain)


def test_gradient_checkpointing_replays_the_same_experts() -> None:
    gradients = []
    for checkpointing in (False, True):
        lm = tiny_qwen3_moe()
        (batch,) = batch_of(*sampled(lm))
        if checkpointing:
            settings = {"use_reentrant": False, "context_fn": checkpoint_contexts}
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
            lm.train()
        CausalPolicy(lm)(batch.input_ids, batch.loss_mask, experts=(batch.experts + 3) % 8).logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in lm.parameters()]))
    torch.testing.assert_close(*gradients)


def test_choices_survive_checkpoints_and_tapes() -> None:
    requests, results = sampled(tiny_qwen3_moe())
    rows = [results[0][0].scored(1.0), replace(results[0][1], experts=None), results[0][2]]
    prompt = Prompt(text="p")
    saved = GroupEntry(index=0, position=0, prompt=prompt, prompt_ids=(1,), version=0, rollouts=dict(enumerate(rows)))
    (restored,) = unpack_groups(pack_groups([saved]), lambda _: prompt)
    assert [row.experts for row in restored.rollouts.values()] == [row.experts for row in rows]
    (group, *_) = groups_of(requests, results)
    assert from_rows([to_row(group, n) for n in range(len(group.rollouts))]).rollouts == group.rollouts


def test_a_completion_that_goes_on_keeps_the_choices_of_its_earlier_tokens() -> None:
    first, later = torch.zeros(4, 2, 2, dtype=torch.int16), torch.ones(7, 2, 2, dtype=torch.int16)
    whole = ExpertChoices(first).continued(ExpertChoices(later)).padded(9)
    assert whole.experts[:, 0, 0].tolist() == [0] * 4 + [1] * 3 + [OWN_CHOICE] * 2


def test_wrong_choices_are_the_engines_fault() -> None:
    requests, results = sampled(tiny_qwen3_moe())
    completion, choices = results[0][0], choices_of(results[0][0])
    checks = dict(versions=(None, None), vocab_size=64, max_model_len=64, scores=False, is_partial=False)
    assert find_fault(completion, requests[0], **checks) == ""
    for broken in (None, ExpertChoices(choices.experts[1:]), ExpertChoices(choices.experts - 9)):
        assert "experts" in find_fault(replace(completion, experts=broken), requests[0], **checks)
    (wrong,) = changed(experts=choices.experts)(completion)
    assert "must be ExpertChoices" in find_fault(wrong, requests[0], **checks)
    not_asked = replace(requests[0], sampling=replace(requests[0].sampling, experts=False))
    assert "experts" in find_fault(completion, not_asked, **checks)


def test_a_dense_model_is_refused_by_the_settings_name() -> None:
    with pytest.raises(ValueError, match=r"data\.sampling\.experts=true: the routers of LlamaForCausalLM cannot"):
        sampled(tiny_llama())


def test_engines_that_come_and_go_around_a_live_model_leave_it_as_it_is() -> None:
    """Each batch of held-out prompts has its own, and each left another hook in every router of the policy."""
    lm = tiny_qwen3_moe()
    policy = CausalPolicy(lm)
    before = [dict(router._forward_hooks) for router in routers_of(lm)]
    for _ in range(3):
        EmbeddedEngine.from_module(policy.causal_lm, num_slots=2).run(requests_of([5], max_tokens=3))
    assert [dict(router._forward_hooks) for router in routers_of(lm)] == before
    assert all(len(hooks) == 1 for hooks in before)
