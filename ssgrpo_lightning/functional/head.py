"""Log-probability and entropy of tokens from hidden states, without all logits at one time."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear


def token_scores(
    hidden: Float[Tensor, "n hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    bias: Float[Tensor, " vocabulary"] | None,
    targets: Int[Tensor, " n"],
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy_gradient: bool = False,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Log-probability of each target, and entropy of the distribution it is from, in nats.

    With z = (W h + b) / T and p = softmax(z): log p_y = z_y - logsumexp(z), H = -sum_v p_v log p_v,
    d log p_y / d z_v = [v = y] - p_v, d H / d z_v = -p_v (log p_v + H). The logits of one chunk
    exist at a time; those of the last are kept for the backward pass, the others computed again.
    All but the matrix products is in float32.

    Args:
        hidden: Hidden state before each target.
        weight: Weight of the language-model head.
        bias: Its bias; None where it has none.
        targets: Token ids.
        temperature: Divides the logits.
        chunk: Targets whose logits exist at one time.
        entropy_gradient: Let the entropy carry a gradient.

    >>> h, w = torch.zeros(3, 2), torch.randn(4, 2)
    >>> token_scores(h, w, None, torch.tensor([0, 1, 2]), chunk=2)[1].exp()
    tensor([4., 4., 4.])
    """
    return _TokenScores.apply(  # pyright: ignore[reportReturnType]
        hidden,
        weight,
        bias,
        targets,
        temperature,
        chunk,
        entropy_gradient,
        torch.is_grad_enabled(),
    )


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        entropy_gradient: bool,
        recording: bool,
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        ctx.dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype
        ctx.temperature, ctx.kept = temperature, None
        ctx.parts = [slice(i, i + chunk) for i in range(0, len(targets), chunk)]
        logprobs, entropy = hidden.new_empty(2, len(targets), dtype=torch.float32)
        for part in ctx.parts:
            log_p = _logits(ctx, hidden[part], weight, bias)
            log_p -= log_p.amax(-1, keepdim=True)
            p = log_p.exp()
            total = p.sum(-1, keepdim=True)
            normal = total.log()
            # H = log s - sum(e^z z) / s, of logits z shifted by their maximum, s = sum(e^z)
            entropy[part] = (normal - p.mul_(log_p).sum(-1, keepdim=True) / total)[:, 0]
            del p
            logprobs[part] = (log_p.gather(1, targets[part, None]) - normal)[:, 0]
            if recording and part is ctx.parts[-1]:
                ctx.kept = log_p.sub_(normal)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.entropy_gradient = entropy_gradient
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = (g / ctx.temperature for g in gradients)
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if to_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if to_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if to_bias else None
        for part in reversed(ctx.parts):
            log_p, ctx.kept = ctx.kept, None
            if log_p is None:
                log_p = _logits(ctx, hidden[part], weight, bias)
                log_p -= log_p.logsumexp(-1, keepdim=True)
            scale = of_logprobs[part, None]
            if ctx.entropy_gradient:
                scale = (log_p + entropy[part, None]).mul_(of_entropy[part, None]).add_(scale)
            d_logits = log_p.exp_().mul_(-scale)
            del scale
            d_logits.scatter_add_(1, targets[part, None], of_logprobs[part, None])
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(ctx.dtype)
            if d_hidden is not None:
                d_hidden[part] = d_logits @ weight.to(ctx.dtype)
            if d_weight is not None:
                _add_product(d_weight, d_logits.T, hidden[part].to(ctx.dtype))
        grads = (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
        )
        return (*grads, None, None, None, None, None)


def _logits(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if bias is None else bias.to(ctx.dtype)
        logits = linear(hidden.to(ctx.dtype), weight.to(ctx.dtype), bias).float()
    return logits if ctx.temperature == 1 else logits.div_(ctx.temperature)


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """``into += left @ right``, without a copy where the precision is the same."""
    if left.dtype == into.dtype:
        into.addmm_(left, right)
    else:
        into += left @ right
