"""Additional numbers in a Trainer's log, for its `log_history` and every tracker.

transformers documents `Trainer.log` as the method to override. Numbers added there are in the history, and reach all
callbacks of `report_to`, in any order.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slivertune.core.ledger import MemoryTier, StateCount
from slivertune.core.sliver import Sliver

TOKENS_PER_SECOND = "tokens_per_second"
SCHEDULED_LR = "scheduled_lr"

Source = Callable[[], Mapping[str, float]]


class TrainingMetrics(TrainerCallback):
    """Adds numbers on the updates since the last line of a Trainer's log to the next line. `metrics_of` makes it.

    It counts what Python knows, and never waits for the device. Times cover only the updates, from the start of the
    first forward to the end of the step, without evaluation and saving. Counts are of this process. Tokens/s are of all
    processes, on the assumption that each trains on as many tokens as this one.

    Args:
        trainer: A Trainer that has not trained yet; its `log` and `training_step` are overridden on this instance.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._sources: list[Source] = []
        self._sliver: Callable[[], Sliver] | None = None
        self._state = StateCount()
        self._began = 0.0
        self.num_tokens = 0
        """Number of tokens in this process's training batches, padding included."""
        self.num_updates = 0
        """Number of updates made."""
        self.seconds = 0.0
        """Seconds spent in these updates."""
        self._logged = (0, 0.0)
        """Tokens and seconds at the last line of the log."""
        self._override(trainer)

    def add(self, source: Source) -> None:
        """Log more numbers.

        Args:
            source: Function called for each line; returns numbers by their names in the log.
        """
        self._sources.append(source)

    def watch(self, sliver: Callable[[], Sliver]) -> None:
        """Log an optimizer's metrics, its applied learning rate and the size of its state.

        Args:
            sliver: Function that returns the optimizer in use, built after this call; older state is not counted.
        """
        self._sliver, self._state = sliver, StateCount()

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens/s over all updates so far. None if no tokens were counted."""
        return self._rate(self.num_tokens, self.seconds)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to time an update."""
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the update and its time."""
        self.seconds += time.perf_counter() - self._began
        self.num_updates += 1

    def _override(self, trainer: Trainer) -> None:
        training_step, log = trainer.training_step, trainer.log

        @wraps(training_step)
        def counted_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            num_tokens = count_tokens(inputs)
            loss = training_step(model, inputs, *args, **kwargs)
            self.num_tokens += num_tokens  # of no batch that failed, as those that `auto_find_batch_size` tries
            return loss

        @wraps(log)
        def log_more(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            log(self._completed(logs) if "loss" in logs else logs, *args, **kwargs)

        trainer.training_step = counted_step  # type: ignore[method-assign]
        trainer.log = log_more  # type: ignore[method-assign]

    def _completed(self, logs: Mapping[str, float]) -> dict[str, float]:
        """Return a training log with all additional numbers."""
        completed = dict(logs)
        sliver = None if self._sliver is None else self._sliver()
        if sliver is not None:
            completed |= _of_sliver(sliver, logs)
        for tier, num_bytes in self._state_bytes(sliver).items():
            completed[f"memory/state_{tier}_bytes"] = num_bytes
        tokens, seconds = self._logged
        speed = self._rate(self.num_tokens - tokens, self.seconds - seconds)
        if speed is not None:
            completed[TOKENS_PER_SECOND] = speed
        self._logged = (self.num_tokens, self.seconds)
        for source in self._sources:
            completed |= source()
        return completed

    def _rate(self, num_tokens: int, seconds: float) -> float | None:
        return int(self._trainer.args.world_size) * num_tokens / seconds if num_tokens and seconds else None

    def _state_bytes(self, sliver: Sliver | None) -> dict[MemoryTier, int]:
        if sliver is not None:
            return self._state.num_bytes()
        optimizer: Any = self._trainer.optimizer
        return plain_state_bytes(getattr(optimizer, "state", {}), self._trainer.args.device)


def metrics_of(trainer: Trainer) -> TrainingMetrics:
    """Return the metrics of a Trainer. The first call makes them, and later calls return the same.

    Args:
        trainer: A Trainer that has not trained yet.

    Example:
        >>> metrics_of(trainer).add(lambda: {"mine/queue": len(queue)})
    """
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TrainingMetrics):
            return callback
    metrics = TrainingMetrics(trainer)
    trainer.add_callback(metrics)
    return metrics


def count_tokens(inputs: Any) -> int:
    """Count the tokens of a batch, padding included. Return 0 if it has no `input_ids`.

    Args:
        inputs: Inputs of the model.
    """
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    return ids.numel() if isinstance(ids, torch.Tensor) else 0


def plain_state_bytes(state: Any, device: torch.device) -> dict[MemoryTier, int]:
    """Sum the bytes of an optimizer's `state`, in the form of torch's optimizers, by tier.

    Args:
        state: The optimizer's state.
        device: Device of the model; tensors elsewhere count as host memory.
    """
    num_bytes: dict[MemoryTier, int] = {"device": 0, "host": 0, "disk": 0}
    for tensor in _tensors(state):
        num_bytes["device" if tensor.device.type == device.type else "host"] += _local(tensor).nbytes
    return num_bytes


def _tensors(state: Any) -> Iterable[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)


def _local(tensor: Any) -> torch.Tensor:
    """Return this process's part of a tensor that may be sharded."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _of_sliver(sliver: Sliver, logs: Mapping[str, float]) -> dict[str, float]:
    """Collect an optimizer's metrics, and its applied learning rate if it differs from the schedule's."""
    found = {f"{sliver.method}/{name}": value for name, value in sliver.metrics().items()}
    applied = sliver.applied_lr
    if applied is None or "learning_rate" not in logs:
        return found
    return {"learning_rate": applied, f"{sliver.method}/{SCHEDULED_LR}": logs["learning_rate"], **found}
