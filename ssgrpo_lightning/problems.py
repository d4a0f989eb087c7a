"""What a verifier is asked and what it answers. Imports nothing, so that its workers start fast."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, str]


@dataclass(frozen=True)
class Problem:
    """One question with a checkable answer.

    Attributes:
        id: Number of the problem within its split; the noise of its rollouts is derived from it.
        prompt: Text that the policy continues, or chat messages (``{"role": …, "content": …}``)
            that the policy's chat template renders.
        answer: Reference answer, for the verifier only.
        metadata: What else the verifier of this kind of problem needs, such as the schema of a
            tool; values that JSON can write. No model sees it.
    """

    id: int
    prompt: str | tuple[Message, ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What a verifier says about one completion.

    Attributes:
        reward: Outcome in [0, 1], or None where no verdict could be reached. A rollout without
            a verdict has advantage 0 and leaves the statistics of its group.
        reason: Why, in a few words, for people.
        seconds: How long judging took.
        parts: Rewards of the verifiers that this one is made of, in their order.
        killed: The judge ran out of time or memory, or died; the reward is then None.
    """

    reward: float | None
    reason: str = ""
    seconds: float = field(default=0.0, compare=False)
    parts: tuple[float | None, ...] = ()
    killed: bool = False
