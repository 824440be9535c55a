"""Tensors with sizes and no data, and overrides of the operators that read their values."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slivertune.core.torch_internals import (
    FINDS_DISTINCT_VALUES,
    READS_A_VALUE,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
)
from slivertune.planning.kernels import GpuKernels
from slivertune.planning.masks import one_sequence_a_row


@contextmanager
def without_data() -> Iterator[None]:
    """Every tensor made inside has a size and no data; its operators keep what they keep on a GPU.

    Tensors say that they lie on the CPU; "device" is the ledger's word for where the model computes.

    Raises:
        ValueError: If the code inside can't go on without knowing a value.
    """
    try:
        with FakeTensorMode(), GpuKernels(), one_sequence_a_row(), warnings.catch_warnings():
            # The streamed step compares storages by address, which is right for those without data, too.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"this model's step depends on the values of its tensors ({error}), and a plan has none; models that route "
            "tokens by value, such as mixtures of experts, can't be planned yet"
        ) from error


class FakeOverrides(TorchDispatchMode):
    """Overrides operators that read values, which an optimizer's step calls; entered for backward and step alone.

    A single number is one; a search for what is true finds nothing; random positions are all different. The first
    decides no size in any optimizer here (step counts, code books); the second is the ties of split masters and of
    equal gradients, which are few; the third is SFT's first choice, out of many more than it takes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is READS_A_VALUE:
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if func is FINDS_DISTINCT_VALUES:
            none = args[0].new_empty(0, dtype=torch.int64)
            return args[0].new_empty(args[0].numel()), none, none
        return func(*args, **(kwargs or {}))
