"""Our losses against those of the installed TRL, on the same tensors: values and gradients.

Needs the extra ``trl``. What TRL does otherwise is tested too, each time with what is right.
"""

from collections import defaultdict
from dataclasses import replace
from types import MethodType, SimpleNamespace

import pytest
import torch

from ssgrpo_lightning.advantages import GroupRelative, outcomes_of
from ssgrpo_lightning.engines import Samples
from ssgrpo_lightning.losses import (
    K3,
    Bnpo,
    Cispo,
    ClippedSurrogate,
    Dapo,
    DrGrpo,
    DualClip,
    Gmpo,
    Grpo,
    Gspo,
    GspoToken,
    KlInLoss,
    Luspo,
    NoCorrection,
    OffPolicyMask,
    RatioCorrected,
    Sapo,
    SequenceMasked,
    SequenceTruncated,
    TokenMasked,
    TokenTruncated,
    Vespo,
)
from ssgrpo_lightning.policy import Policy, Pretrained
from ssgrpo_lightning.policy_module import PolicyModule
from ssgrpo_lightning.records import CreditedRollouts, Problem, Verdict
from ssgrpo_lightning.rollouts import assemble
from tests.unit.test_losses import REFERENCE, exact, expected

trl = pytest.importorskip("trl")
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402

LENGTHS = [7, 3, 1, 5]
PROMPT, WIDTH = 3, max(LENGTHS)
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]


class Case(SimpleNamespace):
    """Four rollouts after the policy has moved: everything a loss looks at, in double precision."""

    def __init__(self, seed=0, rows=None):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(6, 4, WIDTH, generator=generator, dtype=torch.float64)
        now = -noise[0].abs() - 0.1
        super().__init__(
            mask=MASK,
            now=now,
            old=now + 0.4 * noise[1],
            sampled=now + 0.4 * noise[1] + 0.3 * noise[2],
            reference=now + 0.5 * noise[3],
            entropy=noise[4].abs().float().double(),  # TRL compares in single precision
            advantages=noise[5],
        )
        if rows is not None:
            for name, value in vars(self).items():
                setattr(self, name, value[rows])

    def shared(self):
        """The same with one advantage for all tokens of a rollout."""
        self.advantages = self.advantages[:, :1].expand(self.mask.shape)
        return self


def settings(**changed):
    """What a trainer of TRL's holds that its loss looks at; its defaults."""
    args = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }
    fields = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "entropy_coef": 0.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "max_completion_length": WIDTH,
        "current_gradient_accumulation_steps": 1,
        "aux_loss_enabled": False,
        "use_adaptive_entropy": False,
    }
    for name, value in changed.items():
        assert (name in args) != (name in fields)
        (args if name in args else fields)[name] = value
    return SimpleNamespace(args=SimpleNamespace(**args), **fields)


def theirs(case, kind=GRPOTrainer, ratio=None, **changed):
    """Loss of TRL's own code on a case, and its gradient for the log-probabilities."""
    trainer, now = settings(**changed), case.now.clone().requires_grad_()
    trainer._entropy_bonus_enabled = trainer.entropy_coef != 0
    trainer.model = SimpleNamespace(training=True)
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer.accelerator = SimpleNamespace(
        num_processes=1,
        device="cpu",
        sync_gradients=True,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, dim, pad_index: x,
    )
    for name in ("get_off_policy_mask", "get_gamma_weights"):
        setattr(trainer, name, getattr(GRPOTrainer, name))
    trainer.get_high_entropy_mask = MethodType(GRPOTrainer.get_high_entropy_mask, trainer)
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (now, case.entropy, None)
    uniform = bool((case.advantages == case.advantages[:, :1]).all())
    mask = case.mask.double()
    inputs = {
        "prompt_ids": torch.zeros(len(mask), PROMPT, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), PROMPT, dtype=torch.long),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": case.advantages[:, 0] if uniform else case.advantages,
        "old_per_token_logps": case.old,
        "ref_per_token_logps": case.reference,
        "num_items_in_batch": mask.sum(),
    }
    if ratio is not None:
        inputs["importance_sampling_ratio"] = ratio
    loss = kind._compute_loss(trainer, None, inputs)
    return loss.detach(), torch.autograd.grad(loss, now)[0] * case.mask


