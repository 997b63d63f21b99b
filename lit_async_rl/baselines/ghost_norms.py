"""Squared gradient norms of every trajectory of a micro-batch, without materialising per-trajectory gradients.

For a linear layer y = W x the gradient of trajectory i is sum_t e_it x_it^T, e the gradient at the output. Its squared
norm is sum_ts (e_it . e_is) (x_it . x_is), the product of two T x T Gram matrices ("ghost norms": Goodfellow
2015, arXiv:1510.01799; for sequences Li et al. 2022, arXiv:2110.05679, section 4). One backward pass to the outputs of
the layers serves all trajectories, because rows of a batch are independent.

B rows, T positions, D inputs and K outputs of a layer, V vocabulary.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lit_async_rl.baselines.layer_norms import InputGrams, LayerRecord, layer_squared_norms, own_parameters
from lit_async_rl.errors import SetupError
from lit_async_rl.models.policy import CausalPolicy


class GhostTape:
    """Records one forward pass of a `CausalPolicy`, then computes the norms.

        with GhostTape(policy) as tape:
            stats = policy(input_ids, mask, temperature)
        norms = tape.squared_norms(coefficients, input_ids, mask, temperature)

    The graph of the forward pass stays usable for the real backward pass. Linear layers (LoRA's too), transformers'
    `Conv1D`, embeddings and norm layers are supported, also with an output head tied to the embedding; the head is
    evaluated in chunks of `policy.chunk_tokens` tokens.

    Raises:
        ValueError: a trainable parameter belongs to a layer of another type, to a layer that runs twice, or to two
            layers (other than embedding and head), or activations are not kept (gradient checkpointing).
    """

    def __init__(self, policy: CausalPolicy) -> None:
        self.policy = policy
        self._body = policy.causal_lm.base_model
        self._head = policy.causal_lm.get_output_embeddings()
        self._layers = {name: module for name, module in self._body.named_modules() if own_parameters(module)}
        self._check()
        self._records: dict[str, tuple[Tensor, Tensor]] = {}  # layer -> its input and output
        self._hidden: Tensor | None = None
        self._handles: list[Any] = []
        self.layer_records: list[LayerRecord] = []  # after `squared_norms`
        self.is_complete = False  # whether the head is among them: it is when its logits fit into one chunk

    def _check(self) -> None:
        if getattr(self.policy.causal_lm, "is_gradient_checkpointing", False):
            raise ValueError("ghost norms need activations, which model.gradient_checkpointing discards")
        owners: dict[int, str] = {}
        for name, module in self._layers.items():
            if not _is_known(module):
                raise ValueError(f"ghost norms do not support layer {name!r} of type {type(module).__name__}")
            for parameter in own_parameters(module).values():
                if id(parameter) in owners:
                    raise ValueError(f"ghost norms: layers {owners[id(parameter)]!r} and {name!r} share a parameter")
                owners[id(parameter)] = name

    def __enter__(self) -> GhostTape:
        self._records, self._hidden = {}, None
        self._handles = [
            self._body.register_forward_pre_hook(self._spread_positions, with_kwargs=True),
            self._body.register_forward_hook(self._keep_hidden),
            *(module.register_forward_hook(self._recorder(name)) for name, module in self._layers.items()),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    @staticmethod
    def _spread_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Expands positions to one row per trajectory: a shared row would sum gradients of learned positions."""
        ids = kwargs["input_ids"]
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return args, {**kwargs, "position_ids": positions}

    def _keep_hidden(self, module: nn.Module, args: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state

    def _recorder(self, name: str) -> Any:
        def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if name in self._records:
                raise ValueError(f"ghost norms: layer {name!r} runs twice in one forward pass")
            self._records[name] = (args[0].detach(), output)

        return record

    def squared_norms(
        self,
        coefficients: Float[Tensor, "B T"],
        input_ids: Int[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        temperature: float = 1.0,
    ) -> Float[Tensor, " B"]:
        """|| d/d theta of sum_t c_it log pi(y_it) ||^2 of each row i, over all trainable parameters."""
        if self._hidden is None:
            raise SetupError("GhostTape has recorded no forward pass yet")
        coefficients = torch.where(mask, coefficients.detach(), 0.0)
        columns = _used_columns(coefficients)
        norms, hidden_grads, taken = self._head_pass(coefficients, input_ids, temperature, columns)
        names, grams = list(self._records), InputGrams()
        grads = torch.autograd.grad(
            self._hidden, [self._records[name][1] for name in names], hidden_grads, retain_graph=True, allow_unused=True
        )
        embedding = self.policy.causal_lm.get_input_embeddings()
        for name, grad in zip(names, grads, strict=True):
            if grad is None:
                continue
            inputs, _ = self._records[name]
            module = self._layers[name]
            if isinstance(module, nn.Embedding):
                grad = _table_grads(module, inputs, grad)
            self.layer_records.append(record := LayerRecord(module, inputs, grad))
            norms = norms + layer_squared_norms(record, grams)
            if module is embedding and self._head.weight is embedding.weight:
                dots = self._hidden.detach()[:, columns] @ grad.mT  # h_t . e_s
                norms = norms + 2 * (taken * dots).sum((1, 2))
        return norms

    def _head_pass(
        self, coefficients: Tensor, input_ids: Tensor, temperature: float, columns: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norms of the head, gradient at its input, and its output gradients at the prompt's and completion's own ids.

        Only `columns` predict tokens that count. The last, [B, columns, T], is needed by the cross term of a tied
        embedding, whose gradients overlap in the rows of the input ids.
        """
        if self._hidden is None:
            raise SetupError("GhostTape has recorded no forward pass yet")
        hidden = self._hidden.detach()
        predicted = slice(columns.start + 1, columns.stop + 1)
        rows = max(1, self.policy.chunk_tokens // (columns.stop - columns.start))
        norms, hidden_grads, taken = [], torch.zeros_like(hidden), []
        for begin in range(0, len(hidden), rows):
            part = slice(begin, begin + rows)
            features = hidden[part, columns].detach().requires_grad_()
            raw: list[Tensor] = []
            handle = self._head.register_forward_hook(lambda module, args, output, raw=raw: raw.append(output))
            with torch.enable_grad():
                logits = self.policy.logits(features.flatten(0, 1)).float() / (temperature or 1.0)
                logprobs = torch.log_softmax(logits, -1).gather(-1, input_ids[part, predicted].flatten()[:, None])
                total = (logprobs[:, 0] * coefficients[part, predicted].flatten()).sum()
            handle.remove()
            feature_grads, logit_grads = torch.autograd.grad(total, [features, raw[0]])
            hidden_grads[part, columns] = feature_grads
            logit_grads = logit_grads.view(*features.shape[:2], -1)
            record = LayerRecord(self._head, features.detach(), logit_grads)
            norms.append(layer_squared_norms(record, InputGrams()))
            taken.append(logit_grads.gather(-1, input_ids[part, None].expand(-1, features.shape[1], -1)))
        self.is_complete = len(norms) == 1
        self.layer_records = [record] if self.is_complete else []
        return torch.cat(norms), hidden_grads, torch.cat(taken)


def _used_columns(coefficients: Float[Tensor, "B T"]) -> slice:
    """Range of positions that predict a token with a non-zero coefficient in some row."""
    used = coefficients[:, 1:].ne(0).any(0).nonzero()[:, 0].tolist()
    return slice(used[0], used[-1] + 1) if used else slice(0, 1)


def _table_grads(module: nn.Embedding, ids: Int[Tensor, "B T"], grads: Float[Tensor, "B T K"]) -> Tensor:
    """Gradients of the embedding rows, with Gemma's embedding scale, and 0 for the padding row."""
    grads = grads * getattr(module, "embed_scale", 1.0)
    return grads if module.padding_idx is None else grads.masked_fill((ids == module.padding_idx)[..., None], 0.0)


def _is_known(module: nn.Module) -> bool:
    """Whether the layer type is supported; exact types only, because subclasses may compute something else."""
    if type(module) in (nn.Linear, Conv1D, nn.Embedding):
        return True
    if isinstance(module, nn.Embedding):
        return hasattr(module, "embed_scale")
    if isinstance(module, nn.Linear | Conv1D):
        return False
    own = own_parameters(module)
    # its trainable parameters are a vector `weight` and perhaps a vector `bias`
    return "weight" in own and own.keys() <= {"weight", "bias"} and all(p.ndim == 1 for p in own.values())
