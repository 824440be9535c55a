"""Trainers of sentence-transformers on a tiny BERT of words."""

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

from tests.training.tiny import quiet_arguments

WORDS = ("the", "cat", "dog", "sat", "ran", "far", "home", "big", "red", "blue", "old", "tree", "house", "river")
KINDS = ("mnrl", "cached mnrl", "softmax", "two losses", "cross encoder")
HIDDEN = 32


def save_model(folder: Path, *, classifies: bool = False, dropout: float = 0.0) -> str:
    """A BERT with its tokenizer, as the hub has them; the path."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]), encoding="utf-8")
    tokenizer = BertTokenizerFast(vocab=str(vocabulary), model_max_length=32)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.2,
        num_labels=1,
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config) if classifies else BertModel(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def pairs(label: str | None = None) -> Dataset:
    """Pairs of sentences of three to nine words, with a class of three, a score of 0 or 1, or none."""
    draw = random.Random(0)

    def sentence() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 9)))

    rows: list[dict[str, Any]] = [{"anchor": sentence(), "positive": sentence()} for _ in range(64)]
    for row in rows:
        if label is not None:
            row["label"] = draw.randint(0, 2) if label == "class" else float(draw.randint(0, 1))
    return Dataset.from_list(rows)


def sentence_trainer(kind: str, output: Path, *, pooling: str = "mean", dropout: float = 0.0, **options: Any) -> Any:
    """A trainer over a new model, which is the same each time."""
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    if kind == "cross encoder":
        return _cross_encoder_trainer(output, dropout, **options)
    transformer = Transformer(save_model(output / "base", dropout=dropout))
    model = SentenceTransformer(modules=[transformer, Pooling(HIDDEN, pooling_mode=pooling)], device="cpu")
    torch.manual_seed(1)  # of the classifier
    loss: Any
    data: Any = pairs("class" if kind == "softmax" else None)
    if kind == "mnrl":
        loss = losses.MultipleNegativesRankingLoss(model)
    elif kind == "cached mnrl":
        loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)
    elif kind == "softmax":
        loss = losses.SoftmaxLoss(model, embedding_dimension=HIDDEN, num_labels=3)
    else:
        loss = {
            "classes": losses.SoftmaxLoss(model, embedding_dimension=HIDDEN, num_labels=3),
            "pairs": losses.MultipleNegativesRankingLoss(model),
        }
        data = {"classes": pairs("class"), "pairs": pairs()}
    return SentenceTransformerTrainer(model=model, args=_arguments(output, **options), train_dataset=data, loss=loss)


def _cross_encoder_trainer(output: Path, dropout: float, **options: Any) -> Any:
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments

    model = CrossEncoder(save_model(output / "base", classifies=True, dropout=dropout), num_labels=1, device="cpu")
    args = _arguments(output, CrossEncoderTrainingArguments, **options)
    return CrossEncoderTrainer(model=model, args=args, train_dataset=pairs("score"))


def _arguments(output: Path, kind: Any = None, **options: Any) -> Any:
    from sentence_transformers import SentenceTransformerTrainingArguments

    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 7,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",  # as a reference's: the fused one rounds otherwise
        "weight_decay": 0.0,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    return quiet_arguments(output, kind or SentenceTransformerTrainingArguments, seed=3, **defaults | options)
