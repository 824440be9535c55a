"""A checkpoint of HiFT on DeepSpeed, continued by one process without DeepSpeed: `load_zero`."""

from pathlib import Path
from typing import Any

import torch

from slivertune.hift import HiFT
from slivertune.hift.checkpoint import check_identity
from slivertune.parallel.checkpoint.folder import unwrapped
from slivertune.parallel.zero.checkpoint import identity
from slivertune.parallel.zero.shares import SavedShares, ShareFragment, open_shares


def load_zero(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Continue in one process from what HiFT's ranks under ZeRO-1, 2 or 3 have saved: weights, masters, state, turn.

    Schedules and weights that HiFT does not train stay as they are. Reads no file of DeepSpeed's.

    Args:
        optimizer: HiFT, or accelerate's wrapper of it, on one process; built with the settings of the saved run.
        folder: With the ranks' files: `SAVE_DIR/global_step12`, or `pytorch_model` in what accelerate has saved.

    Raises:
        ValueError: If the folder is not whole, or is of another run.
    """
    hift: HiFT = unwrapped(optimizer, HiFT)
    folder = Path(folder)
    shares = open_shares(folder)
    saved = shares.first
    check_identity(folder, saved["identity"], identity(hift))
    changed = [index for index, groups in saved["own"].items() if any(groups)]
    if changed:
        raise ValueError(
            f"the base optimizer of group {changed[0]} has changed its own hyperparameters, which only DeepSpeed's "
            "layouts load; resume there"
        )
    now = hift.whole_state()
    weights, state = _put_together(hift, shares)
    for mine, theirs in zip(now["param_groups"], saved["param_groups"], strict=True):
        mine.update(theirs)
    header = {**now["hift"], "updates": saved["updates"], "held_lr": saved["held_lr"], "weights": list(state)}
    hift.load_whole_state({**now, "hift": header, "state": state, "own": {}})
    with torch.no_grad():
        for weight in hift.trained_weights:
            weight.parameter.copy_(weights[weight.name])


def _put_together(hift: HiFT, shares: SavedShares) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """The fp32 weights, and the state of those that were stepped, by name."""
    weights, states = {}, {}
    for group in hift.groups:
        for weight in hift.weights_of(group.index):
            shape = weight.parameter.shape
            master = torch.empty(shape, dtype=torch.float32)
            state = shares.fill(group.index, [ShareFragment(weight.name, 0, 0, master.numel())], master.view(-1))
            weights[weight.name] = master
            if state:
                has_master = weight.parameter.dtype != torch.float32
                states[weight.name] = {
                    **({"master": master.clone()} if has_master else {}),
                    **{key: value.view(shape) if _is_flat(value, master) else value for key, value in state.items()},
                }
    return weights, states


def _is_flat(value: Any, master: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == master.numel()
