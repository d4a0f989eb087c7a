"""The system calls that a sandboxed program may not make, as a filter for the kernel."""

import platform
import struct

# Namespaces already take the object away that these calls act on. The filter keeps what a program
# could still reach from there: the kernel's rarer entrances, and memory that no limit counts.
# Name: number on x86_64, on aarch64 (Linux, arch/x86/entry/syscalls and asm-generic/unistd.h).
_REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bind": (49, 200),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "connect": (42, 203),
    "finit_module": (313, 273),
    "init_module": (175, 105),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "mount": (165, 40),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "socket": (41, 198),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
_NEW_NAMESPACE = 0x7E020000  # any CLONE_NEW… flag
_FIRST_NEW, _PIDFD_OPEN = 424, 434
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _NOT_PERMITTED, _NOT_THERE, _KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000


def system_call_filter(machine: str | None = None) -> bytes:
    """A classic BPF program for seccomp (``man 2 seccomp``), 8 bytes an instruction.

    Calls since Linux 5.1 (from number 424, and those of the x32 interface) seem not to exist, for
    which C libraries have fall-backs: what the kernel gains later is refused unseen. Only
    ``pidfd_open`` is let through.

    Args:
        machine: Processor as ``platform.machine`` names it; None: this one.

    Raises:
        ValueError: The numbers of its calls are not known here.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise ValueError(
            f"the sandbox knows the system calls of {', '.join(_MACHINES)}, this machine is "
            f"{machine}: run code tasks on one of these"
        )
    column, architecture, clone = _MACHINES[machine]
    program = [
        (_LOAD, 0, 0, 4),  # the architecture that the call is made for
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # its number
        (_EQUAL, 0, 1, _PIDFD_OPEN),
        (_RETURN, 0, 0, _ALLOW),
        (_AT_LEAST, 0, 1, _FIRST_NEW),
        (_RETURN, 0, 0, _NOT_THERE),
    ]
    for numbers in _REFUSED.values():
        program += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _NOT_PERMITTED)]
    program += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, 16),  # its first argument
        (_ANY_BIT, 0, 1, _NEW_NAMESPACE),
        (_RETURN, 0, 0, _NOT_PERMITTED),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)
