"""Plans of dense fine-tuning, which trains all parameters that require gradients in every step, and of LoRA."""

import warnings
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from slivertune.core.adapter_casts import skip_needless_casts
from slivertune.core.adapter_targets import adapter_targets
from slivertune.core.layout import Layout
from slivertune.core.ledger import claimed_as
from slivertune.core.missing_library import missing_library
from slivertune.hift.base import give_own_overrides
from slivertune.parked.park import ParkedLayers
from slivertune.planning.course import CourseLedger
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.four_bit import num_weights
from slivertune.planning.methods import MeasuredSteps, Measurer, PlannedMethod, given_arguments
from slivertune.planning.model import attached
from slivertune.planning.optimizers import optimizer_of, trainer_overrides
from slivertune.planning.parked_weights import PARKING, num_streamed, park
from slivertune.planning.request import PlanRequest, PrecisionName, TaskName
from slivertune.planning.slow_streams import planned_streams
from slivertune.planning.step import (
    Forward,
    GradientMeter,
    MeasuredGroup,
    MeasuredStep,
    MeasuredUpdate,
    claim_state,
    give_gradients,
    measure_step,
    measure_update,
    weight_bytes,
    with_first,
)

_PEFT_TASKS: dict[TaskName, str | None] = {
    "causal_lm": "CAUSAL_LM",
    "classification": "SEQ_CLS",
    "image_text": "CAUSAL_LM",
    # PEFT's own forward for sequence-to-sequence models takes tokens, but no sound.
    "speech": None,
}

_PAGED_NOTE = (
    "the state lies in unified memory, in host memory here; moving its pages to the GPU and back is not in the time"
)

_WITHOUT_ADAPTER = frozenset({"Llama4Router"})
"""Classes of linear layers in transformers that return several tensors."""


class PlannedDense(PlannedMethod):
    """Dense fine-tuning: one optimizer over all trained parameters."""

    bf16_precision: PrecisionName = "mixed"

    def grows_with_blocks(self, request: PlanRequest, *, are_all_alike: bool) -> bool:
        """Return True: each block has its own weights and state."""
        return True

    def measurer(self, request: PlanRequest, model: nn.Module, shared: PlanRequest) -> Measurer:
        """Return a measurer with one optimizer, which makes its updates for the first batch only."""
        return _Steps(request, model, shared.layout)


class _Steps(Measurer):
    """Optimizer over all trained parameters, with its updates.

    Args:
        request: Planned run.
        model: Model of fake tensors.
        layout: Layout of the run over GPUs.
    """

    def __init__(self, request: PlanRequest, model: nn.Module, layout: Layout) -> None:
        self._model = model
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._meter = GradientMeter(model)
        # ZeRO steps tensors of its own, of which the Trainer tells bitsandbytes nothing.
        is_zero = layout in ("zero1", "zero2", "zero3")
        self._overrides = {} if is_zero else trainer_overrides(model, request.optimizer)
        self._request = request
        self._optimizer = self._new_optimizer()
        self._first: MeasuredUpdate | None = None
        self._second: MeasuredUpdate | None = None

    @cached_property
    def _parked(self) -> ParkedLayers | None:
        return park(self._request, self._model)

    @override
    def measure(self, request: PlanRequest, forward: Forward) -> MeasuredSteps:
        """Measure the first step, which creates the optimizer state, and a later one."""
        parked = self._parked
        with planned_streams(request), attached(request, self._model) as notes, CourseLedger(self._model) as ledger:
            steps = self._steps(request, ledger, forward)
        values = [value for values in self._optimizer.state.values() for value in values.values()]
        state = [value for value in values if isinstance(value, torch.Tensor)]
        paged_bytes = sum(each.nbytes for each in state if claimed_as(each) == "host")
        group = MeasuredGroup(
            steps=steps,
            name="all",
            num_parameters=sum(parameter.numel() for parameter in self._trained),
            gradient_bytes=self._meter.bytes_of(self._trained),
            state_bytes=sum(each.nbytes for each in state),
        )
        return MeasuredSteps(
            groups=(group,),
            num_weights=num_weights(self._model),
            weight_bytes=weight_bytes(self._model),
            host_bytes=(0 if parked is None else parked.host_bytes) + paged_bytes,
            notes=(*notes, _PAGED_NOTE) if paged_bytes else notes,
            updates=(steps[-1].work.of_update(share=1.0, num_streamed=num_streamed(parked)),),
        )

    def _new_optimizer(self) -> torch.optim.Optimizer:
        optimizer_class, arguments = optimizer_of(self._request.optimizer, self._request.kernels)
        with FakeOverrides():
            optimizer = optimizer_class(self._trained, **arguments)
        give_own_overrides(optimizer, self._overrides)
        return optimizer

    def _steps(self, request: PlanRequest, ledger: CourseLedger, forward: Forward) -> tuple[MeasuredStep, ...]:
        run = partial(measure_step, ledger, forward, num_backwards=request.num_backwards)
        if self._first is None:
            # A forward and backward without optimizer state need no more memory than with it.
            give_gradients(self._trained)
            self._first = measure_update(ledger, self._optimizer)
            self._meter.forget(self._trained)
        claim_state(self._optimizer)  # the state may have been created under another ledger
        second = run(self._optimizer, known=self._second)
        if not self._meter.has_seen(self._trained):
            # Parameters that no gradient reaches have no state.
            self._optimizer, self._first, self._second = self._new_optimizer(), None, None
            return run(self._optimizer), run(self._optimizer)
        self._second = second.update
        return (with_first(second, self._first),)


class PlannedLora(PlannedDense):
    """LoRA by PEFT: dense fine-tuning of small adapters beside frozen weights (Hu et al., 2021)."""

    settings = frozenset({"lora_rank", "lora_dropout", "lora_target_modules"}) | PARKING
    bf16_precision = "bf16"

    def change_model(self, model: Any, request: PlanRequest) -> Any:
        """Add adapters to the linear layers, to all of them by default.

        Raises:
            ImportError: If PEFT is not installed.
            ValueError: If PEFT can't adapt one of the layers, or if `lora_target_modules` does not fit the model.
        """
        for name, module in model.named_modules():
            if type(module).__name__ in _WITHOUT_ADAPTER:
                raise ValueError(
                    f"method='lora' puts adapters beside all linear layers, and PEFT's can't stand beside {name} "
                    f"({type(module).__name__}), which returns several tensors. Plan another method"
                )
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise ImportError(missing_library("method='lora'", "peft", "take another method")) from error
        targets = adapter_targets(request.lora_target_modules, model)
        config = LoraConfig(
            task_type=_PEFT_TASKS[request.task],
            r=request.lora_rank,
            lora_alpha=2 * request.lora_rank,
            lora_dropout=request.lora_dropout,
            **targets,
        )
        with warnings.catch_warnings():
            # PEFT 0.21 reads an attribute that transformers 5.23 deprecates.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            try:
                adapted: Any = get_peft_model(model, config)
            except ValueError as error:
                raise ValueError(
                    f"lora_target_modules={targets['target_modules']!r} does not fit {type(model).__name__}: {error}"
                ) from error
        for parameter in adapted.parameters():
            if parameter.requires_grad and parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()
        if request.recipe is None:
            skip_needless_casts(adapted)
        return adapted

    def train_arguments(self, request: PlanRequest) -> tuple[str, ...]:
        """Return LoRA's options: rank, dropout, target modules and 4-bit weights."""
        names = ("lora_dropout", "lora_target_modules", "load_in_4bit", *sorted(PARKING))
        return ("--lora_rank", str(request.lora_rank), *given_arguments(request, names))
