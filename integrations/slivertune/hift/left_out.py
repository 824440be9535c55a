"""Chunks that a plan does not step, since a chunk like them stands for them. A run steps every chunk."""

from collections.abc import Sequence

import torch

from slivertune.core.outputs import tensors_of
from slivertune.core.repeated_work import few_of_equal
from slivertune.hift.chunk import Chunk
from slivertune.hift.offload_buffer import StateStore
from slivertune.hift.offloaded_gradient import OffloadedGradient


def few_of(chunks: Sequence[Chunk]) -> list[tuple[Chunk, Sequence[Chunk]]]:
    """Return the chunks to step, in order, each with those that it stands for (`few_of_equal`).

    Args:
        chunks: Chunks, in the order of their steps.
    """
    return few_of_equal(chunks, _form, chunks[0].slices[0].weight.parameter) if chunks else []


def finish_left_out(left_out: Sequence[Chunk], model: Chunk, store: StateStore | None) -> None:
    """Give chunks that are left out what the step of the one that stands for them has left.

    Args:
        left_out: The chunks, each of one slice.
        model: Chunk that was stepped in their place.
        store: Store of their state; None if the state is discarded.
    """
    without = [chunk for chunk in left_out if not chunk.tables]
    for table in tables_of(model):
        for chunk, another in zip(without, _many_like(table, len(without)), strict=True):
            chunk.tables.append(another)
    (like,) = model.slices
    gradient = like.weight.parameter.grad
    if isinstance(gradient, OffloadedGradient):
        gradient.part_norms += _many_like(gradient.part_norms[-1], len(left_out))
    if store is not None:
        for chunk in left_out:
            store.take_form(chunk.slices[0], like)


def tables_of(chunk: Chunk) -> list[torch.Tensor]:
    """Return what a chunk's optimizer keeps beside its state, such as the code books of 8-bit state.

    Args:
        chunk: Chunk that was stepped, or left out.
    """
    own = {} if chunk.optimizer is None else vars(chunk.optimizer)
    beside = {name: value for name, value in own.items() if name not in ("state", "param_groups")}
    return [*tensors_of(beside), *chunk.tables]


def _many_like(tensor: torch.Tensor, number: int) -> Sequence[torch.Tensor]:
    """Return tensors of a tensor's form, in one memory: to make them one by one takes longer."""
    return tensor.new_empty((number, *tensor.shape)).unbind()


def _form(chunk: Chunk) -> tuple[str, int] | None:
    """Return a chunk's weight and number of elements, which chunks alike have in common, or None for several slices."""
    one = chunk.slices[0]
    return None if len(chunk.slices) > 1 or one.is_whole else (one.weight.name, one.stop - one.start)
