"""Barrier updates of the embedded engine that wait for its samples: for how long, and who ends the wait."""

import threading
import time

import pytest
from replays import collect, own_engine, requests_of
from tiny_models import tiny_gpt2, tiny_qwen3

from lit_async_rl.errors import StalledError


def engine_without_room(lm, tmp_path, **settings):
    """A completion runs, and as many updates wait for it as may."""
    engine = own_engine(lm, tmp_path, in_flight_weight_updates=False, **settings)
    engine.submit(requests_of([4]))
    engine.load_weights(1, lm.named_parameters())
    engine.load_weights(2, lm.named_parameters())
    return engine


def test_updates_that_nobody_uses_do_not_pile_up(tmp_path):
    lm = tiny_qwen3()
    engine = engine_without_room(lm, tmp_path, update_timeout_s=0.2)
    with pytest.raises(StalledError, match=r"update_timeout_s=0\.2"):
        engine.load_weights(3, lm.named_parameters())
    collect(engine, 3)
    engine.poll(0.0)
    engine.load_weights(3, lm.named_parameters())


def test_an_update_waits_for_room_and_goes_on_when_there_is(tmp_path):
    lm = tiny_qwen3()
    engine = engine_without_room(lm, tmp_path)
    thread = threading.Thread(target=engine.load_weights, args=(3, lm.named_parameters()))
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    collect(engine, 3)
    engine.poll(0.0)
    thread.join(10)
    assert not thread.is_alive()


def test_an_engine_that_broke_lets_nobody_wait(tmp_path):
    lm = tiny_gpt2()
    engine = engine_without_room(lm, tmp_path)

    def out_of_memory(*args):
        raise MemoryError("no memory left")

    engine.engine.slots.lm.transformer.register_forward_pre_hook(out_of_memory)
    with pytest.raises(MemoryError, match="no memory left"):
        engine.poll(1.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="no memory left"):
        engine.load_weights(3, lm.named_parameters())
    assert time.monotonic() - began < 5.0


def test_a_closed_engine_lets_nobody_wait(tmp_path):
    lm = tiny_qwen3()
    engine = engine_without_room(lm, tmp_path)
    ends: list[BaseException | None] = []

    def load() -> None:
        try:
            engine.load_weights(3, lm.named_parameters())
            ends.append(None)
        except Exception as error:  # that it was closed, if it gets so far
            ends.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    engine.close()
    thread.join(30)
    assert len(ends) == 1
    assert not isinstance(ends[0], StalledError)
