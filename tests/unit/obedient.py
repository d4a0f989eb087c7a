"""Verifiers for the tests of the pool; a module that workers import in no time."""

import os
import signal
import time

from ssgrpo_lightning.problems import Verdict
from ssgrpo_lightning.verifiers import Verifier


class Obeys(Verifier):
    """Does what the completion says."""

    def __call__(self, completion, problem):
        if completion == "hang":
            while True:
                pass
        if completion == "sleep":
            time.sleep(0.2)
        if completion == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if completion == "end":
            os.kill(os.getpid(), signal.SIGTERM)
        if completion == "fill":
            return Verdict(float(len(bytearray(1 << 34))))
        if completion == "raise":
            raise RuntimeError("no connection")
        if completion == "print":
            print("noise " * 1000)
        return Verdict(1.0, f"by {os.getpid()}", parts=(0.5, None))

    def __eq__(self, other):
        return type(self) is type(other)


class Unloadable(Verifier):
    def __call__(self, completion, problem):
        return Verdict(1.0)

    def prepare(self):
        raise OSError("no such dictionary")
