"""The side of the trainer of a vLLM server, against a stand-in that speaks its interface.

The stand-in reads the weights that were pushed and samples with the transformers engine, so that
what travels is real. `tests/vllm` starts a real server.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from ssgrpo_lightning.engines import Sampling, TransformersEngine, VllmServer, vllm_server
from ssgrpo_lightning.engines.engine import uniform_noise
from ssgrpo_lightning.policy import Policy, Pretrained


class StandIn(ThreadingHTTPServer):
    """A server that starts with weights of its own and takes those of a folder."""

    def __init__(self, codec):
        super().__init__(("127.0.0.1", 0), Handler)
        self.codec, self.lock, self.failures, self.asked = codec, threading.Lock(), [], []
        self.restart()

    def restart(self):
        self.starts = getattr(self, "starts", 0) + 1
        torch.manual_seed(0)
        model = Pretrained().weights()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        self.policy = Policy(model, self.codec)

    def answer(self, path, body):
        if path.startswith("/server_info"):
            return {"vllm_config": {"instance_id": str(self.starts)}}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.policy = Policy(Pretrained(body["kwargs"]["weights_path"]).weights(), self.codec)
            return {"results": [None]}
        if path == "/reset_prefix_cache":
            return {"success": True}
        assert path == "/v1/completions" and body["return_token_ids"] and body["ignore_eos"]
        assert body["stop_token_ids"] == sorted(self.policy.eos_ids)
        sampling = Sampling(body["max_tokens"], body["temperature"])
        noise = uniform_noise([(body["seed"] % 2**32, 0, 0, 0)], sampling.max_new_tokens)
        samples = TransformersEngine().generate(self.policy, [body["prompt"]], 1, sampling, noise)
        length = int(samples.lengths)
        logprobs = {"token_logprobs": samples.logprobs[0, :length].tolist()}
        return {"choices": [{"token_ids": samples.tokens[0].tolist(), "logprobs": logprobs}]}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        with self.server.lock:
            self.server.asked.append(self.path)
            failure = self.server.failures.pop(0) if self.server.failures else None
            if failure == "restart":
                self.server.restart()
            if isinstance(failure, int):
                return self.send_error(failure, "this is why")
            data = json.dumps(self.server.answer(self.path, body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture
def server(policy):
    with StandIn(policy.codec) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    waits = []
    monkeypatch.setattr(vllm_server.time, "sleep", waits.append)
    return waits


@pytest.fixture
def pupil():
    return Pretrained().load()


@pytest.fixture
def sample(server, pupil, task, tmp_path):
    prompts = [pupil.codec.encode(p) for p in task.problems("train")[:3]]
    host, port = server.server_address
    engine = VllmServer(str(tmp_path), f"http://{host}:{port}", concurrency=2, retries=3)

    def sample(temperature=0.0, engine=engine):
        noise = uniform_noise([(0, 0, p, k) for p in range(3) for k in range(2)], 32)
        return engine.generate(pupil, prompts, 2, Sampling(32, temperature), noise)

    return sample


def test_samples_are_those_of_the_policy_before_and_after_it_changed(sample, server, pupil):
    said = []
    for _ in range(2):
        ours, theirs = sample(), sample(engine=TransformersEngine())
        for field in ("tokens", "lengths", "truncated"):
            assert getattr(ours, field).tolist() == getattr(theirs, field).tolist()
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=1e-4, rtol=0)
        said.append(ours.logprobs.sum().item())
        sample(1.0)
        with torch.no_grad():
            pupil.model.get_output_embeddings().weight.mul_(0.7)
    assert said[0] != said[1]
    assert server.asked.count("/collective_rpc") == 2  # and not for every call


def test_every_rollout_has_a_seed_of_its_own(sample):
    first, again = sample(1.0), sample(1.0)
    assert first.tokens.tolist() == again.tokens.tolist()
    assert len({tuple(row) for row in first.tokens.tolist()}) > 3


def test_a_failed_request_is_tried_again(sample, server, waits):
    calm = sample()
    server.failures = [503, 500, None, 502]
    assert sample().tokens.tolist() == calm.tokens.tolist()
    assert waits == [1, 2, 1]


def test_a_restarted_server_gets_the_weights_again(sample, server):
    calm = sample()
    server.restart()  # between two calls
    assert sample().tokens.tolist() == calm.tokens.tolist()
    server.failures = [None, None, "restart"]  # in the middle of one
    assert sample().tokens.tolist() == calm.tokens.tolist()
    assert server.asked.count("/collective_rpc") == 3


def test_a_server_that_never_survives_a_call_ends_the_run(sample, server):
    server.failures = [None, None, "restart", *[None] * 5] * 9
    with pytest.raises(RuntimeError, match="restarted during each of 4 calls"):
        sample()


def test_a_refused_request_ends_the_run_with_its_reason(sample, server, waits):
    server.failures = [404]
    with pytest.raises(
        RuntimeError, match=r"(?s)refused /server_info.*404.*VLLM_SERVER_DEV_MODE=1"
    ):
        sample()
    assert waits == []


def test_a_dead_server_ends_the_run_and_says_how_to_go_on(sample, server, waits):
    sample()
    server.shutdown()
    server.server_close()
    with pytest.raises(RuntimeError, match=r"in 4 tries .*Connection refused.*--ckpt_path"):
        sample()
    assert waits == [1, 2, 4]


@pytest.mark.parametrize(
    "field, value",
    [("url", "localhost:1"), ("concurrency", 0), ("timeout", 0.0), ("retries", -1)],
)
def test_nonsense_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"VllmServer\.{field} is {value}"):
        VllmServer(**{"folder": "x", field: value})
