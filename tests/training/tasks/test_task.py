from slivertune.training.tasks.task import PaddingCollator


def test_rows_are_padded_on_the_right_and_padding_carries_no_loss() -> None:
    batch = PaddingCollator(pad_token_id=9)(
        [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4], "labels": [4]}]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [4, -100, -100]]


def test_documents_are_their_own_labels_but_for_a_first_token_which_nothing_predicts() -> None:
    # The padding id is also a real token here, whose label must stay.
    batch = PaddingCollator(pad_token_id=9, causal=True)([{"input_ids": [1, 2, 9]}, {"input_ids": [9, 9]}])
    assert batch["labels"].tolist() == [[-100, 2, 9], [-100, 9, -100]]


def test_packed_rows_need_no_mask() -> None:
    batch = PaddingCollator(pad_token_id=9, causal=True, masked=False)([{"input_ids": [1, 2]}])
    assert set(batch) == {"input_ids", "labels"}


def test_a_class_per_row_stays_one_number() -> None:
    rows = [
        {"input_ids": [1, 2], "token_type_ids": [0, 1], "attention_mask": [1, 1], "labels": 3},
        {"input_ids": [1], "token_type_ids": [1], "attention_mask": [1], "labels": 0},
    ]
    batch = PaddingCollator(pad_token_id=0)(rows)
    assert batch["labels"].tolist() == [3, 0]
    assert batch["token_type_ids"].tolist() == [[0, 1], [1, 0]]
