"""The strategies: which are supported, and FSDP2, which spreads weights over ranks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from ssgrpo_lightning.sharding import Shardable

FIND_UNUSED = "ddp_find_unused_parameters_true"
Precision = Literal["float32", "bfloat16", "float16"]


class FSDP2(ModelParallelStrategy):
    """Weights, gradients and optimiser state spread over ranks (``fully_shard``).

    Each decoder layer is gathered when its turn comes; for rollouts all are, once a phase. What has
    no decoder layers, such as a small estimator, is whole on every rank, and its gradients are
    averaged here. Checkpoints are plain files of whole tensors, as of one process: a run may go on
    with another strategy or another number of ranks.

    Args:
        replicas: Copies of the weights; each is spread over world size / replicas ranks, such as
            those of one host, and gradients are averaged over copies.
        param_dtype: Precision in which weights are gathered and multiplied; null: their own.
        reduce_dtype: Precision in which gradients are averaged; null: that of `param_dtype`.
        whole_gradients: Keep whole gradients until the last micro-batch of an optimiser step: fewer
            collectives, at the memory of all gradients on every rank.
        tensor_parallel_size: Must be 1.
        timeout: How long a collective waits for the other ranks.
        process_group_backend: Null: nccl on GPUs, gloo on CPUs.
    """

    def __init__(
        self,
        replicas: int = 1,
        param_dtype: Precision | None = None,
        reduce_dtype: Precision | None = None,
        whole_gradients: bool = False,
        tensor_parallel_size: int = 1,
        timeout: timedelta | None = timedelta(minutes=30),
        process_group_backend: str | None = None,
    ) -> None:
        if tensor_parallel_size != 1:
            raise ValueError(
                f"trainer.strategy.tensor_parallel_size is {tensor_parallel_size}, must be 1: the "
                "chunked LM head and attention over shared prompts compute with whole weights of a "
                "layer. FSDP2 spreads the same memory; VllmEngine has a tensor_parallel_size"
            )
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.replicas, self.whole_gradients = replicas, whole_gradients
        gathered, reduced = (x and getattr(torch, x) for x in (param_dtype, reduce_dtype))
        self.precision_policy = MixedPrecisionPolicy(gathered, reduced)

    # --- sharding --------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Ranks, process group and mesh."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        if self.replicas < 1 or self._data_parallel_size % self.replicas:
            raise ValueError(
                f"trainer.strategy.replicas is {self.replicas}, must divide the number of ranks "
                f"({self._data_parallel_size}): use 1, or the number of hosts"
            )
        super().setup_environment()

    def mesh(self) -> DeviceMesh:
        """The ranks that weights are spread over."""
        if self.replicas == 1:
            return self.device_mesh["data_parallel"]
        shape = (self.replicas, self.world_size // self.replicas)
        names = ("replica", "shard")
        return init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)

    def shard(self, module: nn.Module, mesh: DeviceMesh | None = None) -> None:
        """Spread every `Shardable` within a module; before its optimisers are made.

        Args:
            module: The module.
            mesh: Ranks to spread over; None: those of the run.
        """
        mesh = mesh or self.mesh()
        models = [m for m in module.modules() if isinstance(m, Shardable)]
        # A trainer that is used again finds them as they are.
        for model in [m for m in models if not isinstance(m, FSDPModule)]:
            for part in [*model.layers(), model]:
                fully_shard(part, mesh=mesh, mp_policy=self.precision_policy)
            assert isinstance(model, FSDPModule) and isinstance(model, Shardable)
            for name in model.passes:
                register_fsdp_forward_method(model, name)
            # The first pass says which module is the root, and rollouts begin with a layer.
            with torch.no_grad():
                model.idle()
            model.reset_iter_state()

    def setup(self, trainer: L.Trainer) -> None:
        """Move what is left whole to its device, the same on every rank; make the optimisers.

        Raises:
            ValueError: The module that is trained did not let itself be sharded.
        """
        assert self.lightning_module is not None
        if not any(isinstance(m, FSDPModule) for m in self.lightning_module.modules()):
            raise ValueError(
                f"trainer.strategy is FSDP2, but {type(self.lightning_module).__name__} has "
                "nothing to spread over ranks, which would then learn apart: use ddp"
            )
        super().setup(trainer)
        for parameter in _whole(self.lightning_module):
            dist.broadcast(parameter.detach(), 0)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Where whole gradients are kept, leave them unreduced; elsewhere every pass reduces."""
        roots = [m for m in self.model.modules() if isinstance(m, FSDPModule)]  # pyright: ignore
        for root in roots if self.whole_gradients else ():
            root.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for root in roots if self.whole_gradients else ():
                root.set_requires_gradient_sync(True, recurse=False)

    def average_whole(self, module: nn.Module) -> None:
        """Average over ranks the gradients of what is not spread, as FSDP2 does those of the rest.

        In one collective. A rank that had none has zeros.
        """
        parameters = _whole(module)
        if not parameters:
            return
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        flat = torch.cat([p.grad.flatten().float() for p in parameters if p.grad is not None])
        dist.all_reduce(flat)
        flat /= self.world_size
        for p, mean in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad = mean.view_as(p).to(p.dtype)

    # --- checkpoints of whole tensors ------------------------------------------------------------

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning hands the states of optimisers to `load_optimizer_state_dict`."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors on the CPU of rank 0, gathered one at a time; empty on other ranks."""
        assert self.lightning_module is not None
        # As they are, so that a weight which two names share is gathered once, and stays shared.
        return self._gathered(self.lightning_module.state_dict(keep_vars=True))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """What the optimiser's own ``state_dict`` would be on one process; empty but on rank 0.

        Not ``get_optimizer_state_dict``, which steps an optimiser that has no state yet, and so
        changes what is trained.
        """
        state = getattr(optimizer, "_optimizer", optimizer).state_dict()
        whole = {i: self._gathered(of_one) for i, of_one in state["state"].items()}
        return {**state, "state": whole} if self.is_global_zero else {}

    def _gathered(self, named: Mapping[str, Any]) -> dict[str, Any]:
        done: dict[int, Any] = {}
        for value in named.values():
            if isinstance(value, Tensor) and id(value) not in done:
                full = value.detach()
                full = full.full_tensor() if isinstance(full, DTensor) else full
                done[id(value)] = full.cpu() if self.is_global_zero else None
        return {n: done.get(id(v), v) for n, v in named.items()} if self.is_global_zero else {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """One file, written by rank 0."""
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The file as it is, on every rank; the hooks below take this rank's part of it."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's part of whole weights."""
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict(keep_vars=True)
        parts = {n: _part(x, own.get(n)) for n, x in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(parts, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's part of the whole states of optimisers."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            parts = {
                index: {name: _part(x, parameters[index]) for name, x in of_one.items()}
                for index, of_one in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": parts})


StrategyRegistry.register("fsdp2", FSDP2, "Weights spread over ranks by fully_shard (FSDP2)")


def _whole(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that learn and are not spread."""
    return [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]


def _part(value: Any, like: Any) -> Any:
    """A whole tensor, spread as another of the same shape is; anything else as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def shard(module: L.LightningModule) -> None:
    """Spread the models of the trained module over ranks, where the strategy does so."""
    strategy = module.trainer.strategy
    if isinstance(strategy, FSDP2):
        strategy.shard(module)


def average_whole(root: L.LightningModule, module: nn.Module) -> None:
    """Average what no strategy averages by itself: gradients of weights that FSDP2 left whole.

    Args:
        root: Module that the trainer knows.
        module: Module that has just learnt.
    """
    strategy = root.trainer.strategy
    if isinstance(strategy, FSDP2):
        strategy.average_whole(module)


def refuse_unsupported(strategy: Strategy, offloads: bool = False) -> None:
    """Refuse what manual optimisation with two alternating modules cannot keep right.

    Args:
        strategy: The trainer's.
        offloads: Whether the policy keeps the state of its optimiser on the CPU.

    Raises:
        ValueError: A strategy that is not supported, with the reason and what to use.
    """
    name = type(strategy).__name__
    if name == "FSDP2" and offloads:
        raise ValueError(
            "policy.offload_optimizer is true, but trainer.strategy is fsdp2, which spreads the "
            "state of the optimiser over ranks already: leave it out"
        )
    if name in ("SingleDeviceStrategy", "FSDP2"):
        return
    options = getattr(strategy, "_ddp_kwargs", {})
    if name == "DDPStrategy" and not options.get("find_unused_parameters"):
        raise ValueError(
            "trainer.strategy is ddp, which waits in every backward pass for the gradients of all "
            f"parameters, but policy and estimator alternate: use {FIND_UNUSED}"
        )
    if name == "DDPStrategy" and options.get("static_graph"):
        raise ValueError(
            "trainer.strategy is DDPStrategy with static_graph, but the graph changes where policy "
            "and estimator alternate: leave static_graph out"
        )
    if name != "DDPStrategy":
        why = {
            "FSDPStrategy": "whose first version cannot average the gradients of manual "
            "optimisation (Lightning 19685)",
            "ModelParallelStrategy": "which spreads nothing by itself",
            "DeepSpeedStrategy": "which owns one optimiser, where two modules alternate",
        }.get(name, "which was never tried with two modules that alternate")
        raise ValueError(
            f"trainer.strategy is {name}, {why}: use fsdp2, which spreads the weights, or "
            f"{FIND_UNUSED}"
        )
