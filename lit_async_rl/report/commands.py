"""Commands that show a run: a report in one file, and a page that follows the run."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from pathlib import Path

from lit_async_rl.report.html import write_report
from lit_async_rl.report.run_data import RunData
from lit_async_rl.report.server import HOST, ReportServer
from lit_async_rl.runtime.spans import merge_traces, trace_files
from lit_async_rl.utils.checks import OneLineParser

PORT = 8765


def main(args: Sequence[str] | None = None) -> None:
    """Command line of the report command."""
    parser = OneLineParser(
        prog="lit-async-rl report", description="Writes a run, or two side by side, to one HTML file."
    )
    parser.add_argument("run", help="folder of the run, such as runs/quickstart/version_0")
    parser.add_argument("other", nargs="?", help="folder of a second run to compare with")
    parser.add_argument("--out", help="file to write (default: RUN/report.html)")
    parser.add_argument("--tape", help="folder of the run's rollout tape (default: RUN/tape)")
    parser.add_argument("--trace", help="also write the timeline of all ranks to this file, for ui.perfetto.dev")
    arguments = parser.parse_args(args)
    try:
        path = write_report(arguments.run, arguments.other, arguments.out or None, tape=arguments.tape)
        if arguments.trace is not None:
            merge_traces(trace_files(Path(arguments.run, "timeline")), Path(arguments.trace))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def watch(args: Sequence[str] | None = None) -> None:
    """Command line of the watch command."""
    parser = OneLineParser(
        prog="lit-async-rl watch",
        description="Serves a run's report on this machine and keeps it up to date; the run does not notice.",
    )
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--port", type=int, default=PORT, help="0 is any that is free (default: %(default)s)")
    parser.add_argument("--tape", help="folder of the run's rollout tape (default: RUN/tape)")
    arguments = parser.parse_args(args)
    if not 0 <= arguments.port < 2**16:
        sys.exit(f"error: --port must be between 0 and {2**16 - 1}, got {arguments.port}")
    try:
        server = ReportServer(RunData(arguments.run, arguments.tape), arguments.port)
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            sys.exit(f"error: --port {arguments.port} of {HOST} is in use: choose another, or 0 for any that is free")
        sys.exit(f"error: {error}")
    print(
        f"the report of {arguments.run} is at {server.address} (Ctrl-C closes the page; the run continues)", flush=True
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
