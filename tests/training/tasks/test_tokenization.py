import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import (
    AddedToken,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizer,
    RobertaConfig,
    RobertaForMaskedLM,
)

import slivertune.training.tasks.tokenization as tokenization
from slivertune.core.positions import usable_positions
from slivertune.training.tasks.tokenization import (
    common_prefix_length,
    leading_special_tokens,
    padding_id,
    resolve_max_length,
    source_digest,
    split_token_ids,
)
from tests.training.tiny import byte_tokenizer, word_tokenizer

LLAMA = LlamaConfig(max_position_embeddings=64)


def test_the_positions_of_a_model_are_read_under_every_name() -> None:
    assert usable_positions(LlamaConfig(max_position_embeddings=77)) == (77, "config.max_position_embeddings=77")
    assert usable_positions(GPT2Config(n_positions=33)) == (33, "config.n_positions=33")
    assert usable_positions(BloomConfig()) is None


def test_positions_that_start_after_the_padding_id_are_not_counted() -> None:
    config = RobertaConfig(
        vocab_size=9, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=10, pad_token_id=1,
    )  # fmt: skip
    model = RobertaForMaskedLM(config).eval()
    found = usable_positions(config)
    assert found is not None
    usable, _ = found
    model(input_ids=torch.full((1, usable), 5))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model(input_ids=torch.full((1, usable + 1), 5))


@pytest.mark.parametrize(
    ("length", "config", "message"),
    [
        (65, LLAMA, r"max_length=65 is more than the 64 positions .*max_position_embeddings=64"),
        (2000, GPT2Config(), r"max_length=2000 is more than the 1024 positions .*n_positions=1024"),
        (1, GPT2Config(), r"max_length=1 must be at least 2"),
    ],
)
def test_a_length_beyond_the_models_positions_is_an_error_that_names_both(
    length: int, config: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_max_length(length, config, byte_tokenizer())


@pytest.mark.parametrize(
    ("asked", "config", "tokenizers_limit", "expected"),
    [
        (64, LLAMA, None, 64),
        (4096, BloomConfig(), None, 4096),
        (None, LlamaConfig(max_position_embeddings=131072), None, 1024),
        (None, LLAMA, None, 64),
        (None, LLAMA, 48, 48),
    ],
)
def test_a_length_that_fits_is_taken_and_by_default_the_least_of_what_all_sides_take(
    asked: int | None, config: Any, tokenizers_limit: int | None, expected: int
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = tokenizers_limit or tokenizer.model_max_length
    assert resolve_max_length(asked, config, tokenizer) == expected


def test_special_tokens_before_a_text_are_told_from_those_after_it() -> None:
    assert leading_special_tokens(word_tokenizer()) == [word_tokenizer().cls_token_id]
    assert leading_special_tokens(byte_tokenizer(bos=True)) == [byte_tokenizer(bos=True).bos_token_id]
    assert leading_special_tokens(byte_tokenizer()) == []


@pytest.mark.parametrize(
    ("text", "borders", "parts"),
    [
        ("ab\n\ncd", [2, 4], ["ab", "\n\n", "cd"]),
        # What reaches over a border is of what comes after it.
        ("ab\n\n", [3], ["ab", "\n\n"]),
        ("\u2603a", [1], ["\u2603", "a"]),
        ("a  b ", [1, 2, 4], ["a", " ", " b", " "]),
        ("<end>  a", [5], ["<end>  ", "a"]),
        ("<end>  a", [6], ["<end>  ", "a"]),
    ],
)
@pytest.mark.parametrize("trims", [False, True])
def test_a_text_is_tokenised_once_and_parted_at_borders(
    text: str, borders: list[int], parts: list[str], trims: bool
) -> None:
    tokenizer = byte_tokenizer(corpus=["\n\n"] * 9)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<end>", rstrip=True)]})
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    ids, places = split_token_ids(tokenizer, text, borders)
    assert ids == tokenizer(text)["input_ids"]
    pieces = pairwise([0, *places, len(ids)])
    assert [tokenizer.decode(ids[start:end]) for start, end in pieces] == [
        part.replace("<end>  ", "<end>") for part in parts
    ]


class LettersAndLines(PreTrainedTokenizer):
    """A tokenizer written in Python: letters, and line breaks by twos where there are."""

    @property
    def vocab_size(self) -> int:
        return 130

    def get_vocab(self) -> dict[str, int]:
        return {**{chr(code): code for code in range(128)}, "\n\n": 128, "<unk>": 129}

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return re.findall("\n\n|.|\n", text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab()[token]

    def _convert_id_to_token(self, index: int) -> str:
        return {number: token for token, number in self.get_vocab().items()}[index]


@pytest.mark.parametrize(
    ("text", "borders", "places", "num_tokenised"),
    [("ab\n\ncd", [2, 4], [2, 3], 12), ("ab\n\ncd", [3, 5], [2, 4], 20), ("ab", [], [], 4), ("ab", [2, 2], [2, 2], 4)],
)
def test_a_tokenizer_without_offsets_tokenises_parts(
    text: str, borders: list[int], places: list[int], num_tokenised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, count, whole = LettersAndLines(unk_token="<unk>"), 0, LettersAndLines._tokenize

    def counted(self: LettersAndLines, text: str, **options: Any) -> list[str]:
        nonlocal count
        count += len(text)
        return whole(self, text)

    monkeypatch.setattr(LettersAndLines, "_tokenize", counted)
    ids, found = split_token_ids(tokenizer, text, borders)
    assert ("".join(tokenizer.convert_ids_to_tokens(ids)), found, count) == (text, places, num_tokenised)


def test_padding_falls_back_on_the_end_of_text_token() -> None:
    assert padding_id(byte_tokenizer(pad=True)) == 1
    assert padding_id(byte_tokenizer(pad=False)) == 0
    tokenizer = byte_tokenizer(pad=False)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"neither a pad nor an EOS token\. Set tokenizer.pad_token"):
        padding_id(tokenizer)


def test_a_common_prefix_ends_at_the_first_difference_or_the_shortest_end() -> None:
    assert common_prefix_length(([1, 2, 3], [1, 2, 4, 5])) == 2
    assert common_prefix_length(([1, 2], [1, 2, 3])) == 2
    assert common_prefix_length(([1], [2])) == 0


def test_a_change_of_the_code_changes_the_digest_that_caches_are_kept_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "__file__", str(tmp_path / "tokenization.py"))
    (tmp_path / "encoder.py").write_text("A = 1\n", encoding="utf-8")
    before = source_digest()
    assert source_digest() == before
    (tmp_path / "encoder.py").write_text("A = 2\n", encoding="utf-8")
    assert source_digest() != before
