"""On-policy distillation: a teacher's distribution at each state that the student's own rollouts visit.

Two gradients of a divergence (arXiv:2306.13649), both as stale as the states:

* `analytic`: of the divergence between whole distributions. Nothing in it is sampled, so that it needs no importance
  weights.
* `sampled`: of KL(student || teacher) from the sampled token alone, as with `model.kl_estimator=token`
  (`lit_async_rl.losses.reference_kl`), weighted by the ratio of current to sampling policy. It suits servers that
  return only the log-probabilities of a prompt.

A teacher must have the student's tokenizer and chat template: tokens are compared one by one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.errors import EngineError, SetupError, StalledError, describe
from lit_async_rl.losses.distillation import Divergence, divergence, with_tail
from lit_async_rl.losses.reference_kl import reference_kl
from lit_async_rl.models.architecture import stored_buffers
from lit_async_rl.models.loading import check_dtype, errors_naming, load_policy
from lit_async_rl.models.policy import CausalPolicy, Compare, scatter
from lit_async_rl.models.sharding import shard_frozen
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.runtime.threads import ThreadPool
from lit_async_rl.training.token_stats import token_stats
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.checks import check_choice, check_range

MAX_ASKED = 16  # sequences at a time
MAX_LOGPROB = 1e-2  # above 0 by rounding
Gradient = Literal["analytic", "sampled"]
Likeliest = tuple[Int[Tensor, "B T k"], Float[Tensor, "B T k"]]


class OpenTeacher(ABC):
    """A teacher that is ready.

    Attributes:
        is_collective: whether all ranks must ask it equally often, as each holds a part.
    """

    is_collective = False

    @abstractmethod
    def sampled(self, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        """Log-probabilities of the tokens that train."""

    @abstractmethod
    def likeliest(self, batch: RolloutBatch, num: int) -> Likeliest:
        """Ids and log-probabilities of its likeliest tokens at each token that trains."""

    def compare(self, batch: RolloutBatch, measure: Callable[[Tensor, Tensor], Tensor]) -> Compare:
        """Measures a student's whole distributions [n, V] against its own, chunk by chunk."""
        raise NotImplementedError(f"{type(self).__name__} does not see whole distributions")

    def close(self) -> None:  # noqa: B027  (most have nothing to close)
        """Frees what it holds."""


class Teacher(ABC):
    """Where a teacher's distributions come from; setting `model.distillation.teacher`."""

    sees_all = True  # whole distributions
    gives_likeliest = True  # or at least those of the likeliest tokens
    any_temperature = True  # else log-probabilities at temperature 1 only

    def check(self, model: str) -> None:  # noqa: B027  (one whose tokens are known needs none)
        """Checks that it can teach a model, before the run writes anything.

        Args:
            model: name or folder of the student.

        Raises:
            FileNotFoundError: it has no tokenizer.
            ValueError: it has another tokenizer or chat template.
        """

    @abstractmethod
    def open(self, student: CausalPolicy, device: torch.device, mesh: DeviceMesh | None = None) -> OpenTeacher:
        """Makes it ready, at the beginning of a fit.

        Args:
            student: policy in training.
            device: of the trainer.
            mesh: data-parallel ranks over which FSDP2 shards the student; None under other strategies.
        """


def vocabulary_of(policy: CausalPolicy) -> int:
    """Number of token ids of a policy."""
    return int(policy.causal_lm.config.get_text_config().vocab_size)


def check_same_tokens(student: str, teacher: str, setting: str = "model.distillation.teacher") -> None:
    """Checks that two models read and write the same tokens; `setting` names the teacher in messages.

    Raises:
        ValueError: they do not.
    """
    own = TextCodec(student)
    with errors_naming(setting):
        other = TextCodec(teacher)
    if own.vocabulary_digest != other.vocabulary_digest:
        raise ValueError(
            f"{setting}={teacher!r} has a different tokenizer from model.model={student!r}: "
            "token probabilities can be compared only over the same vocabulary"
        )
    templates = [getattr(codec.tokenizer, "chat_template", None) for codec in (own, other)]
    if None not in templates and templates[0] != templates[1]:
        raise ValueError(
            f"{setting}={teacher!r} has a different chat template from model.model={student!r}: the teacher "
            "would judge prompts in a form that it was not trained on. Give both folders the same template"
        )


