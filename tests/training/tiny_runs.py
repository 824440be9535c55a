"""Whole runs of `slivertune train`, small enough for a test."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensor
from transformers import LlamaForCausalLM

from slivertune.cli import main
from slivertune.deltas.delta_file import DELTA_FILE
from slivertune.training.assemble import Run, assemble
from slivertune.training.command_line.parse import parse_train_arguments
from slivertune.training.embedded.base_model import BaseRecipe, save_base_model, train_base_model
from tests.helpers.models import differing

TINY_RECIPE = BaseRecipe(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    max_positions=256,
    sequence_length=16,
    batch_size=2,
    num_steps=3,
)
EVALUATED_TOKENS = 4 * 128
"""That a loss of evaluation is the mean of, at most: a tenth of 40 rows is held out."""
TINY_CYCLE = 4
"""Updates in which each of its layers has a turn: the embedding, two blocks, the head."""

UNMEASURED = ("--memory_ledger", "off")
"""For runs whose bytes nobody looks at: plan and ledger take half of the time of a run as small as these."""

METHODS = ("dense", "hift")
COMBINATIONS = {
    "dense with tokens": ("--method", "dense", "--token_ratio", "0.4"),
    "hift with tokens": ("--method", "hift", "--preset", "paper", "--token_ratio", "0.4", "--token_pattern", "block"),
    "full": ("--method", "full"),
    "full in fp32 with tokens": (
        *("--method", "full", "--weights_dtype", "fp32", "--gradient_checkpointing", "false"),
        *("--token_ratio", "0.4"),
    ),
    "lora": ("--method", "lora", "--lora_rank", "4", "--lora_dropout", "0.1"),
    "lora with tokens": ("--method", "lora", "--lora_rank", "4", "--token_ratio", "0.4"),
    "sft": ("--method", "sft", "--density", "0.1", "--reselection_interval", "6"),
    "sft by momentum": (
        *("--method", "sft", "--density", "0.1", "--selection", "momentum", "--reselection_interval", "4"),
        *("--sft_momentum", "0.5", "--learning_rate", "0.1"),
    ),
    "sft with tokens": ("--method", "sft", "--density", "0.1", "--token_ratio", "0.4"),
    "sft in bf16, packed": (
        *("--method", "sft", "--equivalent_lora_rank", "2", "--reselection_interval", "6", "--bf16", "--packed"),
        *("--redistribute", "--train_embeddings"),
    ),
    "sft in 4 bits": ("--method", "sft", "--density", "0.1", "--reselection_interval", "6", "--load_in_4bit"),
    "sft in 4 bits and bf16 with tokens": (
        *("--method", "sft", "--num_weights", "1700", "--load_in_4bit", "--bf16", "--use_cpu", "--weight_decay", "0.1"),
        *("--token_ratio", "0.4", "--token_pattern", "block"),
    ),
    "qlora": ("--method", "lora", "--lora_rank", "4", "--load_in_4bit"),
    "qlora with tokens": (
        *("--method", "lora", "--lora_rank", "4", "--load_in_4bit"),
        *("--token_ratio", "0.4", "--token_pattern", "random"),
    ),
    "qlora in bf16 with tokens": (
        *("--method", "lora", "--lora_rank", "4", "--load_in_4bit", "--bf16", "--use_cpu"),
        *("--token_ratio", "0.4"),
    ),
}
"""Methods and what goes with them, as typed."""

CHECKPOINTED = ("--gradient_checkpointing", "true", "--max_steps", "8")
LORA = ("--method", "lora", "--lora_rank", "4", "--lora_dropout", "0.1")
CHECKPOINTED_METHODS = pytest.mark.parametrize(
    "method",
    [
        pytest.param(("--method", "hift", "--preset", "paper"), id="hift"),
        *(
            pytest.param(words, marks=pytest.mark.slow, id=words[1])
            for words in (("--method", "dense"), ("--method", "sft", "--density", "0.1"), LORA)
        ),
        pytest.param(
            ("--method", "hift", "--preset", "paper", "--token_ratio", "0.4"), marks=pytest.mark.slow, id="tokens"
        ),
    ],
)
"""For what changes how blocks are checkpointed, and no bit: every method, of which make test has one."""


def sentences(count: int) -> list[str]:
    """Texts that are alike and yet differ."""
    return [f"The {count - i}th of {count} sentences says that {i} and {i} make {2 * i}." for i in range(count)]


def make_tiny_base(folder: Path) -> Path:
    """Make a byte-level Llama of two blocks and its tokenizer, by the package's own code."""
    save_base_model(train_base_model(TINY_RECIPE, sentences(60), lambda step, loss: None), TINY_RECIPE, folder)
    return folder


