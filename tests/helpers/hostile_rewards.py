"""Reward functions that break out, or try to; each does it for the completion that names it."""

import json
import os
import signal
import struct
import subprocess
import sys
import time


class Crafted:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


class CraftedNumber(float):
    """The same, in disguise."""

    def __reduce__(self):
        return os.system, (os.environ["HOSTILE_COMMAND"],)


def spin() -> None:
    while True:
        pass


def connections() -> list[int]:
    """Those of the child's open files that are sockets: the one to the parent."""
    return [fd for fd in range(3, 20) if os.path.exists(f"/proc/self/fd/{fd}") and _is_socket(fd)]


def _is_socket(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")


def send(data: bytes) -> None:
    for fd in connections():
        os.write(fd, data)


def send_message(text: bytes) -> None:
    """Sends a text that may be no JSON, behind its length."""
    send(struct.pack(">QQ", len(text), 0) + text)


def start_sleeper(leave_group: bool) -> int:
    pid = os.fork()
    if pid == 0:
        if leave_group:
            os.setsid()
        time.sleep(60.0)
        os._exit(0)
    return pid


def judge(prompt, completion):
    what = completion
    if what == "fork and hang":
        start_sleeper(leave_group=False)
        spin()
    if what in ("daemon and die", "escape and die"):
        start_sleeper(leave_group=what == "escape and die")
        os._exit(3)
    if what == "leave a daemon":
        return float(start_sleeper(leave_group=False))
    if what == "no alarm":
        signal.setitimer(signal.ITIMER_REAL, 0)
        spin()
    if what == "ignore alarm":
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        spin()
    if what == "crafted":
        return Crafted(os.environ["HOSTILE_COMMAND"])
    if what == "crafted number":
        return CraftedNumber(0.25)
    if what == "crafted error":
        raise RuntimeError(Crafted(os.environ["HOSTILE_COMMAND"]))
    if what == "pickle":
        import pickle

        send(pickle.dumps((Crafted(os.environ["HOSTILE_COMMAND"]), None)))
        spin()
    if what == "old reply":
        send_message(json.dumps(dict(call=0, value=1.0)).encode())
        spin()
    if what == "two replies":
        send_message(json.dumps(dict(call=2, value=77.0)).encode())  # for the next request
    if what == "garbage":
        print("garbage on stdout", flush=True)
        os.write(1, b"more of it\n")
        subprocess.run([sys.executable, "-c", "print('and from a child')"], check=True)
    if what == "garbage in the pipe":
        send_message(b"\xff\x00[" * 10)
        spin()
    if what == "nested":
        send_message(b"[" * 200_000)
        spin()
    if what == "flood":
        while True:
            send(b"x" * 60_000)
    if what == "close the pipe":
        for fd in connections():
            os.close(fd)
        spin()
    if what == "kill itself":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "memory":
        return float(len(bytearray(10**10)))
    return {"text": "no number", "list": [1.0], "none": None, "nan": float("nan"), "one": True}.get(what, 0.5)


def sleeps_30_ms(prompt, completion):
    """Waits, like a call to another machine."""
    time.sleep(0.03)
    return float(len(completion) % 2)


def sleeps_240_ms(prompt, completion):
    """Waits for longer than a busy machine computes."""
    time.sleep(0.24)
    return float(len(completion) % 2)
