"""Train a tiny process reward model on exact step labels of chain arithmetic, in seconds.

It starts from the weights of the policy whose rollouts it judges: as large as the policy, as
process reward models are. `--form` chooses how it answers: `TokenClassifierPRM` or `SeparatorPRM`.
"""

import argparse
import time
from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc
from tqdm import tqdm
from transformers import AutoModelForTokenClassification

from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.functional import step_lengths
from ssgrpo_lightning.policy import TINY_POLICY, Policy, Pretrained
from ssgrpo_lightning.process_rewards import (
    ProcessRewardModel,
    SeparatorPRM,
    TokenClassifierPRM,
)
from ssgrpo_lightning.records import Problem, Rollouts
from ssgrpo_lightning.rollouts import Judge, collect, step_labels
from ssgrpo_lightning.segmenters import ByLine
from ssgrpo_lightning.tasks import ChainArithmetic
from ssgrpo_lightning.verifiers import FinalNumber

SEPARATOR, GOOD, BAD = "<step>", "+", "-"
GROUP, BATCH, LEARNING_RATE, TOGETHER = 8, 32, 3e-3, 32


def classifier(policy: Pretrained, out: Path) -> TokenClassifierPRM:
    """A folder with the policy's weights under a fresh head of two classes, ready to be trained."""
    policy.weights(AutoModelForTokenClassification, num_labels=2).save_pretrained(out)
    policy.tokenizer().tokenizer.save_pretrained(out)
    return TokenClassifierPRM(str(out.resolve()))


def separator(policy: Pretrained, out: Path) -> SeparatorPRM:
    """A folder with the policy's weights and one more token, ready to be trained."""
    model, tokenizer = policy.weights(), policy.tokenizer().tokenizer
    tokenizer.add_tokens([SEPARATOR], special_tokens=True)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return SeparatorPRM(str(out.resolve()), SEPARATOR, GOOD, BAD)


FORMS = {"classifier": classifier, "separator": separator}


def sample(policy: Policy, problems: list[Problem]) -> Rollouts:
    """Groups as training samples them."""
    judge, sampling = Judge(FinalNumber("#"), ByLine()), Sampling(64)
    return collect(policy, TransformersEngine(), judge, problems, GROUP, sampling, 0, 0)


def labelled(
    policy: Policy, task: ChainArithmetic, problems: list[Problem]
) -> list[tuple[Rollouts, torch.Tensor]]:
    """Groups with the truth of every step, some groups at a time."""
    parts = [problems[i : i + TOGETHER] for i in range(0, len(problems), TOGETHER)]
    sampled = [sample(policy, part) for part in parts]
    return [(part, step_labels(part, policy, task.step_truth)) for part in sampled]


def train(prm: ProcessRewardModel, data: list[tuple[Rollouts, torch.Tensor]], epochs: int) -> None:
    """Cross-entropy of every step to its label."""
    model = prm.model.train().requires_grad_(True)
    updates = epochs * sum(-(-len(rollouts) // BATCH) for rollouts, _ in data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=updates)
    with tqdm(total=updates, unit="update") as bar:
        for _ in range(epochs):
            for rollouts, truth in data:
                for rows in torch.randperm(len(rollouts)).split(BATCH):
                    part = rollouts.select(rows)
                    mask = step_lengths(part.step, part.steps) > 0
                    label = truth[rows, : part.steps].float()
                    loss = binary_cross_entropy_with_logits(prm.logits(part)[mask], label[mask])
                    optimizer.zero_grad()
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    bar.set_postfix(loss=f"{loss.item():.3f}")
                    bar.update()
    model.eval().requires_grad_(False)


def step_auc(prm: ProcessRewardModel, data: list[tuple[Rollouts, torch.Tensor]]) -> float:
    """Share of (sound, unsound) pairs of steps that the model ranks rightly."""
    scores, labels = [], []
    for rollouts, truth in data:
        mask = step_lengths(rollouts.step, rollouts.steps) > 0
        scores.append(prm(rollouts)[mask])
        labels.append(truth[mask])
    return float(binary_auroc(torch.cat(scores).sigmoid(), torch.cat(labels).long()))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=FORMS, default="classifier", help="how it answers")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--policy", default=TINY_POLICY, help="policy to start from and to judge")
    parser.add_argument("--operations", type=int, default=3, help="operations of a problem")
    parser.add_argument("--groups", type=int, default=256, help="groups of rollouts to learn from")
    parser.add_argument("--epochs", type=int, default=8, help="passes over them")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    start = time.perf_counter()
    task = ChainArithmetic(operations=arguments.operations)
    pretrained = Pretrained(arguments.policy)
    policy = pretrained.load().eval()
    data = labelled(policy, task, task.problems("train")[: arguments.groups])
    held_out = labelled(policy, task, task.problems("validation")[: arguments.groups])
    prm = FORMS[arguments.form](pretrained, arguments.out)
    train(prm, data, arguments.epochs)
    model = prm.model.model if isinstance(prm.model, Policy) else prm.model
    model.save_pretrained(arguments.out)
    groups = sum(len(rollouts) for rollouts, _ in held_out) // GROUP
    print(
        f"step AUC {step_auc(prm, held_out):.3f} on {groups} held-out groups of {GROUP}, after "
        f"{time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
