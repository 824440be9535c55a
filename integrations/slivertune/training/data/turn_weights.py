"""Keys of a message that say whether to train on it, as several tools name them."""

from collections.abc import Mapping
from typing import Any

_LEARNED_IF = {
    "weight": True,
    "loss_weight": True,
    "loss_scale": True,
    "loss_mask": True,
    "loss": True,
    "train": True,
    "training": True,
    "trainable": True,
    "learn": True,
    "learnable": True,
    "masked": False,
    "ignore": False,
    "skip": False,
    "no_loss": False,
}
"""Key of a message -> value with which the message is trained on, True for true (or 1) and False for false (or 0).
OpenAI and Mistral use `weight`, Axolotl `train` and `training`, ms-swift `loss` and `loss_scale`, LLaMA-Factory
`loss_weight`, verl `trainable`, torchtune `masked`."""
_OF_PARTS = ("train_detail", "training_detail")
"""Axolotl's keys that mark parts of a turn."""
_UNCLEAR = "mask"
"""Key with which some tools leave a turn out of the loss, and others, as with `loss_mask`, put it in."""
KEYS = frozenset((*_LEARNED_IF, *_OF_PARTS, _UNCLEAR))


class UnknownWeightError(ValueError):
    """A value that does not say whether to train on a turn. The message is the same for all rows of one kind."""


def asks_to_be_learned(message: Mapping[str, Any]) -> bool | None:
    """Read whether a message asks to be trained on.

    Args:
        message: Keys and values of the message. Keys with a null value are ignored.

    Returns:
        Whether to train on the message, or None if it does not say.

    Raises:
        UnknownWeightError: If a value is neither true, false, 1 nor 0, if two keys contradict each other, or if a key
            marks parts of the turn or may mean either.
    """
    said: dict[str, bool] = {}
    for key, value in message.items():
        if value is None or key not in KEYS:
            continue
        if key in _OF_PARTS:
            raise UnknownWeightError(f"have {key} in a message, and parts of a turn can't be left out of the loss")
        if key == _UNCLEAR:
            raise UnknownWeightError(
                f"have {key}={value!r} in a message, which leaves a turn out of the loss in some tools and puts it in "
                "in others. Name it masked or loss_mask"
            )
        # True and 1 are equal, and so are 1 and 1.0.
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise UnknownWeightError(f"have {key}={value!r} in a message, which is neither true, false, 1 nor 0")
        said[key] = bool(value) is _LEARNED_IF[key]
    if len(set(said.values())) > 1:
        pairs = " and ".join(f"{key}={message[key]!r}" for key in said)
        raise UnknownWeightError(f"have {pairs} in one message, which contradict each other")
    return next(iter(said.values()), None)
