"""Rows of the decision table follow from the kept results; rows differ if the ranges of their seeds do not overlap."""

from collections.abc import Callable

import pytest

from tests.conftest import CHECKOUT
from tests.helpers.kept_results import (
    all_but,
    is_least,
    is_worse,
    peak_of,
    result,
    rows_of,
    ways_in_dense_time,
)

TASKS = {"language": "language reference", "sst2": "SST-2", "retrieval": "docstrings"}


def table() -> list[list[str]]:
    """Cells of the rows: the situation, the method, the reason."""
    lines = (CHECKOUT / "benchmarks" / "decision.md").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def nothing_learned_more_than_dense() -> bool:
    """Whether no row of as many updates is better than dense with the same rates by layer on any task.

    A row of dense itself is not compared.
    """
    for task in TASKS:
        names = [row["name"] for row in result("quality")[task] if row["runs"] and "-x" not in row["name"]]
        others = [name for name in names if not name.startswith("dense")]
        of_dense = {name: "dense-layers" if name.endswith("-layers") else "dense" for name in others}
        if len(others) < 3 or any(is_worse(task, dense, name) for name, dense in of_dense.items()):
            return False
    return True


def as_good_as_dense_where_there_is_little_to_learn() -> bool:
    pairs = [("retrieval", "lora-64"), ("retrieval", "sft-ag"), ("sst2", "lora-64")]
    return not any(is_worse(task, name, "dense") for task, name in pairs)


def exact_weights_are_no_better() -> bool:
    pairs = [("qlora-64", "lora-64"), ("qsft", "sft-ag"), ("hift-1-nf4", "hift-1")]
    return not any(is_worse("language", low, exact) for low, exact in pairs)


def tokentune_saves_and_learns_less() -> bool:
    pairs = [("tokens-chunks", "dense"), ("lora-64-tokens", "lora-64"), ("hift-1-tokens", "hift-1")]
    tasks = [("language", *pair) for pair in pairs] + [("sst2", "tokens-chunks", "dense")]
    return all(is_worse("language", *pair) for pair in pairs) and all(
        peak_of(task, kept) < 0.8 * peak_of(task, whole) for task, kept, whole in tasks
    )


def state_in_8_bits_is_as_good_in_dense_training() -> bool:
    """Whether it is, and whether it still is the only row of 8-bit state: one of HiFT would change the cell."""
    of_8_bits = {row["name"] for rows in result("quality").values() for row in rows if "8bit" in row["options"]}
    of_8_bits -= {"full-sign", "full-lion", "full-8bit"}  # whose state is on the device, or is not read
    return not is_worse("language", "dense-8bit", "dense") and of_8_bits == {"dense-8bit"}


REASONS: dict[tuple[str, str, str], Callable[[], bool]] = {
    (
        "Weights, gradients and optimizer state fit",
        "Dense (`--method dense`)",
        "With the same rates by layer nothing learned more after as many updates",
    ): nothing_learned_more_than_dense,
    (
        "New domain, 512 tokens per update",
        "LoRA (`--method lora --lora_rank 64`)",
        "Less loss than all others in equal planned time",
    ): lambda: is_least("lora-64", 512, all_but("lora-64")),
    (
        "New domain, 4,096 tokens per update",
        "Full, rates by layer (`--method full --layerwise_lr_decay 0.8`)",
        "Less loss than all others in equal planned time",
    ): lambda: is_least("full-layers", 4096, all_but("full-layers")),
    (
        "New domain, more tokens per update, or all weights must train",
        "Full (`--method full`)",
        "Less loss than dense, HiFT and SFT in equal planned time",
    ): lambda: all(is_least("full", tokens, rows_of("hift", "sft")) for tokens in (512, 4096, 32768)),
    (
        "Retrieval, or a small result file",
        "LoRA or SFT (`--method sft`)",
        "As good as dense on docstrings (retrieval); LoRA also on SST-2",
    ): as_good_as_dense_where_there_is_little_to_learn,
    (
        "16-bit weights do not fit",
        "LoRA or SFT (`--load_in_4bit`), HiFT (`--waiting nf4`)",
        "As good as exact weights on the language reference",
    ): exact_weights_are_no_better,
    (
        "Activations do not fit",
        "Checkpointing, then TokenTune (`--token_ratio 0.3`)",
        "Less memory than dense; learned less of the language reference",
    ): tokentune_saves_and_learns_less,
    (
        "HiFT, and host memory is short",
        "8-bit state (`--optim adamw_bnb_8bit`)",
        "As good as 32-bit state for dense; not run with HiFT",
    ): state_in_8_bits_is_as_good_in_dense_training,
}
"""By the cells of a row: whether the results bear it out."""


@pytest.mark.parametrize("cells", table(), ids=lambda cells: cells[0])
def test_each_row_of_the_decision_table_follows_from_the_results(cells: list[str]) -> None:
    situation, method, reason = cells
    assert REASONS[situation, method, reason]()


def test_each_reason_is_that_of_a_row() -> None:
    assert list(REASONS) == [tuple(cells) for cells in table()]


def test_reasons_of_an_earlier_table_do_not_hold() -> None:
    assert not is_worse("sst2", "lora-64", "dense")  # "0.7 points below dense", by three seeds of dense
    assert not is_least("dense", 4096, ways_in_dense_time())  # "others learn less" at 4,096 tokens
    assert not is_least("hift-2-stays", 4096, [])  # a quarter of the layers there
