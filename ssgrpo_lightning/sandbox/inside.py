"""The program inside the sandbox: it locks itself in, then runs tests one after another.

It is started as ``python -I -S -c SOURCE`` and imports nothing but the standard library. It is the
first process of its process namespace, so that killing all others (-1) ends whatever a test
started, and nothing in there can kill it. Values cross the border as JSON only, never pickled.
"""

import builtins
import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

_TAGS: dict[str, Callable[[Any], Any]] = {
    "$tuple": lambda items: tuple(map(decode, items)),
    "$set": lambda items: set(map(decode, items)),
    "$frozenset": lambda items: frozenset(map(decode, items)),
    "$dict": lambda pairs: {decode(k): decode(v) for k, v in pairs},
    "$bytes": bytes.fromhex,
    "$complex": lambda parts: complex(*parts),
}


def encode(value: Any) -> Any:
    """A value of builtin types as JSON data; what JSON lacks is a mapping with one ``$`` key.

    Raises:
        TypeError: The value, or something in it, has another type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(v) for v in value]
    for kind, tag in ((tuple, "$tuple"), (set, "$set"), (frozenset, "$frozenset")):
        if isinstance(value, kind):
            return {tag: [encode(v) for v in value]}
    if isinstance(value, dict):
        if all(type(k) is str and not k.startswith("$") for k in value):
            return {k: encode(v) for k, v in value.items()}
        return {"$dict": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": value.hex()}
    if isinstance(value, complex):
        return {"$complex": [value.real, value.imag]}
    raise TypeError(f"{type(value).__name__} cannot cross the border of the sandbox")


def decode(data: Any) -> Any:
    """The value that `encode` wrote.

    >>> decode(encode({1: (2.5, {"a"})}))
    {1: (2.5, {'a'})}

    Raises:
        TypeError, ValueError: A key cannot be hashed, or a tag holds something else.
    """
    if isinstance(data, list):
        return [decode(v) for v in data]
    if isinstance(data, dict):
        if len(data) == 1:
            tag, content = next(iter(data.items()))
            if tag in _TAGS:
                return _TAGS[tag](content)
        return {k: decode(v) for k, v in data.items()}
    return data


# --- locking in -----------------------------------------------------------------------------------

_MS_BIND_REC = 4096 | 16384
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR = -100, 0x8000, 442
# Hides nothing that goes in: the sandbox has no /proc, so this is where its root can be built.
_ROOM = "/proc"


def _call(function: str, *arguments: Any) -> int:
    """A function of the C library, or the OSError that it reports."""
    given = [a.encode() if isinstance(a, str) else a for a in arguments]
    result = getattr(ctypes.CDLL(None, use_errno=True), function)(*given)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}{arguments}: {os.strerror(number)}")
    return result


def build_root(visible: list[str], hidden: list[str], devices: list[str], scratch: int) -> None:
    """Make a read-only root of the given paths the root, with an empty scratch folder ``/tmp``.

    Args:
        visible: Files, folders and links to show.
        hidden: Folders below them to show empty.
        devices: Device files to show.
        scratch: Size of the scratch folder in bytes.
    """
    _call("mount", "tmpfs", _ROOM, "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m")
    for path in visible + devices:
        place = _ROOM + path
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), place)
            continue
        if os.path.isdir(path):
            os.makedirs(place, exist_ok=True)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY))
        _call("mount", path, place, None, _MS_BIND_REC, None)
        _restrict(place, _RDONLY | _NOSUID | (0 if path in devices else _NODEV))
    for path in hidden:
        _call("mount", "tmpfs", _ROOM + path, "tmpfs", _RDONLY | _NODEV, "mode=755,size=4k")
    os.mkdir(_ROOM + "/tmp")
    flags, options = _NOSUID | _NODEV | _NOEXEC, f"mode=1777,size={scratch},nr_inodes=4096"
    _call("mount", "tmpfs", _ROOM + "/tmp", "tmpfs", flags, options)
    os.chdir(_ROOM)
    _call("pivot_root", ".", ".")
    _call("umount2", ".", 2)  # lazily: this process still stands in the old root
    os.chdir("/")
    _restrict("/", _RDONLY, recursive=False)


def _restrict(path: str, flags: int, recursive: bool = True) -> None:
    attributes = struct.pack("4Q", flags, 0, 0, 0)
    depth = _AT_RECURSIVE if recursive else 0
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, path, depth, attributes, len(attributes))


def lock(job: dict[str, Any]) -> None:
    """Give up every right and set every limit; there is no way back.

    ``uid`` is a user of this sandbox alone: the kernel counts processes by user, and does not
    count root's.
    """
    for capability in range(64):
        if ctypes.CDLL(None).prctl(24, capability, 0, 0, 0):  # PR_CAPBSET_DROP
            break
    if job["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[job["uid"]] * 3)
        os.setresuid(*[job["uid"]] * 3)
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    for kind, limit in job["rlimits"].items():
        number = getattr(resource, f"RLIMIT_{kind}")
        held = resource.getrlimit(number)[1]
        limit = limit if held == resource.RLIM_INFINITY else min(limit, held)
        resource.setrlimit(number, (limit, limit))
    _call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: go with who started this
    _call("prctl", 4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no other process may look in here
    _call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    program = bytes.fromhex(job["filter"])
    memory = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(memory))
    _call("prctl", 22, 2, header, 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


# --- code under test ------------------------------------------------------------------------------


def serve(job: dict[str, Any], requests: Any, replies: Any) -> None:
    """Run each request in a process of its own, and say how it ended."""
    gc.freeze()  # no collection in a child copies the pages of what was there before
    for line in requests:
        _send(replies, attempt(job, json.loads(line)))


def attempt(job: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """How one run of the code ended, and what it wrote."""
    source, feed = os.pipe()
    result, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_seconds"],) * 2)
            _become_child(source, sink, "stdin" in request, job["rlimits"]["NOFILE"])
            (_run_stream if "stdin" in request else _run_call)(job, request)
        finally:
            os._exit(1)
    os.close(source)
    os.close(sink)
    end, output = _watch(pid, result, feed, request.get("stdin", "").encode(), job)
    os.close(result)
    code = _sweep(pid)
    return {"end": end, "code": code, "out": output.decode(errors="replace")}


def _watch(pid: int, result: int, feed: int, given: bytes, job: dict[str, Any]):
    """Read what the process writes until it ends, or writes or takes too much."""
    deadline, written, exited = (
        time.monotonic() + job["wall_seconds"],
        bytearray(),
        os.pidfd_open(pid),
    )
    os.set_blocking(feed, False)
    sources, sinks = [result, exited], [feed]
    try:
        while (left := deadline - time.monotonic()) > 0:
            readable, writable, _ = select.select(sources, sinks, [], left)
            if writable:
                try:
                    given = given[os.write(feed, given[:65536]) if given else 0 :]
                except BrokenPipeError:
                    given = b""
                if not given:
                    os.close(sinks.pop())
            if result in readable:
                piece = os.read(result, 65536)
                written += piece
                if len(written) > job["output"]:
                    return "output", b""
                if not piece:
                    sources.remove(result)
            elif exited in readable:
                return "exit", bytes(written)
        return "time", b""
    finally:
        for descriptor in [exited, *sinks]:
            os.close(descriptor)


def _sweep(pid: int) -> int:
    """End everything that the test started; the exit code of its first process."""
    code = 0
    if os.getpid() != 1:  # without a namespace -1 would be every process of the user
        for end in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                end(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    while True:
        try:
            ended, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return code
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)


def _become_child(source: int, sink: int, captured: bool, limit: int) -> None:
    """Leave descriptors 0 to 3 open, and nothing else up to the limit."""
    os.setsid()
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(source, 0)
    os.dup2(sink if captured else nothing, 1)
    os.dup2(nothing, 2)
    os.dup2(nothing if captured else sink, 3)
    os.closerange(4, limit)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(descriptor, mode, closefd=False)
        for descriptor, mode in enumerate(("r", "w", "w"))
    )


def _run_call(job: dict[str, Any], request: dict[str, Any]) -> None:
    try:
        names: dict[str, Any] = {"__name__": "solution"}
        exec(compile(job["code"], "solution.py", "exec"), names)
        holder, name = names.get("Solution"), request["call"]
        function = names[name] if name in names or holder is None else getattr(holder(), name)
        arguments, keywords = decode(request["args"]), decode(request.get("kwargs", {}))
        text = json.dumps({"value": encode(function(*arguments, **keywords))})
    except BaseException as error:
        text = json.dumps({"error": type(error).__name__, "message": str(error)[:200]})
    data = text.encode()
    while data:
        data = data[os.write(3, data) :]
    os._exit(0)


def _run_stream(job: dict[str, Any], request: dict[str, Any]) -> None:
    code = 0
    try:
        exec(compile(job["code"], "solution.py", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        code = 0 if stop.code in (None, 0) else 1
    sys.stdout.flush()
    os._exit(code)


# --- test programs --------------------------------------------------------------------------------


def check(job: dict[str, Any], requests: Any, replies: Any) -> None:
    """Run test programs; the code they test lives in another sandbox and is called by message."""
    for line in requests:
        request = json.loads(line)
        names: dict[str, Any] = {n: _stand_in(n, requests, replies) for n in request["calls"]}
        names["__name__"] = "__main__"
        try:
            exec(compile(request["program"], "tests.py", "exec"), names)
            _send(replies, {"passed": True})
        except _Unfit as error:
            _send(replies, {"unfit": str(error)})
        except BaseException as error:
            _send(replies, {"passed": False, "reason": f"{type(error).__name__}: {error}"[:200]})


class _Unfit(BaseException):
    """Arguments that cannot be sent; no test program should catch it."""


def _stand_in(name: str, requests: Any, replies: Any) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            call = {"call": name, "args": encode(list(args)), "kwargs": encode(kwargs)}
        except TypeError as error:
            raise _Unfit(f"an argument of {name}: {error}") from error
        _send(replies, call)
        reply = json.loads(requests.readline())
        if "value" in reply:
            return decode(reply["value"])
        kind = getattr(builtins, str(reply["error"]), None)
        known = isinstance(kind, type) and issubclass(kind, Exception)
        raised: Any = kind if known else RuntimeError
        raise raised(reply.get("message", ""))

    return function


def _send(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


def main() -> None:
    """Read the job, lock in, say so, and do what it asks."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    job = json.loads(requests.readline())
    if job["root"]:
        build_root(**job["root"])
    if job["folder"]:
        os.chdir(job["folder"])
    lock(job)
    nothing = os.open("/dev/null", os.O_RDWR)
    _send(replies, {"ready": True})
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    {"serve": serve, "check": check}[job["mode"]](job, requests, replies)


if __name__ == "__main__":
    main()
