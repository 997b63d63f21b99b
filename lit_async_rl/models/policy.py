"""Policy network: a Hugging Face causal LM that returns log-probabilities of given tokens, with chunked logits.

B rows, T positions, N = tokens that train, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lit_async_rl.errors import InvariantError
from lit_async_rl.models.architecture import body, rotary_length
from lit_async_rl.models.packing import PackedRows, PrefixTreePacking, TreeCosts, packing_for
from lit_async_rl.models.routers import Replaying, replay_in
from lit_async_rl.utils.checks import check_range


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Statistics of each token; 0 where the mask is False.

    Attributes:
        logprobs: log-probability of the token.
        entropy: entropy of its distribution, in nats.
        head: log-probabilities of the k tokens in `head_ids` at its position (k = 0 by default).
        compared: what `compare` made of its distribution; None without it.
        more: as `head`, of further tokens; None without any.
        rows: layout of the forward pass if it was packed.
        is_greedy: whether it is the likeliest token; None where the entropy was asked for.
    """

    logprobs: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    head: Float[Tensor, "B T k"]
    compared: Float[Tensor, "B T"] | None = None
    more: Float[Tensor, "B T q"] | None = None
    rows: PackedRows | None = None
    is_greedy: Bool[Tensor, "B T"] | None = None


# A value of each distribution [n, V] of log-probabilities, of the tokens with the numbers [n] among those that train
Compare = Callable[[Tensor, Tensor], Tensor]


