"""Some rollouts of every few updates, coloured by credit: console, JSON lines, HTML, W&B table."""

import json
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor

from ssgrpo_lightning.alternation import SSGRPO
from ssgrpo_lightning.functional import mixed_groups
from ssgrpo_lightning.records import Rollouts, StepScores
from ssgrpo_lightning.report.colours import ColouredRollout, to_ansi, to_html
from ssgrpo_lightning.rollouts import step_texts

COLUMNS = ["policy_step", "prompt", "completion", "reward", "advantage", "reason", "steps"]


class RolloutLog(L.Callback):
    """Shows rollouts of one group with mixed outcomes, successes and failures in turn.

    Writes ``rollouts.jsonl`` (all shown so far) and ``rollouts.html`` (the last ones) into the run
    folder, and adds rows to the W&B table ``rollouts``, which keeps its history.

    Args:
        every: Updates between two showings; 0: never.
        rows: Rollouts of a showing.
        console: Whether to print them.
    """

    def __init__(self, every: int = 20, rows: int = 2, console: bool = True) -> None:
        for field, value, least in (("every", every, 0), ("rows", rows, 1)):
            if value < least:
                raise ValueError(f"rollout_log.{field} is {value}, must be at least {least}")
        self.every, self.rows, self.console = every, rows, console
        self.table: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.log_dir = trainer.log_dir  # asking is a broadcast, and only rank 0 writes
        if trainer.is_global_zero and self.log_dir is not None:
            _forget_after(trainer.global_step, Path(self.log_dir) / "rollouts.jsonl")

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not isinstance(pl_module, SSGRPO) or not trainer.is_global_zero or not self.every:
            return
        step = pl_module.policy_step
        if step != 1 and step % self.every:
            return
        rollouts, scores = outputs["rollouts"], outputs["scores"]
        rows = _interesting(rollouts)[: self.rows]
        shown = [coloured(pl_module, rollouts, scores, outputs["weights"], row) for row in rows]
        if self.console:
            text = "\n".join(map(to_ansi, shown))
            trainer.progress_bar_callback.print(text) if trainer.progress_bar_callback else print(
                text
            )
        self._write(step, shown)
        self._tabulate(trainer, step, shown)

    def _write(self, step: int, shown: list[ColouredRollout]) -> None:
        if self.log_dir is None:
            return
        folder = Path(self.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "rollouts.jsonl").open("a") as file:
            for rollout in shown:
                file.write(json.dumps({"policy_step": step, **vars(rollout)}) + "\n")
        (folder / "rollouts.html").write_text(to_html(shown, f"Rollouts of update {step}"))

    def _tabulate(self, trainer: L.Trainer, step: int, shown: list[ColouredRollout]) -> None:
        for logger in trainer.loggers:
            if not isinstance(logger, WandbLogger):
                continue
            import wandb

            if self.table is None:
                self.table = wandb.Table(columns=list(COLUMNS), log_mode="INCREMENTAL")
            for rollout in shown:
                steps = [
                    f"[{w:.2f}] {t.strip()}"
                    for w, t in zip(rollout.weights, rollout.steps, strict=True)
                ]
                self.table.add_data(
                    step,
                    rollout.prompt,
                    "".join(rollout.steps),
                    rollout.reward,
                    rollout.advantage,
                    rollout.reason,
                    "\n".join(steps),
                )
            logger.experiment.log({"rollouts": self.table, "policy_step": step})


def coloured(
    module: SSGRPO, rollouts: Rollouts, scores: StepScores, weights: Tensor, row: int
) -> ColouredRollout:
    """One rollout as people see it; weights are those before the gate."""
    assert module.policy.policy is not None
    texts = step_texts(rollouts, module.policy.policy, row)
    prompt, reward = rollouts.problems[row].prompt, float(rollouts.rewards[row])
    return ColouredRollout(
        prompt=prompt if isinstance(prompt, str) else prompt[-1]["content"],
        steps=tuple(texts),
        values=tuple(scores.values[row, : len(texts)].tolist()),
        weights=tuple(weights[row, : len(texts)].tolist()),
        advantage=float(scores.advantages[row]),
        reward=None if reward != reward else reward,
        reason=rollouts.reasons[row],
    )


def _forget_after(update: int, file: Path) -> None:
    """Take out of a file the rollouts of updates that a resumed run makes again."""
    if file.is_file():
        lines = file.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["policy_step"] <= update]
        file.write_text("".join(kept))


def _interesting(rollouts: Rollouts) -> list[int]:
    """Rows of the first group with mixed outcomes, best and worst in turn; else the first group."""
    mixed = mixed_groups(rollouts.rewards, rollouts.group)
    first = int(rollouts.group[mixed][0]) if bool(mixed.any()) else int(rollouts.group[0])
    rows = (rollouts.group == first).nonzero()[:, 0]
    order = rows[
        rollouts.rewards[rows].nan_to_num(-1).argsort(descending=True, stable=True)
    ].tolist()
    turns = [order[i // 2] if i % 2 == 0 else order[-1 - i // 2] for i in range(len(order))]
    return turns
