from torch import nn

from slivertune.core.ledger import Ledger
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.make import attached
from slivertune.planning.methods import MeasuredSteps, PlannedMethod
from slivertune.planning.request import PlanRequest
from slivertune.planning.step import Forward, GradientMeter, group_plan, largest_of, measure_step
from tests.random_layers.optimizer import RandomLayers


class PlannedRandomLayers(PlannedMethod):
    """Steps with every block's state there: the one with the largest peak is the plan."""

    is_optimizer = True
    steps_itself = True
    averages_in_buckets = True

    def measure(self, request: PlanRequest, model: nn.Module, forward: Forward, shared: PlanRequest) -> MeasuredSteps:
        meter, named = GradientMeter(model), dict(model.named_parameters())
        with FakeOverrides():
            optimizer = RandomLayers(model, lr=1e-4, fused=True)
        peaks = []
        with attached(request, model) as notes, Ledger(model) as ledger:
            for _ in range(12):
                trained = [named[name] for name in optimizer.active]
                peaks.append(measure_step(ledger, forward, optimizer, num_backwards=request.num_backwards))
        group = group_plan(
            largest_of(peaks),
            name="embedding, head and blocks by chance",
            num_parameters=sum(each.numel() for each in trained),
            gradient_bytes=meter.bytes_of(trained),
            state_bytes=sum(value.nbytes for values in optimizer.state.values() for value in values.values()),
        )
        return MeasuredSteps(groups=[group], notes=notes)
