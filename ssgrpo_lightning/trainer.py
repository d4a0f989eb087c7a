"""Lightning's Trainer with one more command: an audit of the verifier."""

from pathlib import Path

import lightning as L

from ssgrpo_lightning.data import RolloutDataModule
from ssgrpo_lightning.tasks import Split
from ssgrpo_lightning.verifiers.audit import audit


class Trainer(L.Trainer):
    """Lightning's Trainer, which can also audit a verifier."""

    def audit(
        self,
        model: L.LightningModule,
        datamodule: L.LightningDataModule | None = None,
        split: Split = "train",
        problems: int = 100,
        template: str | None = None,
        examples: int = 1,
        out: Path | None = None,
    ) -> None:
        """Say what the config's verifier makes of right, nearly right and hostile answers.

        No model is loaded. False accepts are what training would exploit, false rejects what it
        would unlearn.

        Args:
            model: Not looked at.
            datamodule: Whose task and verifier are audited.
            split: Whose reference answers.
            problems: Reference answers to take.
            template: What a completion of this task looks like, with ``{answer}`` where the answer
                stands; null: the first usual form in which most reference answers are accepted.
            examples: Examples of each kind of mistake in the table.
            out: JSON file to write, with every finding.
        """
        if not isinstance(datamodule, RolloutDataModule):
            raise ValueError(
                f"data is {type(datamodule).__name__}, must be a RolloutDataModule: only that has "
                "a verifier to audit"
            )
        if template is not None and "{answer}" not in template:
            raise ValueError(
                f"template is {template!r}, must hold {{answer}} where the answer stands"
            )
        verifier = datamodule.judge.verifier
        found = audit(verifier.batch, list(datamodule.task.problems(split)[:problems]), template)
        print(f"{verifier}\n{found.table(examples)}")
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(found.json())
