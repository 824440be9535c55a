"""Dense fine-tuning: everything that requires a gradient trains in every step."""

import torch
from torch import nn

from slivertune.core.layout import Layout
from slivertune.core.ledger import Ledger
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.methods import MeasuredSteps, PlannedMethod
from slivertune.planning.model import attached
from slivertune.planning.optimizers import optimizer_of
from slivertune.planning.request import PlanRequest
from slivertune.planning.step import Forward, GradientMeter, group_plan, largest_of, measure_step


class PlannedDense(PlannedMethod):
    """One optimizer over all that trains."""

    bf16_precision = "mixed"

    def measure(self, request: PlanRequest, model: nn.Module, forward: Forward, layout: Layout) -> MeasuredSteps:
        """Run two steps: the first makes the state, all later ones have it from their beginning."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        meter = GradientMeter(model)
        optimizer_class, arguments = optimizer_of(request.optimizer)
        with FakeOverrides():
            optimizer = optimizer_class(trained, **arguments)
        with attached(request, model) as notes, Ledger(model) as ledger:
            peak = largest_of(
                [measure_step(ledger, forward, optimizer, num_backwards=request.num_backwards) for _ in range(2)]
            )
        tensors = [value for values in optimizer.state.values() for value in values.values()]
        group = group_plan(
            peak,
            name="all",
            num_parameters=sum(parameter.numel() for parameter in trained),
            gradient_bytes=meter.bytes_of(trained),
            state_bytes=sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor)),
        )
        return MeasuredSteps(groups=[group], notes=notes)


METHOD = PlannedDense()
