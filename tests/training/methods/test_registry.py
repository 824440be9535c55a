import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from slivertune.core.layers import find_layers
from slivertune.training.methods import TrainingMethod, register_train_method
from slivertune.training.methods.dense import DenseMethod
from slivertune.training.methods.registry import TRAIN_METHODS
from slivertune.training.options.parse import parse_train_arguments
from slivertune.training.output.folders import read_facts
from tests.helpers.models import differing, tiny_llama
from tests.training.tiny_runs import complaint, saved_weights, train, train_arguments


class RandomLayersAdamW(torch.optim.AdamW):
    """AdamW that steps layers drawn anew for every update, and forgets the gradients of all others."""

    def __init__(self, params: Any, *, layers: list[list[nn.Parameter]], num_layers: int, seed: int, lr: float) -> None:
        super().__init__(params, lr=lr)
        self._layers, self._num_layers = layers, num_layers
        self._generator = torch.Generator().manual_seed(seed)
        self.drawn: list[list[int]] = []

    def step(self, closure: Any = None) -> Any:
        self.drawn.append(torch.randperm(len(self._layers), generator=self._generator)[: self._num_layers].tolist())
        for index, layer in enumerate(self._layers):
            for parameter in layer if index not in self.drawn[-1] else ():
                parameter.grad = None
        return super().step(closure)


@dataclass(frozen=True, kw_only=True)
class RandomLayersOptions:
    num_random_layers: int = field(default=1, metadata={"help": "random_layers: layers that an update trains."})


class RandomLayersMethod(TrainingMethod):
    """All that the command asks of it, in one class."""

    name = "random_layers"
    help = "layers drawn for each update"
    options_class = RandomLayersOptions
    options: RandomLayersOptions

    @classmethod
    def embedded_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"learning_rate": 0.25, "num_random_layers": 2}

    def check(self, given: frozenset[str], training: TrainingArguments) -> None:
        if training.max_grad_norm > 2:
            raise ValueError("--max_grad_norm is too large for random layers")

    def facts(self) -> dict[str, Any]:
        return {"random_layers": self.options.num_random_layers}

    def attach(self, trainer: Trainer) -> None:
        model: Any = trainer.model
        parameters = dict(model.named_parameters())
        layers = [[parameters[name] for name in layer.parameter_names] for layer in find_layers(model)]
        kwargs = {"layers": layers, "num_layers": self.options.num_random_layers, "seed": trainer.args.seed}
        trainer.optimizer_cls_and_kwargs = (RandomLayersAdamW, {**kwargs, "lr": trainer.args.learning_rate})
        self.optimizer: Any = trainer.create_optimizer()

    def lines(self) -> list[str]:
        return [f"  drawn   {self.options.num_random_layers} of the layers for each update"]

    def settings(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.options), "drawn": self.optimizer.drawn}


@pytest.fixture(autouse=True)
def another_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    register_train_method(RandomLayersMethod)
    yield
    del TRAIN_METHODS["random_layers"]


def test_a_method_of_another_package_trains_and_reports_as_any(
    tiny_base: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--max_steps", "3", "--num_random_layers", "1", "--save_steps", "2")
    results = train(tiny_base, texts, tmp_path / "out", *words, method="random_layers")
    assert (results["method"], results["num_steps"]) == ("random_layers", 3)
    drawn = results["settings"]["drawn"]
    assert results["settings"]["num_random_layers"] == 1 and [len(each) for each in drawn] == [1, 1, 1]
    base, trained = saved_weights(tiny_base), saved_weights(tmp_path / "out" / "model")
    changed = differing(base, trained)
    kinds = ["embed", "layers.0.", "layers.1.", "lm_head"]
    assert {index for index, kind in enumerate(kinds) if any(kind in name for name in changed)} == {
        index for (index,) in drawn
    }
    out = capsys.readouterr().out
    assert ": random_layers on " in out and "\n  drawn   1 of the layers for each update\n" in out
    (plan,) = re.findall("  memory  .*", out)
    assert "not planned" in plan and "random_layers" in plan
    assert results["planned_peak_bytes"] is None and results["measured_peak_bytes"] > 0
    assert re.search("^step    3  weights ", out, re.MULTILINE) is None, "a line comes after eight updates"
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert read_facts(checkpoint)["random_layers"] == 1
    again = ("--num_random_layers", "2", "--resume_from_checkpoint", str(checkpoint))
    error = complaint(capsys, train_arguments(tiny_base, texts, tmp_path / "again", *again, method="random_layers"))
    assert "was trained with random_layers=1, and this run asks for random_layers=2" in error


def test_its_defaults_options_and_checks_are_those_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parse_train_arguments(["--method", "random_layers"])
    assert arguments.method.options == RandomLayersOptions(num_random_layers=2)
    assert arguments.training.learning_rate == 0.25 and arguments.training.output_dir == "runs/random_layers"
    given = parse_train_arguments(["--method", "random_layers", "--num_random_layers", "3", "--learning_rate", "1"])
    assert (given.method.options.num_random_layers, given.training.learning_rate) == (3, 1.0)
    for words, message in (
        (["--method", "dense", "--num_random_layers", "3"], "--num_random_layers: only --method random_layers reads"),
        (["--method", "random_layers", "--order", "random"], "--order: only --method hift reads this"),
        (["--method", "random_layers", "--load_in_4bit"], "--load_in_4bit does not go with --method random_layers"),
        (["--method", "random_layers", "--max_grad_norm", "3"], "--max_grad_norm is too large for random layers"),
        (["--method", "random_layer"], "invalid choice: 'random_layer' (choose from"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            parse_train_arguments(words)
    with pytest.raises(SystemExit):
        parse_train_arguments(["--help"])
    text = capsys.readouterr().out
    assert "--method {dense,hift,sft,lora,random_layers}" in text
    assert "random_layers: layers drawn for each update" in " ".join(text.split())
    assert "\n--method random_layers, layers drawn for each update:\n  --num_random_layers" in text


def test_a_name_or_an_option_that_is_taken_is_refused() -> None:
    register_train_method(RandomLayersMethod)

    class OtherDense(TrainingMethod):
        name = "dense"

    class OtherOrder(RandomLayersMethod):
        name = "other_order"

    with pytest.raises(ValueError, match="another method is registered as 'dense'; choose another name"):
        register_train_method(OtherDense)
    with pytest.raises(ValueError, match="--num_random_layers is read by --method random_layers; name other_order's"):
        register_train_method(OtherOrder)
    assert list(TRAIN_METHODS) == ["dense", "hift", "sft", "lora", "random_layers"]


def test_dense_warns_of_bf16_weights_without_masters() -> None:
    assert DenseMethod().notes(tiny_llama(), learning_rate=1.0) == []
    (note,) = DenseMethod().notes(tiny_llama(torch.bfloat16), learning_rate=None)
    assert note.startswith("dense fine-tuning of bf16 weights keeps no fp32 masters")
