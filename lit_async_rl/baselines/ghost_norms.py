"""Squared gradient norms of every trajectory of a micro-batch, without materialising per-trajectory gradients.

For a linear layer y = W x the gradient of trajectory i is sum_t e_it x_it^T, e the gradient at the output. Its squared
norm is sum_ts (e_it . e_is) (x_it . x_is), the product of two T x T Gram matrices ("ghost norms": Goodfellow
2015, arXiv:1510.01799; for sequences Li et al. 2022, arXiv:2110.05679, section 4). One backward pass to the outputs of
the layers serves all trajectories, because rows of a batch are independent.

Packed rows (`SharedPromptPacking`) are not: at positions that a group shares, the gradient is a sum over its
trajectories. There the norms are those over all other positions, those of a trajectory's own tokens, and of the head,
whose inputs are separate. What flows into the prompt's keys and values is left out.

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
from lit_async_rl.baselines.packed_rows import gathered, own_positions, packed
from lit_async_rl.errors import SetupError
from lit_async_rl.models.architecture import body
from lit_async_rl.models.packed_rows import PackedRows
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.sampler_head import Support, log_mass


class GhostTape:
    """Records one forward pass of a `CausalPolicy`, then computes the norms.

        with GhostTape(policy) as tape:
            stats = policy(input_ids, mask, temperature)
        norms = tape.squared_norms(coefficients, input_ids, mask, temperature)

    The graph of the forward pass stays usable for the real backward pass. Linear layers (LoRA's too), transformers'
    `Conv1D`, embeddings and norm layers are supported, also with an output head tied to the embedding; the head is
    evaluated in chunks of `policy.chunk_tokens` tokens.

    Args:
        policy: with or without shared-prompt packing.
        last_blocks: norms over the parameters of the head and of this many last transformer blocks; None is all layers.

    Raises:
        ValueError: a trainable parameter belongs to a layer of another type, to a layer that runs twice, to two layers
            (other than embedding and head), or to an adapter of the head, or activations are not kept (gradient
            checkpointing).
    """

    def __init__(self, policy: CausalPolicy, last_blocks: int | None = None) -> None:
        self.policy, self.last_blocks = policy, last_blocks
        self._body = body(policy.causal_lm)
        self._head = policy.causal_lm.get_output_embeddings()
        self._layers = _chosen_layers(self._body, last_blocks)
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
        inside = {id(module) for module in self._body.modules()}
        for name, module in self.policy.causal_lm.named_modules():
            is_plain_head = module is self._head and type(module) in (nn.Linear, Conv1D)
            if id(module) not in inside and not is_plain_head and own_parameters(module):
                raise ValueError(
                    f"model.baseline=OptimalBaseline with norms=GHOST does not support layer {name!r} of type "
                    f"{type(module).__name__}, which is outside of the model's body: use PER_TRAJECTORY or SCORE"
                )

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
        if "position_ids" in kwargs:  # packed rows have their own
            return args, kwargs
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
        rows: PackedRows | None = None,
        support: Support | None = None,
    ) -> Float[Tensor, " B"]:
        """|| d/d theta of sum_t c_it log pi(y_it) ||^2 of each row i, over all parameters that were chosen.

        `rows` is the layout of the forward pass if it was packed; see above for what is left out then. Where `support`
        is known, pi is renormalised over it, as in the loss.
        """
        if self._hidden is None:
            raise SetupError("GhostTape has recorded no forward pass yet")
        coefficients = torch.where(mask, coefficients.detach(), 0.0)
        columns = _used_columns(coefficients)
        hidden = self._hidden.detach() if rows is None else gathered(self._hidden.detach(), rows)
        norms, hidden_grads, taken = self._head_pass(hidden, coefficients, input_ids, temperature, columns, support)
        if rows is not None:
            hidden_grads = packed(hidden_grads, columns, rows)
        names, grams = list(self._records), InputGrams()
        grads = torch.autograd.grad(
            self._hidden, [self._records[name][1] for name in names], hidden_grads, retain_graph=True, allow_unused=True
        )
        own = None if rows is None else own_positions(rows)
        embedding = self.policy.causal_lm.get_input_embeddings()
        for name, grad in zip(names, grads, strict=True):
            if grad is None:
                continue
            module, inputs = self._layers[name], self._records[name][0]
            if own is not None:
                inputs, grad = own.of_inputs(inputs), own.of_grads(grad)
            if isinstance(module, nn.Embedding):
                grad = _table_grads(module, inputs, grad)
            self.layer_records.append(record := LayerRecord(module, inputs, grad))
            norms = norms + layer_squared_norms(record, grams)
            if module is embedding and self._head.weight is embedding.weight:
                dots = hidden[:, columns] @ grad.mT  # h_t . e_s
                norms = norms + 2 * ((taken if own is None else taken[..., own.columns]) * dots).sum((1, 2))
        return norms

    def _head_pass(
        self,
        hidden: Tensor,
        coefficients: Tensor,
        input_ids: Tensor,
        temperature: float,
        columns: slice,
        support: Support | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norms of the head, gradient at its input, and its output gradients at the prompt's and completion's own ids.

        Only `columns` predict tokens that count. The last, [B, columns, T], is needed by the cross term of a tied
        embedding, whose gradients overlap in the rows of the input ids.
        """
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
                log_p = torch.log_softmax(logits, -1)
                logprobs = log_p.gather(-1, input_ids[part, predicted].flatten()[:, None])[:, 0]
                if support is not None:
                    ids, known = (values[part, predicted].flatten(0, 1) for values in support)
                    logprobs = logprobs - log_mass(log_p.gather(-1, ids), known)
                total = (logprobs * coefficients[part, predicted].flatten()).sum()
            handle.remove()
            feature_grads, logit_grads = torch.autograd.grad(total, [features, raw[0]])
            hidden_grads[part, columns] = feature_grads
            logit_grads = logit_grads.view(*features.shape[:2], -1)
            record = LayerRecord(self._head, features.detach(), logit_grads)
            norms.append(layer_squared_norms(record, InputGrams()))
            taken.append(logit_grads.gather(-1, input_ids[part, None].expand(-1, features.shape[1], -1)))
        is_whole = self.last_blocks is None and self.policy.packing is None
        self.is_complete = is_whole and len(norms) == 1
        self.layer_records = [record] if self.is_complete else []
        return torch.cat(norms), hidden_grads, torch.cat(taken)


def _chosen_layers(body: nn.Module, last_blocks: int | None) -> dict[str, nn.Module]:
    """Layers with trainable parameters of their own: all, or those of the last blocks.

    Raises:
        ValueError: the model is no stack of blocks.
    """
    layers = {name: module for name, module in body.named_modules() if own_parameters(module)}
    if last_blocks is None:
        return layers
    stacks = [list(module) for module in body.modules() if isinstance(module, nn.ModuleList)]
    if not stacks:
        raise ValueError(f"model.baseline.last_blocks={last_blocks}: {type(body).__name__} has no list of blocks")
    blocks = max(stacks, key=len)[-last_blocks:]
    chosen = {id(part) for block in blocks for part in block.modules()}
    return {name: module for name, module in layers.items() if id(module) in chosen}


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
