"""Checkpoint state of the producer: every group admitted and not trained on.

Tensors, numbers and strings, which load without pickle. `docs/checkpoints.md` lists the settings that a resume may
change.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.prompts.stream import PromptStream, rewarded_by
from lit_async_rl.rollouts.engine_listener import EngineListener
from lit_async_rl.rollouts.group_book import GroupEntry, GroupState, pack_groups, unpack_groups, unpack_prompts
from lit_async_rl.rollouts.producer import ENVIRONMENT, FILTERS, REWARD, Producer
from lit_async_rl.types import Completion
from lit_async_rl.utils.identity import UNKNOWN, digest_of, is_comparable, without_code

START_ANEW = "Start a new run from its weights instead (scripts/export.py)."
SEED = "data.seed"
NUM_PROMPTS = "number of data.prompts"
SHUFFLE = "data.shuffle"
VOCABULARY = "the digest of the tokenizer's vocabulary"
FORMAT = 1  # of the state of `save_producer`; raised when entries change their meaning
log = logging.getLogger(__name__)


def save_producer(producer: Producer, step_is_done: bool) -> dict[str, Any]:
    """State of a producer; called in the trainer's thread.

    With in-order admission (`FixedLag`), waits until every admitted group is finished, because its version is not
    available after a resume; at most `rollout_timeout_s` may pass without progress. Otherwise it saves, without
    waiting, the partial completions that the engine reports.

    The next `take` handles an engine that hangs or fails here; a resume samples unfinished groups again.

    Args:
        producer: started.
        step_is_done: whether the groups handed out last were trained on; else they are saved, too.

    Raises:
        StalledError: scoring hangs.
        ProducerError: a background thread died while waiting.
    """
    # Before the lock is taken, because it may take long. A sample that finishes meanwhile replaces its partial one.
    partials, random_state = _ask_engine(producer)
    with producer.changed:  # one moment: admission, groups and position in the stream must agree
        if step_is_done:
            producer.begin_step()
        num_given_back = len(producer.book.in_state(GroupState.TAKEN))
        groups = producer.book.save(producer.admission.deadlines, partials)
        return {
            "format": FORMAT,
            "settings": _settings(producer) | {_OWN_ANSWERS: _answers_of(groups)},
            "admission": producer.admission.state_dict(num_given_back),
            "groups": pack_groups(groups),
            "position": producer.stream.position,
            "again": list(producer.again),
            "pass_rates": producer.intake.pass_rates.state_dict(),
            "successes": producer.intake.successes,
            "success_reward": producer.intake.success.threshold,
            "random_state": {} if random_state is None else {"engine": random_state},
            **({} if producer.intake.arrived is None else {"arrived": dict(producer.intake.arrived)}),
            **({} if producer.last_valid is None else {"last_valid": producer.last_valid}),
        }


def _ask_engine(producer: Producer) -> tuple[list[Completion], Tensor | None]:
    """Partial completions and random state, after the wait; empty if the engine cannot provide them."""
    listener = producer.listener
    with producer.changed:
        producer.finish_in_order()
    if not listener.is_working:
        if producer.admission.in_order and listener.engine_error is None:
            log.warning(
                "this checkpoint was saved after the engine had closed. A run that resumes from it will not repeat bit "
                "for bit: the engine's random state is missing, and %d unfinished groups will be sampled with newer "
                "weights",
                len(producer.book.unfinished),
            )
        return [], None
    partials = listener.partial_completions()
    random_state = listener.random_state()
    return (partials, random_state) if listener.engine_error is None else ([], None)


def is_producer_state(value: Any) -> bool:
    """Whether `save_producer`, in any format, made a checkpoint entry."""
    return isinstance(value, Mapping) and {"format", "settings", "admission", "groups", "position"} <= value.keys()


def check_prompts(state: Mapping[str, Any], stream: PromptStream, codec: TextCodec) -> None:
    """Checks that a run has the prompts of a saved state, in its order and with its tokens.

    Raises:
        ValueError: it has not, or another version of this library saved the checkpoint.
    """
    _check_format(state)
    _check_order_settings(state["settings"], _order_settings(stream, codec))
    for position, token_ids in unpack_prompts(state["groups"]):
        prompt = stream.at(position)
        if codec.encode(prompt) != token_ids:
            raise ValueError(
                f"data.prompts: prompt {position} of the run is {prompt.text[:80]!r}, other tokens than in the "
                "checkpoint: data.prompts, the tokenizer or its chat template has changed. " + START_ANEW
            )


def _order_settings(stream: PromptStream, codec: TextCodec) -> dict[str, Any]:
    return {
        SEED: stream.seed,
        NUM_PROMPTS: len(stream.source),
        SHUFFLE: stream.shuffle,
        VOCABULARY: codec.vocabulary_digest,
    }


def _check_format(state: Mapping[str, Any]) -> None:
    if (found := state.get("format")) != FORMAT:
        raise ValueError(f"the checkpoint holds rollouts in format {found}, this version reads {FORMAT}. " + START_ANEW)


def _check_order_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    older = {SEED: saved.get("data.intake.seed"), SHUFFLE: now[SHUFFLE]}  # its former name, and what was not saved
    for name in (SEED, NUM_PROMPTS, SHUFFLE):
        before = saved.get(name, older.get(name))
        if before != now[name]:
            raise ValueError(
                f"{name} is {now[name]}, and was {before} when the checkpoint was saved: the order of prompts "
                "could not go on. " + START_ANEW
            )
    before = saved.get(VOCABULARY, now[VOCABULARY])  # older checkpoints do not have it
    if before != now[VOCABULARY]:
        raise ValueError(
            f"{VOCABULARY} is {now[VOCABULARY]}, and was {before} when the checkpoint was saved: the tokens of its "
            "rollouts would have another meaning. " + START_ANEW
        )


def restore_producer(producer: Producer, state: Mapping[str, Any]) -> bool:
    """Restores a state; call it before `producer.start`, with an engine that has its weights.

    Returns:
        True if all groups of the checkpoint are sampled again, because settings changed.

    Raises:
        ValueError: see `check_prompts`.
    """
    check_prompts(state, producer.stream, producer.book.codec)
    now = _settings(producer)
    saved = unpack_groups(state["groups"], producer.stream.at)
    now[_OWN_ANSWERS] = _answers_of(saved)
    changed, has_new_rewards = _changed_settings(state["settings"], now, producer.scorer.keeps_rewards)
    deadlines = {group.index: group.deadline for group in saved}
    kept = producer.admission.restore(state["admission"], {} if changed else deadlines)
    again = [group.position for group in saved if group.index not in kept]
    if again:
        why = "; ".join(changed) or "data.max_staleness and data.admission allow less than in the checkpoint"
        log.warning("resume: %s, so %d groups of the checkpoint are sampled again", why, len(again))
    num_finished = sum(group.state is GroupState.FINISHED for group in saved if group.index in kept)
    log.warning(
        "resumed: %d finished groups are kept, %d unfinished groups continue", num_finished, len(kept) - num_finished
    )
    producer.stream.position = state["position"]
    producer.again = deque([*again, *state["again"]])
    threshold = producer.intake.success.threshold
    if has_new_rewards or state.get("success_reward", threshold) != threshold:
        log.warning(
            "resume: the pass rates of prompts are measured again, because the rewards or the success threshold may "
            "have changed"
        )
    else:
        producer.intake.restore(state["pass_rates"], state.get("successes", {}))
    if producer.intake.arrived is not None and not has_new_rewards:
        producer.intake.arrived = dict(state.get("arrived", {}))
    producer.last_valid = state.get("last_valid")
    if state["random_state"]:
        _restore_random_state(producer.listener, state["random_state"]["engine"].cpu())
    _file(producer, [group for group in saved if group.index in kept])
    return bool(changed)


def _restore_random_state(listener: EngineListener, saved: Tensor) -> None:
    """Restores the engine's random state, unless another engine or kind of device saved it."""
    own = listener.random_state()
    if listener.engine_error is None and (own is None or own.shape != saved.shape):
        log.warning(
            "resume: data.engine=%s cannot restore the random state in the checkpoint, because a different engine or "
            "kind of device saved this state; the engine starts from a fresh random state",
            type(listener.engine).__name__,
        )
        return
    listener.set_random_state(saved)


