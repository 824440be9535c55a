"""AdamW on a vector of deltas whose elements have ages of their own (SFT, section 3.2)."""

import functools
import math

import torch

_VANISHED = 26
"""Binary digits after which beta**age no longer changes 1 - beta**age in fp32."""


def age_limit(betas: tuple[float, float]) -> int:
    """The age at which bias correction has ended for both moments, and at which ages stop counting."""
    return math.ceil(_VANISHED * math.log(2) / -math.log(max(*betas, 0.5)))


def age_dtype(betas: tuple[float, float]) -> torch.dtype:
    """The narrowest integer that holds all ages: int16 up to beta = 0.9994."""
    return torch.int16 if age_limit(betas) <= torch.iinfo(torch.int16).max else torch.int32


@functools.lru_cache(maxsize=8)
def _corrections(beta: float, limit: int, device: torch.device) -> torch.Tensor:
    """1 - beta**age for all ages up to the limit, computed in fp64; fp32, shape (limit + 1,)."""
    return (1 - beta ** torch.arange(limit + 1, dtype=torch.float64, device="cpu")).float().to(device)


def adamw_(
    delta: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    ages: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW update of every element, in place; bias is corrected by each element's own age.

    m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2,
    delta = (1 - lr wd) delta - lr (m / (1 - b1^a)) / (sqrt(v / (1 - b2^a)) + eps).

    Args:
        delta: fp32, shape (n,). Weight decay pulls it to zero, that is the weight to its pretrained value.
        gradient: fp32, shape (n,).
        exp_avg: m, fp32, shape (n,).
        exp_avg_sq: v, fp32, shape (n,).
        ages: a, int32, shape (n,): updates that each element has had, this one included; at most `age_limit(betas)`.
        lr: Learning rate.
        betas: b1 and b2.
        eps: Added to the denominator.
        weight_decay: wd, decoupled.
    """
    limit = age_limit(betas)
    exp_avg.lerp_(gradient, 1 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    if weight_decay:
        delta.mul_(1 - lr * weight_decay)
    denominator = exp_avg_sq / _corrections(betas[1], limit, ages.device).index_select(0, ages)
    denominator.sqrt_().add_(eps)
    denominator.mul_(_corrections(betas[0], limit, ages.device).index_select(0, ages))
    delta.addcdiv_(exp_avg, denominator, value=-lr)


def seeded_moments(
    mean: torch.Tensor, mean_square: torch.Tensor, num_steps: int, betas: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Moments of a newly grown weight, as if it had been trained through the estimation phase.

    After bias correction for an age of `num_steps` they are the phase's mean gradient and mean square.

    Args:
        mean: fp32, shape (n,): mean of the per-update gradients.
        mean_square: fp32, shape (n,): mean of their squares.
        num_steps: Updates in the phase; the weight's age from now on.
        betas: b1 and b2.

    Returns:
        m and v, fp32, shape (n,) each.
    """
    return mean * (1 - betas[0] ** num_steps), mean_square * (1 - betas[1] ** num_steps)
