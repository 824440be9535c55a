"""A task that another package brings: a model class, a collator and a loss of its own, trained by every method."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import BertModel, BertPreTrainedModel, EvalPrediction, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_outputs import SequenceClassifierOutput

from slivertune.cli import main
from slivertune.training.data.columns import ROW_COLUMN, usable_rows
from slivertune.training.options.arguments import DataArguments
from slivertune.training.options.tasks import TASK_OPTIONS
from slivertune.training.tasks import prepare
from slivertune.training.tasks.prepare import register_train_task
from slivertune.training.tasks.task import PaddingCollator, Task
from slivertune.training.tasks.tokenization import Columns, encode_rows, padding_id, resolve_max_length
from tests.helpers.ranks import quick
from tests.training.tiny import bert_config, word_tokenizer
from tests.training.tiny_runs import results_of

PAIRS = {
    "name": ["a good film", "it was bad", "yes", "a play , a play", "no", "b c d"],
    "text": ["great film .", "it was terrible", "yes , yes", "good play", "no ? no no no", "d d"],
}
NAMES = tuple(PAIRS)


class TextEmbedder(BertPreTrainedModel):  # type: ignore[misc]
    """The mean over a text's tokens; a batch is names and below them their texts, which the loss brings together."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> SequenceClassifierOutput:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        names, texts = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).chunk(2)
        loss = None if labels is None else F.cross_entropy(20 * names @ texts.T, labels)
        return SequenceClassifierOutput(loss=loss, logits=torch.stack((names, texts), dim=1))


def collate(rows: list[dict[str, Any]], pad_token_id: int) -> dict[str, torch.Tensor]:
    sides = [{"input_ids": row["input_ids"][side]} for side in range(2) for row in rows]
    return {**PaddingCollator(pad_token_id=pad_token_id)(sides), "labels": torch.arange(len(rows))}


def first_hits(prediction: EvalPrediction) -> dict[str, float]:
    names, texts = np.moveaxis(np.asarray(prediction.predictions), 1, 0)
    return {"accuracy": float(np.mean((names @ texts.T).argmax(1) == np.arange(len(names))))}


def encode(batch: Columns, tokenizer: PreTrainedTokenizerBase) -> Columns:
    pairs = list(zip(*(tokenizer(batch[name])["input_ids"] for name in NAMES), strict=True))
    return {"input_ids": pairs, "length": [max(map(len, pair)) for pair in pairs], ROW_COLUMN: batch[ROW_COLUMN]}


def prepare_pairs(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, splits: Mapping[str, Any]
) -> Task:
    encoded = {
        split: encode_rows(
            usable_rows(splits[split], NAMES, args, split=split),
            partial(encode, tokenizer=tokenizer),
            description=split,
        ).select_columns(["input_ids"])
        for split in ("train", "eval")
    }
    return Task(
        train_dataset=encoded["train"],
        eval_dataset=encoded["eval"],
        data_collator=partial(collate, pad_token_id=padding_id(tokenizer)),
        compute_metrics=first_hits,
        model_kind=TextEmbedder,
        max_length=resolve_max_length(args.max_length, config, tokenizer),
        pad_token_id=padding_id(tokenizer),
    )


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prepare, "_PREPARE", dict(prepare._PREPARE))
    register_train_task("pairs", prepare_pairs)
    yield
    del TASK_OPTIONS["pairs"]


METHODS = {
    "dense": "--method dense",
    "hift": "--method hift --layers_per_group 1",
    "sft-ag": "--method sft --density 0.1 --selection accumulated_gradient --reselection_interval 6",
    "sft-ma": "--method sft --density 0.1 --selection momentum --reselection_interval 2",
    "qsft": "--method sft --density 0.1 --load_in_4bit",
    "lora": "--method lora --lora_rank 2",
    "qlora": "--method lora --lora_rank 2 --load_in_4bit",
    "tokens": "--method dense --token_ratio 0.5",
    "galore": "--method dense --optim galore_adamw --optim_target_modules all-linear --optim_args rank=4",
}


# galore-torch's own.
@pytest.mark.filterwarnings("ignore:This implementation of AdamW is deprecated:FutureWarning")
@pytest.mark.parametrize("name", quick(METHODS, ["dense", "hift", "sft-ag", "qlora", "tokens"]))
def test_every_method_trains_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = METHODS[name]
    if "galore" in options:
        pytest.importorskip("galore_torch")
    if "4bit" in options:
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    TextEmbedder(bert_config()).save_pretrained(tmp_path / "base")
    word_tokenizer().save_pretrained(tmp_path / "base")
    rows = [dict(zip(PAIRS, values, strict=True)) for values in zip(*PAIRS.values(), strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["train", "--task", "pairs", "--model_name_or_path", str(tmp_path / "base"), *options.split()]
    words += ["--dataset", str(tmp_path / "rows.jsonl"), "--eval_file", str(tmp_path / "rows.jsonl"), "--use_cpu"]
    words += ["--max_steps", "7", "--per_device_train_batch_size", "3", "--learning_rate", "1e-2", "--report", "false"]
    assert main([*words, "--output_dir", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    results = results_of(tmp_path / "out")
    assert results["num_steps"] == 7 and results["before"]["eval_loss"] != results["after"]["eval_loss"]
    assert 0 <= results["after"]["eval_accuracy"] <= 1
    assert "plans support --task causal_lm and classification, not pairs" in " ".join(capsys.readouterr().out.split())
