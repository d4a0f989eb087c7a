"""A checkpoint of a run as a Hugging Face folder, which transformers loads and vLLM serves."""

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shutil import copymode
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import yaml
from torch import Tensor

from ssgrpo_lightning import lora, saved_weights
from ssgrpo_lightning.model_card import card
from ssgrpo_lightning.policy import Policy
from ssgrpo_lightning.policy_module import PolicyModule

README = "README.md"
WRITTEN = "<!-- files of this export: "
ACCURACY = "val/accuracy"


def export(
    module: PolicyModule,
    checkpoint: Path,
    out: Path,
    adapter: Literal["merge", "keep"],
    dtype: Literal["float32", "bfloat16", "float16"] | None,
    method: Mapping[str, str],
    config: str,
) -> Path:
    """Write the policy of a checkpoint, with what its users want to know; returns the folder.

    It is written beside and renamed, so that no reader sees half of it.

    Args:
        module: Says which model the policy was trained from, and with which adapter.
        checkpoint: A file that Lightning wrote, or a folder of shards.
        out: Folder to write; an earlier export there is replaced.
        adapter: ``merge`` adds a LoRA adapter to the weights; ``keep`` writes it alone, for peft.
        dtype: Precision of the weights written; None: that of the policy.
        method: What trained it, by swap point, for the model card.
        config: The config as YAML, for the card where the run's folder has none.

    Raises:
        ValueError: The folder holds other files, or the checkpoint is damaged or does not fit the
            config.
    """
    out = out.absolute()
    refuse_folder(out)
    keep = adapter == "keep"
    if keep and module.lora is None:
        raise ValueError("adapter is 'keep', but policy.lora is null: there is none to keep")
    run = checkpoint.absolute().parents[1]
    if (run / "config.yaml").is_file():
        config = (run / "config.yaml").read_text()
        _refuse_other_scale(module, config)
    saved = saved_weights.read(checkpoint)
    policy = _load(module, saved.weights, keep)
    precision = dtype or module.model.dtype
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as beside:
        new = Path(beside) / "new"
        new.mkdir()
        _write(module, policy, new, keep, precision)
        rank = module.lora.rank if keep and module.lora is not None else None
        measured = _measured(saved.rest, run)
        text = card(out.name, module.model, precision, method, measured, config, rank)
        files = sorted([README, *(path.name for path in new.iterdir())])
        (new / README).write_text(f"{text}\n{WRITTEN}{' '.join(files)} -->\n")
        for name in files:  # safetensors leaves files that no server under another user may read
            copymode(new / README, new / name)
        if out.exists():
            out.rename(Path(beside) / "old")
        new.rename(out)
    return out


def refuse_folder(out: Path) -> None:
    """Refuse to replace what no export wrote.

    Raises:
        ValueError: It is a file, or a folder with other files.
    """
    if out.is_file():
        raise ValueError(f"out is {str(out)!r}, which is a file: name a folder")
    card = (out / README).read_text() if (out / README).is_file() else ""
    known = card.rpartition(WRITTEN)[2].partition(" -->")[0].split() if WRITTEN in card else []
    present = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    other = next((name for name in present if name not in known), None)
    if other is not None:
        raise ValueError(
            f"out is {str(out)!r}, which holds {other!r}, that no export wrote there: name a new "
            "or empty folder, or move its files away"
        )


def _refuse_other_scale(module: PolicyModule, config: str) -> None:
    """Refuse an adapter scaled otherwise than in the run: no shape would tell."""
    trained = yaml.safe_load(config)["model"]["init_args"]["policy"]["init_args"].get("lora")
    if module.lora is not None and trained and trained["alpha"] != module.lora.alpha:
        raise ValueError(
            f"policy.lora.alpha is {module.lora.alpha}, but the run trained its adapter under "
            f"{trained['alpha']}: export with the run's own config.yaml"
        )


def _load(module: PolicyModule, weights: dict[str, Tensor], keep: bool) -> Policy:
    """The policy with the weights of a checkpoint.

    Where the base was quantised, the adapter was trained beside what stands in its file.
    """
    quantised = module.model.quantize is not None
    policy = replace(module.model, quantize=None).load(layout=module.layout, lora=module.lora)
    own = policy.model.state_dict()
    if quantised:
        own, weights = ({n: w for n, w in part.items() if ".lora_" in n} for part in (own, weights))
    _refuse_other_architecture(own, weights)
    if keep:
        for name, tensor in own.items():
            if ".lora_" not in name and not torch.equal(tensor, weights[name]):
                raise ValueError(
                    f"adapter is 'keep', but {name} of the checkpoint is not that of "
                    f"{module.model.name!r}, which the adapter would be put on: use merge"
                )
    policy.model.load_state_dict(weights, strict=not quantised)
    return policy.eval()


def _refuse_other_architecture(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    way_out = "export with the config of the run, config.yaml in its folder"
    for name, tensor in own.items():
        if name not in weights:
            raise ValueError(f"the checkpoint has no parameter {name}, the model has: {way_out}")
        if weights[name].shape != tensor.shape:
            raise ValueError(
                f"parameter {name} has shape {tuple(weights[name].shape)} in the checkpoint and "
                f"{tuple(tensor.shape)} in the model: {way_out}"
            )
    unexpected = next((name for name in weights if name not in own), None)
    if unexpected is not None:
        raise ValueError(f"the checkpoint has a parameter {unexpected}, not the model: {way_out}")


def _write(module: PolicyModule, policy: Policy, folder: Path, keep: bool, dtype: str) -> None:
    """Weights, tokenizer and settings."""
    model, tokenizer = policy.model, policy.codec.tokenizer
    # Whatever ended a completion in training ends it wherever it is served.
    model.generation_config.eos_token_id = sorted(policy.eos_ids) or None
    model.generation_config.pad_token_id = policy.codec.pad_id
    if module.lora is not None and not keep:
        lora.merge(model)
    model.to(getattr(torch, dtype))
    if not keep:
        policy.save(folder)
        return
    lora.save(model, folder, module.model.source()["pretrained_model_name_or_path"])
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _measured(rest: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """What is known of how far and how well the policy was trained."""
    counters = rest.get("ssgrpo", {})
    updates = counters.get("policy_step")
    found = {"policy updates": updates, "tokens": counters.get("num_tokens")}
    accuracies = [
        state["current_score"].item()
        for state in rest.get("callbacks", {}).values()
        if isinstance(state, Mapping) and state.get("monitor") == ACCURACY
        if state.get("current_score") is not None
    ]
    if updates is not None and (run / "metrics.csv").is_file():
        with (run / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row.get(ACCURACY)]
        accuracies += [
            float(row[ACCURACY]) for row in rows if float(row["policy_step"] or 0) <= updates
        ]
    found["accuracy at the last validation"] = accuracies[-1] if accuracies else None
    return {name: value for name, value in found.items() if value is not None}
