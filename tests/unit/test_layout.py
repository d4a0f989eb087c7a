"""Every layout of a micro-batch gives the hidden states and the gradient of the padded one."""

import copy
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from ssgrpo_lightning.layout import Layout, Packed, Padded, SharedPrompt, micro_batches
from ssgrpo_lightning.policy import Policy
from tests.contracts.test_contracts import each, members


def read(policy, layout, rollouts):
    """Log-probabilities, entropies and the gradient of some loss."""
    policy = Policy(policy.model, policy.codec, head_chunk=50, layout=layout)
    policy.model.zero_grad()
    args = rollouts.tokens, rollouts.attended, rollouts.sampled
    logprobs, entropy = policy(*args, temperature=0.7, entropy_gradient=True)
    weight = torch.arange(logprobs.numel()).view_as(logprobs).cos()
    (logprobs * weight + entropy).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    policy.model.zero_grad()
    return logprobs.detach(), entropy.detach(), gradient


def mixed(make_rollouts):
    """Five rollouts of three prompts of different lengths, two of one group, one of one token."""
    wide = make_rollouts([1.0, 0, 1, 0, 1], [[2, 3], [7], [1], [4, 1], [2]], [0, 0, 0, 1, 2])
    tokens, attended = wide.tokens.clone(), wide.attended.clone()
    attended[3, :2] = False  # a shorter prompt, padded on the left
    tokens[3, :2] = 0
    tokens[4, 0] = 5  # another prompt of the same length
    return type(wide)(**{**vars(wide), "tokens": tokens, "attended": attended})


@each(Layout)
def test_layout_is_exact_in_value_and_gradient(member, policy, rollouts, make_rollouts):
    for batch in (rollouts, mixed(make_rollouts)):
        # The plain way: each rollout alone, through the model's own head.
        alone = torch.zeros_like(batch.logprobs)
        for i in range(len(batch)):
            ids = batch.tokens[i][batch.attended[i]]
            scores = (policy.model(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1)
            picked = scores.gather(1, ids[1:, None])[:, 0]
            alone[i][batch.sampled[i]] = picked[batch.sampled[i][batch.attended[i]][1:]].detach()
        logprobs, entropy, gradient = read(policy, member(), batch)
        torch.testing.assert_close(logprobs, alone, atol=1e-5, rtol=0)
        padded = read(policy, Padded(), batch)
        torch.testing.assert_close(entropy, padded[1], atol=1e-5, rtol=0)
        assert (gradient - padded[2]).norm() < 1e-5 * padded[2].norm()


@each(Layout)
def test_layout_computes_as_many_tokens_as_it_says(member, policy, rollouts, make_rollouts):
    layout, seen = member(), []
    handle = policy.model.base_model.embed_tokens.register_forward_hook(
        lambda module, args, output: seen.append(args[0].numel())
    )
    for batch in (rollouts, mixed(make_rollouts)):
        rows = torch.arange(len(batch))
        layout.hidden(policy.model.base_model, batch.tokens, batch.attended, batch.sampled)
        said = layout.tokens(batch, rows)
        # The last tokens of rollouts predict nothing, and may be left out.
        assert said - len(batch) <= seen[-1] <= said
    handle.remove()


def test_a_prompt_is_computed_once_and_no_padding(rollouts):
    lengths = rollouts.attended.sum(1) - rollouts.completion_lengths
    prompts = int(lengths[::4].sum())
    whole = prompts + int((rollouts.completion_lengths - 1).sum())
    assert SharedPrompt().tokens(rollouts, torch.arange(len(rollouts))) == whole


@each(Layout)
def test_micro_batches_hold_every_row_once_within_both_limits(member, rollouts):
    layout, rows = member(), torch.arange(1, len(rollouts), 2)
    for size, tokens in ((5, None), (64, 150), (3, 150), (4, 1)):
        parts = micro_batches(rollouts, rows, layout, size, tokens)
        assert torch.cat(parts).sort().values.equal(rows)
        for part in parts:
            assert 1 <= len(part) <= size
            assert tokens is None or len(part) == 1 or layout.tokens(rollouts, part) <= tokens
    assert micro_batches(rollouts, rows[:0], layout, 4, 100) == []


def test_a_budget_is_used(rollouts):
    rows = torch.arange(len(rollouts))
    for member in members(Layout):
        parts = micro_batches(rollouts, rows, member(), 64, 200)
        for part, following in pairwise(parts):
            assert member().tokens(rollouts, torch.cat([part, following[:1]])) > 200


def test_a_layout_under_which_rollouts_mix_is_refused(policy):
    model = copy.deepcopy(policy.model)
    layer = model.base_model.layers[0].mlp
    plain = layer.forward
    # A convolution over neighbours, as state-space models have, sees across packed rollouts.
    layer.forward = lambda x: plain(x) + 10 * x.roll(1, 1) * (torch.arange(x.shape[1]) > 0)[:, None]
    for layout in (SharedPrompt(), Packed()):
        with pytest.raises(ValueError, match=r"mixes the rollouts.*Padded"):
            Policy(model, policy.codec, layout=layout)
    Policy(model, policy.codec, layout=Padded())


def test_a_sliding_window_is_refused_where_it_would_act(policy):
    from transformers import MistralConfig

    config = MistralConfig(
        vocab_size=policy.model.config.vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=6,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    windowed = Policy(model, policy.codec)
    tokens, mask = torch.ones(1, 12, dtype=torch.long), torch.ones(1, 12, dtype=torch.bool)
    sampled = torch.arange(12)[None] >= 8
    with pytest.raises(ValueError, match="sees 6 tokens back"):
        windowed(tokens, mask, sampled)
