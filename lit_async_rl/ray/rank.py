"""The process of one rank: calls the command's job in its main thread, and ends with its worker."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from lit_async_rl.api.cluster import Place
from lit_async_rl.errors import EngineError, RankError, StalledError
from lit_async_rl.ray.runtime import NAMESPACE, connect
from lit_async_rl.ray.supervise import ANSWER_S, FINAL_STATUS, RESUME, RUN_ID
from lit_async_rl.runtime.threads import start_thread

PASSING_ERRORS = (RankError, StalledError, EngineError, ConnectionError)  # of other ranks and machines


def main() -> None:
    """Entry point for `supervise.py`; its settings are in the environment."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a local Ray blocks it in all that it starts
    start_thread(_end_with_the_worker, os.dup(0), name="worker")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    place = Place(
        num_local=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        resume_from=os.environ[RESUME] or None,
        tell_folder=lambda folder: _coordinator("tell_folder", folder),
        give=lambda result: _coordinator("give", result),
    )
    ray = connect(what="a trainer rank", asks_nodes=False)
    (job,) = _coordinator("job")
    call = ray.get(job, timeout=ANSWER_S)
    sys.argv[0] = sys.argv.pop(1)  # of the command: messages name it
    try:
        call(place)
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        print(end.code, file=sys.stderr, flush=True)
        sys.exit(_status(end.__context__))
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(_status(error))


def _status(error: BaseException | None) -> int:
    """1 if another start may help, and `FINAL_STATUS` if the error would come again."""
    is_of_torch = type(error).__module__.startswith("torch.distributed") or type(error) is RuntimeError
    return 1 if is_of_torch or isinstance(error, PASSING_ERRORS) else FINAL_STATUS


def _coordinator(method: str, *args: Any) -> Any:
    import ray

    actor = ray.get_actor(os.environ[RUN_ID], namespace=NAMESPACE)
    return ray.get(getattr(actor, method).remote(*args), timeout=ANSWER_S)


def _end_with_the_worker(pipe: int) -> None:
    """Ends this process with the worker, which holds the other end of stdin, whatever ended it."""
    while os.read(pipe, 1):
        pass
    os._exit(1)
