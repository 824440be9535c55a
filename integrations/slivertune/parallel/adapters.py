"""What a layout owes for each method, and where it lies: `parallel/{ddp,fsdp2,zero}/METHOD.py`."""

from importlib import import_module
from typing import Any, Protocol, cast

from torch import nn

from slivertune.core.layout import Layout
from slivertune.core.sliver import Sliver

_FOLDERS: dict[Layout, str] = {"ddp": "ddp", "fsdp2": "fsdp2", "zero1": "zero", "zero2": "zero", "zero3": "zero"}
_adapters: dict[tuple[str, str], str] = {
    (method, folder): f"slivertune.parallel.{folder}.{method}"
    for method in ("hift", "sft")
    for folder in ("ddp", "fsdp2", "zero")
}


class LayoutAdapter(Protocol):
    """Trains one method on several ranks of one layout; a module with these functions."""

    def prepare(self, accelerator: Any, model: nn.Module, optimizer: Any, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """Prepare what `slivertune.prepare` was given, on every rank.

        Args:
            accelerator: `accelerate.Accelerator` of this layout.
            model: The one model among the objects.
            optimizer: The one `Sliver` among them, built over the model, before its first step.
            objects: As for `accelerator.prepare`.

        Returns:
            The prepared objects in the same order.

        Raises:
            ValueError: If the ranks were given other settings, or the method and the layout don't go together.
        """


class EngineAdapter(LayoutAdapter, Protocol):
    """Of ZeRO, whose engine exists without accelerate, too."""

    def initialize(
        self, optimizer: Any, config: dict[str, Any], arguments: dict[str, Any]
    ) -> tuple[Any, Any, Any, Any]:
        """Make a bare DeepSpeed engine that steps the method, on every rank.

        Args:
            optimizer: A `Sliver`, built over the model among the arguments, before its first step.
            config: DeepSpeed's, without "auto"; settings that are left out are filled in.
            arguments: The others of `deepspeed.initialize`.

        Returns:
            The engine, the optimizer, the loader and the schedule.

        Raises:
            ValueError: If the ranks were given other settings, or the method and the config don't go together.
        """


def register_adapters(
    method: str, *, ddp: str | None = None, fsdp2: str | None = None, zero: str | None = None
) -> None:
    """Let a method of another package train on several ranks.

    Args:
        method: `Sliver.method`.
        ddp: Dotted name of a module that is a `LayoutAdapter`; None where the method does not train under DDP.
        fsdp2: The same of FSDP2.
        zero: The same of ZeRO-1, 2 and 3; for `slivertune.initialize` it has to be an `EngineAdapter`.
    """
    for folder, module in (("ddp", ddp), ("fsdp2", fsdp2), ("zero", zero)):
        if module is not None:
            _adapters[method, folder] = module


def adapter_of(optimizer: Sliver, layout: Layout) -> LayoutAdapter:
    """What trains a method under a layout of several ranks. Imported when it is asked for: a layout's library is heavy.

    Raises:
        ValueError: If the method does not train under that layout.
    """
    module = _adapters.get((optimizer.method, _FOLDERS[layout]))
    if module is None:
        known = ", ".join(folder for method, folder in _adapters if method == optimizer.method)
        raise ValueError(
            f"{type(optimizer).__name__} does not train under {layout}; it does on one device"
            + (f" and under {known}" if known else "")
        )
    return cast(LayoutAdapter, import_module(module))


def engine_adapter_of(optimizer: Sliver, layout: Layout) -> EngineAdapter:
    """What trains a method on a bare DeepSpeed engine; see `adapter_of`."""
    return cast(EngineAdapter, adapter_of(optimizer, layout))


def check_before(optimizer: Sliver, model: nn.Module, layout: Layout) -> None:
    """Refuse what can't be prepared, whatever the method and the layout.

    Args:
        optimizer: A `Sliver`.
        model: The model that it is prepared with.
        layout: How the ranks will share the run.

    Raises:
        ValueError: If it was built over another model, or can't be trained under the layout; says what to use.
        RuntimeError: If it has already stepped.
    """
    if optimizer.updates:
        raise RuntimeError(
            f"the {type(optimizer).__name__} has already made {optimizer.updates} updates; prepare it before its first "
            "step, and load its state afterwards"
        )
    optimizer.check_built_over(model)
    if (clash := optimizer.unsupported(layout)) is not None:
        raise ValueError(clash)
