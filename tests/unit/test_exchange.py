"""What engines with weights of their own are given, and what becomes of what they report."""

import gc
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from ssgrpo_lightning.engines import Sampling, TransformersEngine, VllmEngine, VllmServer, vllm
from ssgrpo_lightning.engines.engine import uniform_noise
from ssgrpo_lightning.engines.exchange import (
    Completion,
    export,
    fingerprint,
    seeds,
    to_samples,
    weights,
)
from ssgrpo_lightning.policy import Pretrained


@pytest.fixture
def prompts(policy, task):
    return [policy.codec.encode(p) for p in task.problems("train")[:6]]


@pytest.fixture
def pupil():
    return Pretrained().load()


def completions(samples):
    return [
        Completion(ids[:n], logprobs[:n])
        for ids, logprobs, n in zip(
            samples.tokens.tolist(),
            samples.logprobs.tolist(),
            samples.lengths.tolist(),
            strict=True,
        )
    ]


def test_weights_go_by_the_names_of_the_checkpoint_and_tied_ones_by_both(policy, tmp_path):
    given = dict(weights(policy))
    stored = Pretrained().source()["pretrained_model_name_or_path"]
    checkpoint = load_file(f"{stored}/model.safetensors")
    assert given.keys() - checkpoint.keys() <= {"lm_head.weight"}
    assert all(given[name].equal(x) for name, x in checkpoint.items())
    assert given["lm_head.weight"].equal(given["model.embed_tokens.weight"])
    assert not any(x.requires_grad for x in given.values())
    model = Pretrained(str(export(policy, tmp_path, untied=True))).weights()
    assert not model.config.tie_word_embeddings and policy.model.config.tie_word_embeddings
    tokens = torch.tensor([[3, 12, 4]])
    torch.testing.assert_close(model(tokens).logits, policy.model(tokens).logits)


