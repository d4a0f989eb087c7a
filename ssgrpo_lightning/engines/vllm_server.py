"""Rollouts on a vLLM server: other GPUs of this machine, or other machines."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from weakref import WeakKeyDictionary

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from ssgrpo_lightning.engines.engine import RolloutEngine, Samples, Sampling
from ssgrpo_lightning.engines.exchange import (
    Completion,
    export,
    fingerprint,
    refuse_stop_strings,
    seeds,
    to_samples,
)
from ssgrpo_lightning.policy import Policy

START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs "
    "--generation-config vllm"
)
"""How to start a server: `MODEL` is any checkpoint of the policy's architecture. The development
mode adds the addresses that weights are pushed by, so let nobody else reach the server."""


@dataclass(frozen=True)
class VllmServer(RolloutEngine):
    """A vLLM server with the OpenAI interface that takes the policy's weights from a folder.

    Start it with ``VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs
    --generation-config vllm``, where trusted machines alone can reach it. Whenever the policy or
    the server has changed, the first rank writes the policy to `folder` and has the server read it.
    Entropies and seeds are as with `VllmEngine`; this side needs no extra.
    """

    follows_noise: ClassVar[bool] = False
    keeps_copy: ClassVar[bool] = True

    folder: str
    """Where weights are left for the server; both sides see it under this name."""
    url: str = "http://localhost:8000"
    """Address of the server."""
    concurrency: int = 64
    """Most requests under way; more of them wait here instead of there."""
    timeout: float = 600.0
    """Seconds after which a request counts as failed."""
    retries: int = 5
    """Tries after a failed one, 1, 2, 4 … seconds later; a refused request is not tried again."""
    rows_at_once: int = 64
    """Completions of one forward pass of the policy, which gives the entropies."""

    def __post_init__(self) -> None:
        rules = {
            "url": (self.url.startswith(("http://", "https://")), "start with http:// or https://"),
            "concurrency": (self.concurrency >= 1, "be at least 1; 64 is usual"),
            "timeout": (self.timeout > 0, "be greater than 0; 600 is usual"),
            "retries": (self.retries >= 0, "be at least 0; 5 is usual"),
            "rows_at_once": (self.rows_at_once >= 1, "be at least 1; 64 is usual"),
        }
        for field, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"VllmServer.{field} is {getattr(self, field)}, must {rule}")

    def generate(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        repeats: int,
        sampling: Sampling,
        noise: Float[Tensor, "rollout new"],
    ) -> Samples:
        refuse_stop_strings("VllmServer", sampling)
        owners = [prompt for prompt in prompts for _ in range(repeats)]
        numbers = seeds(noise)
        for _ in range(self.retries + 1):
            before = self._follow(policy)
            with ThreadPoolExecutor(self.concurrency) as threads:
                calls = [
                    threads.submit(self._complete, prompt, seed, sampling, policy.eos_ids)
                    for prompt, seed in zip(owners, numbers)
                ]
            if self._instance() == before:
                done = [call.result() for call in calls]
                return to_samples(policy, owners, done, sampling, self.rows_at_once)
            # What a restarted server says comes from the weights it started with.
        raise RuntimeError(
            f"the vLLM server at {self.url} restarted during each of {self.retries + 1} calls: "
            "see its log, and give it more memory or VllmServer.concurrency a smaller number"
        )

    def _complete(
        self, prompt: Sequence[int], seed: int, sampling: Sampling, eos_ids: frozenset[int]
    ) -> Completion:
        body = {
            "prompt": list(prompt),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,
            "stop_token_ids": sorted(eos_ids),
        }
        choice = self._ask("/v1/completions", body)["choices"][0]
        return Completion(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def _follow(self, policy: Policy) -> str:
        """Let the server have the policy's weights; returns which start of it has them."""
        instance = self._instance()
        state = (self.url, instance, fingerprint(policy))
        if _PUSHED.get(policy) != state:
            ranks = dist.is_initialized()
            first = not ranks or dist.get_rank() == 0
            folder = export(policy, Path(self.folder), writes=first)
            if first:
                how = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                self._ask("/collective_rpc", how)
                self._ask("/reset_prefix_cache", {})
            if ranks:  # nobody samples before the weights are there
                dist.barrier()
            _PUSHED[policy] = state
        return instance

    def _instance(self) -> str:
        """What tells this start of the server from the ones before."""
        return self._ask("/server_info?config_format=json")["vllm_config"]["instance_id"]

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """One request, tried again while the server does not answer.

        Raises:
            RuntimeError: It refused the request, or never answered.
        """
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, {"Content-Type": "application/json"})
        failure: Exception | None = None
        for attempt in range(self.retries + 1):
            try:
                with urlopen(request, timeout=self.timeout) as response:
                    text = response.read()
                return json.loads(text) if text else None
            except HTTPError as error:
                failure = error
                if error.code < 500:
                    raise RuntimeError(
                        f"the vLLM server at {self.url} refused {path} ({error.code} "
                        f"{error.read().decode(errors='replace')[:300]}): start it with {START}"
                    ) from error
            except (OSError, HTTPException) as error:
                failure = error
            if attempt < self.retries:
                time.sleep(2**attempt)
        raise RuntimeError(
            f"the vLLM server at {self.url} did not answer {path} in {self.retries + 1} tries "
            f"({failure!r}): start it again with {START}, and resume the run with --ckpt_path"
        ) from failure


# Which start of which server has which weights of a policy.
_PUSHED: WeakKeyDictionary[Policy, tuple[str, str, tuple[int, ...]]] = WeakKeyDictionary()