def ours(make_rollouts, case, divisor=None, **fields):
    """Loss of `PolicyModule` on a case, and its gradient for the log-probabilities."""
    now = case.now.clone().requires_grad_()

    def padded(x):
        return torch.nn.functional.pad(torch.where(case.mask, x, 0.0), (PROMPT, 0))

    rollouts = make_rollouts([1.0] * len(now), [[int(n)] for n in case.mask.sum(1)])
    width = rollouts.tokens.shape[1]
    module = PolicyModule(torch.optim.AdamW, **fields)
    entropy = padded(case.entropy)[:, :width]
    module.forward = lambda *args, **options: (padded(now)[:, :width], entropy)
    rollouts = replace(rollouts, logprobs=padded(case.sampled)[:, :width], entropy=entropy)
    if module.anchor.beta:
        rollouts = replace(rollouts, reference=padded(case.reference)[:, :width])
    advantages, old = (padded(x)[:, :width] for x in (case.advantages, case.old))
    batch = module.focused(CreditedRollouts(rollouts, advantages, old), lambda x: x)
    if divisor is None:
        divisor = module.reduction.count(module.learnt(rollouts))
    loss, _ = module.loss(batch, divisor)
    return loss.detach(), torch.autograd.grad(loss, now)[0]


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6, check_dtype=False)


