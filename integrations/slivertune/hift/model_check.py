"""Whether the model still holds what HiFT trains: the same parameters, of the same dtype and shape, in memory."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from slivertune.core.held_parameters import check_form, held_parameters, whole_shape
from slivertune.hift.piece import Weight


class ModelCheck:
    """Looks at a model before each training forward; a walk over its modules, no tensor is read.

    Args:
        model: The model.
        weights: What HiFT trains; the model holds the parameters that they call `trained`.
    """

    def __init__(self, model: nn.Module, weights: Iterable[Weight]) -> None:
        self._model = model
        self._weights = tuple(weights)
        self._forms = tuple((weight.trained.dtype, whole_shape(weight.trained)) for weight in self._weights)
        self._trained = frozenset(id(weight.trained) for weight in self._weights)
        # By identity, weakly: what the user replaces must not stay in memory for this.
        self._known = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
        self._of_the_user = {
            id(parameter)
            for parameter in model.parameters()
            if parameter.requires_grad and id(parameter) not in self._trained
        }

    def __call__(self) -> None:
        """Compare the model with what it was.

        Raises:
            RuntimeError: If a trained parameter was replaced, cast, resized or offloaded, or a new one wants to be
                trained; naming it, the usual causes, and the way out.
        """
        present: set[int] = set()
        others: list[nn.Parameter] = []
        for _, parameter in held_parameters(self._model):
            present.add(id(parameter))
            if parameter.requires_grad and id(parameter) not in self._trained:
                others.append(parameter)
        for weight, (dtype, shape) in zip(self._weights, self._forms, strict=True):
            parameter = weight.trained
            if id(parameter) not in present:
                raise RuntimeError(
                    f"{weight.name}, which HiFT trains, is no longer in the model: it was replaced after HiFT was "
                    "built (by resize_token_embeddings, a new head, load_state_dict(assign=True), offloading, or "
                    f"the like), and the new tensor would never be trained; do that before HiFT is built, or detach() "
                    "this one and build a new HiFT"
                )
            check_form("HiFT", weight.name, parameter, dtype, shape)
            if parameter.device.type == "meta":
                raise RuntimeError(f"{weight.name} is on meta, where nothing can be trained; load its values first")
        if others:
            self._judge(others)

    def free_successors(self) -> None:
        """Let what has replaced trained parameters have gradients: it was made like them, maybe while frozen."""
        present = dict(self._model.named_parameters())
        for weight in self._weights:
            successor = present.get(weight.name)
            if successor is not None and successor is not weight.trained and successor.is_floating_point():
                successor.requires_grad_(True)

    def _judge(self, others: Iterable[nn.Parameter]) -> None:
        new, unfrozen = [], []
        for parameter in others:
            known = self._known.get(id(parameter))
            if known is None or known() is not parameter:
                new.append(parameter)
            elif id(parameter) not in self._of_the_user:
                unfrozen.append(parameter)
        if new:
            raise RuntimeError(
                f"{self._names(new)} came into the model after HiFT was built and would never be trained (PEFT, new "
                "embeddings or heads); add it before HiFT is built (detach() an older one first), or freeze what is "
                "not to train"
            )
        if unfrozen:
            self._of_the_user.update(map(id, unfrozen))  # said once
            warnings.warn(
                f"{self._names(unfrozen)} was frozen when HiFT was built and requires a gradient now: HiFT does not "
                "train it, though clip_grad_norm_ counts its gradient; freeze it again, unfreeze it before HiFT is "
                "built, or train it by another optimizer",
                UserWarning,
                stacklevel=6,
            )

    def _names(self, parameters: Iterable[torch.Tensor]) -> str:
        wanted = set(map(id, parameters))
        names = [name for name, parameter in self._model.named_parameters() if id(parameter) in wanted]
        return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
