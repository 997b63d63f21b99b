"""Linux kernel interfaces of a sandbox: namespaces, mounts, capabilities, a seccomp filter, Landlock, limits.

Called with ctypes, in single-threaded processes only. Imports the standard library only: sandboxed processes lack the
trainer's packages.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import stat
import struct
from collections.abc import Iterable

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
AT_RECURSIVE = 0x8000
MOUNT_ATTR_RDONLY = 1
MOUNT_ATTR_NOSUID = 2
MOUNT_ATTR_NODEV = 4

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_SECUREBITS = 28
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECURE_ALL_LOCKED = 0b11101111  # no root by user id, none kept, none ambient; and each of these permanently
NUM_CAPABILITIES = 64
CAP_SETGID = 6
CAP_SETUID = 7
SECCOMP_MODE_FILTER = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(what: str, number: int, *args: int | bytes | None) -> int:
    """A system call by number; all integers as 64 bits, since the function has no prototype."""
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in args]
    _libc.syscall.restype = ctypes.c_long
    return _checked(_libc.syscall(ctypes.c_long(number), *given), what)


def prctl(option: int, value: int = 0, third: int = 0) -> int:
    """`prctl(2)`."""
    zero = ctypes.c_ulong(0)
    return _checked(_libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(third), zero, zero), f"prctl {option}")


def unshare(flags: int) -> None:
    """`unshare(2)`."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    """`mount(2)`."""
    kind_bytes = None if kind is None else kind.encode()
    made = _libc.mount(source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), data.encode() or None)
    _checked(made, f"mount {target}")


def unmount(target: str) -> None:
    """Detaches a mount, which ends when its last file is closed."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def make_read_only(target: str, with_mounts_below: bool = True) -> None:
    """Makes a mount read-only, without effect of set-user-id and of device files. Linux 5.12."""
    wanted = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
    flags = AT_RECURSIVE if with_mounts_below else 0
    _syscall(f"mount_setattr {target}", 442, -100, target.encode(), flags, wanted, len(wanted))


def pivot_root(old: str) -> None:
    """Makes the working directory the root; the former root is mounted at `old` below it."""
    _syscall("pivot_root", _calls()["pivot_root"], b".", old.encode())


def has_capabilities(*wanted: int) -> bool:
    """Whether this process has these capabilities."""
    with open("/proc/self/status") as lines:
        held = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff"))
    return all(held >> one & 1 for one in wanted)