def test_only_asked_for_on_ranks_that_do_not_write(policy, tmp_path):
    export(policy, tmp_path / "none", writes=False)
    assert not (tmp_path / "none").exists()
    export(policy, tmp_path / "bare", with_weights=False)
    assert [p.name for p in (tmp_path / "bare").iterdir()] == ["config.json"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_adapters_come_merged_and_stay_as_they_are(pupil, wrapped):
    peft = pytest.importorskip("peft", reason="needs the extra lora")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    plain = dict(weights(pupil))
    tokens = torch.tensor([[3, 12, 4, 12]])
    if wrapped:
        model = peft.get_peft_model(pupil.model, config)
    else:
        model = peft.inject_adapter_in_model(config, pupil.model)
    pupil.model = model.eval()
    expected = model(tokens).logits
    merged = {name: x.clone() for name, x in weights(pupil)}
    assert merged.keys() == plain.keys()
    assert {n.split(".")[-2] for n in merged if not merged[n].equal(plain[n])} == {
        "q_proj",
        "down_proj",
    }
    other = Pretrained().weights().eval()
    other.load_state_dict(merged)
    torch.testing.assert_close(other(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(tokens).logits, expected)


def test_shards_are_gathered_when_their_turn_comes(pupil, tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    plain = {name: x.clone() for name, x in weights(pupil)}
    before = fingerprint(pupil)
    dist.init_process_group("gloo", f"file://{tmp_path}/group", world_size=1, rank=0)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        fully_shard(pupil.model, mesh=mesh)
        given = dict(weights(pupil))
        assert fingerprint(pupil) == before
    finally:
        dist.destroy_process_group()
    assert all(type(x) is torch.Tensor and x.equal(plain[name]) for name, x in given.items())


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_fingerprint_follows_every_change(pupil, options):
    seen = [fingerprint(pupil), fingerprint(pupil)]
    assert seen[0] == seen[1]
    start = {name: x.clone() for name, x in pupil.model.state_dict().items()}
    optimizer = torch.optim.AdamW(pupil.parameters(), lr=1e-6, **options)
    tokens = torch.tensor([[3, 12, 4, 12]])
    pupil.model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    seen.append(fingerprint(pupil))
    next(pupil.parameters()).data[0, 0].nextafter_(torch.tensor(9.0))  # one bit of one number
    seen.append(fingerprint(pupil))
    assert len(set(seen)) == 3
    pupil.model.load_state_dict(start)
    assert fingerprint(pupil) == seen[0]


def test_seeds_depend_on_the_key_alone():
    keys = [(0, 3, 7, k) for k in range(4)]
    short, long = (seeds(uniform_noise(keys, count)) for count in (1, 64))
    assert short == long and len(set(short)) == 4
    assert all(0 <= seed < 2**53 for seed in short)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(48, 0.0), Sampling(48, 0.7), Sampling(48, 1.3, top_k=3), Sampling(9, 1.0, top_p=0.9)],
)
def test_samples_are_what_the_decode_loop_says(policy, prompts, sampling):
    noise = uniform_noise([(0, 0, p, k) for p in range(6) for k in range(2)], 48)
    loop = TransformersEngine().generate(policy, prompts, 2, sampling, noise)
    owners = [prompt for prompt in prompts for _ in range(2)]
    ours = to_samples(policy, owners, completions(loop), sampling, rows_at_once=5)
    for field in ("lengths", "truncated"):
        assert getattr(ours, field).tolist() == getattr(loop, field).tolist()
    sampled = torch.arange(ours.tokens.shape[1]) < ours.lengths[:, None]
    assert ours.tokens[sampled].equal(loop.tokens[sampled])
    torch.testing.assert_close(ours.logprobs, loop.logprobs)
    torch.testing.assert_close(ours.entropy, loop.entropy, atol=1e-4, rtol=0)


def test_completions_of_other_weights_are_refused(policy, prompts):
    noise = uniform_noise([(0, 0, p, 0) for p in range(6)], 48)
    loop = TransformersEngine().generate(policy, prompts, 1, Sampling(48), noise)
    foreign = [replace(c, logprobs=[x - 2.8 for x in c.logprobs]) for c in completions(loop)]
    with pytest.raises(RuntimeError, match="has not taken over the policy's weights"):
        to_samples(policy, prompts, foreign, Sampling(48), 64)


class Recorder:
    """Stands for a vLLM on a device that can sleep, and writes down what it is asked."""

    def __init__(self):
        self.calls = []
        self.llm_engine = self.vllm_config = self.model_config = self
        self.enable_sleep_mode = True

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append(name)

        return call


def test_weights_are_pushed_where_they_changed_and_memory_is_given_back(pupil, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(vllm, "_start", lambda *_: recorder)
    running = vllm._Running(VllmEngine(), pupil)
    for change in (0.0, 0.0, 1.0):
        next(pupil.parameters()).data.add_(change)
        with running.awake(pupil):
            recorder.calls.append("generate")
    push = ["collective_rpc", "reset_prefix_cache", "generate", "sleep"]
    assert recorder.calls == [*push, "wake_up", "generate", "sleep", "wake_up", *push]


def test_memory_is_given_back_where_a_push_or_a_call_fails_too(pupil, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(vllm, "_start", lambda *_: recorder)
    running = vllm._Running(VllmEngine(), pupil)

    def lost(*args, **kwargs):
        raise RuntimeError("device lost")

    recorder.collective_rpc = lost
    with pytest.raises(RuntimeError, match="device lost"), running.awake(pupil):
        pass
    assert recorder.calls == ["sleep"] and running.pushed is None
    del recorder.collective_rpc
    with pytest.raises(RuntimeError, match="device lost"), running.awake(pupil):
        lost()
    push = ["wake_up", "collective_rpc", "reset_prefix_cache"]
    assert recorder.calls == ["sleep", *push, "sleep"]


def test_without_vllm_the_error_names_the_extra(policy, prompts, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    noise = uniform_noise([(0, 0, p, 0) for p in range(6)], 8)
    with pytest.raises(ValueError, match=r"install the extra .* 'ssgrpo-lightning\[vllm\]'"):
        VllmEngine().generate(policy, prompts, 1, Sampling(8), noise)


@pytest.mark.parametrize(
    "field, value",
    [("tensor_parallel_size", 0), ("gpu_memory_utilization", 1.0), ("rows_at_once", 0)],
)
def test_nonsense_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"VllmEngine\.{field} is {value}"):
        VllmEngine(**{field: value})


def test_what_runs_goes_with_its_policy_and_when_another_is_sampled_from(monkeypatch):
    stopped = []
    monkeypatch.setattr(vllm, "_start", lambda *_: Recorder())
    monkeypatch.setattr(vllm._Running, "stop", lambda self: stopped.append(self))
    first, second = Pretrained().load(), Pretrained().load()
    running = VllmEngine()._running(first)
    assert VllmEngine()._running(first) is running and not stopped
    other = VllmEngine(rows_at_once=8)._running(first)
    assert stopped == [running]  # other hyperparameters are another engine
    VllmEngine()._running(second)
    assert stopped == [running, other] and list(vllm._RUNNING) == [second]
    VllmEngine().close(first)
    assert len(stopped) == 2
    del second
    gc.collect()
    assert not vllm._RUNNING


@pytest.mark.parametrize("engine", [VllmEngine(), VllmServer("folder")])
def test_stop_strings_are_refused_where_no_text_is_seen(engine):
    engine.check(Sampling())
    with pytest.raises(ValueError, match=f"but {type(engine).__name__} samples token ids"):
        engine.check(Sampling(stop=("\n",)))
    TransformersEngine().check(Sampling(stop=("\n",)))