def write_texts(folder: Path, count: int = 40) -> Path:
    """A jsonl file of sentences."""
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(count)), encoding="utf-8")
    return path


def train_arguments(base: Path, data: Path, output: Path, *more: str, method: str = "hift") -> list[str]:
    """A command line of few, small updates; `more` comes last and so has the last word."""
    return [
        "train",
        *("--method", method),
        *(("--preset", "paper") if method == "hift" and "--method" not in more else ()),
        *("--model_name_or_path", str(base)),
        *("--dataset", str(data)),
        *("--output_dir", str(output)),
        *("--max_length", "128"),
        *("--max_steps", "6"),
        *("--per_device_train_batch_size", "2"),
        *("--per_device_eval_batch_size", "4"),
        *("--learning_rate", "1e-2"),
        *("--sample_tokens", "4"),
        *("--report", "false"),
        *more,
    ]


def train(base: Path, data: Path, output: Path, *more: str, method: str = "hift") -> dict[str, Any]:
    """Run the command in this process; it must end well.

    Returns:
        What is in results.json.
    """
    assert main(train_arguments(base, data, output, *more, method=method)) == 0
    return results_of(output)


def results_of(output: Path) -> dict[str, Any]:
    """What is in the results.json of a run's folder."""
    results: dict[str, Any] = json.loads((output / "results.json").read_text(encoding="utf-8"))
    return results


def complaint(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int = 2) -> str:
    """Run the command in this process; what it says on standard error when it ends with a code."""
    assert main(arguments) == code
    return capsys.readouterr().err


class Runs:
    """Runs of the command over the tiny base, each in a folder of the test's own.

    Args:
        base: The base model.
        texts: The data of each run that names no others.
        folder: The folder in which each run has one of its own.
        capsys: Takes what the runs print.
    """

    def __init__(self, base: Path, texts: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.base = base
        self._texts = texts
        self._folder = folder
        self._capsys = capsys

    def __getitem__(self, name: str) -> Path:
        """Return the folder of the run of this name."""
        return self._folder / name

    def arguments(self, name: str, *more: str, method: str = "hift", data: Path | None = None) -> list[str]:
        """Return the command line of the run in the folder of this name."""
        return train_arguments(self.base, data or self._texts, self[name], *more, method=method)

    def train(self, name: str, *more: str, method: str = "hift", data: Path | None = None) -> dict[str, Any]:
        """Train in the folder of this name, which must end well, and return what is in results.json."""
        return train(self.base, data or self._texts, self[name], *more, method=method)

    def assembled(self, name: str, *more: str, method: str = "hift", data: Path | None = None) -> Run:
        """Assemble a run that is ready to start."""
        words = self.arguments(name, *more, method=method, data=data)
        return assemble(parse_train_arguments(words[1:]), Console(quiet=True))

    def complaint(self, *more: str, code: int = 2, method: str = "hift", data: Path | None = None) -> str:
        """Run the command, which must end with this code, and return what it says on standard error."""
        return complaint(self._capsys, self.arguments("out", *more, method=method, data=data), code)

    def printed(self) -> str:
        """Return what was printed since the last call."""
        return self._capsys.readouterr().out


def saved_weights(folder: Path) -> dict[str, Any]:
    """The tensors of a saved model, or of a saved adapter."""
    (path,) = folder.glob("*model.safetensors")
    return load_file(path)


def write_classes(folder: Path) -> Path:
    """A csv file of two kinds of texts, which their first letter tells apart."""
    path = folder / "classes.csv"
    rows = [f"{'aaaa' if index % 2 else 'bbbb'},{'odd' if index % 2 else 'even'}\n" for index in range(40)]
    path.write_text("text,label\n" + "".join(rows), encoding="utf-8")
    return path


def final_weights(output: Path) -> dict[str, Any]:
    """The tensors that a run saved at its end: its model, or SFT's deltas where there are only those."""
    return saved_weights(output / "model") if (output / "model").exists() else load_file(output / "delta" / DELTA_FILE)


def assert_same_bits(one: Path, other: Path) -> None:
    """Compare what two runs saved at their ends."""
    assert differing(final_weights(one), final_weights(other)) == []


def poison_losses(monkeypatch: pytest.MonkeyPatch, calls: set[int]) -> None:
    """Make a Llama's loss NaN in the given training forwards, counted from 1."""
    original = LlamaForCausalLM.forward
    count = 0

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        output = original(self, *args, **kwargs)
        # The plan of the run has forwards of its own, without data. The trial of the loss has some without gradients.
        if self.training and torch.is_grad_enabled() and not isinstance(output.loss, FakeTensor):
            count += 1
            if count in calls:
                output.loss = output.loss * float("nan")
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
