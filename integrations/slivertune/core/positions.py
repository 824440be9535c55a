"""Number of tokens for which a model has positions."""

from transformers import PreTrainedConfig

# These models number their positions from pad_token_id + 1, so that fewer are usable than the embedding holds.
_POSITIONS_AFTER_PADDING = frozenset(
    (
        "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet",
        "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
    )
)  # fmt: skip


def usable_positions(config: PreTrainedConfig) -> tuple[int, str] | None:
    """Return the number of tokens for which a model has positions.

    Args:
        config: Configuration of the model. For a multimodal model, the text model's part is read.

    Returns:
        The number and its source as text, or None for a model without a limit (such as ALiBi's).
    """
    text_config = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"):
        positions = getattr(text_config, name, None)
        if isinstance(positions, int) and positions > 0:
            # GPT-2 and related models answer to the common name by an alias.
            source = f"config.{text_config.attribute_map.get(name, name)}={positions}"
            if text_config.model_type not in _POSITIONS_AFTER_PADDING:
                return positions, source
            offset = (text_config.pad_token_id or 0) + 1
            return positions - offset, f"{source}, of which {text_config.model_type} starts at {offset}"
    return None