CLIPPED = ClippedSurrogate()
SEQUENCE = {
    "importance_sampling_level": "sequence",
    "epsilon_low": 3e-4,
    "epsilon_high": 4e-4,
}
# Ours (surrogate, reduction), and TRL's fields; whether its advantages may differ in a rollout.
LOSSES = {
    "grpo": (CLIPPED, Grpo(), {}),
    "dr_grpo": (CLIPPED, DrGrpo(WIDTH), {"loss_type": "dr_grpo"}),
    "bnpo": (CLIPPED, Bnpo(), {"loss_type": "bnpo"}),
    "dapo": (CLIPPED, Dapo(), {"loss_type": "dapo"}),
    "clip higher": (
        ClippedSurrogate(0.2, 0.28),
        Dapo(),
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "two-sided": (DualClip(0.2, 0.2, delta=1.5), Grpo(), {"delta": 1.5}),
    "gspo": (Gspo(), Grpo(), SEQUENCE),
    "luspo": (Gspo(), Luspo(), {"loss_type": "luspo", **SEQUENCE}),
    "cispo": (Cispo(cap=1.2), Dapo(), {"loss_type": "cispo", "epsilon_high": 1.2}),
    "sapo": (Sapo(), Grpo(), {"loss_type": "sapo"}),
    "vespo": (Vespo(), Dapo(), {"loss_type": "vespo"}),
    "off-policy mask": (
        OffPolicyMask(CLIPPED, threshold=0.05),
        Grpo(),
        {"off_policy_mask_threshold": 0.05},
    ),
}
each_loss = pytest.mark.parametrize("name", LOSSES)


@each_loss
@pytest.mark.parametrize("seed", range(3))
def test_losses(make_rollouts, name, seed):
    surrogate, reduction, changed = LOSSES[name]
    for case in (Case(seed).shared(), Case(seed)):
        mine = ours(make_rollouts, case, surrogate=surrogate, reduction=reduction)
        assert mine[1].abs().max() > 1e-3 or isinstance(surrogate, Gspo)
        assert_same(mine, theirs(case, **changed))


def test_gspo_where_it_is_not_clipped(make_rollouts):
    case, wide = Case().shared(), {**SEQUENCE, "epsilon_low": 0.9, "epsilon_high": 9.0}
    expected = theirs(case, **wide)
    assert expected[1].abs().min(1).values.max() > 1e-3
    for surrogate in (Gspo(0.9, 9.0), GspoToken(0.9, 9.0)):
        assert_same(ours(make_rollouts, case, surrogate=surrogate, reduction=Grpo()), expected)


@pytest.mark.parametrize("seed", range(3))
def test_gmpo(make_rollouts, seed):
    case = Case(seed).shared()
    mine = ours(make_rollouts, case, surrogate=Gmpo(), reduction=Grpo())
    assert mine[1].abs().max() > 1e-3
    assert_same(mine, theirs(case, GMPOTrainer, epsilon_low=0.4, epsilon_high=0.4))


@each_loss
@pytest.mark.parametrize("corrected", [False, True])
def test_kl(make_rollouts, name, corrected):
    surrogate, reduction, changed = LOSSES[name]
    if corrected and "importance_sampling_level" in changed:
        pytest.skip("TRL's ratio in the KL is then the rollout's: see the test of its bias")
    kl = KlInLoss(RatioCorrected(K3()) if corrected else K3())
    mine = ours(make_rollouts, Case(), surrogate=surrogate, reduction=reduction, beta=0.3, kl=kl)
    assert_same(mine, theirs(Case(), beta=0.3, use_bias_correction_kl=corrected, **changed))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_tokens_of_highest_entropy(make_rollouts, share):
    mine = ours(make_rollouts, Case(), top_entropy=share)
    assert_same(mine, theirs(Case(), loss_type="dapo", top_entropy_quantile=share))


def test_entropy_bonus(make_rollouts):
    mine = ours(make_rollouts, Case(), entropy_bonus=0.1)
    assert_same(mine, theirs(Case(), loss_type="dapo", entropy_coef=0.1))


@pytest.mark.parametrize(
    "correction",
    [
        TokenTruncated(floor=0.8, cap=1.2),
        TokenMasked(floor=0.8, cap=1.2),
        SequenceTruncated(floor=0.8, cap=1.2),
        SequenceMasked(floor=0.5, cap=1.5),
    ],
    ids=lambda c: type(c).__name__,
)
def test_corrections_multiply_the_same_term(make_rollouts, correction):
    # TRL makes its ratios while it generates, from (old - sampled) summed over the mask.
    case = Case()
    gap = (case.old - case.sampled) * case.mask
    sequence = isinstance(correction, SequenceTruncated | SequenceMasked)
    raw = (gap.sum(1, keepdim=True) if sequence else gap).exp()
    floor, cap = correction.floor, correction.cap
    within = (raw >= floor) & (raw <= cap)
    masked = isinstance(correction, TokenMasked)
    ratio = torch.where(within, raw, 0.0) if masked else raw.clamp(floor, cap)
    assert (ratio[:, :1] != 1).any() and (ratio != raw).any()
    mine = ours(make_rollouts, case, correction=correction, beta=0.3)
    expected = theirs(case, ratio=ratio, loss_type="dapo", use_vllm=True, beta=0.3)
    assert_same(mine, expected)
    without = ours(make_rollouts, case, correction=NoCorrection(), beta=0.3)
    assert (mine[1] - without[1]).abs().max() > 1e-3


# --- what TRL does otherwise ----------------------------------------------------------------------


def test_their_kl_without_the_ratio_has_the_gradient_of_another_divergence():
    # Field notes, verl 2953: the default of GRPO's papers, and of TRL where the correction is off.
    _, right = exact()
    logits = torch.tensor([1.0, 0.2, -0.4], dtype=torch.float64, requires_grad=True)
    now = logits.log_softmax(0)
    for corrected in (False, True):
        # Each token of the vocabulary as a rollout of length 1, weighted by its probability.
        case = Case(rows=torch.tensor([2, 2, 2]))
        case.mask, case.advantages = case.mask[:, :1], torch.zeros(3, 1, dtype=torch.float64)
        case.now = case.old = now.detach()[:, None]
        case.sampled, case.reference = case.old, REFERENCE.log()[:, None]
        case.entropy = torch.zeros(3, 1, dtype=torch.float64)
        _, slopes = theirs(case, beta=1.0, use_bias_correction_kl=corrected)
        mean = (3 * slopes[:, 0] * now.exp().detach() * now).sum()
        (slope,) = torch.autograd.grad(mean, logits, retain_graph=True)
        assert torch.allclose(slope, right, atol=1e-6) is corrected
    torch.testing.assert_close(expected(RatioCorrected())[1], right)


def test_their_sequence_ratio_spreads_the_credit_of_a_token_over_its_rollout(make_rollouts):
    case, wide = Case(), {**SEQUENCE, "epsilon_low": 0.9, "epsilon_high": 9.0}
    case.advantages = torch.zeros_like(case.advantages)
    case.advantages[0, 2] = 1.0
    _, spread = theirs(case, **wide)
    assert (spread[0] != 0).all()
    _, own = ours(make_rollouts, case, surrogate=GspoToken(0.9, 9.0), reduction=Grpo())
    assert (own != 0).nonzero().tolist() == [[0, 2]]
    # By hand: the ratio of the rollout, times the advantage, over its length and 4 rollouts.
    ratio = (case.now - case.old)[0].mean().exp()
    torch.testing.assert_close(own[0, 2], -ratio / 7 / 4)
    torch.testing.assert_close(own.sum(), spread.sum())


def test_their_bonus_and_quantile_depend_on_the_split_and_ours_do_not(make_rollouts):
    # TRL 5619, 6024, 5890: one optimiser step as one micro-batch and as two.
    parts = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    tokens = torch.tensor(float(MASK.sum()))

    def split(**changed):
        total = torch.zeros(4, WIDTH, dtype=torch.float64)
        for rows in parts:
            case = Case(rows=rows)
            settings = {"current_gradient_accumulation_steps": 2, **changed}
            total[rows] += theirs(case, loss_type="bnpo", **settings)[1]
        return total

    whole = theirs(Case(), loss_type="bnpo")[1]
    assert not torch.allclose(split(), whole, atol=1e-3)  # bnpo: by definition
    first = theirs(Case(rows=parts[0]), loss_type="dapo", top_entropy_quantile=0.3)[1] != 0
    every = theirs(Case(), loss_type="dapo", top_entropy_quantile=0.3)[1] != 0
    assert not torch.equal(first, every[parts[0]])  # each micro-batch has a quantile of its own

    module_whole = ours(make_rollouts, Case(), entropy_bonus=0.1)
    pieces = [ours(make_rollouts, Case(rows=rows), tokens, entropy_bonus=0.1) for rows in parts]
    torch.testing.assert_close(sum(loss for loss, _ in pieces), module_whole[0])
    bonus = [theirs(Case(rows=rows), loss_type="dapo", entropy_coef=0.1)[0] for rows in parts]
    plain = [theirs(Case(rows=rows), loss_type="dapo")[0] for rows in parts]
    means = [(a - b) / 2 for a, b in zip(bonus, plain, strict=True)]
    theirs_whole = theirs(Case(), loss_type="dapo", entropy_coef=0.1)[0]
    assert (sum(means) - (theirs_whole - theirs(Case(), loss_type="dapo")[0])).abs() > 1e-3


def test_their_rollouts_without_tokens_stay_in_the_denominator(make_rollouts):
    # TRL 6369, 7068: a masked rollout leaves the numerator only; ours leaves both.
    case = Case()
    case.mask = case.mask.clone()
    case.mask[3] = False
    kept = Case(rows=torch.arange(3))
    (their_loss, _), (their_kept, _) = theirs(case), theirs(kept)
    torch.testing.assert_close(their_loss * 4 / 3, their_kept)
    loss, _ = ours(make_rollouts, kept, surrogate=CLIPPED, reduction=Grpo())
    torch.testing.assert_close(loss, their_kept, check_dtype=False)


# --- through TRL's real method, on the shipped policy -------------------------------------------

REWARDS = [1.0, 0.0, 0.0, 0.0, 0.25, 1.0, 0.5, 0.5]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """TRL's trainer on the shipped policy, in groups of four; the rewards are chosen."""
    from datasets import Dataset

    model, codec = Pretrained().weights(), Pretrained().tokenizer()
    config = trl.GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=24,
        temperature=0.9,
        beta=0.3,
        use_cpu=True,
        bf16=False,
        report_to=[],
        loss_type="dapo",
        disable_dropout=True,
    )
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: REWARDS,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "7+5-3="}, {"prompt": "40-1+2="}]),
        processing_class=codec.tokenizer,
    )