def drop_possible_privileges() -> None:
    """Makes sure that nothing that this process executes gets privileges. It keeps its own."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    zeros = [ctypes.c_ulong(0)] * 3
    for capability in range(NUM_CAPABILITIES):
        _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), *zeros)  # fails for a process that has none to drop
    _libc.prctl(PR_SET_SECUREBITS, ctypes.c_ulong(SECURE_ALL_LOCKED), *zeros)


def drop_privileges() -> None:
    """Gives up all capabilities."""
    header = struct.pack("Ii", 0x20080522, 0)
    _checked(_libc.capset(header, bytes(24)), "capset")


def limit(name: str, value: int) -> None:
    """Sets a resource limit, `RLIMIT_<name>`, soft and hard; never above a lower hard limit."""
    kind = getattr(resource, f"RLIMIT_{name}", None)
    if kind is None:
        return
    hard = resource.getrlimit(kind)[1]
    least = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (least, least))


# -- seccomp ----------------------------------------------------------------------------------------------------------
# Numbers of system calls: x86-64, and arm64 (the generic table). Newer calls have one number everywhere.

_BOTH = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semctl": (66, 191),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "personality": (135, 92),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "vmsplice": (278, 75),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
}
_NEWER = {  # one number on every architecture
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
    "statmount": 457,
    "listmount": 458,
    "lsm_get_self_attr": 459,
    "lsm_set_self_attr": 460,
    "lsm_list_modules": 461,
}
_X86 = {"iopl": 172, "ioperm": 173, "modify_ldt": 154, "uselib": 134, "_sysctl": 156, "create_module": 174}
_SIGNALS = {  # refused where processes share their ids with the machine's
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "prlimit64": (302, 261),
}
_NEWER_SIGNALS = {"pidfd_send_signal": 424}
_SOCKET = (41, 198)
_CLONE = (56, 220)
_IOCTL = (16, 29)
CLONE3 = 435
LAST_KNOWN = 462  # newer calls are refused, as by an old kernel
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, and AUDIT_ARCH
_NAMESPACES = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

_LD_W_ABS = 0x20
_JEQ = 0x15
_JGT = 0x25
_JSET = 0x45
_RET = 0x06
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL = 0x80000000
_NUMBER_AT = 0  # offsets in `struct seccomp_data`
_ARCH_AT = 4
_ARGUMENT_AT = (16, 24)  # low halves of the first two arguments


def _calls() -> dict[str, int]:
    column = ARCHITECTURES[platform.machine()][0]
    return {name: numbers[column] for name, numbers in _BOTH.items()}


def seccomp_filter(shares_ids: bool) -> bytes | None:
    """A filter for `install_filter`: refuses calls that programs do not need or that reach out of a sandbox.

    No sockets, no tracing, no mounts, no namespaces, no kernel keys, no shared memory by key, no anonymous files
    (whose memory no limit counts), and nothing newer than this list.

    Args:
        shares_ids: whether the process could name processes outside by their ids; then it may send no signal, and its
            children stay in its process group, which is killed at the end.

    Returns:
        None on an unknown architecture.
    """
    if platform.machine() not in ARCHITECTURES:
        return None
    column, audit = ARCHITECTURES[platform.machine()]
    refused = _calls() | _NEWER | (_X86 if column == 0 else {})
    if shares_ids:
        refused |= {name: numbers[column] for name, numbers in _SIGNALS.items()} | _NEWER_SIGNALS
    steps: list[tuple[int, int, int, int]] = [
        (_LD_W_ABS, 0, 0, _ARCH_AT),
        (_JEQ, 1, 0, audit),
        (_RET, 0, 0, _KILL),
        (_LD_W_ABS, 0, 0, _NUMBER_AT),
    ]

    def refuse(number: int, error: int) -> None:
        steps.extend([(_JEQ, 0, 1, number), (_RET, 0, 0, _ERRNO | error)])

    for number in sorted(set(refused.values())):
        refuse(number, errno.EPERM)
    refuse(_SOCKET[column], errno.EACCES)
    refuse(CLONE3, errno.ENOSYS)  # its flags are in memory, where no filter reads them: libraries use `clone` then
    steps.extend([(_JGT, 0, 1, LAST_KNOWN), (_RET, 0, 0, _ERRNO | errno.ENOSYS)])
    steps.extend(
        [
            (_JEQ, 0, 3, _CLONE[column]),
            (_LD_W_ABS, 0, 0, _ARGUMENT_AT[0]),
            (_JSET, 0, 5, _NAMESPACES),
            (_RET, 0, 0, _ERRNO | errno.EPERM),
            (_JEQ, 0, 3, _IOCTL[column]),
            (_LD_W_ABS, 0, 0, _ARGUMENT_AT[1]),
            (_JEQ, 2, 0, _TERMINAL_INPUT[0]),
            (_JEQ, 1, 0, _TERMINAL_INPUT[1]),
            (_RET, 0, 0, _ALLOW),
            (_RET, 0, 0, _ERRNO | errno.EPERM),
        ]
    )
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def install_filter(code: bytes) -> None:
    """Installs a seccomp filter for this process and its children. Needs `PR_SET_NO_NEW_PRIVS`."""
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    holder = ctypes.create_string_buffer(program, len(program))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(holder))


# -- Landlock ---------------------------------------------------------------------------------------------------------

_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_READ_ACCESS = 0b1101  # execute, read file, read folder
_FILE_ACCESS = 0b1100_0000_0000_0111  # what a rule about a file may name
_NUM_ACCESSES = {1: 13, 2: 14, 3: 15, 4: 15}  # by version of the interface; 16 later


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0 without it."""
    try:
        return _syscall("landlock", _CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def landlock_rules(version: int, readable: Iterable[str], writable: Iterable[str]) -> int:
    """File descriptor of rules for `restrict_self`: read and execute, read and write, nothing else.

    From version 4 without TCP, from version 6 without signals and abstract sockets to processes outside.

    Args:
        version: see `landlock_version`.
        readable: paths; those that do not exist are left out.
        writable: paths.
    """
    accesses = (1 << _NUM_ACCESSES.get(version, 16)) - 1
    fields = struct.pack("Q", accesses)
    if version >= 4:
        fields += struct.pack("Q", 0b11)
    if version >= 6:
        fields += struct.pack("Q", 0b11)
    rules = _syscall("landlock_create_ruleset", _CREATE_RULESET, fields, len(fields), 0)
    for path in readable:
        _allow(rules, path, accesses & _READ_ACCESS)
    for path in writable:
        _allow(rules, path, accesses)
    return rules


def _allow(rules: int, path: str, access: int) -> None:
    try:
        found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(found).st_mode):
            access &= _FILE_ACCESS
        _syscall("landlock_add_rule", _ADD_RULE, rules, 1, struct.pack("=Qi", access, found), 0)
    finally:
        os.close(found)


def restrict_self(rules: int) -> None:
    """Applies Landlock rules to this process and its children. Needs `PR_SET_NO_NEW_PRIVS`."""
    _syscall("landlock_restrict_self", _RESTRICT_SELF, rules, 0)
