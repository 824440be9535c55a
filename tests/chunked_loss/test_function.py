from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from slivertune import chunked_cross_entropy
from slivertune.chunked_loss.products import even_slices
from tests.helpers.tolerance import assert_step_close, assert_sums_close, sum_limit, unit_roundoff

ROWS, SIZE, CLASSES = 67, 24, 311
CHUNKS = [1, 4096, 20_000, 2**26]
"""One row or class at a time; several even and uneven chunks; all in one."""

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(dtype: torch.dtype = torch.float32, *, rows: int = ROWS, scale: float = 0.5) -> Inputs:
    """Hidden states, weight and bias; leaves that require gradients."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, SIZE, generator=generator)
    weight = torch.randn(CLASSES, SIZE, generator=generator) * scale
    return like((hidden, weight, torch.randn(CLASSES, generator=generator) * scale), dtype)


CAP = 1e-4
"""What no limit exceeds; a row too many or too few is off by more than 1e-2."""


def targets(rows: int = ROWS) -> torch.Tensor:
    chosen = torch.randint(0, CLASSES, (rows,), generator=torch.Generator().manual_seed(1))
    chosen[::7] = -100
    return chosen


def like(tensors: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """Copies that are leaves of their own."""
    made = [tensor.detach().to(dtype or tensor.dtype, copy=True).requires_grad_() for tensor in tensors]
    return made[0], made[1], made[2]


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None, num_items: Any = None
) -> torch.Tensor:
    """The head and `ForCausalLMLoss` as transformers write them; wide stays wide, for the reference."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if num_items is None:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits, labels, reduction="sum") / num_items


def gradients(tensors: Inputs) -> list[torch.Tensor]:
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def distances(tensors: Inputs, loss: torch.Tensor, reference: Inputs, reference_loss: torch.Tensor) -> list[float]:
    """Relative distances, in the norm, of loss and gradients from a reference."""
    mine, theirs = [loss.detach(), *gradients(tensors)], [reference_loss.detach(), *gradients(reference)]
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(mine, theirs, strict=True)]


@pytest.mark.parametrize("num_items", [None, 91, torch.tensor(53)], ids=["mean", "int", "tensor"])
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_in_fp32_loss_and_gradients_equal_the_plain_ones(with_bias: bool, chunk_bytes: int, num_items: Any) -> None:
    mine = inputs()
    loss = chunked_cross_entropy(
        mine[0],
        mine[1],
        targets(),
        bias=mine[2] if with_bias else None,
        num_items_in_batch=num_items,
        chunk_bytes=chunk_bytes,
    )
    loss.backward()
    assert loss.dtype == torch.float32
    assert_is_plain(mine, targets(), loss, with_bias=with_bias, num_items=num_items)


def assert_is_plain(
    mine: Inputs,
    labels: torch.Tensor,
    loss: torch.Tensor | None = None,
    *,
    with_bias: bool = True,
    num_items: Any = None,
    scale: float = 1.0,
) -> None:
    """Loss and gradients are the plain ones but for the order of sums, which fp64 tells."""
    found = []
    for dtype in (torch.float32, torch.float64):
        theirs = like(mine, dtype)
        value = scale * plain(theirs[0], theirs[1], labels, theirs[2] if with_bias else None, num_items)
        value.backward()
        found.append((value.detach(), gradients(theirs)))
    if loss is not None:
        # A mean over rows of sums over classes, of products over the width.
        assert_sums_close(loss.detach(), found[0][0], ROWS + CLASSES + SIZE)
    assert_step_close(gradients(mine), found[0][1], found[1][1], cap=CAP)


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize("chunk_bytes", CHUNKS[1:])
def test_in_bf16_it_is_as_near_to_fp64_as_the_plain_loss(chunk_bytes: int, autocast: bool) -> None:
    start = like(inputs(torch.bfloat16), torch.float32 if autocast else None)
    mine, theirs, exact = like(start), like(start), like(start, torch.float64)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = chunked_cross_entropy(mine[0], mine[1], targets(), bias=mine[2], chunk_bytes=chunk_bytes)
        other = plain(theirs[0], theirs[1], targets(), theirs[2])
    reference = plain(exact[0], exact[1], targets(), exact[2])
    for each in (loss, other, reference):
        each.backward()
    assert [tensor.dtype for tensor in gradients(mine)] == [tensor.dtype for tensor in start]
    near, far = distances(mine, loss, exact, reference), distances(theirs, other, exact, reference)
    # Both round at the same places, and a kernel may sum a row in another order.
    assert all(a <= 2 * b + unit_roundoff(torch.float32) for a, b in zip(near, far, strict=True)), (near, far)
    assert max(far) > 1e-5, "rounding must show, or this compares nothing"


