"""The filter's numbers of system calls are those of the kernel's own headers, where these are installed."""

import re
from pathlib import Path

import pytest

from lit_async_rl.sandbox import kernel

HEADERS = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}
PAIRS = kernel._BOTH | kernel._SIGNALS | {"socket": kernel._SOCKET, "clone": kernel._CLONE, "ioctl": kernel._IOCTL}
LANDLOCK = {
    "create_ruleset": kernel._CREATE_RULESET,
    "add_rule": kernel._ADD_RULE,
    "restrict_self": kernel._RESTRICT_SELF,
}
NEWER = kernel._NEWER | kernel._NEWER_SIGNALS | {"clone3": kernel.CLONE3}
NEWER |= {f"landlock_{name}": number for name, number in LANDLOCK.items()}


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_the_kernels(machine):
    header = Path("/usr/include", HEADERS[machine])
    if not header.is_file():
        pytest.skip("needs linux-libc-dev")
    defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    numbers = {name: int(number) for name, number in defined}
    column, _ = kernel.ARCHITECTURES[machine]
    ours = NEWER | {name: both[column] for name, both in PAIRS.items()} | (kernel._X86 if column == 0 else {})
    known = {name: number for name, number in ours.items() if name in numbers}  # headers may be older than a call
    assert len(known) > 0.8 * len(ours)
    assert known == {name: numbers[name] for name in known}
