"""Losses and gradients that are not finite: their optimiser steps counted, their rollouts kept."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssgrpo_lightning.parallel import Tally
from ssgrpo_lightning.stored import to_rows

if TYPE_CHECKING:
    from ssgrpo_lightning.alternation import SSGRPO


def note(module: "SSGRPO", name: str, tally: Tally) -> dict[str, Tensor]:
    """Count the optimiser steps that a phase skipped, for the log.

    Args:
        module: The module that is trained.
        name: ``policy`` or ``estimator``: what was to move.
        tally: What the phase made.

    Raises:
        FloatingPointError: Too many in a row were skipped, on every rank. The rollouts of the last
            one stand in the run folder, for each rank in a file of its own.
    """
    before = 0 if tally.made else module.skipped_in_a_row[name]
    count = module.skipped_in_a_row[name] = before + tally.in_a_row
    if count > module.max_skipped:
        file = _kept(module, name, tally)
        raise FloatingPointError(
            f"update {module.policy_step + 1}: loss or gradient of the {name} was not finite in "
            f"{count} optimiser steps in a row (model.max_skipped is {module.max_skipped}). The "
            f"rollouts of the last one stand in {file}: look at their log-probabilities and "
            f"rewards, lower {name}.optimizer's lr, and resume from an earlier checkpoint"
        )
    return {"skipped_steps": torch.tensor(float(tally.skipped))}


def _kept(module: "SSGRPO", name: str, tally: Tally) -> Path:
    """Write the rollouts of the micro-batches at fault, in the form of `predict`."""
    trainer = module.trainer
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    folder.mkdir(parents=True, exist_ok=True)
    update, rank = module.policy_step + 1, trainer.global_rank
    file = folder / f"not-finite-{name}-update{update}-rank{rank}.jsonl"
    rows = [row for loss in tally.offending for row in to_rows(loss.args[0].rollouts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
