"""Options of the two update rules, checked."""

from __future__ import annotations

import math
from typing import Any

from slivertune.sft.config import SFTConfig

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
SM3_EPS = 1e-30


def checked_options(
    config: SFTConfig,
    lr: float,
    betas: tuple[float, float] | None,
    eps: float | None,
    weight_decay: float,
    momentum: float,
) -> dict[str, Any]:
    """Check the optimizer's options, and fill in the defaults of the update rule.

    Args:
        config: Its `selection` decides on the rule: AdamW for AG, SM3 for MA.
        lr: Learning rate.
        betas: AdamW's decay rates, or None.
        eps: Added to the denominator, or None.
        weight_decay: Decay of the deltas.
        momentum: SM3's momentum.

    Returns:
        The options of the param group.

    Raises:
        ValueError: If one is out of range, or belongs to the other rule.
    """
    if not (float(lr) >= 0 and math.isfinite(float(lr))):
        raise ValueError(f"lr={lr} must be a finite number of at least 0")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay={weight_decay} must be at least 0")
    if eps is not None and not eps >= 0:
        raise ValueError(f"eps={eps} must be at least 0")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} must be in [0, 1)")
    if config.selection == "momentum":
        if betas is not None:
            raise ValueError(f'betas={betas} are AdamW\'s; selection="momentum" trains by SM3, which takes momentum=')
        return {
            "lr": lr,
            "eps": SM3_EPS if eps is None else eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
        }
    if momentum:
        raise ValueError(
            f'momentum={momentum} is SM3\'s; selection="accumulated_gradient" trains by AdamW, with betas='
        )
    first, second = ADAM_BETAS if betas is None else betas
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError(f"betas={betas} must be in [0, 1)")
    return {"lr": lr, "betas": (first, second), "eps": ADAM_EPS if eps is None else eps, "weight_decay": weight_decay}
