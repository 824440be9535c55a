"""What does not go with 4-bit weights, in the words that planning and training share. Pure."""

_REASONS = {
    "dense": "dense fine-tuning changes every weight, and 4-bit weights can't be changed by small steps",
    "hift": "HiFT changes every weight in its turn, and 4-bit weights can't be changed by small steps",
}


def clash_with_method(method: str) -> str | None:
    """Why a method can't train a model with 4-bit weights.

    Args:
        method: The method.

    Returns:
        The reason and the way out; None if it can.
    """
    if method not in _REASONS:
        return None
    return (
        f"--load_in_4bit does not go with --method {method}: {_REASONS[method]}; take --method lora or sft, which "
        "train adapters or deltas beside them, or leave out --load_in_4bit"
    )


def clash_with_zero3() -> str:
    """Why ZeRO-3 can't share 4-bit weights out, whatever the method, and the way out."""
    return (
        "--load_in_4bit does not go with ZeRO-3, which shares weights out without the scales that belong to 4-bit "
        "codes; take DDP, ZeRO-1 or ZeRO-2, or leave out --load_in_4bit"
    )