class CausalPolicy(nn.Module):
    """Wraps the whole causal LM in one forward, so that body and head are one sharding unit.

    Args:
        lm: any Hugging Face causal LM, LoRA-wrapped or not.
        chunk_tokens: largest number of tokens with logits in memory; logits of several chunks are recomputed in the
            backward pass.
        packing: computation on prefix trees, for forward passes with `group_index`; models that cannot be packed
            compute separate rows, after a warning.
    """

    def __init__(self, lm: nn.Module, chunk_tokens: int = 4096, packing: PrefixTreePacking | None = None) -> None:
        super().__init__()
        check_range("model", "integer >= 1", logprob_chunk_tokens=chunk_tokens)
        self.lm = lm
        self.chunk_tokens = chunk_tokens
        self._rotary_length = rotary_length(self.causal_lm.config)
        self.packing = None if packing is None else packing_for(self.causal_lm, packing)
        replay_in(self.causal_lm)

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model, without the PEFT wrapper."""
        lm: Any = self.lm
        if hasattr(lm, "get_base_model"):
            lm = lm.get_base_model()
        if not isinstance(lm, PreTrainedModel):
            raise InvariantError(f"{type(lm).__name__} is not a transformers model")
        return lm

    @property
    def has_adapters(self) -> bool:
        """Whether the model has PEFT adapters."""
        return self.lm is not self.causal_lm

    @property
    def tree_costs(self) -> TreeCosts | None:
        """Costs of a pass on trees and on rows; None without packing."""
        return None if self.packing is None else TreeCosts(self.packing, self.causal_lm)

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        temperature: float = 1.0,
        entropy_grad: bool = False,
        group_index: Int[Tensor, " B"] | None = None,
        head_ids: Int[Tensor, "B T k"] | None = None,
        experts: Int[Tensor, "B T n e"] | None = None,
        compare: Compare | None = None,
        needs_entropy: bool = True,
    ) -> TokenStats:
        """Statistics of the tokens where `mask` is True, given all tokens before them.

        No attention mask is needed: rows are right-padded, and the model is causal.

        Args:
            input_ids: prompts and completions.
            mask: tokens to evaluate.
            temperature: divisor of the logits; 0 counts as 1.
            entropy_grad: differentiate the entropy; otherwise it is detached and costs no memory.
            group_index: group of each row, for packing; None does not pack.
            head_ids: k further tokens to evaluate at each position.
            experts: e experts of each of n routers to replay for each token, see `Replaying`.
            compare: compares whole distributions, chunk by chunk.
            needs_entropy: False leaves the entropy 0, ignores `temperature`, `head_ids` and `compare`, and takes
                log pi = z - logsumexp(z) from the logits z: less memory, and more exact than `log_softmax`, which errs
                by 1e-5 in a vocabulary of 50,000 tokens.

        Raises:
            ValueError: rows are too long for the model, see `rotary_length` and `check_length`.
        """
        features, predicts, rows = self.features(input_ids, mask, group_index, experts=experts)
        targets = input_ids[:, 1:][predicts]  # [N]
        if not needs_entropy:
            likelihoods = self._in_chunks(self._likelihoods, (features, targets))
            own, greedy = (scatter(values, predicts, mask) for values in likelihoods)
            none = own.new_empty(*mask.shape, 0)
            entropy = torch.zeros_like(own)
            return TokenStats(logprobs=own, entropy=entropy, head=none, rows=rows, is_greedy=greedy > 0)
        head = targets.new_empty(len(targets), 0) if head_ids is None else head_ids[:, 1:][predicts]  # [N, k]
        numbers = torch.arange(len(targets), device=targets.device)
        statistics = partial(self._stats, temperature=temperature, entropy_grad=entropy_grad, compare=compare)
        stats = self._in_chunks(statistics, (features, targets, head, numbers))
        logprobs, entropy, head, *others = (scatter(values, predicts, mask) for values in stats)
        compared = others[0] if others else None
        return TokenStats(logprobs=logprobs, entropy=entropy, head=head, compared=compared, rows=rows)

    def features(
        self,
        input_ids: Int[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        group_index: Int[Tensor, " B"] | None = None,
        experts: Int[Tensor, "B T n e"] | None = None,
    ) -> tuple[Float[Tensor, "N H"], Bool[Tensor, "B T1"], PackedRows | None]:
        """Last hidden states that predict the tokens of `mask`, their places, and the layout if packed.

        Arguments and errors as of `forward`.
        """
        self._check_length(input_ids.shape[1])
        predicts = mask[:, 1:]  # the token at t is predicted at t - 1
        if not predicts.any():  # all padding: still use every parameter, because sharded ranks wait for each other
            predicts = torch.zeros_like(predicts)
            predicts[0, 0] = True
        if self.packing is not None and group_index is not None:
            features, rows = self.packing.features(  # [N, H]
                self.causal_lm,
                input_ids[:, :-1],
                predicts,
                group_index,
                None if experts is None else experts[:, :-1],
            )
        else:
            rows = None
            with Replaying(None if experts is None else experts.flatten(0, 1)):
                hidden = body(self.causal_lm)(input_ids=input_ids, use_cache=False).last_hidden_state  # [B, T, H]
            features = hidden[:, :-1][predicts]
        return features, predicts, rows

    def _check_length(self, num_tokens: int) -> None:
        """Checks that no row changes the rotary embedding of shorter ones, see `rotary_length`.

        Raises:
            ValueError: a row is longer than that.
        """
        if self._rotary_length is not None and num_tokens > self._rotary_length:
            raise ValueError(
                f"model type {self.causal_lm.config.model_type!r}: a prompt and its completion have {num_tokens} "
                f"tokens. With more than {self._rotary_length} tokens, the model's rotary embedding would depend on "
                "the longest row of the batch, and so would the log-probabilities of all rows. Choose a smaller "
                "data.sampling.max_tokens, or a smaller max_prompt_tokens of data.prompts"
            )

    def _in_chunks(self, function: Callable[..., tuple[Tensor, ...]], whole: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Results of a function of N tokens, with logits recomputed chunk by chunk if there are several."""
        if len(whole[0]) <= self.chunk_tokens:
            return function(*whole)
        parts = zip(*(values.split(self.chunk_tokens) for values in whole), strict=True)
        chunks = [checkpoint(function, *part, use_reentrant=False) for part in parts]
        return tuple(torch.cat(values) for values in zip(*chunks, strict=True))

    def _likelihoods(
        self, features: Float[Tensor, "N H"], targets: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Log-probability of each target, and 1 where it is the likeliest token."""
        logits = self.logits(features)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        own = logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
        return own, (logits.detach().argmax(-1) == targets).to(own.dtype)

    def _stats(
        self,
        features: Float[Tensor, "N H"],
        targets: Int[Tensor, " N"],
        head_ids: Int[Tensor, "N k"],
        numbers: Int[Tensor, " N"],
        temperature: float,
        entropy_grad: bool,
        compare: Compare | None,
    ) -> tuple[Tensor, ...]:
        log_p = self.log_distribution(features, temperature)
        if entropy_grad and torch.is_grad_enabled():
            entropy = -(log_p.exp() * log_p).sum(-1)
        else:
            entropy = -log_p.detach().exp().mul_(log_p.detach()).sum(-1)
        stats = log_p.gather(-1, targets[:, None])[:, 0], entropy, log_p.gather(-1, head_ids)
        return stats if compare is None else (*stats, compare(log_p, numbers))

    def log_distribution(self, features: Float[Tensor, "N H"], temperature: float) -> Float[Tensor, "N V"]:
        """Log-probabilities of the whole vocabulary."""
        logits = self.logits(features)
        # the 8 bits of bfloat16 are too few for log-probabilities
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature not in (0, 1):  # a division makes another copy of the logits, the largest tensor of the pass
            logits = logits / temperature
        return torch.log_softmax(logits, dim=-1)

    def logits(self, features: Float[Tensor, "N H"]) -> Float[Tensor, "N V"]:
        """Applies the output head, with the model family's scaling and soft cap of logits."""
        config = self.causal_lm.config.get_text_config()
        logits = self.causal_lm.get_output_embeddings()(features)
        for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
            if (factor := getattr(config, name, None)) is not None:
                logits = logits * factor
        if (scaling := getattr(config, "logits_scaling", None)) is not None:
            logits = logits * scaling if config.model_type == "hyperclovax" else logits / scaling  # others: Granite
        if (width := getattr(config, "logits_mup_width_multiplier", None)) is not None:  # Inkling, below its head
            logits = logits / width
        for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):  # Gemma and others
            if (cap := getattr(config, name, None)) is not None:
                logits = torch.tanh(logits / cap) * cap
        return logits


def scatter(values: Tensor, predicts: Bool[Tensor, "B T1"], mask: Bool[Tensor, "B T"]) -> Tensor:
    """Puts values [N] or [N, k] predicted at t - 1 in position t; 0, also in the gradient, where `mask` is False."""
    trailing = [1] * (values.dim() - 1)
    predicts = predicts.reshape(*predicts.shape, *trailing)
    mask = mask.reshape(*mask.shape, *trailing)
    out = torch.zeros(*mask.shape[:2], *values.shape[1:], dtype=values.dtype, device=values.device)
    out[:, 1:] = out[:, 1:].masked_scatter(predicts, values)
    return torch.where(mask, out, 0.0)
