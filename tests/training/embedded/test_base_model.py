import dataclasses
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from slivertune.cli import main
from slivertune.training import assemble
from slivertune.training.embedded import base_model
from slivertune.training.embedded.base_model import (
    BASE_RECIPE,
    END_ID,
    PAD_ID,
    VOCABULARY_SIZE,
    BaseRecipe,
    base_model_folder,
    ensure_base_model,
    make_byte_tokenizer,
    train_base_model,
)
from tests.training.tiny_runs import TINY_RECIPE, sentences, train, write_texts


@pytest.fixture
def few_docstrings(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Docstrings without reading the library; counts how often they were asked for."""
    collect = Mock(return_value=sentences(60))
    monkeypatch.setattr(base_model, "collect_docstrings", collect)
    return collect


def folders_in(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_the_model_is_trained_once_and_found_again(tmp_path: Path, few_docstrings: Mock) -> None:
    report = Mock()
    folders = [ensure_base_model(TINY_RECIPE, cache=tmp_path, report=report) for _ in "ab"]
    assert folders[0] == folders[1]
    assert [call.args[0] for call in report.call_args_list] == [1, 2, 3]
    assert few_docstrings.call_count == 1
    assert len(folders_in(tmp_path)) == 1


def test_two_runs_at_once_train_it_once(tmp_path: Path, few_docstrings: Mock) -> None:
    with ThreadPoolExecutor(2) as runs:
        folders = list(runs.map(lambda _: ensure_base_model(TINY_RECIPE, cache=tmp_path), "ab"))
    assert few_docstrings.call_count == 1
    assert folders == [base_model_folder(TINY_RECIPE, tmp_path)] * 2
    assert (folders[0] / "model.safetensors").is_file()


def test_a_training_that_fails_leaves_nothing_behind(tmp_path: Path, few_docstrings: Mock) -> None:
    with pytest.raises(KeyboardInterrupt):
        ensure_base_model(TINY_RECIPE, cache=tmp_path, report=Mock(side_effect=KeyboardInterrupt))
    assert folders_in(tmp_path) == []
    assert ensure_base_model(TINY_RECIPE, cache=tmp_path).is_dir()


def test_a_saving_that_fails_leaves_nothing_behind(
    tmp_path: Path, few_docstrings: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(base_model, "make_byte_tokenizer", lambda limit: pytest.fail("not reached"))
    monkeypatch.setattr(base_model, "train_base_model", lambda *args: Mock(save_pretrained=fail))
    with pytest.raises(OSError, match="disk full"):
        ensure_base_model(TINY_RECIPE, cache=tmp_path)
    assert folders_in(tmp_path) == []


def test_a_recipe_is_a_key_and_so_is_the_python_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BaseRecipe().key() == BaseRecipe().key()
    changes: list[dict[str, Any]] = [{}, {"num_steps": 7}, {"seed": 1}, {"hidden_size": 96}, {"corpus_bytes": 10}]
    keys = {dataclasses.replace(BaseRecipe(), **change).key() for change in changes}
    assert len(keys) == len(changes)
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    assert BaseRecipe().key() not in keys


def test_the_cache_follows_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert base_model_folder(TINY_RECIPE) == tmp_path / "slivertune" / "base_models" / TINY_RECIPE.key()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert base_model_folder(TINY_RECIPE).parents[2] == tmp_path / "home" / ".cache"


def test_training_is_the_same_every_time_and_touches_no_random_state() -> None:
    before = torch.random.get_rng_state()
    one, other = (train_base_model(TINY_RECIPE, sentences(60), Mock()) for _ in "ab")
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_training_lowers_the_loss() -> None:
    losses: list[float] = []
    recipe = dataclasses.replace(TINY_RECIPE, num_steps=60, learning_rate=1e-2)
    train_base_model(recipe, sentences(60), lambda step, loss: losses.append(loss))
    assert sum(losses[-5:]) / 5 < 0.7 * losses[0]


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="3 bytes of docstrings are too few for windows of 16"):
        train_base_model(TINY_RECIPE, ["ab"], Mock())


def test_the_default_has_about_three_million_weights() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(base_model._llama_config(BASE_RECIPE))
    assert 2_500_000 < sum(parameter.numel() for parameter in model.parameters()) < 3_500_000


def test_the_folder_loads_as_any_model_does(tiny_base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    assert model.config.max_position_embeddings == tokenizer.model_max_length == TINY_RECIPE.max_positions
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_steps": 0}, "num_steps=0 must be positive"), ({"num_heads": 5}, "must be a multiple of num_heads=5")],
)
def test_a_recipe_that_makes_no_model_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BaseRecipe(), **change)


def test_without_a_model_the_embedded_one_is_used(
    tmp_path: Path, few_docstrings: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(assemble, "BASE_RECIPE", TINY_RECIPE)
    monkeypatch.chdir(tmp_path)
    # Without the memory ledger, dense fine-tuning is not measured beside.
    words = ("--max_steps", "4", "--per_device_train_batch_size", "2", "--max_eval_samples", "2")
    assert main(["train", *words, "--memory_ledger", "off"]) == 0
    assert (tmp_path / "runs" / "hift" / "model" / "model.safetensors").is_file()
    assert few_docstrings.call_count == 1
    more = ("--max_steps", "1", "--memory_ledger", "off")
    results = train(base_model_folder(TINY_RECIPE), write_texts(tmp_path), tmp_path / "again", *more, method="dense")
    assert results["num_parameters"] == 34_080


@pytest.mark.parametrize("text", ["plain", " a  b\n\tc ", "naïve ☃ 漢字 🙂", "\x00\x7f", "don't <|end|>", ""])
def test_a_text_comes_back_as_it_went_in_one_token_a_byte(text: str, tmp_path: Path) -> None:
    make_byte_tokenizer(64).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.replace("<|end|>", "E").encode())


def test_every_byte_has_its_own_token_beside_the_two_marks_and_the_limit_is_the_models() -> None:
    tokenizer = make_byte_tokenizer(None)
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCABULARY_SIZE))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, END_ID) == (256, 257)
    assert make_byte_tokenizer(64).model_max_length == 64
