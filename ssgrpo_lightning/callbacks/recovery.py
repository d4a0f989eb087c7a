"""What a run that ends early goes on from: when it is saved, and how signals end it."""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from ssgrpo_lightning import parallel
from ssgrpo_lightning.checkpoints import newest_first, update_of
from ssgrpo_lightning.evaluation import validate_now
from ssgrpo_lightning.metrics_file import MetricsFile
from ssgrpo_lightning.run_state import random_state, restore_random

RESUMABLE = os.EX_TEMPFAIL
"""Exit code of a run that a signal ended and that can be resumed: 75, "try again later"."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Recovery(Checkpoint):
    """Keeps ``last.ckpt`` and the one before it, from which a run goes on as if it had never ended.

    Saved after every validation, at the end, where `every` or `minutes` say so, and at SIGTERM or
    SIGUSR1: then the update in progress is finished, and the run ends with exit code 75 and the
    line that resumes it. Holds the random state of every rank and whether a validation was still to
    come. Lightning calls it last, so that the state of all other callbacks is in the file.

    Args:
        every: Updates between two saves; 0: none but the others.
        minutes: Most minutes between two saves; 0: any.
    """

    def __init__(self, every: int = 20, minutes: float = 0.0) -> None:
        for name, value in (("every", every), ("minutes", minutes)):
            if value < 0:
                raise ValueError(f"recovery.{name} is {value}, must be at least 0: 0 is never")
        self.every, self.minutes = every, minutes
        self.received, self.saved_at = 0, 0
        self.resumed: dict[str, Any] | None = None
        self.former: dict[int, Any] = {}

    # --- what a checkpoint holds ---------------------------------------------------------------

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for logger in trainer.loggers:
            logger.save()
        tables = [x.experiment for x in trainer.loggers if isinstance(x, MetricsFile)]
        checkpoint["recovery"] = {
            "random": parallel.objects(pl_module, random_state()),
            "validation_due": trainer.training and _validation_follows(trainer),
            # Of `metrics.csv`: those after them belong to updates that a resumed run makes again.
            "rows": tables[0].written if tables and trainer.is_global_zero else 0,
        }

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.resumed = checkpoint.get("recovery")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.folder = Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints"
        self.clock, self.saved_at = monotonic(), trainer.global_step
        # One that came while all was set up is Lightning's knowledge.
        self.received = int(signal.SIGTERM) if trainer.received_sigterm else 0
        if threading.current_thread() is threading.main_thread():
            # Only now: Lightning has registered its own, which would stop without a checkpoint, and
            # which send to all ranks from within a handler.
            self.former = {number: signal.signal(number, self._receive) for number in SIGNALS}
        if self.resumed is None:
            return
        self._restore_random(trainer)
        if self.resumed["validation_due"]:
            validate_now(trainer)
            self.resumed["random"] = [random_state()] * trainer.world_size

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.resumed is not None:
            # Once more: what came in between, loaders above all, may have drawn.
            self._restore_random(trainer)
            self.resumed = None

    def _restore_random(self, trainer: L.Trainer) -> None:
        assert self.resumed is not None
        states: list[Mapping[str, Any]] = self.resumed["random"]
        if trainer.global_rank < len(states):
            restore_random(states[trainer.global_rank])

    # --- when it is written --------------------------------------------------------------------

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        late = self.minutes > 0 and monotonic() - self.clock >= 60 * self.minutes
        asked = torch.tensor([self.received, late], device=pl_module.device)
        received, late = parallel.global_max(pl_module, asked).tolist()
        update, follows = trainer.global_step, _validation_follows(trainer)
        due = late or update == trainer.max_steps or (self.every and update % self.every == 0)
        # What comes after a validation is saved after it, but a signal grants no time for one.
        if received or (due and not follows):
            self._save(trainer)
        if received:
            self._leave(trainer, signal.Signals(received).name)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and trainer.global_step:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        if trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            return
        trainer.save_checkpoint(self.folder / "last.ckpt")
        self.clock, self.saved_at = monotonic(), trainer.global_step

    # --- signals -------------------------------------------------------------------------------

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for number, handler in self.former.items():
            signal.signal(number, handler)
        self.former = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Noted only: it may come in the middle of anything, and on one rank alone.
        self.received = number

    def _leave(self, trainer: L.Trainer, name: str) -> None:
        found = next(newest_first(self.folder), None) if trainer.is_global_zero else None
        if found is None:
            way = "no checkpoint could be written, so that it has to start anew"
        else:
            way = f"go on from update {update_of(found)} with: {resume_line(found)}"
        rank_zero_info(f"{name}: the run ends after update {trainer.global_step}; {way}")
        # Another code than 0 on other ranks would let the launcher kill this one.
        raise SystemExit(RESUMABLE if trainer.is_global_zero else 0)


def resume_line(checkpoint: Path | str) -> str:
    """This process's command line, going on from a checkpoint."""
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word == "--ckpt_path":
            next(words, None)
        elif not word.startswith("--ckpt_path="):
            kept.append(word)
    return shlex.join(["python", sys.argv[0], *kept, f"--ckpt_path={checkpoint}"])


def _validation_follows(trainer: L.Trainer) -> bool:
    """Whether a validation comes right after the update that is ending."""
    every, loop = trainer.val_check_batch, trainer.fit_loop.epoch_loop  # pyright: ignore
    if not trainer.enable_validation or every is None:
        return False
    if trainer.check_val_every_n_epoch is None:
        return (loop.total_batch_idx + 1) % every == 0
    last = loop.batch_progress.is_last_batch if every == float("inf") else False
    counts = (trainer.current_epoch + 1) % trainer.check_val_every_n_epoch == 0
    return counts and (last or (loop.batch_idx + 1) % every == 0)
