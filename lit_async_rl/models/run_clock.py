"""The time that chat templates get: that of a run's start, so that prompts do not change at midnight."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

_times: list[datetime] = []  # of the process: one run trains at a time, and its rewards and agents render, too


def use_run_time(time: datetime) -> None:
    """Lets all chat templates of this process render this time from now on."""
    _times[:] = [time]


def clock_options(template: str | Mapping[str, str] | None) -> dict[str, Any]:
    """Arguments that give a chat template the time of the run; none if it does not ask."""
    sources = template.values() if isinstance(template, Mapping) else [template or ""]
    if not any("strftime_now" in source for source in sources):
        return {}
    return {"strftime_now": (_times[0] if _times else datetime.now()).strftime}
