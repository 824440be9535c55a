import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from slivertune.core.layers import find_layers
from slivertune.training.command_line.parse import parse_train_arguments
from slivertune.training.folders import read_facts
from slivertune.training.methods import TrainingMethod, register_method
from slivertune.training.methods.dense import DenseMethod
from slivertune.training.methods.registry import TRAIN_METHODS
from slivertune.training.options.methods import METHOD_OPTIONS, MethodOptions
from tests.helpers.models import differing, tiny_llama
from tests.training.tiny_runs import Runs, saved_weights


@dataclass(frozen=True, kw_only=True)
class FirstLayersOptions:
    num_first_layers: int = field(default=1, metadata={"help": "first_layers: layers that are trained."})


class FirstLayersMethod(TrainingMethod):
    """All that the command asks of it, in one class."""

    about = MethodOptions(name="first_layers", help="the first layers alone", options_class=FirstLayersOptions)
    options: FirstLayersOptions

    @classmethod
    def embedded_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"learning_rate": 0.25, "num_first_layers": 2}

    def check(self, given: frozenset[str], training: TrainingArguments) -> None:
        if training.max_grad_norm > 2:
            raise ValueError("--max_grad_norm is too large for the first layers")

    def facts(self) -> dict[str, Any]:
        return {"first_layers": self.options.num_first_layers}

    def attach(self, trainer: Trainer) -> None:
        model: Any = trainer.model
        for layer in find_layers(model)[self.options.num_first_layers :]:
            for name in layer.parameter_names:
                model.get_parameter(name).requires_grad_(False)

    def lines(self) -> list[str]:
        return [f"  first   {self.options.num_first_layers} of the layers"]

    def settings(self) -> dict[str, Any]:
        return dataclasses.asdict(self.options)


@pytest.fixture(autouse=True)
def another_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    register_method(FirstLayersMethod)
    yield
    del TRAIN_METHODS["first_layers"], METHOD_OPTIONS["first_layers"]


def test_a_method_of_another_package_trains_and_reports_as_any(runs: Runs) -> None:
    words = ("--max_steps", "3", "--num_first_layers", "1", "--save_steps", "2")
    results = runs.train("out", *words, method="first_layers")
    assert (results["method"], results["num_steps"]) == ("first_layers", 3)
    assert results["settings"]["num_first_layers"] == 1
    changed = differing(saved_weights(runs.base), saved_weights(runs["out"] / "model"))
    assert changed == ["model.embed_tokens.weight"]
    out = runs.printed()
    assert ": first_layers on " in out and "\n  first   1 of the layers\n" in out
    (plan,) = re.findall("  memory  .*", out)
    assert "not planned" in plan and "first_layers" in plan
    assert results["planned_peak_bytes"] is None and results["measured_peak_bytes"] > 0
    assert re.search("^step    3  weights ", out, re.MULTILINE) is None, "a line comes after eight updates"
    checkpoint = runs["out"] / "checkpoint-2"
    assert read_facts(checkpoint)["first_layers"] == 1
    again = ("--num_first_layers", "2", "--resume_from_checkpoint", str(checkpoint))
    error = runs.complaint(*again, "--output_dir", str(runs["again"]), method="first_layers")
    assert "was trained with first_layers=1, and this run asks for first_layers=2" in error


def test_its_defaults_options_and_checks_are_those_of_the_command_line(runs: Runs) -> None:
    arguments = parse_train_arguments(["--method", "first_layers"])
    assert arguments.method.options == FirstLayersOptions(num_first_layers=2)
    assert arguments.training.learning_rate == 0.25 and arguments.training.output_dir == "runs/first_layers"
    given = parse_train_arguments(["--method", "first_layers", "--num_first_layers", "3", "--learning_rate", "1"])
    assert (given.method.options.num_first_layers, given.training.learning_rate) == (3, 1.0)
    for words, message in (
        (["--method", "dense", "--num_first_layers", "3"], "--num_first_layers: only --method first_layers reads"),
        (["--method", "first_layers", "--order", "random"], "--order: only --method hift reads this"),
        (["--method", "first_layers", "--load_in_4bit"], "--load_in_4bit does not go with --method first_layers"),
        (["--method", "first_layers", "--max_grad_norm", "3"], "--max_grad_norm is too large for the first layers"),
        (["--method", "first_layer"], "invalid choice: 'first_layer' (choose from"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            parse_train_arguments(words)
    with pytest.raises(SystemExit):
        parse_train_arguments(["--help"])
    text = runs.printed()
    assert "--method {dense,hift,sft,lora,first_layers,full}" in text
    assert "first_layers: the first layers alone" in " ".join(text.split())
    assert "\n--method first_layers, the first layers alone:\n  --num_first_layers" in text


def test_a_name_or_an_option_that_is_taken_is_refused() -> None:
    register_method(FirstLayersMethod)

    class OtherDense(TrainingMethod):
        about = MethodOptions(name="dense", help="another")

    class OtherOrder(FirstLayersMethod):
        about = replace(FirstLayersMethod.about, name="other_order")

    with pytest.raises(ValueError, match=r"another method is registered as 'dense'\. Choose another name"):
        register_method(OtherDense)
    with pytest.raises(ValueError, match=r"_layers is an option of --method first_layers\. Rename other_order's"):
        register_method(OtherOrder)
    assert list(TRAIN_METHODS) == ["dense", "hift", "sft", "lora", "first_layers"]


def test_dense_warns_of_bf16_weights_without_masters() -> None:
    assert DenseMethod().notes(tiny_llama(), learning_rate=1.0) == []
    (note,) = DenseMethod().notes(tiny_llama(torch.bfloat16), learning_rate=None)
    assert note.startswith("dense fine-tuning of bf16 weights keeps no fp32 masters")
