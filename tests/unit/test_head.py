"""Log-probabilities and entropies from hidden states, against the plain computation."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ssgrpo_lightning.functional import token_scores

VOCABULARY = 50


@pytest.fixture
def problem():
    torch.manual_seed(0)
    hidden = torch.randn(23, 8, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(VOCABULARY, 8, requires_grad=True)
    bias = torch.randn(VOCABULARY, requires_grad=True)
    return hidden, weight, bias, torch.randint(0, VOCABULARY, (23,))


def plain(hidden, weight, bias, targets, temperature):
    distribution = torch.distributions.Categorical(logits=(hidden @ weight.T + bias) / temperature)
    return distribution.log_prob(targets), distribution.entropy()


@pytest.mark.parametrize("chunk", [1, 7, 23, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients_are_those_of_all_logits(
    problem, chunk, temperature, entropy_gradient
):
    hidden, weight, bias, targets = problem
    ours = token_scores(hidden, weight, bias, targets, temperature, chunk, entropy_gradient)
    theirs = plain(hidden, weight, bias, targets, temperature)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert ours[1].requires_grad == entropy_gradient
    pull = torch.randn(2, 23)

    def gradients(logprobs, entropy):
        loss = (logprobs * pull[0]).sum()
        if entropy_gradient:
            loss = loss + (entropy * pull[1]).sum()
        return torch.autograd.grad(loss, [hidden, weight, bias])

    for a, b in zip(gradients(*ours), gradients(*theirs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_entropy_gradient_alone_and_frozen_weights(problem):
    hidden, weight, _, targets = problem
    frozen = weight.detach()
    _, entropy = token_scores(hidden, frozen, None, targets, 1.0, 5, True)
    (ours,) = torch.autograd.grad(entropy.sum(), [hidden])
    logits = hidden @ frozen.T
    theirs = torch.autograd.grad(
        torch.distributions.Categorical(logits=logits).entropy().sum(), hidden
    )
    torch.testing.assert_close(ours, theirs[0], atol=1e-5, rtol=1e-4)


def test_tokens_that_cannot_be_have_no_part_in_the_entropy():
    weight = torch.tensor([[0.0], [0.0], [-1e5]])
    logprobs, entropy = token_scores(torch.ones(1, 1), weight, None, torch.tensor([0]))
    assert float(logprobs) == pytest.approx(-0.6931472)
    assert float(entropy) == pytest.approx(0.6931472)


def test_no_token_gives_nothing_and_a_gradient_of_zero():
    hidden = torch.zeros(0, 3, requires_grad=True)
    weight = torch.randn(5, 3, requires_grad=True)
    logprobs, _ = token_scores(hidden, weight, None, torch.zeros(0, dtype=torch.long))
    logprobs.sum().backward()
    assert (weight.grad == 0).all()


def test_autocast_multiplies_in_bf16_and_sums_in_float32(problem):
    hidden, weight, bias, targets = problem
    exact = plain(hidden, weight, bias, targets, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, entropy = token_scores(hidden, weight, bias, targets, 1.0, 9)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert not torch.equal(logprobs, exact[0])
    torch.testing.assert_close(logprobs, exact[0], atol=0.1, rtol=0.02)
    ours = torch.autograd.grad(logprobs.sum(), [hidden, weight])
    theirs = torch.autograd.grad(exact[0].sum(), [hidden, weight])
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()


class Largest(TorchDispatchMode):
    """Most bytes of activations alive at one time that have the vocabulary as an axis."""

    def __init__(self, weight):
        super().__init__()
        self.vocabulary, self.weight = len(weight), weight
        self.rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (self.vocabulary,):
            self.rows = max(self.rows, result.numel() // self.vocabulary)
        return result


def test_no_logits_of_more_than_a_chunk_in_either_pass(problem):
    hidden, weight, bias, targets = problem
    with Largest(weight) as seen:
        logprobs, entropy = token_scores(hidden, weight, bias, targets, 1.0, 4, True)
        torch.autograd.grad((logprobs + entropy).sum(), [hidden, weight])
    assert seen.rows == max(4, hidden.shape[1])  # the weight's transposed gradient has 8
