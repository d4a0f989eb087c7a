"""What a run has learnt, as a folder that others load."""

import copy
import json
import os
import pickle
import shutil
import stat
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssgrpo_lightning.cli import main
from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.engines.engine import uniform_noise
from ssgrpo_lightning.export import export
from ssgrpo_lightning.lora import Lora
from ssgrpo_lightning.policy import Pretrained
from tests.conftest import QUICKSTART, REPOSITORY, metrics, run_folder, small

LORA = f"--config={REPOSITORY / 'configs/lora.yaml'}"
MANY = [
    "--trainer.accelerator=gpu",
    "--trainer.devices=8",
    "--trainer.num_nodes=2",
    "--trainer.strategy=ddp_find_unused_parameters_true",
]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}="


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The shipped policy with a chat template."""
    folder = tmp_path_factory.mktemp("base")
    policy = Pretrained().load()
    policy.codec.tokenizer.chat_template = TEMPLATE
    policy.save(folder)
    return folder


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """A run of two updates: its module and its arguments."""
    arguments = [f"--config={QUICKSTART}", *small(tmp_path_factory.mktemp("run"))]
    arguments.append(f"--model.policy.model.name={base}")
    return main(["fit", *arguments]).model, arguments


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    """Likewise, of an adapter."""
    arguments = [f"--config={QUICKSTART}", LORA, *small(tmp_path_factory.mktemp("run"))]
    arguments.append(f"--model.policy.model.name={base}")
    return main(["fit", *arguments]).model, arguments


def root(arguments) -> Path:
    return Path(next(a for a in arguments if "default_root_dir" in a).partition("=")[2])


def checkpoint(arguments) -> Path:
    return run_folder(root(arguments)) / "checkpoints/last.ckpt"


def exported(arguments, out, ckpt=None) -> Path:
    """By the command line."""
    main(["export", *arguments, f"--ckpt_path={ckpt or checkpoint(arguments)}", f"--out={out}"])
    return out


def direct(run, out, ckpt=None, adapter="merge", dtype=None, model=None, lora=None) -> Path:
    """Without it, which is faster, under another model or adapter where one is given."""
    module, arguments = run
    policy = copy.copy(module.policy)
    policy.model, policy.lora = model or policy.model, lora or policy.lora
    return export(policy, ckpt or checkpoint(arguments), out, adapter, dtype, {}, "")


def logits(model, tokens):
    with torch.no_grad():
        return model.eval()(tokens).logits


TOKENS = torch.arange(2, 17)[torch.randperm(15, generator=torch.Generator().manual_seed(0))]
TOKENS = TOKENS.view(3, 5)


def greedy(policy, prompts):
    noise = uniform_noise([(0, 0, p, 0) for p in range(len(prompts))], 48)
    samples = TransformersEngine().generate(policy, prompts, 1, Sampling(48, 0.0), noise)
    return [ids[:n] for ids, n in zip(samples.tokens.tolist(), samples.lengths.tolist())]


def test_transformers_loads_what_was_trained(trained, task, tmp_path):
    module, arguments = trained
    out = exported(arguments, tmp_path / "out")
    policy = module.policy.policy
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert torch.equal(logits(model, TOKENS), logits(policy.model, TOKENS))
    assert not torch.equal(logits(model, TOKENS), logits(Pretrained().load().model, TOKENS))
    prompts = [policy.codec.encode(p) for p in task.problems("train")[:4]]
    for prompt, said in zip(prompts, greedy(policy, prompts)):
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False)
        assert theirs[0, len(prompt) :].tolist() == said and said[-1] in policy.eos_ids
    chat = [{"role": "user", "content": "1+2"}]
    given = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert given == "1+2=" and tokenizer(given)["input_ids"] == tokenizer("1+2=")["input_ids"]
    assert model.generation_config.pad_token_id == policy.codec.pad_id
    # A server under another user may have to read them.
    assert {stat.S_IMODE(p.stat().st_mode) for p in out.iterdir()} == {
        stat.S_IMODE((out / "README.md").stat().st_mode)
    }
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_card_says_what_trained_it_and_how_well(trained, tmp_path):
    _, arguments = trained
    own = [f"--config={run_folder(root(arguments)) / 'config.yaml'}"]
    card = (exported(own, tmp_path / "mine", checkpoint(arguments)) / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    assert yaml.safe_load(front)["tags"][0] == "ssgrpo-lightning"
    last = [r for r in metrics(root(arguments)) if r["val/accuracy"]][-1]
    tokens = [r["num_tokens"] for r in metrics(root(arguments)) if r["num_tokens"]][-1]
    assert f"| accuracy at the last validation | {float(last['val/accuracy'])} |" in text
    assert "| policy updates | 2 |" in text and f"| {tokens} |" in text
    for name in ("ValueGain", "SharedState", "ChainArithmetic", "vllm serve mine"):
        assert name in text
    config = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    told = yaml.safe_load((run_folder(root(arguments)) / "config.yaml").read_text())
    assert config == told and config["trainer"]["max_steps"] == 2


def test_a_checkpoint_away_from_its_run_has_the_config_given(trained, tmp_path):
    _, arguments = trained
    alone = Path(shutil.copy(checkpoint(arguments), tmp_path / "some.ckpt"))
    card = (exported(arguments, tmp_path / "out", ckpt=alone) / "README.md").read_text()
    config = yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0])
    assert config["model"]["init_args"]["policy"]["init_args"]["model"]["name"] in arguments[-1]
    last = [r for r in metrics(root(arguments)) if r["val/accuracy"]][-1]
    assert f"validation | {float(last['val/accuracy'])} |" in card


def test_an_adapter_merged_or_kept_reads_as_it_was_trained(adapted, tmp_path):
    module, arguments = adapted
    wanted = logits(module.policy.policy.model, TOKENS)
    merged = exported(arguments, tmp_path / "merged")
    assert not any("lora" in name for name in load_file(merged / "model.safetensors"))
    whole = AutoModelForCausalLM.from_pretrained(merged)
    torch.testing.assert_close(logits(whole, TOKENS), wanted, atol=1e-5, rtol=0)
    kept = direct(adapted, tmp_path / "kept", adapter="keep")
    assert sorted(p.name for p in kept.glob("*.safetensors")) == ["adapter_model.safetensors"]
    both = peft.AutoPeftModelForCausalLM.from_pretrained(kept)
    torch.testing.assert_close(logits(both, TOKENS), wanted, atol=1e-6, rtol=0)
    with both.disable_adapter():
        assert (logits(both, TOKENS) - wanted).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(kept).chat_template == TEMPLATE
    assert "library_name: peft" in (kept / "README.md").read_text()


def test_an_adapter_is_not_put_on_what_it_was_not_trained_on(adapted, trained, base, tmp_path):
    other = Pretrained(str(base)).load()
    torch.nn.init.zeros_(other.model.model.layers[1].self_attn.q_proj.weight)
    other.save(tmp_path / "other")
    out, model = tmp_path / "out", Pretrained(str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"alpha is 16\.0, but the run .* 32\.0: .*own config"):
        direct(adapted, out, lora=Lora(16, 16.0))
    with pytest.raises(ValueError, match=r"policy\.lora is null"):
        direct(trained, out, adapter="keep")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj\..* use merge"):
        direct(adapted, out, adapter="keep", model=model)
    assert not out.exists()
    # Merged it brings its own base.
    merged = AutoModelForCausalLM.from_pretrained(direct(adapted, out, model=model))
    wanted = logits(adapted[0].policy.policy.model, TOKENS)
    torch.testing.assert_close(logits(merged, TOKENS), wanted, atol=1e-5, rtol=0)


def test_a_quantised_base_gives_way_to_its_file(adapted, tmp_path):
    module, arguments = adapted
    saved = torch.load(checkpoint(arguments), weights_only=True)
    for name in list(saved["state_dict"]):
        if name.endswith("base_layer.weight"):  # as 4 bits a number are held
            saved["state_dict"][name] = torch.zeros(7, 1, dtype=torch.uint8)
            saved["state_dict"][f"{name}.absmax"] = torch.zeros(3)
    torch.save(saved, tmp_path / "quantised.ckpt")
    quantised = copy.copy(module.policy.model)
    object.__setattr__(quantised, "quantize", "nf4")  # needs bitsandbytes by the front door
    direct(adapted, tmp_path / "out", tmp_path / "quantised.ckpt", model=quantised)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    wanted = logits(module.policy.policy.model, TOKENS)
    torch.testing.assert_close(logits(model, TOKENS), wanted, atol=1e-5, rtol=0)


def test_a_folder_of_shards_gives_the_same_weights(trained, tmp_path):
    _, arguments = trained
    whole = direct(trained, tmp_path / "whole")
    saved = torch.load(checkpoint(arguments), weights_only=True)
    # As Lightning's strategies lay them out: the rest of the checkpoint in a file of its own.
    state, optimizers = saved.pop("state_dict"), saved.pop("optimizer_states")
    parts = {"state_dict": state, **{f"optimizer_{i}": o for i, o in enumerate(optimizers)}}
    dcp.save(parts, checkpoint_id=tmp_path / "shards", no_dist=True)
    torch.save(saved, tmp_path / "shards/meta.pt")
    out = exported(arguments, tmp_path / "out", ckpt=tmp_path / "shards")
    name = "model.safetensors"
    assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert "| policy updates | 2 |" in (out / "README.md").read_text()


def test_another_precision_and_a_config_for_gpus_that_are_not_here(trained, tmp_path):
    module, arguments = trained
    out = exported([*arguments, *MANY, "--dtype=bfloat16"], tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    ours = module.policy.policy.model.state_dict()
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(tensor, ours[name].bfloat16())


def test_an_export_replaces_an_export_and_nothing_else(trained, tmp_path):
    out = direct(trained, tmp_path / "out")
    (out / "config.json").write_text("{}")
    direct(trained, out, dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    (out / "thesis.tex").write_text("")
    told = r"error: .*'thesis\.tex', that no export wrote .* new or empty folder"
    with pytest.raises(SystemExit, match=told):
        exported(trained[1], out)
    assert (out / "thesis.tex").exists() and (out / "model.safetensors").exists()
    with pytest.raises(ValueError, match="is a file"):
        direct(trained, out / "thesis.tex")


def test_another_architecture_is_refused_by_its_first_parameter(trained, adapted, base, tmp_path):
    deeper, wide = (Pretrained(str(base)).load() for _ in range(2))
    deeper.model.model.layers.append(copy.deepcopy(deeper.model.model.layers[0]))
    deeper.model.config.num_hidden_layers = 4
    deeper.save(tmp_path / "deeper")
    wide.model.resize_token_embeddings(32)
    wide.save(tmp_path / "wide")
    deeper, wide = (Pretrained(str(tmp_path / name)) for name in ("deeper", "wide"))
    q = r"model\.layers\.0\.self_attn\.q_proj"
    way_out = r".*config\.yaml in its folder"
    out, of_adapter = tmp_path / "out", checkpoint(adapted[1])
    with pytest.raises(ValueError, match=rf"no parameter {q}\.weight, the model has{way_out}"):
        direct(trained, out, ckpt=of_adapter)
    with pytest.raises(ValueError, match=rf"no parameter {q}\.base_layer\.weight"):
        direct(adapted, out, ckpt=checkpoint(trained[1]))
    with pytest.raises(ValueError, match=rf"\(17, 128\) in the checkpoint{way_out}"):
        direct(trained, out, model=wide)
    with pytest.raises(ValueError, match=r"no parameter model\.layers\.3\."):
        direct(trained, out, model=deeper)
    state = torch.load(checkpoint(trained[1]), weights_only=True)
    state["state_dict"]["policy.policy.model.model.layers.3.more"] = torch.ones(1)
    torch.save(state, tmp_path / "more.ckpt")
    with pytest.raises(ValueError, match=r"has a parameter model\.layers\.3\.more, not the model"):
        direct(trained, out, ckpt=tmp_path / "more.ckpt")
    assert not out.exists()


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_checkpoint_runs_no_code_and_a_damaged_one_is_named(trained, tmp_path):
    _, arguments = trained
    mark, folder = tmp_path / "ran", tmp_path / "folder"
    torch.save({"state_dict": {}, "callbacks": Bomb(mark)}, tmp_path / "zip.ckpt")
    (tmp_path / "bare.ckpt").write_bytes(pickle.dumps(Bomb(mark)))
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    whole = checkpoint(arguments).read_bytes()
    (tmp_path / "half.ckpt").write_bytes(whole[: len(whole) // 2])
    torch.save({"state_dict": {"weight": torch.ones(1)}}, tmp_path / "other.ckpt")
    for name, told in (
        ("zip.ckpt", "never run"),
        ("bare.ckpt", "never run"),
        ("folder", "never run"),
        ("half.ckpt", "damaged"),
        ("other.ckpt", "holds no parameter under 'policy.policy.model.'"),
        ("absent.ckpt", "must be a checkpoint"),
    ):
        with pytest.raises(ValueError, match=rf"{name}.*{told}"):
            direct(trained, tmp_path / "out", ckpt=tmp_path / name)
    for name, told in (("zip.ckpt", "refused unread"), ("bare.ckpt", "cut off or no checkpoint")):
        with pytest.raises(SystemExit, match=told):
            exported(arguments, tmp_path / "out", ckpt=tmp_path / name)
    assert not mark.exists() and not (tmp_path / "out").exists()
    pickle.loads(pickle.dumps(Bomb(mark)))  # and it would have
    assert mark.exists()
