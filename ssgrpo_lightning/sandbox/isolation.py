"""What keeps untrusted code in. One abstract class, then its members."""

import functools
import os
import random
import shutil
import site
import sys
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

from ssgrpo_lightning.sandbox.session import Launch, Limits, SandboxError, Session, start

_DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
# Run inside, to see whether it really is a sandbox before anything is trusted to it.
_TRIAL = """
import os, socket, time

def trial(processes):
    found = []
    if os.getppid() != 1:
        found.append("other processes are in sight")
    if os.path.exists("/etc/passwd") or os.path.exists("/home") or os.path.exists("/proc/1"):
        found.append("files of the machine are in sight")
    try:
        socket.socket()
        found.append("sockets can be opened")
    except OSError:
        pass
    try:
        for _ in range(processes):
            if os.fork() == 0:
                time.sleep(5)
                os._exit(0)
        found.append("processes are not counted")
    except OSError:
        pass
    return found
"""


class Isolation(ABC):
    """A way to start a program that can reach nothing but its own scratch folder."""

    @abstractmethod
    def launch(self, limits: Limits) -> AbstractContextManager[Launch]:
        """How to start the program inside; what it needs lives as long as the context.

        Raises:
            SandboxError: A tool is missing.
        """

    def refusal(self) -> str | None:
        """Why it cannot be used on this machine, or None where a trial went well."""
        return _trial(self)

    @contextmanager
    def open(
        self, limits: Limits, mode: Literal["serve", "check"], code: str = ""
    ) -> Iterator[Session]:
        """A sandbox with the code in it; see `session.start`."""
        with self.launch(limits) as launch, start(launch, limits, mode, code) as session:
            yield session


@dataclass(frozen=True)
class Bubblewrap(Isolation):
    """Namespaces and a root of read-only binds, made by bubblewrap (``bwrap``, version 0.5)."""

    @contextmanager
    def launch(self, limits: Limits) -> Iterator[Launch]:
        visible, hidden = _shown()
        binds: list[str] = []
        for path in visible:
            if os.path.islink(path):
                binds += ["--symlink", os.readlink(path), path]
            else:
                # Of its own accord it makes the folder above a file for root alone.
                binds += ["--dir", os.path.dirname(path), "--ro-bind", path, path]
        for path in hidden:
            binds += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
        binds += ["--dir", "/dev"]
        for path in _DEVICES:
            binds += ["--dev-bind", path, path]
        scratch = ["--perms", "1777", "--size", str(limits.scratch_bytes), "--tmpfs", "/tmp"]
        spaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--as-pid-1"]
        uid = _fresh_uid()
        if uid is None:
            spaces += ["--unshare-user"]
        else:  # only root may become the user of this sandbox
            spaces += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        yield Launch(
            [
                *(_tool("bwrap"), *spaces, "--new-session", "--die-with-parent"),
                *(*binds, *scratch, "--remount-ro", "/", "--chdir", "/tmp", "--"),
                _interpreter(),
            ],
            uid=uid,
            folder="/tmp",
        )


@dataclass(frozen=True)
class Namespaces(Isolation):
    """Linux namespaces (5.12 or later) made by ``unshare`` of util-linux.

    The program inside mounts its own root. Where the trainer is root, it becomes a user that no
    other process has; otherwise it is root of a user namespace that maps to the trainer's user.
    """

    @contextmanager
    def launch(self, limits: Limits) -> Iterator[Launch]:
        visible, hidden = _shown()
        uid = _fresh_uid()
        spaces = ["--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--fork"]
        spaces += ["--kill-child=SIGKILL"] + (["--user", "--map-root-user"] if uid is None else [])
        root = {"visible": visible, "hidden": hidden, "devices": _DEVICES}
        yield Launch(
            [_tool("unshare"), *spaces, "--", _interpreter()],
            root={**root, "scratch": limits.scratch_bytes},
            uid=uid,
            folder="/tmp",
        )


@dataclass(frozen=True)
class UnsafeSubprocess(Isolation):
    """A plain process with limits and a filter of system calls, and all of the trainer's files.

    For code that you would run yourself, on machines without the others: it can read what the
    trainer can, overwrite it, and end it.
    """

    @contextmanager
    def launch(self, limits: Limits) -> Iterator[Launch]:
        with tempfile.TemporaryDirectory() as folder:
            yield Launch([_interpreter()], folder=folder)

    def refusal(self) -> str | None:
        return None if sys.platform == "linux" else "it needs Linux"


@dataclass(frozen=True)
class BestAvailable(Isolation):
    """The first of `Bubblewrap` and `Namespaces` that holds on this machine; never anything less.

    Raises:
        ValueError: Neither does.
    """

    def launch(self, limits: Limits) -> AbstractContextManager[Launch]:
        return self.found().launch(limits)

    def refusal(self) -> str | None:
        try:
            self.found()
        except ValueError as error:
            return str(error)
        return None

    @staticmethod
    def found() -> Isolation:
        """The member that is used here."""
        refusals = []
        for member in (Bubblewrap(), Namespaces()):
            why = member.refusal()
            if why is None:
                return member
            refusals.append(f"{type(member).__name__}: {why}")
        raise ValueError(
            f"no isolation for untrusted code works here ({'; '.join(refusals)}): install "
            "bubblewrap, allow user namespaces, or set isolation to UnsafeSubprocess if the code "
            "may do whatever you may"
        )


@functools.cache
def _trial(isolation: Isolation) -> str | None:
    limits = Limits(processes=2, wall_seconds=10)
    try:
        with isolation.open(limits, "serve", _TRIAL) as session:
            reply = session.ask({"call": "trial", "args": [limits.processes]})
    except SandboxError as error:
        return str(error)
    if reply["out"] == '{"value": []}':
        return None
    return f"it does not hold: {reply['out'] or reply['end']}"


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SandboxError(f"{name} is not installed")
    return path


def _fresh_uid() -> int | None:
    """A user of this sandbox alone, so that the kernel counts its processes alone; root only."""
    return random.SystemRandom().randrange(1 << 30, 1 << 31) if os.geteuid() == 0 else None


def _interpreter() -> str:
    """The interpreter below any virtual environment: standard library, no packages."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def _shown() -> tuple[list[str], list[str]]:
    """Paths that Python needs, and the folders of installed packages below them."""
    standard = sysconfig.get_path("stdlib")
    wanted = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache"]
    wanted += [os.path.join(sys.base_prefix, "lib"), standard, _interpreter()]
    present = [p for p in dict.fromkeys(wanted) if os.path.exists(p)]
    tops = tuple(p + "/" for p in present)
    visible = [p for p in present if os.path.islink(p) or not p.startswith(tops)]
    packages = {*site.getsitepackages([sys.base_prefix, sys.base_exec_prefix])}
    packages |= {os.path.join(standard, name) for name in ("site-packages", "dist-packages")}
    packages |= {f"/usr/{place}python3/dist-packages" for place in ("lib/", "local/lib/")}
    below = tuple(os.path.realpath(p) + "/" for p in visible)
    hidden = {os.path.realpath(p) for p in packages if os.path.isdir(p)}
    return visible, sorted(p for p in hidden if p.startswith(below))
