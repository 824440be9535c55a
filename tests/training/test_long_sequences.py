"""`slivertune train --offload_activations --token_tile_size`: the bits of plain checkpointing; a plan that knows."""

import pytest

import slivertune as st
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.token_tiles import runs_in_tiles
from slivertune.training.output.plan_line import request_of
from tests.training.tiny_runs import (
    CHECKPOINTED,
    CHECKPOINTED_METHODS,
    TINY_CYCLE,
    UNMEASURED,
    Runs,
    assert_same_bits,
    results_of,
)


@CHECKPOINTED_METHODS
def test_a_run_that_offloads_has_the_bits_of_plain_checkpointing(method: tuple[str, ...], runs: Runs) -> None:
    more = (*method, *CHECKPOINTED, *UNMEASURED)
    runs.train("plain", *more)
    runs.printed()
    results = runs.train("offloaded", *more, "--offload_activations")
    assert "  offload inputs of 2 checkpointed blocks, to host memory" in runs.printed()
    assert results["settings"]["offload_activations"] is True
    assert_same_bits(runs["plain"], runs["offloaded"])


@pytest.mark.slow
def test_a_run_in_tiles_is_planned_with_them_and_its_loss_is_that_of_whole_batches(runs: Runs) -> None:
    more = (*CHECKPOINTED, "--max_steps", str(TINY_CYCLE))
    plain = runs.train("plain", *more)
    runs.printed()
    tiled = runs.train("tiled", *more, "--token_tile_size", "16")
    assert "  tiles   of 16 tokens in 7 MLPs and norms" in runs.printed()
    assert tiled["settings"]["token_tile_size"] == 16
    assert tiled["planned_peak_bytes"] < plain["planned_peak_bytes"]
    # Weights' gradients are summed in another order, in fp32.
    assert tiled["after"]["eval_loss"] == pytest.approx(plain["after"]["eval_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_run_that_is_resumed_in_mid_cycle_goes_on_with_the_same_bits(runs: Runs) -> None:
    more = (*CHECKPOINTED, "--offload_activations", "--token_tile_size", "16", "--save_steps", "3", *UNMEASURED)
    runs.train("whole", *more)
    runs.train("resumed", *more, "--max_steps", "3")
    checkpoint = str(runs["resumed"] / "checkpoint-3")
    runs.train("resumed", *more, "--resume_from_checkpoint", checkpoint)
    assert_same_bits(runs["whole"], runs["resumed"])
    assert results_of(runs["resumed"])["settings"]["offload_activations"] is True


def test_a_run_is_planned_as_it_was_asked_for_and_lets_go_at_its_end(runs: Runs) -> None:
    more = ("--offload_activations", "--token_tile_size", "32", "--keep_activations", "1", "--token_ratio", "0.5")
    run = runs.assembled("out", *CHECKPOINTED, *more)
    model, request = run.trainer.model, request_of(run)
    assert model is not None
    assert (request.offload_activations, request.token_tile_size, request.keep_activations) == (True, 32, 1)
    with pytest.raises(RuntimeError, match="has its activations offloaded already"):
        st.offload_activations(model)
    run.close()
    assert not any(map(runs_in_tiles, model.modules()))
    assert not any("forward" in vars(each) for each in model.modules())
    enable_checkpointing(model)
    st.offload_activations(model).remove()
    st.tile_tokens(model, 8).remove()
