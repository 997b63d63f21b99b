"""Files of a run's timeline: one JSON event a line, in the array format of Chrome's Trace Events.

The format needs no closing bracket, and none is written: a file is whole after every line, whenever its run is killed,
and a run that is resumed goes on in it. Perfetto (ui.perfetto.dev) and chrome://tracing open it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from lit_async_rl.utils.files import append, tolerate_full_disk
from lit_async_rl.utils.spans import Event, Spans

HEAD = "[\n"
encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make an encoder for each event


class TraceWriter:
    """Appends what `spans` collects to a file, in a thread of its own.

    Args:
        path: of the file; goes on in one that is there.
        spans: to write.
        flush_s: seconds between two writes.

    Attributes:
        num_bytes: length of the file.
    """

    def __init__(self, path: Path, spans: Spans, flush_s: float) -> None:
        self.path, self._spans, self._flush_s = path, spans, flush_s
        self.num_bytes = _mend(path)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Writes the rest and ends the thread."""
        self._is_ending.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._is_ending.wait(self._flush_s):
            self._write(self._spans.take())
        self._write(self._spans.take(all_of_it=True))

    def _write(self, events: Sequence[Event]) -> None:
        if events:
            text = "".join(f"{encode(event)},\n" for event in events)
            with tolerate_full_disk(str(self.path)):
                append(self.path, text)
                self.num_bytes += len(text)


def read_trace(path: Path) -> list[Event]:
    """Events of a file; a last line that was cut off is left out.

    Raises:
        OSError: it cannot be read.
    """
    events = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line.strip().rstrip(",]"))
            except ValueError:  # the bracket, or a line that was cut off
                continue
            if isinstance(event, dict):
                events.append(event)
    return events


def trace_files(folder: Path) -> list[Path]:
    """Files of a run's timeline, one per rank."""
    return sorted(folder.glob("rank*.json"))


def merge_traces(paths: Iterable[Path], out: Path) -> None:
    """Writes the events of several ranks into one file, a JSON array that any reader takes.

    Raises:
        ValueError: there are no files.
        OSError: one cannot be read or written.
    """
    if not (paths := list(paths)):
        raise ValueError("there is no timeline: the run has no files timeline/rank*.json")
    events = [event for path in paths for event in read_trace(path)]
    lines = ",\n".join(map(encode, events))
    out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _mend(path: Path) -> int:
    """Begins a file, or removes a line that was cut off from one that is there; returns its length."""
    if not path.exists() or path.stat().st_size < len(HEAD):
        path.write_text(HEAD)
        return len(HEAD)
    with path.open("rb+") as file:
        size = end = file.seek(0, 2)
        while end > len(HEAD):
            begin = max(0, end - 4096)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
        if end < size:
            file.truncate(max(end, len(HEAD)))
        return max(end, len(HEAD))
