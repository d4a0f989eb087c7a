"""Lightning's Trainer with more commands: audit of a verifier, plan of the hardware, export."""

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Literal

import lightning as L
from lightning.pytorch.cli import SaveConfigCallback

from ssgrpo_lightning.alternation import SSGRPO
from ssgrpo_lightning.data import RolloutDataModule
from ssgrpo_lightning.export import export
from ssgrpo_lightning.plan.estimate import Assumptions
from ssgrpo_lightning.plan.hardware import THIS_MACHINE, hardware_of
from ssgrpo_lightning.plan.page import page
from ssgrpo_lightning.plan.ranks import Ranks
from ssgrpo_lightning.plan.study import Question, study
from ssgrpo_lightning.tasks import Split
from ssgrpo_lightning.verifiers.audit import audit


class Trainer(L.Trainer):
    """Lightning's Trainer, which can also audit a verifier, plan a run and export a policy."""

    ranks = Ranks()
    """What the config's trainer asks for; a plan is made in a single process without GPUs."""

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

    def plan(
        self,
        model: L.LightningModule,
        datamodule: L.LightningDataModule | None = None,
        hardware: str | None = None,
        architecture: Path | None = None,
        prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
        assumptions: Assumptions = Assumptions(),
        out: Path | None = None,
    ) -> None:
        """Say what an update of the config takes of every GPU, without any: memory, FLOPs, seconds.

        The policy is built of fake tensors from its config, spread as the strategy says, and goes
        through one update. No weights are read. Exits with 1 if it does not fit.

        Args:
            model: Whose update is planned.
            datamodule: Says how many rollouts it has.
            hardware: A100-40GB, A100-80GB, H100, H200, L4, A10, RTX-4090, or this-machine for its
                processor; null: A100-80GB, or this-machine where the trainer's accelerator is cpu.
            architecture: Config of the policy, a JSON file of transformers; null: that of
                `policy.model.name`.
            prompt_tokens: Tokens of every prompt; null: `policy.max_prompt_tokens`.
            completion_tokens: Tokens of every completion; null: `policy.sampling.max_new_tokens`.
            assumptions: What cannot be derived.
            out: JSON file to write.
        """
        if not isinstance(model, SSGRPO) or not isinstance(datamodule, RolloutDataModule):
            raise ValueError(
                f"model is {type(model).__name__} with data {type(datamodule).__name__}, must be "
                "SSGRPO with a RolloutDataModule: only their updates can be planned"
            )
        device = hardware_of(hardware or ("A100-80GB" if self.ranks.on_gpu else THIS_MACHINE))
        context = self.precision_plugin.forward_context
        question = Question(
            self.ranks, device, context, architecture, prompt_tokens, completion_tokens
        )
        found = study(model, datamodule, question, assumptions)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            facts = {**asdict(found), "peak": found.peak, "fits": found.fits}
            out.write_text(dumps(facts, indent=2))
        print(page(found, f"One update of {model.policy.model.name} on {device.name}"))
        if not found.fits:
            raise SystemExit(1)
