"""Stand-in for logits that are never computed, which a model must not read during its forward."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from slivertune.core.torch_internals import plain_tensor_functions, tree_leaves, version_of

READ = "the model reads its head's output outside of the loss function"
"""Reason why a loss can't be chunked if a model caps or scales its logits, or adds a term of its own to the loss."""
GONE = "the output's logits, which are never computed, are read after the forward"
"""Reason why a loss can't be computed from a model's output: over no classes it would be 0, infinity or NaN."""


class ChunkedLossError(RuntimeError):
    """Error of a model that uses its head's output outside of its loss function, or hides its head.

    Args:
        reason: Reason, as a clause.
    """

    @property
    def reason(self) -> str:
        """Reason, as a clause."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f"the loss can't be chunked: {self.reason}. Call remove() on the handle"


class AbsentLogits(torch.Tensor):
    """Logits without classes, shape (..., 0), fp32. Until `release`, only shape, dtype and device can be read.

    Afterwards they behave as any empty tensor, except for functions that make values of them alone, such as a sum.
    """

    is_released = False
    """Whether the forward is over."""

    @classmethod
    def like(cls, hidden: torch.Tensor, *, is_compiling: bool) -> torch.Tensor:
        """Make the stand-in for the logits of hidden states.

        Args:
            hidden: Input of the head, shape (..., hidden size).
            is_compiling: Whether `torch.compile` traces this call.

        Returns:
            Stand-in, shape (..., 0), fp32, so that a model's cast to fp32 returns the same tensor. It is a plain tensor
            if operators do not run one by one: inside of `torch.compile`, and without data, as in a memory plan.
        """
        empty = hidden.new_empty((*hidden.shape[:-1], 0), dtype=torch.float32, requires_grad=False)
        is_watched = type(empty) is torch.Tensor and not is_compiling
        return empty.as_subclass(cls) if is_watched else empty

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function, and refuse a result that was computed from the absent logits.

        Raises:
            ChunkedLossError: If the function fails on the stand-in or makes values of it. Before the forward is over,
                also if it returns another tensor or writes into the stand-in.
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
            except (RuntimeError, IndexError) as error:  # no classes have no largest, and so on
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
        """Allow stand-ins to be read, since the forward is over."""
        for tensor in tensors:
            if isinstance(tensor, cls):
                tensor.is_released = True


def _version(tensor: torch.Tensor) -> int:
    """Count the writes to a tensor, as 0 for inference tensors, which keep no count."""
    return 0 if tensor.is_inference() else version_of(tensor)
