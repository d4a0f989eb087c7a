"""Lightning's Trainer with more commands: an audit of the verifier, export of a policy."""

from pathlib import Path
from typing import Literal

import lightning as L
from lightning.pytorch.cli import SaveConfigCallback

from ssgrpo_lightning.alternation import SSGRPO
from ssgrpo_lightning.data import RolloutDataModule
from ssgrpo_lightning.export import export
from ssgrpo_lightning.tasks import Split
from ssgrpo_lightning.verifiers.audit import audit


class Trainer(L.Trainer):
    """Lightning's Trainer, which can also audit a verifier and export a policy."""

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

    def export(
        self,
        model: L.LightningModule,
        ckpt_path: Path,
        out: Path,
        datamodule: L.LightningDataModule | None = None,
        adapter: Literal["merge", "keep"] = "merge",
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        weights_only: Literal[True] | None = None,
    ) -> None:
        """Write a checkpoint's policy as a Hugging Face folder, for transformers and vLLM.

        Args:
            model: As the run was trained; its config.yaml says how.
            ckpt_path: Checkpoint of the run: a file, or a folder of shards.
            out: Folder to write; an earlier export there is replaced.
            datamodule: Named in the model card.
            adapter: Merge a LoRA adapter into the weights, or keep it, as a folder for peft.
            dtype: Precision of the weights written; null: that of policy.model.
            weights_only: Always; stands here because the config.yaml of a run has it.
        """
        if not isinstance(model, SSGRPO):
            raise ValueError(f"model is {type(model).__name__}, must be SSGRPO: it has no policy")
        method = {"credit rule": model.credit, "group advantage": model.advantage}
        if model.estimator is not None:
            method["estimator"] = model.estimator.estimator
        if isinstance(datamodule, RolloutDataModule):
            method |= {"task": datamodule.task, "verifier": datamodule.judge.verifier}
        named = {part: type(member).__name__ for part, member in method.items()}
        saver = next(c for c in self.callbacks if isinstance(c, SaveConfigCallback))  # pyright: ignore
        config = saver.parser.dump(saver.config, skip_none=False)
        print(export(model.policy, ckpt_path, out, adapter, dtype, named, config))
