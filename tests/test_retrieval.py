"""The task of the benchmarks that finds docstrings (`benchmarks/retrieval.py`) against itself written out."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from slivertune.cli import main
from slivertune.training.options.arguments import DataArguments
from slivertune.training.tasks import prepare
from slivertune.training.tasks.prepare import prepare_task
from slivertune.training.tasks.registry import TASK_OPTIONS
from tests.conftest import CHECKOUT
from tests.training.tiny import bert_config, splits_of, word_tokenizer
from tests.training.tiny_runs import results_of

sys.path.append(str(CHECKOUT / "benchmarks"))
import retrieval
from retrieval import TextEmbedder, find_pairs

PAIRS = {
    "name": ["a good film", "it was bad", "yes", "a play , a play", "no", "b c d"],
    "text": ["great film .", "it was terrible", "yes , yes", "good play", "no ? no no no", "d d"],
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prepare, "_PREPARE", dict(prepare._PREPARE))
    retrieval.register()
    yield
    del TASK_OPTIONS[retrieval.TASK]


def tiny_embedder() -> TextEmbedder:
    torch.manual_seed(0)
    model = TextEmbedder(bert_config()).eval()
    for weight in model.parameters():
        weight.data *= 5  # texts lie apart
    return model


def embed(model: TextEmbedder, text: str) -> torch.Tensor:
    """One text alone, unpadded, in fp64."""
    ids = word_tokenizer()(text)["input_ids"]
    hidden = model.double().bert(torch.tensor([ids])).last_hidden_state[0]
    mean = sum(hidden) / len(ids)
    return mean / (mean * mean).sum().sqrt()


def naive(model: TextEmbedder, num_rows: int) -> tuple[float, float]:
    """Loss of batches of `num_rows`, weighted by their rows, and the share of names that find their text among all."""
    names, texts = ([embed(model, text) for text in PAIRS[side]] for side in ("name", "text"))
    losses, hits = [], 0
    for index, name in enumerate(names):
        start = index - index % num_rows
        scores = [(20 * name @ text).exp() for text in texts[start : start + num_rows]]
        losses.append(-(scores[index - start] / sum(scores)).log().item())
        similarities = [(name @ text).item() for text in texts]
        hits += similarities.index(max(similarities)) == index
    return sum(losses) / len(losses), hits / len(names)


@pytest.mark.parametrize("num_rows", [4, 6])
def test_loss_and_accuracy_are_those_of_texts_one_by_one(num_rows: int, tmp_path: Path) -> None:
    model = tiny_embedder()
    task = prepare_task(DataArguments(task="retrieval"), word_tokenizer(), model.config, splits_of(PAIRS))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=num_rows, use_cpu=True, report_to="none",
        dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, eval_dataset=task.eval_dataset, data_collator=task.data_collator,
        compute_metrics=task.compute_metrics,
    )  # fmt: skip
    found = trainer.evaluate()
    loss, accuracy = naive(model, num_rows)
    # 20 times a similarity that fp32 rounds at 1e-7.
    assert found["eval_loss"] == pytest.approx(loss, abs=1e-5)
    assert found["eval_accuracy"] == accuracy and 0 < accuracy < 1


CLASS = '''class Reader:
    def again(self):
        """The same text everywhere."""
    def bare(self):
        "Short."
'''


def write_module(folder: Path, name: str, count: int) -> None:
    path = folder / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    functions = [
        f'def read_{place}():\n    """Read {place} for {name},\n    and more.\n\n    Unread."""\n'
        for place in range(count)
    ]
    path.write_text("".join(functions) + CLASS, encoding="utf-8")


def test_pairs_are_names_in_words_and_first_paragraphs_and_no_module_is_on_both_sides(tmp_path: Path) -> None:
    modules = [f"package/module{number}" for number in range(40)]
    for name in modules:
        write_module(tmp_path, name, 30)
    splits = find_pairs(tmp_path)
    every = [pair for pairs in splits.values() for pair in pairs]
    assert {module for module, _, _ in splits["train"]}.isdisjoint(module for module, _, _ in splits["eval"])
    assert ("package.module7", "package module7 read 3", "Read 3 for package/module7, and more.") in find_pairs_of(
        tmp_path / "one", "package/module7", 4
    )
    assert [text for _, _, text in every].count("The same text everywhere.") == 1
    assert not any(text in ("Short.", "Unread.") for _, _, text in every)
    assert {module for module, _, _ in every} == {name.replace("/", ".") for name in modules}
    assert all(sum(module == each for each, _, _ in every) == 24 for module, _, _ in every)
    assert 0 < len(splits["eval"]) < len(splits["train"]) / 2
    write_module(tmp_path, "package/another", 3)
    more = find_pairs(tmp_path)
    for split, pairs in splits.items():
        assert {module for module, _, _ in pairs} <= {module for module, _, _ in more[split]}


def find_pairs_of(folder: Path, name: str, count: int) -> list[Any]:
    write_module(folder, name, count)
    return [pair for pairs in find_pairs(folder).values() for pair in pairs]


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
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_every_method_trains_it(options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "galore" in options:
        pytest.importorskip("galore_torch")
    if "4bit" in options:
        pytest.importorskip("bitsandbytes")
    tiny_embedder().save_pretrained(tmp_path / "base")
    word_tokenizer().save_pretrained(tmp_path / "base")
    rows = [dict(zip(PAIRS, values, strict=True)) for values in zip(*PAIRS.values(), strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["train", "--task", "retrieval", "--model_name_or_path", str(tmp_path / "base"), *options.split()]
    words += ["--dataset", str(tmp_path / "rows.jsonl"), "--eval_file", str(tmp_path / "rows.jsonl"), "--use_cpu"]
    words += ["--max_steps", "7", "--per_device_train_batch_size", "3", "--learning_rate", "1e-2", "--report", "false"]
    assert main([*words, "--output_dir", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    results = results_of(tmp_path / "out")
    assert results["num_steps"] == 7 and results["before"]["eval_loss"] != results["after"]["eval_loss"]
    assert "a plan knows causal_lm and classification, not retrieval" in " ".join(capsys.readouterr().out.split())
