"""Process reward models against direct reading of one rollout; process supervision by hand."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

from ssgrpo_lightning import tiny_prm
from ssgrpo_lightning.credit import ProcessAdvantage, outcome_scores
from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.estimator_module import EstimatorModule
from ssgrpo_lightning.estimators import CausalSteps
from ssgrpo_lightning.functional import lay_out_steps, process_advantages
from ssgrpo_lightning.metrics import agreement
from ssgrpo_lightning.objectives import NoisyAnd, PublishedMSE
from ssgrpo_lightning.policy import Codec, Policy
from ssgrpo_lightning.process_rewards import SeparatorPRM, TokenClassifierPRM
from ssgrpo_lightning.rollouts import Judge, Resampler
from ssgrpo_lightning.segmenters import ByLine
from ssgrpo_lightning.tiny_policy.build import EOS, PAD, build_tokenizer
from ssgrpo_lightning.verifiers import FinalNumber

NAN = float("nan")
SEPARATOR = {"separator": "<step>", "good": "+", "bad": "-"}


def save(folder, kind, ids, seed=0):
    """A random Llama with the given vocabulary, and its tokenizer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(ids),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
        num_labels=3,
        bos_token_id=None,
        eos_token_id=ids[EOS],
        pad_token_id=ids[PAD],
    )
    model = kind(config).eval()
    model.save_pretrained(folder)
    build_tokenizer(ids).save_pretrained(folder)
    return model


@pytest.fixture
def ids(policy):
    """The policy's vocabulary and one token more."""
    vocabulary = policy.codec.tokenizer.get_vocab()
    return {**vocabulary, "<step>": len(vocabulary)}


def bound(prm, policy):
    judge = Judge(FinalNumber("#"), ByLine())
    prm.bind(policy, Resampler(policy, TransformersEngine(), judge, Sampling(24)))
    return prm


def one_by_one(rollouts, read):
    """Logits of `read(prefix ids, step ids so far)` for every prefix that ends with a step."""
    logits = torch.zeros(len(rollouts), rollouts.steps)
    for row in range(len(rollouts)):
        prompt = rollouts.tokens[row][rollouts.attended[row] & ~rollouts.sampled[row]].tolist()
        ids = rollouts.tokens[row][rollouts.sampled[row]].tolist()
        steps = rollouts.step[row][rollouts.sampled[row]].tolist()
        for step in range(max(steps) + 1):
            parts = [[i for i, s in zip(ids, steps) if s == t] for t in range(step + 1)]
            logits[row, step] = read(prompt, parts)
    return logits


@torch.no_grad()
def test_token_classifier_reads_the_last_token_of_every_step(tmp_path, policy, rollouts, ids):
    model = save(tmp_path, LlamaForTokenClassification, ids)
    prm = bound(TokenClassifierPRM(str(tmp_path), label=2, micro_batch=5), policy)

    def read(prompt, parts):
        tokens = [*prompt, *(i for part in parts for i in part)]
        p = model(torch.tensor([tokens])).logits[0, -1].softmax(-1)[2]
        return torch.logit(p)

    expected = one_by_one(rollouts, read)
    mask = outcome_scores(rollouts).mask
    torch.testing.assert_close(prm(rollouts)[mask], expected[mask], atol=1e-4, rtol=1e-4)
    assert prm.calls == int(mask.sum())


@torch.no_grad()
def test_separator_prm_asks_after_every_step(tmp_path, policy, rollouts, ids):
    model = save(tmp_path, LlamaForCausalLM, ids)
    prm = bound(SeparatorPRM(str(tmp_path), **SEPARATOR, micro_batch=5), policy)

    def read(prompt, parts):
        tokens = [*prompt, *(i for part in parts for i in [*part, ids["<step>"]])]
        good, bad = model(torch.tensor([tokens])).logits[0, -1, [ids["+"], ids["-"]]].tolist()
        return good - bad

    expected = one_by_one(rollouts, read)
    mask = outcome_scores(rollouts).mask
    torch.testing.assert_close(prm(rollouts)[mask], expected[mask], atol=1e-4, rtol=1e-4)
    prm(rollouts)
    assert prm.calls == 2 * int(mask.sum())


