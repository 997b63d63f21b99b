"""Lists engines that runs with `keep_engines` have left on a Ray cluster, and ends them.

    python -m lit_async_rl.cli.kept_engines --address auto          # says which there are
    python -m lit_async_rl.cli.kept_engines --address auto --end

Those that a run uses at the moment are among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from lit_async_rl.cli.error_report import one_line_errors
from lit_async_rl.ray import runtime
from lit_async_rl.ray.residence import KEPT, end_replicas, names_with
from lit_async_rl.utils.checks import OneLineParser


def main(args: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = OneLineParser(description="Lists or ends engines that were kept on a Ray cluster.")
    parser.add_argument("--address", default="auto", help="of the cluster: auto or HOST:PORT")
    parser.add_argument("--end", action="store_true", help="end them, those in use as well")
    given = parser.parse_args(args)
    with one_line_errors():
        ray = runtime.connect(given.address, what="kept_engines")
        names = names_with(ray, KEPT)
        if given.end:
            print(f"ended {end_replicas(ray, names)} engines")
        else:
            print("\n".join(names) or "no engines were kept")


if __name__ == "__main__":
    main()
