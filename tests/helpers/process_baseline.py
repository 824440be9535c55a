"""Settings and attributes of a process before it ran anything: set back between two cases, or named as left behind."""

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers

_TASKS = Path("/proc/self/task")
_MAX_TASKS = 60
"""Threads that aren't Python's: three of each process group that an engine still holds, which wake all the time."""


class Baseline:
    """Settings and attributes of a process before it runs anything, to which it returns between two cases."""

    def __init__(self) -> None:
        self._attributes: dict[Any, dict[str, Any]] = {}
        self._lengths: dict[tuple[str, str], int] = {}
        self._loggers: dict[str, tuple[Any, ...]] = {}
        self._settings = settings()
        self.add_modules()

    def add_modules(self) -> None:
        """Note the attributes and loggers of modules that were not imported before."""
        self._loggers = {name: _of_logger(logger) for name, logger in _loggers()} | self._loggers
        for owner in _owners():
            if owner not in self._attributes:
                self._attributes[owner] = dict(vars(owner))
                self._lengths |= {
                    (owner.__name__, name): len(each) for name, each in vars(owner).items() if type(each) is list
                }

    def restore(self) -> list[str]:
        """Set attributes and loggers back.

        `deepspeed.zero.Init` leaves its own `torch.nn.functional.linear` behind, for example.

        Returns:
            Names of what differs still, so that nothing else should run in this process.
        """
        now = settings()  # before attributes, among which is DeepSpeed's count of its open contexts
        left = [f"{name}: {now[name]}" for name, value in self._settings.items() if now[name] != value]
        if _TASKS.exists() and (num_tasks := len(list(_TASKS.iterdir()))) > _MAX_TASKS:
            left.append(f"{num_tasks} threads")
        for owner, attributes in self._attributes.items():
            found = vars(owner)
            for name in [name for name, value in attributes.items() if found.get(name, left) is not value]:
                setattr(owner, name, attributes[name])
            for name in found.keys() - attributes.keys():
                if not name.startswith("__") and not isinstance(found[name], ModuleType):
                    delattr(owner, name)  # such as a name of slivertune's that it found when it was first asked for
            left += [
                f"{owner.__name__}.{name} of length {len(each)}"
                for name, each in attributes.items()
                if type(each) is list and len(each) != self._lengths[owner.__name__, name]
            ]
        for name, logger in _loggers():
            before = self._loggers.get(name, (logging.NOTSET, True, False, [], []))
            logger.level, logger.propagate, logger.disabled, logger.handlers, logger.filters = map(_copied, before)
        logging.root.manager._clear_cache()  # type: ignore[attr-defined]
        return left


def _owners() -> Iterator[Any]:
    """Modules and classes whose attributes a case could replace, by `mock` or without."""
    yield from (torch, torch.Tensor, torch.nn.functional, torch.nn.Module, torch.nn.Linear, dist)
    for name in ("utils.groups", "comm.comm", "runtime.zero.partition_parameters", "runtime.torch_autocast"):
        if f"deepspeed.{name}" in sys.modules:
            yield sys.modules[f"deepspeed.{name}"]
    for module in [each for name, each in sys.modules.items() if name.partition(".")[0] in ("slivertune", "tests")]:
        yield module
        yield from (
            each
            for each in vars(module).values()
            if getattr(each, "__module__", "") == module.__name__ and isinstance(each, type)
        )


def _loggers() -> Iterator[tuple[str, logging.Logger]]:
    yield "", logging.root
    for name, each in logging.root.manager.loggerDict.items():
        if isinstance(each, logging.Logger):
            yield name, each


def _of_logger(logger: logging.Logger) -> tuple[Any, ...]:
    return logger.level, logger.propagate, logger.disabled, [*logger.handlers], [*logger.filters]


def _copied(value: Any) -> Any:
    return [*value] if isinstance(value, list) else value


def settings() -> dict[str, Any]:
    """Settings that hold for a whole process, by name; those of torch that `reset_torch` sets are among them."""
    zero: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    umask = os.umask(0)
    os.umask(umask)
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": str(torch.get_default_device()),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "modes of torch": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "saved tensors' hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "hooks of all modules": [
            len(each)
            for name, each in vars(torch_modules).items()
            if name.startswith("_global_") and hasattr(each, "__len__")
        ],
        # Of SFT there is one, once for a process, which does nothing where no model of SFT's is alive.
        "hooks of all optimizers": [
            hook
            for hooks in (torch_optimizers._global_optimizer_pre_hooks, torch_optimizers._global_optimizer_post_hooks)
            for hook in hooks.values()
            if not hook.__module__.startswith("slivertune.")
        ],
        "open contexts of zero.Init": zero.zero_init_context if zero else 0,
        "signal handlers": [signal.getsignal(each) for each in signal.valid_signals()],
        "hooks of errors": (threading.excepthook, sys.unraisablehook),  # process groups set sys.excepthook
        "streams": (sys.stdout, sys.stderr),
        "search path": [*sys.path],
        "arguments": [*sys.argv],
        "umask": umask,
        "garbage collection": gc.isenabled(),
        "logging": logging.root.manager.disable,
        # Autograd's threads for devices stay, and Python knows them by no name of theirs.
        "threads": sorted(each.name for each in threading.enumerate() if not isinstance(each, threading._DummyThread)),
        "processes": [str(each) for each in multiprocessing.active_children()],
    }
