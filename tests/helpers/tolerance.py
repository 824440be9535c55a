"""How far two correct results in floating point may lie apart, from the sums they take and never from one machine.

Sums in another order round otherwise: another processor, another number of threads or of rows in a product is enough.

- *One operator*: `sum_limit`, the bound of its sums' length and dtype.
- *A whole step*, a forward and backward pass with updates: `step_limit`, four times the distance of the reference to
  itself with every operator computed in fp64 (`exact_sums`) on this machine, and never more than a cap. The test states
  the cap, and a missing or doubled term exceeds it by far.

Results of the same operators on the same values need neither: they have the same bits.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Values = Mapping[str, torch.Tensor | None] | Sequence[float] | torch.Tensor | float
T = TypeVar("T")

LAMBDA = 4.0
"""Standard deviations that a sum's rounding error may reach: one sum in a thousand would by chance."""
FACTOR = 4.0
"""Of the reference's own distance: two results, each as far from the exact one, and as much again for luck."""
SMALL = 0.1
"""Of the largest value: below it a tensor counts as a remainder of larger terms, like the gradients of queries and
keys, whose rounding is that of what cancels in the softmax's backward."""

_ROUNDED = (torch.float32, torch.bfloat16, torch.float16)
_ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
_AS_THEY_ARE = frozenset(
    {
        "_to_copy",
        "clone",
        "cat",
        "stack",
        "index",
        "index_select",
        "gather",
        "embedding",
        "repeat",
        "where",
        "masked_fill",
    }
    | {"add", "sub", "rsub", "mul", "div", "neg", "abs", "sqrt", "maximum", "minimum", "threshold_backward"}
    | {"_grouped_mm"}
)
"""Operators that copy, those that fp64 would not round otherwise, and one that has no fp64."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def sum_limit(num_terms: int, dtype: torch.dtype, size: Any = 1.0) -> Any:
    """How far two sums of the same terms, taken in different orders, may lie apart.

    One sum is off by at most `n u` of the sum of the terms' sizes (Higham, Accuracy and Stability of Numerical
    Algorithms, 4.2), and but for a chance of `2 exp(-lambda^2 / 2)` by at most `lambda sqrt(n) u` (Higham and Mary, A
    new approach to probabilistic rounding error analysis, 2019, theorem 2.4). The lesser counts, twice for two sums.

    Args:
        num_terms: Terms of the longest sum; products of sums add theirs.
        dtype: What the sums are kept in.
        size: Sum of the terms' absolute values; a tensor of them for the elements of a result.

    Returns:
        The limit, of the type of `size`.
    """
    return 2 * min(num_terms, LAMBDA * math.sqrt(num_terms)) * unit_roundoff(dtype) * size


def assert_sums_close(found: torch.Tensor, expected: torch.Tensor, num_terms: int, size: Any = None) -> None:
    """Two results of one operator differ by the order of its sums alone.

    Args:
        found: One result; its dtype is what the sums are kept in.
        expected: The other.
        num_terms: Terms of the longest sum.
        size: Sum of each element's terms by absolute value; the largest element of `expected` when None, which is
            right for sums whose terms do not cancel.
    """
    assert found.shape == expected.shape, (found.shape, expected.shape)
    size = expected.detach().double().abs().max() if size is None else size
    excess = (found.detach().double() - expected.detach().double()).abs() - sum_limit(num_terms, found.dtype, size)
    assert bool((excess <= 0).all()), f"{float(excess.max()):.2e} beyond the bound of sums of {num_terms} terms"


class _ExactOperators(TorchDispatchMode):
    """Computes each operator in fp64 and rounds its result to the dtype that it would have had."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _is_a_function_of_its_arguments(func):
            return result
        return _mapped(_rounded_as, func(*_mapped(_raised, args), **_mapped(_raised, kwargs)), result)


