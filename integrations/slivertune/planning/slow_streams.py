"""Copy streams of a planned run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from typing_extensions import override

from slivertune.core.copy_streams import CopyStreams, Direction, Event, streams_made_by
from slivertune.planning.counter import beside_computation
from slivertune.planning.request import PlanRequest


class SlowStreams(CopyStreams):
    """Copy streams whose copies end at unknown times: an outbound tensor lives until the computation waits for it."""

    @override
    @contextmanager
    def on(self, direction: Direction, *after: Event) -> Iterator[None]:
        with beside_computation():
            yield

    @override
    def record(self, direction: Direction | None = None) -> Event:
        return object()

    @override
    def compute_after(self, event: Event) -> None:
        pass

    @override
    def wait_on_host(self, event: Event) -> None:
        pass


def planned_streams(request: PlanRequest) -> AbstractContextManager[None]:
    """Return the context of copy streams: `SlowStreams` for a GPU, copies in plain order for the CPU."""
    return streams_made_by(SlowStreams) if request.kernels == "gpu" else nullcontext()
