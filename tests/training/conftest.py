"""A base model small enough for tests."""

from pathlib import Path

import pytest

from tests.training.tiny_runs import make_tiny_base, write_texts


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level Llama of two blocks and its tokenizer."""
    return make_tiny_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jsonl file of sentences."""
    return write_texts(tmp_path_factory.mktemp("texts"))
