"""Two hosts, as far as the network knows: two namespaces joined by a cable of software."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.conftest import REPOSITORY, metrics
from tests.distributed.conftest import ENVIRONMENT, Job, digests, on_one

pytestmark = pytest.mark.distributed
ADDRESS = "10.77.0."


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def two_hosts():
    """Names of two network namespaces, of which the first has the address 1, the second 2."""
    names = [f"ssgrpo{os.getpid()}{side}" for side in "ab"]
    cable = [f"sg{os.getpid() % 100000}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for number, (name, end) in enumerate(zip(names, cable), 1):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{ADDRESS}{number}/24", "dev", end)
            for device in (end, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield list(zip(names, cable))
    finally:
        for name in names:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", cable[0]], capture_output=True)


@pytest.fixture
def hosts():
    try:
        with two_hosts() as names:
            yield names
    except OSError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")


def test_two_hosts_learn_what_one_process_learns(hosts, tmp_path):
    one = Job(tmp_path / "one", [], updates=3)
    on_one([one])
    many = ["--trainer.num_nodes=2", "--trainer.devices=1", "--trainer.strategy=fsdp2"]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([Job(tmp_path / "two", many, updates=3).spec()]))
    running = []
    for number, (name, cable) in enumerate(hosts):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        torchrun += ["--nproc_per_node=1", f"--node_rank={number}"]
        torchrun += [f"--master_addr={ADDRESS}1", "--master_port=29500"]
        command = ["ip", "netns", "exec", name, *torchrun, "-m", "tests.distributed.jobs"]
        running.append(
            subprocess.Popen(
                [*command, str(plan)],
                cwd=REPOSITORY,
                env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": cable},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)[-8000:]
    alone, together = metrics(one.folder), metrics(tmp_path / "two")
    assert len(alone) == len(together) == 3
    for a, b in zip(alone, together):
        for name in ("reward", "policy_loss", "grad_norm", "estimator/loss"):
            assert float(b[name]) == pytest.approx(float(a[name]), rel=1e-5, abs=1e-6), name
    first, second = digests(tmp_path / "two", 2)
    assert first == second
