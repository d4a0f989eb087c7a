"""vLLM against the transformers engine and the training forward, before and after a push."""

import copy
from dataclasses import replace

import pytest
import torch

from ssgrpo_lightning.cli import main
from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.engines.engine import uniform_noise
from ssgrpo_lightning.policy import Pretrained
from ssgrpo_lightning.rollouts import Judge, collect
from ssgrpo_lightning.segmenters import ByLine
from ssgrpo_lightning.verifiers import FinalNumber
from tests.conftest import QUICKSTART, REPOSITORY, metrics

pytestmark = pytest.mark.vllm
GREEDY = Sampling(48, temperature=0.0)


@pytest.fixture
def prompts(policy, task):
    return [policy.codec.encode(p) for p in task.problems("train")[:6]]


@pytest.fixture(scope="module")
def pupil(engine):
    """A policy that these tests may train."""
    pupil = Pretrained().load()
    yield pupil
    engine.close(pupil)


def sample(engine, policy, prompts, repeats=1, sampling=Sampling(48), seed=0):
    keys = [(0, seed, p, k) for p in range(len(prompts)) for k in range(repeats)]
    noise = uniform_noise(keys, sampling.max_new_tokens)
    return engine.generate(policy, prompts, repeats, sampling, noise)


def train(policy, prompt, fused):
    """One optimiser step that changes what the policy says."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, fused=fused)
    tokens = torch.tensor([prompt])
    policy.model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    policy.zero_grad()


def assert_greedily_equal(engine, policy, prompts):
    ours, theirs = (
        sample(e, policy, prompts, sampling=GREEDY) for e in (engine, TransformersEngine())
    )
    for field in ("tokens", "lengths", "truncated"):
        assert getattr(ours, field).tolist() == getattr(theirs, field).tolist()
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.entropy, theirs.entropy, atol=1e-4, rtol=0)
    return ours


def test_greedy_tokens_are_those_of_transformers_before_and_after_every_push(
    engine, pupil, prompts
):
    said = [assert_greedily_equal(engine, pupil, prompts)]
    start = copy.deepcopy(pupil.model.state_dict())
    for fused in (False, True):  # fused optimisers leave no trace in torch's version counters
        train(pupil, prompts[0], fused)
        said.append(assert_greedily_equal(engine, pupil, prompts))
    pupil.model.load_state_dict(start)
    said.append(assert_greedily_equal(engine, pupil, prompts))
    logprobs = [s.logprobs.sum().item() for s in said]
    assert logprobs[0] == pytest.approx(logprobs[3], abs=1e-3)
    assert len({round(x, 3) for x in logprobs}) == 3


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probabilities_agree_with_the_training_forward(engine, policy, task, temperature):
    sampling = Sampling(48, temperature=temperature)
    judge = Judge(FinalNumber("#"), ByLine())
    rollouts = collect(policy, engine, judge, task.problems("train")[:4], 4, sampling, 0, 0)
    logprobs, entropy = policy(rollouts.tokens, rollouts.attended, rollouts.sampled, temperature)
    torch.testing.assert_close(logprobs, rollouts.logprobs, atol=2e-4, rtol=0)
    torch.testing.assert_close(entropy, rollouts.entropy, atol=1e-4, rtol=0)


def test_the_same_noise_gives_the_same_completions_and_other_noise_others(engine, policy, prompts):
    first, again = (sample(engine, policy, prompts, 4) for _ in range(2))
    assert first.tokens.tolist() == again.tokens.tolist()
    assert first.logprobs.tolist() == again.logprobs.tolist()
    other = sample(engine, policy, prompts, 4, seed=1)
    assert first.tokens.tolist() != other.tokens.tolist()
    assert len({tuple(row) for row in first.tokens[:4].tolist()}) > 1


def test_frequencies_follow_the_distribution(engine, policy, prompts):
    draws = 4000
    samples = sample(engine, policy, prompts[:1], draws, Sampling(1, 2.0))
    logits = policy.model(torch.tensor([prompts[0]])).logits[0, -1] / 2.0
    expected = logits.softmax(-1)
    found = samples.tokens[:, 0].bincount(minlength=len(expected)) / draws
    assert (found - expected).abs().max() < 4 * (0.25 / draws) ** 0.5


def test_top_k_is_that_of_the_sampling(engine, policy, prompts):
    samples = sample(engine, policy, prompts, 16, Sampling(4, 1.0, top_k=2))
    assert len(samples.tokens[:16, 0].unique()) <= 2
    # Of two tokens the distribution has at most log 2 nats.
    assert samples.entropy.max() <= torch.log(torch.tensor(2.0)) + 1e-5


def test_the_policy_says_what_ends_a_completion(engine, policy, prompts, monkeypatch):
    newline = policy.codec.tokenizer.convert_tokens_to_ids("\n")
    monkeypatch.setattr(policy, "eos_ids", frozenset({1, newline}))
    both = sample(engine, policy, prompts, 4)
    ends = both.tokens.gather(1, both.lengths[:, None] - 1)[:, 0]
    assert newline in ends.tolist() and not both.truncated.any()
    monkeypatch.setattr(policy, "eos_ids", frozenset())
    none = sample(engine, policy, prompts, sampling=Sampling(5))
    assert none.truncated.all() and (none.lengths == 5).all()


def test_starting_it_disturbs_no_random_state(engine, policy, prompts):
    engine.close(policy)
    before = torch.get_rng_state()
    sample(engine, policy, prompts)
    assert torch.get_rng_state().equal(before)


def test_a_prompt_and_budget_over_its_limit_are_refused(engine, policy, prompts):
    with pytest.raises(ValueError, match=r"VllmEngine\.max_model_len is 20"):
        sample(replace(engine, max_model_len=20), policy, prompts)


@pytest.mark.slow
def test_twenty_updates_of_the_quickstart_learn(engine, tmp_path):
    """As with the other engine: from the same start, as far, up to the noise of the draws."""
    curves = []
    for overlay in ([], [f"--config={REPOSITORY / 'configs/vllm.yaml'}"]):
        root = tmp_path / str(len(curves))
        main(
            [
                "fit",
                f"--config={QUICKSTART}",
                *overlay,
                f"--trainer.default_root_dir={root}",
                "--trainer.max_steps=20",
                "--trainer.val_check_interval=20",
                "--trainer.enable_progress_bar=false",
                "--trainer.enable_checkpointing=false",
                "--data.rollouts_per_update=128",
                "--rollout_log.console=false",
            ]
        )
        rows = metrics(root)
        updates = [r for r in rows if r["reward"]]
        drift = [float(r["sampling/sampling_logp_difference/mean"]) for r in updates]
        assert len(updates) == 20 and max(drift) < 1e-4
        curves.append(
            {
                "accuracy": [float(r["val/accuracy"]) for r in rows if r["val/accuracy"]],
                "reward": [float(r["reward"]) for r in updates],
                "seconds": sum(float(r["timing/rollout"]) for r in updates) / 20,
            }
        )
    print(curves)
    ours, theirs = curves[1], curves[0]
    assert ours["accuracy"][0] == theirs["accuracy"][0]  # greedy, before the first update
    for curve in curves:
        assert curve["accuracy"][1] > curve["accuracy"][0] + 0.05
    # 256 held-out problems: a difference has a standard error of 4 points.
    assert abs(ours["accuracy"][1] - theirs["accuracy"][1]) < 0.12
