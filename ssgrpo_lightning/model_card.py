"""README.md of an exported model: what trained it, how well it did, how it is loaded."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from ssgrpo_lightning.policy import PACKAGE, Pretrained

TAG = "ssgrpo-lightning"


def card(
    name: str,
    base: Pretrained,
    dtype: str,
    method: Mapping[str, str],
    metrics: Mapping[str, Any],
    config: str,
    adapter_rank: int | None = None,
) -> str:
    """Text of the card.

    Args:
        name: Name of the model, and of the folder in which it lies.
        base: What it was trained from.
        dtype: Precision of its weights.
        method: What trained it, by swap point.
        metrics: What was measured of it.
        config: The run's config as YAML.
        adapter_rank: Rank, where it is an adapter of its base and no model.
    """
    front = {
        "base_model": base_id(base),
        "library_name": "transformers" if adapter_rank is None else "peft",
        "pipeline_tag": "text-generation",
        "tags": [TAG, "reinforcement-learning", "grpo"] + ["lora"] * (adapter_rank is not None),
    }
    blocks = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}",
        f"Trained from `{base.name}` with SSGRPO Lightning {version(TAG)}: "
        + ", ".join(f"{part} `{member}`" for part, member in method.items())
        + ".",
        "\n".join(["| | |", "|---|--:|", *(f"| {k} | {v} |" for k, v in metrics.items())]),
        "## Use",
        _use(name, base, dtype, adapter_rank),
        "## Config of the run",
        f"```yaml\n{config.strip()}\n```",
    ]
    return "\n\n".join(blocks) + "\n"


def base_id(base: Pretrained) -> str:
    """The base model in the form that the Hub takes: of a folder or file, its name alone."""
    name = base.name.removeprefix(PACKAGE)
    local = name.endswith(".gguf") or name.startswith((".", "/"))
    return Path(name).name.removesuffix(".gguf") if local else name


def _use(name: str, base: Pretrained, dtype: str, adapter_rank: int | None) -> str:
    """How it is loaded, where it lies in a folder of that name."""
    given = ", ".join(f"{key}={value!r}" for key, value in base.source().items())
    load = f'AutoModelForCausalLM.from_pretrained("{name}")'
    serve = f"vllm serve {name} --dtype {dtype}"
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    if adapter_rank is not None:
        lines.append("from peft import PeftModel")
        load = f'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({given}), "{name}")'
        path = base.source()["pretrained_model_name_or_path"]
        limit = max(8, 1 << (adapter_rank - 1).bit_length())  # vLLM takes powers of two
        serve = f"vllm serve {path} --dtype {dtype} --enable-lora --max-lora-rank {limit} "
        serve += f"--lora-modules {name}=./{name}"
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{name}")', f"model = {load}"]
    python = "\n".join(lines)
    return f"```python\n{python}\n```\n\n```bash\n{serve}\n```"
