"""Runs whose frozen weights are parked: the same bits wherever they are, resumed too, and saved exact."""

import re
from typing import Any

import pytest

from slivertune.parked.checkpoint_source import CheckpointTensor
from slivertune.parked.quantized_weight import held_by
from tests.helpers.models import differing
from tests.training.tiny_runs import UNMEASURED, Runs, assert_same_bits, final_weights

MORE = ("--max_length", "32", "--save_steps", "3", "--use_cpu", *UNMEASURED)
DENSITY = {"lora": (), "sft": ("--density", "0.1")}
HOST = ("--weights", "host", "--resident_bytes", "0")


@pytest.mark.parametrize("method", ["lora", "sft"])
@pytest.mark.parametrize("waiting", [(), ("--waiting", "int8")], ids=["exact", "int8"])
def test_a_run_has_the_same_bits_wherever_its_weights_are_and_resumes_with_them(
    method: str, waiting: Any, runs: Runs
) -> None:
    base = (*MORE, *DENSITY[method])
    # Without options, SFT would add its deltas to the weights.
    whole = runs.train("here", *base, *waiting, *(("--weights", "host") if method == "sft" else ()), method=method)
    runs.printed()
    runs.train("host", *base, *waiting, *HOST, "--gradient_checkpointing", "true", method=method)
    form = "linear ones in int8, also in evaluation" if waiting else "exact"
    assert f"frozen tensors of the blocks, {form}, on the host" in " ".join(runs.printed().split())
    assert_same_bits(runs["host"], runs["here"])
    again = ("--resume_from_checkpoint", str(runs["host"] / "checkpoint-3"))
    resumed = runs.train("again", *base, *waiting, *HOST, *again, method=method)
    assert_same_bits(runs["again"], runs["here"])
    assert resumed["after"] == whole["after"]
    other = runs.train("other", *base, *(() if waiting else ("--waiting", "int8")), method=method)
    assert other["after"] != whole["after"], "the codes have other losses"
    assert differing(final_weights(runs["other"]), final_weights(runs["here"])) != []
    changed = runs.complaint(*base, "--waiting", "nf4", *again, method=method)
    assert "was trained with waiting=" in changed and "asks for waiting=nf4" in changed


@pytest.mark.parametrize("method", ["lora", "sft"])
def test_exact_weights_stay_in_the_files_of_the_base(method: str, runs: Runs) -> None:
    run = runs.assembled("run", *MORE, *DENSITY[method], "--waiting", "int8", method=method)
    model: Any = run.trainer.model
    held = [each for each in map(held_by, model.modules()) if each is not None]
    assert held and all(isinstance(each.source, CheckpointTensor) for each in held)
    run.close()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("method", "words", "message"),
    [
        ("dense", ("--waiting", "nf4"), "--waiting nf4: --method dense trains all weights.*Use --method hift or sft"),
        ("dense", ("--weights", "host"), "--weights host: --method dense trains all weights"),
        ("lora", ("--weights", "host", "--deepspeed", "zero.json"), "--weights host is not available under deepspeed"),
        ("sft", ("--waiting", "int8", "--torch_compile", "true"), "--waiting int8 does not go with --torch_compile"),
        ("lora", ("--weights", "host", "--load_in_4bit", "true"), "--weights host does not go with --load_in_4bit"),
        ("lora", ("--resident_bytes", "-1"), "resident_bytes"),
        ("sft", ("--device_bytes", "1GiB"), "--device_bytes 1073741824 is for weights on the host. Set --weights host"),
        ("lora", (*HOST[:2], "--device_bytes", "1GiB", "--resident_bytes", "2GiB"), "does not fit into device_bytes="),
        (
            "sft",
            ("--waiting", "int8", "--train_embeddings", "true"),
            "--train_embeddings adds deltas to",
        ),
        ("dense", ("--device_bytes", "1GiB"), "--device_bytes 1073741824: --method dense trains all weights"),
    ],
)
def test_what_can_not_be_parked_is_refused_before_anything_is_loaded(
    method: str, words: Any, message: str, runs: Runs
) -> None:
    assert re.search(message, " ".join(runs.complaint(*words, method=method).split()))
