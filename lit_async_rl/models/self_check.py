"""Self-check of a model at set-up: log-probabilities as computed here against plain forward passes of transformers.

A family whose head, cache or positions work otherwise than assumed would train on, or sample from, another
distribution without any sign of it. Plain passes compute attention and experts eagerly, without cache, mask and
autocast: faster kernels may ignore settings of a configuration, and would do so on both sides. A few short random
sequences show that for less than the price of a training step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_async_rl.errors import UnsupportedModelError
from lit_async_rl.models.attention import eager_kernels
from lit_async_rl.models.loading import evaluation_mode
from lit_async_rl.models.policy import CausalPolicy

SWITCH = {"trainer": "model.self_check", "engine": "data.engine.self_check", "validation": "model.self_check"}
ADVICE = {
    "trainer": "",
    "engine": "; data.engine=VLLMEngine may know it",
    "validation": "; validation samples with the embedded engine: leave data.validation.prompts out",
}
NUM_PROMPT_TOKENS = (3, 1)  # lengths of the prompts, and of the longest completion
NUM_SAMPLED = 3


def random_tokens(lm: PreTrainedModel, number: int, seed: int = 0) -> list[int]:
    """Token ids from the model's vocabulary, without the special ones that its configuration names."""
    config = lm.config.get_text_config()
    special = {
        value for one in (lm.config, config) for name, value in vars(one).items() if "token" in name and _is_id(value)
    }
    rng = random.Random(seed)
    found = list[int]()
    usual = range(4, config.vocab_size)  # the first are special in most vocabularies
    while len(found) < number:
        token = rng.choice(usual) if len(usual) else 0
        if token not in special or len(special) >= len(usual):
            found.append(token)
    return found


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@torch.no_grad()
def full_logprobs(lm: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Log-probabilities [len(ids) - 1] of all tokens but the first, by one forward pass of the sequence alone."""
    return plain_pass(lm, [ids])[0][0]


@torch.no_grad()
def plain_pass(lm: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[tuple[Tensor, float]]:
    """`full_logprobs` of each sequence, and what rounding explains; one forward pass, as each reads all weights.

    Kernels are eager, and the precision is that of the weights: autocast is off. Shorter sequences go on with their
    first token instead of padding: in a causal model that changes nothing before. Rounding explains two units in the
    last place of the largest logit, in nats. Training sharpens a model, and logits grow: bfloat16 has steps of 0.125
    between 16 and 32.
    """
    longest = max(len(ids) for ids in sequences)
    rows = [[*ids, *[ids[0]] * (longest - len(ids))] for ids in sequences]
    tokens = torch.tensor(rows, device=lm.device)
    found = []
    kind = lm.device.type
    precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    with eager_kernels(lm), torch.autocast(kind, enabled=False):
        logits = lm(input_ids=tokens, use_cache=False).logits
    for ids, row, own in zip(sequences, tokens, logits, strict=True):
        own = own[: len(ids) - 1]
        targets = row[1 : len(ids), None]
        largest = torch.cat([own.amax(-1), own.gather(-1, targets)[:, 0]]).abs().max()
        logprobs = own.float().log_softmax(-1).gather(-1, targets)[:, 0]
        found.append((logprobs, 2 * torch.finfo(precision or own.dtype).eps * float(largest)))
    return found


@contextmanager
def named(lm: PreTrainedModel, what: str, side: str) -> Iterator[None]:
    """Turns whatever a model raises that does not fit into one line that names it.

    Raises:
        UnsupportedModelError: in place of any error but a lack of memory.
    """
    try:
        yield
    except (UnsupportedModelError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        first = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        raise refusal(lm, f"{what} cannot be computed ({first})", side) from error


def refusal(lm: PreTrainedModel, reason: str, side: str) -> UnsupportedModelError:
    """The error that ends a run: model type, reason, and what can be done."""
    return UnsupportedModelError(
        f"model type {lm.config.model_type!r} ({type(lm).__name__}): {reason}{ADVICE[side]}; {SWITCH[side]}=false "
        "leaves this check out"
    )


def compare(
    lm: PreTrainedModel,
    what: str,
    found: Sequence[Tensor],
    plain: Sequence[tuple[Tensor, float]],
    bound: float,
    side: str,
) -> None:
    """Compares log-probabilities of the last tokens of each sequence with those of `plain_pass`.

    Raises:
        UnsupportedModelError: the mean absolute difference of one sequence is above `bound` and above what rounding of
            its logits explains, or not a number.
    """
    for values, (expected, rounding) in zip(found, plain, strict=True):
        error = float((values.float() - expected[-len(values) :].to(values.device)).abs().mean())
        if not error <= (explained := max(bound, rounding)):
            reason = (
                f"{what} differ from those of a plain forward pass by {error:.2g} nats on average, where the precision "
                f"explains {explained:.2g}"
            )
            raise refusal(lm, reason, side)


def compute_dtype(lm: PreTrainedModel) -> str:
    """Name of the dtype in which the model computes here; `tf32` is float32 on an accelerator."""
    kind = lm.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else lm.dtype
    name = str(dtype).removeprefix("torch.")
    return "tf32" if name == "float32" and kind != "cpu" else name


@torch.no_grad()
def check_policy(policy: CausalPolicy, bound: float) -> None:
    """Checks what the trainer computes: padded rows, the head in chunks, and packed rows if packing is on.

    Two completions of one prompt and one completion of a prompt of one token, 15 tokens together.

    Args:
        policy: with whole parameters (not sharded).
        bound: largest mean difference in nats that the precision explains.

    Raises:
        UnsupportedModelError: log-probabilities differ, or cannot be computed.
    """
    lm = policy.causal_lm
    prompt = random_tokens(lm, NUM_PROMPT_TOKENS[0])
    single = random_tokens(lm, NUM_PROMPT_TOKENS[1], seed=1)
    shapes = [(prompt, NUM_SAMPLED, 0), (prompt, NUM_SAMPLED - 1, 0), (single, NUM_SAMPLED, 1)]
    rows = [
        (begin + random_tokens(lm, length, seed=n + 2), len(begin), group)
        for n, (begin, length, group) in enumerate(shapes)
    ]
    width = max(len(ids) for ids, _, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _, _ in rows], device=lm.device)
    columns = torch.arange(width, device=lm.device)
    mask = torch.stack([(columns >= begin) & (columns < len(ids)) for ids, begin, _ in rows])
    groups = torch.tensor([group for _, _, group in rows], device=lm.device)
    with evaluation_mode(policy):
        with named(lm, "a plain forward pass", "trainer"):
            plain = plain_pass(lm, [ids for ids, _, _ in rows])
        layouts = {"padded rows": None} if policy.packing is None else {"padded rows": None, "packed rows": groups}
        for layout, index in layouts.items():
            what = f"the trainer's log-probabilities of {layout}"
            with named(lm, what, "trainer"):
                stats = policy(ids, mask, group_index=index)
            found = [values[part] for values, part in zip(stats.logprobs, mask, strict=True)]
            compare(lm, what, found, plain=plain, bound=bound, side="trainer")
