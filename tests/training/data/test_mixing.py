from collections import Counter
from typing import Any

import datasets

from slivertune.training.data.mixing import mix_rows


def part(start: int, count: int, *, labelled: bool = False) -> Any:
    """Rows of one token, each another."""
    rows: dict[str, list[Any]] = {"input_ids": [[start + place] for place in range(count)]}
    if labelled:
        rows["labels"] = [[-100]] * count
    return datasets.Dataset.from_dict(rows)


def tokens(rows: Any) -> list[int]:
    return [token for (token,) in rows["input_ids"]]


def test_one_part_stays_as_it_is_and_several_are_put_together() -> None:
    (one, other) = part(0, 3), part(10, 2)
    assert mix_rows([one], None, seed=0) is one
    assert tokens(mix_rows([one, other], None, seed=0)) == [0, 1, 2, 10, 11]


def test_weights_say_how_often_each_part_has_its_turn_until_all_were_seen_whole() -> None:
    large, small = part(0, 400), part(1000, 20)
    rows = tokens(mix_rows([large, small], [3.0, 1.0], seed=0))
    counts = Counter(token < 1000 for token in rows)
    # The large part is the last to be seen whole: 400 draws at 3 in 4. Of about 533 draws the share has a standard
    # deviation of 0.019; the seed is fixed.
    assert counts[True] == 400 and abs(counts[True] / len(rows) - 0.75) < 0.06
    assert set(rows) == {*range(400), *range(1000, 1020)}
    # The small part comes again and again, in its order.
    again = [token for token in rows if token >= 1000]
    assert again == [1000 + place % 20 for place in range(len(again))]


def test_the_seed_and_nothing_else_decides_the_draws_and_the_unit_of_weights_does_not_matter() -> None:
    parts = [part(0, 30), part(100, 30)]
    first = tokens(mix_rows(parts, [0.7, 0.3], seed=1))
    assert first == tokens(mix_rows(parts, [7.0, 3.0], seed=1))
    assert first != tokens(mix_rows(parts, [0.7, 0.3], seed=2))


def test_texts_beside_labelled_rows_are_learned_whole() -> None:
    rows = mix_rows([part(0, 1, labelled=True), part(10, 1)], None, seed=0)
    assert [dict(row) for row in rows] == [
        {"input_ids": [0], "labels": [-100]},
        {"input_ids": [10], "labels": [10]},
    ]
