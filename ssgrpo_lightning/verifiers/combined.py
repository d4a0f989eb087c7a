"""Several verifiers together, and any Python function."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from time import perf_counter
from typing import Any

from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.verifiers.verifier import Deferred, Pending, Verifier


@dataclass(frozen=True)
class Weighted(Deferred):
    """The weighted mean of several verifiers' rewards; each of them is kept as a part.

    Where one of them has no verdict, the whole has none: a mean of the rest is another reward.
    """

    verifiers: list[Verifier]
    """The verifiers."""
    weights: list[float]
    """Weight of each; only their ratios count."""

    def __post_init__(self) -> None:
        if not self.verifiers or len(self.verifiers) != len(self.weights):
            raise ValueError(
                f"Weighted.weights is {self.weights}, must be one number for each of the "
                f"{len(self.verifiers)} verifiers, of which there must be one"
            )
        if min(self.weights) < 0 or sum(self.weights) <= 0:
            raise ValueError(
                f"Weighted.weights is {self.weights}, must be at least 0 each and not all 0: the "
                "reward must stay in [0, 1]; a penalty is a verifier that gives 0"
            )

    def prepare(self) -> None:
        for verifier in self.verifiers:
            verifier.prepare()

    def begin(self, completions: Sequence[str], problems: Sequence[Problem]) -> Pending:
        pending = [verifier.begin(completions, problems) for verifier in self.verifiers]
        return lambda: [self._together(parts) for parts in zip(*(wait() for wait in pending))]

    def _together(self, parts: Sequence[Verdict]) -> Verdict:
        rewards = [part.reward for part in parts]
        known = [w * r for w, r in zip(self.weights, rewards) if r is not None]
        complete = len(known) == len(parts)
        shown = [p for p in parts if complete or p.reward is None]
        return Verdict(
            sum(known) / sum(self.weights) if complete else None,
            "; ".join(part.reason for part in shown),
            sum(part.seconds for part in parts),
            tuple(rewards),
            any(part.killed for part in parts),
        )


@dataclass(frozen=True)
class PythonFunction(Verifier):
    """Any function of (completion, problem), by its import path.

    It returns a reward in [0, 1], a bool, None or a `Verdict`. An ``async`` one is awaited for many
    completions at once, and judges while something else is computed. What may hang or crash is
    better put in `Isolated`.
    """

    function: str
    """Where it is: ``package.module.name``."""
    at_once: int = 16
    """Completions that an ``async`` function is awaited for together."""
    seconds: float = 60.0
    """Time limit of one verdict of an ``async`` function; past it there is none."""

    def __post_init__(self) -> None:
        if self.at_once < 1 or self.seconds <= 0:
            raise ValueError(
                f"PythonFunction.at_once is {self.at_once} and PythonFunction.seconds "
                f"{self.seconds}, must be at least 1 and above 0: use 16 and 60"
            )
        self.load()

    def load(self) -> Callable[[str, Problem], Any]:
        """The function.

        Raises:
            ValueError: There is none at that path.
        """
        module, _, name = self.function.rpartition(".")
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"PythonFunction.function is {self.function!r}, which cannot be imported "
                f"({error}): give package.module.name, from a folder on the Python path"
            ) from error
        if not callable(found):
            raise ValueError(
                f"PythonFunction.function is {self.function!r}, which is a "
                f"{type(found).__name__}, must be a function of (completion, problem)"
            )
        return found

    def __call__(self, completion: str, problem: Problem) -> Verdict:
        function = self.load()
        if _is_async(function):
            return self.batch([completion], [problem])[0]
        return _verdict(function(completion, problem))

    def begin(self, completions: Sequence[str], problems: Sequence[Problem]) -> Pending:
        function = self.load()
        if not _is_async(function):
            return super().begin(completions, problems)
        # A thread of its own, as this one may already run an event loop.
        with_loop = ThreadPoolExecutor(1)
        done = with_loop.submit(asyncio.run, self._all(function, completions, problems))
        with_loop.shutdown(wait=False)
        return done.result

    def batch(self, completions: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        if _is_async(self.load()):
            return self.begin(completions, problems)()
        return super().batch(completions, problems)

    async def _all(
        self, function: Callable, completions: Sequence[str], problems: Sequence[Problem]
    ) -> list[Verdict]:
        room = asyncio.Semaphore(self.at_once)

        async def one(completion: str, problem: Problem) -> Verdict:
            async with room:
                start = perf_counter()
                try:
                    waiting = asyncio.wait_for(function(completion, problem), self.seconds)
                    verdict = _verdict(await waiting)
                except asyncio.TimeoutError:
                    verdict = Verdict(None, f"no verdict within {self.seconds:g} s", killed=True)
                except Exception as error:
                    verdict = Verdict(None, f"{self.function} failed: {repr(error)[:200]}")
                return replace(verdict, seconds=perf_counter() - start)

        return list(await asyncio.gather(*map(one, completions, problems)))


def _is_async(function: Callable) -> bool:
    call = getattr(function, "__call__", function)  # noqa: B004 - an object may be one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _verdict(result: Any) -> Verdict:
    if isinstance(result, Verdict):
        return result
    return Verdict(None, "the function gave None") if result is None else Verdict(float(result))
