"""A progress bar that says what the update is doing."""

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm


class PhaseBar(TQDMProgressBar):
    """Counts updates; shows the phase (rollout, score, policy, estimator), reward and entropy."""

    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.set_description_str("update")
        return bar

    def on_train_epoch_start(self, trainer: L.Trainer, *_: object) -> None:
        # One bar for the whole run: epochs over the problems mean little here, and a reset at each
        # would restart its clock.
        if 0 < trainer.max_steps == self.train_progress_bar.total:
            return
        super().on_train_epoch_start(trainer)
        bar, done = self.train_progress_bar, trainer.global_step
        if trainer.max_steps > 0:
            bar.total, bar.n, bar.initial = trainer.max_steps, done, done
        bar.set_description_str("update")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object
    ) -> None:
        bar, done = self.train_progress_bar, trainer.global_step
        if done % self.refresh_rate == 0 or done == trainer.max_steps:
            bar.n = done
            bar.set_postfix(self._shown(trainer, pl_module), refresh=False)
            bar.refresh()

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics

    def _shown(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, str]:
        metrics = self.get_metrics(trainer, pl_module)
        return {k: f"{v:.3f}" if isinstance(v, float) else str(v) for k, v in metrics.items()}

    def on_phase_start(self, trainer: L.Trainer, pl_module: L.LightningModule, name: str) -> None:
        """Name the phase that begins."""
        if self.is_enabled and trainer.is_global_zero:
            self.train_progress_bar.set_description_str(f"update ({name:<9})")
