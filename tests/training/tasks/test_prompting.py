import re
from typing import Any

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

LABELS = ("0", "1")
AFTER_SPACE = Template.parse("{s} {mask}")


def test_a_template_is_filled_and_nothing_in_a_value_is_a_placeholder() -> None:
    template = Template.parse("{premise} ? {mask} , {hypothesis} {{x}}")
    assert template.columns == ("premise", "hypothesis")
    values = {"premise": "{mask} {0}", "hypothesis": "b", "mask": "a column of that name"}
    assert template.fill(values, "[M]") == "{mask} {0} ? [M] , b {x}"


def test_the_part_before_the_mask_is_what_a_causal_model_reads() -> None:
    assert Template.parse("{sentence} It was {mask}").before_mask.fill({"sentence": "Fun."}) == "Fun. It was "
    assert Template.parse("{a} is {mask} for {b}").before_mask.columns == ("a",)
    assert Template.parse("{sentence} It was").before_mask.fill({"sentence": "Fun."}) == "Fun. It was"


def test_label_words_go_by_the_order_of_the_labels_or_by_name() -> None:
    assert parse_label_words("terrible, great", LABELS) == ("terrible", "great")
    assert parse_label_words("1=great,0=terrible", LABELS) == ("terrible", "great")


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


def test_values_are_cut_from_the_longest_to_the_largest_size_that_fits() -> None:
    def fits(row: dict[str, str]) -> bool:
        return len(row["premise"]) + len(row["hypothesis"]) <= 30

    cut = cut_to_fit({"premise": "p" * 50, "hypothesis": "h" * 8}, fits)
    assert cut == {"premise": "p" * 22, "hypothesis": "h" * 8}


@pytest.mark.parametrize(
    ("read", "given", "message"),
    [
        (Template.parse, ["It was {mask}."], "names no column"),
        (Template.parse, ["{a} {mask} {mask}"], "has {mask} more than once"),
        (Template.parse, ["{a} {"], "can't be read"),
        (Template.parse, ["{a:>3} {mask}"], "has the placeholder {a:>3}, which is no plain column name"),
        (Template.parse, ["{a!r} {mask}"], "has the placeholder {a!r}, which is no plain column name"),
        (Template.parse, ["{} {mask}"], "has the placeholder {}, which is no plain column name"),
        (parse_label_words, ["great", LABELS], "are 1 words for 2 labels (0, 1)"),
        (parse_label_words, ["a,b,c", LABELS], "are 3 words for 2 labels"),
        (parse_label_words, ["great,great", LABELS], "must be different words"),
        (parse_label_words, ["great,", LABELS], "must be different words, none empty"),
        (parse_label_words, ["0=bad,2=good", LABELS], "names the labels 0, 2, and the data has 0, 1"),
        (parse_label_words, ["0=bad,0=good", LABELS], "names the labels 0, and the data has 0, 1"),
        (parse_label_words, ["0=bad,1=good,0=ugly", LABELS], "names the labels 0, 1, and the data has 0, 1. Name each"),
        (prompt_model_kind, [T5Config()], "t5 is an encoder-decoder"),
        (mask_token_ids, [byte_tokenizer(), ("hi", "x"), AFTER_SPACE], "'hi' is ['\u0120', 'h', 'i'] or ['h', 'i']"),
        (mask_token_ids, [word_tokenizer(), ("superb", "bad"), AFTER_SPACE], "'superb' is ['[UNK]']"),
        (cut_to_fit, [{"sentence": "s"}, lambda _: False], "the template alone is longer than --max_length"),
    ],
)
def test_what_can_not_be_meant_or_scored_is_refused(read: Any, given: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(*given)
