"""The server engine against a real vLLM server on this machine."""

import pytest
import torch

from ssgrpo_lightning.engines import Sampling, TransformersEngine, VllmServer
from ssgrpo_lightning.engines.engine import uniform_noise
from ssgrpo_lightning.engines.exchange import export
from ssgrpo_lightning.policy import Pretrained
from tests.vllm.conftest import serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def server(engine, policy, tmp_path):
    """URL of a server, and its process; it starts with the shipped weights."""
    # Untied, as a CPU keeps a packed copy of the LM head that a reload of tied weights leaves.
    folder = export(policy, tmp_path / "served", untied=True)
    policy.codec.tokenizer.save_pretrained(folder)
    options = "--logprobs-mode processed_logprobs --generation-config vllm"
    with serving(folder, tmp_path / "log", options, VLLM_SERVER_DEV_MODE="1") as running:
        yield running


def test_a_real_server_follows_the_policy_and_its_death_is_told(server, task, tmp_path):
    url, process = server
    pupil = Pretrained().load()
    prompts = [pupil.codec.encode(p) for p in task.problems("train")[:6]]
    engine = VllmServer(str(tmp_path / "pushed"), url, retries=1)

    def sample(engine, temperature=0.0, repeats=1):
        noise = uniform_noise([(0, 0, p, k) for p in range(6) for k in range(repeats)], 48)
        return engine.generate(pupil, prompts, repeats, Sampling(48, temperature), noise)

    said = []
    for _ in range(2):
        ours, theirs = sample(engine), sample(TransformersEngine())
        for field in ("tokens", "lengths", "truncated"):
            assert getattr(ours, field).tolist() == getattr(theirs, field).tolist()
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=1e-4, rtol=0)
        said.append(ours.logprobs.sum().item())
        # At another temperature: that the policy agrees is checked within.
        warm, again = (sample(engine, 0.7, 4) for _ in range(2))
        assert warm.tokens.tolist() == again.tokens.tolist()
        optimizer = torch.optim.AdamW(pupil.parameters(), lr=3e-3)
        tokens = torch.tensor([prompts[0]])
        pupil.model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    assert abs(said[0] - said[1]) > 0.1
    process.terminate()
    process.wait(60)
    with pytest.raises(RuntimeError, match=r"did not answer .* in 2 tries .*--ckpt_path"):
        sample(engine)
