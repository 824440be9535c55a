"""Files of ranks under ZeRO that are damaged, or written by somebody who means harm: only errors of our own."""

import functools
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slivertune import HiFT, HiFTConfig
from slivertune.core.manifest import write_manifest
from slivertune.parallel.zero.rank_file import PARAM_GROUP, VERSION, check_fits, file_name, read_rank_file
from slivertune.parallel.zero.shares import fp32_weights, identity, load_zero
from tests.helpers.models import assert_same_tree, tiny_llama
from tests.test_hostile_files import DEEP, PLAIN, Bomb, damaged_bytes, fuzzed, harmless, places, replaced

INNER = ["groups", "1", "optimizer", "param_groups"]
STATE = ["groups", "1", "optimizer", "state", 0]
FIRST = sum(each.numel() for each in tiny_llama().model.layers[0].parameters()) // 2  # type: ignore[union-attr,index]
"""Elements of the first rank's share of group 1."""


class Saved:
    """What two ranks would have saved of a model whose groups' masters lie end to end and are cut in the middle."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, tiny_llama()
        self.hift = HiFT(self.model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
        self.wanted = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        self.honest = [self._of_rank(rank) for rank in (0, 1)]
        self.write()

    def write(self, first: Any = None) -> None:
        for rank, value in enumerate(self.honest if first is None else [first]):
            torch.save(value, self.folder / file_name(rank, 2))
        write_manifest(self.folder)

    def put(self, content: bytes) -> None:
        (self.folder / file_name(0, 2)).write_bytes(content)
        write_manifest(self.folder)

    def _of_rank(self, rank: int) -> dict[str, Any]:
        groups, pieces, shapes = {}, {}, {}
        for group in self.hift.groups:
            weights = {weight.name: weight.parameter.detach() for weight in self.hift.weights_of(group.index)}
            flat = torch.cat([each.view(-1) for each in weights.values()])
            begin, end = (rank * (len(flat) // 2), len(flat) if rank else len(flat) // 2)
            found, offset = [], 0
            for name, each in weights.items():
                first, last = max(begin, offset), min(end, offset + each.numel())
                if first < last:
                    found.append((name, first - offset, first - begin, last - first))
                offset += each.numel()
            moments = {"exp_avg": flat[begin:end].clone(), "exp_avg_sq": flat[begin:end].square()}
            of_group = {"lr": 1e-2, "betas": (0.9, 0.999), PARAM_GROUP: 0, "params": [0]}
            groups[str(group.index)] = {
                "optimizer": {"state": {0: {"step": torch.tensor(1.0), **moments}}, "param_groups": [of_group]},
                "masters": [flat[begin:end].clone()],
            }
            pieces[str(group.index)] = [found]
            shapes[str(group.index)] = {name: list(each.shape) for name, each in weights.items()}
        return {
            "version": VERSION,
            "identity": {"stage of ZeRO": 2, **identity(self.hift)},
            "updates": 3,
            "held_lr": [1e-2],
            "skipped_turns": {},
            "skipped_in_cycle": {},
            "param_groups": [{"lr": 1e-2, "weight_decay": 0.0}],
            "active": groups.pop("0"),
            "groups": groups,
            "pieces": pieces,
            "shapes": shapes,
            "scaler": {"cur_scale": 1.0},
            "own": {name: [{}] for name in pieces},
        }

    def read(self) -> None:
        for read in (fp32_weights, functools.partial(load_zero, self.hift)):
            with harmless(self.folder, ValueError):
                read(self.folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(autouse=True)
def honest_again(saved: Saved) -> Iterator[None]:
    yield
    saved.write()


def test_honest_files_are_read(saved: Saved) -> None:
    assert_same_tree(dict(sorted(fp32_weights(saved.folder).items())), dict(sorted(saved.wanted.items())))
    load_zero(saved.hift, saved.folder)
    assert saved.hift.updates == 3


@given(data=st.data())
@settings(fuzzed, max_examples=150)
def test_a_file_in_which_one_thing_is_another(data: st.DataObject, saved: Saved) -> None:
    where = data.draw(st.sampled_from(places(saved.honest[0])))
    saved.write(replaced(saved.honest[0], where, data.draw(PLAIN)))
    saved.read()


@given(data=st.data())
@settings(fuzzed, max_examples=60)
def test_damaged_bytes_whose_manifest_agrees(data: st.DataObject, saved: Saved) -> None:
    file = io.BytesIO()
    torch.save(saved.honest[0], file)
    saved.put(data.draw(damaged_bytes(file.getvalue())))
    saved.read()


@pytest.mark.parametrize("content", [b"", b"X", b"PK\x03\x04", DEEP.encode()])
def test_what_is_no_file_of_torchs_is_named(content: bytes, saved: Saved) -> None:
    saved.put(content)
    for read in (fp32_weights, lambda folder: load_zero(saved.hift, folder)):
        with pytest.raises(ValueError, match=r"slivertune_hift_rank_0_of_2\.pt holds no state that can be read"):
            read(saved.folder)


def test_nothing_in_it_is_executed(saved: Saved, tmp_path: Path) -> None:
    saved.write({**saved.honest[0], "updates": Bomb(tmp_path / "was here")})
    with pytest.raises(ValueError, match="holds no state that can be read"):
        fp32_weights(saved.folder)
    assert not (tmp_path / "was here").exists()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["version"], 1, "has version 1, and this library reads 3"),
        (["updates"], -1, "updates is no count"),
        (["updates"], True, "updates is no count"),
        (["held_lr"], ["1e-2"], r"held_lr\[0\] is no learning rate"),
        (["groups", "1", "masters", 0], torch.zeros(3), r"pieces\['1'\] is no list of pieces within"),
        (["groups", "1", "masters", 0], torch.zeros(3, 3), r"\['masters'\]\[0\] is no fp32 master"),
        (["groups", "1", "masters", 0], torch.tensor([math.nan]), r"\['masters'\]\[0\] is no master without NaN"),
        (["groups", "1", "optimizer", "state", 0, "exp_avg"], torch.tensor([math.inf]), r"\['exp_avg'\] is no finite"),
        (["groups", "1", "optimizer", "state", 0, "step"], torch.tensor(-5.0), r"\['step'\] is no finite state"),
        ([*STATE, "exp_avg"], torch.zeros(3), r"'exp_avg' of group 1 is no state of \d+ elements"),
        ([*STATE, "exp_avg"], torch.zeros(FIRST, dtype=torch.int32), r"\['exp_avg'\] is no state of its kind"),
        ([*STATE, "exp_avg_sq"], -torch.ones(FIRST), r"\['exp_avg_sq'\] is no state of its kind"),
        (["groups", "1", "optimizer", "state"], {1: {}}, "the state of group 1 is no state of 1 masters"),
        ([*INNER, 0, "lr"], math.inf, r"\['param_groups'\]\[0\]\['lr'\] is no learning rate"),
        (["param_groups", 0, "lr"], math.nan, r"param_groups\[0\]\['lr'\] is no learning rate"),
        (["param_groups", 0, "lr"], "x", r"param_groups\[0\]\['lr'\] is no learning rate"),
        (["param_groups", 0], {"initial_lr": -1.0}, r"\['initial_lr'\] is no learning rate"),
        (["own", "1", 0], {"lr": math.nan}, r"own\['1'\]\[0\]\['lr'\] is no learning rate"),
        (["scaler"], {"cur_scale": 0.0}, r"scaler\['cur_scale'\] is no positive number"),
        (["scaler"], {"cur_scale": 1.0, "scale_factor": -2.0}, r"scaler\['scale_factor'\] is no positive number"),
        (["held_lr"], [math.nan], r"held_lr\[0\] is no learning rate"),
        (["scaler"], {"cur_scale": math.nan}, r"scaler\['cur_scale'\] is no finite number"),
        (["groups", "1", "masters"], [], r"pieces\['1'\] is no list for each master"),
        (["groups", "1"], {}, "it has no 'masters'"),
        (["pieces", "1", 0, 0], ("x", 0, 0, 1), r"is no list of pieces within 'x'"),
        (["pieces", "1", 0, 0], ("x", 0, -1, 1), r"pieces\['1'\]\[0\]\[0\] is no piece of a parameter"),
        (["pieces", "1", 0], [], "does not hold each element of .* once"),
        (["shapes", "1"], {"x": [2**40, 2**10]}, r"pieces\['1'\] is no list of pieces within"),
        (["scaler"], {"cur_scale": "print"}, r"scaler\['cur_scale'\] is no number"),
        (["own"], {}, "own is no mapping of"),
        (["active"], None, "active is no mapping by name"),
    ],
)
def test_the_part_that_is_another_is_named(path: list[Any], value: Any, message: str, saved: Saved) -> None:
    saved.write(replaced(saved.honest[0], path, value))
    with pytest.raises(ValueError, match=message):
        fp32_weights(saved.folder)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ["param_groups", 0],
            {"lr": 1e-2, "betas": (2.0, 0.999)},
            r"AdamW does not take .* \(ValueError: Invalid beta",
        ),
        (["param_groups", 0], {"lr": 1e-2, "eps": -1.0}, r"does not take .* \(ValueError: Invalid epsilon"),
        (["param_groups", 0], {"weight_decay": "0"}, r"weight_decay of param group 0 is '0', and this optimizer has"),
        (["param_groups"], [], "param_groups is no list of 1 param groups"),
        ([*INNER, 0, "betas"], (0.9, -1.0), r"does not take .* \(ValueError: Invalid beta"),
        ([*INNER, 0, "betas"], 0.9, r"betas of param group 0 is '0\.9'"),
        ([*INNER, 0, PARAM_GROUP], 1, r"groups\['1'\].*\['param_groups'\] is no list for 1 param groups"),
        ([*INNER, 0], {"lr": 1e-2}, "it has no 'slivertune_param_group'"),
        (["own", "0"], [{"eps": math.nan}], "eps of param group 0 is 'nan'"),
        (["own", "0"], [{}, {}], r"own\['0'\] is no list of 1 param groups"),
    ],
)
def test_hyperparameters_that_the_base_optimizer_does_not_take_are_refused(
    path: list[Any], value: Any, message: str, saved: Saved
) -> None:
    check_fits(saved.folder, saved.honest[0], saved.hift)
    with pytest.raises(ValueError, match=rf"{saved.folder}.*{message}"):
        check_fits(saved.folder, replaced(saved.honest[0], path, value), saved.hift)


def test_ranks_of_different_models_are_refused(saved: Saved) -> None:
    other = saved.honest[0]["shapes"]
    group, sizes = next(iter(other.items()))
    taller = {**other, group: {name: [*shape, 1] for name, shape in sizes.items()}}
    saved.write({**saved.honest[0], "shapes": taller})
    with pytest.raises(ValueError, match="has files of different models"):
        fp32_weights(saved.folder)


def test_elements_that_two_ranks_hold_are_refused(saved: Saved) -> None:
    saved.write(saved.honest[1])
    with pytest.raises(ValueError, match=r"does not hold each element of .* once"):
        fp32_weights(saved.folder)


def test_a_file_that_is_missing_is_named(saved: Saved) -> None:
    with pytest.raises(ValueError, match=r"slivertune_hift_rank_2_of_3\.pt is not there"):
        read_rank_file(saved.folder, 2, 3)
