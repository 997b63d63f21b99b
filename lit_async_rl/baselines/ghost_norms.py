"""Squared gradient norms of each trajectory of a micro-batch, without per-trajectory gradients.

For a linear layer y = W x the gradient of trajectory i is sum_t e_it x_it^T, e the gradient at the output. Its squared
norm is sum_ts (e_it . e_is) (x_it . x_is), the product of two T x T Gram matrices ("ghost norms": Goodfellow 2015,
arXiv:1510.01799; for sequences Li et al. 2022, arXiv:2110.05679, section 4). Rows of a batch are independent, so that
one backward pass to the layers' outputs serves all trajectories.

Packed rows (`PrefixTreePacking`) are not independent: at shared positions the gradient is a sum. The norms then cover
the positions that belong to one trajectory, and the head, which has separate inputs for each. Gradients through the
keys and values of shared prefixes are left out.

B rows, T positions, D inputs and K outputs of a layer, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from lit_async_rl.errors import SetupError
from lit_async_rl.models.architecture import body
from lit_async_rl.models.packing import PackedRows
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.sampler_records import Support, log_mass

# -- Squared norms of each row's gradient for one layer, from its input and the gradient at its output ----------------


@dataclass
class LayerRecord:
    """Input and output gradient of one layer in a backward pass.

    Attributes:
        module: the layer.
        inputs: input activations [B, T, D], or token ids [B, T].
        grads: gradient at the output, [B, T, K].
        row_grads: per-row gradient of the weight, [B, K, D] or [B, K], if computed for the norms.
    """

    module: nn.Module
    inputs: Tensor
    grads: Tensor
    row_grads: Tensor | None = None


class InputGrams:
    """Cache of Gram matrices x_t . x_s, shared by layers with the same input (query, key, value; gate, up)."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.Size], Tensor] = {}

    def of(self, inputs: Float[Tensor, "B T D"]) -> Float[Tensor, "B T T"]:
        """Gram matrices of `inputs`, which must outlive the cache: its key is their address."""
        key = (inputs.data_ptr(), inputs.shape)
        if key not in self._known:
            self._known[key] = inputs @ inputs.mT
        return self._known[key]


def linear_squared_norms(record: LayerRecord, grams: InputGrams) -> Float[Tensor, " B"]:
    """||sum_t e_t x_t^T||^2 of each row, by Gram matrices or, where cheaper, per-row gradients.

    Per-row gradients, which then take less memory than the activations, are kept: their weighted sum is the gradient of
    the update.
    """
    inputs = record.inputs
    grads = record.grads
    length = inputs.shape[1]
    num_inputs = inputs.shape[2]
    num_outputs = grads.shape[2]
    if length * (num_inputs + num_outputs) < num_inputs * num_outputs:
        return (grams.of(inputs) * (grads @ grads.mT)).sum((1, 2))
    record.row_grads = grads.mT @ inputs
    return record.row_grads.square().sum((1, 2))


def embedding_squared_norms(ids: Int[Tensor, "B T"], grads: Float[Tensor, "B T K"]) -> Float[Tensor, " B"]:
    """Squared norm of each row's gradient of the embedding table: gradients of equal ids add up."""
    same = ids[:, :, None] == ids[:, None, :]
    return ((grads @ grads.mT) * same).sum((1, 2))


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters of the module without submodules; FSDP1 keeps gathered ones as plain attributes."""
    attributes = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    own = dict(module.named_parameters(recurse=False)) | attributes
    return {name: value for name, value in own.items() if value.requires_grad}


def has_sharded_parameters(module: nn.Module) -> bool:
    """Whether FSDP1, FSDP2 or tensor parallelism shards a trainable parameter; the same on all ranks.

    Unlike `models.weights.is_sharded` it also recognises a module inside of the FSDP1 wrapper.
    """
    return any(
        not isinstance(p, nn.Parameter) or isinstance(p, DTensor) or hasattr(p, "_fsdp_flattened")
        for part in module.modules()
        for p in own_parameters(part).values()
    )


@torch.no_grad()
def elementwise_factor(module: nn.Module, inputs: Tensor) -> Tensor:
    """Factor of the weight in the output of a norm layer, which is linear in it.

    Evaluates the layer with weights 1 and 0: its own may be sharded.
    """
    zero = torch.zeros(inputs.shape[-1], device=inputs.device, dtype=inputs.dtype)
    with_weight_1 = _with_weight(module, zero + 1)
    with_weight_0 = _with_weight(module, zero)
    if not with_weight_0(inputs[:1, :1]).any():  # 0 in most norm layers; Gemma multiplies by 1 + weight
        return with_weight_1(inputs)
    return with_weight_1(inputs) - with_weight_0(inputs)


def _with_weight(module: nn.Module, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Forward function of the module with the given weight and zero bias, without hooks."""
    other = copy.copy(module)
    for name in own_parameters(module):
        vars(other).pop(name, None)
    other._parameters = {**module._parameters, "weight": weight}  # type: ignore[dict-item]
    if "bias" in own_parameters(module):
        other._parameters["bias"] = torch.zeros_like(weight)  # type: ignore[assignment]
    forward: Callable[[Tensor], Tensor] = other.forward
    return forward


