"""The policy that ships with the package: a character-level Llama, warm-started on arithmetic.

`python -m ssgrpo_lightning.tiny_policy --out DIR` rebuilds it.
"""