def _file(producer: Producer, groups: list[GroupEntry]) -> None:
    """Moves each group to its former state: finished, to be scored, or to be sampled."""
    requests = []
    for group in groups:
        requests += producer.book.restore(group)
        if group.state is GroupState.FINISHED:
            producer.admission.finish(group.index)
            continue
        for sample in list(group.rollouts):
            producer.score(group, sample)
    producer.listener.submit(requests)


_IDENTITIES = REWARD, ENVIRONMENT, FILTERS
_ANSWERS = "the digest of the answers of data.prompts"
# The digest above is of a sample if there are many prompts; this one is of what the saved rewards were given for.
_OWN_ANSWERS = "the digest of the answers of the checkpoint's groups"
_REWARD_SETTINGS = *_IDENTITIES, "data.scoring.special_tokens", _ANSWERS, _OWN_ANSWERS
# Of sampling: settings that older checkpoints do not have.
_LATER_SETTINGS = {"stop": (), "head": None, "experts": False, "end_token_ids": None}


def _settings(producer: Producer) -> dict[str, Any]:
    usable = producer.stream.usable
    return {
        **_order_settings(producer.stream, producer.book.codec),
        "data.group_size": producer.book.group_size,
        "data.sampling": asdict(producer.book.sampling),
        "data.scoring.special_tokens": producer.book.codec.special_tokens,
        **producer.identities,
        _ANSWERS: None if usable is None else usable.answers_digest,
    }