@pytest.fixture(scope="module")
def generated(trainer):
    rows = [{"prompt": prompt} for prompt in ("7+5-3=", "40-1+2=") for _ in range(4)]
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions(rows)


def as_rollouts(generated, codec):
    """TRL's batch as ours."""
    lengths = generated["completion_mask"].sum(1)
    prompts = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(generated["prompt_ids"], generated["prompt_mask"], strict=True)
    ]
    blank = torch.zeros(generated["completion_ids"].shape)
    return assemble(
        prompts=prompts,
        samples=Samples(generated["completion_ids"], lengths, blank, blank, lengths < 0),
        steps=[[0] * int(n) for n in lengths],
        verdicts=[Verdict(r) for r in REWARDS],
        group=[0] * 4 + [1] * 4,
        problems=[Problem(0, "p", "a")] * 8,
        texts=[""] * 8,
        pad_id=codec.pad_id,
        policy_step=0,
        temperature=0.9,
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_of_the_real_trainer(trainer, scale):
    rows = [{"prompt": prompt} for prompt in ("7+5-3=", "40-1+2=") for _ in range(4)]
    before, trainer.scale_rewards = trainer.scale_rewards, scale
    batch = trainer._generate_and_score_completions(rows)
    trainer.scale_rewards = before
    rollouts = as_rollouts(batch, Pretrained().tokenizer())
    mine = GroupRelative(scale)(outcomes_of(rollouts))
    torch.testing.assert_close(mine, batch["advantages"], atol=1e-6, rtol=1e-6)


def test_loss_and_gradient_of_the_real_trainer(trainer, generated):
    codec = Pretrained().tokenizer()
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, generated)
    loss.backward()
    theirs = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.zero_grad()

    corrected = KlInLoss(RatioCorrected(K3()))
    module = PolicyModule(torch.optim.AdamW, beta=0.3, kl=corrected)
    module.policy = Policy(trainer.model, codec)
    module.anchor.copy = Pretrained().load()
    rollouts = module.referred(as_rollouts(generated, codec))
    advantages = GroupRelative()(outcomes_of(rollouts))[:, None] * rollouts.sampled
    divisor = module.reduction.count(module.learnt(rollouts))
    mine, _ = module.loss(CreditedRollouts(rollouts, advantages), divisor)
    mine.backward()
    torch.testing.assert_close(mine, loss, atol=1e-6, rtol=1e-5)
    assert max(g.abs().max() for g in theirs.values()) > 1e-2
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name], atol=1e-6, rtol=1e-4)
