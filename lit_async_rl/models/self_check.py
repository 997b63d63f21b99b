"""Self-check of a model at set-up: our log-probabilities against plain forward passes of transformers.

If the head, cache or positions of a model family differ from our assumptions, the run would silently train on, or
sample from, another distribution. A few short random sequences reveal that at less than the cost of a training step.
The plain passes use eager attention and experts, without cache, mask and autocast: faster kernels may ignore settings
of a configuration on both sides of the comparison.
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
from lit_async_rl.utils.device_memory import is_out_of_memory

CHECK_SETTING = {"trainer": "model.self_check", "engine": "data.engine.self_check", "validation": "model.self_check"}
ALTERNATIVE = {
    "trainer": "",
    "engine": "; data.engine=VLLMEngine may know it",
    "validation": "; validation samples with the embedded engine: leave data.validation.prompts out",
}
PROMPT_LENGTHS = (3, 1)  # tokens
MAX_COMPLETION_LENGTH = 3  # tokens


def random_tokens(lm: PreTrainedModel, number: int, seed: int = 0) -> list[int]:
    """Random token ids, without the special tokens named in the model's configuration."""
    text_config = lm.config.get_text_config()
    special = {
        value
        for config in (lm.config, text_config)
        for name, value in vars(config).items()
        if "token" in name and type(value) is int
    }
    rng = random.Random(seed)
    tokens: list[int] = []
    candidates = range(4, text_config.vocab_size)  # the first ids are special in most vocabularies
    while len(tokens) < number:
        token = rng.choice(candidates) if len(candidates) else 0
        if token not in special or len(special) >= len(candidates):
            tokens.append(token)
    return tokens


@torch.no_grad()
def plain_pass(lm: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[tuple[Tensor, float]]:
    """Log-probabilities of all tokens but the first of each sequence, and an error bound for rounding in nats.

    A single forward pass, because each one reads all weights; in their dtype, by eager kernels. Shorter sequences are
    padded with their first token, which in a causal model changes no earlier position. The error bound is two units in
    the last place of the largest logit: logits grow in training, and bfloat16 has steps of 0.125 between 16 and 32.
    """
    longest = max(len(ids) for ids in sequences)
    rows = [[*ids, *[ids[0]] * (longest - len(ids))] for ids in sequences]
    tokens = torch.tensor(rows, device=lm.device)
    results = []
    kind = lm.device.type
    precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    with eager_kernels(lm), torch.autocast(kind, enabled=False):
        logits = lm(input_ids=tokens, use_cache=False).logits
    for ids, row, own in zip(sequences, tokens, logits, strict=True):
        own = own[: len(ids) - 1]
        targets = row[1 : len(ids), None]
        largest = torch.cat([own.amax(-1), own.gather(-1, targets)[:, 0]]).abs().max()
        logprobs = own.float().log_softmax(-1).gather(-1, targets)[:, 0]
        results.append((logprobs, 2 * torch.finfo(precision or own.dtype).eps * float(largest)))
    return results


@contextmanager
def unsupported_model_errors(lm: PreTrainedModel, what: str, side: str) -> Iterator[None]:
    """Context that turns errors into one line that names the model and `what` failed.

    Raises:
        UnsupportedModelError: in place of any error except running out of memory.
    """
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        summary = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        raise refusal(lm, f"{what} cannot be computed ({summary})", side) from error


def refusal(lm: PreTrainedModel, reason: str, side: str) -> UnsupportedModelError:
    """The error that ends a run, with model type, reason and remedy."""
    return UnsupportedModelError(
        f"model type {lm.config.model_type!r} ({type(lm).__name__}): {reason}{ALTERNATIVE[side]}; "
        f"{CHECK_SETTING[side]}=false leaves this check out"
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

    Args:
        lm: the model.
        what: description of the log-probabilities, for the message.
        found: one tensor for each sequence.
        plain: result of `plain_pass` for the same sequences.
        bound: largest mean absolute difference, in nats.
        side: trainer, engine or validation; selects the advice in the message.

    Raises:
        UnsupportedModelError: the mean absolute difference of a sequence exceeds `bound` and the rounding error of its
            logits, or is NaN.
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
    """Name of the dtype of computations in the present context; `tf32` is float32 on an accelerator."""
    kind = lm.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else lm.dtype
    name = str(dtype).removeprefix("torch.")
    return "tf32" if name == "float32" and kind != "cpu" else name


@torch.no_grad()
def check_policy(policy: CausalPolicy, bound: float) -> None:
    """Checks the trainer's log-probabilities: padded rows, the head in chunks, and packed rows if packing is on.

    The sample is two completions of one prompt, and one of a prompt of one token: 15 tokens.

    Args:
        policy: policy with unsharded parameters.
        bound: largest mean difference by rounding, in nats.

    Raises:
        UnsupportedModelError: log-probabilities differ, or cannot be computed.
    """
    lm = policy.causal_lm
    prompt, single = (random_tokens(lm, length, seed) for seed, length in enumerate(PROMPT_LENGTHS))
    shapes = [
        (prompt, MAX_COMPLETION_LENGTH, 0),
        (prompt, MAX_COMPLETION_LENGTH - 1, 0),
        (single, MAX_COMPLETION_LENGTH, 1),
    ]
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
        with unsupported_model_errors(lm, "a plain forward pass", "trainer"):
            plain = plain_pass(lm, [ids for ids, _, _ in rows])
        layouts = {"padded rows": None} if policy.packing is None else {"padded rows": None, "packed rows": groups}
        for layout, index in layouts.items():
            what = f"the trainer's log-probabilities of {layout}"
            with unsupported_model_errors(lm, what, "trainer"):
                stats = policy(ids, mask, group_index=index)
            found = [values[part] for values, part in zip(stats.logprobs, mask, strict=True)]
            compare(lm, what, found, plain=plain, bound=bound, side="trainer")
