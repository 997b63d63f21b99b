"""The part of `mutants.py` that runs inside pytest (`-p mutants_plugin`).

With `LINES_OUT` set, which lines of the package each test runs, and how long each that passed has taken. With `LIMIT_S`
set, the session ends once its tests have taken so much processor time: what has not failed by then has not noticed.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest


class Limit:
    """Ends the session after `limit_s` of processor time, children counted, collection not."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.began_s = 0.0

    def pytest_collection_finish(self) -> None:
        self.began_s = self._spent_s()

    def pytest_runtest_logfinish(self) -> None:
        if self._spent_s() - self.began_s > self.limit_s:
            pytest.exit("the limit", returncode=0)

    @staticmethod
    def _spent_s() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in used)


class Lines:
    """Writes the lines of each test to `lines.<process>`, its seconds to `seconds.<process>.json`."""

    def __init__(self, out: Path, root: Path) -> None:
        import coverage  # no dependency of the project

        self.out = out
        folders = [str(root / folder / "*") for folder in ("lit_async_rl", "callbacks")]
        self.coverage = coverage.Coverage(
            data_file=str(out / "lines"), data_suffix=True, config_file=False, include=folders
        )
        self.coverage.start()
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        yield
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        passed = {name: round(s, 2) for name, s in self.seconds.items() if name not in self.failed}
        (self.out / f"seconds.{os.getpid()}.json").write_text(json.dumps(passed))


if "LINES_OUT" in os.environ:  # at import, before pytest imports the package
    _lines = Lines(Path(os.environ["LINES_OUT"]), root=Path(os.environ["LINES_ROOT"]))


def pytest_configure(config: pytest.Config) -> None:
    """Registers what the environment asks for."""
    if "LINES_OUT" in os.environ:
        config.pluginmanager.register(_lines)
    if "LIMIT_S" in os.environ:
        config.pluginmanager.register(Limit(float(os.environ["LIMIT_S"])))
