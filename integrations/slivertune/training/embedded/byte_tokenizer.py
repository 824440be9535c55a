"""A tokenizer of 256 bytes and two marks: it reads any text in any language, and nothing has to be downloaded."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"
PAD_ID = 256
END_ID = 257
VOCABULARY_SIZE = 258
"""256 bytes, the padding and the end of a text."""


def make_byte_tokenizer(max_length: int | None) -> PreTrainedTokenizerFast:
    """Build the tokenizer.

    Args:
        max_length: Longest sequence that the model takes, in bytes; None for no limit.

    Returns:
        A tokenizer with one token a byte of UTF-8. Saved beside a model, `AutoTokenizer` loads it.
    """
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, PAD_TOKEN: PAD_ID, END_TOKEN: END_ID}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    limit = {} if max_length is None else {"model_max_length": max_length}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        clean_up_tokenization_spaces=False,
        **limit,
    )
