"""The command line from YAML: Lightning's commands, ``audit``, ``plan`` and ``export``."""

import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jsonargparse
import lightning as L
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

# The swap points that no module below imports: their members have short names once imported.
from ssgrpo_lightning import (  # noqa: F401
    baselines,
    checkpoints,
    controls,
    critic,
    monte_carlo,
    outcome_rewards,
    process_rewards,
)
from ssgrpo_lightning.alternation import SSGRPO
from ssgrpo_lightning.callbacks import (
    Adversarial,
    PhaseBar,
    PredictionWriter,
    Recovery,
    RolloutLog,
    RunConfig,
    VerifierWatch,
    WandbRun,
    WeightEntropy,
)
from ssgrpo_lightning.checkpoints import WholeFiles, last_of, run_to_go_on_in
from ssgrpo_lightning.metrics_file import MetricsFile, read_rows
from ssgrpo_lightning.plan.ranks import Ranks
from ssgrpo_lightning.trainer import Trainer

TRAINER_DEFAULTS = {
    "default_root_dir": "runs",
    "max_epochs": -1,
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": None,
    "use_distributed_sampler": False,
    "enable_model_summary": False,
}

# Commands of our Trainer need no devices, also where the config was made for many.
OURS = ("audit", "plan", "export")
ONE_PROCESS = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto"}

OPTIONAL = {
    "enable_progress_bar": ["progress"],
    "enable_checkpointing": ["checkpoint", "recovery"],
}


