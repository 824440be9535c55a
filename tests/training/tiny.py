"""Tokenizers made on the spot, tiny models that fit them, and rows to read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from slivertune.training.data.splits import load_splits
from slivertune.training.options.arguments import DataArguments
from slivertune.training.tasks.prepare import prepare_task
from slivertune.training.tasks.task import Task

WORDS = (
    "a",
    "b",
    "c",
    "d",
    "good",
    "bad",
    "great",
    "terrible",
    "it",
    "was",
    ".",
    ",",
    "?",
    "film",
    "play",
    "yes",
    "no",
)

SENTIMENTS = (
    ("a good film", 1),
    ("a bad play", 0),
    ("a great play", 1),
    ("a terrible film .", 0),
    ("it was good", 1),
    ("it was bad . it was bad", 0),
)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """BERT's kind: one token a word of `WORDS`, [CLS] and [SEP] around a text, [MASK]."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate((*special, *WORDS))}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def byte_tokenizer(
    *, corpus: Sequence[str] = (), bos: bool = False, pad: bool = True, more: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """GPT-2's kind: bytes, merged as a corpus suggests, <eos>, and a <bos> before each text where asked."""
    special = ["<eos>", "<pad>", "<bos>", "<mask>", *more]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>" if pad else None,
        bos_token="<bos>" if bos else None,
        mask_token="<mask>",
    )


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template as many models have it."""
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The same, which says by itself what the assistant says."""


def chat_tokenizer(
    template: str | dict[str, str] | None = CHATML, *, corpus: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Bytes with a chat template and the tokens that it writes."""
    tokenizer = byte_tokenizer(corpus=corpus, more=("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = template
    return tokenizer


def trl_template(name: str) -> str:
    """Return one of the chat templates that the installed trl has; skip the test where it has none of that name."""
    if name not in trl_template_names():
        pytest.skip(f"this version of trl has no {name}.jinja")
    return (_trl_templates() / f"{name}.jinja").read_text(encoding="utf-8")


def trl_template_names() -> set[str]:
    """Return the names of the chat templates that the installed trl has; skip the test where there is no trl."""
    return {file.stem for file in _trl_templates().glob("*.jinja")}


def _trl_templates() -> Path:
    return Path(pytest.importorskip("trl").__file__).parent / "chat_templates"


def llama_config(*, positions: int = 64) -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=400,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions,
        use_cache=False,
        initializer_range=0.1,
    )


def bert_config(*, positions: int = 32, **options: Any) -> PreTrainedConfig:
    return BertConfig(
        vocab_size=22,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.1,
        **options,
    )


def model_for(task: Task, config: PreTrainedConfig) -> PreTrainedModel:
    """A random model with the head that the task asks for."""
    torch.manual_seed(0)
    if task.model_kind == "sequence_classification":
        config.num_labels = len(task.id2label or ())
        return BertForSequenceClassification(config)
    return {"causal_lm": LlamaForCausalLM, "masked_lm": BertForMaskedLM}[task.model_kind](config)


def quiet_arguments(folder: Path, kind: type[TrainingArguments] = TrainingArguments, **options: Any) -> Any:
    """Return a Trainer's arguments for a CPU that print and report nothing; options may say otherwise."""
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
    return kind(output_dir=str(folder), **{**quiet, **options})


def trainer_of(task: Task, model: PreTrainedModel, folder: Path, **options: Any) -> Trainer:
    """A stock Trainer on the CPU, with a task's rows and hooks."""
    return Trainer(
        model=model,
        args=quiet_arguments(folder, **options),
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset,
        data_collator=task.data_collator,
        compute_metrics=task.compute_metrics,
        preprocess_logits_for_metrics=task.preprocess_logits_for_metrics,
        compute_loss_func=task.compute_loss_func,
    )


def splits_of(train: dict[str, list[Any]], evaluation: dict[str, list[Any]] | None = None) -> datasets.DatasetDict:
    """Splits in memory; evaluated on the training rows unless others are given."""
    return datasets.DatasetDict(
        train=datasets.Dataset.from_dict(train), eval=datasets.Dataset.from_dict(evaluation or train)
    )


def sentiment_splits() -> datasets.DatasetDict:
    sentences, labels = zip(*SENTIMENTS, strict=True)
    return splits_of({"sentence": list(sentences), "label": list(labels)})


def splits_from(dataset: str | Path, *, seed: int = 0, **options: Any) -> Any:
    """`load_splits` with data arguments from keywords."""
    return load_splits(DataArguments(dataset=[str(dataset)], **options), seed=seed)


def prepared(
    splits: datasets.DatasetDict, tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig, **options: Any
) -> Task:
    """`prepare_task` with data arguments from keywords."""
    return prepare_task(DataArguments(**options), tokenizer, config, splits)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)
