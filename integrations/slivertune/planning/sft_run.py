"""SFT: a step inside an estimation phase, and one outside."""

from torch import nn

from slivertune.core.layout import Layout
from slivertune.core.ledger import Ledger
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.methods import MeasuredSteps, PlannedMethod, given_arguments
from slivertune.planning.model import attached
from slivertune.planning.plan import GroupPlan
from slivertune.planning.request import PlanRequest
from slivertune.planning.sft_sizes import SizedSFT, show_dense_shapes, without_kept_tensors
from slivertune.planning.step import Forward, StepPeak, group_plan, largest_of, measure_step
from slivertune.sft import SFTConfig

_PHASE_UPDATES = 2
"""As many as show all that a phase holds: the pool in its first update, the candidates in all others."""
_OUTSIDE_UPDATES = 2
"""Outside of phases: the update after a reselection, and the next one, which meets what that left."""


class SFTRun:
    """SFT over a model without data.

    Args:
        model: The model.
        request: SFT's settings.
    """

    def __init__(self, model: nn.Module, request: PlanRequest) -> None:
        self._model = model
        self._num_backwards = request.num_backwards
        steps, interval, self._num_inside = _shortened(request)
        if request.load_in_4bit:
            show_dense_shapes(model)
        config = SFTConfig(
            density=request.density,
            selection=request.selection,
            estimation_steps=steps,
            reselection_interval=interval,
            replacement_rate=request.replacement_rate,
            form="auto",
        )
        with FakeOverrides():
            self.optimizer = SizedSFT(model, config=config, lr=1e-4, total_steps=1000)

    @property
    def own_parameters(self) -> list[nn.Parameter]:
        """What SFT shows as parameters of the model, and counts as its state."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def measure(self, forward: Forward) -> tuple[StepPeak | None, StepPeak]:
        """Run the updates of a phase, and one more.

        Args:
            forward: The model's forward.

        Returns:
            The largest peak inside an estimation phase, None where there are none; and that outside.
        """
        with Ledger(self._model) as ledger:
            self.optimizer.claim_state()

            def measure() -> StepPeak:
                return measure_step(ledger, forward, self.optimizer, num_backwards=self._num_backwards)

            inside = [measure() for _ in range(self._num_inside)]
            outside = largest_of([measure() for _ in range(_OUTSIDE_UPDATES)])
        return (largest_of(inside) if inside else None), outside


class PlannedSFT(PlannedMethod):
    """SFT: updates inside of an estimation phase, and outside."""

    settings = frozenset({"density", "selection", "reselection_interval", "estimation_steps", "replacement_rate"})
    is_optimizer = True
    steps_itself = True

    def measure(self, request: PlanRequest, model: nn.Module, forward: Forward, layout: Layout) -> MeasuredSteps:
        """Run the updates of a phase, and those outside."""
        with without_kept_tensors():
            run = SFTRun(model, request)
            with attached(request, model) as notes:
                inside, outside = run.measure(forward)
        groups = [] if inside is None else [_group(run, "inside an estimation phase", 0, inside, inside.highest.state)]
        groups.append(_group(run, "outside of estimation phases", len(groups), outside, outside.after.state))
        return MeasuredSteps(
            groups=groups,
            own_parameters=run.own_parameters,
            notes=(*notes, "SFT's search for weights to grow is computed from its sizes"),
        )

    def train_arguments(self, request: PlanRequest) -> tuple[str, ...]:
        """How many weights, and how they are chosen."""
        density = () if request.density is None else ("--density", str(request.density))
        names = ("reselection_interval", "estimation_steps", "replacement_rate", "load_in_4bit")
        return (*density, "--selection", request.selection, *given_arguments(request, names))


METHOD = PlannedSFT()


def _group(run: SFTRun, name: str, index: int, peak: StepPeak, state_bytes: int) -> GroupPlan:
    return group_plan(
        peak,
        name=name,
        num_parameters=run.optimizer.num_weights,
        gradient_bytes=peak.gradients,
        state_bytes=state_bytes,
        indices=(index,),
    )


def _shortened(request: PlanRequest) -> tuple[int, int | None, int]:
    """A schedule in which phases meet as they do in the run, with updates outside of phases after them.

    The first phase ends at gamma, the second at S and begins gamma before that; later ones meet no other.

    Args:
        request: Has the schedule of the run.

    Returns:
        gamma and S of the shortened run, and its first updates that belong to phases.
    """
    if not request.has_phases:
        # SM3 reselects in every update, which shows all it takes.
        return 1, None if request.reselection_interval == 0 else 1, 0
    num_overlapping = min(2 * request.estimation_steps - request.reselection_interval, _PHASE_UPDATES)
    if num_overlapping <= 0:
        if request.estimation_steps == 1:
            # A phase never meets its own candidates; the second is the first to meet moments.
            return 1, 3, 3
        return _PHASE_UPDATES, 100, _PHASE_UPDATES
    # The first phase has its pool behind it when the second makes its own.
    steps = num_overlapping + _OUTSIDE_UPDATES
    return steps, steps + _OUTSIDE_UPDATES, steps + _OUTSIDE_UPDATES
