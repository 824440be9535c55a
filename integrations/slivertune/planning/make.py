"""Plans made by running the real step of each distinct group, on the model's own classes with fake tensors."""

import warnings
from dataclasses import fields, replace
from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from slivertune.core.torch_internals import outside_of_modes
from slivertune.planning.extension import ExtensionError
from slivertune.planning.fake import without_data
from slivertune.planning.fewer_blocks import FewerBlocks, fewer_blocks, shorter
from slivertune.planning.kernels import Kernels
from slivertune.planning.layouts import sizes_of, spread, standing_in
from slivertune.planning.methods import MeasuredSteps, Measurer, planned
from slivertune.planning.model import build_model, forward_of, give_sizes
from slivertune.planning.operator_cache import CachedFakeTensorMode
from slivertune.planning.plan import Plan
from slivertune.planning.replayed import Calls, replaying
from slivertune.planning.request import PlanRequest

_OF_BATCHES = frozenset(
    {
        "batch_size",
        "gradient_accumulation_steps",
        "seq_length",
        "token_ratio",
        "token_tile_size",
        "offload_activations",
    }
)
"""Settings that leave the model, its optimizer and the update as they are."""
_MOST_KEPT = 16
"""Models that are kept, with their smaller ones and their optimizers: some 15 MB each for 32 blocks."""


def make_plan(request: PlanRequest, config: PreTrainedConfig) -> Plan:
    """Plan a run by running its steps on fake tensors.

    Takes seconds and a few hundred MB of memory, whatever the size of the model.

    Args:
        request: Run to plan.
        config: The model's configuration.

    Returns:
        The plan, without any allowance.

    Raises:
        ValueError: If the method does not fit the model, or the model can't run on fake tensors.
    """
    return Planner(config).plan(request)


class Planner:
    """Plans runs of one model, and makes once what several of them have in common.

    Args:
        config: The model's configuration.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self._fake = CachedFakeTensorMode()
        self._calls: dict[Kernels, Calls] = {}
        self._runs: dict[str, Runs] = {}
        """Runs by all that they have in common, the last planned last."""

    def plan(self, request: PlanRequest) -> Plan:
        """Plan a run, with the same bytes as `make_plan`, whatever was planned before.

        Args:
            request: Run to plan.

        Raises:
            ValueError: As `make_plan`.
        """
        if request.layout != "single":
            return _plan_of_several(request, self._config)
        common = _common_settings(request)
        # A plan that fails leaves its model half changed, so that it is not kept.
        runs = self._runs.pop(common, None) or Runs(self._config)
        calls = self._calls.setdefault(request.kernels, {})
        with without_data(request.kernels, self._fake), replaying(calls):
            plan = runs.plan(request)
        self._runs[common] = runs
        if len(self._runs) > _MOST_KEPT:
            del self._runs[next(iter(self._runs))]
        return plan


def _common_settings(request: PlanRequest) -> str:
    """Return all settings but those of a batch and of its activations, which a measured model takes in turn."""
    names = [field.name for field in fields(request) if field.name not in _OF_BATCHES]
    # HiFT's run has the number of backwards of its first request.
    return repr([request.num_backwards, *(getattr(request, name) for name in names)])


def _plan_of_several(request: PlanRequest, config: PreTrainedConfig) -> Plan:
    sizes = sizes_of(build_model(request, config))
    return spread(_plan_of_one(on_one_gpu(request), config, request, sizes.bucket_elements), request, sizes)


def on_one_gpu(request: PlanRequest) -> PlanRequest:
    """Return the same run on one GPU, with the step that each of several GPUs makes.

    Args:
        request: The run.
    """
    alone = replace(request, layout="single", num_gpus=1, offload_parameters=False)
    if request.layout in ("fsdp2", "zero3"):
        # The head's weight is gathered only for the head's own forward, so training computes all logits.
        return replace(alone, chunked_cross_entropy=False)
    return alone


def _plan_of_one(request: PlanRequest, config: PreTrainedConfig, shared: PlanRequest, bucket_elements: int) -> Plan:
    with without_data(request.kernels), replaying({}):
        whole = SizedModel(config)
        with standing_in(shared, whole.build(request), bucket_elements):
            return _plan(request, *whole.measure(request, shared))


class SizedModel:
    """A model of fake tensors, and what measures runs on it.

    Args:
        config: The model's configuration.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self._model: Any = None
        self._measurer: Measurer | None = None

    def build(self, request: PlanRequest) -> Any:
        """Return the model, which is made once.

        Args:
            request: Run on one GPU that trains it.

        Raises:
            ValueError: If the configuration does not fit.
        """
        if self._model is None:
            with outside_of_modes():
                model = build_model(request, self._config)
            give_sizes(model)
            self._model = model
        return self._model

    def measurer(self, request: PlanRequest, shared: PlanRequest) -> Measurer:
        """Return what measures runs, which is made once.

        Args:
            request: Run on one GPU.
            shared: The run with its layout over GPUs.
        """
        if self._measurer is None:
            self._measurer = planned(request.method).measurer(request, self.build(request), shared)
        return self._measurer

    def measure(self, request: PlanRequest, shared: PlanRequest) -> tuple[Measurer, MeasuredSteps]:
        """Measure a run.

        Args:
            request: Run on one GPU.
            shared: The run with its layout over GPUs.
        """
        measurer = self.measurer(request, shared)
        steps = measurer.measure(request, forward_of(self._model, request, self._config))
        if not measurer.measures_again:
            self._model = self._measurer = None
        return measurer, steps


