"""LoRA: low-rank adapters through PEFT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from lit_async_rl.errors import SetupError
from lit_async_rl.models.loading import complete_adapter
from lit_async_rl.utils.checks import check_range

if TYPE_CHECKING:
    from lit_async_rl.models.policy import CausalPolicy, TokenStats


# settings of PEFT that must have their defaults in an adapter to be trained further
SETTINGS_AT_DEFAULT = (
    "bias",
    "lora_bias",
    "modules_to_save",
    "use_dora",
    "use_bdlora",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
)


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters (needs `pip install "lit-async-rl[peft]"`); the engine receives the merged weights.

    Args:
        rank: rank of the update.
        alpha: the update is scaled by alpha / rank.
        target_modules: names of the adapted layers, or a regular expression of full names; None is PEFT's default.
        modules_to_save: names of layers to train in full, without adapters (such as "embed_tokens", for new tokens). A
            KL penalty then takes a frozen copy of the model as its reference.
        continue_adapter: continue to train the adapter in the model's folder (`adapter_config.json` of PEFT, as written
            by supervised fine-tuning), with its rank, alpha and layers. Otherwise it is merged into the weights before
            new ones are added. Either way the reference of a KL penalty is the model with that adapter.

    Raises:
        ValueError: a number is not positive.
    """

    rank: int = 16
    alpha: int = 32
    target_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    continue_adapter: bool = False

    def __post_init__(self) -> None:
        check_range("model.lora", "integer positive", rank=self.rank, alpha=self.alpha)


def add_lora(lm: nn.Module, lora: LoRA, adapter: str | None = None) -> nn.Module:
    """Adds LoRA adapters to a model.

    Args:
        lm: the model.
        lora: settings of the adapters.
        adapter: folder of the adapter to continue, for `lora.continue_adapter`.

    Raises:
        ModuleNotFoundError: PEFT is not installed.
        ValueError: there are no such layers, an adapted weight is tied to another layer's, or a layer is named both for
            adapters and for training in full.
    """
    try:
        import peft
    except ImportError:
        raise ModuleNotFoundError('model.lora needs PEFT: pip install "lit-async-rl[peft]"') from None
    owners: dict[int, list[str]] = {}
    for name, module in lm.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    # looked up now, because PEFT renames the layers it wraps
    trained = {
        name: [path for path, _ in lm.named_modules() if name and f".{path}".endswith(f".{name}")]
        for name in lora.modules_to_save or ()
    }
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.target_modules,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    try:
        if lora.continue_adapter:
            adapted: nn.Module = _with_trainable_adapter(lm, adapter)
        else:
            adapted = peft.get_peft_model(lm, config)
    except ValueError as error:
        raise ValueError(f"model.lora.target_modules={lora.target_modules!r} cannot be used: {error}") from None
    for module in adapted.modules():
        if hasattr(module, "get_delta_weight"):
            base: Any = module.get_base_layer()  # type: ignore[operator]
            if not isinstance(getattr(base, "weight", None), nn.Parameter):
                raise ValueError(
                    f"model.lora.target_modules={lora.target_modules!r} adapts {type(base).__name__}, which has "
                    "no parameter named `weight`, because its experts' weights are fused. Adapt the attention layers, "
                    'for example ["q_proj", "k_proj", "v_proj", "o_proj"]'
                )
            if len(names := owners.get(id(base.weight), [])) > 1:
                raise ValueError(
                    f"model.lora.target_modules={lora.target_modules!r} adapts a layer that shares its "
                    f"weight with another layer: leave {' and '.join(names)} out of target_modules"
                )
    for name, paths in trained.items():
        _train_in_place(name, [lm.get_submodule(path) for path in paths])
    return adapted


def _with_trainable_adapter(lm: nn.Module, folder: str | None) -> nn.Module:
    """The model with the adapter of a folder, set to train."""
    import peft

    setting = "model.lora.continue_adapter=true"
    if folder is None:
        raise SetupError(f"{setting} needs an adapter, but the folder of model.model has none (no adapter_config.json)")
    config = peft.PeftConfig.from_pretrained(folder)
    if not isinstance(config, peft.LoraConfig):
        raise SetupError(
            f"{setting}: the adapter is of type {config.peft_type}, but only LoRA adapters can be continued"
        )
    # engines receive the weight of a layer plus the product of two factors, so an adapter must be no more than that
    plain = peft.LoraConfig()
    others = [name for name in SETTINGS_AT_DEFAULT if getattr(config, name, None) != getattr(plain, name, None)]
    if others:
        raise SetupError(
            f"{setting}: the adapter cannot be continued, because it contains more than low-rank factors "
            f"({', '.join(others)} in its adapter_config.json). Leave continue_adapter out: the adapter is then merged "
            "into the weights"
        )
    config.lora_dropout = 0.0  # with dropout, ratios of fresh data would not be 1
    config.inference_mode = False
    with complete_adapter(folder):
        return peft.PeftModel.from_pretrained(lm, folder, is_trainable=True, config=config)


def _train_in_place(name: str, layers: list[nn.Module]) -> None:
    """Sets the weights of these layers to train in place, where PEFT's `modules_to_save` would copy them."""
    setting = f"model.lora.modules_to_save: {name!r}"
    if not any([*layer.parameters()] for layer in layers):
        raise ValueError(f"{setting}: the model has no weights with this name")
    for layer in layers:
        if any(hasattr(part, "get_delta_weight") for part in layer.modules()):
            raise ValueError(
                f"{setting} is trained in full and also has adapters: remove it from model.lora.target_modules "
                "or from model.lora.modules_to_save"
            )
        layer.requires_grad_(True)


def alpha_of(policy: CausalPolicy) -> float:
    """`alpha` of a policy's adapters, which cannot be read off their weights."""
    lm: Any = policy.lm
    return float(lm.peft_config[lm.active_adapter].lora_alpha)


def without_adapters(policy: CausalPolicy, *inputs: Any, **options: Any) -> TokenStats:
    """Token statistics with adapters disabled: the reference policy, without a copy of the model.

    Not to be called between a forward pass and its backward pass: PEFT also freezes disabled adapters.
    """
    lm: Any = policy.lm
    with lm.disable_adapter():
        return policy(*inputs, **options)
