"""Shapes of the tensors in signatures; the axes are those of `records`."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

PerRollout = Float[Tensor, " rollout"]
PerStep = Float[Tensor, "rollout step"]
PerToken = Float[Tensor, "rollout token"]
Steps = Int[Tensor, "rollout token"]
Groups = Int[Tensor, " rollout"]
StepMask = Bool[Tensor, "rollout step"]
TokenMask = Bool[Tensor, "rollout token"]