class Runs:
    """Plans of runs of one model on one GPU that differ in settings of `_OF_BATCHES` only.

    Args:
        config: The model's configuration.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self._whole = SizedModel(config)
        self._smaller: dict[tuple[bool, int], SizedModel] = {}
        """Smaller models by TokenTune and number of blocks."""
        self._fewer: dict[bool, FewerBlocks | None] = {}
        """Smaller models for runs with TokenTune and without. Models that were measured may have other attributes."""

    def plan(self, request: PlanRequest) -> Plan:
        """Plan a run, by models with fewer blocks if what they take can be extended.

        Args:
            request: The run.
        """
        selects = request.token_ratio is not None
        if selects not in self._fewer:
            self._fewer[selects] = fewer_blocks(request, self._config, self._whole.build(request))
        fewer = first = self._fewer[selects]
        measured: dict[int, MeasuredSteps] = {}
        while fewer is not None:
            try:
                steps = fewer.extend(partial(self._measured, request, fewer, measured))
                return _plan(request, self._whole.measurer(request, request), steps)
            except ExtensionError:
                fewer = fewer.one_later()
        plan = _plan(request, *self._whole.measure(request, request))
        if first is None:
            return plan
        return replace(plan, notes=(*plan.notes, f"all {first.whole} blocks were run: fewer did not suffice"))

    def _measured(
        self, request: PlanRequest, fewer: FewerBlocks, measured: dict[int, MeasuredSteps], num_blocks: int
    ) -> MeasuredSteps:
        if num_blocks not in measured:
            run = replace(request, layers_per_group=fewer.layers_per_group)
            try:
                measured[num_blocks] = self._measure_smaller(num_blocks, run, fewer)
            except MemoryError:
                raise
            except Exception as error:
                # The whole model either can be planned, or its own error names its own sizes.
                raise ExtensionError(f"{num_blocks} blocks: {error}") from error
        return measured[num_blocks]

    def _measure_smaller(self, num_blocks: int, run: PlanRequest, fewer: FewerBlocks) -> MeasuredSteps:
        key = run.token_ratio is not None, num_blocks
        # A model that fails, or warns once of its own sizes, is not kept.
        smaller = self._smaller.pop(key, None)
        with warnings.catch_warnings(record=True) as caught:
            if smaller is None:
                config = shorter(self._config, num_blocks)
                smaller = SizedModel(config)
                fewer.check(smaller.build(run), config)
            _, steps = smaller.measure(run, run)
        if any(each.category is UserWarning for each in caught):
            raise ExtensionError(f"a warning would name the sizes of {num_blocks} blocks")
        self._smaller[key] = smaller
        return steps


def _plan(request: PlanRequest, measurer: Measurer, measured: MeasuredSteps) -> Plan:
    steps = measurer.planned(request, measured)
    peak = max((group.peak for group in steps.groups), key=lambda moment: moment.total)
    largest = max(steps.groups, key=lambda group: group.num_parameters)
    copies = 2 * measured.num_weights if request.precision == "mixed" else 0
    return Plan(
        request=request,
        peak=peak,
        groups=tuple(steps.groups),
        num_parameters=measured.num_weights,
        num_trainable_peak=largest.num_parameters,
        parameter_bytes=measured.weight_bytes + copies + largest.master_bytes,
        gradient_bytes=largest.gradient_bytes,
        state_bytes=largest.state_bytes,
        residual_bytes=peak.residual,
        host_bytes=steps.host_bytes + max(group.host_activation_bytes for group in steps.groups),
        disk_bytes=steps.disk_bytes,
        notes=steps.notes,
        updates=tuple(steps.updates),
    )
