from torch import nn
from typing_extensions import override

from slivertune.planning.course import CourseLedger
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.four_bit import num_weights
from slivertune.planning.methods import MeasuredSteps, Measurer, PlannedMethod
from slivertune.planning.model import attached
from slivertune.planning.request import PlanRequest
from slivertune.planning.step import Forward, GradientMeter, MeasuredGroup, measure_step, weight_bytes
from tests.random_layers.optimizer import RandomLayers


class PlannedRandomLayers(PlannedMethod):
    """Steps with every block's state there: the one with the largest peak is the plan."""

    is_optimizer = True
    steps_itself = True
    averages_in_buckets = True

    def measurer(self, request: PlanRequest, model: nn.Module, shared: PlanRequest) -> Measurer:
        return _Steps(model)


class _Steps(Measurer):
    measures_again = False

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @override
    def measure(self, request: PlanRequest, forward: Forward) -> MeasuredSteps:
        meter, named = GradientMeter(self._model), dict(self._model.named_parameters())
        with FakeOverrides():
            optimizer = RandomLayers(self._model, lr=1e-4, fused=True)
        steps = []
        with attached(request, self._model) as notes, CourseLedger(self._model) as ledger:
            for _ in range(12):
                trained = [named[name] for name in optimizer.active]
                steps.append(measure_step(ledger, forward, optimizer, num_backwards=request.num_backwards))
        group = MeasuredGroup(
            steps=tuple(steps),
            name="embedding, head and blocks by chance",
            num_parameters=sum(each.numel() for each in trained),
            gradient_bytes=meter.bytes_of(trained),
            state_bytes=sum(value.nbytes for values in optimizer.state.values() for value in values.values()),
        )
        return MeasuredSteps(
            groups=(group,),
            num_weights=num_weights(self._model),
            weight_bytes=weight_bytes(self._model),
            notes=notes,
        )
