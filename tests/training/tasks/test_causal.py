import logging
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, T5Config

from slivertune.training.tasks.task import Task
from slivertune.training.tasks.tokenization import IGNORED
from tests.helpers.tolerance import step_limit, sum_limit, with_exact
from tests.training.tiny import (
    byte_tokenizer,
    llama_config,
    prepared,
    splits_from,
    splits_of,
    trainer_of,
    word_tokenizer,
)

EOS = 0
TEXTS = ["short", "a text of thirty characters ...", "mid length text"]
PAIRS = {"prompt": ["name[Aro]", "area[north], food[thai]"], "response": ["Aro it is.", "Thai food up north."]}


NAMED = {"prompt_column": "prompt", "response_column": "response"}
"""Columns that a user named are read strictly: what can't be used is an error, until it is asked to be left out."""


def causal(data: dict[str, list[str]], tokenizer: PreTrainedTokenizerFast | None = None, **options: Any) -> Task:
    return prepared(splits_of(data), tokenizer or byte_tokenizer(), llama_config(), **options)


def decoded(tokenizer: PreTrainedTokenizerFast, row: dict[str, list[int]]) -> str:
    return tokenizer.decode([label for label in row["labels"] if label != IGNORED])


@pytest.mark.parametrize("bos", [False, True])
def test_a_document_ends_with_the_end_of_text_token_and_begins_as_the_tokenizer_says(bos: bool) -> None:
    tokenizer = byte_tokenizer(bos=bos)
    task = causal({"text": TEXTS}, tokenizer)
    expected = [("<bos>" if bos else "") + text + "<eos>" for text in TEXTS]
    assert [tokenizer.decode(ids) for ids in task.train_dataset["input_ids"]] == expected
    assert task.train_dataset.column_names == ["input_ids"]
    assert (task.model_kind, task.compute_metrics) == ("causal_lm", None)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("bos", [False, True])
def test_special_tokens_that_texts_have_themselves_are_there_once(bos: bool, packing: bool) -> None:
    tokenizer = byte_tokenizer(bos=bos)
    begin = "<bos>" if bos else ""
    written = {"text": [f"{begin}a text<eos>", f"{begin}{begin}another<eos>\n<eos>", "a third"]}
    plain = {"text": ["a text", "another", "a third"]}
    options = {"packing": packing, "max_length": 10 if packing else 64}
    task, expected = causal(written, tokenizer, **options), causal(plain, tokenizer, **options)
    assert list(task.train_dataset["input_ids"]) == list(expected.train_dataset["input_ids"])
    tokens = "'<bos>' or '<eos>'" if bos else "'<eos>'"
    assert f"2 of 3 train rows: the text already has {tokens}, which each row gets anyway. The row has it once" in (
        task.notes
    )
    assert not any("the text already has" in note for note in expected.notes)


def test_special_tokens_inside_a_text_stay() -> None:
    task = causal({"text": ["<bos>a<eos><bos>b", "c"]}, byte_tokenizer(bos=True))
    assert byte_tokenizer().decode(task.train_dataset[0]["input_ids"]) == "<bos>a<eos><bos>b<eos>"


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("options", [{}, NAMED])
def test_special_tokens_that_prompts_and_responses_have_themselves_are_there_once(
    options: dict[str, str], bos: bool, packing: bool
) -> None:
    tokenizer = byte_tokenizer(bos=bos)
    tokenizer.bos_token = "<bos>"
    # A tokenizer that adds no BOS leaves the one of the prompt; inside of a row there is none.
    begin = "" if bos else "<bos>"
    written = {"prompt": ["<bos>one", "<bos><bos>two<eos>"], "response": ["<bos>1<eos>", "2 <eos> \n"]}
    plain = {"prompt": [f"{begin}one", f"{begin}two<eos>"], "response": ["1", "2 "]}
    options = {**options, "packing": packing, "max_length": 14 if packing else 64}
    task, expected = causal(written, tokenizer, **options), causal(plain, tokenizer, **options)
    assert list(task.train_dataset) == list(expected.train_dataset)
    assert any(note.startswith("2 of 2 train rows: the text already has '<bos>' or '<eos>'") for note in task.notes)