@pytest.mark.parametrize("form", [TokenClassifierPRM, SeparatorPRM])
def test_another_vocabulary_is_tokenised_anew(tmp_path, policy, rollouts, ids, form):
    kind = LlamaForCausalLM if form is SeparatorPRM else LlamaForTokenClassification
    arguments = SEPARATOR if form is SeparatorPRM else {"label": 2}
    model = save(tmp_path / "same", kind, ids)
    # The same model under other numbers for its tokens: texts alone can tell it what it reads.
    order = [PAD, EOS, "<step>", *sorted(set(ids) - {PAD, EOS, "<step>"}, reverse=True)]
    other = {token: i for i, token in enumerate(order)}
    permuted = save(tmp_path / "other", kind, other)
    state = model.state_dict()
    for name in state:
        if "embed_tokens" in name or "lm_head" in name:
            state[name] = state[name][[ids[token] for token in order]]
    permuted.load_state_dict(state)
    permuted.save_pretrained(tmp_path / "other")
    mask = outcome_scores(rollouts).mask
    # The end-of-sequence token has no text, so a foreign reader never sees it.
    mask &= ~ends_with(rollouts, ids[EOS])
    same, foreign = (
        bound(form(str(tmp_path / name), **arguments), policy)(rollouts)
        for name in ("same", "other")
    )
    assert mask.any()
    torch.testing.assert_close(foreign[mask], same[mask], atol=1e-4, rtol=1e-4)


def ends_with(rollouts, token):
    """True for steps that hold the token."""
    found = torch.zeros(len(rollouts), rollouts.steps, dtype=torch.bool)
    row, column = ((rollouts.tokens == token) & rollouts.sampled).nonzero(as_tuple=True)
    found[row, rollouts.step[row, column]] = True
    return found


def test_a_step_without_text_is_read_where_the_one_before_ends():
    tokens, step = torch.tensor([[7, 8, 9]]), torch.tensor([[-1, 0, 2]])
    mask = torch.ones(1, 3).bool()
    laid, lengths, ends = lay_out_steps(tokens, tokens > 0, step, mask)
    assert (laid.tolist(), lengths.tolist(), ends.tolist()) == ([[7, 8, 9]], [3], [[1, 1, 2]])
    laid, lengths, ends = lay_out_steps(tokens, tokens > 0, step, mask, separator=5)
    assert laid.tolist() == [[7, 8, 5, 5, 9, 5]] and ends.tolist() == [[2, 3, 5]]


def test_frozen_weights_are_neither_trained_nor_saved(tmp_path, policy, rollouts, ids):
    save(tmp_path, LlamaForCausalLM, ids)
    prm = bound(SeparatorPRM(str(tmp_path), **SEPARATOR), policy)
    for objective in (PublishedMSE(), NoisyAnd()):
        module = EstimatorModule(torch.optim.AdamW, prm, objective)
        scores = module.score(rollouts, outcome_scores(rollouts))
        assert scores.values.isfinite().all() and not scores.values.requires_grad
        assert scores.calls == int(scores.mask.sum())
        assert not module.learns and set(module.state_dict()) == {"_extra_state"}
    frozen = CausalSteps(hidden=32).requires_grad_(False)
    assert not EstimatorModule(torch.optim.AdamW, frozen).learns


def test_bad_arguments_say_what_to_do(tmp_path, ids):
    save(tmp_path / "causal", LlamaForCausalLM, ids)
    save(tmp_path / "labels", LlamaForTokenClassification, ids)
    causal, labels = str(tmp_path / "causal"), str(tmp_path / "labels")
    with pytest.raises(ValueError, match="nowhere.*tiny_prm"):
        TokenClassifierPRM("./nowhere")
    with pytest.raises(ValueError, match=r"label is 3, but .* 3 classes apart.*\[0, 2\]"):
        _ = TokenClassifierPRM(labels, label=3).model
    with pytest.raises(ValueError, match="lack .*score.*no token classifier"):
        _ = TokenClassifierPRM(causal).model
    with pytest.raises(ValueError, match="separator is '<s>', which is no token"):
        SeparatorPRM(causal, "<s>", "+", "-")
    with pytest.raises(ValueError, match="micro_batch is 0"):
        TokenClassifierPRM(labels, micro_batch=0)
    with pytest.raises(ValueError, match=r"outcome is -1.0"):
        ProcessAdvantage(outcome=-1.0)


