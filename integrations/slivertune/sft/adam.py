"""AdamW on a vector of deltas whose elements have ages of their own (SFT, section 3.2)."""

import functools
import math

import torch

_VANISHED = 26
"""Number of binary digits after which beta**age no longer changes 1 - beta**age in fp32."""


def age_limit(betas: tuple[float, float]) -> int:
    """Return the age at which bias correction has ended for both moments and ages stop counting."""
    return math.ceil(_VANISHED * math.log(2) / -math.log(max(*betas, 0.5)))


def age_dtype(betas: tuple[float, float]) -> torch.dtype:
    """Return the narrowest integer dtype that holds all ages: int16 up to beta = 0.9994."""
    return torch.int16 if age_limit(betas) <= torch.iinfo(torch.int16).max else torch.int32


@functools.lru_cache(maxsize=8)
def _corrections(beta: float, limit: int, device: torch.device) -> torch.Tensor:
    """Compute 1 - beta**age in fp64 for all ages up to the limit, and return it in fp32, shape (limit + 1,)."""
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
    """Apply one AdamW update to every element, in place, with bias correction by each element's own age.

    m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2,
    delta = (1 - lr wd) delta - lr (m / (1 - b1^a)) / (sqrt(v / (1 - b2^a)) + eps).

    Args:
        delta: Deltas, fp32, shape (n,). Weight decay pulls them to zero, and so the weights to their pretrained values.
        gradient: Gradient g, fp32, shape (n,).
        exp_avg: First moment m, fp32, shape (n,).
        exp_avg_sq: Second moment v, fp32, shape (n,).
        ages: Ages a, int32, shape (n,): each element's updates, this one included, at most `age_limit(betas)`.
        lr: Learning rate.
        betas: Decay rates b1 and b2.
        eps: Term added to the denominator.
        weight_decay: Decoupled weight decay wd.
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
    """Compute the moments of a newly grown weight, as if it had been trained through the estimation phase.

    Bias correction for an age of `num_steps` turns them into the phase's mean gradient and mean square.

    Args:
        mean: Mean of the per-update gradients, fp32, shape (n,).
        mean_square: Mean of their squares, fp32, shape (n,).
        num_steps: Updates in the phase; the weight's age from now on.
        betas: Decay rates b1 and b2.

    Returns:
        Moments m and v, fp32, shape (n,) each.
    """
    return mean * (1 - betas[0] ** num_steps), mean_square * (1 - betas[1] ** num_steps)
