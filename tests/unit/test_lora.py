"""The adapter alone learns; without it the model is what it was."""

import pytest
import torch

from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.engines.engine import uniform_noise
from ssgrpo_lightning.lora import Lora
from ssgrpo_lightning.policy import Pretrained
from ssgrpo_lightning.policy_module import PolicyModule
from tests.equivalence.test_update import fit, weights


@pytest.fixture
def adapted():
    policy = Pretrained().load(lora=Lora(rank=4))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:  # as training would leave it
            torch.nn.init.normal_(parameter, std=0.5)
    return policy


def read(policy, rollouts):
    with torch.no_grad():
        return policy(rollouts.tokens, rollouts.attended, rollouts.sampled)[0]


def test_a_new_adapter_changes_nothing(policy, rollouts):
    assert torch.equal(read(Pretrained().load(lora=Lora()), rollouts), read(policy, rollouts))


def test_without_adapter_is_the_policy_it_was(policy, adapted, rollouts):
    assert (read(adapted, rollouts) - read(policy, rollouts)).abs().max() > 0.1
    with adapted.without_adapter():
        torch.testing.assert_close(read(adapted, rollouts), read(policy, rollouts))
    assert (read(adapted, rollouts) - read(policy, rollouts)).abs().max() > 0.1
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)


def test_without_adapter_inside_a_training_forward_keeps_its_gradient(adapted, rollouts):
    args = rollouts.tokens, rollouts.attended, rollouts.sampled
    gradients = []
    for look_aside in (False, True):
        adapted.zero_grad()
        logprobs, _ = adapted(*args)
        if look_aside:
            with torch.no_grad(), adapted.without_adapter():
                adapted(*args)
        logprobs.sum().backward()
        gradients.append([p.grad for p in adapted.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_engine_samples_with_the_adapter(adapted, task):
    prompts = [adapted.codec.encode(p) for p in task.problems("train")[:4]]
    noise = uniform_noise([(0, 0, p, 0) for p in range(4)], 24)
    samples = TransformersEngine().generate(adapted, prompts, 1, Sampling(24), noise)
    for prompt, ids, length, theirs in zip(
        prompts, samples.tokens, samples.lengths, samples.logprobs, strict=True
    ):
        tokens = torch.tensor([[*prompt, *ids[:length].tolist()]])
        sampled = torch.arange(tokens.shape[1])[None] >= len(prompt)
        with torch.no_grad():
            ours = adapted(tokens, torch.ones_like(sampled), sampled)[0][sampled]
        torch.testing.assert_close(ours, theirs[:length], atol=1e-4, rtol=0)


def test_only_the_adapter_moves_in_training(tmp_path):
    module = fit(tmp_path, "--model.policy.lora={rank: 4}").policy
    start = dict(Pretrained().load().named_parameters())
    moved = 0
    for name, parameter in module.policy.named_parameters():
        if "lora_" in name:
            moved += float(parameter.abs().sum()) > 0 and "lora_B" in name
        else:
            assert torch.equal(parameter, start[name.replace(".base_layer", "")]), name
    assert moved > 0


def test_an_adapter_on_the_head_is_refused():
    with pytest.raises(ValueError, match="names the LM head"):
        Pretrained().load(lora=Lora(target_modules=["lm_head"]))


def test_quantised_weights_want_bitsandbytes_and_an_adapter(monkeypatch):
    with pytest.raises(ValueError, match=r"nf4.*needs bitsandbytes"):
        Pretrained(quantize="nf4")
    monkeypatch.setattr("ssgrpo_lightning.policy.find_spec", lambda name: name)
    quantised, optimizer = Pretrained(quantize="nf4"), torch.optim.SGD
    with pytest.raises(ValueError, match=r"cannot be trained; set policy\.lora"):
        PolicyModule(optimizer, quantised)
    PolicyModule(optimizer, quantised, lora=Lora())


def test_the_reference_is_the_policy_without_its_adapter(tmp_path):
    options = ["--model.policy.lora={rank: 4}", "--model.policy.beta=0.5"]
    rate = "--model.policy.optimizer.init_args.lr=1e-3"
    copied = fit(tmp_path / "a", *options, rate)
    shared = fit(tmp_path / "b", *options, rate, "--model.policy.reference=AdapterOff")
    assert shared.policy.anchor.copy is None and copied.policy.anchor.copy is not None
    ours, theirs = weights(shared.policy.policy), weights(copied.policy.policy)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
