"""The policy's loss as a whole: what multiplies what, which tokens count, what is logged."""

import math
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from ssgrpo_lightning.losses import (
    K2,
    AdaptiveBeta,
    Bnpo,
    KlInLoss,
    KlInReward,
    Reduction,
    Reinforce,
    SequenceMasked,
    Surrogate,
    TokenTruncated,
)
from ssgrpo_lightning.parallel import Tally, collectives, pooled
from ssgrpo_lightning.policy import Policy, Pretrained
from ssgrpo_lightning.policy_module import RATIO, PolicyModule
from ssgrpo_lightning.records import CreditedRollouts
from ssgrpo_lightning.references import AdapterOff, FrozenCopy, SlowCopy
from tests.contracts.test_contracts import build, members

NAN = float("nan")
LENGTHS = [[3, 2], [1], [4, 4], [2, 1], [5], [1, 1]]


class Table(Policy):
    """A policy whose log-probability of a token depends on the token alone."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        generator = torch.Generator().manual_seed(1)
        self.logits = torch.nn.Parameter(torch.randn(17, generator=generator, dtype=torch.float64))

    def forward(self, tokens, attended, sampled, temperature=1.0, entropy_gradient=False):
        logprobs = torch.nn.functional.logsigmoid(self.logits)[tokens] * sampled
        entropy = torch.sigmoid(self.logits)[tokens] * sampled
        return logprobs, entropy if entropy_gradient else entropy.detach()


class Ranks(L.LightningModule):
    """Rank 0 of one or two."""

    trainer = None

    def __init__(self, count):
        super().__init__()
        self.trainer = SimpleNamespace(world_size=count)


def module_of(**fields):
    module = PolicyModule(torch.optim.AdamW, **fields)
    module.policy = Table()
    return module


@pytest.fixture
def batch(make_rollouts):
    """Six rollouts of three groups with advantages that differ within them, off-policy."""
    rollouts = make_rollouts([1.0, 0.0, 1.0, 0.0, 0.5, 0.0], LENGTHS, group=[0, 0, 1, 1, 2, 2])
    torch.manual_seed(0)
    sampled = rollouts.sampled
    logprobs, _ = Table()(rollouts.tokens, rollouts.attended, sampled)
    noise = 0.3 * torch.randn(3, *sampled.shape, dtype=torch.float64) * sampled
    logprobs = logprobs.detach()
    return CreditedRollouts(
        replace(rollouts, logprobs=logprobs + noise[0], reference=logprobs + noise[1]),
        torch.randn(sampled.shape, dtype=torch.float64) * sampled,
        old=logprobs + noise[2],
    )


def whole_loss(module, batch, parts=None):
    """Loss of an optimiser step made of the given micro-batches, and what they report."""
    parts = parts or [torch.arange(len(batch.rollouts))]
    mask = module.learnt(batch.rollouts)
    divisor = torch.stack([module.reduction.count(mask[rows]) for rows in parts]).sum()
    results = [module.loss(batch.select(rows), divisor) for rows in parts]
    return sum(loss for loss, _ in results), [sums for _, sums in results]


def gradient(module, batch, parts=None):
    loss, _ = whole_loss(module, batch, parts)
    return torch.autograd.grad(loss, module.policy.logits)[0]


@pytest.mark.parametrize("reduction", members(Reduction), ids=lambda m: m.__name__)
@pytest.mark.parametrize("surrogate", members(Surrogate), ids=lambda m: m.__name__)
def test_one_gradient_for_every_split_of_an_optimiser_step(surrogate, reduction, batch):
    module = module_of(
        surrogate=build(surrogate),
        reduction=build(reduction),
        correction=SequenceMasked(mean="geometric"),
        entropy_bonus=0.1,
        beta=0.3,
    )
    whole = gradient(module, batch)
    assert whole.norm() > 1e-4
    for split in ([[0], [1], [2], [3], [4], [5]], [[5, 0], [1, 2, 3], [4]]):
        found = gradient(module, batch, [torch.tensor(rows) for rows in split])
        same = torch.allclose(found, whole, rtol=1e-9, atol=1e-12)
        assert same is (reduction is not Bnpo)  # by definition a local mean


def test_the_same_tokens_leave_numerator_and_denominator(batch):
    rollouts = batch.rollouts
    for reduction in map(build, members(Reduction)):
        module = module_of(reduction=reduction, entropy_bonus=0.1, beta=0.3)
        rewards = torch.where(torch.arange(6) == 2, NAN, rollouts.rewards)
        without = replace(batch, rollouts=replace(rollouts, rewards=rewards))
        kept = batch.select(torch.tensor([0, 1, 3, 4, 5]))
        torch.testing.assert_close(whole_loss(module, without)[0], whole_loss(module, kept)[0])


def test_step_weights_and_corrections_multiply_the_policy_term_alone(batch):
    # Advantages of 0 leave KL and entropy; a correction of the policy term does not touch them.
    held = replace(batch, advantages=torch.zeros_like(batch.advantages))
    plain = module_of(entropy_bonus=0.1, beta=0.3)
    corrected = module_of(entropy_bonus=0.1, beta=0.3, correction=TokenTruncated(cap=1.01))
    assert torch.equal(gradient(plain, held), gradient(corrected, held))
    assert not torch.allclose(gradient(plain, batch), gradient(corrected, batch))
    # Doubling all advantages adds the policy term once more, and nothing else.
    bare = gradient(module_of(), batch)
    double = gradient(plain, replace(batch, advantages=2 * batch.advantages))
    torch.testing.assert_close(double - gradient(plain, batch), bare)


def test_the_correction_reads_the_old_policy_against_the_engine(batch):
    module = module_of(surrogate=Reinforce(), correction=TokenTruncated(cap=1.2))
    weights = (batch.old - batch.rollouts.logprobs).exp().clamp(max=1.2)
    expected = gradient(
        module_of(surrogate=Reinforce()), replace(batch, advantages=weights * batch.advantages)
    )
    torch.testing.assert_close(gradient(module, batch), expected)


def test_ratios_are_logged_before_they_are_bounded(batch):
    _, parts = whole_loss(
        module_of(correction=TokenTruncated(cap=1.01)), batch, [torch.arange(3), torch.arange(3, 6)]
    )
    tally = Tally()
    for sums in parts:
        tally.add(sums)
    means = tally.means(Ranks(1), "tokens")
    raw = (batch.old - batch.rollouts.logprobs).exp()[batch.rollouts.sampled]
    assert raw.max() > 1.3
    for what in ("min", "mean", "max"):
        assert float(means[f"{RATIO}/{what}"]) == pytest.approx(float(getattr(raw, what)()))


def test_names_of_metrics_are_known_before_anything_is_measured(batch):
    for surrogate in members(Surrogate):
        module = module_of(surrogate=build(surrogate), beta=0.1)
        _, (sums,) = whole_loss(module, batch)
        named = set(module.metrics({})) - {"policy_loss", "grad_norm", "beta"}
        assert named == set(sums) - {"tokens"}


# --- entropy ------------------------------------------------------------------------------------


def test_the_bonus_raises_the_entropy_of_the_shipped_policy(policy, rollouts):
    module = PolicyModule(torch.optim.AdamW, entropy_bonus=1.0, surrogate=Reinforce())
    module.policy = policy
    few = rollouts.select(torch.arange(4))
    still = CreditedRollouts(few, torch.zeros_like(few.logprobs))
    loss, _ = whole_loss(module, still)
    entropy = few.entropy[few.sampled].mean()
    torch.testing.assert_close(loss, -entropy, atol=1e-4, rtol=0)
    (slope,) = torch.autograd.grad(loss, policy.model.get_output_embeddings().weight)
    assert slope.norm() > 0.01
    loss, _ = whole_loss(bare(policy), still)
    (slope,) = torch.autograd.grad(loss, policy.model.get_output_embeddings().weight)
    assert slope.norm() == 0


def bare(policy):
    module = PolicyModule(torch.optim.AdamW)
    module.policy = policy
    return module


def test_the_entropy_gradient_is_the_same_in_chunks(policy, rollouts):
    few = rollouts.select(torch.arange(4))
    weight = policy.model.get_output_embeddings().weight
    slopes, chunk = [], policy.head_chunk
    for policy.head_chunk in (5, 1024):
        _, entropy = bare(policy).forward(few, entropy_gradient=True)
        slopes.append(torch.autograd.grad(entropy.sum(), weight)[0])
    policy.head_chunk = chunk
    torch.testing.assert_close(*slopes)


def test_only_the_tokens_of_highest_entropy_keep_their_advantage(batch):
    module = module_of(top_entropy=0.2)
    focused = module.focused(batch, lambda x: x)
    entropy, mask = batch.rollouts.entropy, batch.rollouts.sampled
    kept = focused.advantages != 0
    assert int(kept.sum()) == math.floor(0.2 * (int(mask.sum()) - 1)) + 1
    assert entropy[kept].min() > entropy[mask & ~kept].max()
    torch.testing.assert_close(focused.advantages[kept], batch.advantages[kept])
    assert module_of().focused(batch, lambda x: x) is batch
    # The threshold is that of all ranks: another rank with surer tokens lets more of these pass.
    wider = module.focused(batch, lambda x: torch.cat([x, torch.zeros(4 * len(x))]))
    assert torch.equal(wider.advantages, batch.advantages)


def test_numbers_of_ranks_that_differ_in_count_come_together(monkeypatch):
    def with_another(module, x):  # which has three numbers
        other = torch.tensor(3) if x.ndim == 0 else torch.tensor([7.0, 8.0, 9.0])
        return torch.stack([x, other])

    monkeypatch.setattr(collectives, "stacked", with_another)
    assert pooled(Ranks(2), torch.tensor([1.0])).tolist() == [1, 7, 8, 9]


# --- KL and its reference -----------------------------------------------------------------------


def test_dead_groups_are_held_by_choice(batch):
    dead = replace(batch, advantages=torch.where(torch.arange(6)[:, None] < 4, batch.advantages, 0))
    held, free = (module_of(beta=0.3, kl=KlInLoss(holds_dead=h)) for h in (True, False))
    assert held.learns(dead).all() and free.learns(dead).tolist() == [True] * 4 + [False] * 2
    # Spared rows change nothing: the divisor is that of all.
    rows, divisor = torch.arange(4), torch.tensor(float(batch.rollouts.sampled.sum()))
    whole, few = (free.loss(dead.select(r), divisor)[0] for r in (torch.arange(6), rows))
    torch.testing.assert_close(whole, few)
    assert not torch.allclose(whole, held.loss(dead, divisor)[0])
    assert not module_of(beta=0.3, kl=KlInReward()).learns(dead).all()
    assert module_of(entropy_bonus=0.1).learns(dead).all()


@pytest.fixture
def referring(policy, rollouts):
    """Builds modules on the shipped policy whose reference is another policy."""

    def refer(**fields):
        module = PolicyModule(torch.optim.AdamW, beta=0.5, micro_batch=3, **fields)
        module.policy = policy
        module.anchor.copy = Pretrained().load()
        with torch.no_grad():
            module.anchor.copy.model.get_output_embeddings().weight.mul_(0.9)
        return module

    return refer


def test_kl_in_the_reward_is_taken_off_before_advantages_are_made(referring, rollouts):
    module = referring(kl=KlInReward())
    referred = module.referred(rollouts)
    everyone = [torch.arange(len(rollouts))]
    reference = module.logprobs(rollouts, everyone, module.anchor.copy)
    torch.testing.assert_close(referred.reference, reference)
    kl = (rollouts.logprobs - reference).sum(1)
    torch.testing.assert_close(referred.returns, rollouts.rewards - 0.5 * kl)
    assert torch.equal(referred.rewards, rollouts.rewards)  # what estimators learn
    length = torch.full((len(rollouts),), 0.25)
    both = module.referred(replace(rollouts, penalties=length))
    torch.testing.assert_close(both.penalties, 0.5 * kl + 0.25)


def test_kl_in_the_loss_leaves_returns_alone_and_beta_zero_reads_nothing(referring, rollouts):
    referred = referring().referred(rollouts)
    assert torch.equal(referred.returns, rollouts.rewards) and referred.reference is not None
    assert module_of().referred(rollouts) is rollouts


def test_the_kl_changes_the_gradient(batch):
    free, held = module_of(), module_of(beta=0.3, kl=KlInLoss(K2()))
    added = gradient(held, batch) - gradient(free, batch)
    sampled = batch.rollouts.sampled
    logprobs, _ = held.policy(batch.rollouts.tokens, batch.rollouts.attended, sampled)
    kl = 0.3 * (logprobs - batch.rollouts.reference).square()[sampled].mean() / 2
    torch.testing.assert_close(added, torch.autograd.grad(kl, held.policy.logits)[0])


def test_reference_and_policy_read_at_the_temperature_of_the_rollouts(referring, rollouts):
    module, everyone = referring(), [torch.arange(len(rollouts))]
    module.anchor.copy = module.policy
    cool = replace(rollouts, temperature=0.7)
    referred = module.referred(cool).reference
    torch.testing.assert_close(referred, module.logprobs(cool, everyone))
    assert not torch.allclose(referred, module.logprobs(rollouts, everyone), atol=1e-3)


def test_a_slow_copy_follows_every_so_often():
    slow, fast = Table(), Table()
    with torch.no_grad():
        fast.logits.add_(1.0)
    rule, start = SlowCopy(alpha=0.6, every=2), slow.logits.detach().clone()
    rule.follow(slow, fast, 1)
    assert torch.equal(slow.logits, start)
    rule.follow(slow, fast, 2)
    torch.testing.assert_close(slow.logits.detach(), start + 0.6)
    FrozenCopy().follow(slow, fast, 4)
    torch.testing.assert_close(slow.logits.detach(), start + 0.6)


def test_with_the_adapter_off_the_policy_is_its_own_reference(rollouts):
    peft = pytest.importorskip("peft")
    module = PolicyModule(torch.optim.AdamW, beta=0.5)
    module.anchor.reference = AdapterOff()
    start = module.policy = Pretrained().load()
    everyone = [torch.arange(len(rollouts))]
    before = module.logprobs(rollouts, everyone)
    config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)
    start.model = peft.inject_adapter_in_model(config, start.model)
    with torch.no_grad():
        for name, parameter in start.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)

    @contextmanager
    def without_adapter():
        layers = [m for m in start.model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        yield
        for layer in layers:
            layer.enable_adapters(True)

    start.without_adapter = without_adapter
    assert start.training
    referred = module.referred(rollouts)
    torch.testing.assert_close(referred.reference, before)
    assert start.training and module.anchor.copy is None
    assert not torch.allclose(module.logprobs(rollouts, everyone), before, atol=1e-2)


def test_an_adapted_beta_is_saved_and_a_fixed_one_is_the_configs():
    adapts = module_of(beta=0.1, beta_control=AdaptiveBeta(target=0.01))
    adapts.anchor.follow(adapts.policy, 1, torch.tensor(1.0))
    assert adapts.anchor.beta == pytest.approx(0.102)
    adapts.anchor.follow(adapts.policy, 2, None)  # an update that trained nothing says nothing
    assert adapts.anchor.beta == pytest.approx(0.102)
    state = adapts.state_dict()
    resumed = module_of(beta=0.1, beta_control=AdaptiveBeta(target=0.01))
    resumed.load_state_dict(state)
    assert resumed.anchor.beta == pytest.approx(0.102)
    fixed = module_of(beta=0.3)
    fixed.load_state_dict(state)
    assert fixed.anchor.beta == 0.3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"entropy_bonus": -0.1}, "policy.entropy_bonus is -0.1, must be at least 0"),
        ({"top_entropy": 0.0}, "policy.top_entropy is 0.0, must be in .0, 1."),
        ({"beta_control": AdaptiveBeta(target=0.1)}, "policy.beta is 0, which AdaptiveBeta"),
    ],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        PolicyModule(torch.optim.AdamW, **fields)


def test_references_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"SlowCopy has alpha 0\.0"):
        SlowCopy(alpha=0.0)
    with pytest.raises(ValueError, match="SlowCopy, which copies weights, but the policy learns"):
        SlowCopy().check(adapter=True)
    with pytest.raises(ValueError, match="AdapterOff, but the policy learns no adapter"):
        PolicyModule(torch.optim.AdamW, beta=0.1, reference=AdapterOff())
    assert PolicyModule(torch.optim.AdamW, reference=AdapterOff()).anchor.beta == 0
