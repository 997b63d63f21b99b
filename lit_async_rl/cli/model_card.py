"""The model card of an exported policy, and its upload to the Hugging Face hub."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.callbacks import Callback

import lit_async_rl
from lit_async_rl.api.run_folders import row_step
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.scheduling.admission import FromTape
from lit_async_rl.training.module import PolicyModule

CARD = "README.md"
HOME = "https://github.com/lit-async-rl/lit-async-rl"
STABILIZERS = "lit_async_rl.callbacks.stabilizers."


def write_card(
    folder: Path,
    module: PolicyModule,
    data: Any,
    callbacks: Sequence[Callback],
    checkpoint: Path,
    step: int,
) -> None:
    """Writes `README.md` into an exported folder: base model, method, versions, and age of the data.

    Args:
        folder: of the export.
        module: with the checkpoint's version.
        data: of the configuration; of rollouts, with bounds and groups, or of records.
        callbacks: of the Trainer.
        checkpoint: its run's `metrics.csv`, if it exists, has data ages and accuracy.
        step: optimizer steps at the checkpoint; later rows of the table are of other weights.
    """
    is_local = Path(module.model).exists()
    of_rollouts = isinstance(data, RolloutDataModule)
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    metadata |= {"tags": ["lit-async-rl", *(("reinforcement-learning", "grpo") if of_rollouts else ("sft",))]}
    metadata |= {} if is_local else {"base_model": module.model}
    parts: dict[str, Any] = {"base model": Path(module.model).name if is_local else module.model}
    parts |= _of_rollouts(module, data) if of_rollouts else {"records of a step": data.samples_per_step}
    parts |= {
        "stabilizers": ", ".join(_name(c) for c in callbacks if type(c).__module__.startswith(STABILIZERS)) or "none",
        "adapters": "none" if module.policy.has_adapters is False else "LoRA, merged",
        "learning rate, largest": "of the optimizer" if module.learning_rate is None else f"{module.learning_rate:g}",
        "version (number of weight updates)": module.version,
    }
    parts |= _measured(checkpoint.absolute().parent.parent / "metrics.csv", step)
    rows = [f"| {name} | {value} |" for name, value in parts.items()]
    tool = f"[lit-async-rl]({HOME}) {lit_async_rl.__version__}"
    how = [f"Fine-tuned on records with {tool}; a version is the weights after one update."]
    if of_rollouts:
        how = [
            f"Trained by reinforcement learning with {tool}. The data were sampled by slightly",
            "older versions of the policy while it trained; a version is the weights after one update.",
        ]
    lines = ["---", yaml.safe_dump(metadata, sort_keys=False).strip(), "---", "", f"# {folder.resolve().name}", ""]
    (folder / CARD).write_text("\n".join([*lines, *how, "", "| | |", "|---|---|", *rows, ""]))


def _of_rollouts(module: PolicyModule, data: RolloutDataModule) -> dict[str, Any]:
    """The method: what the gradient is, and from which data."""
    objective = module.objective
    bound = f"{max(data.max_staleness, 0 if data.replay is None else data.replay.max_staleness)} versions"
    if isinstance(data.admission, FromTape):
        bound = "that of the recorded run"
    parts: dict[str, Any] = {
        "loss": _name(objective.loss),
        "proximal policy": _name(objective.proximal),
        "correction of stale data": _name(objective.correction),
        "baseline or advantage": _name(objective.baseline or data.advantage),
        "average over tokens": _name(data.aggregation),
        "completions of a prompt": data.group_size,
        "prompts of a step": data.groups_per_step,
        "bound on the age of a trained token": bound,
    }
    if objective.distiller is not None:
        distillation = objective.distiller.settings
        teacher = distillation.teacher
        parts["teacher"] = Path(teacher).name if isinstance(teacher, str) else _name(teacher)
        parts["divergence from the teacher"] = f"{distillation.divergence}, {distillation.gradient} gradient"
        parts["rewards"] = "train, too" if distillation.with_reward else "only measured"
    return parts


def _measured(table: Path, step: int) -> dict[str, str]:
    """Data age and held-out accuracy in the first steps of the run's table; empty without a table."""
    if not table.is_file():
        return {}
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row_step(row) < step]
    validations = [row for row in rows if row_step(row) <= step]  # one after n steps has the number n, see `row_step`
    found = {}
    if ages := _column(steps, "sample/staleness_mean"):
        oldest = max(_column(steps, "sample/staleness_max") or ages)
        found["age of the trained tokens, mean and maximum"] = f"{statistics.mean(ages):.2f}, {oldest:g} versions"
    if ratios := _column(steps, "importance/ess_ratio"):
        found["effective sample size over rollouts, mean"] = f"{statistics.mean(ratios):.2f}"
    if losses := _column(validations, "val/loss"):
        found["held-out loss, first and last"] = f"{losses[0]:.3f}, {losses[-1]:.3f}"
    if accuracies := _column(validations, "val/pass@1"):
        found["held-out accuracy, first and last"] = f"{accuracies[0]:.3f}, {accuracies[-1]:.3f}"
    return found


def _column(rows: Sequence[Mapping[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name)]


def _name(part: object) -> str:
    return "none" if part is None else type(part).__name__


def push(folder: Path, repository: str, private: bool) -> str:
    """Uploads an exported folder, card included, as one commit; returns the address of the model.

    The key is the Hugging Face hub's own (`hf auth login`, or `HF_TOKEN`).

    Args:
        folder: of the export.
        repository: `user/name`, made if there is none.
        private: whether a new one is private.
    """
    from huggingface_hub import HfApi

    hub = HfApi(library_name="lit-async-rl", library_version=lit_async_rl.__version__)
    address = hub.create_repo(repository, private=private, exist_ok=True)
    hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by lit-async-rl export")
    return str(address)
