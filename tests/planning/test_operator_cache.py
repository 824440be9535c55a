"""Operators that are looked up return what torch's own mode returns, which is asked beside."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typing_extensions import override

from slivertune.core.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from slivertune.planning import fake
from slivertune.planning.make import make_plan
from slivertune.planning.operator_cache import UNKNOWN, CachedFakeTensorMode
from slivertune.planning.request import PlanRequest
from tests.helpers.plan_requests import paper_request
from tests.planning.made import narrow_llama


class Checked(CachedFakeTensorMode):
    """Asks torch beside for each operator that writes into none of its inputs."""

    @override
    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = super().dispatch(func, types, args, kwargs)
        if func.namespace != "aten":
            return found
        if func._schema.is_mutable:
            assert not isinstance(found, FakeTensor) or any(found is each for each in (*args, *(kwargs or {}).values()))
        else:
            expected = FakeTensorMode.dispatch(self, func, types, args, kwargs or {})
            assert forms(found, args) == forms(expected, args), func
        return found

    @override
    def made(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Check what passes the other modes by, too."""
        found = super().made(func, args, kwargs)
        if found is not UNKNOWN and not func._schema.is_mutable:
            expected = FakeTensorMode.dispatch(self, func, (), args, kwargs)
            assert forms(found, args) == forms(expected, args), func
        return found


def forms(result: Any, args: Sequence[Any]) -> Any:
    """All that a tensor without data is, and in the memory of which argument it lies."""
    if isinstance(result, (tuple, list)):
        return type(result), [forms(each, args) for each in result]
    if not isinstance(result, FakeTensor):
        return type(result), repr(result)
    memory = result.untyped_storage()
    shared = [
        place
        for place, each in enumerate(args)
        if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata == memory._cdata
    ]
    # Without bytes torch itself shares a memory once, and once not.
    place = (memory.nbytes(), result.storage_offset(), shared if memory.nbytes() else [], result.constant is None)
    return result.shape, result.stride(), result.dtype, result.device, result.layout, result.requires_grad, place


SETTINGS: list[dict[str, Any]] = [
    {"method": "hift"},
    {"method": "hift", "layers_per_group": 2, "gradients": "host", "precision": "mixed_hi"},
    {"method": "hift", "precision": "mixed_hi", "prefetch_bytes": 1 << 20},
    {"method": "sft", "density": 0.05},
    {"method": "sft", "density": 0.05, "selection": "momentum", "load_in_4bit": True, "precision": "bf16"},
    {"method": "lora", "precision": "bf16"},
    {"method": "lora", "load_in_4bit": True, "precision": "bf16"},
    {"method": "dense", "precision": "mixed", "optimizer": "adamw8bit"},
]


def cases(*fast: int) -> pytest.MarkDecorator:
    """All settings with and without TokenTune; those of these places, with TokenTune, are not slow."""
    return pytest.mark.parametrize(
        ("settings", "token_ratio"),
        [
            pytest.param(settings, ratio, marks=() if ratio and place in fast else pytest.mark.slow)
            for place, settings in enumerate(SETTINGS)
            for ratio in (None, 0.3)
        ],
        ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else f"ratio {value}",
    )


def request_of(settings: dict[str, Any], token_ratio: float | None) -> PlanRequest:
    return paper_request(batch_size=2, seq_length=32, gradient_checkpointing=True, token_ratio=token_ratio, **settings)


@cases(1, 4)
def test_each_operator_of_a_plan_returns_what_torch_returns(
    settings: dict[str, Any], token_ratio: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "CachedFakeTensorMode", Checked)
    request = request_of(settings, token_ratio)
    make_plan(request, narrow_llama(1))


