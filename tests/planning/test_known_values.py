import pytest
import torch

from slivertune.core.torch_internals import DataDependentOutputException, outside_of_modes
from slivertune.planning.fake import without_data
from slivertune.planning.known_values import KnownValues, set_values


def test_values_that_follow_from_sizes_are_known() -> None:
    with without_data(), KnownValues():
        ends = (torch.arange(1, 4) * 3).cumsum(0)
        ends[1:] += 1
        assert ends.tolist() == [3, 10, 19]
        assert torch.tensor([5, 7]).max().item() == 7
        assert ends.nonzero().shape == (3, 1)


def test_values_that_were_told_are_known() -> None:
    with without_data():
        with outside_of_modes():
            values = torch.tensor([4, 2])
        told = set_values(torch.zeros(2, dtype=torch.long), values)
        with KnownValues():
            assert (told * 2).sum().item() == 12


@pytest.mark.parametrize("kind", ["empty", "random", "overwritten"])
def test_values_that_follow_from_nothing_stay_unknown(kind: str) -> None:
    with without_data():
        unknown = torch.zeros(3)
        with KnownValues():
            if kind == "empty":
                asked = torch.empty(3)
            elif kind == "random":
                asked = torch.rand(3)
            else:
                asked = torch.ones(3).copy_(unknown)
            with pytest.raises(DataDependentOutputException):
                asked[0].item()
