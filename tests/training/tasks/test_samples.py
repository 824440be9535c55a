import ast
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from slivertune.training.tasks.samples import Probe, make_probe
from slivertune.training.tasks.task import Task
from tests.training.tiny import byte_tokenizer


def make_task(rows: list[dict[str, Any]], *, labels: dict[int, str] | None = None) -> Task:
    return Task(
        train_dataset=None, eval_dataset=rows, data_collator=None, model_kind="causal_lm",
        max_length=64, pad_token_id=0, id2label=labels,
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.fixture(scope="module")
def model_and_tokenizer(tiny_base: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(tiny_base), AutoTokenizer.from_pretrained(tiny_base)


def probe_of(
    model_and_tokenizer: tuple[Any, Any], rows: list[dict[str, Any]], asked: str | None = None, **options: Any
) -> Probe | None:
    """A question about the first of some rows, to what stands for a Trainer: the model and its autocast."""
    model, tokenizer = model_and_tokenizer
    trainer: Any = SimpleNamespace(model=model, accelerator=SimpleNamespace(autocast=nullcontext))
    task = make_task(rows, labels=options.pop("labels", None))
    return make_probe(trainer, task, tokenizer, asked=asked, **{"num_tokens": 3, **options})


def row_of(tokenizer: Any, *parts: tuple[str, bool]) -> dict[str, list[int]]:
    """Texts in one row, and which of them are learned."""
    row: dict[str, list[int]] = {"input_ids": [], "labels": []}
    for text, is_learned in parts:
        tokens = tokenizer(text)["input_ids"]
        row["input_ids"] += tokens
        row["labels"] += tokens if is_learned else [-100] * len(tokens)
    return row


TEXT = "A text of some length, whose beginning is the prompt, and that is long enough for that."


@pytest.mark.parametrize(
    ("parts", "asked", "options", "prompt", "expected"),
    [
        ([(TEXT, True)], None, {}, TEXT[: len(TEXT) // 2], None),
        ([("abcdefgh", True)], None, {}, "abcd", None),
        # One that nobody typed is cut to fit.
        ([], "a" * 70 + "b", {"cut": True}, "a" * 63, None),
        # A row that is all prompt, as long as a row may be: its end is what an answer follows.
        ([("a" * 10 + "b" * 54, False)], None, {}, "a" * 9 + "b" * 54, ""),
        # A packed row that begins in the midst of a response.
        ([("tail", True), ("Q: 1+1?\n", False), ("two", True), ("Q: next", False)], None, {}, "Q: 1+1?\n", "two"),
    ],
)
def test_the_prompt_is_the_beginning_of_a_text_or_what_the_labels_leave_out(
    parts: list[tuple[str, bool]],
    asked: str | None,
    options: dict[str, Any],
    prompt: str,
    expected: str | None,
    model_and_tokenizer: tuple[Any, Any],
) -> None:
    probe = probe_of(model_and_tokenizer, [row_of(model_and_tokenizer[1], *parts)], asked, **options)
    assert probe is not None
    assert (probe.prompt, probe.expected) == (prompt, expected)


def test_a_text_without_labels_is_continued_by_so_many_tokens(model_and_tokenizer: tuple[Any, Any]) -> None:
    tokenizer = model_and_tokenizer[1]
    probe = probe_of(model_and_tokenizer, [{"input_ids": tokenizer(TEXT)["input_ids"]}], num_tokens=5)
    assert probe is not None
    assert (probe.prompt, probe.expected) == (TEXT[: len(TEXT) // 2], None)
    assert len(tokenizer(probe.ask())["input_ids"]) <= 5 * 3, "five bytes, of which a broken one is shown by three"


class Repeats(nn.Module):
    """Stands for a language model, and repeats what it is given."""

    device = torch.device("cpu")

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return input_ids.repeat(1, 2)


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(("asked", "rest"), [("a b", "a b"), ("<bos>a b", "a b"), ("<bos> <bos>a", "a"), ("<bos>", "")])
def test_a_prompt_has_the_bos_that_the_tokenizer_adds_once(asked: str, rest: str, adds_bos: bool) -> None:
    tokenizer = byte_tokenizer(bos=adds_bos)
    probe = probe_of((Repeats(), tokenizer), [], asked)
    assert probe is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "decode", lambda ids, **options: tokenizer.convert_ids_to_tokens(ids))
        tokens = ast.literal_eval(probe.ask())
    expected = ["<bos>", *tokenizer.tokenize(rest)] if adds_bos else tokenizer.tokenize(asked)
    assert tokens == expected


def test_asking_is_repeatable_and_leaves_randomness_and_mode_alone(model_and_tokenizer: tuple[Any, Any]) -> None:
    model, _ = model_and_tokenizer
    probe = probe_of(model_and_tokenizer, [], "The ", num_tokens=20)
    assert probe is not None
    state = torch.random.get_rng_state()
    answers = set()
    for mode in (True, False):
        model.train(mode)
        answers.add(probe.ask())
        assert model.training is mode
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(1)
    assert len({*answers, probe.ask()}) == 1


def test_no_tokens_ask_nothing(model_and_tokenizer: tuple[Any, Any]) -> None:
    assert probe_of(model_and_tokenizer, [], num_tokens=0) is None


@pytest.mark.parametrize(
    ("asked", "labels", "message"),
    [
        ("", None, "sample_prompt has 0 tokens"),
        ("x" * 64, None, "sample_prompt has 64 tokens, and must have 1 or more and fewer than max_length=64"),
        ("x", {0: "no"}, "sample_prompt='x' is for language modelling"),
    ],
)
def test_a_prompt_that_can_not_be_asked_is_refused(
    asked: str, labels: dict[int, str] | None, message: str, model_and_tokenizer: tuple[Any, Any]
) -> None:
    with pytest.raises(ValueError, match=message):
        probe_of(model_and_tokenizer, [], asked, labels=labels)
