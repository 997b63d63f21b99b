"""Jobs of trainer ranks on Ray in tests, in place of training. Each runs in its own process."""

import os
import signal
import sys
import time
from pathlib import Path

RANK = int(os.environ.get("RANK", "0"))


def fail(place):
    """A mistake of its own on one rank, which the other notices."""
    from lit_async_rl.errors import RankError

    if RANK == 1:
        raise ValueError("data.max_staleness must be >= 0, got -1")
    time.sleep(0.3)
    raise RankError("rank 1 failed")


def die(place):
    print("about to die", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(folder, place):
    """A rank that the first Ctrl-C does not end, because it saves for long, say."""
    signal.signal(signal.SIGINT, lambda *_: Path(folder, f"told_{RANK}").touch())
    Path(folder, f"pid_{RANK}").write_text(str(os.getpid()))
    time.sleep(600)


def set_up_engines(model, end, place):
    """A replica, which it leaves to the next start, or to the command."""
    from lit_async_rl.engines.embedded.engine import EmbeddedEngine
    from lit_async_rl.ray.engine import RayEngine

    engine = RayEngine(EmbeddedEngine(num_slots=4, device="cpu"), replicas=1, num_cpus=0.1)
    engine.setup(model)
    place.give(engine.pids)
    if end == "raises":
        raise ValueError("the reward is wrong")
    engine.close()


def save_when_told(folder, place):
    """Ends when it is told to; started again, it finds what it has saved."""
    saved = Path(folder, "last.ckpt")
    if place.resume_from is not None:
        place.give(place.resume_from)
        return
    place.tell_folder(folder)

    def save(*_):
        saved.write_text("")
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
    Path(folder, "worker").write_text(str(os.getppid()))
    Path(folder, "ready").touch()
    time.sleep(600)
    raise ValueError("nobody told it")