def test_process_supervision_by_hand(make_rollouts):
    # Five steps, rewards 1 1 0 | 1 0: mean .6, deviation sqrt(1.2 / 4).
    rollouts = make_rollouts([1.0, 0.0, None], [[2, 1, 1], [3, 1], [1, 1]], group=[0, 0, 0])
    rewards = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 9.0], [0.3, 0.1, 9.0]])
    scores = replace(outcome_scores(rollouts), scores=rewards)
    high, low = 0.4 / (0.3**0.5 + 1e-4), -0.6 / (0.3**0.5 + 1e-4)
    expected = torch.tensor([[2 * high + low, high + low, low], [high + low, low, 0], [0, 0, 0]])
    torch.testing.assert_close(ProcessAdvantage()(scores), expected)
    both = ProcessAdvantage(outcome=2.0)(scores)
    plain = scores.advantages[:, None]
    torch.testing.assert_close(both[scores.mask], (expected + 2 * plain)[scores.mask])
    assert (both[2] == 0).all()


def test_process_supervision_of_steps_that_are_all_alike_is_nothing():
    rewards, mask = torch.full((2, 3), 0.7), torch.tensor([[True] * 3, [True, False, False]])
    assert (process_advantages(rewards, mask, torch.tensor([0, 0])) == 0).all()
    one = process_advantages(torch.tensor([[0.7]]), torch.ones(1, 1).bool(), torch.tensor([0]))
    assert one.tolist() == [[0.0]]


def test_process_supervision_depends_on_how_a_text_is_cut():
    """Known, and as published: a good rollout gains by cutting itself into more steps."""

    def first_token(cuts):
        rewards = torch.tensor([[1.0] * 4, [0.0] * 4])
        mask = torch.tensor([[t < cuts for t in range(4)], [True, True, False, False]])
        return process_advantages(rewards, mask, torch.tensor([0, 0]))[:, 0].tolist()

    (good, bad), (good_cut, bad_cut) = first_token(2), first_token(4)
    assert good_cut > good > 0 > bad > bad_cut
    # The group's normalised rewards still sum to 0: steps as such earn nothing.
    mask = torch.ones(2, 4).bool()
    advantages = process_advantages(torch.rand(2, 4), mask, torch.tensor([0, 0]))
    assert advantages[:, 0].sum().abs() < 1e-5


def test_agreement_by_hand():
    ours = torch.tensor([[0.9, 0.2, 0.7], [0.8, 0.6, 0.1]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    found = agreement(ours, ours**3, mask)
    # .8^3 is sound, .7^3 and .6^3 are not: the first errors are 1 and 1, against 1 and none.
    assert float(found["first_error_agreement"]) == 0.5
    assert float(found["rank_correlation"]) == pytest.approx(1.0)
    reversed_order = agreement(ours, 1 - ours, mask)
    assert float(reversed_order["rank_correlation"]) == pytest.approx(-1.0)


def test_a_policy_is_no_part_of_the_module_that_reads_it(tmp_path, policy, ids):
    save(tmp_path, LlamaForCausalLM, ids)
    prm = bound(SeparatorPRM(str(tmp_path), **SEPARATOR), policy)
    assert not list(prm.modules())[1:] and isinstance(prm.model, Policy)
    assert isinstance(prm.codec, Codec)


def test_tiny_prm_command_writes_a_folder_that_can_be_read(
    tmp_path, policy, rollouts, monkeypatch, capsys
):
    for form, prm in (("classifier", TokenClassifierPRM), ("separator", SeparatorPRM)):
        out = tmp_path / form
        arguments = ["--form", form, "--out", str(out), "--groups", "4", "--epochs", "1"]
        monkeypatch.setattr("sys.argv", ["tiny_prm", *arguments])
        tiny_prm.main()
        assert "step AUC" in capsys.readouterr().out and (out / "model.safetensors").is_file()
        reader = bound(prm(str(out), **(SEPARATOR if prm is SeparatorPRM else {})), policy)
        assert not reader._foreign and reader(rollouts).isfinite().all()
