import itertools

import pytest
import torch

from slivertune.hift import HiFT, HiFTConfig
from slivertune.hift.base import Slicing
from slivertune.hift.cutting import Cut, WeightSize, cut_chunks, cut_group

ELEMENTS = Slicing(unit="elements")
QUANTISED = Slicing(unit="elements", minimum=4096)
TENSORS = Slicing(unit="tensors")
GROUP = Slicing(unit="group")


def sizes(*num_elements: int, bytes_per_element: float = 16.0) -> list[WeightSize]:
    return [WeightSize(num_elements=count, bytes_per_element=bytes_per_element) for count in num_elements]


def covered(pieces: list[list[Cut]], weights: list[WeightSize]) -> bool:
    """Every element of every weight once, in order."""
    cuts = [cut for piece in pieces for cut in piece]
    expected = iter(range(len(weights)))
    for weight, slices in itertools.groupby(cuts, key=lambda cut: cut.weight):
        stop = 0
        for cut in slices:
            if cut.start != stop or cut.stop <= cut.start:
                return False
            stop = cut.stop
        if weight != next(expected) or stop != weights[weight].num_elements:
            return False
    return next(expected, None) is None


@pytest.mark.parametrize("slicing", [ELEMENTS, QUANTISED, TENSORS, GROUP])
@pytest.mark.parametrize("stream_bytes", [0, 1, 4096, 65536, 10**6, 10**9])
def test_every_element_is_in_one_piece(slicing: Slicing, stream_bytes: int) -> None:
    weights = sizes(1, 255, 256, 257, 4095, 4096, 4097, 8191, 8192, 8193, 100_003)
    assert covered(cut_chunks(weights, stream_bytes, slicing), weights)


def test_pieces_fit_where_cuts_are_allowed() -> None:
    pieces = cut_chunks(sizes(100_000, 300, 77, 40_000), 65536, ELEMENTS)
    assert len(pieces) > 30
    for piece in pieces:
        assert sum((cut.stop - cut.start) * 16 for cut in piece) <= 65536


def test_cuts_are_at_multiples_of_256() -> None:
    for slicing in (ELEMENTS, QUANTISED):
        for piece in cut_chunks(sizes(100_003, 9_000), 200_000, slicing):
            assert all(cut.start % 256 == 0 for cut in piece)


@pytest.mark.parametrize("slicing", [ELEMENTS, QUANTISED, TENSORS])
def test_large_layers_begin_a_piece_and_equal_ones_are_cut_alike(slicing: Slicing) -> None:
    embedding, block, head = (70_001,), (20_000, 9_000, 300), (500,)
    weights = sizes(*embedding, *block, *block, *block, *head)
    begins = {0, 1, 4, 7}  # not the head, which shares the last block's piece
    pieces = cut_chunks(weights, 65536, slicing, begins=begins)
    assert covered(pieces, weights)
    assert {piece[0].weight for piece in pieces if piece[0].start == 0} >= begins
    assert pieces[-1][-1].weight == 10 and pieces[-1][0].weight < 10
    of_blocks = [
        [
            [(cut.weight - first, cut.start, cut.stop) for cut in piece]
            for piece in pieces
            if first <= piece[0].weight < last
        ]
        for first, last in ((1, 4), (4, 7))
    ]
    assert of_blocks[0] == of_blocks[1]


def test_a_small_layer_shares_a_chunk_and_a_large_one_does_not() -> None:
    model = torch.nn.Module()
    model.add_module("layers", torch.nn.ModuleList(AttentionBlock(size) for size in (128, 128, 4, 4)))
    config = HiFTConfig(layers_per_group="all", stream_bytes=2**14)
    hift = HiFT(model, torch.optim.AdamW, config=config, lr=1e-3)
    chunks = cut_group(hift.turns.states[0].weights, hift._meter, {})
    shared = [{one.weight.name.split(".")[1] for one in chunk.slices} for chunk in chunks]
    assert {"1", "2"} in shared and {"0", "1"} not in shared, shared


class Attention(torch.nn.Module):
    """Marks a block."""


class AttentionBlock(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size, 64))
        self.attention = Attention()


@pytest.mark.parametrize("num_elements", range(8_000, 13_500, 97))
def test_no_slice_of_a_quantised_weight_is_below_its_minimum(num_elements: int) -> None:
    for stream_bytes in (1, 70_000, 100_000):
        for piece in cut_chunks(sizes(num_elements), stream_bytes, QUANTISED):
            assert all(cut.stop - cut.start >= 4096 for cut in piece)


def test_whole_tensors_share_a_piece_while_they_fit() -> None:
    pieces = cut_chunks(sizes(1000, 1000, 5000, 10), 40_000, TENSORS)
    assert [[(cut.weight, cut.start, cut.stop) for cut in piece] for piece in pieces] == [
        [(0, 0, 1000), (1, 0, 1000)],
        [(2, 0, 5000)],
        [(3, 0, 10)],
    ]


def test_a_weight_that_is_not_contiguous_is_never_cut() -> None:
    weights = [WeightSize(num_elements=100_000, bytes_per_element=16, cuttable=False), *sizes(10)]
    assert cut_chunks(weights, 65536, ELEMENTS)[0] == [Cut(weight=0, start=0, stop=100_000)]


def test_zero_bytes_and_unknown_optimizers_take_the_whole_group() -> None:
    assert len(cut_chunks(sizes(100_000, 100_000), 0, ELEMENTS)) == 1
    assert len(cut_chunks(sizes(100_000, 100_000), 4096, GROUP)) == 1
