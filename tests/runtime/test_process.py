"""Messages between processes: what arrives, what is refused, and what ends a wait."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from processes import wait_for_the_end_of

from lit_async_rl.runtime.process import Channel, Child, ChildEnded, InvalidMessage, end_reason, packed

ECHO = """
import os, sys
from lit_async_rl.runtime.process import Channel
parent = Channel.of_parent()
print("printed", sys.stdin.read() == "", flush=True)
while (message := parent.receive()) is not None:
    fields, blob = message
    parent.send(fields | {"pid": os.getpid(), "session": os.getsid(0)}, blob[::-1])
"""


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_arrive_as_they_were_sent_and_in_order(ends):
    here, there = map(Channel, ends)
    big = os.urandom(5 * 2**20)  # more than the kernel keeps
    sending = threading.Thread(target=lambda: [here.send({"x": [1, None, 0.1]}), here.send({}, big), here.close()])
    sending.start()
    assert there.receive() == ({"x": [1, None, 0.1]}, b"")
    assert there.receive() == ({}, big)
    sending.join()
    assert there.receive() is None


@pytest.mark.parametrize("said", [b"", packed({"x": 1})[:-1], packed({"x": 1}, b"12")[:-1], b"\0" * 15])
def test_half_a_message_is_the_end_if_no_more_comes_and_late_if_nothing_ends(said, ends):
    ours, theirs = ends
    theirs.sendall(said)
    with pytest.raises(TimeoutError):
        Channel(ours).receive(time.monotonic() + 0.05)
    theirs.close()
    assert Channel(ours).receive() is None


@pytest.mark.parametrize(
    "said",
    [
        (2**63).to_bytes(8, "big") + bytes(8),
        bytes(8) + (1001).to_bytes(8, "big"),
        (1000).to_bytes(8, "big") + (1).to_bytes(8, "big"),
        (2).to_bytes(8, "big") + bytes(8) + b"[]",
        (2).to_bytes(8, "big") + bytes(8) + b"\xff\xff",
        (900).to_bytes(8, "big") + bytes(8) + b"[" * 900,
    ],
)
def test_what_is_no_message_is_refused_without_a_wait_for_the_rest(said, ends):
    ours, theirs = ends
    theirs.sendall(said)
    with pytest.raises(InvalidMessage):
        Channel(ours, max_bytes=1000).receive()


def test_who_does_not_read_is_not_waited_for(ends):
    channel = Channel(ends[0])
    with pytest.raises(TimeoutError):
        channel.send({}, bytes(2**24), time.monotonic() + 0.1)
    channel.close()
    assert channel.receive() is None
    with pytest.raises(ConnectionError):
        channel.send({})


def test_an_end_that_closes_wakes_the_thread_that_receives(ends):
    channel = Channel(ends[0])
    found = []
    receiving = threading.Thread(target=lambda: found.append(channel.receive()))
    receiving.start()
    time.sleep(0.05)
    channel.close()
    receiving.join(10)
    assert found == [None]


def test_a_message_sent_before_the_end_is_received_while_another_process_holds_the_connection(ends):
    ours, theirs = ends
    Channel(theirs).send({"last": True})
    channel = Channel(ours, has_ended=lambda: True)
    assert channel.receive() == ({"last": True}, b"")
    assert channel.receive() is None, "nobody has closed it"
    assert select.select([ours], [], [], 0)[0] == []


def test_a_child_answers_and_ends(capfd):
    child = Child([sys.executable, "-c", ECHO], name="echo")
    fields, blob = child.ask("a", time.monotonic() + 60, {"b": 2}, b"123")
    assert fields["session"] == fields["pid"] == child.pid
    assert {name: fields[name] for name in ("kind", "call", "b")} == {"kind": "a", "call": 1, "b": 2}
    assert blob == b"321"
    assert "printed True" in capfd.readouterr().err
    heard = []
    ended = threading.Event()

    def take(message):
        heard.append(message)
        if message is None:
            ended.set()

    child.listen(take, "listens")
    child.send({"x": 1})
    while not heard:
        time.sleep(0.01)
    assert child.status() is None
    os.kill(child.pid, signal.SIGKILL)
    assert ended.wait(30)
    assert child.status(30.0) == -signal.SIGKILL
    assert heard[0][0]["x"] == 1
    assert heard[1] is None
    child.end()
    child.end()
    with pytest.raises(ChildEnded, match="echo"):
        child.ask("a", time.monotonic() + 1)


def test_a_child_ends_by_itself_or_with_its_guard():
    child = Child([sys.executable, "-c", ECHO], name="echo", is_guarded=True)
    fields, _ = child.ask("a", time.monotonic() + 60)
    assert fields["pid"] != child.pid, "its guard stands between"
    child.end()
    wait_for_the_end_of(fields["pid"], child.pid)
    alone = Child([sys.executable, "-c", ECHO], name="echo")
    alone.ask("a", time.monotonic() + 60)
    alone.end(patience_s=30.0)
    assert alone.status() == 0


def test_a_child_outlives_the_thread_that_has_started_it():
    started = []
    program = "import time\nfrom lit_async_rl.runtime.lifetime import die_with_parent\nimport os\n"
    program += f"assert die_with_parent({os.getpid()})\n" + ECHO

    def start():
        started.append(Child([sys.executable, "-c", program], name="echo"))
        started[0].ask("a", time.monotonic() + 60)

    starting = threading.Thread(target=start)
    starting.start()
    starting.join()
    (child,) = started
    assert child.status(0.1) is None
    child.ask("a", time.monotonic() + 60)
    child.end()


def test_a_fork_of_its_parent_does_not_end_it():
    code = f"""
import os, sys, time
from lit_async_rl.runtime.process import Child
child = Child([sys.executable, "-c", {ECHO!r}], name="echo")
child.ask("a", time.monotonic() + 60)
if not os.fork():
    sys.exit()  # which finalizes what it has of the parent
os.wait()
child.ask("a", time.monotonic() + 60)
if not os.fork():
    other = Child([sys.executable, "-c", {ECHO!r}], name="echo")
    other.ask("a", time.monotonic() + 60)
    sys.exit()
assert os.wait()[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_reasons_of_ends():
    assert end_reason(3) == "status 3"
    assert end_reason(-9) == "SIGKILL"
    assert end_reason(-40) == "signal 40"


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        Child(["no-such-program"], name="nothing")


def test_numbers_that_json_has_not_arrive_too(ends):
    here, there = map(Channel, ends)
    here.send({"x": [float("nan"), float("-inf")]})
    fields, _ = there.receive()
    assert json.dumps(fields) == '{"x": [NaN, -Infinity]}'