def test_leading_dimensions_are_rows() -> None:
    hidden, weight, bias = inputs(rows=66)
    labels = targets(66)
    flat = chunked_cross_entropy(hidden, weight, labels, bias=bias)
    shaped = chunked_cross_entropy(hidden.view(6, 11, SIZE), weight, labels.view(6, 11), bias=bias)
    assert torch.equal(flat, shaped)


def test_a_gradient_that_arrives_scaled_scales_all() -> None:
    mine = inputs()
    (3.5 * chunked_cross_entropy(mine[0], mine[1], targets(), bias=mine[2])).backward()
    assert_is_plain(mine, targets(), scale=3.5)


@pytest.mark.parametrize(
    ("trained", "dtype", "expected"),
    [
        ("", torch.float32, 1),
        ("hidden", torch.float32, 2),
        ("weight", torch.float32, 3),
        ("hidden weight", torch.float32, 4),
        ("bias", torch.float32, 2),
        # fp16 waits for the loss scale, and so computes scores once more.
        ("hidden", torch.float16, 3),
    ],
)
def test_what_is_frozen_costs_no_product(trained: str, dtype: torch.dtype, expected: int) -> None:
    hidden, weight, bias = inputs()
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        tensor.requires_grad_(name in trained)
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = chunked_cross_entropy(hidden, weight, targets(), bias=bias, chunk_bytes=20_000)
        if loss.requires_grad:
            loss.backward()
    # In products of the size of the head's forward.
    assert counter.get_total_flops() == expected * 2 * ROWS * SIZE * CLASSES


