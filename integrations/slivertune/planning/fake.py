"""Fake tensors, which have sizes and no data, and overrides of operators and masks that would read their values."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from slivertune.core.repeated_work import running_different_parts
from slivertune.core.torch_internals import (
    ASKS_FOR_DEVICE,
    FINDS_DISTINCT_VALUES,
    READS_A_VALUE,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    is_without_data,
)
from slivertune.core.transformers_internals import has_own
from slivertune.planning.kernels import Kernels, kernels_of
from slivertune.planning.operator_cache import CachedFakeTensorMode

_MASKS = "sdpa"
"""Name of the attention implementation whose mask function is replaced."""


@contextmanager
def without_data(kernels: Kernels = "gpu", mode: CachedFakeTensorMode | None = None) -> Iterator[None]:
    """Make every tensor created inside fake, and let operators save for the backward what real kernels save.

    Fake tensors report that they are on the CPU; "device" is the ledger's word for where the model computes.

    Args:
        kernels: Device whose kernels the operators imitate, a GPU or the CPU.
        mode: Mode whose tensors and operators are known from an earlier use. A new one by default.

    Raises:
        ValueError: If the code inside needs the value of a tensor.
    """
    try:
        with (
            CachedFakeTensorMode() if mode is None else mode,
            kernels_of(kernels),
            one_sequence_a_row(),
            running_different_parts(),
            warnings.catch_warnings(),
        ):
            # The streamed step compares storages by address, which is correct for fake tensors, too.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"this model's step depends on the values of its tensors ({error}), and a plan has none. Mixtures of "
            "experts that transformers multiplies in groups (Mixtral, Qwen3-MoE, GPT-OSS, DeepSeek-V3) can be "
            "planned, but not those that look up the tokens of one expert after the other. Plan a dense model of the "
            "same sizes for a bound, or run a few steps of slivertune train with the memory ledger"
        ) from error


class UncompiledMode(TorchDispatchMode):
    """Mode that torch calls without its guards against compilation. Nothing compiles tensors without data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class FakeOverrides(UncompiledMode):
    """Overrides operators of an optimizer's step that read values, for backward and step only.

    A single value reads as 1, which decides no size in any optimizer here (step counts, code books). `nonzero` finds
    nothing, since it searches for ties of equal gradients, which are few. `unique` returns all values that it gets:
    the random positions of SFT's first selection, out of many more than it takes.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ASKS_FOR_DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is READS_A_VALUE:
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if func is FINDS_DISTINCT_VALUES:
            none = args[0].new_empty(0, dtype=torch.int64)
            return args[0].new_empty(args[0].numel()), none, none
        return func(*args, **(kwargs or {}))


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Let fake models skip the attention mask that real models would skip.

    transformers reads position ids to find out whether several sequences are packed into one row, and makes a mask of
    n x n if it can't read them. A plan's sequences are never packed, so that no mask is needed.

    Inside, an entry in transformers' registry is replaced. The replacement forwards all calls that are not a plan's.
    """
    registry: Any = ALL_MASK_ATTENTION_FUNCTIONS
    function, had_own = registry[_MASKS], has_own(registry, _MASKS)

    def make_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        if is_without_data() and kwargs.get("attention_mask") is None and "allow_is_causal_skip" in kwargs:
            kwargs["allow_is_causal_skip"] = True
        mask: torch.Tensor | None = function(*args, **kwargs)
        return mask

    registry[_MASKS] = make_mask
    try:
        yield
    finally:
        if had_own:
            registry[_MASKS] = function
        else:
            del registry[_MASKS]
