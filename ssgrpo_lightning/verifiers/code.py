"""Code by hidden tests, in a sandbox."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.sandbox.isolation import BestAvailable, Isolation
from ssgrpo_lightning.sandbox.session import Limits, SandboxError
from ssgrpo_lightning.sandbox.suite import Room, Suite
from ssgrpo_lightning.verifiers.verifier import Verifier, judged


@dataclass(frozen=True)
class PassesTests(Verifier):
    """Runs a completion's code on the hidden tests of the problem (`sandbox.suite.Suite`).

    The code is the last closed fenced block, or the whole completion where it has none. One
    sandbox serves all tests of a completion. Several threads may ask for verdicts at once.
    """

    accepts_reference: ClassVar[bool] = False

    partial: bool = False
    """Reward the share of tests that pass; else 1 for all of them and 0 for less."""
    isolation: Isolation = BestAvailable()
    """What keeps the code in."""
    limits: Limits = Limits()
    """What the code may use in each test."""
    total_seconds: float = 30.0
    """Time of all tests of a completion by the clock; tests that it leaves out are failed."""

    workers: int = 2
    """Completions of a batch that run at the same time, in threads that wait for their sandbox."""

    def __post_init__(self) -> None:
        for name in ("total_seconds", "workers"):
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"PassesTests.{name} is {getattr(self, name)}, must be above 0: raise it"
                )
        refusal = self.isolation.refusal()
        if refusal is not None:
            raise ValueError(
                f"PassesTests.isolation is {type(self.isolation).__name__}, which cannot be used "
                f"here: {refusal}"
            )

    def __call__(self, completion: str, problem: Problem) -> Verdict:
        try:
            suite = Suite.read(problem.answer)
        except ValueError as error:
            return Verdict(None, f"the reference answer {error}")
        code = suite.prefix + extract_code(completion)
        passed, reason = 0, ""
        try:
            deadline = time.monotonic() + self.total_seconds
            with Room(self.isolation, self.limits, code, deadline) as room:
                for index, failure in enumerate(suite.failures(room)):
                    passed += failure is None
                    if failure is not None and not reason:
                        reason = f"; test {index}: {failure}"
                        if not self.partial:
                            break
        except SandboxError as error:
            return Verdict(None, f"the sandbox failed: {error}")
        share = passed / len(suite.tests)
        reward = share if self.partial else float(share == 1)
        return Verdict(reward, f"passes {passed} of {len(suite.tests)}{reason}")

    def begin(
        self, completions: Sequence[str], problems: Sequence[Problem]
    ) -> Callable[[], list[Verdict]]:
        """Start on a batch; the result waits for it."""
        pool = ThreadPoolExecutor(self.workers, "PassesTests")
        futures = [
            pool.submit(judged, self, *pair) for pair in zip(completions, problems, strict=True)
        ]
        pool.shutdown(wait=False)
        return lambda: [future.result() for future in futures]


def extract_code(completion: str) -> str:
    r"""The last closed fenced block of a text, else the one that was cut off, else the whole text.

    >>> extract_code("So:\n```python\nx = 1\n```\nDone.")
    'x = 1\n'
    """
    parts = completion.split("```")
    if len(parts) == 1:
        return completion
    closed = parts[1:-1:2]
    block = closed[-1] if closed else parts[-1]
    language, line, rest = block.partition("\n")
    return rest if line and len(language.split()) <= 1 else block
