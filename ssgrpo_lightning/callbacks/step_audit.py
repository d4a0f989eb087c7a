"""At every validation: does the estimator judge steps as a process reward model does?"""

import lightning as L

from ssgrpo_lightning.alternation import SSGRPO
from ssgrpo_lightning.estimators import Estimator
from ssgrpo_lightning.metrics import agreement
from ssgrpo_lightning.rollouts import Resampler


class StepAudit(L.Callback):
    """Compares the estimator's scores of steps with those of an auditor that is only asked here.

    Samples groups for the first validation problems as training samples them and looks at the
    failures among them. Logs ``val/prm_rank_correlation``, Spearman's over their steps, and
    ``val/prm_first_error_agreement``, the share in which both name the same first unsound step,
    or none.

    Args:
        auditor: What the estimator is compared with, such as `TokenClassifierPRM` or `ExactSteps`.
        problems: Validation problems whose groups are sampled, all at one time.
    """

    def __init__(self, auditor: Estimator, problems: int = 32) -> None:
        if problems < 1:
            raise ValueError(f"StepAudit.problems is {problems}, must be at least 1")
        self.auditor, self.problems = auditor, problems

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(pl_module, SSGRPO) or pl_module.estimator is None:
            raise ValueError(
                "trainer.callbacks has StepAudit, but no estimator judges the steps of rollouts "
                "here: use a model.credit that needs step values, or leave StepAudit out"
            )

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, SSGRPO)
        data, seed = pl_module.datamodule, pl_module.seed
        policy, sampling = pl_module.policy.policy, pl_module.policy.sampling
        assert policy is not None
        problems = data.problems["validation"][: self.problems]
        rollouts = pl_module.collect(problems, data.group_size, pl_module.sampling)
        scores = pl_module.score(rollouts)
        resample = Resampler(policy, pl_module.engine, data.judge, sampling, seed)
        self.auditor.to(pl_module.device).bind(policy, resample)
        audited = self.auditor(rollouts).sigmoid()
        failed = rollouts.rewards < 1
        if bool(scores.mask[failed].any()):
            found = agreement(scores.scores[failed], audited[failed], scores.mask[failed])
            pl_module.log_dict({f"val/prm_{name}": value for name, value in found.items()})
