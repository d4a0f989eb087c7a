"""The rollout engine against `generate()`, against the training forward, and against odd tokens."""

from dataclasses import replace

import pytest
import torch

from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.engines.decode import warpers
from ssgrpo_lightning.engines.engine import uniform_noise
from ssgrpo_lightning.policy import Codec, Policy
from ssgrpo_lightning.rollouts import Judge, collect
from ssgrpo_lightning.segmenters import ByLine
from ssgrpo_lightning.verifiers import FinalNumber


@pytest.fixture
def prompts(policy, task):
    # Of different lengths, so that there is padding.
    return [policy.codec.encode(p) for p in task.problems("train")[:6]]


def generate(policy, prompts, repeats=1, sampling=Sampling(48), seed=0, **engine):
    keys = [(0, seed, p, k) for p in range(len(prompts)) for k in range(repeats)]
    noise = uniform_noise(keys, sampling.max_new_tokens)
    return TransformersEngine(**engine).generate(policy, prompts, repeats, sampling, noise)


def test_greedy_tokens_are_those_of_generate(policy, prompts):
    ours = generate(policy, prompts, sampling=Sampling(48, temperature=0.0))
    for row, prompt in enumerate(prompts):
        theirs = policy.model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=48, pad_token_id=0
        )[0, len(prompt) :]
        assert ours.tokens[row, : ours.lengths[row]].tolist() == theirs.tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probabilities_agree_with_the_training_forward(policy, task, temperature):
    sampling = Sampling(48, temperature=temperature)
    judge = Judge(FinalNumber("#"), ByLine())
    rollouts = collect(
        policy, TransformersEngine(), judge, task.problems("train")[:4], 4, sampling, 0, 0
    )
    logprobs, entropy = policy(rollouts.tokens, rollouts.attended, rollouts.sampled, temperature)
    torch.testing.assert_close(logprobs, rollouts.logprobs, atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy, rollouts.entropy, atol=1e-4, rtol=0)


def test_rollouts_depend_on_their_noise_alone(policy, prompts):
    whole = generate(policy, prompts, repeats=3)
    parts = generate(policy, prompts, repeats=3, rows_at_once=6)
    alone = [generate(policy, prompts[:1], repeats=n).tokens[0].tolist() for n in (1, 3)]
    assert whole.tokens.tolist() == parts.tokens.tolist()
    assert all(tokens == whole.tokens[0, : len(tokens)].tolist() for tokens in alone)
    assert whole.truncated.tolist() == parts.truncated.tolist()
    other = generate(policy, prompts, repeats=3, seed=1)
    assert whole.tokens.tolist() != other.tokens.tolist()


def test_replicas_differ_and_the_same_problem_twice_makes_two_groups(policy, task):
    problem = task.problems("train")[0]
    judge = Judge(FinalNumber("#"), ByLine())
    rollouts = collect(
        policy, TransformersEngine(), judge, [problem, problem], 8, Sampling(48, 1.5), 0, 0
    )
    assert rollouts.group.tolist() == [0] * 8 + [1] * 8
    assert len(set(rollouts.texts)) > 8


def test_frequencies_follow_the_distribution(policy, prompts):
    # One token, many draws: the empirical law is the softmax, to sampling error.
    draws = 20_000
    samples = generate(
        policy, prompts[:1], repeats=draws, sampling=Sampling(1, 2.0), rows_at_once=draws
    )
    logits = policy.model(torch.tensor([prompts[0]])).logits[0, -1] / 2.0
    expected = logits.softmax(-1)
    found = samples.tokens[:, 0].bincount(minlength=len(expected)) / draws
    assert (found - expected).abs().max() < 4 * (0.25 / draws) ** 0.5


def test_top_k_and_top_p_are_those_of_transformers(policy, prompts):
    samples = generate(policy, prompts, repeats=32, sampling=Sampling(4, 1.0, top_k=2))
    assert len(samples.tokens[:32, 0].unique()) <= 2
    logits = torch.tensor([[3.0, 2.0, 1.0, -5.0]])
    names = [type(w).__name__ for w in warpers(Sampling(1, 0.5, top_k=3, top_p=0.9))]
    assert names == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]
    kept = warpers(Sampling(1, 1.0, top_p=0.9))(torch.zeros(1, 1).long(), logits).isfinite()
    assert kept.tolist() == [[True, True, False, False]]


def with_eos(policy, ids):
    """The same weights with other end tokens."""
    other = Policy(policy.model, Codec(policy.codec.tokenizer))
    other.eos_ids = frozenset(ids)
    return other


def test_any_of_several_end_tokens_ends_a_completion(policy, prompts):
    newline = policy.codec.tokenizer.convert_tokens_to_ids("\n")
    both = generate(with_eos(policy, {1, newline}), prompts, repeats=4)
    ends = both.tokens.gather(1, both.lengths[:, None] - 1)[:, 0]
    assert newline in ends.tolist() and not both.truncated.any()


def test_without_an_end_token_the_budget_ends_it(policy, prompts):
    samples = generate(with_eos(policy, set()), prompts, sampling=Sampling(5))
    assert samples.truncated.all() and (samples.lengths == 5).all()


