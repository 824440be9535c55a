"""Methods, 4-bit weights, token selection and checkpointing: what `plan` says of each, and what `train` says."""

import itertools
from pathlib import Path

import pytest

from slivertune.planning.make import make_plan
from slivertune.training.command_line.parse import parse_train_arguments
from tests.helpers.plan_requests import paper_request
from tests.planning.real import LLAMA, run_for_real

COMBINATIONS = list(itertools.product(("hift", "sft", "lora", "dense"), (False, True), (None, 0.3), (False, True)))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "four_bit", "token_ratio", "checkpointing"), COMBINATIONS)
def test_every_combination_has_a_peak_or_the_refusal_that_training_has(
    method: str, four_bit: bool, token_ratio: float | None, checkpointing: bool, tmp_path: Path
) -> None:
    words = ["--method", method, "--output_dir", str(tmp_path / "out"), "--load_in_4bit", str(four_bit)]
    words += ["--gradient_checkpointing", str(checkpointing)]
    words += ["--density", "0.05"] if method == "sft" else []
    words += [] if token_ratio is None else ["--token_ratio", str(token_ratio)]
    refusals = []
    try:
        parse_train_arguments(words)
    except ValueError as error:
        refusals.append(str(error))
    settings = {"method": method, "load_in_4bit": four_bit, "token_ratio": token_ratio, "density": 0.05}
    if refusals:
        with pytest.raises(ValueError, match="4bit") as caught:
            paper_request(gradient_checkpointing=checkpointing, **settings)  # type: ignore[arg-type]
        assert str(caught.value) == refusals[0]
        return
    assert not (four_bit and method in ("hift", "dense"))
    assert (
        make_plan(
            paper_request(gradient_checkpointing=checkpointing, batch_size=2, seq_length=32, **settings), LLAMA
        ).peak_bytes
        > 0
    )


def test_selected_tokens_over_sparse_deltas_beside_4_bit_weights_are_as_planned() -> None:
    settings = {"token_ratio": 0.3, "density": 0.05, "batch_size": 2, "seq_length": 64}
    request = paper_request(method="sft", load_in_4bit=True, **settings)  # type: ignore[arg-type]
    real = run_for_real(request, LLAMA).peak
    # Temporaries inside of kernels are seen by no one.
    assert make_plan(request, LLAMA).peak_bytes == pytest.approx(real.device, rel=0.03), real
