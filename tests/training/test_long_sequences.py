"""`slivertune train --offload_activations --token_tile_size`: the bits of plain checkpointing; a plan that knows."""

from pathlib import Path

import pytest
from rich.console import Console

import slivertune as st
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.token_tiles import runs_in_tiles
from slivertune.training.assemble import assemble
from slivertune.training.options.parse import parse_train_arguments
from slivertune.training.output.plan_line import request_of
from tests.training.tiny_runs import (
    CHECKPOINTED,
    CHECKPOINTED_METHODS,
    assert_same_bits,
    results_of,
    train,
    train_arguments,
    write_texts,
)


@CHECKPOINTED_METHODS
def test_a_run_that_offloads_has_the_bits_of_plain_checkpointing(
    method: tuple[str, ...], tiny_base: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_base, texts, tmp_path / "plain", *method, *CHECKPOINTED)
    capsys.readouterr()
    results = train(tiny_base, texts, tmp_path / "offloaded", *method, *CHECKPOINTED, "--offload_activations")
    assert "  offload inputs of 2 checkpointed blocks wait in host memory" in capsys.readouterr().out
    assert results["settings"]["offload_activations"] is True
    assert_same_bits(tmp_path / "plain", tmp_path / "offloaded")


def test_a_run_in_tiles_is_planned_with_them_and_its_loss_is_that_of_whole_batches(
    tiny_base: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train(tiny_base, texts, tmp_path / "plain", *CHECKPOINTED)
    capsys.readouterr()
    tiled = train(tiny_base, texts, tmp_path / "tiled", *CHECKPOINTED, "--token_tile_size", "16")
    assert "  tiles   of 16 tokens in 7 MLPs and norms" in capsys.readouterr().out
    assert tiled["settings"]["token_tile_size"] == 16
    assert tiled["planned_peak_bytes"] < plain["planned_peak_bytes"]
    # Weights' gradients are summed in another order, in fp32.
    assert tiled["after"]["eval_loss"] == pytest.approx(plain["after"]["eval_loss"], rel=1e-5)


def test_a_run_that_is_resumed_in_mid_cycle_goes_on_with_the_same_bits(
    tiny_base: Path, texts: Path, tmp_path: Path
) -> None:
    more = (*CHECKPOINTED, "--offload_activations", "--token_tile_size", "16", "--save_steps", "3")
    train(tiny_base, texts, tmp_path / "whole", *more)
    train(tiny_base, texts, tmp_path / "resumed", *more, "--max_steps", "3")
    checkpoint = str(tmp_path / "resumed" / "checkpoint-3")
    train(tiny_base, texts, tmp_path / "resumed", *more, "--resume_from_checkpoint", checkpoint)
    assert_same_bits(tmp_path / "whole", tmp_path / "resumed")
    assert results_of(tmp_path / "resumed")["settings"]["offload_activations"] is True


def test_a_run_is_planned_as_it_was_asked_for_and_lets_go_at_its_end(tiny_base: Path, tmp_path: Path) -> None:
    more = ("--offload_activations", "--token_tile_size", "32", "--keep_activations", "1", "--token_ratio", "0.5")
    words = train_arguments(tiny_base, write_texts(tmp_path), tmp_path / "out", *CHECKPOINTED, *more)
    run = assemble(parse_train_arguments(words[1:]), Console(quiet=True))
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
