from typing import Any

import pytest

from slivertune.training.tasks.task import PaddingCollator


@pytest.mark.parametrize(
    ("options", "rows", "expected"),
    [
        pytest.param(
            {},
            [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4], "labels": [4]}],
            {
                "input_ids": [[1, 2, 3], [4, 9, 9]],
                "attention_mask": [[1, 1, 1], [1, 0, 0]],
                "labels": [[-100, 2, 3], [4, -100, -100]],
            },
            id="rows are padded on the right and padding carries no loss",
        ),
        # The padding id is also a real token here, whose label must stay.
        pytest.param(
            {"causal": True},
            [{"input_ids": [1, 2, 9]}, {"input_ids": [9, 9]}],
            {
                "input_ids": [[1, 2, 9], [9, 9, 9]],
                "attention_mask": [[1, 1, 1], [1, 1, 0]],
                "labels": [[-100, 2, 9], [-100, 9, -100]],
            },
            id="documents are their own labels but for a first token, which nothing predicts",
        ),
        pytest.param(
            {"causal": True, "masked": False},
            [{"input_ids": [1, 2]}],
            {"input_ids": [[1, 2]], "labels": [[-100, 2]]},
            id="packed rows need no mask",
        ),
        pytest.param(
            {},
            [
                {"input_ids": [1, 2], "token_type_ids": [0, 1], "attention_mask": [1, 1], "labels": 3},
                {"input_ids": [1], "token_type_ids": [1], "attention_mask": [1], "labels": 0},
            ],
            {
                "input_ids": [[1, 2], [1, 9]],
                "token_type_ids": [[0, 1], [1, 0]],
                "attention_mask": [[1, 1], [1, 0]],
                "labels": [3, 0],
            },
            id="a class per row stays one number",
        ),
    ],
)
def test_rows_become_one_batch(options: dict[str, bool], rows: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    batch = PaddingCollator(pad_token_id=9, **options)(rows)
    assert {name: values.tolist() for name, values in batch.items()} == expected
