"""Keyword arguments of `fit` with their types, for editors and type checkers; nothing imports this when it runs.

Written by `scripts/write_fit_settings.py` from the classes that have them; not to be edited.
"""

# ruff: noqa: UP007, UP045  (as Lightning writes its annotations)

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Optional, TypedDict, Union

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import _PLUGIN_INPUT
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _LITERAL_WARN, _PRECISION_INPUT

from lit_async_rl.advantages.group import AdvantageEstimator
from lit_async_rl.baselines.optimal import OptimalBaseline
from lit_async_rl.corrections import Correction
from lit_async_rl.corrections.weights import Proximal
from lit_async_rl.data.settings import Limits, Scoring, Validation
from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.losses import PolicyLoss
from lit_async_rl.losses.aggregation import Aggregation
from lit_async_rl.losses.reference_kl import KLEstimator
from lit_async_rl.models.lora import LoRA
from lit_async_rl.models.packing import PrefixTreePacking, SharedPromptPacking
from lit_async_rl.models.sharding import Sharding
from lit_async_rl.prompts.curriculum import Curriculum
from lit_async_rl.prompts.records import Records
from lit_async_rl.replay.buffer import ReplayBuffer
from lit_async_rl.rollouts.intake import GroupFilter
from lit_async_rl.scheduling.admission import AdmissionPolicy
from lit_async_rl.training.distillation import Distillation
from lit_async_rl.training.optimizer import RateSchedule
from lit_async_rl.types import SamplingParams

if TYPE_CHECKING:
    import peft


class TrainerSettings(TypedDict, total=False):
    """Of `lightning.pytorch.Trainer`, and `defaults` of this package's."""

    accelerator: Union[str, Accelerator]
    strategy: Union[str, Strategy]
    devices: Union[list[int], str, int]
    num_nodes: int
    precision: Optional[_PRECISION_INPUT]
    logger: Optional[Union[Logger, Iterable[Logger], bool]]
    callbacks: Optional[Union[list[Callback], Callback]]
    fast_dev_run: Union[int, bool]
    max_epochs: Optional[int]
    min_epochs: Optional[int]
    min_steps: Optional[int]
    max_time: Optional[Union[str, timedelta, dict[str, int]]]
    limit_train_batches: Optional[Union[int, float]]
    limit_val_batches: Optional[Union[int, float]]
    limit_test_batches: Optional[Union[int, float]]
    limit_predict_batches: Optional[Union[int, float]]
    overfit_batches: Union[int, float]
    val_check_interval: Optional[Union[int, float, str, timedelta, dict[str, int]]]
    check_val_every_n_epoch: Optional[int]
    num_sanity_val_steps: Optional[int]
    log_every_n_steps: Optional[int]
    enable_checkpointing: Optional[bool]
    enable_progress_bar: Optional[bool]
    enable_model_summary: Optional[bool]
    accumulate_grad_batches: int
    gradient_clip_val: Optional[Union[int, float]]
    gradient_clip_algorithm: Optional[str]
    deterministic: Optional[Union[bool, _LITERAL_WARN]]
    benchmark: Optional[bool]
    inference_mode: bool
    use_distributed_sampler: bool
    profiler: Optional[Union[Profiler, str]]
    detect_anomaly: bool
    barebones: bool
    plugins: Optional[Union[_PLUGIN_INPUT, list[_PLUGIN_INPUT]]]
    sync_batchnorm: bool
    reload_dataloaders_every_n_epochs: int
    default_root_dir: Optional[_PATH]
    enable_autolog_hparams: bool
    model_registry: Optional[str]
    defaults: Mapping[str, Callback | None] | None


class DataSettings(TrainerSettings, total=False):
    """Of `RolloutDataModule`, too."""

    engine: RolloutEngine | None
    max_staleness: int
    admission: AdmissionPolicy | None
    groups_per_step: int
    group_size: int
    micro_batches_per_step: int
    stream_groups: bool
    weight_sync_steps: int
    seed: int
    shuffle: bool
    curriculum: Curriculum | None
    filters: list[GroupFilter] | None
    sampling: SamplingParams | Mapping[str, Any]
    replicate_prompts: bool
    advantage: AdvantageEstimator | None
    aggregation: Aggregation | None
    scoring: Scoring | Mapping[str, Any]
    validation: Validation | Mapping[str, Any] | Records
    replay: ReplayBuffer | None
    limits: Limits | Mapping[str, Any]


class FitSettings(DataSettings, total=False):
    """Of `PolicyModule`, too."""

    loss: PolicyLoss | None
    proximal: Proximal | None
    correction: Correction | None
    baseline: OptimalBaseline | None
    learning_rate: float | None
    weight_decay: float
    betas: tuple[float, float]
    optimizer: OptimizerCallable | None
    scheduler: RateSchedule | LRSchedulerCallable | None
    kl_coefficient: float
    kl_estimator: KLEstimator
    entropy_coefficient: float
    logprob_chunk_tokens: int
    lora: LoRA | Mapping[str, Any] | peft.LoraConfig | None
    gradient_checkpointing: bool
    torch_compile: bool
    sharding: Sharding | Mapping[str, Any]
    dtype: str
    attn_implementation: str | None
    random_init: bool
    packing: PrefixTreePacking | SharedPromptPacking | None
    self_check: bool
    distillation: Distillation | None
