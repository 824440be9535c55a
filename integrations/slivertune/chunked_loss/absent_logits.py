"""A tensor in place of logits that are never computed: a model that reads it during its forward is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from slivertune.core.torch_internals import plain_tensor_functions, tree_leaves, version_of

READ = "the model reads its head's output outside of the loss function"
"""Why a loss can't be chunked where a model caps or scales its logits, or adds a term of its own to the loss."""
GONE = "the output's logits, which are never computed, are read after the forward"
"""Why a loss that is made of a model's output can't be, which would be that of no classes: 0, infinity or NaN."""


class ChunkedLossError(RuntimeError):
    """The model uses its head's output in another way than to hand it to its loss function, or hides its head.

    Args:
        reason: A clause.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the loss can't be chunked: {reason}; remove() the handle")
        self.reason = reason


class AbsentLogits(torch.Tensor):
    """Logits without classes, shape (..., 0), fp32; only their shape, dtype and device can be read until `release`.

    Then they behave as any empty tensor, but for functions that make values of them alone, as the sum of nothing.
    """

    is_released = False
    """Whether the forward is over."""

    @classmethod
    def like(cls, hidden: torch.Tensor) -> torch.Tensor:
        """Make the stand-in for the logits of hidden states.

        Args:
            hidden: The head's input, shape (..., hidden size).

        Returns:
            Shape (..., 0), fp32: a model that widens its logits hands on the same tensor. A plain tensor where
            operators are not run one by one: inside of `torch.compile`, and without data, as in a memory plan.
        """
        empty = hidden.new_empty((*hidden.shape[:-1], 0), dtype=torch.float32, requires_grad=False)
        is_watched = type(empty) is torch.Tensor and not torch.compiler.is_compiling()
        return empty.as_subclass(cls) if is_watched else empty

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch; a result that is another tensor was computed from logits that do not exist.

        Raises:
            ChunkedLossError: If the function fails on it or makes values of it. If the forward is not over, also if it
                returns another tensor or writes into this.
        """
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        given = [each for each in tensors if isinstance(each, cls) and not each.is_released]
        name = getattr(function, "__name__", str(function)).strip("_")
        reason = f"{READ} ({name}), as for soft-capping, scaling or a term of its own" if given else f"{GONE} ({name})"
        with plain_tensor_functions():
            versions = [_version(each) for each in given]
            try:
                result = function(*args, **kwargs)
            except (RuntimeError, IndexError) as error:  # of no classes there is no largest, and so on
                raise ChunkedLossError(reason) from error
            is_written = versions != [_version(each) for each in given]
        others = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if given and (is_written or any(all(each is not one for one in given) for each in others)):
            raise ChunkedLossError(reason)
        if given or name == "as_subclass" or name.startswith("new_"):
            return result
        if all(isinstance(each, cls) for each in tensors) and any(each.numel() for each in others):
            raise ChunkedLossError(reason)
        if isinstance(result, torch.Tensor) and result.is_floating_point() and not result.numel():
            result = result.as_subclass(cls)
            result.is_released = True
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy as a plain tensor."""
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    @classmethod
    def release(cls, tensors: Iterable[torch.Tensor]) -> None:
        """Let stand-ins be read, since the forward is over."""
        for tensor in tensors:
            if isinstance(tensor, cls):
                tensor.is_released = True


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; inference tensors do not know."""
    return 0 if tensor.is_inference() else version_of(tensor)
