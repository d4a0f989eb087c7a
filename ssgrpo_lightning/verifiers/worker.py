"""A worker process of a `Pool`: judges what it is sent. Started by the pool, never by hand.

Its words are data: they reach the pool as JSON, so that a verifier gone wrong runs no code there.
"""

import ctypes
import json
import os
import pickle
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import astuple
from multiprocessing.connection import Connection

from ssgrpo_lightning.verifiers.verifier import Verifier, judged

SET_PARENT_DEATH_SIGNAL = 1  # prctl of Linux


def serve(connection: Connection) -> None:
    """Judge one completion after the other until the pool hangs up or the memory limit is hit."""
    memory_mb, packed = pickle.loads(connection.recv_bytes())
    try:
        verifier: Verifier = pickle.loads(packed)
        verifier.prepare()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    except Exception as error:
        return _send(connection, repr(error))
    _send(connection, None)
    while True:
        verdict = judged(verifier, *pickle.loads(connection.recv_bytes()))
        _send(connection, astuple(verdict))
        if verdict.killed:  # what is left of its memory may fail the next verdict too
            return


def _send(connection: Connection, message: object) -> None:
    connection.send_bytes(json.dumps(message).encode())


def main() -> None:
    """Serve the connection whose number is the first argument, and end with the parent."""
    handle, parent = map(int, sys.argv[1:])
    if sys.platform == "linux":  # a hung worker does not notice that nobody listens
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        # A scheduler sends them to all processes of a job: the trainer finishes its update first.
        signal.signal(number, signal.SIG_IGN)
    if os.getppid() == parent:
        with suppress(EOFError, OSError, MemoryError):  # hung up, or nothing left to go on with
            serve(Connection(handle))


if __name__ == "__main__":
    main()
