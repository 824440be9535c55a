import re

import pytest

from slivertune.core.byte_text import common_unit, format_bytes, parse_bytes, parse_memory_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("0.1GB", 10**8),
        ("128MiB", 2**27),
        ("512kib", 2**19),
        ("123456789", 123456789),
        ("0", 0),
        ("9007199254740993B", 2**53 + 1),  # a float has no such number
    ],
)
def test_a_size_is_read_to_the_byte(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["24G", "", "GiB", "-1GiB", "24GiBs", "1e9", "1.2.3GB"])
def test_what_is_no_size_or_could_be_two_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{text!r} must be a size, such as 24GiB")):
        parse_bytes(text)


def test_a_memory_of_a_few_bytes_wants_a_unit() -> None:
    sizes = {"24GiB": 24 * 2**30, "1048576": 2**20, "24KiB": 24 * 2**10, "24B": 24, "0": 0}
    assert {text: parse_memory_size(text) for text in sizes} == sizes
    for text in ("24", " 24 ", "1048575", "1.5"):
        with pytest.raises(ValueError, match=re.escape(f"did you mean {text.strip()}GiB?")):
            parse_memory_size(text)


def test_sizes_are_written_in_the_largest_unit_of_which_there_is_one() -> None:
    assert [
        format_bytes(size)
        for size in (0, 1023, 1024, 2**20 - 1, 1536 * 2**20, 42 * 2**30, 200 * 2**30, 3 * 2**40, -(2**31))
    ] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1,024.0 KiB",
        "1.50 GiB",
        "42.00 GiB",
        "200.0 GiB",
        "3.00 TiB",
        "-2.00 GiB",
    ]


def test_sizes_beside_each_other_share_the_unit_of_the_largest() -> None:
    assert common_unit(2**30) == ("GiB", 2**30)
    assert common_unit(2**30 - 1) == ("MiB", 2**20)
    assert common_unit(0) == ("KiB", 2**10)
    assert common_unit(2**45) == ("GiB", 2**30), "terabytes of one GPU would be hard to compare with its size"
