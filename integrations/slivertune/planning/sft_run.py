"""SFT: a step inside an estimation phase, and one outside."""

from __future__ import annotations

from torch import nn

from slivertune.ledger import Ledger
from slivertune.planning.fake import Answers
from slivertune.planning.request import PlanRequest
from slivertune.planning.sft_sizes import SizedSFT, show_dense_shapes
from slivertune.planning.step import Forward, StepPeak, largest_of, measure_step
from slivertune.sft import SFTConfig

_ESTIMATION_STEPS = 2
"""As many as show all that a phase holds: the pool in its first update, the candidates in all others."""


class SFTRun:
    """SFT over a model without data.

    Args:
        model: The model.
        request: SFT's settings.
    """

    def __init__(self, model: nn.Module, request: PlanRequest) -> None:
        self._model = model
        self._num_backwards = request.num_backwards
        self.estimates = request.selection == "accumulated_gradient"
        if request.load_in_4bit:
            show_dense_shapes(model)
        config = SFTConfig(
            density=request.density,
            selection=request.selection,
            estimation_steps=_ESTIMATION_STEPS,
            # Rare enough that a step outside of a phase follows the first one; SM3 reselects in every step.
            reselection_interval=100 if self.estimates else 1,
            form="auto",
        )
        with Answers():
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

            inside = [measure() for _ in range(_ESTIMATION_STEPS * self.estimates)]
            # The update after a reselection, and the next one, which meets what that left.
            outside = largest_of([measure() for _ in range(2)])
        return (largest_of(inside) if inside else None), outside
