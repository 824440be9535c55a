import pytest
from tokenizers import processors

from slivertune.training.tasks.special_ends import added_ends, special_ends, without_begin, without_end
from tests.training.tiny import byte_tokenizer, word_tokenizer


def test_special_tokens_are_taken_from_the_ends_alone_and_however_often_they_stand_there() -> None:
    assert without_begin("<s> <s>\n<s> a<s>b", "<s>") == " a<s>b"
    assert without_begin(" a", "<s>") == " a" and without_begin(" a", "") == " a"
    assert without_end("a</s>b </s>\n</s>\n", ("</s>",)) == "a</s>b "
    assert without_end("a ", ("</s>", "")) == "a "
    # The longest that fits is the one.
    assert without_end("a<end><end>2", ("2", "<end>2")) == "a<end>"


@pytest.mark.parametrize(
    ("bos", "text", "once"),
    [
        (True, "<bos>a<eos>", "a"),
        (True, "<bos><bos>a", "a"),
        (True, "a<bos>b<eos>c", "a<bos>b<eos>c"),
        # What the tokenizer does not add stays, once.
        (False, "<bos>a<eos>", "<bos>a"),
        (False, "<bos><bos>a", "<bos>a"),
        (False, "a", "a"),
    ],
)
def test_a_text_keeps_what_its_row_does_not_get(bos: bool, text: str, once: str) -> None:
    tokenizer = byte_tokenizer(bos=bos)
    tokenizer.bos_token = "<bos>"
    assert special_ends(tokenizer).text_once(text) == once


def test_what_a_tokenizer_puts_around_a_text_is_found() -> None:
    around = added_ends(word_tokenizer())
    assert (around.begin, around.end, around.text_once("[CLS] a [SEP]")) == ("[CLS]", "[SEP]", " a ")
    assert added_ends(byte_tokenizer()).text_once("<bos>a<eos>") == "<bos>a<eos>"
    both = byte_tokenizer(bos=True)
    pair = [("<bos>", both.bos_token_id), ("<eos>", both.eos_token_id)]
    both.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=pair)
    assert added_ends(both).text_once("<bos>a<eos>") == "a"
