from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import slivertune as st
from slivertune.tokentune import gradient_quality
from tests.helpers.models import VOCAB, tiny_bert, tiny_llama
from tests.helpers.tolerance import sum_limit

LIMIT = sum_limit(48, torch.float32)
"""Of the cosine of two gradients that differ by the order of sums over 48 rows of a batch."""


measured = partial(gradient_quality, progress=False)


def batches(num: int = 2) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(1, VOCAB, (num, 2, 24), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": each, "labels": each} for each in ids]


def test_all_tokens_have_the_dense_gradient() -> None:
    quality = measured(tiny_llama(), batches(), [1.0], ["random", "block"])
    assert quality.num_draws == 8
    for row in quality.rows:
        assert row.cosine == pytest.approx(1.0, abs=LIMIT)
        assert row.norm_ratio == pytest.approx(1.0, abs=LIMIT)
        assert row.cosine_deviation == pytest.approx(0.0, abs=LIMIT)


def test_the_cosine_is_that_of_the_flattened_gradients() -> None:
    model = tiny_llama()
    (batch,) = batches(1)
    quality = measured(model, [batch], [0.5], ["random"], num_draws=1, seed=3)

    def flat() -> torch.Tensor:
        return torch.cat(
            [each.flatten() for each in torch.autograd.grad(model(**batch).loss, list(model.parameters()))]
        )

    dense = flat()
    with st.TokenTune(ratio=0.5, pattern="random", seed=3).attach(model):
        drawn = flat()
    (row,) = quality.rows
    limit = sum_limit(dense.numel(), torch.float32)
    assert row.cosine == pytest.approx(torch.cosine_similarity(dense, drawn, dim=0).item(), abs=limit)
    assert row.norm_ratio == pytest.approx((drawn.norm() / dense.norm()).item(), rel=limit)
    assert 0.1 < row.cosine < 0.99


def test_more_tokens_come_nearer_to_the_dense_gradient() -> None:
    quality = measured(tiny_llama(), batches(4), [0.75, 0.5, 0.1], ["random"], num_draws=8)
    cosines = [row.cosine for row in quality.rows]
    assert cosines == sorted(cosines, reverse=True)


def test_modes_gradients_and_hooks_are_as_before() -> None:
    model = tiny_bert()
    model.bert.encoder.layer[1].eval()
    modes = [module.training for module in model.modules()]
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    inputs = [{"input_ids": batches(1)[0]["input_ids"], "labels": torch.tensor([0, 1])}]
    measured(model, inputs, [0.3], ["random"], num_draws=1)
    assert [module.training for module in model.modules()] == modes
    assert all((each.grad == 1).all() for each in model.parameters())
    st.TokenTune(ratio=0.3).attach(model).remove()


def test_dropout_is_off_while_gradients_are_compared() -> None:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    quality = measured(model, batches(), [1.0], ["random"], num_draws=1)
    assert quality.rows[0].cosine == pytest.approx(1.0, abs=LIMIT)


def test_the_table_has_a_line_for_each_row_and_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    quality = measured(tiny_llama(), batches(1), [0.5, 0.25], ["random", "chunks"], num_draws=1)
    lines = quality.table().splitlines()
    assert len(lines) == 5
    for line, row in zip(lines[1:], quality.rows, strict=True):
        assert line.split()[:3] == [row.pattern, f"{row.ratio:.2f}", f"{row.cosine:.3f}"]
    path = quality.plot(tmp_path / "quality.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batches": []}, "there are no batches"),
        ({"ratios": []}, "there are no ratios and patterns"),
        ({"ratios": [0.0]}, r"ratio=0.0 must be in \(0, 1\]"),
        ({"num_draws": 0}, "num_draws=0 must be at least 1"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        measured(**{"model": tiny_llama(), "batches": batches(1), "ratios": [0.5], **options})


def test_a_model_without_anything_to_train_is_refused() -> None:
    model = tiny_llama().requires_grad_(False)
    with pytest.raises(ValueError, match="there are no trainable parameters"):
        measured(model, batches(1), [0.5])


def test_draws_without_a_label_count_as_a_cosine_of_zero() -> None:
    (batch,) = batches(1)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    batch["labels"][0, 1] = 3  # scored at the first position, where there is no attention to others
    quality = measured(tiny_llama(), [batch], [0.05], ["random"], num_draws=40)
    num_hits = round(40 * quality.rows[0].cosine)
    assert 0 < num_hits < 10
    assert quality.rows[0].cosine == pytest.approx(num_hits / 40, abs=LIMIT)


def test_a_batch_without_a_dense_gradient_is_refused() -> None:
    first, second = batches(2)
    second["labels"] = torch.full_like(second["labels"], -100)
    with pytest.raises(ValueError, match="the dense gradient of batch 1 has norm"):
        measured(tiny_llama(), [first, second], [0.5])
