"""Worker processes that judge under limits, are killed and replaced, and keep nobody waiting.

Neither signals nor forks: it works in any thread and beside torch. A worker loads the verifier,
not torch, so that a new one is ready in about a second.
"""

import json
import os
import pickle
import subprocess
import sys
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from functools import cached_property
from multiprocessing import Pipe
from queue import SimpleQueue
from threading import Thread
from typing import Any

from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.verifiers.verifier import Deferred, Pending, Verifier

START_SECONDS = 120.0
WORKER = "ssgrpo_lightning.verifiers.worker"


@dataclass(frozen=True)
class Job:
    """One completion, its problem, and where the verdict goes."""

    completion: str
    problem: Problem
    verdict: "Future[Verdict]" = field(default_factory=Future)


class Worker:
    """One process, from the outside.

    Args:
        packed: The pickled verifier.
        seconds: Time limit of a verdict.
        memory_mb: Memory limit of the process, in MiB of address space.

    Raises:
        RuntimeError: The process cannot load the verifier.
    """

    def __init__(self, packed: bytes, seconds: float, memory_mb: int) -> None:
        self.seconds = seconds
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the trainer, whose end ends them
            stdout=subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
            },
        )
        theirs.close()
        try:
            self.connection.send_bytes(pickle.dumps((memory_mb, packed)))
            trouble = self._receive(START_SECONDS)
        except TimeoutError:
            trouble = f"not ready after {START_SECONDS:g} s"
        except (EOFError, OSError) as error:
            trouble = f"it ended with status {self.process.wait()} ({error!r})"
        if trouble:
            self.kill()
            raise RuntimeError(
                f"no worker process could load the verifier: {trouble}. Define it in a module that "
                "can be imported, with fields that can be pickled"
            )

    def judge(self, job: Job) -> Verdict:
        """The verdict; where it says killed, this worker is done for."""
        try:
            self.connection.send_bytes(pickle.dumps((job.completion, job.problem)))
            reward, reason, seconds, parts, killed = self._receive(self.seconds)
        except TimeoutError:
            reason = f"no verdict within {self.seconds:g} s: worker killed"
            return Verdict(None, reason, self.seconds, killed=True)
        except (EOFError, OSError):
            return Verdict(None, f"worker died with status {self.process.wait()}", killed=True)
        return Verdict(reward, reason, seconds, tuple(parts), killed)

    def _receive(self, seconds: float) -> Any:
        if not self.connection.poll(seconds):
            raise TimeoutError
        return json.loads(self.connection.recv_bytes())

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Pool:
    """Worker processes for one verifier; they start with the first job and end with this object.

    Args:
        verifier: What judges in the workers.
        workers: Number of processes.
        seconds: Time limit of a verdict.
        memory_mb: Memory limit of a worker, in MiB.
    """

    def __init__(self, verifier: Verifier, workers: int, seconds: float, memory_mb: int) -> None:
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.process = os.getpid()
        arguments = (pickle.dumps(verifier), seconds, memory_mb)
        live: set[Worker] = set()
        for _ in range(workers):
            # The threads know the queue and not the pool, so that it can be let go.
            Thread(target=_drive, args=(self.jobs, arguments, live), daemon=True).start()
        weakref.finalize(self, _close, self.jobs, workers, live)

    def submit(self, completion: str, problem: Problem) -> "Future[Verdict]":
        """Judge a completion in a worker.

        The future's result is never an exception of the verifier: that is a verdict of None. It is
        one where no worker could start.
        """
        job = Job(completion, problem)
        self.jobs.put(job)
        return job.verdict


def _drive(
    jobs: "SimpleQueue[Job | None]", arguments: tuple[bytes, float, int], live: set[Worker]
) -> None:
    """Feed one worker, one job at a time so that none stands behind one that hangs; replace it."""
    worker: Worker | None = None
    while job := jobs.get():
        try:
            worker = worker or Worker(*arguments)
        except Exception as error:
            job.verdict.set_exception(error)
            continue
        live.add(worker)
        verdict = worker.judge(job)
        if verdict.killed:
            worker.kill()
            live.discard(worker)
            worker = None
        job.verdict.set_result(verdict)
    if worker is not None:
        worker.kill()


def _close(jobs: "SimpleQueue[Job | None]", workers: int, live: set[Worker]) -> None:
    for _ in range(workers):
        jobs.put(None)
    for worker in list(live):
        worker.process.kill()


@dataclass(frozen=True)
class Pooled(Deferred):
    """A verifier that judges in worker processes, because it may hang, crash or fill the memory.

    A worker that exceeds a limit is killed and replaced, and the verdict is None. Workers start
    with the first verdict and end with this process.
    """

    workers: int = field(default=2, kw_only=True)
    """Worker processes of each rank."""
    seconds: float = field(default=5.0, kw_only=True)
    """Time limit of one verdict."""
    memory_mb: int = field(default=2048, kw_only=True)
    """Memory limit of a worker, in MiB of address space."""

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("seconds", 0.01), ("memory_mb", 64)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{type(self).__name__}.{name} is {getattr(self, name)}, must be at least "
                    f"{least}: {type(self).__dataclass_fields__[name].default} is usual"
                )

    @abstractmethod
    def inside(self) -> Verifier:
        """What judges in the workers."""

    def submit(self, completion: str, problem: Problem) -> "Future[Verdict]":
        """Judge a completion in a worker; see `Pool.submit`."""
        if self._pool.process != os.getpid():  # threads do not survive a fork
            vars(self).pop("_pool")
        return self._pool.submit(completion, problem)

    def begin(self, completions: Sequence[str], problems: Sequence[Problem]) -> Pending:
        verdicts = [self.submit(*pair) for pair in zip(completions, problems, strict=True)]
        return lambda: [verdict.result() for verdict in verdicts]

    @cached_property
    def _pool(self) -> Pool:
        return Pool(self.inside(), self.workers, self.seconds, self.memory_mb)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Isolated(Pooled):
    """Any other verifier, in worker processes."""

    verifier: Verifier
    """The verifier that judges; it must be importable and picklable."""

    def inside(self) -> Verifier:
        return self.verifier