@pytest.mark.parametrize("max_length", [2, 5, 11, 16, 32])
def test_a_long_document_is_cut_so_that_every_token_is_predicted_once(max_length: int) -> None:
    tokenizer = byte_tokenizer()
    rows = causal({"text": TEXTS}, tokenizer, max_length=max_length).train_dataset["input_ids"]
    assert all(2 <= len(row) <= max_length for row in rows)
    # A model predicts all but the first token of a row.
    predicted = [token for row in rows for token in row[1:]]
    assert predicted == [token for text in TEXTS for token in [*tokenizer(text)["input_ids"], EOS][1:]]


def test_packed_documents_are_one_stream_cut_into_equal_blocks(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer()
    with caplog.at_level(logging.INFO, "slivertune"):
        task = causal({"text": TEXTS}, tokenizer, packing=True, max_length=8)
    stream = [token for text in TEXTS for token in [*tokenizer(text)["input_ids"], EOS]]
    blocks = list(task.train_dataset["input_ids"])
    assert blocks == [stream[start : start + 8] for start in range(0, len(stream) - 7, 8)]
    left_over = len(stream) - 8 * len(blocks)
    assert left_over > 0
    assert f"into {len(blocks)} blocks of 8 tokens; {left_over} of {len(stream)} tokens were left over" in caplog.text
    batch = task.data_collator(list(task.train_dataset))
    assert batch["input_ids"].shape == (len(blocks), 8) and "attention_mask" not in batch


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("separator", ["\n", " -> ", ": ", ""])
def test_only_the_response_carries_a_loss(separator: str, bos: bool) -> None:
    # Merges that reach over the end of the prompt (": A" -> ":", " A") must not put a response token into the prompt.
    corpus = [p + separator + r for p, r in zip(*PAIRS.values(), strict=True)] * 5
    tokenizer = byte_tokenizer(corpus=corpus, bos=bos)
    task = causal(PAIRS, tokenizer, response_separator=separator, max_length=64)
    for index, row in enumerate(task.train_dataset):
        prompt, response = PAIRS["prompt"][index] + separator, PAIRS["response"][index]
        assert tokenizer.decode(row["input_ids"]) == ("<bos>" if bos else "") + prompt + response + "<eos>"
        text = decoded(tokenizer, row)
        assert text.endswith(response + "<eos>")
        labels = [label for label in row["labels"] if label != IGNORED]
        assert labels == row["input_ids"][-len(labels) :]
        # A token that spans the border belongs to the response, and no other of the prompt does.
        assert (prompt + response + "<eos>").endswith(text)
        assert len(tokenizer.decode(labels[1:])) < len(response + "<eos>")


def test_packed_prompts_stay_silent_and_blocks_without_a_loss_are_left_out() -> None:
    tokenizer = byte_tokenizer()
    data = {"prompt": ["p" * 20, "q"], "response": ["one", "two"]}
    (row,) = causal(data, tokenizer, packing=True, max_length=26).train_dataset
    assert tokenizer.decode(row["input_ids"]) == "p" * 20 + "\none<eos>q"
    assert decoded(tokenizer, row) == "one<eos>"
    # Rows of 20, 7 and (cut) 26 tokens: the second block is an end-of-text token, which as first token of a block is
    # predicted by nothing, and 25 tokens of a prompt.
    data = {"prompt": ["p" * 14, "q", "r" * 24], "response": ["abcd", "abcd", "xyz"]}
    (row,) = causal(data, tokenizer, packing=True, max_length=26, truncate=True).train_dataset
    assert decoded(tokenizer, row) == "abcd<eos>abcd"


def test_cutting_a_long_response_row_is_asked_for_and_said(caplog: pytest.LogCaptureFixture) -> None:
    rows = causal(PAIRS, max_length=30, truncate=True).train_dataset
    assert [len(ids) for ids in rows["input_ids"]] == [21, 30]
    assert decoded(byte_tokenizer(), rows[1]) == "Thai f"
    assert "1 of 2 rows of the train split are longer than max_length=30 tokens, the longest has 44; they are cut" in (
        caplog.text
    )
    # What is cut to a prompt without a response is not trained on.
    assert len(causal(PAIRS, max_length=24, truncate=True, skip_empty_rows=True, **NAMED).train_dataset) == 1
    assert "they are left out" in caplog.text


def test_only_so_many_rows_as_asked_for_are_used() -> None:
    task = causal({"text": TEXTS}, max_train_samples=2, max_eval_samples=1)
    assert (len(task.train_dataset), len(task.eval_dataset)) == (2, 1)


def test_several_processes_make_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    whole = datasets.Dataset.map

    def recorded(rows: datasets.Dataset, *arguments: Any, **options: Any) -> Any:
        asked.append(options.get("num_proc"))
        return whole(rows, *arguments, **options)

    monkeypatch.setattr(datasets.Dataset, "map", recorded)
    alone, shared = (causal({"text": TEXTS * 4}, max_length=9, preprocessing_num_workers=n) for n in (None, 2))
    assert list(alone.train_dataset["input_ids"]) == list(shared.train_dataset["input_ids"])
    assert asked == [None, None, 2, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"splits": splits_of({"text": TEXTS}, {"words": TEXTS})},
            "the eval split has no column 'text', which the train split has",
        ),
        (
            {"tokenizer": word_tokenizer()},
            r"has no EOS token to end a text.*eos_token in .*tokenizer_config\.json",
        ),
        ({"config": T5Config()}, r"t5 is an encoder-decoder\. Choose another model"),
        ({"max_length": 65}, "max_length=65 is more than the 64 positions of the model"),
        (
            {"packing": True, "max_length": 60},
            "the train split has 54 tokens, too few for a packed block of max_length=60",
        ),
        (
            {"splits": splits_of(PAIRS), "max_length": 24},
            r"1 of 2 rows of the train split are longer than max_length=24 tokens \(row 1, counted from 0, with 44 ",
        ),
        (
            {"splits": splits_of(PAIRS), "max_length": 24, "truncate": True, **NAMED},
            r"1 of 2 rows .* leave no room for a response in max_length=24 tokens \(row 1,",
        ),
        (
            {"splits": splits_of(PAIRS), "chat_template": "{{ messages[0].content }}", **NAMED},
            r"2 of 2 rows of the train split can't be used \(the chat template .* 'assistant'\) \(rows 0, 1, ",
        ),
    ],
)
def test_what_can_not_be_trained_so_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"splits": splits_of({"text": TEXTS}), "tokenizer": byte_tokenizer(), "config": llama_config()}
    with pytest.raises(ValueError, match=message):
        prepared(**{**given, **changes})


