from typing import Any

import pytest

from slivertune.training.data.turn_weights import UnknownWeightError, asks_to_be_learned


@pytest.mark.parametrize(
    ("said", "is_learned"),
    [
        ({}, None),
        ({"weight": None}, None),
        ({"weight": 0}, False),
        ({"weight": 1.0}, True),
        ({"train": False}, False),
        ({"training": True}, True),
        ({"trainable": False}, False),
        ({"loss": False}, False),
        ({"loss_weight": 0.0}, False),
        ({"loss_mask": 1}, True),
        ({"loss_scale": 0}, False),
        ({"masked": True}, False),
        ({"masked": False}, True),
        ({"learnable": False}, False),
        ({"ignore": True}, False),
        ({"ignore": 0}, True),
        ({"skip": 1}, False),
        ({"no_loss": True}, False),
        ({"weight": 0, "masked": True}, False),
        ({"mask": None, "label": False}, None),
    ],
)
def test_what_a_message_says_is_read_in_the_words_of_several_tools(
    said: dict[str, Any], is_learned: bool | None
) -> None:
    assert asks_to_be_learned({"role": "assistant", "content": "weight: 0", **said}) is is_learned


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"weight": 0.5}, "have weight=0.5 in a message, which is neither true, false, 1 nor 0"),
        ({"weight": -1}, "have weight=-1 in a message"),
        ({"weight": float("nan")}, "have weight=nan in a message"),
        ({"train": "false"}, "have train='false' in a message"),
        ({"loss": [0]}, r"have loss=\[0\] in a message"),
        ({"weight": 0, "train": True}, "have weight=0 and train=True in one message, which contradict each other"),
        ({"weight": 1, "masked": True}, "have weight=1 and masked=True in one message"),
        ({"mask": True}, "have mask=True in a message, .* in some tools and puts it in in others. Name it masked or"),
        ({"mask": 0}, "have mask=0 in a message"),
        ({"skip": 0, "no_loss": True}, "have skip=0 and no_loss=True in one message, which contradict each other"),
        ({"train_detail": [{"begin_offset": 0}]}, "have train_detail in a message, and parts of a turn"),
    ],
)
def test_what_is_not_clear_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownWeightError, match=message):
        asks_to_be_learned(said)
