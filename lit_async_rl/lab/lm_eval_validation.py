"""Standard benchmarks while training: tasks of EleutherAI's evaluation harness, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from transformers import PreTrainedModel

from lit_async_rl.callbacks.parts import policy_module, rollout_data
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.loading import evaluation_mode
from lit_async_rl.training.trackers import step_in_trackers
from lit_async_rl.training.validation import decodable
from lit_async_rl.utils.checks import check_range, meant
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

INSTALL = 'LMEvalValidation needs pip install "lit-async-rl[eval]"'


class LMEvalValidation(pl.Callback):
    """Runs tasks of `lm-eval` on the policy while training pauses: before the first step, every N steps, at the end.

    The harness (Gao et al., https://github.com/EleutherAI/lm-evaluation-harness) makes prompts and scores answers.
    Log-likelihoods come from the policy in evaluation mode, generated answers from an embedded engine on the same
    weights. It restores random states, so training does not depend on it.

    Logs `lm_eval/<task>/<metric>` (and `/<filter>` where the task has several) and its `_stderr`, at the number of
    optimizer steps before it. One process only: for a policy on several, export a checkpoint and run `lm-eval` on it.

    Example:
        ```python
        import lit_async_rl as rl

        callback = rl.LMEvalValidation(["arc_easy", "gsm8k"], every_n_steps=100, limit=200)
        ```

    Args:
        tasks: names of tasks, groups or tags of the harness.
        every_n_steps: optimizer steps between two evaluations.
        limit: problems of each task; None is all.
        num_fewshot: examples before each problem; None is the task's own number.
        include_path: folder with task files (YAML) of your own.
        apply_chat_template: whether prompts are a user's messages.
        batch_size: rows of one forward pass.
        max_gen_tokens: of an answer, where the task says nothing.
        at_start: whether to evaluate before the first step.

    Attributes:
        results: metrics of each evaluation so far, by optimizer step.

    Raises:
        ModuleNotFoundError: `lm-eval` is not installed.
        ValueError: a setting is out of range, or there is no such task.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        every_n_steps: int = 100,
        limit: int | None = None,
        num_fewshot: int | None = None,
        include_path: str | None = None,
        apply_chat_template: bool = False,
        batch_size: int = 16,
        max_gen_tokens: int = 256,
        at_start: bool = True,
    ) -> None:
        check_range("LMEvalValidation", "integer >= 1", every_n_steps=every_n_steps, batch_size=batch_size)
        check_range("LMEvalValidation", "integer >= 1", limit=limit, max_gen_tokens=max_gen_tokens)
        check_range("LMEvalValidation", "integer >= 0", num_fewshot=num_fewshot)
        if isinstance(tasks, str) or not tasks:
            raise ValueError(f"LMEvalValidation.tasks must be a list of names such as ['arc_easy'], got {tasks!r}")
        self.tasks = list(tasks)
        self.every_n_steps = every_n_steps
        self.limit = limit
        self.num_fewshot = num_fewshot
        self.include_path = include_path
        self.apply_chat_template = apply_chat_template
        self.batch_size = batch_size
        self.max_gen_tokens = max_gen_tokens
        self.at_start = at_start
        self.results: dict[int, dict[str, float]] = {}
        self._manager: Any = None

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """Refuses unknown tasks and several processes before anything is sampled."""
        if stage != "fit":
            return
        if trainer.world_size > 1:
            raise ValueError(
                f"LMEvalValidation runs in one process, but the run has {trainer.world_size} processes: export a "
                "checkpoint and run lm-eval on it (docs/evaluation.md)"
            )
        self._manager = self._known_tasks()

    def _known_tasks(self) -> Any:
        try:
            from lm_eval.tasks import TaskManager
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(INSTALL) from error
        if self.include_path is not None:
            own = TaskManager(include_path=self.include_path, include_defaults=False)
            if set(self.tasks) <= set(own.all_tasks):
                return own
        manager = TaskManager(include_path=self.include_path)
        for name in self.tasks:
            if name not in manager.all_tasks:
                raise ValueError(
                    f"LMEvalValidation.tasks: lm-eval has no task {name!r}{meant(name, manager.all_tasks)} (see "
                    "`lm-eval ls tasks`; LMEvalValidation.include_path adds a folder of your own)"
                )
        return manager

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Evaluates before the first step."""
        if self.at_start and trainer.global_step not in self.results:
            self._evaluate(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluates behind every `every_n_steps`-th optimizer step."""
        step = trainer.global_step
        if step and step % self.every_n_steps == 0 and step not in self.results:
            self._evaluate(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluates the policy at the end; not after SIGTERM."""
        if trainer.global_step not in self.results and not trainer.received_sigterm:
            self._evaluate(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Results so far: a resumed run repeats none."""
        return {"results": self.results}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.results = {int(step): dict(metrics) for step, metrics in state_dict["results"].items()}

    def _evaluate(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        from lm_eval.evaluator import simple_evaluate

        module = policy_module(pl_module, "LMEvalValidation")
        data = rollout_data(trainer, "LMEvalValidation")
        lm = module.policy.causal_lm
        precision = trainer.precision_plugin.val_step_context()
        with isolate_rng(), torch.no_grad(), evaluation_mode(lm), decodable(lm), precision:
            found = simple_evaluate(
                model=_harness_model(lm, data, self),
                tasks=self.tasks,
                num_fewshot=self.num_fewshot,
                limit=self.limit,
                task_manager=self._manager,
                apply_chat_template=self.apply_chat_template,
                log_samples=False,
                bootstrap_iters=0,
                random_seed=None,
                numpy_random_seed=None,
                torch_random_seed=None,
            )
        if found is None:  # of a rank that does not report
            return
        metrics = dict(_named(found["results"]))
        self.results[trainer.global_step] = metrics
        step = max(step_in_trackers(trainer), trainer.global_step)
        for logger in trainer.loggers:  # not by `log`, which keeps only every `log_every_n_steps`-th step
            logger.log_metrics(metrics, step=step)
            logger.save()


def _named(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """`lm_eval/<task>/<metric>` of the harness's `<metric>,<filter>`."""
    for task, values in results.items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if kind and isinstance(value, int | float):
                yield f"lm_eval/{task}/{metric}" + ("" if kind == "none" else f"/{kind}"), float(value)


def _harness_model(lm: PreTrainedModel, data: RolloutDataModule, settings: LMEvalValidation) -> Any:
    """The policy as the harness sees a model; its base class is the harness's."""
    from lm_eval.api.model import TemplateLM

    class Policy(TemplateLM):  # type: ignore[misc]
        """Log-likelihoods by forward passes, answers by an embedded engine."""

        backend = "causal"

        @property
        def eot_token_id(self) -> int:
            return int(tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            return self.eot_token_id if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id)

        @property
        def tokenizer_name(self) -> str:
            return str(tokenizer.name_or_path).replace("/", "__")

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return list(tokenizer.encode(string, add_special_tokens=bool(add_special_tokens)))

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            text = tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
            return str(text)

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return str(tokenizer.chat_template or "") if chat_template else None

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            rows = [(prompt, answer) for _, prompt, answer in requests]
            return _in_order(rows, settings.batch_size, lambda part: answer_logprobs(lm, part, data))

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            rows = [([self.prefix_token_id], self.tok_encode(request.args[0])) for request in requests]
            found = _in_order(rows, settings.batch_size, lambda part: answer_logprobs(lm, part, data))
            return [logprob for logprob, _ in found]

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            own = EmbeddedEngine.from_module(lm, data.engine.num_slots, self_check=False, side="validation")
            length = own.max_model_len
            wanted = []
            for n, (prompt, given) in enumerate(request.args for request in requests):
                until = given.get("until") or ()
                max_tokens = int(given.get("max_gen_toks") or settings.max_gen_tokens)
                sampling = SamplingParams(
                    temperature=float(given.get("temperature") or 1.0) if given.get("do_sample") else 0.0,
                    max_tokens=max_tokens,
                    stop=(until,) if isinstance(until, str) else tuple(until),
                )
                ids = tuple(self.tok_encode(prompt))[-max(1, length - max_tokens) :]
                wanted.append(GenerationRequest(id=n, prompt_ids=ids, num_samples=1, sampling=sampling, seed=n))
            with closing(own):
                found = run_requests(
                    own,
                    wanted,
                    data.codec.vocab_size,
                    timeout_s=data.limits.rollout_timeout_s,
                    on_progress=data.note_progress,
                )
            return [
                data.codec.decode(row[0].token_ids, request.sampling.stop) if row else ""
                for row, request in zip(found, wanted, strict=True)
            ]

    tokenizer = data.codec.tokenizer
    return Policy()


def _in_order(rows: Sequence[Any], size: int, score: Any) -> list[Any]:
    """Scores of rows, computed in batches of similar length, in the order of the rows."""
    order = sorted(range(len(rows)), key=lambda n: -len(rows[n][0]) - len(rows[n][1]))
    found: dict[int, Any] = {}
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        found.update(zip(chosen, score([rows[n] for n in chosen]), strict=True))
    return [found[n] for n in range(len(rows))]


def answer_logprobs(
    lm: PreTrainedModel, rows: Sequence[tuple[Sequence[int], Sequence[int]]], data: RolloutDataModule
) -> list[tuple[float, bool]]:
    """(log-probability of the answer, whether each of its tokens is the likeliest) for each (prompt, answer).

    Args:
        lm: in evaluation mode.
        rows: token ids; a row longer than the model's positions loses its beginning.
        data: told of the progress.
    """
    limit = int(getattr(lm.config.get_text_config(), "max_position_embeddings", None) or 2**31)
    whole = [[*prompt, *answer][-limit - 1 :] for prompt, answer in rows]
    longest = max(len(ids) - 1 for ids in whole)
    tokens = torch.zeros(len(whole), longest, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for n, ids in enumerate(whole):
        tokens[n, : len(ids) - 1] = torch.tensor(ids[:-1])
        mask[n, : len(ids) - 1] = 1
    device = next(lm.parameters()).device
    logits: Tensor = lm(input_ids=tokens.to(device), attention_mask=mask.to(device), use_cache=False).logits
    data.note_progress()
    found = []
    for n, (ids, (_, answer)) in enumerate(zip(whole, rows, strict=True)):
        count = min(len(answer), len(ids) - 1)
        end = len(ids) - 1
        logprobs = logits[n, end - count : end].float().log_softmax(-1)
        target = torch.tensor(ids[len(ids) - count :], device=device)
        total = logprobs.gather(-1, target[:, None]).sum()
        found.append((float(total), bool((logprobs.argmax(-1) == target).all())))
    return found