def elementwise_squared_norms(record: LayerRecord) -> Float[Tensor, " B"]:
    """Squared norms of layers with an elementwise weight and optional bias (RMS norm, layer norm)."""
    module = record.module
    grads = record.grads
    total = torch.zeros(len(grads), device=grads.device)
    own = own_parameters(module)
    if "weight" in own:
        record.row_grads = _sum_positions(grads * elementwise_factor(module, record.inputs))
        total = total + record.row_grads.square().sum(-1)
    if "bias" in own:
        total = total + _sum_positions(grads).square().sum(-1)
    return total


def _sum_positions(values: Float[Tensor, "B *T K"]) -> Float[Tensor, "B K"]:
    """Sums over positions, and over heads for per-head norms."""
    return values.flatten(1, -2).sum(1)


def layer_squared_norms(record: LayerRecord, grams: InputGrams) -> Float[Tensor, " B"]:
    """Squared norm of each row's gradient of the layer's own parameters."""
    module = record.module
    inputs = record.inputs
    grads = record.grads
    if isinstance(module, nn.Embedding):
        return embedding_squared_norms(inputs, grads)
    if not isinstance(module, nn.Linear | Conv1D):
        return elementwise_squared_norms(record)
    own = own_parameters(module)
    norms = torch.zeros(len(grads), device=grads.device)
    if "weight" in own:
        norms = norms + linear_squared_norms(record, grams)
    if "bias" in own:
        norms = norms + grads.sum(1).square().sum(-1)
    return norms


# -- Trajectories in packed rows: hidden states and gradients between the packed layout and one row per trajectory
# B trajectories of T positions, R packed rows of L positions, C columns that hold tokens of a single trajectory.


def gathered(values: Float[Tensor, "R L H"], rows: PackedRows) -> Float[Tensor, "B T H"]:
    """Values at the positions of each trajectory; arbitrary where the packed pass computed none."""
    return values.flatten(0, 1)[rows.target]


def packed(grads: Float[Tensor, "B T H"], columns: slice, rows: PackedRows) -> Float[Tensor, "R L H"]:
    """Gradients at packed positions, summed over trajectories that share one; 0 outside of `columns`."""
    total = grads.new_zeros(rows.uses.numel(), grads.shape[-1])
    total.index_add_(0, rows.target[:, columns].flatten(), grads[:, columns].flatten(0, 1))
    return total.view(*rows.uses.shape, -1)


@dataclass(frozen=True)
class OwnPositions:
    """Positions that belong to one trajectory.

    Attributes:
        columns: the range of input positions they lie in.
        place: index in the flattened packed rows.
        is_own: whether the trajectory owns the position.
        known: gathered inputs, which several layers share.
    """

    columns: slice
    place: Int[Tensor, "B C"]
    is_own: Bool[Tensor, "B C"]
    known: dict[tuple[int, torch.Size], Tensor] = field(default_factory=dict)

    def of_inputs(self, inputs: Float[Tensor, "R L *D"] | Int[Tensor, "R L"]) -> Tensor:
        """A layer's inputs, one row per trajectory. `inputs` must outlive the cache, whose key is their address."""
        key = (inputs.data_ptr(), inputs.shape)
        if key not in self.known:
            self.known[key] = inputs.flatten(0, 1)[self.place]
        return self.known[key]

    def of_grads(self, grads: Float[Tensor, "R L *K"]) -> Tensor:
        """Gradients at a layer's outputs, 0 where the position is not the trajectory's own."""
        values = grads.flatten(0, 1)[self.place]
        return values * self.is_own.view(*self.is_own.shape, *[1] * (values.ndim - 2))


def own_positions(rows: PackedRows) -> OwnPositions:
    """Positions of tokens that no two trajectories share."""
    target = rows.target
    source = rows.source.flatten()
    uses = rows.uses.flatten()
    here = torch.arange(target.numel(), device=target.device).view_as(target)
    is_own = (source[target] == here) & (uses[target] == 1)
    used = is_own.any(0).nonzero()[:, 0].tolist()
    columns = slice(used[0], used[-1] + 1) if used else slice(0, 1)
    return OwnPositions(columns, target[:, columns], is_own[:, columns])


