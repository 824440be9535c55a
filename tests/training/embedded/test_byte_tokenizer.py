from pathlib import Path

import pytest
from transformers import AutoTokenizer

from slivertune.training.embedded.byte_tokenizer import END_ID, PAD_ID, VOCABULARY_SIZE, make_byte_tokenizer


@pytest.mark.parametrize("text", ["plain", " a  b\n\tc ", "naïve ☃ 漢字 🙂", "\x00\x7f", "don't <|end|>", ""])
def test_a_text_comes_back_as_it_went_in_one_token_a_byte(text: str, tmp_path: Path) -> None:
    make_byte_tokenizer(64).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.replace("<|end|>", "E").encode())


def test_every_byte_has_its_own_token_beside_the_two_marks() -> None:
    tokenizer = make_byte_tokenizer(None)
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCABULARY_SIZE))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, END_ID) == (256, 257)


def test_the_limit_is_the_models() -> None:
    assert make_byte_tokenizer(64).model_max_length == 64
