"""Exceptions raised at run time. Messages name the setting, its value and what to check."""


class StalledError(TimeoutError):
    """A wait timed out; the message names what was awaited, for how long, and the setting of the limit."""


class ProducerError(RuntimeError):
    """The rollout thread failed; its exception is the cause."""


class RewardError(RuntimeError):
    """A reward function raised, returned a value that is not a finite number, or timed out.

    Attributes:
        is_final: whether another try is of no use.
        ends_run: whether the run ends even where `data.scoring.tries` would skip the prompt.
    """

    is_final = False
    ends_run = False


class LostRewardError(RewardError):
    """The process that called a reward, or its machine, is gone, perhaps through no fault of the reward."""

    is_lost = True


class FinalRewardError(RewardError):
    """A reward that retries itself, such as a judge, has failed in all tries."""

    is_final = True


class RewardSetupError(FinalRewardError):
    """No call of a reward can succeed: its model cannot be loaded, its key is refused, or its budget is spent."""

    ends_run = True


class EnvironmentFailure(RuntimeError):
    """An environment raised an exception or timed out.

    Attributes:
        is_lost: whether its process is gone, perhaps through no fault of the environment.
        ends_run: whether no other try can succeed.
    """

    is_lost = False
    ends_run = False


class LostEnvironment(EnvironmentFailure):
    """The process of an environment's episode, or its machine, is gone."""

    is_lost = True


class EngineError(RuntimeError):
    """The engine failed and was stopped; the original exception is the cause."""


class CompletionError(EngineError):
    """An engine returned an invalid completion; the message names engine, request and field."""


class RankError(RuntimeError):
    """Another training process failed, stopped responding, or exited; the message names its rank."""


class NonFiniteError(RuntimeError):
    """Too many consecutive updates were dropped because their gradient had NaN or infinity."""


class LastCheckpointError(OSError):
    """The last checkpoint of a run was not written, because the disk is full; the message says which steps are lost.

    Attributes:
        trainer: of the ended run, whose `save_checkpoint` can still save elsewhere; None outside of Python runs.
    """

    trainer: object = None


class EngineDown(RuntimeError):
    """Internal: the engine hangs or failed and is to be restarted with weights from all ranks."""


class ProbeWanted(RuntimeError):
    """Internal: the engine asks for log-probabilities of the policy, which all ranks compute."""


def describe(error: BaseException) -> str:
    """Message of an exception, with its type where the message alone is unclear (`KeyError: 0`)."""
    message = str(error).strip()
    is_sentence = isinstance(error, (ValueError, OSError, RuntimeError)) and " " in message
    if is_sentence and not isinstance(error, UnicodeError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


class StalenessError(RuntimeError):
    """A token older than its staleness bound, or newer than the policy, reached the trainer."""


class StepError(RuntimeError):
    """An optimizer step does not consist of exactly its own micro-batches, each once."""


class SetupError(RuntimeError):
    """A component was used before its setup, or without another component that it needs."""


class UnsupportedModelError(ValueError):
    """The model's architecture is computed wrongly, or not at all; the message names it and what differs."""


class InvariantError(RuntimeError):
    """An internal invariant is violated; this is a bug, please report it."""
