"""Errors that a user can meet. Each message names the setting, its value and what to look at."""


class StalledError(TimeoutError):
    """A wait ran out of time: says who waited for what, for how long, and which setting bounds it."""


class ProducerError(RuntimeError):
    """The background thread died; its own error is the cause."""


class RewardError(RuntimeError):
    """A reward function raised, returned something that is no finite number, or did not return in time."""


class EnvironmentFailure(RuntimeError):
    """An environment raised, or did not answer in time."""


class EngineError(RuntimeError):
    """The engine broke and was stopped; what broke it is the cause."""


class RankError(RuntimeError):
    """Another process of the run failed, fell silent, or is gone; says which one, and why."""


class NonFiniteError(RuntimeError):
    """Too many updates in a row had a gradient with NaN or infinity, and were left out."""


class EngineDown(RuntimeError):
    """The engine hangs or broke; another is to take its place, with weights from all ranks. No user meets it."""


class StalenessError(RuntimeError):
    """A token older than its staleness bound, or newer than the policy, reached the trainer."""


class StepError(RuntimeError):
    """An optimizer step would not be made of exactly its micro-batches, each of them once."""


class SetupError(RuntimeError):
    """A part is used without another one that it needs, or before it was set up."""


class InvariantError(RuntimeError):
    """A promise that the library makes to itself is broken: a bug, please report it."""