@cases()
def test_plans_are_those_of_torchs_own_mode(
    settings: dict[str, Any], token_ratio: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(settings, token_ratio)
    found = make_plan(request, narrow_llama(1))
    monkeypatch.setattr(fake, "CachedFakeTensorMode", FakeTensorMode)
    assert found == make_plan(request, narrow_llama(1))


def matrix() -> torch.Tensor:
    return torch.empty(4, 6)


OPERATORS: dict[str, Callable[[], Any]] = {
    "a sum": lambda: matrix() + matrix(),
    "of a transposed": lambda: matrix().t() * 2,
    "with one row for all": lambda: matrix() + torch.empty(6),
    "an integer and an integer": lambda: torch.ones(3, dtype=torch.int64) * 1,
    "an integer and a number": lambda: torch.ones(3, dtype=torch.int64) * 1.0,
    "an integer and a truth": lambda: torch.ones(3, dtype=torch.int64) * True,
    "two dtypes": lambda: matrix().bfloat16() + matrix(),
    "into itself": lambda: matrix().add_(1),
    "into another": lambda: torch.add(matrix(), matrix(), out=matrix()),
    "into a place that grows": lambda: torch.add(matrix(), matrix(), out=torch.empty(0)),
    "a product into another": lambda: torch.mm(matrix(), torch.empty(6, 3), out=torch.empty(4, 3)),
    "a product into a place that grows": lambda: torch.mm(matrix(), torch.empty(6, 3), out=torch.empty(0)),
    "results into places that grow": lambda: torch.topk(
        matrix(), 2, out=(torch.empty(0), torch.empty(0, dtype=torch.int64))
    ),
    "the end": lambda: matrix()[-2:],
    "every second": lambda: matrix()[::2, 1::3],
    "nothing": lambda: matrix()[3:1],
    "more than there is": lambda: matrix()[:, -100:100],
    "rows of a transposed": lambda: matrix().t()[2:4],
    "several results": lambda: torch.topk(matrix(), 2),
    "a list of results": lambda: matrix().split(2),
    "a named tuple": lambda: torch.native_layer_norm(matrix(), (6,), None, None, 1e-5),
    "a dropout's mask": lambda: torch.native_dropout(matrix(), 0.1, True),
    "a loss and its weight": lambda: F.cross_entropy(matrix(), torch.zeros(4, dtype=torch.int64)),
    "parts": lambda: torch.cat([matrix(), matrix()]),
    "a view": lambda: matrix()[1:, 2:],
    "a view of a view": lambda: matrix()[1:][1:, 3:],
    "a view of another dtype": lambda: matrix().view(torch.uint8),
    "by strides": lambda: matrix()[2:].as_strided((2, 2), (1, 1), 3),
    "by strides from where it is": lambda: matrix()[2:].as_strided((2, 2), (1, 1)),
    "expanded": lambda: matrix()[:1].expand(5, 6),
    "a product of three dimensions": lambda: F.linear(torch.empty(2, 3, 6), matrix()),
    "rows by index": lambda: matrix()[torch.zeros(3, dtype=torch.int64)],
    "a known number": lambda: matrix() * torch.tensor(2.0),
    "reshaped in place": lambda: matrix().squeeze_().t_(),
    "resized": lambda: matrix().resize_(2, 2),
    "many at once": lambda: torch._foreach_add([matrix(), matrix()], 1.0),
    "as another": lambda: torch.empty_like(matrix().t()),
    "a channels-last image": lambda: torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last) + 1,
    "a complex conjugate": lambda: torch.empty(3, dtype=torch.complex64).conj() + 1,
    "on no device": lambda: torch.empty(3, device="meta") + 1,
}


@pytest.mark.parametrize("make", OPERATORS.values(), ids=list(OPERATORS))
def test_an_operator_met_again_returns_what_torch_returns(make: Callable[[], Any]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=False):
        expected = forms(make(), ())
    with Checked():
        assert [forms(make(), ()) for _ in range(3)] == [expected] * 3