def _answers_of(groups: Sequence[GroupEntry]) -> str:
    digest = hashlib.sha256()
    for group in groups:
        digest.update(rewarded_by(group.prompt, digest_of).encode())
    return digest.hexdigest()[:16]


def _changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any], keeps_rewards: bool) -> tuple[list[str], bool]:
    """Settings that differ, with both values, and whether they make saved rewards invalid.

    With `keeps_rewards`, those that rewards depend on are logged, and not returned.
    """
    saved = {"data.seed" if name == "data.intake.seed" else name: value for name, value in saved.items()}  # as it was
    before = _flat(saved)
    after = _flat(now)
    later = ENVIRONMENT, FILTERS, _ANSWERS, _OWN_ANSWERS, SHUFFLE, VOCABULARY
    unknown = {name for name in later if name not in saved}  # to older checkpoints
    if saved.get(_ANSWERS) is None or now[_ANSWERS] is None:
        unknown.add(_ANSWERS)
    found = {
        name: _changed(name, value, before.get(name))
        for name, value in after.items()
        if name not in unknown and not _is_same(name, value, before.get(name))
    }
    of_rewards = [name for name in _REWARD_SETTINGS if name in found]
    if of_rewards and keeps_rewards:
        kept = "; ".join(found.pop(name) for name in of_rewards)
        log.warning(
            "resume: the rewards may have changed (%s), but saved rewards are kept (data.scoring.resume_rewards: keep)",
            kept,
        )
    return list(found.values()), bool(of_rewards) and not keeps_rewards


def _is_same(name: str, value: Any, before: Any) -> bool:
    """Whether a setting is as it was; identities in older checkpoints ignore code."""
    if not is_comparable(value):
        return False
    if name in _IDENTITIES and before == without_code(before):
        return bool(without_code(value) == before)
    return bool(before == value)


def _changed(name: str, value: Any, before: Any) -> str:
    if not is_comparable(value):
        identity, _, unknown = value.partition(UNKNOWN)
        return f"{name}, {without_code(identity)}, cannot be compared with that of the checkpoint for its {unknown}"
    if name in _IDENTITIES and without_code(value) == without_code(before):
        return f"the code of {name}, {without_code(value)}, or a value that it refers to, has changed"
    return f"{name} is {value!r} and was {before!r}"


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    sampling = _LATER_SETTINGS | dict(settings["data.sampling"])
    rest = {name: value for name, value in settings.items() if name != "data.sampling"}
    rest = {"data.scoring.special_tokens": "none"} | rest  # what rewards got before it was a setting
    return rest | {f"data.sampling.{name}": value for name, value in sampling.items()}
