"""vLLM on a CPU: one engine for all tests, as starting one takes long."""

import pytest

from ssgrpo_lightning.engines import VllmEngine

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
