"""What the fields of SSGRPO must keep, each alone and together. Checked before any weights load."""

import warnings
from typing import TYPE_CHECKING

from ssgrpo_lightning.credit import Broadcast
from ssgrpo_lightning.estimator_module import EstimatorModule

if TYPE_CHECKING:
    from ssgrpo_lightning.alternation import SSGRPO


def check_settings(module: "SSGRPO", estimator: EstimatorModule | None) -> None:
    """Refuse fields that are out of bounds or contradict each other.

    Args:
        module: The module, with its fields set.
        estimator: The estimator it was given, whether or not the credit rule uses it.

    Raises:
        ValueError: Such a field, with the rule and the way out.
    """
    patience, epochs = module.estimator_patience, module.estimator_epochs
    credit, gate = type(module.credit).__name__, type(module.gate).__name__
    rules = {
        "inner_epochs": (module.inner_epochs >= 1, "must be at least 1"),
        "minibatches": (module.minibatches >= 1, "must be at least 1"),
        "estimator_every": (module.estimator_every >= 1, "must be at least 1"),
        "estimator_epochs": (epochs >= 1, "must be at least 1"),
        "estimator_patience": (
            patience is None or 1 <= patience < epochs,
            f"must be at least 1 and under model.estimator_epochs ({epochs}), or null to make "
            "every pass",
        ),
        "warmup_updates": (module.warmup_updates >= 0, "must be at least 0"),
        "max_skipped": (module.max_skipped >= 0, "must be at least 0; 5 is usual"),
    }
    for field, (holds, rule) in rules.items():
        if not holds:
            raise ValueError(f"model.{field} is {getattr(module, field)}, {rule}")
    if module.gate.needs_skill and not module.probe.every:
        raise ValueError(
            f"model.gate is {gate}, which reads the step skill, but model.probe.every is 0, so "
            "that none is measured: set it to 2, or use FixedGate"
        )
    if module.credit.needs_values and estimator is None:
        raise ValueError(
            f"model.credit is {credit}, which needs step values, but model.estimator is null: add "
            "an estimator, or use Broadcast for plain GRPO"
        )
    if module.warmup_updates and not module.credit.needs_values:
        raise ValueError(
            f"model.warmup_updates is {module.warmup_updates}, but model.credit is {credit}, which "
            "needs no estimator that could warm up: set it to 0"
        )
    for sampling in (module.policy.sampling, module.policy.evaluation):
        module.engine.check(sampling)
    surrogate = module.policy.surrogate
    if not surrogate.keeps_credit and not isinstance(module.credit, Broadcast):
        warnings.warn(
            f"policy.surrogate is {type(surrogate).__name__}, whose gradient spreads over a "
            f"rollout evenly: the step credit of {credit} is lost; GspoToken keeps it",
            stacklevel=3,
        )
