"""Rebuild the shipped policy: supervised fine-tuning of a tiny Llama on chain arithmetic.

It is stopped early on purpose, while it still errs: reinforcement needs something to improve.
`--task` builds a policy for one of the variants of chain arithmetic, `--probes` those of all.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from ssgrpo_lightning.tiny_policy.build import RECIPES, load_or_build, train


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, help="folder to write")
    target.add_argument("--probes", type=Path, help="folder for the policies of all variants")
    parser.add_argument("--task", choices=RECIPES, default="ChainArithmetic")
    parser.add_argument("--operations", type=int, default=3, help="operations of a problem")
    parser.add_argument("--start", choices=("scratch", "shipped"), help="weights to start from")
    parser.add_argument("--accuracy", type=float, help="stop at this share of problems solved")
    parser.add_argument("--updates", type=int, help="most updates")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    if arguments.probes:
        for name in RECIPES.keys() - {"ChainArithmetic"}:
            load_or_build(name, arguments.probes / name)
        return
    recipe = RECIPES[arguments.task]
    asked = {name: getattr(arguments, name) for name in ("start", "accuracy", "updates")}
    recipe = replace(
        recipe,
        task=replace(recipe.task, operations=arguments.operations),
        **{name: value for name, value in asked.items() if value is not None},
    )
    policy, solved = train(recipe, arguments.seed)
    policy.save(arguments.out)
    how = "greedily" if recipe.temperature == 0 else f"at temperature {recipe.temperature}"
    print(f"{solved:.3f} of the held-out problems solved {how}")


if __name__ == "__main__":
    main()
