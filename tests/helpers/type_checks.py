"""Makes the type checker that runs within all tests cheap where arrays have no part: a fifth of their processor time.

`--jaxtyping-packages` decorates every function of the package with `jaxtyping.jaxtyped`, which binds the arguments of
each call, checks them, checks the result and checks the arguments again, for shapes that they share. Here beartype
checks arguments and result once, as strictly; where arrays are among them jaxtyping remembers their sizes meanwhile. Of
the counters in `CALLED_BY_THE_MILLION` only functions with arrays are checked.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, get_args, get_origin, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype

SHAPED = jaxtyping.jaxtyped
SHAPES = SHAPED("context")  # in which equal names of dimensions stand for equal sizes
CALLED_BY_THE_MILLION = {  # mypy checks their numbers
    "lit_async_rl.scheduling.admission",
    "lit_async_rl.simulation.latency",
    "lit_async_rl.simulation.virtual",
}
ONCE = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def jaxtyped(fn: Any = None, *, typechecker: Any) -> Any:
    """Takes the place of `jaxtyping.jaxtyped` in modules that its import hook loads."""
    if fn is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if isinstance(fn, classmethod | staticmethod):
        return type(fn)(jaxtyped(fn.__func__, typechecker=typechecker))
    if isinstance(fn, property):
        return property(*(f and jaxtyped(f, typechecker=typechecker) for f in (fn.fget, fn.fset, fn.fdel)))
    if inspect.isclass(fn):
        init = vars(fn).get("__init__")
        if dataclasses.is_dataclass(fn) and isinstance(init, types.FunctionType) and not hasattr(init, "__wrapped__"):
            fn.__init__ = jaxtyped(init, typechecker=typechecker)
        return fn
    if not isinstance(fn, types.FunctionType) or inspect.isgeneratorfunction(fn):
        return SHAPED(fn, typechecker=typechecker)
    hints = {name: _resolved(hint, fn) for name, hint in fn.__annotations__.items()}
    if not any(_has_shape(hint) for hint in hints.values()):
        return fn if fn.__module__ in CALLED_BY_THE_MILLION else _checked(fn, hints)
    if inspect.iscoroutinefunction(fn) or "{" in str(
        [*hints.values()]
    ):  # its body runs later; a size that is an argument's value
        return SHAPED(fn, typechecker=typechecker)
    return _with_shapes(_checked(fn, hints))


def _resolved(hint: Any, fn: types.FunctionType) -> Any:
    """The type that an annotation names; of one that cannot be known yet nothing is checked, as in jaxtyping."""
    try:
        return get_type_hints(types.SimpleNamespace(__annotations__={"hint": hint}), fn.__globals__, {}, True)["hint"]
    except Exception:
        return Any


def _has_shape(hint: Any) -> bool:
    if isinstance(hint, list | tuple):  # arguments of a Callable
        return any(_has_shape(part) for part in hint)
    if get_origin(hint) is None and isinstance(hint, type):  # in Python 3.10 list[int] is a type, too
        return issubclass(hint, jaxtyping.AbstractArray)
    return _has_shape(get_args(hint))


def _checked(fn: types.FunctionType, hints: dict[str, Any]) -> Callable[..., Any]:
    """The function with its arguments and result checked; to those who inspect it, it is the one that was written."""
    named = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    functools.update_wrapper(named, fn)
    named.__kwdefaults__ = fn.__kwdefaults__
    named.__annotations__ = hints
    return functools.update_wrapper(ONCE(named), fn)


def _with_shapes(checked: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(checked)
    def call(*arguments: Any, **named: Any) -> Any:
        with SHAPES:
            return checked(*arguments, **named)

    return call
