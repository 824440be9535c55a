import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slivertune.training import loss as loss_of_run
from slivertune.training.assemble import Run
from slivertune.training.embedded.base_model import VOCABULARY_SIZE
from slivertune.training.loss import attach_loss
from tests.chunked_loss.test_handle import NOT_SERVED, made
from tests.helpers.models import assert_same_bits, tiny_llama, twin, weights
from tests.helpers.tolerance import (
    assert_step_close,
    assert_sums_close,
    distance,
    exact_sums,
    step_limit,
    sum_limit,
    with_exact,
)
from tests.training.test_callbacks import make_trainer
from tests.training.tiny import byte_tokenizer, llama_config, prepared, sentiment_splits, splits_of, word_tokenizer
from tests.training.tiny_runs import COMBINATIONS, EVALUATED_TOKENS, Runs

CAP = 1e-4
"""Of the largest weight, after six updates: with a rate that is off by 1 % they are 2e-2 apart."""
CAP_OF_LOSSES = 1e-3
"""A chunk too few or too many changes a loss by a tenth and more."""
CAUSAL = prepared(splits_of({"text": ["a b c"] * 4}), byte_tokenizer(), llama_config(), task="causal_lm")


class LargestLogits(TorchDispatchMode):
    """The most elements of a floating-point result whose last dimension is the vocabulary."""

    def __init__(self, vocab: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab = vocab
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 3 and out.shape[-1] == self.vocab:
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.slow
def test_training_and_evaluation_hold_no_logits_and_end_where_the_plain_run_ends(tmp_path: Path) -> None:
    def trained(*, wanted: bool) -> dict[str, torch.Tensor]:
        model = tiny_llama()
        # Where a gradient is next to nothing, Adam's first step turns its rounding into a whole step.
        trainer = make_trainer(tmp_path, model=model, gradient_accumulation_steps=2, adam_epsilon=1e-4)
        handle = attach_loss(trainer, CAUSAL, pytest.fail, wanted=wanted)
        with LargestLogits(97) as seen:
            trainer.train()
            loss = trainer.evaluate()["eval_loss"]
        assert (seen.largest == 0) is wanted
        if handle is not None:
            handle.remove()
        return {**weights(model), "loss": torch.tensor(loss)}

    expected, exact = with_exact(lambda: trained(wanted=False))
    assert_step_close(trained(wanted=True), expected, exact, cap=CAP)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"label_smoothing_factor": 0.1}, "--label_smoothing_factor computes it outside the model"),
        ({"torch_compile": True}, "--torch_compile can't see into it"),
        ({"model": "gemma2"}, "the model reads its head's output outside of the loss function"),
        ({"model": "bamba"}, "the model reads its head's output outside of the loss function"),
        ({"model": "a term by its size alone"}, "its loss of two tokens is "),
        ({"model": "a term by its size alone, in training"}, "its loss of two tokens is "),
    ],
)
def test_a_loss_that_cant_be_chunked_is_said_in_one_line(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    options = dict(options)
    name = options.pop("model", None)
    model: Any = (made(NOT_SERVED[name][0]) if name else tiny_llama()).eval()
    before, said = twin(model), list[str]()
    assert attach_loss(make_trainer(tmp_path, model=model, **options), CAUSAL, said.append, wanted=True) is None
    (line,) = said
    assert line.startswith(f"note: the loss is computed from whole logits, not in chunks, since {reason}")
    assert "forward" not in vars(model.get_output_embeddings()) and not model.training  # type: ignore[operator]
    assert_same_bits(before, model)


def test_other_tasks_have_no_such_loss_and_nothing_is_said(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    task = prepared(sentiment_splits(), word_tokenizer(), llama_config(), task="classification")
    assert attach_loss(trainer, task, pytest.fail, wanted=True) is None
    assert attach_loss(trainer, CAUSAL, pytest.fail, wanted=False) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "hift",
        "hift with tokens",
        "sft with tokens",
        "lora",
        "qlora with tokens",
        "qlora in bf16 with tokens",
        "sft in 4 bits and bf16 with tokens",
    ],
)
def test_every_method_trains_alike_with_the_loss_in_chunks(name: str, runs: Runs) -> None:
    # Where a gradient is next to nothing, Adam's first step turns its rounding into a whole step.
    more = (*COMBINATIONS.get(name, ("--method", "hift")), "--adam_epsilon", "1e-4", "--logging_steps", "1")
    chunked = runs.train("chunked", *more)
    more = (*more, "--chunked_cross_entropy", "false")
    whole = runs.train("whole", *more)
    assert [each["settings"]["chunked_cross_entropy"] for each in (chunked, whole)] == [True, False]
    with exact_sums():
        exact = runs.train("exact", *more, "--memory_ledger", "off", "--sample_tokens", "0")
    found, expected = losses_of(chunked), losses_of(whole)
    # So few figures may be right by chance, and each is a mean over tokens.
    limit = max(step_limit(expected, losses_of(exact), cap=CAP_OF_LOSSES), sum_limit(EVALUATED_TOKENS, torch.float32))
    assert distance(found, expected) <= limit


def losses_of(results: dict[str, Any]) -> list[float]:
    """Those of the evaluations and of every update."""
    state = json.loads((Path(results["checkpoint"]) / "trainer_state.json").read_text(encoding="utf-8"))
    losses: list[float] = [line["loss"] for line in state["log_history"] if "loss" in line]
    assert len(losses) == results["num_steps"]
    return [results["before"]["eval_loss"], results["after"]["eval_loss"], *losses]


@pytest.mark.parametrize("words", [("--bf16",), ("--weights_dtype", "bf16"), ("--bf16", "--weights_dtype", "fp32"), ()])
def test_4_bit_weights_under_a_head_in_bf16_score_in_chunks_with_the_gradients_of_whole_logits(
    words: tuple[str, ...], runs: Runs
) -> None:
    more = ("--lora_rank", "4", "--load_in_4bit", "--use_cpu", *words)
    with closing(runs.assembled("out", *more, method="lora")) as run:
        assert run.loss is not None
        found = loss_and_gradients(run)
        run.loss.remove()
        expected, exact = with_exact(lambda: loss_and_gradients(run))
    # Of the same logits: the sum of a softmax over the vocabulary, and that over two rows of up to 128 tokens.
    losses = [each.pop("loss") for each in (found, expected, exact)]
    assert_sums_close(*losses[:2], VOCABULARY_SIZE + 2 * 128)
    assert all(bool(each.any()) for each in expected.values())
    # The same products in bf16, rounded at the same places; what differs is the order of the sums over the rows.
    assert_step_close(found, expected, exact, cap=1e-2 if "bf16" in " ".join(words) else 1e-5)


def loss_and_gradients(run: Run) -> dict[str, torch.Tensor]:
    """What the Trainer computes of the first batch, by name."""
    trainer, model = run.trainer, run.trainer.model
    assert model is not None
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, which would leave no gradient to half of the adapters
            torch.nn.init.normal_(parameter, std=0.1)
        parameter.grad = None
    batch = next(iter(trainer.get_train_dataloader()))
    with trainer.accelerator.autocast():
        loss: torch.Tensor = trainer.compute_loss(model, batch, num_items_in_batch=torch.tensor(50))
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("layout", ["fsdp2", "zero3"])
def test_a_head_whose_weight_is_shared_out_scores_whole_logits_and_says_so(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_of_run, "layout_of", lambda accelerator: layout)
    said: list[str] = []
    assert attach_loss(make_trainer(tmp_path), CAUSAL, said.append, wanted=True) is None
    assert len(said) == 1 and "the head's weight is sharded over the ranks" in said[0]
