import re

import pytest
from transformers import AutoConfig, BertConfig, GPT2Config, LlamaConfig, PreTrainedConfig, T5Config

from slivertune.training.tasks.prompting import (
    Template,
    cut_to_fit,
    mask_token_ids,
    parse_label_words,
    prompt_model_kind,
)
from tests.training.tiny import byte_tokenizer, word_tokenizer


def test_a_template_is_filled_and_nothing_in_a_value_is_a_placeholder() -> None:
    template = Template.parse("{premise} ? {mask} , {hypothesis} {{x}}")
    assert template.columns == ("premise", "hypothesis")
    values = {"premise": "{mask} {0}", "hypothesis": "b", "mask": "a column of that name"}
    assert template.fill(values, "[M]") == "{mask} {0} ? [M] , b {x}"


def test_the_part_before_the_mask_is_what_a_causal_model_reads() -> None:
    assert Template.parse("{sentence} It was {mask}").before_mask.fill({"sentence": "Fun."}) == "Fun. It was "
    assert Template.parse("{a} is {mask} for {b}").before_mask.columns == ("a",)
    assert Template.parse("{sentence} It was").before_mask.fill({"sentence": "Fun."}) == "Fun. It was"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("It was {mask}.", "names no column"),
        ("{a} {mask} {mask}", "has {mask} more than once"),
        ("{a} {", "can't be read"),
        ("{a:>3} {mask}", "has the placeholder {a:>3}, which is no plain column name"),
        ("{a!r} {mask}", "has the placeholder {a!r}, which is no plain column name"),
        ("{} {mask}", "has the placeholder {}, which is no plain column name"),
    ],
)
def test_a_template_that_can_not_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Template.parse(text)


def test_label_words_go_by_the_order_of_the_labels_or_by_name() -> None:
    assert parse_label_words("terrible, great", ("0", "1")) == ("terrible", "great")
    assert parse_label_words("1=great,0=terrible", ("0", "1")) == ("terrible", "great")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("great", "are 1 words for 2 labels (0, 1)"),
        ("a,b,c", "are 3 words for 2 labels"),
        ("great,great", "must be different words"),
        ("great,", "must be different words, none empty"),
        ("0=bad,2=good", "names the labels 0, 2; the data has 0, 1"),
        ("0=bad,0=good", "names the labels 0; the data has 0, 1"),
        ("0=bad,1=good,0=ugly", "names the labels 0, 1; the data has 0, 1, each once"),
    ],
)
def test_label_words_must_match_the_labels_one_to_one(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_label_words(words, ("0", "1"))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (BertConfig(), "masked_lm"),
        (BertConfig(is_decoder=True), "causal_lm"),
        (BertConfig(architectures=["BertLMHeadModel"]), "causal_lm"),
        (BertConfig(architectures=["BertForMaskedLM"]), "masked_lm"),
        (GPT2Config(architectures=["NewForMaskedLM"]), "masked_lm"),
        (LlamaConfig(), "causal_lm"),
        (GPT2Config(), "causal_lm"),
        (AutoConfig.for_model("roberta"), "masked_lm"),
    ],
)
def test_the_architecture_tells_a_masked_from_a_causal_model(config: PreTrainedConfig, kind: str) -> None:
    assert prompt_model_kind(config) == kind


def test_an_encoder_decoder_takes_no_prompts() -> None:
    with pytest.raises(ValueError, match="t5 is an encoder-decoder"):
        prompt_model_kind(T5Config())


@pytest.mark.parametrize(
    ("corpus", "template", "lead"),
    [
        # As in RoBERTa's vocabulary, " great" and "great" are different tokens.
        (["great great", "bad bad"], "{s} It was {mask} .", " "),
        (["great great", "bad bad"], "{mask} : {s}", ""),
        # The other form is taken where the first is no single token.
        (["a great", "a bad"], "{mask} : {s}", " "),
    ],
)
def test_a_label_word_at_a_mask_takes_the_form_that_the_template_calls_for_if_it_is_one_token(
    corpus: list[str], template: str, lead: str
) -> None:
    tokenizer = byte_tokenizer(corpus=corpus * 20)
    assert (len(tokenizer("great")["input_ids"]) == 1) is ("great great" in corpus)
    ids = mask_token_ids(tokenizer, ("great", "bad"), Template.parse(template))
    assert [tokenizer.decode([token]) for token in ids] == [lead + "great", lead + "bad"]


def test_a_label_word_of_several_or_unknown_tokens_is_refused_with_its_tokens() -> None:
    with pytest.raises(ValueError, match=r"'hi' is \['\u0120', 'h', 'i'\] or \['h', 'i'\]"):
        mask_token_ids(byte_tokenizer(), ("hi", "x"), Template.parse("{s} {mask}"))
    with pytest.raises(ValueError, match=r"'superb' is \['\[UNK\]'\]"):
        mask_token_ids(word_tokenizer(), ("superb", "bad"), Template.parse("{s} {mask}"))


def test_values_are_cut_from_the_longest_to_the_largest_size_that_fits() -> None:
    values = {"premise": "p" * 50, "hypothesis": "h" * 8}

    def fits(row: dict[str, str]) -> bool:
        return len(row["premise"]) + len(row["hypothesis"]) <= 30

    assert cut_to_fit(values, fits) == {"premise": "p" * 22, "hypothesis": "h" * 8}
    with pytest.raises(ValueError, match="the template alone is longer than --max_length"):
        cut_to_fit(values, lambda _: False)
