"""Puts off imports of what a command does not use.

Half of the time of `import lightning` goes to optional parts of other libraries that nothing here uses: torchmetrics
imports all of its metrics, and with them transformers' models, scipy and matplotlib; transformers imports scikit-learn
and scipy's optimizers for one function each. `deferred_imports` puts these off until somebody asks for them. It is for
processes of the command line, whose libraries are nobody else's: `import lit_async_rl` changes no library.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

AGGREGATION = ("CatMetric", "MaxMetric", "MeanMetric", "MinMetric", "SumMetric")
TORCHMETRICS = {
    "__version__": "torchmetrics.__about__",
    "Metric": "torchmetrics.metric",
    "MetricCollection": "torchmetrics.collections",
    **dict.fromkeys(AGGREGATION, "torchmetrics.aggregation"),
}


def deferred_imports() -> None:
    """Puts off the imports that nothing here uses; modules that are imported already stay as they are."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    plot = {"_AX_TYPE": Any, "_PLOT_OUT_TYPE": Any}  # of annotations
    sys.meta_path.insert(
        0,
        _Finder(
            {
                "torchmetrics": _Deferred(
                    found_in=TORCHMETRICS,
                    first="torchmetrics.utilities",  # its modules import each other in a circle, which begins there
                    values={"_logger": logging.getLogger("torchmetrics")},
                ),
                "torchmetrics.utilities.plot": _Deferred(values=plot, functions=("plot_single_or_multi_val",)),
                "sklearn": _Deferred(),
                "sklearn.metrics": _Deferred(functions=("roc_curve",)),
                "scipy.optimize": _Deferred(functions=("linear_sum_assignment",)),
            }
        ),
    )


class _Deferred:
    """What can be had of a module before it is executed.

    Args:
        found_in: names, and the submodules that define them.
        first: submodule that is imported before any of these.
        values: names, and what they are until then.
        functions: names of functions; calling one executes the module.
    """

    def __init__(
        self,
        found_in: Mapping[str, str] | None = None,
        first: str | None = None,
        values: Mapping[str, Any] | None = None,
        functions: Sequence[str] = (),
    ) -> None:
        self.found_in = found_in or {}
        self.first = first
        self.values = values or {}
        self.functions = functions


class _Module(ModuleType):
    """A module that executes itself when a name is asked for that is not known yet."""

    def __getattr__(self, name: str) -> Any:
        loader: _Loader = self.__dict__["__loader__"]
        submodule = loader.deferred.found_in.get(name)
        if submodule is not None and not loader.is_executed:
            with contextlib.suppress(ImportError, AttributeError):  # in another release it is elsewhere
                if loader.deferred.first is not None and not name.startswith("__"):
                    importlib.import_module(loader.deferred.first)
                return getattr(importlib.import_module(submodule), name)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        loader.execute(self)
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None


class _Loader(importlib.abc.Loader):
    def __init__(self, real: Any, deferred: _Deferred) -> None:
        self.real = real
        self.deferred = deferred
        self.is_executed = False
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)  # `get_source` and the like

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.deferred.values)
        for name in self.deferred.functions:
            setattr(module, name, self._put_off(module, name))

    def execute(self, module: ModuleType) -> None:
        with self._lock:
            if self.is_executed:
                return
            self.is_executed = True  # a circle of imports sees the module as far as it is, as always
            for name in (*self.deferred.values, *self.deferred.functions):
                vars(module).pop(name, None)
            self.real.exec_module(module)

    def _put_off(self, module: ModuleType, name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            self.execute(module)
            return vars(module)[name](*args, **kwargs)

        return function


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, deferred: Mapping[str, _Deferred]) -> None:
        self.deferred = deferred

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.deferred:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.deferred[name])
        return spec
