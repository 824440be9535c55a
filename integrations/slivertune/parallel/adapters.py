"""Adapters that train a method under a layout. Each is a module `parallel/{ddp,fsdp2,zero}/METHOD.py`."""

from importlib import import_module
from typing import Any, Protocol, cast
from weakref import WeakSet

from torch import nn

from slivertune.core.layout import Layout
from slivertune.core.sliver import Sliver

_FOLDERS: dict[Layout, str] = {"ddp": "ddp", "fsdp2": "fsdp2", "zero1": "zero", "zero2": "zero", "zero3": "zero"}
_adapters: dict[tuple[str, str], str] = {
    (method, folder): f"slivertune.parallel.{folder}.{method}"
    for method in ("hift", "sft")
    for folder in ("ddp", "fsdp2", "zero")
}


_prepared: WeakSet[Sliver] = WeakSet()
"""Optimizers of models that their layout has sharded or put into an engine."""


class LayoutAdapter(Protocol):
    """Trains one method on several ranks of one layout. A module with these functions implements it."""

    def prepare(self, accelerator: Any, model: nn.Module, optimizer: Any, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """Prepare the objects that `slivertune.prepare` was given, on every rank.

        Args:
            accelerator: `accelerate.Accelerator` of this layout.
            model: The only model among the objects.
            optimizer: The only `Sliver` among them, built over the model, before its first step.
            objects: As for `accelerator.prepare`.

        Returns:
            The prepared objects in the same order.

        Raises:
            ValueError: If the settings differ between ranks, or the layout does not support the method.
        """


class EngineAdapter(LayoutAdapter, Protocol):
    """Trains one method under ZeRO, with accelerate or on a bare DeepSpeed engine."""

    def initialize(
        self, optimizer: Any, config: dict[str, Any], arguments: dict[str, Any]
    ) -> tuple[Any, Any, Any, Any]:
        """Make a bare DeepSpeed engine that steps the method, on every rank.

        Args:
            optimizer: A `Sliver`, built over the model among the arguments, before its first step.
            config: DeepSpeed's config without "auto"; missing settings are filled in.
            arguments: The other arguments of `deepspeed.initialize`.

        Returns:
            The engine, the optimizer, the loader and the schedule.

        Raises:
            ValueError: If the settings differ between ranks, or the config does not support the method.
        """


def register_adapters(
    method: str, *, ddp: str | None = None, fsdp2: str | None = None, zero: str | None = None
) -> None:
    """Register the adapters of another package's method, so that it trains on several ranks.

    Args:
        method: `Sliver.method`.
        ddp: Dotted name of a module that is a `LayoutAdapter`; None if the method does not support DDP.
        fsdp2: Likewise for FSDP2.
        zero: Likewise for ZeRO-1, 2 and 3; `slivertune.initialize` needs an `EngineAdapter`.
    """
    for folder, module in (("ddp", ddp), ("fsdp2", fsdp2), ("zero", zero)):
        if module is not None:
            _adapters[method, folder] = module


def adapter_of(optimizer: Sliver, layout: Layout) -> LayoutAdapter:
    """Import the adapter of a method and a layout of several ranks, on demand: a layout's library is heavy.

    Raises:
        ValueError: If the layout does not support the method.
    """
    module = _adapters.get((optimizer.method, _FOLDERS[layout]))
    if module is None:
        known = ", ".join(folder for method, folder in _adapters if method == optimizer.method)
        raise ValueError(
            f"{type(optimizer).__name__} does not train under {layout}. Train on one device"
            + (f" or under {known}" if known else "")
        )
    return cast(LayoutAdapter, import_module(module))


def engine_adapter_of(optimizer: Sliver, layout: Layout) -> EngineAdapter:
    """Import the adapter of a method on a bare DeepSpeed engine. See `adapter_of`."""
    return cast(EngineAdapter, adapter_of(optimizer, layout))


def check_before(optimizer: Sliver, model: nn.Module, layout: Layout) -> None:
    """Refuse an optimizer that can't be prepared. These checks hold for every method and layout.

    Args:
        optimizer: A `Sliver`.
        model: The model that it is prepared with.
        layout: The layout of the run.

    Raises:
        ValueError: If the optimizer was built over another model, or the layout does not support it; says what to use.
        RuntimeError: If the optimizer was prepared before or has already stepped.
    """
    if optimizer in _prepared:
        raise RuntimeError(
            f"the {type(optimizer).__name__} and its model are prepared for {layout} already, and can be prepared only "
            "once. Train with the objects that the first call returned"
        )
    if optimizer.updates:
        raise RuntimeError(
            f"the {type(optimizer).__name__} has already made {optimizer.updates} updates. Prepare it before its first "
            "step, and load its state afterwards"
        )
    optimizer.check_built_over(model)
    if (clash := optimizer.unsupported(layout)) is not None:
        raise ValueError(clash)


def note_prepared(optimizer: Sliver, layout: Layout) -> None:
    """Let `check_before` refuse an optimizer from now on, unless its layout leaves the model as it is (DDP)."""
    if layout != "ddp":
        _prepared.add(optimizer)