@dataclass(frozen=True, kw_only=True)
class LocalTeacher(Teacher):
    """A frozen model in the trainer's process, sharded as the policy is by FSDP2, else whole on each rank.

    Args:
        model: Hugging Face name or folder.
        dtype: of its weights.
        attn_implementation: see `PolicyModule`.
    """

    model: str
    dtype: str = "float32"
    attn_implementation: str | None = None

    def __post_init__(self) -> None:
        check_dtype("LocalTeacher.dtype", self.dtype)

    def check(self, model: str) -> None:
        check_same_tokens(model, self.model)

    def open(self, student: CausalPolicy, device: torch.device, mesh: DeviceMesh | None = None) -> OpenTeacher:
        with errors_naming("model.distillation.teacher", section="LocalTeacher"):
            lm = load_policy(self.model, dtype=self.dtype, attn_implementation=self.attn_implementation)
        policy = CausalPolicy(lm, student.chunk_tokens, student.packing).requires_grad_(False)
        if mesh is not None:
            shard_frozen(policy, mesh)
        return _OpenLocalTeacher(policy.to(device), vocabulary_of(student), is_collective=mesh is not None)


class _OpenLocalTeacher(OpenTeacher):
    def __init__(self, policy: CausalPolicy, student_size: int, is_collective: bool = False) -> None:
        self.policy = policy
        self.is_collective = is_collective
        self._size = vocabulary_of(policy)
        self._shared_size = min(student_size, self._size)  # padding behind the same tokens differs
        self._lacks_ids = self._size < student_size

    @torch.no_grad()
    def sampled(self, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        self._check_ids(batch.input_ids)
        return token_stats(self.policy, batch).logprobs

    @torch.no_grad()
    def likeliest(self, batch: RolloutBatch, num: int) -> Likeliest:
        features, predicts = self._features(batch)
        found = [
            self._shared(self.policy.log_distribution(part, batch.temperature)).topk(num)
            for part in features.split(self.policy.chunk_tokens)
        ]
        ids = torch.cat([one.indices for one in found])
        logprobs = torch.cat([one.values for one in found])
        return scatter(ids, predicts, batch.loss_mask).long(), scatter(logprobs, predicts, batch.loss_mask)

    def compare(self, batch: RolloutBatch, measure: Callable[[Tensor, Tensor], Tensor]) -> Compare:
        with torch.no_grad():
            features, _ = self._features(batch)

        def compared(student: Float[Tensor, "n V"], numbers: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
            with torch.no_grad():
                teacher = self._shared(self.policy.log_distribution(features[numbers], batch.temperature))
            return measure(self._shared(student), teacher)

        return compared

    def _shared(self, logprobs: Float[Tensor, "n V"]) -> Float[Tensor, "n S"]:
        """Log-probabilities among the ids that student and teacher have."""
        if logprobs.shape[-1] == self._shared_size:
            return logprobs
        return logprobs[:, : self._shared_size].log_softmax(-1)

    def _features(self, batch: RolloutBatch) -> tuple[Float[Tensor, "N H"], Bool[Tensor, "B T1"]]:
        self._check_ids(batch.input_ids)
        features, predicts, _ = self.policy.features(batch.input_ids, batch.loss_mask, batch.tree_groups)
        return features, predicts

    def _check_ids(self, input_ids: Int[Tensor, "B T"]) -> None:
        # read from the device only where it can matter: that waits for it
        if self._lacks_ids and (largest := int(input_ids.max())) >= self._size:
            raise EngineError(
                f"model.distillation.teacher={self.policy.causal_lm.name_or_path!r} has only {self._size} token ids, "
                f"but the student has sampled token id {largest}, which is padding in the student's "
                "vocabulary: start training from weights that do not sample padding"
            )


class RemoteTeacher(OpenTeacher):
    """A teacher that gives log-probabilities of whole sequences, at temperature 1.

    Args:
        name: its setting with value, for messages.
        student_size: number of token ids of the student.
    """

    def __init__(self, name: str, student_size: int) -> None:
        self.name = name
        self._student_size = student_size

    @abstractmethod
    def ask(self, sequences: Sequence[Sequence[int]], num: int) -> list[list[dict[int, float]]]:
        """For each sequence, and each of its tokens but the first: log-probabilities by token id.

        Those of the token itself, and of the `num` likeliest.
        """

    def sampled(self, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        logprobs = torch.zeros(batch.input_ids.shape)
        for row, (ids, choices) in self._answers(batch.input_ids, batch.loss_mask, num=0).items():
            for place, choice in enumerate(choices, start=1):
                logprobs[row, place] = choice[ids[place]]
        return torch.where(batch.loss_mask, logprobs.to(batch.loss_mask.device), 0.0)

    def likeliest(self, batch: RolloutBatch, num: int) -> Likeliest:
        found_ids = torch.zeros(*batch.input_ids.shape, num, dtype=torch.long)
        found = torch.full(found_ids.shape, -math.inf)
        for row, (_, choices) in self._answers(batch.input_ids, batch.loss_mask, num=num).items():
            for place, choice in enumerate(choices, start=1):
                known = (one for one in choice.items() if one[0] < self._student_size)
                best = sorted(known, key=lambda one: -one[1])[:num]
                if len(best) < num:
                    raise EngineError(f"{self.name} gave {len(best)} tokens of model.distillation.top_k={num}")
                found_ids[row, place] = torch.tensor([token for token, _ in best])
                found[row, place] = torch.tensor([logprob for _, logprob in best])
        device = batch.input_ids.device
        mask = batch.loss_mask[..., None]
        return torch.where(mask, found_ids.to(device), 0), torch.where(mask, found.to(device), 0.0)

    def _answers(
        self, input_ids: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], num: int
    ) -> dict[int, tuple[list[int], list[dict[int, float]]]]:
        """Answers for the rows that train, up to their last token that does."""
        rows = [row for row in range(len(mask)) if bool(mask[row].any())]
        ends = {row: int(mask[row].nonzero()[-1]) + 1 for row in rows}
        sequences = {row: input_ids[row, : ends[row]].tolist() for row in rows}
        answers = self.ask(list(sequences.values()), num)
        for token, logprob in (one for answer in answers for choice in answer for one in choice.items()):
            if not -math.inf < logprob <= MAX_LOGPROB:
                raise EngineError(
                    f"{self.name} gave {logprob} as the log-probability of token {token}, which is impossible"
                )
        return {row: (ids, answer) for (row, ids), answer in zip(sequences.items(), answers, strict=True)}


@dataclass(frozen=True, kw_only=True)
class EngineTeacher(Teacher):
    """A teacher in an engine of its own, such as `VLLMEngine` on another GPU, for the sampled gradient.

    Each rank starts one; a `ServerTeacher` is one for all.

    Args:
        model: Hugging Face name or folder.
        engine: template of the engine; it is set up with that model.
        timeout_s: for the answers of one micro-batch.
    """

    model: str
    engine: RolloutEngine
    timeout_s: float = 600.0

    sees_all = False
    gives_likeliest = False
    any_temperature = False

    def __post_init__(self) -> None:
        check_range("EngineTeacher", "positive", timeout_s=self.timeout_s)

    def check(self, model: str) -> None:
        check_same_tokens(model, self.model)

    def open(self, student: CausalPolicy, device: torch.device, mesh: DeviceMesh | None = None) -> OpenTeacher:
        engine = self.engine.fresh()
        try:
            engine.setup(self.model)
            lm = load_policy(self.model)
            engine.load_weights(0, chain(lm.named_parameters(), stored_buffers(lm)))
        except BaseException:
            engine.close()
            raise
        return _OpenEngineTeacher(engine, self.timeout_s, vocabulary_of(student))


class _OpenEngineTeacher(RemoteTeacher):
    def __init__(self, engine: RolloutEngine, timeout_s: float, student_size: int) -> None:
        super().__init__(f"EngineTeacher.engine={type(engine).__name__}", student_size)
        self._engine = engine
        self._timeout_s = timeout_s
        self._threads = ThreadPool(MAX_ASKED, name="teacher")  # an engine that batches gets several at a time

    def ask(self, sequences: Sequence[Sequence[int]], num: int) -> list[list[dict[int, float]]]:
        calls = [self._threads.submit(self._engine.prompt_logprobs, list(ids)) for ids in sequences]
        if wait(calls, self._timeout_s).not_done:
            raise StalledError(f"{self.name} did not answer within EngineTeacher.timeout_s={self._timeout_s:g}")
        found = []
        for ids, call in zip(sequences, calls, strict=True):
            try:
                answer = call.result()
            except Exception as error:
                raise EngineError(f"{self.name}, the teacher: {describe(error)}") from error
            if answer is None:
                raise EngineError(f"{self.name} computes no log-probabilities")
            found.append([{token: logprob} for token, logprob in zip(ids[1:], answer, strict=True)])
        return found

    def close(self) -> None:
        self._threads.shutdown()
        self._engine.close()


@dataclass(frozen=True, kw_only=True)
class SourceTeachers(Teacher):
    """One teacher for the prompts of each source.

    Args:
        key: key of `Prompt.metadata` that names the source.
        teachers: by that name: Hugging Face names or folders, or teachers.
    """

    key: str
    teachers: dict[str, str | Teacher]

    def __post_init__(self) -> None:
        if not self.teachers or any(isinstance(teacher, SourceTeachers) for teacher in self.teachers.values()):
            raise ValueError(
                "SourceTeachers.teachers must have a teacher for each source, and no teacher may be a SourceTeachers; "
                f"got {self.teachers}"
            )
        for ability in ("sees_all", "gives_likeliest", "any_temperature"):  # of all of them
            object.__setattr__(self, ability, all(getattr(teacher, ability) for teacher in self.all))

    @property
    def all(self) -> list[Teacher]:
        """The teachers in their order."""
        return [as_teacher(teacher) for teacher in self.teachers.values()]

    def number_of(self, prompt: Prompt) -> int:
        """Number of the teacher for a prompt.

        Raises:
            ValueError: the prompt names no source, or one without a teacher.
        """
        name = prompt.metadata.get(self.key)
        if name not in self.teachers:
            raise ValueError(
                f"model.distillation.teacher has teachers for {self.key}={', '.join(self.teachers)}, but none for a "
                f"prompt with {self.key}={name}"
            )
        return list(self.teachers).index(name)

    def check(self, model: str) -> None:
        for teacher in self.all:
            teacher.check(model)

    def open(self, student: CausalPolicy, device: torch.device, mesh: DeviceMesh | None = None) -> OpenTeacher:
        opened: list[OpenTeacher] = []
        try:
            for teacher in self.all:
                opened.append(teacher.open(student, device, mesh))
        except BaseException:
            _OpenSourceTeachers(opened).close()
            raise
        return _OpenSourceTeachers(opened)


class _OpenSourceTeachers(OpenTeacher):
    def __init__(self, teachers: Sequence[OpenTeacher]) -> None:
        self._teachers = teachers

    def _parts(self, batch: RolloutBatch) -> Iterator[tuple[OpenTeacher, Int[Tensor, " n"], RolloutBatch]]:
        """Each teacher that has rows, their numbers, and their batch; collective ones without rows get a blank one."""
        if batch.source is None:
            raise SetupError(
                "the batch does not name the sources of its prompts. The callback WeightSync requests these: add "
                "WeightSync if it is missing"
            )
        for number, teacher in enumerate(self._teachers):
            rows = (batch.source == number).nonzero()[:, 0]
            if len(rows):
                yield teacher, rows, batch.select(rows, batch.input_ids.shape[1])
            elif teacher.is_collective:
                blank = batch.replace(loss_mask=torch.zeros_like(batch.loss_mask))
                yield teacher, rows, blank.select(rows.new_zeros(1), batch.input_ids.shape[1])

    def sampled(self, batch: RolloutBatch) -> Float[Tensor, "B T"]:
        found = torch.zeros_like(batch.behavior_logprobs)
        for teacher, rows, part in self._parts(batch):
            found[rows] = teacher.sampled(part)[: len(rows)].to(found.dtype)
        return found

    def likeliest(self, batch: RolloutBatch, num: int) -> Likeliest:
        ids = batch.input_ids.new_zeros(*batch.input_ids.shape, num)
        logprobs = batch.behavior_logprobs.new_zeros(ids.shape)
        for teacher, rows, part in self._parts(batch):
            chosen = teacher.likeliest(part, num)
            ids[rows] = chosen[0][: len(rows)]
            logprobs[rows] = chosen[1][: len(rows)].to(logprobs.dtype)
        return ids, logprobs

    def compare(self, batch: RolloutBatch, measure: Callable[[Tensor, Tensor], Tensor]) -> Compare:
        if not batch.loss_mask.any():  # padding
            compared_by_all = [teacher.compare(batch, measure) for teacher in self._teachers]  # some are collective
            return compared_by_all[0]
        owners = batch.loss_mask.new_zeros(batch.loss_mask.shape, dtype=torch.long)
        comparisons = []
        for number, (teacher, rows, part) in enumerate(self._parts(batch)):
            owners[rows] = number
            comparisons.append(teacher.compare(part, measure))
        owners = owners[batch.loss_mask]  # of the tokens that train, in the order of a forward pass
        places = torch.zeros_like(owners)
        for number in range(len(comparisons)):
            places[owners == number] = torch.arange(int((owners == number).sum()), device=places.device)

        def compared(student: Float[Tensor, "n V"], numbers: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
            found = student.new_zeros(len(student))
            for number, one in enumerate(comparisons):
                chosen = (owners[numbers] == number).nonzero()[:, 0]
                if len(chosen):
                    found = found.index_put((chosen,), one(student[chosen], places[numbers[chosen]]))
            return found

        return compared

    def close(self) -> None:
        for teacher in self._teachers:
            teacher.close()


def as_teacher(teacher: str | Teacher) -> Teacher:
    """A teacher; a name or folder is a model in the trainer's process."""
    return LocalTeacher(model=teacher) if isinstance(teacher, str) else teacher


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """Distills a teacher into the policy, on the policy's own rollouts.

    Example:
        ```python
        import lit_async_rl as rl

        distillation = rl.Distillation(teacher=rl.asset("sort_policy"), divergence="jsd", beta=0.5)
        ```

    Args:
        teacher: Hugging Face name or folder of a model in the trainer's process, or a `Teacher`.
        divergence: `reverse_kl`, `forward_kl` or `jsd`, see `lit_async_rl.losses.distillation`.
        beta: the teacher's share in the mixture of `jsd`.
        gradient: `analytic` or `sampled`, see above.
        importance_weights: whether the `sampled` gradient has the weight current / sampling policy.
        top_k: compares this many likeliest tokens of the teacher, and all others together; None is the whole
            vocabulary.
        coefficient: weight of the divergence, which is averaged over tokens as the policy loss is.
        with_reward: adds the divergence to the policy loss; otherwise rewards are only measured.

    Raises:
        ValueError: a setting is out of range, or has no effect.
    """

    teacher: str | Teacher
    divergence: Divergence = "reverse_kl"
    beta: float = 0.5
    gradient: Gradient = "analytic"
    importance_weights: bool = True
    top_k: int | None = None
    coefficient: float = 1.0
    with_reward: bool = False

    def __post_init__(self) -> None:
        check_choice("model.distillation", get_args(Divergence), divergence=self.divergence)
        check_choice("model.distillation", get_args(Gradient), gradient=self.gradient)
        check_range("model.distillation", "integer positive", top_k=self.top_k)
        check_range("model.distillation", "positive", coefficient=self.coefficient)
        if not 0 < self.beta < 1:
            raise ValueError(f"model.distillation.beta must be between 0 and 1, got {self.beta}")
        if self.gradient == "sampled" and (self.divergence != "reverse_kl" or self.top_k is not None):
            raise ValueError(
                f"model.distillation.gradient=sampled uses only the sampled token, so it cannot be combined with "
                f"{'divergence=' + self.divergence if self.divergence != 'reverse_kl' else f'top_k={self.top_k}'}: "
                "use gradient: analytic"
            )
        name = type(self.teacher).__name__
        if self.gradient == "analytic" and not self.source.gives_likeliest:
            raise ValueError(
                f"model.distillation.teacher={name} gives only the log-probabilities of sampled tokens: set "
                "model.distillation.gradient: sampled"
            )
        if self.gradient == "analytic" and self.top_k is None and not self.source.sees_all:
            raise ValueError(
                f"model.distillation.teacher={name} gives no distributions over the whole vocabulary: set "
                "model.distillation.top_k, or set model.distillation.gradient: sampled"
            )

    @property
    def source(self) -> Teacher:
        """The teacher as a `Teacher`."""
        return as_teacher(self.teacher)

    def measure(self, student: Float[Tensor, "*N V"], teacher: Float[Tensor, "*N V"]) -> Float[Tensor, "*N"]:
        """The divergence of distributions."""
        return divergence(self.divergence, student, teacher, beta=self.beta)


@dataclass
class Distiller:
    """A distillation with its teacher; `teacher` is None until a fit begins."""

    settings: Distillation
    teacher: OpenTeacher | None = None

    def check(self, student: CausalPolicy, model: str) -> None:
        """Checks that the teacher can teach this model; errors as of `Teacher.check`."""
        size = vocabulary_of(student)
        if self.settings.top_k is not None and self.settings.top_k >= size:
            raise ValueError(
                f"model.distillation.top_k={self.settings.top_k} must be less than the vocabulary size, {size}; "
                "with top_k=null, all tokens are compared"
            )
        self.settings.source.check(model)

    def open(self, student: CausalPolicy, device: torch.device, mesh: DeviceMesh | None = None) -> None:
        """Makes the teacher ready; arguments as of `Teacher.open`."""
        self.teacher = self.settings.source.open(student, device, mesh)

    def close(self) -> None:
        """Ends the teacher. Safe to call twice."""
        teacher = self.teacher
        self.teacher = None
        if teacher is not None:
            teacher.close()

    @property
    def ready(self) -> OpenTeacher:
        """The teacher.

        Raises:
            SetupError: no fit has begun.
        """
        if self.teacher is None:
            raise SetupError("the teacher was used before training had loaded it")
        return self.teacher

    def look(self, batch: RolloutBatch) -> TeacherView:
        """The teacher's side of the analytic gradient, before the student's forward pass."""
        settings = self.settings
        if settings.gradient == "sampled":
            return TeacherView()
        if settings.top_k is None:
            return TeacherView(compare=self.ready.compare(batch, settings.measure))
        ids, logprobs = self.ready.likeliest(batch, settings.top_k)
        return TeacherView(head_ids=ids, head_logprobs=logprobs)

    def of_head(self, student: Float[Tensor, "B T k"], view: TeacherView) -> Float[Tensor, "B T"]:
        """Divergence over the teacher's likeliest tokens and all others together."""
        if view.head_logprobs is None:
            raise SetupError(
                "the log-probabilities of the teacher's likeliest tokens are needed, but were not requested from the "
                "teacher"
            )
        return self.settings.measure(with_tail(student), with_tail(view.head_logprobs))

    def of_tokens(
        self, logprobs: Float[Tensor, "B T"], teacher: Float[Tensor, "B T"], batch: RolloutBatch
    ) -> Float[Tensor, "B T"]:
        """The sampled gradient, whose value estimates KL(student || teacher)."""
        behavior = batch.behavior_logprobs if self.settings.importance_weights else logprobs.detach()
        return reference_kl(
            "token",
            logprobs=logprobs,
            reference_logprobs=teacher,
            behavior_logprobs=behavior,
            loss_mask=batch.loss_mask,
            group_index=batch.group_index,
        )


@dataclass(frozen=True)
class TeacherView:
    """The teacher's side of the student's forward pass: a comparison, or further tokens to evaluate."""

    compare: Compare | None = None
    head_ids: Int[Tensor, "B T k"] | None = None
    head_logprobs: Float[Tensor, "B T k"] | None = None
