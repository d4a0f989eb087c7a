"""The W&B dashboard as code: `python -m ssgrpo_lightning.callbacks.dashboard --entity NAME`.

Needs the extra ``dashboard`` and a login; building it needs neither network nor account.
"""

import argparse
from typing import Any

AXIS, TABLE = "policy_step", "rollouts"

# Section -> panel -> metrics. A test holds every metric here to be logged by a run.
SECTIONS: dict[str, dict[str, list[str]]] = {
    "Is it learning?": {
        "Accuracy on held-out problems": ["val/accuracy"],
        "Reward of the rollouts": ["reward"],
        "Reward within groups": ["reward_std", "frac_reward_zero_std"],
        "Share of rollouts without a verdict": ["verifier/none_frac"],
    },
    "Does it stay healthy?": {
        "Entropy of the policy (nats)": ["entropy"],
        "Completion length (tokens)": [
            "completions/mean_length",
            "completions/min_length",
            "completions/max_length",
        ],
        "Share of truncated completions": ["completions/clipped_ratio"],
        "Distinct completions per group": ["group/distinct_completions"],
        "Gradient norm": ["grad_norm"],
        "Share of clipped tokens": ["clip_ratio/low_mean", "clip_ratio/high_mean"],
    },
    "Where does the credit go?": {
        "Gate": ["step/gate"],
        "Entropy of the step weights": ["step/weight_entropy"],
        "Uniform and collapsed rollouts": ["step/frac_uniform", "step/frac_collapsed"],
        "Variance of the weights within rollouts": ["step/within_variance_share"],
        "Share of effective tokens": ["step/effective_tokens"],
        "Credit on the ten most frequent steps": ["step/top10_text_share"],
        "Advantage by quarter of the rollout": [
            f"step/advantage_quarter{quarter}" for quarter in (1, 2, 3, 4)
        ],
    },
    "Does the estimator know anything?": {
        "Ranking within groups (AUC, before learning)": ["estimator/auc"],
        "Loss": ["estimator/loss"],
        "Gradient norm of the estimator": ["estimator/grad_norm"],
    },
    "What does it cost?": {
        "Seconds of an update, by phase": [
            f"timing/{phase}" for phase in ("rollout", "score", "policy", "estimator")
        ],
        "Share of the estimator": ["timing/estimator_frac"],
        "Tokens so far": ["num_tokens"],
    },
}


def metrics() -> set[str]:
    """Every metric that the dashboard shows."""
    panels = (panel for section in SECTIONS.values() for panel in section.values())
    return {AXIS, TABLE} | {metric for panel in panels for metric in panel}


def build(entity: str, project: str) -> Any:
    """The workspace, not yet saved.

    Args:
        entity: W&B user or team.
        project: W&B project.
    """
    import wandb_workspaces.reports.v2 as panels
    import wandb_workspaces.workspaces as workspaces

    sections = [
        workspaces.Section(
            name=name,
            is_open=True,
            panels=[panels.LinePlot(title=t, x=AXIS, y=list(y)) for t, y in charts.items()],
        )
        for name, charts in SECTIONS.items()
    ]
    table = panels.WeavePanelSummaryTable(table_name=TABLE)
    sections.append(workspaces.Section(name="Rollouts", is_open=True, panels=[table]))
    return workspaces.Workspace(entity=entity, project=project, name="SS-GRPO", sections=sections)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entity", required=True, help="W&B user or team")
    parser.add_argument("--project", default="ssgrpo-lightning", help="W&B project")
    arguments = parser.parse_args()
    workspace = build(arguments.entity, arguments.project)
    workspace.save()
    print(workspace.url)


if __name__ == "__main__":
    main()