@pytest.mark.parametrize("arguments", [(0, 0, 2, 0), (0, 0, 2, -1), (5, 0, 2, 1), (-3, 0, 2, 1)])
def test_a_slice_that_is_none_is_torchs_error(arguments: tuple[int, ...]) -> None:
    errors = []
    for mode in (FakeTensorMode(), CachedFakeTensorMode()):
        with mode, pytest.raises((RuntimeError, IndexError)) as error:
            torch.ops.aten.slice.Tensor(matrix(), *arguments)
        errors.append((type(error.value), str(error.value)))
    assert errors[0] == errors[1]


def test_a_default_dtype_counts() -> None:
    with CachedFakeTensorMode():
        made = []
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            torch.set_default_dtype(dtype)
            try:
                made.append((torch.ones(3, dtype=torch.int64) / 2).dtype)
            finally:
                torch.set_default_dtype(torch.float32)
    assert made == [torch.float32, torch.bfloat16, torch.float32]


def test_a_numbers_type_counts() -> None:
    with CachedFakeTensorMode():
        assert [(torch.ones(3, dtype=torch.int64) * one).dtype for one in (1, 1.0, True, 1)] == [
            torch.int64,
            torch.float32,
            torch.int64,
            torch.int64,
        ]


def test_strides_and_offsets_count() -> None:
    with CachedFakeTensorMode():
        square, rows = torch.empty(4, 4), torch.empty(8, 6)
        assert [(each * 2).stride() for each in (square, square.t(), square)] == [(4, 1), (1, 4), (4, 1)]
        assert [each[1:].storage_offset() for each in (rows[:4], rows[4:], rows[:4])] == [6, 30, 6]
        by_strides = [each.as_strided((2, 2), (1, 1), 3).storage_offset() for each in (rows[:4], rows[4:])]
        assert by_strides == [3, 3]
        assert [each.as_strided((2, 2), (1, 1)).storage_offset() for each in (rows[:4], rows[4:])] == [0, 24]


def test_views_of_another_dtype_begin_where_their_base_does() -> None:
    with CachedFakeTensorMode():
        memory = torch.empty(96, dtype=torch.uint8)
        parts = [memory[start : start + 16] for start in (0, 16, 40)]
        assert [part.view(torch.float32).storage_offset() for part in parts] == [0, 4, 10]
        with pytest.raises(RuntimeError, match="divisible"):
            memory[6:22].view(torch.float32)


def test_views_lie_in_the_memory_of_their_own_tensor() -> None:
    with CachedFakeTensorMode():
        first, second = matrix(), matrix()
        views = [first[1:], second[1:], second[2:][1:]]
    memory = [each.untyped_storage()._cdata for each in (first, second, second)]
    assert [view.untyped_storage()._cdata for view in views] == memory
    assert [view.storage_offset() for view in views] == [6, 6, 18]


def test_a_value_that_torch_knows_is_never_taken_from_another() -> None:
    with CachedFakeTensorMode():
        two, three = torch.tensor(2.0), torch.tensor(3.0)
        assert [(each * 2).item() for each in (two, three)] == [4.0, 6.0]
        assert two.add_(5).item() == 7.0


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(3).nonzero(), lambda: matrix()[matrix() > 0], lambda: matrix().sum().item()]
)
def test_what_depends_on_values_fails_each_time(make: Callable[[], Any]) -> None:
    with CachedFakeTensorMode():
        for _ in range(2):
            with pytest.raises((DynamicOutputShapeException, DataDependentOutputException)):
                make()


def test_an_operator_met_again_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = []
    dispatch = FakeTensorMode.dispatch

    def counted(self: FakeTensorMode, func: Any, *others: Any) -> Any:
        run.append(str(func))
        return dispatch(self, func, *others)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    with CachedFakeTensorMode():
        numbers = []
        for _ in range(3):
            F.linear(torch.empty(2, 3, 6), matrix()).transpose(0, 1).mul_(2)
            numbers.append(len(run))
    assert numbers[0] >= 6
    assert numbers == [numbers[0]] * 3
