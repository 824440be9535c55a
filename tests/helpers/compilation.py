"""What torch compiled, and how often that ran: by dynamo's own counters and by a backend that counts."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

# torch's compiler is to blame, on its first import and in what it traces.
IGNORED = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def count_calls(blocks: Iterable[nn.Module]) -> Counter[nn.Module]:
    """How often each block is called from now on, a checkpoint's second call included.

    It makes one where the checkpoint lies around the block, as in transformers 5.16, and none where it lies inside.
    """
    calls: Counter[nn.Module] = Counter()
    for block in blocks:
        block.register_forward_pre_hook(lambda module, _: calls.update([module]))
    return calls


class CountedBackend:
    """A backend of torch that counts the graphs that it compiles, and their runs.

    Args:
        backend: "eager" runs a graph as it is, to the bit; "aot_eager" splits it into forward and backward, too.
    """

    def __init__(self, backend: str = "eager") -> None:
        torch._dynamo.reset()
        counters.clear()
        self.backend = torch._dynamo.lookup_backend(backend)
        self.targets: list[set[str]] = []
        """What each graph calls, in the order of their compilation."""
        self.num_runs = 0

    @property
    def num_graphs(self) -> int:
        """Graphs so far."""
        return len(self.targets)

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Compile a graph."""
        self.targets.append({str(node.target) for node in graph.graph.nodes})
        run = self.backend(graph, inputs)

        def counted(*args: Any) -> Any:
            self.num_runs += 1
            return run(*args)

        return counted

    def check(self, *, num_runs: int) -> None:
        """Check that dynamo counts the same graphs, broke none, and left no run to eager.

        Args:
            num_runs: How often blocks have run.
        """
        assert counters["stats"]["unique_graphs"] == self.num_graphs
        assert not counters["graph_break"] and not counters["unimplemented"]
        assert self.num_runs == num_runs
