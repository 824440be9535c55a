from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slivertune.training.tasks.samples import make_probe
from slivertune.training.tasks.task import Task


def make_task(rows: list[dict[str, Any]], *, labels: dict[int, str] | None = None) -> Task:
    return Task(
        train_dataset=None, eval_dataset=rows, data_collator=None, model_kind="causal_lm",
        max_length=64, pad_token_id=0, id2label=labels,
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.fixture(scope="module")
def language_model(tiny_base: Path) -> tuple[Any, Any]:
    """Stands for a Trainer, of which a probe needs the model and its autocast alone; and the tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    trainer = SimpleNamespace(model=model, accelerator=SimpleNamespace(autocast=nullcontext))
    return trainer, AutoTokenizer.from_pretrained(tiny_base)


def test_a_text_is_continued_from_its_beginning(language_model: tuple[Any, Any]) -> None:
    trainer, tokenizer = language_model
    text = "A text of some length, whose beginning is the prompt, and that is long enough for that."
    task = make_task([{"input_ids": tokenizer(text)["input_ids"]}])
    probe = make_probe(trainer, task, tokenizer, asked=None, num_tokens=5)
    assert probe is not None
    assert text.startswith(probe.prompt) and len(probe.prompt) == len(text) // 2
    assert probe.expected is None
    assert len(tokenizer(probe.ask())["input_ids"]) <= 5 * 3, "five bytes, of which a broken one is shown by three"


def test_a_prompt_that_nobody_typed_is_cut_to_fit(language_model: tuple[Any, Any]) -> None:
    trainer, tokenizer = language_model
    probe = make_probe(trainer, make_task([]), tokenizer, asked="a" * 70 + "b", num_tokens=3, cut=True)
    assert probe is not None and probe.prompt == "a" * 63
    # A row that is all prompt, as long as a row may be: its end is what an answer follows.
    row = {"input_ids": tokenizer("a" * 10 + "b" * 54)["input_ids"], "labels": [-100] * 64}
    probe = make_probe(trainer, make_task([row]), tokenizer, asked=None, num_tokens=3)
    assert probe is not None and probe.prompt == "a" * 9 + "b" * 54


def test_a_row_that_is_learned_as_a_whole_is_continued_from_its_beginning(language_model: tuple[Any, Any]) -> None:
    trainer, tokenizer = language_model
    ids = tokenizer("abcdefgh")["input_ids"]
    probe = make_probe(trainer, make_task([{"input_ids": ids, "labels": ids}]), tokenizer, asked=None, num_tokens=3)
    assert probe is not None and (probe.prompt, probe.expected) == ("abcd", None)


def test_asking_is_repeatable_and_leaves_randomness_and_mode_alone(language_model: tuple[Any, Any]) -> None:
    trainer, tokenizer = language_model
    probe = make_probe(trainer, make_task([]), tokenizer, asked="The ", num_tokens=20)
    assert probe is not None
    state = torch.random.get_rng_state()
    answers = set()
    for mode in (True, False):
        trainer.model.train(mode)
        answers.add(probe.ask())
        assert trainer.model.training is mode
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(1)
    answers.add(probe.ask())
    assert len(answers) == 1


def test_a_prompt_and_its_response_are_told_apart_by_the_labels(language_model: tuple[Any, Any]) -> None:
    trainer, tokenizer = language_model
    # A packed row that begins in the midst of a response.
    parts = [("tail", True), ("Q: 1+1?\n", False), ("two", True), ("Q: next", False)]
    ids, labels = [], []
    for text, is_response in parts:
        tokens = tokenizer(text)["input_ids"]
        ids += tokens
        labels += tokens if is_response else [-100] * len(tokens)
    probe = make_probe(trainer, make_task([{"input_ids": ids, "labels": labels}]), tokenizer, asked=None, num_tokens=3)
    assert probe is not None
    assert (probe.prompt, probe.expected) == ("Q: 1+1?\n", "two")


def test_no_tokens_ask_nothing(language_model: tuple[Any, Any]) -> None:
    trainer, tokenizer = language_model
    assert make_probe(trainer, make_task([]), tokenizer, asked=None, num_tokens=0) is None


@pytest.mark.parametrize(
    ("asked", "labels", "message"),
    [
        ("", None, "sample_prompt has 0 tokens"),
        ("x" * 64, None, "sample_prompt has 64 tokens; it must have at least 1, and fewer than max_length=64"),
        ("x", {0: "no"}, "sample_prompt='x' is for language modelling"),
    ],
)
def test_a_prompt_that_can_not_be_asked_is_refused(
    asked: str, labels: dict[int, str] | None, message: str, language_model: tuple[Any, Any]
) -> None:
    trainer, tokenizer = language_model
    with pytest.raises(ValueError, match=message):
        make_probe(trainer, make_task([], labels=labels), tokenizer, asked=asked, num_tokens=3)
