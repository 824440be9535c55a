import re
from itertools import product
from typing import Any

import pytest

from slivertune.training.command_line.plan_words import parse_plan_arguments, precision_of
from slivertune.training.methods.registry import TRAIN_METHODS
from slivertune.training.models import choose_precision
from tests.helpers.plan_requests import paper_request

MODEL = ("--model", "x")


@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("layout", ["single", "zero2"])
@pytest.mark.parametrize("method", TRAIN_METHODS)
def test_the_precision_is_what_train_makes_of_the_same_words(method: str, layout: str, four_bit: bool) -> None:
    train = TRAIN_METHODS[method]
    if four_bit and not train.takes_4bit:
        pytest.skip("changes every weight")
    given = {"method": method, "layout": layout, "load_in_4bit": four_bit}
    dtypes: Any = ("auto", "fp32", "bf16")
    for bf16, dtype in product((False, True), dtypes):
        chosen = choose_precision(
            train.bf16_use, dtype, bf16=bf16, fp16=False, four_bit=four_bit, deepspeed=layout != "single"
        )
        found = precision_of({**given, "bf16": bf16, "weights_dtype": dtype})
        loading = "bf16" if found in ("bf16", "mixed_hi") else "fp32"
        # Where nothing is said, train follows the checkpoint.
        assert chosen.loading in (loading, "stored"), (bf16, dtype)
        if layout == "single" and not (four_bit and found == "mixed"):
            request = paper_request(method=method, precision=found, load_in_4bit=four_bit)
            assert chosen.autocast == ("bf16" if request.has_autocast else "no"), (bf16, dtype)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("--bf16", {"precision": "mixed_hi"}),
        ("--bf16 --master none", {"master": "none", "precision": "bf16"}),
        ("--bf16 --precision mixed_hi", {"precision": "mixed_hi"}),
        ("--bf16 false", {}),
        ("--method dense --bf16", {"method": "dense", "precision": "mixed"}),
        ("--method sft --bf16", {"method": "sft", "precision": "bf16"}),
        ("--method lora --weights_dtype bf16", {"method": "lora", "precision": "bf16"}),
        ("--weights_dtype auto", {}),
        ("--optim adamw_bnb_8bit", {"optimizer": "adamw8bit"}),
        ("--optim sgd --optim_args momentum=0.9", {"optimizer": "sgd_momentum"}),
    ],
)
def test_words_of_train_become_fields_of_the_request(words: str, given: dict[str, Any]) -> None:
    assert parse_plan_arguments([*MODEL, *words.split()]).given == given


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--bf16 --precision fp32", "--bf16 true means --precision mixed_hi here, and --precision fp32 says otherwise"),
        (
            "--method dense --bf16 --weights_dtype fp32 --precision bf16",
            "--bf16 true --weights_dtype fp32 means --precision mixed here, and --precision bf16 says otherwise. Leave",
        ),
        ("--optim sgd --optimizer adamw", "--optim sgd means --optimizer sgd here, and --optimizer adamw says"),
        ("--optim rmsprop", "a plan does not know --optim rmsprop: it must be one of adamw_torch, "),
        ("--optim_args momentum=0.9", "--optim_args momentum=0.9 takes effect only with --optim"),
    ],
)
def test_words_that_contradict_a_field_are_refused_with_the_way_out(words: str, part: str) -> None:
    with pytest.raises(ValueError, match=re.escape(part)):
        parse_plan_arguments([*MODEL, *words.split()])
