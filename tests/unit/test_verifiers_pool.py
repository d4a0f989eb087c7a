"""Workers: killed at their limits, replaced, counted; nothing waits and nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ssgrpo_lightning.judge import Judge
from ssgrpo_lightning.problems import Problem
from ssgrpo_lightning.segmenters import ByLine
from ssgrpo_lightning.verifiers import FinalNumber, Isolated, Noisy, Weighted
from tests.conftest import REPOSITORY
from tests.unit.obedient import Obeys, Unloadable

PROBLEM = Problem(0, "p", "1")


def isolated(**options):
    return Isolated(Obeys(), **{"workers": 1, "seconds": 1.0, "memory_mb": 1024, **options})


def judge(verifier, *texts):
    return verifier.batch(list(texts), [PROBLEM] * len(texts))


def test_a_worker_that_hangs_dies_or_fills_the_memory_is_replaced_and_the_rest_is_judged():
    verifier = isolated()
    texts = ("ok", "hang", "ok", "die", "fill", "raise", "print", "ok")
    verdicts = judge(verifier, *texts)
    assert [v.reward for v in verdicts] == [1, None, 1, None, None, None, 1, 1]
    assert [v.killed for v in verdicts] == [t in ("hang", "die", "fill") for t in texts]
    reasons = dict(zip(texts, (v.reason for v in verdicts)))
    assert reasons["hang"] == "no verdict within 1 s: worker killed"
    assert reasons["die"] == "worker died with status -9"
    assert "MemoryError" in reasons["fill"] and "no connection" in reasons["raise"]
    before, after = verdicts[0].reason, verdicts[2].reason
    assert before != after and str(os.getpid()) not in before + after
    assert verdicts[0].parts == (0.5, None)
    assert verdicts[1].seconds == 1.0 and 0 < verdicts[0].seconds < 1


def test_a_worker_leaves_the_signals_of_schedulers_to_the_trainer():
    assert [v.reward for v in judge(isolated(), "end", "ok")] == [1, 1]


def test_nothing_waits_for_what_hangs():
    verifier = isolated(workers=2, seconds=8.0)
    judge(verifier, "ok", "ok", "ok", "ok")  # both have started
    hung = verifier.submit("hang", PROBLEM)
    start = time.perf_counter()
    quick = [verifier.submit("ok", PROBLEM) for _ in range(40)]
    assert all(f.result(timeout=4).reward == 1 for f in quick)
    assert time.perf_counter() - start < 4 and not hung.done()
    assert hung.result().killed


def test_verdicts_overlap_with_what_is_done_meanwhile():
    verifier = isolated(workers=2)
    judge(verifier, "ok", "ok", "ok", "ok")
    start = time.perf_counter()
    pending = Judge(verifier, ByLine()).begin(["sleep"] * 4, [PROBLEM] * 4)
    assert time.perf_counter() - start < 0.1
    time.sleep(1.0)  # the policy generates
    waited = time.perf_counter()
    assert [v.reward for v in pending()] == [1] * 4
    assert time.perf_counter() - waited < 0.3


def test_it_works_outside_the_main_thread_and_in_several_at_once():
    verifier, found = isolated(workers=2), {}

    def work(name):
        found[name] = [v.reward for v in judge(verifier, "ok", "hang", "ok")]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {i: [1, None, 1] for i in range(3)}


def test_wrappers_keep_the_pool_busy_rather_than_ask_one_by_one():
    verifier = Weighted([Noisy(isolated(workers=2), flip=0.0), FinalNumber()], [3.0, 1.0])
    verdicts = judge(verifier, "ok", "die", "ok 1")
    assert [v.reward for v in verdicts] == [0.75, None, 1.0]
    assert [v.parts for v in verdicts] == [(1.0, 0.0), (None, 0.0), (1.0, 1.0)]
    assert [v.killed for v in verdicts] == [False, True, False]


def test_a_verifier_that_no_worker_can_load_ends_the_run_with_the_reason():
    with pytest.raises(RuntimeError, match="no such dictionary.*can be imported"):
        judge(Isolated(Unloadable(), workers=1), "x")


def test_workers_end_with_their_verifier():
    verifier = isolated()
    worker = int(judge(verifier, "ok")[0].reason.split()[1])
    del verifier
    _wait_until_gone(worker)


@pytest.mark.parametrize("completion", ["ok", "hang"])
def test_workers_end_with_a_parent_that_is_killed(completion):
    code = (
        "import os, signal, sys; from tests.unit.test_verifiers_pool import *\n"
        "v = isolated(seconds=600); print(judge(v, 'ok')[0].reason.split()[1], flush=True)\n"
        f"v.submit({completion!r}, PROBLEM); time.sleep(.5); os.kill(os.getpid(), signal.SIGKILL)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    _wait_until_gone(int(run.stdout))


def test_a_worker_loads_no_torch():
    code = "import sys, ssgrpo_lightning.verifiers.worker; print('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "False"


def test_ten_thousand_are_verified_in_seconds():
    verifier = Isolated(FinalNumber("#"), workers=2)
    judge(verifier, *["#1"] * 50)
    start = time.perf_counter()
    texts = [f"so #{i % 2}" for i in range(10_000)]
    assert sum(v.reward for v in judge(verifier, *texts)) == 5000
    assert time.perf_counter() - start < 20


def _wait_until_gone(process):
    for _ in range(100):
        try:
            os.kill(process, 0)
            with open(f"/proc/{process}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except OSError:
            return
        time.sleep(0.1)
    pytest.fail(f"worker {process} is still there")
