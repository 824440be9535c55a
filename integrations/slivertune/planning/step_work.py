"""What a step computes and copies: operators by their costs, and bytes over the bus."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from slivertune.core.copy_streams import Direction

Cost = tuple[int, int]
"""Of an operator: floating-point operations, and bytes of the device's memory that it reads and writes."""
STATE = "state"
"""Masters and optimizer state; gradients that come from the host for a step travel with them."""
STEP = "step"
"""The part of a step in which masters and state are updated."""
Place = tuple[int, bool] | None
"""In a backward: index of the block, and whether it is computed again; None above all blocks, and in other parts."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a part of a step computes and copies."""

    operators: Counter[Cost] = field(default_factory=Counter)
    """Number of operators of each cost."""
    copies: Counter[tuple[Direction, str]] = field(default_factory=Counter)
    """Bytes over the bus by direction and by what they are: `STATE`, "gradients", "parameters" or "activations"."""

    def __add__(self, other: "Work") -> "Work":
        return Work(self.operators + other.operators, self.copies + other.copies)

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.operators - other.operators, self.copies - other.copies)

    def times(self, number: int) -> "Work":
        """The same, `number` times."""
        return Work(*(Counter({key: number * count for key, count in each.items()}) for each in self.all_counts))

    @property
    def all_counts(self) -> tuple[Counter[Any], Counter[Any]]:
        """Operators and copies."""
        return self.operators, self.copies

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(flops * count for (flops, _), count in self.operators.items())

    @property
    def num_operators(self) -> int:
        """Number of operators."""
        return sum(self.operators.values())

    def copied(self, direction: Direction, *kinds: str) -> int:
        """Bytes of these kinds that pass the bus one way."""
        return sum(self.copies[direction, kind] for kind in kinds)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """A step as it was run: each micro-batch, and the update."""

    forwards: tuple[Work, ...]
    """Of each micro-batch that was run."""
    backwards: tuple[Mapping[Place, Work], ...]
    """Of each micro-batch that was run, by place."""
    step: Work
    """The update alone."""

    def of_update(
        self,
        *,
        share: float,
        group: int = 0,
        usual: int = -1,
        is_part: Callable[[Place], bool] = lambda place: True,
        trained: Collection[int] = (),
    ) -> "UpdateWork":
        """Return a kind of updates with the work of this step.

        Args:
            share: As in `UpdateWork`.
            group: As in `UpdateWork`.
            usual: As in `UpdateWork`.
            is_part: Tells the places of the backward that count.
            trained: Blocks that trained in this step.
        """
        places = [[work for place, work in each.items() if is_part(place)] for each in self.backwards]
        own = [work for place, work in self.backwards[-1].items() if place is not None and place[0] in trained]
        return UpdateWork(
            share=share,
            group=group,
            forwards=self.forwards,
            backwards=tuple(sum(each, Work()) for each in places),
            step=self.step,
            usual=usual,
            own_backward=sum(own, Work()),
            num_blocks=len(trained),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateWork:
    """What one kind of a run's updates computes and copies on one GPU."""

    share: float
    """Of the run's updates that are of this kind; 1 together."""
    group: int
    """Place of what it trains among the plan's groups."""
    forwards: tuple[Work, ...]
    """Of the micro-batches that were run."""
    backwards: tuple[Work, ...]
    """Of the micro-batches that were run."""
    step: Work
    """The optimizer's step."""
    usual: int = -1
    """Place of the micro-batch that those are like which were not run."""
    num_blocks: int = 0
    """Blocks that train, where each update trains other ones."""
    own_backward: Work = field(default_factory=Work)
    """The part of a backward that goes through these blocks."""

    def forward(self, num_micro_batches: int) -> Work:
        """Return the work of all forwards of an update."""
        return sum(self.forwards, self.forwards[self.usual].times(num_micro_batches - len(self.forwards)))

    def backward(self, num_micro_batches: int) -> Work:
        """Return the work of all backward passes of an update."""
        return sum(self.backwards, self.backwards[self.usual].times(num_micro_batches - len(self.backwards)))
