"""Ours against TRL's `GRPOTrainer`, update by update in one run, and against the bare cost.

Parts: the shipped policy, SmolLM2-135M, and how cost grows with the size of the work. Rewards of
the two models are those of their tasks; `-mixed` draws them by lot, so that no rollout is spared
its training pass. With --learning the two learn instead, and their rewards are compared.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ssgrpo_lightning.bench.command import arguments, finish
from ssgrpo_lightning.bench.throughput import growth, learning
from ssgrpo_lightning.bench.throughput.arms import LABELS, SMOL, TINY, Workload, interleave
from ssgrpo_lightning.bench.throughput.figures import keys, summarise
from ssgrpo_lightning.bench.throughput.page import learning_page, lines, page
from ssgrpo_lightning.bench.throughput.trl_arm import require
from ssgrpo_lightning.policy import Pretrained
from ssgrpo_lightning.verifiers import Noisy

GROWTH = "growth"
WEIGHED = 2  # rounds that only memory is taken of
MODELS = {
    workload.name: workload
    for each in (TINY, SMOL)
    for workload in (
        each,
        replace(each, name=f"{each.name}-mixed", verifier=Noisy(each.verifier, 0.5)),
    )
}
PARTS = (*MODELS, GROWTH)


def parse(args: list[str] | None) -> argparse.Namespace:
    """Options of the command line, checked."""
    parser = arguments(__doc__ or "", "folder of results")

    def listed(text: str) -> list[str]:
        return text.split(",")

    parser.set_defaults(out=Path("runs/throughput"))
    parser.add_argument("--parts", type=listed, help=f"from {','.join(PARTS)}; quick: tiny")
    parser.add_argument("--arms", type=listed, default=list(LABELS), help="default: all")
    parser.add_argument("--updates", type=int, help="rounds; default 5; of --learning 50")
    parser.add_argument("--rollouts", type=int, help="rollouts of an update of the models")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--learning", action="store_true", help="compare learning; resumes")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of --learning")
    options = parser.parse_args(args)
    options.parts = options.parts or (["tiny"] if options.quick else list(PARTS))
    options.updates = options.updates or (50 if options.learning else 5)
    for field, known in (("parts", PARTS), ("arms", LABELS)):
        for name in getattr(options, field):
            if name not in known:
                parser.error(f"--{field} has {name!r}, must be from {', '.join(known)}")
    if options.updates < 1 or options.seeds < 1:
        parser.error("--updates and --seeds must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch finds no GPU: use cpu")
    if options.device == "cpu" and not Path("/proc/self/clear_refs").exists():
        parser.error("--device is cpu, whose peak memory is read from /proc: Linux only")
    if not Path("configs/quickstart.yaml").is_file():
        parser.error("configs/quickstart.yaml is no file: start in the root of the repository")
    try:
        for workload in MODELS.values():
            workload_of(options, workload)
        if "trl" in options.arms:
            require()
    except ValueError as error:
        parser.error(str(error))
    return options


def workload_of(options: argparse.Namespace, workload: Workload) -> Workload:
    """A workload as the options want it."""
    rollouts = options.rollouts or (64 if options.quick else workload.rollouts)
    micro_batch = min(workload.micro_batch, rollouts)
    change = {"rollouts": rollouts, "micro_batch": micro_batch}
    return replace(workload, device=options.device, threads=options.threads, **change)


def unpacked(workload: Workload, folder: Path) -> Workload:
    """The workload with its GGUF file as plain weights: TRL trains no model that was quantised."""
    if not workload.model.endswith(".gguf"):
        return workload
    where = (folder / workload.name.partition("-")[0]).resolve()
    if not (where / "model.safetensors").is_file():
        Pretrained(workload.model).load().save(where)
    return replace(workload, model=str(where))


def throughput(options: argparse.Namespace) -> None:
    """Measure and write what was found."""
    workloads = {n: workload_of(options, w) for n, w in MODELS.items() if n in options.parts}
    rounds = options.updates + 1 + (WEIGHED + 1 if options.device == "cpu" else 0)
    total = len(workloads) * len(options.arms) * rounds
    if GROWTH in options.parts:
        total += sum(map(len, growth.AXES.values())) * len(growth.ARMS) * (growth.UPDATES + 1)
    models, grown = {}, {}
    with tqdm(total=total, desc="updates", unit="update") as bar:
        for name, packed in workloads.items():
            workload = unpacked(packed, options.out)
            where = (options.out, bar.update)
            told = interleave(workload, options.arms, options.updates, *where)
            on_cpu = options.device == "cpu"
            weighed = interleave(workload, options.arms, WEIGHED, *where, True) if on_cpu else None
            models[name] = summarise(told, weighed)
            bar.write("\n".join(lines(name, models[name])))
        if GROWTH in options.parts:
            where = (options.device, options.threads, options.out)
            grown = growth.measure(*where, bar.update)
    about = (
        f"{options.device}, {options.threads} thread(s) an arm, float32; one process an arm, one "
        "update each in turn; learning rate 0, so that all sample from the same policy."
    )
    blank = dict.fromkeys((TINY.name, SMOL.name))
    result: dict[str, Any] = {"about": about, **keys(blank | models)}
    result |= {"models": models, "growth": grown}
    (options.out / "throughput.html").write_text(page(result))
    finish(result, "ratio_vs_trl.tiny", options.out / "throughput.json")


def learn(options: argparse.Namespace) -> None:
    """Train both, as far as it has not been done, and compare."""
    workload = replace(workload_of(options, TINY), lr=learning.LR)
    options.out.mkdir(parents=True, exist_ok=True)
    with tqdm(total=options.seeds * options.updates, desc="updates", unit="update") as bar:
        found = {
            seed: learning.curves(workload, options.updates, seed, options.out, bar.update)
            for seed in range(options.seeds)
        }
    about = f"{options.updates} updates of {workload.rollouts} rollouts, rate {workload.lr:g}; "
    about += f"the shipped policy, the same problems for both, {options.seeds} seed(s)."
    result = {"about": about, **learning.compared(found)}
    (options.out / "learning.html").write_text(learning_page(result))
    for arm, figures in result["arms"].items():
        print(f"{LABELS[arm]:>14} final reward", *(f"{x:.3f}" for x in figures["final"]))
    error = result["standard_error"]
    print(f"difference {result['difference']:+.4f}, standard error {json.dumps(error)}")
    finish(result, "difference_in_errors", options.out / "learning.json")


def main(args: list[str] | None = None) -> None:
    """Command line."""
    options = parse(args)
    (learn if options.learning else throughput)(options)


if __name__ == "__main__":
    main()
