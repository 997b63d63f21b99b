"""LightningDataModule of supervised fine-tuning: records as rows, in an order that any step can be found in again."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import numpy as np
import xxhash
from lightning.pytorch.trainer.states import TrainerFn

from lit_async_rl import rules
from lit_async_rl.advantages.group import Raw
from lit_async_rl.data.collate import collate_step
from lit_async_rl.data.held_out import HeldOut
from lit_async_rl.data.module import BEGAN
from lit_async_rl.data.settings import Limits, Scoring, Validation
from lit_async_rl.distributed.ranks import data_parallel
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import SetupError
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.models.loading import check_vocabulary
from lit_async_rl.models.run_clock import use_run_time
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.records import Records
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rewards.calls import Reward, check_reward
from lit_async_rl.rewards.combined import name_answers
from lit_async_rl.rewards.forms import as_reward_function
from lit_async_rl.rollouts.resume import START_ANEW
from lit_async_rl.runtime.waiting import announced
from lit_async_rl.supervised.records import as_demonstrations
from lit_async_rl.supervised.rows import LossOn, Row, RowEncoder
from lit_async_rl.types import PromptBatch, Rollout, RolloutBatch, RolloutGroup, SamplingParams
from lit_async_rl.utils.checks import MANY, check_choice, check_kinds, check_range

log = logging.getLogger(__name__)
TooLong = Literal["refuse", "truncate", "drop"]
MAX_LENGTH = 2**62  # micro-batches of a run without an end
NO_PROMPT = Prompt(text="")


class Rows(PromptSource):
    """The encoded rows of a source, which a `PromptStream` can put in order.

    Args:
        source: of the records.
        encode: makes a row of a record.
        max_tokens: of a row.
        limit: name of that limit in messages.
        too_long: whether longer rows are refused, cut at their end, or dropped.

    Attributes:
        left_out: numbers of records left out, by reason.

    Raises:
        ValueError: a record is bad, or too long and refused; names file and line. Or none is left.
    """

    def __init__(
        self, source: PromptSource, encode: RowEncoder, max_tokens: int, *, limit: str, too_long: TooLong
    ) -> None:
        self._rows: list[Row] = []
        self.left_out: Counter[str] = Counter()
        num_cut = num_unknown = 0
        for number in range(len(source)):
            try:
                row = encode(source[number])
                length = len(row.ids)
                if length > max_tokens and too_long == "refuse":
                    raise ValueError(
                        f"the record has {length} tokens, but the limit is {limit}: shorten the record, or set "
                        "data.too_long=truncate or data.too_long=drop"
                    )
            except ValueError as error:
                where = source.where(number)
                text = str(error) if where in str(error) else f"{where}: {error}"
                if source.on_bad_prompt == "error":
                    raise ValueError(text) from error
                self.left_out["on_bad_prompt=skip"] += 1
                continue
            if length > max_tokens:
                row = row.cut(max_tokens)
                if too_long == "drop" or not row.trains.any():
                    self.left_out[f"longer than {max_tokens} tokens, data.too_long={too_long}"] += 1
                    continue
                num_cut += 1
            num_unknown += bool((row.ids[row.trains] == encode.unknown_id).any())
            self._rows.append(row)
        if num_cut:
            log.warning("%d of %d records were cut at %d tokens (data.too_long)", num_cut, len(source), max_tokens)
        if num_unknown:
            token = encode.unknown_id
            log.warning(
                "%d of %d records have training text that the tokenizer cannot encode (unknown token %d)",
                num_unknown,
                len(source),
                token,
            )
        for why, count in self.left_out.items():
            log.warning("%d of %d records were left out: %s", count, len(source), why)
        if not self._rows:
            reasons = ", ".join(self.left_out)
            raise ValueError(f"all records were left out; the first is {source.where(0)}. Reasons: {reasons}")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]

    def digest(self) -> str:
        """XXH3 of all tokens, and which of them train."""
        digest = xxhash.xxh3_128()
        for row in self._rows:
            digest.update(len(row.ids).to_bytes(8, "little"))
            digest.update(row.ids.tobytes())
            digest.update(row.trains.tobytes())
        return digest.hexdigest()


class Mixture:
    """Infinite sequence of rows from several sources, each shuffled by itself; a function of the position alone.

    Position k has the source that is furthest behind its share of the first k + 1 rows, so that each source is always
    within one row of its share.

    Args:
        sources: encoded.
        weights: see `SFTDataModule`.
        seed: of the permutations, one for each source and epoch of it.
        shuffle: see `SFTDataModule`.
    """

    def __init__(
        self, sources: Sequence[Rows], weights: Sequence[int | float] | None, seed: int, shuffle: bool
    ) -> None:
        weights = [len(source) for source in sources] if weights is None else weights
        self._sources = sources
        self._shares = np.array(weights) / sum(weights)
        self._streams = [PromptStream(source, seed + n, shuffle) for n, source in enumerate(sources)]
        self._counts = np.zeros(len(sources), dtype=np.int64)
        self._position = 0

    def at(self, begin: int, number: int) -> list[Any]:
        """The rows from position `begin` on."""
        if begin < self._position:
            self._position = 0
            self._counts[:] = 0
        found = []
        while self._position < begin + number:
            source = int(np.argmax(self._shares * (self._position + 1) - self._counts))
            if self._position >= begin:
                stream = self._streams[source]
                found.append(self._sources[source][stream.number_at(int(self._counts[source]))])
            self._counts[source] += 1
            self._position += 1
        return found


class SFTDataModule(pl.LightningDataModule):
    """Records that a policy is fine-tuned on: conversations, or prompts with completions.

    Every step has `samples_per_step` rows, whose tokens all weigh the same: the loss is the mean over the trained
    tokens of all micro-batches and ranks.

    Example:
        ```python
        import lit_async_rl as rl

        data = rl.SFTDataModule(
            records=[{"prompt": "3142=", "completion": "1234"}, {"prompt": "21=", "completion": "12"}],
            samples_per_step=2,
        )
        ```

    Args:
        model: Hugging Face name or folder of the tokenizer; None is the trained model's.
        records: list of dictionaries, `datasets.Dataset`, name of a file or dataset, source of prompts with answers; or
            a list of files and sources. A record has `messages`, `prompt` and `completion`, or `segments`.
        weights: share of each of several sources, up to a factor; None is their size.
        epochs: length of the run where `trainer.max_steps` is not set; an epoch has as many rows as all sources.
        samples_per_step: rows of one optimizer step.
        micro_batches_per_step: forward-backward passes of one optimizer step.
        loss_on: `all` turns of the assistant, or the `last` one.
        max_tokens: longest row; None is the context of the model.
        too_long: longer rows: `refuse` the run, `truncate` their end, or `drop` them. The number is logged.
        seed: of the order of the rows.
        shuffle: False takes rows in the order of their source, in every epoch.
        validation_records: held-out records, for `val/loss` and `val/token_accuracy`.
        validation: held-out prompts whose completions are sampled and scored, as in RL.
        reward: scores these.
        sampling: sampling parameters of these.
        scoring: worker threads, timeout and tries of the reward.
        limits: timeouts of sampling.

    Attributes:
        shares_prefixes: whether the module packs rows, so that micro-batches are cut by tokens without padding.
        rows: encoded records of each source, once the model is known.

    Raises:
        ValueError: a setting is out of range, or a record is bad; names file and line.
    """

    def __init__(
        self,
        model: str | None = None,
        records: Records | list[Records] | None = None,
        weights: list[int | float] | None = None,
        epochs: int | float = 1,
        samples_per_step: int = 32,
        micro_batches_per_step: int = 1,
        loss_on: LossOn = "all",
        max_tokens: int | None = None,
        too_long: TooLong = "refuse",
        seed: int = 0,
        shuffle: bool = True,
        validation_records: Records | None = None,
        validation: Validation = Validation(),  # noqa: B008  frozen
        reward: Reward | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  frozen
        scoring: Scoring = Scoring(),  # noqa: B008  frozen
        limits: Limits = Limits(),  # noqa: B008  frozen
    ) -> None:
        given = dict(locals())
        super().__init__()
        check_kinds("data", SFTDataModule.__init__, given)
        check_range("data", "integer positive", samples_per_step=samples_per_step, max_tokens=max_tokens)
        check_range("data", "integer positive", micro_batches_per_step=micro_batches_per_step)
        check_range("data", f"<= {MANY}", samples_per_step=samples_per_step)
        check_range("data", "positive", epochs=epochs)
        check_range("data", "integer", seed=seed)
        check_choice("data", get_args(LossOn), loss_on=loss_on)
        check_choice("data", get_args(TooLong), too_long=too_long)
        if validation.source is not None and reward is None:
            raise ValueError("data.validation.prompts needs data.reward, which scores the completions of these prompts")
        several = records if isinstance(records, list) and _are_sources(records) else [records]
        self._sources = [as_demonstrations(one, "data.records") for one in several]
        if weights is not None and len(weights) != len(self._sources):
            raise ValueError(
                f"data.weights must hold one positive number for each source in data.records, got {weights}"
            )
        for number, weight in enumerate(weights or []):
            check_range("data", "positive", **{f"weights[{number}]": weight})
        self._held_out_source = (
            None if validation_records is None else as_demonstrations(validation_records, "data.validation_records")
        )
        self.weights = weights
        self.epochs = epochs
        self.samples_per_step = samples_per_step
        self.micro_batches_per_step = micro_batches_per_step
        self.loss_on: LossOn = loss_on
        self.max_tokens = max_tokens
        self.too_long: TooLong = too_long
        self.seed = seed
        self.shuffle = shuffle
        self.validation = validation
        self.scoring = scoring
        self.limits = limits
        self.val_sampling = validation.sampling or replace(sampling, head=None, experts=False)
        self.engine = EmbeddedEngine()  # whose settings a validation samples with
        if reward is not None:
            check_reward(reward)
            reward = as_reward_function(reward)
            name_answers(reward, getattr(validation.source, "answer_field", None))
        self.reward = reward
        make_scorer = partial(scoring.make_scorer, reward, records_spans=False)
        self.held_out = HeldOut(validation, self.val_sampling, make_scorer, grader=reward)
        self.shares_prefixes = False
        self._began = datetime.now()
        use_run_time(self._began)
        self.model: str | None = None
        self._codec: TextCodec | None = None
        self._base = (0, 0)  # a step, and the position of its first row
        if model is not None:
            self.use_model(model)

    # -- model, tokenizer and rows ------------------------------------------------------------------------------------

    def use_model(self, model: str) -> None:
        """Takes the tokenizer of a model, unless one was given."""
        if self.model is None:
            self.model = os.path.expanduser(model)
            self._codec = TextCodec(self.model, self.scoring.special_tokens)

    @cached_property
    def rows(self) -> list[Rows]:
        """The training records of each source, encoded on first use, because an evaluation needs none.

        Raises:
            ValueError: a record is bad; names file and line.
        """
        with announced("the records to be tokenised"):
            return [self._encoded(source) for source in self._sources]

    @cached_property
    def held_out_rows(self) -> Rows | None:
        """The held-out records, likewise."""
        return None if self._held_out_source is None else self._encoded(self._held_out_source)

    def _encoded(self, source: PromptSource) -> Rows:
        encoder = RowEncoder(self.codec, self.loss_on)
        length = min(self.codec.context_length, self.max_tokens or self.codec.context_length)
        limit = f"data.max_tokens={length}" if length == self.max_tokens else f"the model's context of {length}"
        return Rows(source, encode=encoder, max_tokens=length, limit=limit, too_long=self.too_long)

    @cached_property
    def _mixture(self) -> Mixture:
        return Mixture(self.rows, self.weights, seed=self.seed, shuffle=self.shuffle)

    def _forget_rows(self) -> None:
        for name in ("rows", "held_out_rows", "_mixture"):
            self.__dict__.pop(name, None)

    @property
    def codec(self) -> TextCodec:
        """The model's tokenizer."""
        if self._codec is None:
            raise SetupError(
                "SFTDataModule has no model yet: call use_model, or pass the SFTDataModule and a module to a Trainer"
            )
        return self._codec

    def read_records(self) -> None:
        """Encodes all records, so that a bad one is reported before anything starts.

        Raises:
            ValueError: a record is bad; names file and line.
        """
        _ = self.rows, self.held_out_rows

    @property
    def num_steps(self) -> int:
        """Optimizer steps of `epochs`; the last one may reach into the next epoch."""
        return max(1, -(-round(self.epochs * sum(map(len, self.rows))) // self.samples_per_step))

    def limit_steps(self, trainer: pl.Trainer) -> None:
        """Ends the run after `epochs`, unless `trainer.max_steps` is set."""
        if trainer.max_steps < 0:
            trainer.fit_loop.epoch_loop.max_steps = self.num_steps

    # -- of Lightning -------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Takes the model and the settings that the data shares with module and Trainer."""
        module: Any = self._used_trainer.lightning_module
        rules.refuse(rules.of_tuner(self._used_trainer.callbacks))  # type: ignore[attr-defined]
        self.use_model(module.model)
        rules.refuse(rules.of_any_run(self._used_trainer, module, self))
        if self._used_trainer.max_epochs not in (None, -1, 1000):  # Lightning's; the last one is its default
            raise ValueError(
                f"trainer.max_epochs={self._used_trainer.max_epochs} cannot be used: set data.epochs or "
                "trainer.max_steps"
            )
        vocab_size = module.policy.causal_lm.config.get_text_config().vocab_size
        check_vocabulary(self.codec.tokenizer, vocab_size, module.model)
        self.shares_prefixes = module.policy.packing is not None
        self._used_trainer.accumulate_grad_batches = self.micro_batches_per_step
        if stage == TrainerFn.FITTING:
            self.read_records()
            self.limit_steps(self._used_trainer)

    @property
    def _used_trainer(self) -> pl.Trainer:
        if self.trainer is None:
            raise SetupError("an SFTDataModule was used without a Trainer: call `trainer.fit(..., datamodule=data)`")
        return self.trainer

    def train_dataloader(self) -> Iterable[RolloutBatch]:
        """Micro-batches as a sized iterable."""
        return StepFeed(self)

    def val_dataloader(self) -> Iterable[RolloutBatch | PromptBatch]:
        """Held-out records, and held-out prompts after them."""
        trainer = self._used_trainer
        prompts = self.held_out.batches(self.codec, trainer.global_rank, trainer.world_size)
        return HeldOutFeed(self, self.held_out_rows, prompts) if self.validates else []

    def test_dataloader(self) -> Iterable[RolloutBatch | PromptBatch]:
        """As in a validation."""
        return self.val_dataloader()

    def step(self, number: int) -> list[RolloutBatch]:
        """This rank's micro-batches of an optimizer step."""
        rows = self._mixture.at(self._position_of(number), self.samples_per_step)
        return [
            batch.replace(step=number, micro_batch=n, num_micro_batches=self.micro_batches_per_step)
            for n, batch in enumerate(self.collate(rows))
        ]

    def collate(self, rows: Sequence[Row]) -> list[RolloutBatch]:
        """This rank's micro-batches of some rows; their token weights sum to 1 over all ranks."""
        places, place = data_parallel(self._used_trainer)
        batches = collate_step(
            [_as_group(row, number) for number, row in enumerate(rows)],
            advantage=Raw(),
            aggregation=TokenMean(),
            num_micro_batches=self.micro_batches_per_step * places,
            pad_token_id=self.codec.pad_token_id,
            temperature=1.0,
            shares_prefixes=self.shares_prefixes,
        )
        return batches[place::places]

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _position_of(self, step: int) -> int:
        return self._base[1] + (step - self._base[0]) * self.samples_per_step

    def state_dict(self) -> dict[str, Any]:
        """Position in the order of the rows, and what that order depends on."""
        step = self._used_trainer.global_step
        return {
            "step": step,
            "position": self._position_of(step),
            "order": self._order(),
            "rows": [rows.digest() for rows in self.rows],
            BEGAN: self._began.isoformat(),
        }

    def _order(self) -> dict[str, Any]:
        return {"seed": self.seed, "shuffle": self.shuffle, "weights": self.weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from the position."""
        if self._used_trainer.state.fn != TrainerFn.FITTING:
            if self._takes_time_of(state_dict):
                self._forget_rows()
            return
        self.check_resumable(state_dict)
        self._base = (state_dict["step"], state_dict["position"])

    def _takes_time_of(self, state: Mapping[str, Any]) -> bool:
        """Takes the time at which a saved run began, which templates may write; returns whether it is another one."""
        began = datetime.fromisoformat(state[BEGAN])
        if began == self._began:
            return False
        self._began = began
        use_run_time(began)
        return True

    def saved_state(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """The state in a checkpoint.

        Raises:
            ValueError: it is of another stage.
        """
        if type(self).__qualname__ not in checkpoint:
            raise ValueError(
                f"the checkpoint was not saved by supervised fine-tuning: it holds no state of class "
                f"{type(self).__name__}. {START_ANEW}"
            )
        state: dict[str, Any] = checkpoint[type(self).__qualname__]
        return state

    def check_resumable(self, state: Mapping[str, Any]) -> None:
        """Checks that this run has a saved one's rows in its order.

        Raises:
            ValueError: names the change.
        """
        if self._takes_time_of(state) and [rows.digest() for rows in self.rows] != state["rows"]:
            self._forget_rows()
        for name, value in self._order().items():
            if value != state["order"][name]:
                saved = state["order"][name]
                raise ValueError(f"data.{name} is {value}, but was {saved} in the checkpoint. {START_ANEW}")
        if [rows.digest() for rows in self.rows] != state["rows"]:
            raise ValueError(
                "data.records, their tokens, or the choice of trained tokens (data.loss_on, max_tokens, too_long) "
                f"changed since the checkpoint. {START_ANEW}"
            )

    # -- of a run and its validations, as RolloutDataModule has them --------------------------------------------------

    @property
    def validates(self) -> bool:
        """Whether there are held-out records or prompts."""
        return self._held_out_source is not None or self.validation.source is not None

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Context of a run of several fits and validations."""
        try:
            yield
        finally:
            self.held_out.close()

    def note_progress(self) -> None:
        """Nothing: ranks wait for each other in collectives only, which have a timeout."""

    def teardown(self, stage: str) -> None:
        self.held_out.close()

    def on_exception(self, exception: BaseException) -> None:
        self.held_out.close()


def _are_sources(records: Sequence[Any]) -> bool:
    """Whether a list has files and sources instead of records."""
    return bool(records) and isinstance(records[0], str | PromptSource)


def _as_group(row: Row, number: int) -> RolloutGroup:
    """A row as a group to collate: a completion with advantage 1, from the first trained token on."""
    begin = int(np.flatnonzero(row.trains)[0])
    ids = row.ids.tolist()
    length = len(ids) - begin
    rollout = Rollout(
        token_ids=tuple(ids[begin:]),
        logprobs=(0.0,) * length,
        versions=(0,) * length,
        loss_mask=tuple(row.trains[begin:].tolist()),
        finish_reason="stop",
        reward=1.0,
    )
    return RolloutGroup(
        index=number, prompt=NO_PROMPT, prompt_ids=tuple(ids[:begin]), rollouts=(rollout,), admitted_version=0
    )


class StepFeed:
    """The training dataloader: this rank's micro-batches from the present step on."""

    def __init__(self, data: SFTDataModule) -> None:
        self._data = data

    def __len__(self) -> int:
        """Micro-batches of the whole run, also after a resume, see `RolloutFeed`."""
        max_steps = self._data._used_trainer.max_steps
        return max_steps * self._data.micro_batches_per_step if max_steps > 0 else MAX_LENGTH

    def __iter__(self) -> Iterator[RolloutBatch]:
        while True:
            yield from self._data.step(self._data._used_trainer.global_step)


class HeldOutFeed:
    """Batches of held-out records, then of held-out prompts; equally many on all ranks."""

    def __init__(self, data: SFTDataModule, rows: Rows | None, prompts: Iterable[PromptBatch]) -> None:
        self._data = data
        self._rows = rows
        self._prompts: Any = prompts

    @property
    def _num_steps(self) -> int:
        return 0 if self._rows is None else -(-len(self._rows) // self._data.samples_per_step)

    def __len__(self) -> int:
        return self._num_steps * self._data.micro_batches_per_step + len(self._prompts)

    def __iter__(self) -> Iterator[RolloutBatch | PromptBatch]:
        size = self._data.samples_per_step
        for n in range(self._num_steps):
            rows = self._rows
            yield from self._data.collate([rows[k] for k in range(n * size, min((n + 1) * size, len(rows)))])  # type: ignore
        yield from self._prompts
