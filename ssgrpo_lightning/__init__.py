"""Step-Sparse GRPO as a PyTorch Lightning project template.

A **problem** becomes a **group** of **rollouts**; a rollout is **verified** and cut into **steps**;
the **estimator** gives each step a **value**; the **credit rule** turns values into per-step credit
that bends the group **advantage**; the bent advantage trains the **policy**; then the estimator
learns from the same groups. They **alternate**.

This file imports nothing, so that the pure maths of `functional` loads neither Lightning nor
transformers.
"""

__version__ = "0.1.0"
