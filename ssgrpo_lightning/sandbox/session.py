"""A running sandbox, seen from outside: messages in, messages out, and an end to everything."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import IO, Any, Literal

from ssgrpo_lightning.sandbox.seccomp import system_call_filter

_MEBIBYTE = 1024 * 1024
# What a busy machine may take on top of a test's own limit.
_GRACE_SECONDS = 10.0
INSIDE = (resources.files("ssgrpo_lightning.sandbox") / "inside.py").read_text()


class SandboxError(RuntimeError):
    """The sandbox itself failed, so that nothing is known about the code in it."""


@dataclass(frozen=True)
class Limits:
    """What the code under test may use.

    Memory is counted for each process, so that all together may hold `processes` times as much,
    and the scratch folder.
    """

    cpu_seconds: int = 2
    """Processor time of each process of a test, in whole seconds."""
    wall_seconds: float = 6.0
    """Time of a test by the clock, in seconds."""
    memory: int = 256
    """Memory that a process may map, in MiB; an interpreter takes about 30."""
    processes: int = 4
    """Processes and threads that a test may have at one time."""
    output: int = 1
    """What a test may print or return, in MiB."""
    scratch: int = 16
    """Size of the only folder that can be written, and of the largest file, in MiB."""
    open_files: int = 64
    """Files that a process may have open."""

    def __post_init__(self) -> None:
        least = {"memory": 64, "open_files": 16}
        for name, value in vars(self).items():
            if value < least.get(name, 1) and not (name == "wall_seconds" and value > 0):
                raise ValueError(
                    f"Limits.{name} is {value}, must be at least {least.get(name, 1)}: raise it"
                )

    def job(self) -> dict[str, Any]:
        """The limits as the program inside reads them."""
        return {
            "cpu_seconds": self.cpu_seconds,
            "wall_seconds": self.wall_seconds,
            "output": self.output * _MEBIBYTE,
            "rlimits": {
                "AS": self.memory * _MEBIBYTE,
                "CORE": 0,
                "FSIZE": self.scratch * _MEBIBYTE,
                "MEMLOCK": 0,
                "MSGQUEUE": 0,
                "NOFILE": self.open_files,
                "NPROC": self.processes + 1,  # the first process of the sandbox counts too
            },
        }

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch folder in bytes."""
        return self.scratch * _MEBIBYTE


@dataclass(frozen=True)
class Launch:
    """How an isolation starts the program inside.

    Attributes:
        command: Program and arguments, up to the interpreter's own.
        root: What `inside.build_root` shows of the file system; None: something else sees to it.
        uid: User to become; None: stay.
        folder: Folder to work in; None: stay.
    """

    command: Sequence[str]
    root: dict[str, Any] | None = None
    uid: int | None = None
    folder: str | None = None


@dataclass
class Session:
    """A conversation with the program inside, in JSON lines; used by one thread at a time."""

    process: subprocess.Popen[bytes]
    """The process that holds the sandbox; it leads a process group of its own."""
    limits: Limits
    """The limits of the code inside."""
    _read: bytearray = field(default_factory=bytearray, repr=False)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message, and wait for the answer.

        Raises:
            SandboxError: The sandbox ended, took too long, or answered with something else.
        """
        self.send(message)
        return self.receive(self.limits.wall_seconds + _GRACE_SECONDS)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            SandboxError: The sandbox ended, or does not read.
        """
        data = memoryview(json.dumps(message).encode() + b"\n")
        sink = _descriptor(self.process.stdin)
        deadline = time.monotonic() + _GRACE_SECONDS
        while data:
            if not select.select([], [sink], [], max(deadline - time.monotonic(), 0))[1]:
                raise SandboxError("it does not read what it is sent")
            try:
                data = data[os.write(sink, data[:4096]) :]
            except BrokenPipeError as error:
                raise SandboxError(self._last_words()) from error

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next message.

        Args:
            seconds: How long to wait for it.

        Raises:
            SandboxError: None came in time, or it is no JSON object of bearable length.
        """
        source, deadline = _descriptor(self.process.stdout), time.monotonic() + seconds
        while (end := self._read.find(b"\n")) < 0:
            if not select.select([source], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise SandboxError(f"no answer in {seconds:.0f} s")
            piece = os.read(source, 1 << 16)
            if not piece:
                raise SandboxError(self._last_words())
            self._read += piece
            # A byte of output takes up to six in JSON.
            if len(self._read) > 6 * self.limits.output * _MEBIBYTE + 4096:
                raise SandboxError("an answer of unbearable length")
        line, self._read = bytes(self._read[:end]), self._read[end + 1 :]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SandboxError("an answer that is not JSON") from error
        if not isinstance(message, dict):
            raise SandboxError("an answer that is no JSON object")
        return message

    def close(self) -> None:
        """End every process of the sandbox, and wait for it."""
        source = _descriptor(self.process.stdout)
        # Without requests the first process inside ends by itself, and its namespace with it. One
        # that is busy is killed: it is of this group.
        _close(self.process.stdin)
        _drain(source, time.monotonic() + 0.5)
        os.killpg(self.process.pid, signal.SIGKILL)
        _drain(source, time.monotonic() + _GRACE_SECONDS)
        _close(self.process.stdout)
        _close(self.process.stderr)
        self.process.wait()

    def _last_words(self) -> str:
        os.killpg(self.process.pid, signal.SIGKILL)
        words = os.read(_descriptor(self.process.stderr), 4096).decode(errors="replace")
        lines = [line.strip() for line in words.splitlines() if line.strip()]
        return f"it ended: {lines[-1][:200] if lines else 'without a word'}"


def _descriptor(stream: IO[bytes] | None) -> int:
    assert stream is not None  # all three are pipes
    return stream.fileno()


def _close(stream: IO[bytes] | None) -> None:
    assert stream is not None
    stream.close()


def _drain(source: int, deadline: float) -> None:
    """Wait until nobody holds the other end."""
    while select.select([source], [], [], max(deadline - time.monotonic(), 0))[0]:
        if not os.read(source, 1 << 16):
            return


@contextmanager
def start(
    launch: Launch, limits: Limits, mode: Literal["serve", "check"], code: str = ""
) -> Iterator[Session]:
    """Start a sandbox; it ends with the context, whatever runs in it.

    Args:
        launch: How to start it.
        limits: What the code may use.
        mode: ``serve`` runs `code` once per request; ``check`` runs the test programs it is sent.
        code: The code under test.

    Raises:
        SandboxError: It did not start.
    """
    job = {"mode": mode, "code": code, "filter": system_call_filter().hex(), **limits.job()}
    job |= {"root": launch.root, "uid": launch.uid, "folder": launch.folder}
    try:
        process = subprocess.Popen(
            [*launch.command, "-I", "-S", "-B", "-c", INSIDE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={"HOME": "/tmp", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"},
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"it did not start: {error}") from error
    session = Session(process, limits)
    try:
        session.send(job)
        if session.receive(_GRACE_SECONDS) != {"ready": True}:
            raise SandboxError("it did not say that it is ready")
        yield session
    finally:
        session.close()
