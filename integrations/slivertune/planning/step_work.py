"""Work of a step: operators by their costs, and bytes copied over the bus."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from slivertune.core.copy_streams import Direction

Cost = tuple[int, int]
"""Cost of an operator: floating-point operations, and bytes of device memory that it reads and writes."""
TileCost = tuple[int, int]
"""Cost of an operator on a tile: bytes of device memory that it reads and writes, and those of temporaries as small as
a tile, which may be in the L2 cache."""
STATE = "state"
"""Kind of copies: masters and optimizer state, with the gradients that are loaded from the host for a step."""
STEP = "step"
"""Name of the part of a step that updates masters and state."""
Place = tuple[int, bool] | None
"""Place in a backward: block's index, and whether it is recomputed. None above all blocks, and in other parts."""


@dataclass(frozen=True, slots=True)
class Work:
    """Operators and copies of a part of a step."""

    operators: Counter[Cost] = field(default_factory=Counter)
    """Number of operators of each cost."""
    copies: Counter[tuple[Direction, str]] = field(default_factory=Counter)
    """Bytes over the bus by direction and kind: `STATE`, "gradients", "parameters" or "activations"."""
    tiles: Counter[TileCost] = field(default_factory=Counter)
    """Number of operators on tiles of each cost."""

    def __add__(self, other: "Work") -> "Work":
        return Work(*(own + more for own, more in zip(self.all_counts, other.all_counts, strict=True)))

    def __sub__(self, other: "Work") -> "Work":
        return Work(*(own - less for own, less in zip(self.all_counts, other.all_counts, strict=True)))

    def times(self, number: int) -> "Work":
        """Return this work, repeated `number` times."""
        return Work(*(Counter({key: number * count for key, count in each.items()}) for each in self.all_counts))

    @property
    def all_counts(self) -> tuple[Counter[Any], Counter[Any], Counter[Any]]:
        """Counts of operators, of copies and of operators on tiles."""
        return self.operators, self.copies, self.tiles

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(flops * count for (flops, _), count in self.operators.items())

    @property
    def num_operators(self) -> int:
        """Number of operators."""
        return sum(self.operators.values()) + sum(self.tiles.values())

    def copied(self, direction: Direction, *kinds: str) -> int:
        """Return the bytes of these kinds that cross the bus in one direction."""
        return sum(self.copies[direction, kind] for kind in kinds)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """Work of a step as it was run, by micro-batch, and of its update."""

    forwards: tuple[Work, ...]
    """Forward of each micro-batch that was run."""
    backwards: tuple[Mapping[Place, Work], ...]
    """Backward of each micro-batch that was run, by place."""
    step: Work
    """Update alone."""

    def of_update(
        self,
        *,
        share: float,
        group: int = 0,
        usual: int = -1,
        is_part: Callable[[Place], bool] = lambda place: True,
        trained: Collection[int] = (),
        num_streamed: int = 0,
    ) -> "UpdateWork":
        """Return a kind of update with the work of this step.

        Args:
            share: As in `UpdateWork`.
            group: As in `UpdateWork`.
            usual: As in `UpdateWork`.
            is_part: Function that selects the places of the backward that count.
            trained: Indices of the blocks that trained in this step.
            num_streamed: As in `UpdateWork`.
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
            num_streamed=num_streamed,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateWork:
    """Work of one kind of a run's updates on one GPU."""

    share: float
    """Share of the run's updates that are of this kind. All shares sum to 1."""
    group: int
    """Position of the group that it trains among the plan's groups."""
    forwards: tuple[Work, ...]
    """Forwards of the micro-batches that were run."""
    backwards: tuple[Work, ...]
    """Backwards of the micro-batches that were run."""
    step: Work
    """Step of the optimizer."""
    usual: int = -1
    """Index of the micro-batch that stands for those that were not run."""
    num_blocks: int = 0
    """Number of blocks that train, if updates train different blocks."""
    num_streamed: int = 0
    """Number of blocks that each forward loads from the host, if they do not train."""
    own_backward: Work = field(default_factory=Work)
    """Part of the backward that goes through these blocks."""

    def forward(self, num_micro_batches: int) -> Work:
        """Return the work of all forwards of an update."""
        return sum(self.forwards, self.forwards[self.usual].times(num_micro_batches - len(self.forwards)))

    def backward(self, num_micro_batches: int) -> Work:
        """Return the work of all backward passes of an update."""
        return sum(self.backwards, self.backwards[self.usual].times(num_micro_batches - len(self.backwards)))
