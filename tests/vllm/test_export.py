"""A real vLLM server on an exported checkpoint."""

import json
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssgrpo_lightning.cli import main
from ssgrpo_lightning.policy import Pretrained
from tests.conftest import QUICKSTART, run_folder, small
from tests.vllm.conftest import serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
LIMIT = 48


def ask(url, **body):
    body |= {"max_tokens": LIMIT, "temperature": 0, "return_token_ids": True}
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urlopen(request, timeout=120))["choices"][0]


def test_vllm_serves_an_export_with_the_greedy_tokens_of_transformers(tmp_path, task):
    pytest.importorskip("vllm")
    policy = Pretrained().load()
    policy.codec.tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}="
    )
    policy.save(tmp_path / "base")
    config = [f"--config={QUICKSTART}", *small(tmp_path / "run")]
    config.append(f"--model.policy.model.name={tmp_path / 'base'}")
    main(["fit", *config])
    checkpoint, out = run_folder(tmp_path / "run") / "checkpoints/last.ckpt", tmp_path / "mine"
    main(["export", *config, f"--ckpt_path={checkpoint}", f"--out={out}"])

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    prompts = [p.prompt for p in task.problems("train")[:8]]
    ended = 0
    with serving(out, tmp_path / "log") as (url, _):
        for prompt in prompts:
            ids = tokenizer(prompt)["input_ids"]
            said = model.generate(torch.tensor([ids]), max_new_tokens=LIMIT, do_sample=False)
            said = said[0, len(ids) :].tolist()
            served = ask(f"{url}/v1/completions", model=str(out), prompt=ids)
            assert served["token_ids"] == said
            ended += served["finish_reason"] == "stop"
            # The template puts the = of the prompt behind the question.
            chat = [{"role": "user", "content": prompt.removesuffix("=")}]
            served = ask(f"{url}/v1/chat/completions", model=str(out), messages=chat)
            assert served["token_ids"] == said
            assert served["message"]["content"] == tokenizer.decode(said, skip_special_tokens=True)
    assert ended