def test_the_restaurant_descriptions_become_prompts_and_responses(shared_data: Path) -> None:
    splits, tokenizer = splits_from(shared_data / "e2e" / "devset.csv"), byte_tokenizer()
    task = prepared(splits, tokenizer, llama_config(positions=1024), max_train_samples=50, max_eval_samples=5)
    for row, source in zip(task.train_dataset, splits["train"], strict=False):
        assert tokenizer.decode(row["input_ids"]) == f"{source['mr']}\n{source['ref']}<eos>"
        assert decoded(tokenizer, row) == f"{source['ref']}<eos>"


@pytest.mark.parametrize("batch_size", [3, 1])
def test_a_model_whose_name_hides_that_it_shifts_labels_gets_the_mean_over_predicted_tokens(
    batch_size: int, tmp_path: Path
) -> None:
    # The Trainer divides the loss of GPT2LMHeadModel by all labels, of a ...ForCausalLM by all but the first of a row.
    task = causal({"text": ["a text", "bc text"]})
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=400, n_embd=16, n_layer=1, n_head=2, n_positions=16, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    trainer = trainer_of(task, model, tmp_path, per_device_eval_batch_size=batch_size)

    def losses_of_tokens() -> list[list[float]]:
        losses = []
        for row in task.eval_dataset["input_ids"]:
            with torch.no_grad():
                log_probabilities = model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
            losses.append([-float(log_probabilities[place, token]) for place, token in enumerate(row[1:])])
        return losses

    losses, exact = with_exact(losses_of_tokens)
    # One batch: the mean over tokens; batches of one row: the mean over rows.
    expected = np.mean(np.concatenate(losses)) if batch_size == 3 else np.mean([np.mean(row) for row in losses])
    # A mean is no farther off than the farthest of its terms, and by its own rounding.
    terms = np.concatenate(losses).tolist()
    limit = step_limit(terms, np.concatenate(exact).tolist(), cap=1e-5) + sum_limit(len(terms), torch.float32)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=0, abs=limit * max(terms))
