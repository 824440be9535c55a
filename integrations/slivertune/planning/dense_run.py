"""Dense fine-tuning: everything that requires a gradient trains in every step; LoRA's adapters among them."""

import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from slivertune.core.adapter_casts import skip_needless_casts
from slivertune.core.layout import Layout
from slivertune.core.ledger import Ledger
from slivertune.core.missing_library import missing_library
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.make import attached
from slivertune.planning.methods import MeasuredSteps, Measurer, PlannedMethod, given_arguments
from slivertune.planning.optimizers import optimizer_of
from slivertune.planning.request import PlanRequest, TaskName
from slivertune.planning.step import (
    Forward,
    GradientMeter,
    StepPeak,
    UpdatePeak,
    claim_state,
    give_gradients,
    group_plan,
    larger_of_two,
    largest_of,
    measure_step,
    measure_update,
)

_ALL_LINEAR = "all-linear"
_PEFT_TASKS: dict[TaskName, str | None] = {
    "causal_lm": "CAUSAL_LM",
    "classification": "SEQ_CLS",
    "image_text": "CAUSAL_LM",
    # PEFT's own forward for sequences to sequences takes tokens, and no sound.
    "speech": None,
}

_WITHOUT_ADAPTER = frozenset({"Llama4Router"})
"""Linear layers of transformers that do not return a tensor."""


class PlannedDense(PlannedMethod):
    """One optimizer over all that trains."""

    bf16_precision = "mixed"

    def measurer(self, request: PlanRequest, model: nn.Module, layout: Layout) -> Measurer:
        """Measures with one optimizer, whose updates are made for the first batch alone."""
        return _Steps(request, model).measure


class _Steps:
    """An optimizer over all that trains, and what its updates take.

    Args:
        request: The run.
        model: The model.
    """

    def __init__(self, request: PlanRequest, model: nn.Module) -> None:
        self._model = model
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._meter = GradientMeter(model)
        self._optimizer = _optimizer_over(self._trained, request)
        self._first: UpdatePeak | None = None
        self._second: UpdatePeak | None = None

    def measure(self, request: PlanRequest, forward: Forward) -> MeasuredSteps:
        """Run a step after that which makes the state.

        Args:
            request: The run.
            forward: The model's forward on its batch.
        """
        with attached(request, self._model) as notes, Ledger(self._model) as ledger:
            peak = self._peak(request, ledger, forward)
        state = [value for values in self._optimizer.state.values() for value in values.values()]
        return MeasuredSteps(
            groups=[
                group_plan(
                    peak,
                    name="all",
                    num_parameters=sum(parameter.numel() for parameter in self._trained),
                    gradient_bytes=self._meter.bytes_of(self._trained),
                    state_bytes=sum(each.nbytes for each in state if isinstance(each, torch.Tensor)),
                )
            ],
            notes=notes,
            updates=[peak.work.of_update(share=1.0)],
        )

    def _peak(self, request: PlanRequest, ledger: Ledger, forward: Forward) -> StepPeak:
        run = partial(measure_step, ledger, forward, num_backwards=request.num_backwards)
        if self._first is None:
            # A forward and backward without state need no more than one with it.
            give_gradients(self._trained)
            self._first = measure_update(ledger, self._optimizer)
            self._meter.forget(self._trained)
        claim_state(self._optimizer)  # this ledger may be another than the one that saw it made
        second = run(self._optimizer, known=self._second)
        if not self._meter.has_seen(self._trained):
            # What no gradient reaches has no state.
            self._optimizer, self._first, self._second = _optimizer_over(self._trained, request), None, None
            peaks = [run(self._optimizer) for _ in range(2)]
            return replace(largest_of(peaks), work=peaks[-1].work)
        self._second = second.update
        return larger_of_two(self._first, second)


class PlannedLora(PlannedDense):
    """LoRA: as dense fine-tuning, of small adapters beside frozen weights, by PEFT (Hu et al., 2021)."""

    settings = frozenset({"lora_rank", "lora_dropout", "lora_target_modules"})
    bf16_precision = "bf16"

    def change_model(self, model: Any, request: PlanRequest) -> Any:
        """Put adapters beside all linear layers.

        Raises:
            ImportError: If PEFT is not installed.
            ValueError: If PEFT's adapters can't stand beside all of them.
        """
        for name, module in model.named_modules():
            if type(module).__name__ in _WITHOUT_ADAPTER:
                raise ValueError(
                    f"method='lora' puts adapters beside all linear layers, and PEFT's can't stand beside {name} "
                    f"({type(module).__name__}), which returns several tensors; plan another method"
                )
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise ImportError(missing_library("method='lora'", "peft", "take another method")) from error
        config = LoraConfig(
            task_type=_PEFT_TASKS[request.task],
            r=request.lora_rank,
            lora_alpha=2 * request.lora_rank,
            lora_dropout=request.lora_dropout,
            target_modules=_target_modules(request),
        )
        with warnings.catch_warnings():
            # PEFT 0.21 asks by the name that transformers 5.23 retires.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            try:
                adapted: Any = get_peft_model(model, config)
            except ValueError as error:
                raise ValueError(
                    f"lora_target_modules={_target_modules(request)!r} does not fit {type(model).__name__}: {error}"
                ) from error
        for parameter in adapted.parameters():
            if parameter.requires_grad and parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()
        skip_needless_casts(adapted)
        return adapted

    def train_arguments(self, request: PlanRequest) -> tuple[str, ...]:
        """The rank, what has adapters, their dropout, and 4-bit weights."""
        names = ("lora_dropout", "lora_target_modules", "load_in_4bit")
        return ("--lora_rank", str(request.lora_rank), *given_arguments(request, names))


def _optimizer_over(parameters: Iterable[nn.Parameter], request: PlanRequest) -> torch.optim.Optimizer:
    optimizer_class, arguments = optimizer_of(request.optimizer, request.kernels)
    with FakeOverrides():
        return optimizer_class(parameters, **arguments)


def _target_modules(request: PlanRequest) -> list[str] | str:
    """As PEFT takes them: names in a list, or its shorthand, which it knows as a string alone."""
    names = request.lora_target_modules
    return _ALL_LINEAR if names in (None, (_ALL_LINEAR,)) else list(names or ())
