"""Sizes in bytes, as people write and read them."""

import re

_BYTES_OF_UNIT = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_BINARY_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_FEWEST_BYTES_MEANT = 2**20
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read a size in bytes.

    Args:
        text: Number with a unit (`24GiB`, `24 GB`, `1.5TiB`, `128MiB`), or a number of bytes without one. 1 GiB is
            2**30 bytes, 1 GB is 10**9 bytes, and a graphics card of "24 GB" has 24 GiB.

    Returns:
        Bytes, rounded down.

    Raises:
        ValueError: If the text is no size, or if its unit is ambiguous (`24G`).
    """
    match = _SIZE.fullmatch(text)
    unit = None if match is None else _BYTES_OF_UNIT.get(match[2].lower())
    if match is None or unit is None:
        raise ValueError(f"{text!r} must be a size, such as 24GiB, 24GB or 128MiB, or a number of bytes")
    whole, _, fraction = match[1].partition(".")
    # Compute in integers: a float would lose the last digits of a large size.
    digits = int(whole + fraction)
    return digits * unit // int(10 ** len(fraction))


def parse_memory_size(text: str) -> int:
    """Read the size of a memory or a disk, and refuse sizes below 1 MiB without a unit.

    Args:
        text: As in `parse_bytes`.

    Returns:
        Bytes.

    Raises:
        ValueError: If the text is no size, or a positive number below 1 MiB without a unit (`24`).
    """
    num_bytes = parse_bytes(text)
    if text.strip()[-1].isdecimal() and 0 < num_bytes < _FEWEST_BYTES_MEANT:
        raise ValueError(
            f"{text!r} must be typed with a unit: it would be {num_bytes:,} bytes; did you mean {text.strip()}GiB? "
            "Sizes below 1 MiB need their unit"
        )
    return num_bytes


def common_unit(largest: int) -> tuple[str, int]:
    """Choose one unit for several sizes, from KiB to GiB.

    Args:
        largest: Largest of the sizes, in bytes.

    Returns:
        Name of the unit, and its bytes.
    """
    return next((unit for unit in _BINARY_UNITS[1:] if largest >= unit[1]), _BINARY_UNITS[-1])


def format_bytes(num_bytes: float) -> str:
    """Write a size in the largest binary unit that does not exceed it, from 1 KiB on with three or more digits.

    Args:
        num_bytes: Bytes; may be negative.
    """
    for unit, size in _BINARY_UNITS:
        if abs(num_bytes) >= size:
            value = num_bytes / size
            return f"{value:,.2f} {unit}" if abs(value) < 100 else f"{value:,.1f} {unit}"
    return f"{num_bytes:.0f} B"