class SSGRPOCLI(LightningCLI):
    """LightningCLI with this project's callbacks, links and error messages."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("seed_everything", "model.init_args.seed")
        parser.link_arguments("seed_everything", "data.init_args.seed")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.monitor": "val/accuracy",
                "checkpoint.mode": "max",
                "checkpoint.filename": "update{step}-accuracy{val/accuracy:.3f}",
                "checkpoint.auto_insert_metric_name": False,
            }
        )
        parser.add_lightning_class_args(Recovery, "recovery")
        parser.add_lightning_class_args(PhaseBar, "progress")
        parser.add_lightning_class_args(WeightEntropy, "weight_entropy")
        parser.add_lightning_class_args(RolloutLog, "rollout_log")
        parser.add_lightning_class_args(Adversarial, "adversarial")
        parser.add_lightning_class_args(VerifierWatch, "verifier_watch")
        parser.add_lightning_class_args(WandbRun, "wandb_run")
        parser.add_lightning_class_args(PredictionWriter, "predictions")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's and our Trainer's."""
        return LightningCLI.subcommands() | {name: {"model", "datamodule"} for name in OURS}

    def instantiate_classes(self) -> None:
        try:
            self._check_folder()
            super().instantiate_classes()
            self._check_trainer()
        except ValueError as error:
            self._refuse(error)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Metrics always go to ``metrics.csv`` in the run folder, whatever else logs them."""
        config = self._get(self.config_init, "trainer")
        if self.subcommand == "plan":
            # One process without GPUs stands for all that the config asks for.
            trainer = Trainer(accelerator="cpu", logger=False, precision=config.get("precision"))
            trainer.ranks = Ranks.of({**config})
            return trainer
        callback_keys = self._parser(self.subcommand).callback_keys
        for flag, keys in OPTIONAL.items():
            if config.get(flag) is False:
                callback_keys[:] = [key for key in callback_keys if key not in keys]
        wanted = config.get("logger")
        if wanted is not False:
            others: list[Logger] = wanted if isinstance(wanted, list) else []
            if isinstance(wanted, Logger):
                others = [wanted]
            if not any(isinstance(logger, CSVLogger) for logger in others):
                kwargs["logger"] = [self._metrics_file(config["default_root_dir"] or "."), *others]
        plugins = config.get("plugins") or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            kwargs["plugins"] = [*plugins, WholeFiles()]
        if self.subcommand in OURS:
            kwargs |= ONE_PROCESS
        return super().instantiate_trainer(**kwargs)

    def _metrics_file(self, root: str) -> MetricsFile:
        """The table of the run; a resumed one goes on with the rows up to its checkpoint."""
        path = self._get(self.config, "ckpt_path")
        if self.subcommand != "fit" or path is None or not Path(path).is_file():
            return MetricsFile(root)
        file, run = Path(path), run_to_go_on_in(Path(path), Path(root))
        written = checkpoints.read(file).get("recovery", {}).get("rows", 0)
        rows = read_rows(file.parent.parent / ExperimentWriter.NAME_METRICS_FILE, written)
        return MetricsFile(root, run, rows)

    def _parse_ckpt_path(self) -> None:
        """Find the checkpoint and refuse what is none, before anything loads.

        Lightning would let the hyper-parameters in it beat YAML and command line.
        """
        command = self.config.get("subcommand")
        config = self.config[command] if command else {}
        path = config.get("ckpt_path")
        try:
            if path == "last":
                root = Path(config["trainer"]["default_root_dir"] or ".")
                found = last_of(root)
                if found is None:
                    print(f"no checkpoint below {root} yet: the run starts from the beginning")
                path = config["ckpt_path"] = None if found is None else str(found)
            if path is None or path in ("best", "hpc") or "://" in str(path) or Path(path).is_dir():
                return
            checkpoints.read(Path(path))
        except ValueError as error:
            self._refuse(error)

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except FloatingPointError as error:
            sys.exit(f"error: {error}")
        except OSError as error:
            if error.errno not in checkpoints.FULL:
                raise
            sys.exit(f"error: {error}: make room, then go on with --ckpt_path=last")
        except ValueError as error:
            # Once weights are loading, an error is not the config's: show where it came from.
            if getattr(self.model, "ready", True):
                raise
            self._refuse(error)

    def _check_folder(self) -> None:
        """Refuse a run folder that cannot be written, before minutes of work are lost."""
        folder = Path(self._get(self.config, "trainer")["default_root_dir"] or ".")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(
                f"trainer.default_root_dir is {str(folder)!r}, which cannot be written "
                f"({error.strerror}): choose a folder you may write to"
            ) from error

    def _check_trainer(self) -> None:
        """Point from Lightning's optimisation flags, which manual optimisation refuses, to ours."""
        checkpoint = self._get(self.config, "checkpoint") or {}
        for field, instead in {
            "train_time_interval": "recovery.minutes",
            "save_last": "recovery, which writes last.ckpt whenever it saves",
        }.items():
            if checkpoint.get(field):
                raise ValueError(
                    f"checkpoint.{field} is {checkpoint[field]}, must be left out (in manual "
                    f"optimisation Lightning ignores time intervals): use {instead}"
                )
        if not isinstance(self.model, SSGRPO):
            return
        precision = str(self._get(self.config, "trainer").get("precision"))
        if precision in ("16", "16-mixed"):
            raise ValueError(
                "trainer.precision is 16-mixed, whose gradient scaler cannot serve two alternating "
                "optimisers: use bf16-mixed or 32-true"
            )
        if precision in ("bf16-true", "16-true"):
            raise ValueError(
                f"trainer.precision is {precision}, which would round the estimator and all that "
                "is counted too: use 32-true with policy.model.dtype bfloat16, or bf16-mixed, "
                "which keeps float32 weights to add small updates to"
            )
        ours = {
            "gradient_clip_val": (None, "policy.max_grad_norm and estimator.max_grad_norm"),
            "accumulate_grad_batches": (1, "policy.micro_batch, the rollouts of one backward pass"),
        }
        for field, (unset, instead) in ours.items():
            value = getattr(self.trainer, field)
            if value != unset:
                raise ValueError(
                    f"trainer.{field} is {value}, must be left out: two modules alternate here, "
                    f"and each has its own; use {instead}"
                )

    def _refuse(self, error: ValueError) -> None:
        sys.exit(f"error: {error}")


def main(args: list[str] | None = None) -> SSGRPOCLI:
    """Run the command line.

    Args:
        args: Arguments; None: those of the process.
    """
    _quiet_dependencies()
    # Finding the docstrings of fields takes seconds, and only a help text shows them.
    helps = any("help" in arg for arg in (sys.argv if args is None else args))
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=helps)
    return SSGRPOCLI(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        trainer_class=Trainer,
        save_config_callback=RunConfig,
        trainer_defaults=TRAINER_DEFAULTS,
        auto_configure_optimizers=False,
        seed_everything_default=0,
        args=args,
    )


def _quiet_dependencies() -> None:
    """Keep out of the console what a user can do nothing about."""
    warnings.filterwarnings("ignore", message=r".*LeafSpec.* is deprecated")
    warnings.filterwarnings("ignore", message=r"Couldn't infer the batch indices")
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: "Tip:" not in record.getMessage())
