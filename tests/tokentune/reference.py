"""TokenTune as plainly as it can be: the whole model in one graph, and `detach` wherever the paper has no gradient.

Nothing here is shared with the package. The model runs densely on all tokens, by its own attention. Hooks of torch make
the rows of unselected tokens constants at every layer's input and output, and where keys and values come out of their
projections (and of their norms). The loss is a plain cross entropy over the whole model's logits.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from slivertune import TokenTuneHandle
from tests.helpers.models import bits
from tests.helpers.tolerance import assert_step_close, with_exact
from tests.tokentune.families import Batch, Cut, Family

Gradients = dict[str, torch.Tensor | None]
IGNORED = -100
CAP = 1e-4
"""What no limit exceeds: a token's gradient too many or too few is off by more than 1e-3."""


class Expected(NamedTuple):
    """Loss and gradients, and what the same computation gives with exact sums: that far does rounding take them."""

    loss: torch.Tensor
    gradients: Gradients
    exact_loss: torch.Tensor
    exact_gradients: Gradients


def selected(handle: TokenTuneHandle) -> torch.Tensor:
    """What the latest training forward of a hooked model drew."""
    assert handle.last_selection is not None
    return handle.last_selection


def constants(tensor: torch.Tensor, selection: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The same values, with gradients only for selected tokens (and for what is no key and no value).

    Args:
        tensor: Anything with a dimension of tokens, whose first dimension is the batch.
        selection: Positions, shape (batch, k).
        cut: Which dimension has the tokens, and which part of the last one is cut.
    """
    shape = [1] * tensor.dim()
    shape[0], shape[cut.token_dim] = tensor.shape[0], tensor.shape[cut.token_dim]
    flows = torch.zeros(tensor.shape[0], tensor.shape[cut.token_dim], dtype=torch.bool)
    flows = flows.scatter(1, selection, True).reshape(shape)
    if cut.channels is not None:
        flows = flows | ~cut.channels
    return torch.where(flows, tensor, tensor.detach())


@contextmanager
def unselected_are_constants(model: nn.Module, family: Family, selection: torch.Tensor) -> Iterator[None]:
    """Within, forwards of the model carry gradients for the selected tokens alone."""
    hidden = Cut(module="")

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (constants(args[0], selection, hidden), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": constants(kwargs["hidden_states"], selection, hidden)}

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (constants(output[0], selection, hidden), *output[1:])
        return constants(output, selection, hidden)

    handles = []
    for layer in layers_of(model, family):
        handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(layer.register_forward_hook(leave))
        for cut in family.cuts:
            module = layer.get_submodule(cut.module)
            handles.append(module.register_forward_hook(lambda _, __, out, cut=cut: constants(out, selection, cut)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layers_of(model: nn.Module, family: Family) -> nn.ModuleList:
    found = [module for name, module in model.named_modules() if f".{name}".endswith(f".{family.layers}")]
    assert len(found) == 1 and isinstance(found[0], nn.ModuleList), f"{len(found)} lists at {family.layers}"
    return found[0]


def reference_loss(
    model: nn.Module, family: Family, batch: Batch, selection: torch.Tensor, num_items: float | None = None
) -> torch.Tensor:
    """The loss of the selected tokens; its backward gives the reference's gradients.

    Args:
        model: Not hooked by anybody.
        family: Its family.
        batch: As the model takes it.
        selection: Positions, shape (batch, k).
        num_items: Labels in all forwards of an update; None: the mean of this forward.
    """
    with unselected_are_constants(model, family, selection):
        if family.head == "pooled":
            return model(**batch).loss  # type: ignore[no-any-return]
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
        logits = model(**inputs).logits
    targets = all_targets(family, batch)
    is_scored = targets != IGNORED
    is_selected = torch.zeros_like(is_scored).scatter(1, selection, True)
    chosen = is_scored & is_selected
    total = F.cross_entropy(logits[chosen].float(), targets[chosen], reduction="sum")
    if num_items is None:
        return total / max(1, int(chosen.sum()))
    return total / max(1.0, num_items * int(chosen.sum()) / int(is_scored.sum()))


def all_targets(family: Family, batch: Batch) -> torch.Tensor:
    """What each position is scored on: the next token's label in a causal model."""
    if family.head != "causal":
        return batch["labels"]
    if "shift_labels" in batch:
        return batch["shift_labels"]
    labels = batch["labels"]
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)


def reference_gradients(
    model: nn.Module, family: Family, batch: Batch, selection: torch.Tensor, num_items: float | None = None
) -> Expected:
    """Loss and gradients of the selected tokens."""

    def compute() -> tuple[torch.Tensor, Gradients]:
        loss = reference_loss(model, family, batch, selection, num_items)
        loss.backward()
        return loss.detach(), take_gradients(model)

    expected, exact = with_exact(compute)
    return Expected(*expected, *exact)


def dense_gradients(model: nn.Module, batch: Batch) -> Expected:
    """Loss and gradients that a model gives which nothing is attached to."""
    expected, exact = with_exact(lambda: model_gradients(model, batch))
    return Expected(*expected, *exact)


def model_gradients(model: nn.Module, batch: Batch, **options: Any) -> tuple[torch.Tensor, Gradients]:
    """Loss and gradients that the model itself gives, hooked or not."""
    loss = model(**batch, **options).loss
    loss.backward()
    return loss.detach(), take_gradients(model)


def take_gradients(model: nn.Module) -> Gradients:
    """The gradients of all parameters, which have none afterwards."""
    taken = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return taken


def add(left: Gradients, right: Gradients) -> Gradients:
    """The sum of two backwards' gradients."""
    summed: Gradients = {}
    for name, value in left.items():
        other = right[name]
        summed[name] = value if other is None else other if value is None else value + other
    return summed


def distance(actual: Gradients, expected: Gradients) -> float:
    """The norm of the difference of two gradients, relative to that of the expected one, over all parameters."""
    known = _pairs(actual, expected)
    largest = math.sqrt(sum(float(value.double().square().sum()) for _, value in known.values()))
    assert largest > 0, "a comparison with zeros"
    return math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in known.values())) / largest


def _pairs(actual: Gradients, expected: Gradients) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    pairs = {}
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        other = actual[name]
        if value is None or other is None:
            assert value is other, f"one side has no gradient of {name}"
            continue
        assert other.shape == value.shape and other.dtype == value.dtype, name
        pairs[name] = (other, value)
    return pairs


def assert_same(loss: torch.Tensor, gradients: Gradients, expected: Expected) -> None:
    """Loss and gradients are the expected ones but for the order of sums, which depends on the number of rows.

    Each tensor counts by itself, by its largest entry (`tests.helpers.tolerance.distance`).
    """
    assert loss.dtype == expected.loss.dtype
    assert_step_close(loss, expected.loss, expected.exact_loss, cap=CAP)
    assert_same_gradients(gradients, expected.gradients, expected.exact_gradients)


def assert_same_gradients(actual: Gradients, expected: Gradients, exact: Gradients) -> None:
    """Gradients are the expected ones but for the order of sums; `exact` are those with exact sums."""
    _pairs(actual, expected)
    assert_step_close(actual, expected, exact, cap=CAP)


def assert_same_bits(actual: Gradients, expected: Gradients) -> None:
    """Two gradients are the same, to the bit."""
    wrong = [name for name, (a, b) in _pairs(actual, expected).items() if not torch.equal(bits(a), bits(b))]
    assert not wrong, f"other bits: {wrong}"
