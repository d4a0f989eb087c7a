"""Rollouts as JSON lines: what ``predict`` writes, and how it is read again."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from ssgrpo_lightning.engines import Samples
from ssgrpo_lightning.records import Problem, Rollouts, Verdict
from ssgrpo_lightning.rollouts import assemble


def to_rows(rollouts: Rollouts) -> list[dict]:
    """One JSON-ready mapping per rollout, with all that `from_rows` needs."""
    rows = []
    for i in range(len(rollouts)):
        mask, given = rollouts.sampled[i], rollouts.attended[i] & ~rollouts.sampled[i]
        reward = float(rollouts.rewards[i])
        rows.append(
            {
                "group": int(rollouts.group[i]),
                "problem": asdict(rollouts.problems[i]),
                "text": rollouts.texts[i],
                "reward": None if reward != reward else reward,
                "reason": rollouts.reasons[i],
                "parts": _parts(rollouts, i),
                "truncated": bool(rollouts.truncated[i]),
                "policy_step": rollouts.policy_step,
                "temperature": rollouts.temperature,
                "prompt_ids": rollouts.tokens[i][given].tolist(),
                "completion_ids": rollouts.tokens[i][mask].tolist(),
                "step": rollouts.step[i][mask].tolist(),
                "logprobs": [round(x, 6) for x in rollouts.logprobs[i][mask].tolist()],
                "entropy": [round(x, 6) for x in rollouts.entropy[i][mask].tolist()],
            }
        )
    return rows


def from_rows(rows: Sequence[dict]) -> Rollouts:
    """Rollouts from the mappings of `to_rows`; groups keep their numbers."""

    def padded(field: str, dtype: torch.dtype) -> Tensor:
        width = max(len(row[field]) for row in rows)
        return torch.tensor([r[field] + [0] * (width - len(r[field])) for r in rows], dtype=dtype)

    samples = Samples(
        tokens=padded("completion_ids", torch.long),
        lengths=torch.tensor([len(row["completion_ids"]) for row in rows]),
        logprobs=padded("logprobs", torch.float32),
        entropy=padded("entropy", torch.float32),
        truncated=torch.tensor([row["truncated"] for row in rows]),
    )
    return assemble(
        prompts=[row["prompt_ids"] for row in rows],
        samples=samples,
        steps=[row["step"] for row in rows],
        verdicts=[
            Verdict(row["reward"], row["reason"], parts=tuple(row.get("parts", ()))) for row in rows
        ],
        group=[row["group"] for row in rows],
        problems=[_problem(row["problem"]) for row in rows],
        texts=[row["text"] for row in rows],
        pad_id=0,
        policy_step=max(row["policy_step"] for row in rows),
        temperature=rows[0].get("temperature", 1.0),
    )


def _parts(rollouts: Rollouts, i: int) -> list[float | None]:
    if rollouts.parts is None:
        return []
    return [None if x != x else x for x in rollouts.parts[i].tolist()]


def _problem(row: dict) -> Problem:
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        prompt = tuple(prompt)
    return Problem(row["id"], prompt, row["answer"], row.get("metadata", {}))


def read_rows(path: Path) -> Iterable[dict]:
    """Rows of a JSON-lines file of rollouts.

    Raises:
        ValueError: The file is missing, empty or a line is no rollout.
    """
    if not path.is_file():
        raise ValueError(
            f"rollouts are read from {str(path)!r}, which is no file: write it with "
            "`python train.py predict --config …`"
        )
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append({**row, "group": int(row["group"]), "step": list(row["step"])})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}:{number} is no stored rollout ({error!r}): write the file anew with "
                "`python train.py predict --config …`"
            ) from error
    if not rows:
        raise ValueError(f"{path} holds no rollouts: write it with `python train.py predict`")
    return rows
