"""Low-rank adapters, through peft (extra ``lora``)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors.torch import save_file


@dataclass(frozen=True)
class Lora:
    """Train low-rank updates W + (alpha / rank) B A instead of the weights W.

    Gradients and optimiser state are as small as the adapter; with the adapter switched off the
    model is its own reference. Source: LoRA, Hu et al. (2106.09685).
    """

    rank: int = 16
    """Rank of each update."""
    alpha: float = 32.0
    """Scale of the updates: alpha / rank multiplies B A."""
    dropout: float = 0.0
    """Share of inputs of A dropped in training; above 0 the trained policy is not quite the one
    that sampled, and ratios are noisy."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers that get one; ``all-linear``: every linear layer but the LM head."""

    def __post_init__(self) -> None:
        rules = {
            "rank": (self.rank >= 1, "at least 1: 16 is usual"),
            "alpha": (self.alpha > 0, "greater than 0: twice the rank is usual"),
            "dropout": (0 <= self.dropout < 1, "in [0, 1): use 0"),
        }
        for field, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"policy.lora.{field} is {getattr(self, field)}, must be {rule}")
        if find_spec("peft") is None:
            raise ValueError(
                "policy.lora needs peft, which is not installed: pip install 'ssgrpo-lightning"
                "[lora]', or set policy.lora to null"
            )

    def add_to(self, model: Any) -> None:
        """Put the adapter into a transformers model, as no change at first, and freeze the rest.

        Raises:
            ValueError: No layer has such a name, or the LM head does.
        """
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # pyright: ignore[reportArgumentType]
            lora_dropout=self.dropout,
            target_modules=self.target_modules,
        )
        inject_adapter_in_model(config, model)
        if hasattr(model.get_output_embeddings(), "lora_A"):
            raise ValueError(
                f"policy.lora.target_modules is {self.target_modules!r}, which names the LM head, "
                "whose logits are computed from its weight alone: leave it out"
            )


def merge(model: Any) -> None:
    """Add the adapter to the weights it adapts, and leave a model that has none."""
    for name, layer in list(_adapted(model)):
        layer.merge(safe_merge=True)  # refuses an adapter that is not finite
        model.set_submodule(name, layer.get_base_layer())


def save(model: Any, folder: Path, base: str) -> None:
    """Write the adapter alone, for peft to load.

    Args:
        model: A transformers model with the adapter.
        folder: Where to.
        base: Name or folder of the model that it stands on.
    """
    from peft import get_peft_model_state_dict

    config = model.peft_config["default"]
    config.base_model_name_or_path, config.task_type = base, "CAUSAL_LM"
    config.inference_mode = True
    config.save_pretrained(str(folder))
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in state.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Switch a model's adapter off for a while.

    Raises:
        ValueError: It has none.
    """
    layers = [layer for _, layer in _adapted(model)]
    if not layers:
        raise ValueError("the policy has no adapter to switch off: set policy.lora")
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _adapted(model: Any) -> Iterator[tuple[str, Any]]:
    """Layers that have an adapter, by name."""
    return ((name, m) for name, m in model.named_modules() if hasattr(m, "lora_A"))
