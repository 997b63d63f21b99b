"""Quick tests run the package with its annotations checked: the types of nearly every function, and all shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float
from type_checks import jaxtyped

from lit_async_rl.tasks.splits import is_held_out
from lit_async_rl.types import SamplingParams

Row = Float[torch.Tensor, "n"]


def test_the_package_is_checked():
    with pytest.raises(jaxtyping.TypeCheckError, match="is_held_out"):
        is_held_out(3)
    with pytest.raises(jaxtyping.TypeCheckError, match="max_tokens"):
        SamplingParams(max_tokens="3")  # dataclasses, too
    with pytest.raises(TypeError, match="unexpected keyword argument 'n'"):
        is_held_out("a", n=3)


@jaxtyped(typechecker=beartype)
@dataclass
class Checked:
    size: int

    @jaxtyped(typechecker=beartype)
    def text(self, *numbers: int, to: str | None = None) -> str:
        return to or numbers[0]

    @staticmethod
    @jaxtyped(typechecker=beartype)
    def later(value: NotThereYet | int) -> NotThereYet | int:
        return value

    @jaxtyped(typechecker=beartype)
    @classmethod
    def up_to(cls, size: int) -> Iterator[int]:
        yield from range(size)

    @property
    @jaxtyped(typechecker=beartype)
    def half(self) -> int:
        return self.size / 2


NotThereYet = str


def test_what_has_no_shapes_is_checked_and_looks_as_it_was_written():
    one = Checked(3)
    assert one.text(1, to="a") == "a"
    assert Checked.later(2.5) == 2.5  # what cannot be known when a function is defined is not checked, as in jaxtyping
    assert list(one.up_to(2)) == [0, 1]
    wrong = [lambda: one.text("1", to="a"), lambda: one.text(1, to=2), lambda: one.text(1), lambda: one.half]
    for call in [*wrong, lambda: Checked("3"), lambda: one.up_to("2")]:
        with pytest.raises(jaxtyping.TypeCheckError):
            call()
    assert inspect.signature(Checked.text).parameters["to"].annotation == "str | None"
    assert "to or numbers[0]" in inspect.getsource(Checked.text)


@jaxtyped(typechecker=beartype)
def added(left: Row, right: Row | None, use: Callable[[Row], int] = len) -> Row:
    return left if right is None else torch.cat([left, right])


def test_shapes_that_arguments_and_result_share_are_compared():
    assert len(added(torch.ones(2), None)) == 2
    for right in (torch.ones(3), torch.ones(2)):  # not of one length; not the result's
        with pytest.raises(jaxtyping.TypeCheckError):
            added(torch.ones(2), right)