@functools.cache
def _is_a_function_of_its_arguments(func: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    if "::" in name or func._schema.is_mutable or func.is_view or name in _AS_THEY_ARE:
        return False
    return name in _ATTENTION or torch.Tag.nondeterministic_seeded not in func.tags


def _mapped(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """Apply a function to each leaf of arguments or results, in half of the time of torch's own `tree_map`."""
    if isinstance(value, tuple | list):
        found = [_mapped(function, *each) for each in zip(value, *others, strict=True)]
        return found if isinstance(value, list) else tuple(found)
    if isinstance(value, dict):
        return {key: _mapped(function, each) for key, each in value.items()}
    return function(value, *others)


def _raised(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _ROUNDED else value
    return value.double() if isinstance(value, torch.Tensor) and value.dtype in _ROUNDED else value


def _rounded_as(value: Any, like: Any) -> Any:
    return value.to(like.dtype) if isinstance(value, torch.Tensor) and value.dtype == torch.float64 else like


@contextmanager
def exact_sums() -> Iterator[None]:
    """Within, operators compute in fp64 and round once; the random state is as before afterwards.

    Operators in place (optimizers' own) run as they are, and so do random ones and those of other libraries.
    """
    with torch.random.fork_rng(devices=[]), _ExactOperators():
        yield


def with_exact(compute: Callable[[], T]) -> tuple[T, T]:
    """What a reference gives, and what it gives with exact sums; it is called twice and must start afresh each time."""
    with exact_sums():
        exact = compute()
    return compute(), exact


def distance(found: Values, expected: Values) -> float:
    """The largest difference, relative to the largest value expected in its tensor.

    A tensor whose largest value is below `SMALL` of the largest of all counts as if it had that.
    """
    pairs = _pairs(found, expected)
    sizes = [float(value.abs().max()) if value.numel() else 0.0 for _, value in pairs]
    assert max(sizes, default=0.0) > 0, "a comparison with zeros"
    least = SMALL * max(sizes)
    # A difference that is no number is beyond every limit.
    errors = [(one - other).abs().nan_to_num(nan=math.inf) for one, other in pairs]
    return max(float(e.max()) / max(size, least) for e, size in zip(errors, sizes, strict=True) if e.numel())


def _pairs(found: Values, expected: Values) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(expected, Mapping):
        assert isinstance(found, Mapping) and found.keys() == expected.keys()
        missing = [name for name in expected if (found[name] is None) != (expected[name] is None)]
        assert not missing, f"one side has no {missing}"
        both: list[Any] = [(found[name], value) for name, value in expected.items() if value is not None]
    elif isinstance(expected, Sequence):
        assert isinstance(found, Sequence) and len(found) == len(expected)
        both = list(zip(found, expected, strict=True))
    else:
        both = [(found, expected)]
    tensors = [tuple(torch.as_tensor(each).detach().double() for each in pair) for pair in both]
    assert all(one.shape == other.shape for one, other in tensors), "other shapes"
    return [(one, other) for one, other in tensors]


def step_limit(expected: Values, exact: Values, cap: float, dtype: torch.dtype = torch.float32) -> float:
    """How far a step may lie from the reference's, as `distance` counts.

    Args:
        expected: The reference's result.
        exact: Its result with exact sums (`with_exact`), or in another order.
        cap: What the limit never exceeds, so that a wrong reference can't excuse a wrong result.
        dtype: What results are rounded to; no limit is less than four units of it.
    """
    return min(cap, max(FACTOR * distance(expected, exact), 8 * unit_roundoff(dtype)))


def assert_step_close(
    found: Values, expected: Values, exact: Values, *, cap: float, dtype: torch.dtype = torch.float32
) -> None:
    """A step is the reference's but for the order of its sums; the arguments are those of `step_limit`."""
    limit, apart = step_limit(expected, exact, cap, dtype), distance(found, expected)
    assert apart <= limit, f"{apart:.2e} apart, beyond {limit:.2e} (cap {cap:.0e})"