def test_padding_may_be_the_end_token_and_id_zero_a_real_one(policy, prompts, task):
    plain = generate(policy, prompts, repeats=2)
    odd = with_eos(policy, policy.eos_ids)
    odd.codec.pad_id = next(iter(policy.eos_ids))
    assert generate(odd, prompts, repeats=2).lengths.tolist() == plain.lengths.tolist()
    judge = Judge(FinalNumber("#"), ByLine())
    rollouts = collect(
        odd, TransformersEngine(), judge, task.problems("train")[:4], 2, Sampling(48), 0, 0
    )
    # The end token itself is sampled, counts as a token of the last step, and may learn.
    end = rollouts.sampled.float().cumsum(1).argmax(1)
    assert (rollouts.tokens.gather(1, end[:, None]) == odd.codec.pad_id).all()
    assert rollouts.sampled.sum() == rollouts.completion_lengths.sum()
    logprobs, _ = odd(rollouts.tokens, rollouts.attended, rollouts.sampled)
    torch.testing.assert_close(logprobs, rollouts.logprobs, atol=1e-4, rtol=0)


def test_steps_decode_to_the_text(rollouts, policy):
    from ssgrpo_lightning.rollouts import step_texts

    for row in range(len(rollouts)):
        assert "".join(step_texts(rollouts, policy, row)) == rollouts.texts[row]
        assert ((rollouts.step[row] >= 0) == rollouts.sampled[row]).all()


def test_chunks_of_the_head_change_neither_values_nor_gradients(policy, rollouts):
    results = []
    for chunk in (7, 1 << 20):
        part = Policy(policy.model, policy.codec, head_chunk=chunk)
        policy.model.zero_grad()
        logprobs, entropy = part(rollouts.tokens, rollouts.attended, rollouts.sampled)
        logprobs.sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
        results.append((logprobs.detach(), entropy, gradient))
    policy.model.zero_grad()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_no_logits_of_more_than_a_chunk_exist(policy, rollouts):
    head, largest = policy.model.get_output_embeddings().weight, 0

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            tensor = isinstance(result, torch.Tensor) and result.data_ptr() != head.data_ptr()
            if tensor and result.shape[-1:] == (len(head),):
                largest = max(largest, result.numel() // len(head))
            return result

    with Spy():
        Policy(policy.model, policy.codec, head_chunk=16)(
            rollouts.tokens, rollouts.attended, rollouts.sampled
        )
    assert 0 < largest <= 16 < int(rollouts.sampled.sum())


def test_a_model_that_caps_its_logits_is_refused(policy):
    import copy

    model = copy.deepcopy(policy.model)
    plain = model.forward
    model.forward = lambda *a, **k: replace_logits(plain(*a, **k))
    with pytest.raises(ValueError, match="changes its logits after the LM head"):
        Policy(model, policy.codec)


def replace_logits(output):
    output.logits = output.logits.tanh()
    return output


def test_sampling_refuses_nonsense():
    for fields in ({"max_new_tokens": 0}, {"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}):
        with pytest.raises(ValueError, match=rf"Sampling\.{next(iter(fields))} is"):
            replace(Sampling(), **fields)


def test_completions_are_judged_while_others_are_still_sampled(policy, task, monkeypatch):
    from ssgrpo_lightning.engines import decode

    events = []
    run, begin = decode._Decode.run, Judge.begin
    monkeypatch.setattr(decode._Decode, "run", lambda d: events.append("sample") or run(d))
    monkeypatch.setattr(Judge, "begin", lambda *a: events.append(len(a[1])) or begin(*a))
    judge, problems = Judge(FinalNumber("#"), ByLine()), task.problems("train")[:6]
    whole, parts = (
        collect(policy, TransformersEngine(size), judge, problems, 4, Sampling(48), 0, 0)
        for size in (512, 8)
    )
    assert events == ["sample", 24] + ["sample", 8] * 3
    assert whole.texts == parts.texts and whole.tokens.equal(parts.tokens)
    torch.testing.assert_close(whole.logprobs, parts.logprobs, atol=1e-4, rtol=0)
    assert torch.is_inference_mode_enabled() is False and policy.training


@pytest.mark.parametrize("stop", ["\n", "#", "=1", "5-", "\n\n never"])
def test_a_stop_string_ends_a_completion_where_its_text_first_holds_it(policy, prompts, stop):
    free = generate(policy, prompts, repeats=3)
    cut = generate(policy, prompts, repeats=3, sampling=Sampling(48, stop=(stop,)))
    for row in range(len(free.lengths)):
        ids = free.tokens[row, : free.lengths[row]].tolist()
        texts = [policy.codec.decode(ids[: n + 1]) for n in range(len(ids))]
        expected = next((n + 1 for n, text in enumerate(texts) if stop in text), len(ids))
        length = int(cut.lengths[row])
        assert length == expected and cut.tokens[row, :length].tolist() == ids[:expected]
        ended = expected < len(ids) or stop in texts[-1]
        assert bool(cut.truncated[row]) is (bool(free.truncated[row]) and not ended)
    torch.testing.assert_close(
        cut.logprobs[:, 0], free.logprobs[:, 0]
    )  # and the tokens before it are those drawn without


def test_a_stop_string_within_a_token_is_found_and_costs_little(policy):
    from ssgrpo_lightning.engines.stopping import StopStrings

    class Words(Codec):
        def __init__(self):
            self.words, self.decoded = ["a b", "\n", "x\n\ny", "Ans", "wer: ", "\ufffd"], 0

        def pieces(self, ids):
            return [self.words[i].strip(" ") for i in ids]

        def decode(self, ids):
            self.decoded += 1
            return "".join(self.words[i] for i in ids)

    words = Words()
    lines = StopStrings(words, ["\n\n"])
    assert lines.said(torch.tensor([[0, 2], [1, 1], [1, 0], [0, 3]])).tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert words.decoded == 2  # only where a line ended
    # A lone token may have lost the space that the string ends with.
    assert StopStrings(words, ["Answer: "]).said(torch.tensor([[3, 4], [3, 0]])).tolist() == [
        True,
        False,
    ]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="Sampling.stop .* at least one character"):
        Sampling(stop=("",))
