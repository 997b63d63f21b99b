"""Searches learning rate and staleness bound with Optuna: `python examples/optuna_search.py --trials 8 --steps 60`.

Each trial is a short run of the task of the quick start. Trials that fall behind the median of the earlier ones at the
same validation end early. Needs `pip install optuna`.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import optuna

import lit_async_rl as rl


class Prune(pl.Callback):
    """Reports each validation to the trial, and ends the run where the pruner says so."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial
        self.step = 0  # of the last report: `rl.fit` validates before the first step and after the last

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        self.trial.report(float(trainer.callback_metrics["val/pass@1"]), step=trainer.global_step)
        trainer.should_stop = trainer.should_stop or self.trial.should_prune()


def objective(trial: optuna.Trial, steps: int) -> float:
    """Held-out accuracy after `steps` steps."""
    prune = Prune(trial)
    trainer = rl.fit(
        rl.asset("sort_policy"),
        rl.SortDigits(num_digits=8, size=100_000),
        rl.exact_match,
        max_steps=steps,
        learning_rate=trial.suggest_float("learning_rate", 1e-5, 1e-3, log=True),
        max_staleness=trial.suggest_categorical("max_staleness", [1, 4, 16]),
        groups_per_step=16,
        sampling=rl.SamplingParams(max_tokens=12),
        validation=rl.Validation(prompts=rl.SortDigits(num_digits=8, size=256, split="held_out"), batch_size=256),
        val_check_interval=max(1, steps // 3),
        check_val_every_n_epoch=None,
        accelerator="cpu",
        enable_progress_bar=False,
        callbacks=[prune],
    )
    if trainer.global_step < steps:
        raise optuna.TrialPruned
    return float(trainer.callback_metrics["val/pass@1"])


def search(trials: int, steps: int, seed: int = 0) -> optuna.Study:
    """Runs the trials one after the other."""
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    study.optimize(lambda trial: objective(trial, steps), n_trials=trials)
    return study


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    study = search(arguments.trials, arguments.steps)
    print(f"best: {study.best_value:.3f} with {study.best_params}")


if __name__ == "__main__":
    main()
