import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from slivertune.training.resumed_facts import check_base, check_facts

CHECKPOINT = Path("runs/x/checkpoint-3")
DEFAULTS = {"rate": 0.2, "packed": False, "names": None}


def refusal(saved: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """The text of the error."""
    with pytest.raises(ValueError, match="was trained with") as caught:
        check_facts(CHECKPOINT, saved, asked, DEFAULTS)
    return str(caught.value)


def test_a_setting_that_came_later_had_its_default() -> None:
    saved, asked = {"sft": {"rate": 0.3}}, {"rate": 0.3, "packed": False, "names": None}
    check_facts(CHECKPOINT, saved, {"sft": asked}, DEFAULTS)
    text = refusal(saved, {"sft": {**asked, "packed": True}})
    assert "was trained with sft={'packed': False}, and this run asks for sft={'packed': True}" in text


def test_a_setting_that_this_version_does_not_have_must_be_off() -> None:
    asked = {"sft": {"rate": 0.3}}
    for off in (None, False, 0, 0.0):
        check_facts(CHECKPOINT, {"sft": {"rate": 0.3, "halves": off}}, asked, DEFAULTS)
    assert refusal({"sft": {"rate": 0.3, "halves": "both"}}, asked) == (
        f"{CHECKPOINT} was trained with sft={{'halves': 'both'}}, which this version does not have. Continue with the "
        "version of slivertune that wrote it, or start again without --resume_from_checkpoint"
    )


def test_all_differences_are_named_with_the_options_that_repeat_the_run() -> None:
    saved, asked = ({"rate": rate, "packed": True, "names": names} for rate, names in ((0.3, ["a", "b"]), (0.2, None)))
    assert refusal({"sft": saved}, {"sft": asked}) == (
        f"{CHECKPOINT} was trained with sft={{'rate': 0.3, 'names': ['a', 'b']}}, and this run asks for "
        "sft={'rate': 0.2, 'names': None}. Repeat the first run's settings (--rate 0.3 --names a b), or start again "
        "without --resume_from_checkpoint"
    )
    # Without the options that the run had by default, and of settings that are no options.
    assert "settings, or start" in refusal({"sft": asked}, {"sft": {**asked, "names": ["a"]}})
    assert "settings, or start" in refusal({"lora": {"rank": 4}}, {"lora": {"rank": 8}})


def test_a_fact_that_is_no_mapping_is_compared_as_it_is() -> None:
    facts = {"method": "hift", "layers": ["head"], "load_in_4bit": None}
    check_facts(CHECKPOINT, {"method": "hift", "layers": ["head"], "before": 3}, facts, DEFAULTS)
    assert "with layers=['head'], and this run asks for layers=None. Repeat" in refusal(
        facts, {**facts, "layers": None}
    )


def test_weights_that_a_rank_does_not_hold_are_not_compared() -> None:
    whole, sharded = nn.Linear(3, 2), nn.Linear(3, 2, device="meta")
    facts: dict[str, Any] = {}
    check_base(None, facts, sharded, "base")
    assert facts == {}
    check_base(None, facts, whole, "base")
    check_base(CHECKPOINT, facts, sharded, "base")
    check_base(CHECKPOINT, facts, copy.deepcopy(whole), "base")
    with pytest.raises(ValueError, match="was trained from other weights than those of base"):
        check_base(CHECKPOINT, facts, nn.Linear(3, 2), "base")
