"""A context manager that episodes share is entered once, and left by the task that has entered it."""

import asyncio

import pytest

from lit_async_rl.runtime.shared_context import SharedContext


class Service:
    """A context manager that must be left by the task that has entered it."""

    def __init__(self, error=None, hangs=False):
        self.error = error
        self.hangs = hangs
        self.log = []

    async def __aenter__(self):
        self.task = asyncio.current_task()
        self.log.append("enters")
        await asyncio.sleep(0.01)
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return self

    async def __aexit__(self, *_):
        assert self.task is asyncio.current_task()
        self.log.append("leaves")


def shared_context(*services):
    left = list(services)
    return SharedContext("the service", lambda: left.pop(0), start_timeout_s=0.2 if services[0].hangs else 30.0)


def test_a_service_is_entered_once_by_many_and_left_by_its_own_task():
    async def use():
        service = Service()
        shared = shared_context(service, Service())
        assert set(await asyncio.gather(*[shared.get() for _ in range(5)])) == {service}
        cancelled = asyncio.ensure_future(shared.get())
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert await shared.get() is service
        await shared.close()
        await shared.close()
        assert service.log == ["enters", "leaves"]
        again = await shared.get()
        assert again is not service
        await shared.discard(service)  # that one is gone already
        assert again.log == ["enters"]
        await shared.discard(again)
        assert again.log == ["enters", "leaves"]

    asyncio.run(use())


def test_a_service_is_started_before_its_first_use_and_not_for_one_that_has_ended():
    async def use():
        services = [Service(), Service(), Service()]
        shared = shared_context(*services)
        await asyncio.gather(shared.start(), shared.start())
        assert await shared.get() is services[0]
        await shared.discard(services[0])
        await shared.start()  # the next one that needs it finds out what is wrong
        assert not services[1].log
        assert await shared.get() is services[1]
        await shared.close()
        await shared.start()
        assert services[2].log == ["enters"]
        await shared.close()

    asyncio.run(use())


def test_a_service_that_fails_or_hangs_at_its_start_tells_everybody_and_may_be_tried_again():
    async def fail():
        shared = shared_context(Service(error=OSError("no disk")), Service())
        found = await asyncio.gather(*[shared.get() for _ in range(3)], return_exceptions=True)
        assert [str(error) for error in found] == ["no disk"] * 3
        assert isinstance(await shared.get(), Service)
        await shared.close()

    async def hang():
        service = Service(hangs=True)
        with pytest.raises(TimeoutError, match=r"the service did not start within 0\.2 s"):
            await shared_context(service).get()
        assert service.task.cancelled() or service.task.done()

    asyncio.run(fail())
    asyncio.run(hang())