class GhostTape:
    """Records one forward pass of a `CausalPolicy`, then computes the norms.

        with GhostTape(policy) as tape:
            stats = policy(input_ids, mask, temperature)
        norms = tape.squared_norms(coefficients, input_ids, mask, temperature)

    The graph stays usable for the real backward pass. Linear layers (LoRA's too), transformers' `Conv1D`, embeddings
    and norm layers are supported, also with a tied output head; the head is evaluated in chunks of
    `policy.chunk_tokens` tokens.

    Args:
        policy: with or without packing.
        last_blocks: number of last transformer blocks in the norms, besides the head; None is all.

    Raises:
        ValueError: a trainable parameter belongs to a layer of another type or that runs twice, to two layers (other
            than embedding and head), or to an adapter of the head; or gradient checkpointing discards activations.
    """

    def __init__(self, policy: CausalPolicy, last_blocks: int | None = None) -> None:
        self.policy = policy
        self.last_blocks = last_blocks
        self._body = body(policy.causal_lm)
        self._head = policy.causal_lm.get_output_embeddings()
        self._layers = _chosen_layers(self._body, last_blocks)
        self._check()
        self._records: dict[str, tuple[Tensor, Tensor]] = {}  # layer -> its input and output
        self._hidden: Tensor | None = None
        self._handles: list[Any] = []
        self.layer_records: list[LayerRecord] = []  # after `squared_norms`
        self.is_complete = False  # whether the head has a record, too: only if its logits fit into one chunk

    def _check(self) -> None:
        if getattr(self.policy.causal_lm, "is_gradient_checkpointing", False):
            raise ValueError("ghost norms need activations, which model.gradient_checkpointing discards: turn it off")
        owners: dict[int, str] = {}
        for name, module in self._layers.items():
            if not _is_known(module):
                raise ValueError(f"ghost norms do not support layer {name!r} of type {type(module).__name__}")
            for parameter in own_parameters(module).values():
                if id(parameter) in owners:
                    raise ValueError(
                        f"ghost norms cannot be computed: layers {owners[id(parameter)]!r} and {name!r} share a "
                        "parameter"
                    )
                owners[id(parameter)] = name
        inside = {id(module) for module in self._body.modules()}
        for name, module in self.policy.causal_lm.named_modules():
            is_plain_head = module is self._head and type(module) in (nn.Linear, Conv1D)
            if id(module) not in inside and not is_plain_head and own_parameters(module):
                raise ValueError(
                    "model.baseline.norms=GHOST supports only layers of the transformer's body and a plain output "
                    f"head, but layer {name!r} of type {type(module).__name__} is neither: set model.baseline.norms to "
                    "PER_TRAJECTORY or SCORE"
                )

    def __enter__(self) -> GhostTape:
        self._records = {}
        self._hidden = None
        self._handles = [
            self._body.register_forward_pre_hook(self._spread_positions, with_kwargs=True),
            self._body.register_forward_hook(self._record_hidden),
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
        """Expands positions to one row per trajectory: a shared one would sum gradients of learned positions."""
        if "position_ids" in kwargs:  # packed rows come with positions
            return args, kwargs
        ids = kwargs["input_ids"]
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return args, {**kwargs, "position_ids": positions}

    def _record_hidden(self, module: nn.Module, args: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state

    def _recorder(self, name: str) -> Any:
        def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if name in self._records:
                raise ValueError(f"ghost norms cannot be computed: layer {name!r} runs twice in one forward pass")
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
        """|| d/d theta of sum_t c_it log pi(y_it) ||^2 of each row i, over the parameters of the chosen layers.

        Args:
            coefficients: c_it.
            input_ids: prompts and completions.
            mask: True at the tokens y_it that train.
            temperature: sampling temperature, by which logits are divided; 0 counts as 1.
            rows: layout of a packed forward pass, where some gradients are left out (see the module).
            support: tokens that the sampler could choose, over which pi is renormalised, as in the loss.
        """
        if self._hidden is None:
            raise SetupError("GhostTape.squared_norms was called before a forward pass was recorded")
        coefficients = torch.where(mask, coefficients.detach(), 0.0)
        columns = _used_columns(coefficients)
        hidden = self._hidden.detach() if rows is None else gathered(self._hidden.detach(), rows)
        norms, hidden_grads, taken = self._head_pass(
            hidden, coefficients, input_ids, temperature=temperature, columns=columns, support=support
        )
        if rows is not None:
            hidden_grads = packed(hidden_grads, columns, rows)
        names = list(self._records)
        grams = InputGrams()
        grads = torch.autograd.grad(
            self._hidden, [self._records[name][1] for name in names], hidden_grads, retain_graph=True, allow_unused=True
        )
        own = None if rows is None else own_positions(rows)
        embedding = self.policy.causal_lm.get_input_embeddings()
        for name, grad in zip(names, grads, strict=True):
            if grad is None:
                continue
            module = self._layers[name]
            inputs = self._records[name][0]
            if own is not None:
                inputs = own.of_inputs(inputs)
                grad = own.of_grads(grad)
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
        """Norms of the head, gradient at its input, and output gradients at the ids of prompt and completion.

        Only `columns` predict tokens that count. The output gradients [B, columns, T] serve the cross term of a tied
        embedding, whose gradient overlaps that of the head in the rows of the input ids.
        """
        predicted = slice(columns.start + 1, columns.stop + 1)
        rows = max(1, self.policy.chunk_tokens // (columns.stop - columns.start))
        norms = []
        hidden_grads = torch.zeros_like(hidden)
        taken = []
        for begin in range(0, len(hidden), rows):
            part = slice(begin, begin + rows)
            features = hidden[part, columns].detach().requires_grad_()
            raw: list[Tensor] = []
            handle = self._head.register_forward_hook(lambda module, args, output, raw=raw: raw.append(output))
            with torch.enable_grad():
                # float32: a softmax over a large vocabulary loses small probabilities in bfloat16
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
        raise ValueError(
            f"model.baseline.last_blocks={last_blocks} cannot be used: {type(body).__name__} has no list of "
            "transformer blocks"
        )
    blocks = max(stacks, key=len)[-last_blocks:]
    chosen = {id(part) for block in blocks for part in block.modules()}
    return {name: module for name, module in layers.items() if id(module) in chosen}


def _used_columns(coefficients: Float[Tensor, "B T"]) -> slice:
    """Smallest range of positions with all predictors of tokens with a non-zero coefficient."""
    used = coefficients[:, 1:].ne(0).any(0).nonzero()[:, 0].tolist()
    return slice(used[0], used[-1] + 1) if used else slice(0, 1)


def _table_grads(module: nn.Embedding, ids: Int[Tensor, "B T"], grads: Float[Tensor, "B T K"]) -> Tensor:
    """Gradients of the embedding rows, with Gemma's embedding scale, and 0 for the padding row."""
    grads = grads * getattr(module, "embed_scale", 1.0)
    return grads if module.padding_idx is None else grads.masked_fill((ids == module.padding_idx)[..., None], 0.0)


def _is_known(module: nn.Module) -> bool:
    """Whether the layer type is supported; exact types only, as subclasses may compute something else."""
    if type(module) in (nn.Linear, Conv1D, nn.Embedding):
        return True
    if isinstance(module, nn.Embedding):
        return hasattr(module, "embed_scale")
    if isinstance(module, nn.Linear | Conv1D):
        return False
    own = own_parameters(module)
    # a norm layer: a vector `weight`, and perhaps a vector `bias`
    return "weight" in own and own.keys() <= {"weight", "bias"} and all(p.ndim == 1 for p in own.values())


# -- Parameter gradients from a ghost tape, without another backward pass ---------------------------------------------
# For the norms, sum_t c_it log pi(y_it) was differentiated to the outputs of all layers. The gradient of any weighted
# sum over trajectories then needs only one more product per layer, dW = sum_i a_i sum_t e_it x_it^T ("book-keeping",
# Bu et al. 2023, arXiv:2210.00038, for differentially private training), and no second backward pass.


def surrogate_loss(tape: GhostTape, row_weights: Float[Tensor, " B"], value: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Scalar with the given `value` and the gradient of sum_i a_i sum_t c_it log pi(y_it), a = `row_weights`.

    It is sum_p <p, G_p> over parameters p with constant gradients G_p, so parameter hooks and loss scaling work.
    """
    total = torch.zeros((), device=row_weights.device)
    for record in tape.layer_records:
        total = total + _layer_term(record, row_weights)
    return total - total.detach() + value.detach()


def _layer_term(record: LayerRecord, row_weights: Tensor) -> Tensor:
    """sum_p <p, G_p> over the parameters of one layer."""
    module = record.module
    inputs = record.inputs
    # float32 like `row_weights`, also where activations are bfloat16: sums over B T positions would lose digits
    grads = record.grads * row_weights.view(-1, *[1] * (record.grads.ndim - 1))
    flat = grads.flatten(0, -2)
    own = own_parameters(module)
    total = flat.new_zeros(())
    if "weight" in own:
        weight = own["weight"]
        if record.row_grads is not None:
            gradient = (row_weights @ record.row_grads.flatten(1).to(row_weights.dtype)).view(
                record.row_grads.shape[1:]
            )
        elif isinstance(module, nn.Embedding):
            gradient = torch.zeros_like(weight, dtype=flat.dtype).index_add_(0, inputs.flatten(), flat)
        else:
            gradient = flat.mT @ inputs.flatten(0, -2).to(flat.dtype)
        total = total + (weight * (gradient.mT if isinstance(module, Conv1D) else gradient)).sum()
    if "bias" in own:
        total = total + (own["bias"] * flat.sum(0)).sum()
    return total
