"""Measured peak memory of a run's updates."""

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class DevicePeak(TrainerCallback):
    """Measures the peak memory of updates on a CUDA device by `torch.cuda.max_memory_allocated`.

    Memory allocated while the model is evaluated or saved is not counted, and other devices are not measured.
    """

    def __init__(self) -> None:
        self.num_bytes: int | None = None
        """Largest peak so far, in bytes. None before the first update, and without CUDA."""

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin measuring."""
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the larger of this update's peak and the largest one so far."""
        if args.device.type == "cuda":
            self.num_bytes = max(self.num_bytes or 0, torch.cuda.max_memory_allocated(args.device))