class _Births(TorchDispatchMode):
    """Storages of at least some bytes that operators returned; kept alive, so that no address comes twice."""

    def __init__(self, at_least: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at_least = at_least
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().nbytes() >= self.at_least:
            self.storages.setdefault(out.untyped_storage().data_ptr(), out.untyped_storage())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_one_large_tensor_of_a_step_becomes_the_gradient_of_the_weight(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, size, classes = 256, 64, 2000
    hidden, weight = torch.randn(rows, size).to(dtype), torch.randn(classes, size).to(dtype)
    weight.requires_grad_()
    known = weight.untyped_storage().data_ptr()
    with _Births(classes * size * dtype.itemsize) as large:
        chunked_cross_entropy(hidden.requires_grad_(), weight, torch.arange(rows), chunk_bytes=40_000).backward()
    assert weight.grad is not None
    assert large.storages.keys() - {known} == {weight.grad.untyped_storage().data_ptr()}
    with _Births(rows * classes) as large:  # a quarter of the fp32 logits, which the plain loss holds three times
        plain(hidden, weight, torch.arange(rows), None).backward()
    assert sum(storage.nbytes() >= 4 * rows * classes for storage in large.storages.values()) >= 3


def test_a_frozen_weight_is_neither_copied_nor_given_a_gradient() -> None:
    hidden, weight, _ = inputs()
    weight.requires_grad_(False)
    with _Births(weight.nbytes) as large:
        chunked_cross_entropy(hidden, weight, targets(), chunk_bytes=4096).backward()
    assert large.storages.keys() <= {weight.untyped_storage().data_ptr()}
    assert weight.grad is None and hidden.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_a_frozen_head_a_forward_keeps_one_gradient_of_the_hidden_states(dtype: torch.dtype) -> None:
    hidden, weight, _ = inputs(dtype)
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        chunked_cross_entropy(hidden, weight.detach(), targets())
    assert kept == [hidden.nbytes]


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    mine = inputs()
    labels, num_items = targets(), int((targets() != -100).sum())
    for rows in (slice(0, 30), slice(30, ROWS)):
        chunked_cross_entropy(
            mine[0][rows], mine[1], labels[rows], bias=mine[2], num_items_in_batch=num_items, chunk_bytes=4096
        ).backward()
    assert_is_plain(mine, labels)


def test_in_fp16_a_loss_scale_saves_gradients_that_would_vanish() -> None:
    exact = like(inputs(scale=0.01), torch.float64)
    many = 50_000  # softmax / many is about 6e-8, under what fp16 can hold
    plain(exact[0], exact[1], targets(), exact[2], many).backward()
    mine = inputs(scale=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(mine, lr=0.0)
    with torch.autocast("cpu", torch.float16):
        loss = chunked_cross_entropy(mine[0], mine[1], targets(), bias=mine[2], num_items_in_batch=many)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for one, other in zip(gradients(mine), gradients(exact), strict=True):
        # Scores, what the loss gives back, and the gradient are rounded to fp16.
        assert float((one.double() - other).norm() / other.norm()) < sum_limit(3, torch.float16)


@pytest.mark.parametrize("num_items", [None, 5])
def test_without_any_target_it_is_what_the_plain_loss_is(num_items: int | None) -> None:
    mine, theirs = inputs(), inputs()
    nothing = torch.full((ROWS,), -100)
    loss = chunked_cross_entropy(mine[0], mine[1], nothing, bias=mine[2], num_items_in_batch=num_items)
    expected = plain(theirs[0], theirs[1], nothing, theirs[2], num_items)
    # No number, or nothing summed over what there is to share it.
    torch.testing.assert_close(loss, expected, rtol=0, atol=0, equal_nan=True)
    loss.backward()
    expected.backward()
    for one, other in zip(gradients(mine), gradients(theirs), strict=True):
        assert torch.equal(one.abs(), other.abs())


def test_an_ignored_row_may_hold_anything_without_touching_the_loss() -> None:
    hidden, weight, bias = inputs()
    expected = chunked_cross_entropy(hidden, weight, targets(), bias=bias)
    broken = hidden.detach().clone()
    broken[::7] = torch.nan
    assert torch.equal(chunked_cross_entropy(broken, weight, targets(), bias=bias), expected)


def test_another_ignored_target() -> None:
    hidden, weight, bias = inputs()
    labels = targets().clamp(min=0)
    expected = F.cross_entropy(F.linear(hidden, weight, bias), labels, ignore_index=0)
    found = chunked_cross_entropy(hidden, weight, labels, bias=bias, ignore_index=0)
    assert_sums_close(found, expected, SIZE + CLASSES + ROWS)


def test_large_scores_do_not_overflow() -> None:
    hidden, weight, _ = inputs(scale=500.0)
    loss = chunked_cross_entropy(hidden, weight, targets())
    loss.backward()
    # A score is a sum of large terms; its rounding is the loss's.
    assert_sums_close(
        loss, plain(hidden, weight, targets(), None), SIZE + ROWS, size=(hidden.abs() @ weight.abs().T).max()
    )
    assert hidden.grad is not None and bool(hidden.grad.isfinite().all())


def test_a_second_backward_of_a_kept_graph_gives_the_same_and_a_double_one_is_refused() -> None:
    mine = inputs()
    loss = chunked_cross_entropy(mine[0], mine[1], targets(), bias=mine[2], chunk_bytes=4096)
    loss.backward(retain_graph=True)
    first = [tensor.clone() for tensor in gradients(mine)]
    loss.backward(retain_graph=True)
    for one, other in zip(gradients(mine), first, strict=True):
        assert torch.equal(one, 2 * other)
    with pytest.raises(RuntimeError, match="can't be differentiated again"):
        torch.autograd.grad(loss, mine[0], create_graph=True)


def test_it_runs_on_tensors_without_data() -> None:
    with FakeTensorMode():
        hidden = torch.empty(8, SIZE, requires_grad=True)
        weight = torch.nn.Parameter(torch.empty(CLASSES, SIZE))
        chunked_cross_entropy(hidden, weight, torch.empty(8, dtype=torch.int64), chunk_bytes=4096).backward()
    assert weight.grad is not None and weight.grad.shape == weight.shape
    assert hidden.grad is not None


def test_a_target_beyond_the_classes_is_an_error_as_it_is_in_torch() -> None:
    hidden, weight, _ = inputs()
    for wrong in (CLASSES, -1):
        labels = targets()
        labels[3] = wrong
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            chunked_cross_entropy(hidden, weight, labels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes=0 must be at least 1"),
        ({"chunk_bytes": 1.5}, "chunk_bytes=1.5 must be an integer"),
        ({"chunk_bytes": "64MiB"}, "chunk_bytes='64MiB' must be an integer"),
        ({"targets": targets().float()}, "targets in torch.float32 name no classes.*int64"),
        ({"num_items_in_batch": torch.ones(2)}, r"num_items_in_batch of shape \(2,\) must be one number"),
        ({"weight": torch.zeros(0, SIZE)}, "at least one class"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "Give one target for each"),
        ({"weight": torch.zeros(CLASSES, SIZE + 1)}, r"Pass a weight of shape \(classes"),
        ({"weight": torch.zeros(CLASSES, SIZE, dtype=torch.bfloat16)}, "Use one dtype, or autocast"),
        ({"bias": torch.zeros(3)}, f"one number for each of {CLASSES} classes"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    hidden, weight, _ = inputs()
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**{"hidden": hidden, "weight": weight, "targets": targets(), **change})


@pytest.mark.parametrize(("count", "chunk_bytes"), [(10, 12), (1, 1), (7, 1000), (0, 8), (100, 33), (100, 240)])
def test_slices_are_even_cover_all_and_keep_to_their_bytes(count: int, chunk_bytes: int) -> None:
    parts = list(even_slices(count, 4, chunk_bytes))
    assert [index for part in parts for index in range(part.start, part.stop)] == list(range(count))
    sizes = [part.stop - part.start for part in parts]
    assert all(4 * size <= max(chunk_bytes, 4) for size in sizes)
    assert len(set(sizes[:-1])) <= 1 and (not sizes or 0 <= sizes[0] - sizes[-1] < len(sizes))
