"""Attention masks of whole, unpacked sequences: none, where the real run makes none.

transformers reads position ids to find out whether several sequences are packed into one, and makes a mask of n x n
where it can't read them. A plan's sequences are never packed, so the answer is known.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from slivertune.core.torch_internals import is_without_data
from slivertune.core.transformers_internals import has_own

_IMPLEMENTATION = "sdpa"


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Let models without data skip the mask that they would skip with data.

    For the time being an entry stands in transformers' registry, which passes on whatever is not asked for a plan.
    """
    registry: Any = ALL_MASK_ATTENTION_FUNCTIONS
    function, had_own = registry[_IMPLEMENTATION], has_own(registry, _IMPLEMENTATION)

    def make_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        is_plan = is_without_data()
        if is_plan and kwargs.get("attention_mask") is None and "allow_is_causal_skip" in kwargs:
            kwargs["allow_is_causal_skip"] = True
        mask: torch.Tensor | None = function(*args, **kwargs)
        return mask

    registry[_IMPLEMENTATION] = make_mask
    try:
        yield
    finally:
        if had_own:
            registry[_IMPLEMENTATION] = function
        else:
            del registry[_IMPLEMENTATION]
