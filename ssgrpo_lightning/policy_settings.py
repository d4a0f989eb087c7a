"""What the fields of PolicyModule must keep, and its prompts. Checked before any weights load."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ssgrpo_lightning.records import Problem

if TYPE_CHECKING:
    from ssgrpo_lightning.policy_module import PolicyModule


def check_settings(module: "PolicyModule") -> None:
    """Refuse fields that are out of bounds or contradict each other.

    Args:
        module: The module, with its fields set.

    Raises:
        ValueError: Such a field, with the rule and the way out.
    """
    sampling, tokens, norm = module.sampling, module.micro_batch_tokens, module.max_grad_norm
    rules = {
        "beta": (module.anchor.beta >= 0, "at least 0; 0 loads no reference"),
        "entropy_bonus": (module.entropy_bonus >= 0, "at least 0; 0 for none"),
        "top_entropy": (0 < module.top_entropy <= 1, "in (0, 1]; 1 for all tokens"),
        "micro_batch": (module.micro_batch >= 1, "at least 1"),
        "micro_batch_tokens": (
            tokens is None or tokens >= 1,
            "at least 1, or null to count rollouts only",
        ),
        "head_chunk": (module.head_chunk >= 1, "at least 1; 1024 is usual"),
        "max_prompt_tokens": (module.max_prompt_tokens >= 1, "at least 1"),
        "max_grad_norm": (norm is None or norm > 0, "greater than 0, or null for no clipping"),
        "sampling.temperature": (
            sampling.temperature > 0,
            "greater than 0 in training: greedy rollouts of a group are all the same",
        ),
    }
    for field, (holds, rule) in rules.items():
        if not holds:
            found = module.anchor if field == "beta" else module
            for name in field.split("."):
                found = getattr(found, name)
            raise ValueError(f"policy.{field} is {found}, must be {rule}")
    if sampling.truncates_support:
        raise ValueError(
            f"policy.sampling has top_k {sampling.top_k} and top_p {sampling.top_p}, must be "
            "null in training: the loss would count tokens that could not be drawn; set them "
            "in policy.evaluation, or lower policy.sampling.temperature"
        )
    module.layout.check(module.model.attention)
    module.anchor.check(adapter=module.lora is not None)
    if module.model.quantize is not None and module.lora is None:
        raise ValueError(
            f"policy.model.quantize is {module.model.quantize!r} and policy.lora null: quantised "
            "weights cannot be trained; set policy.lora to {rank: 16}"
        )


def check_prompts(module: "PolicyModule", problems: Mapping[Any, Sequence[Problem]]) -> None:
    """Check tokenizer and prompts, in seconds.

    Args:
        module: Says how long prompts and completions may be, for which model.
        problems: Of each split.

    Raises:
        ValueError: A prompt is empty or over the limit, or the model's context is too short.
    """
    codec = module.model.tokenizer()
    budget = max(module.sampling.max_new_tokens, module.evaluation.max_new_tokens)
    positions = module.model.max_positions()
    for split, of_split in problems.items():
        for problem in of_split:
            length = len(codec.encode(problem))
            if not 1 <= length <= module.max_prompt_tokens:
                raise ValueError(
                    f"the prompt of {split} problem {problem.id} has {length} tokens, must be "
                    f"1 to policy.max_prompt_tokens ({module.max_prompt_tokens}): raise the "
                    f"limit or drop the problem; it begins {str(problem.prompt)[:60]!r}"
                )
            if positions is not None and length + budget > positions:
                raise ValueError(
                    f"{split} problem {problem.id} has {length} prompt tokens and may grow by "
                    f"{budget}, but {module.model.name} reads {positions}: lower "
                    "policy.sampling.max_new_tokens"
                )
