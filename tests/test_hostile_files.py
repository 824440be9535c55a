"""Files that are damaged, or written by somebody who means harm: only errors of our own, and nothing else happens.

One file, however long: all formats meet the same made-up values and limits, and their examples are counted together.
"""

import contextlib
import functools
import inspect
import io
import json
import math
import os
import pickle
import resource
import shutil
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save

from slivertune import TokenTune
from slivertune.core.atomic import write_json
from slivertune.core.manifest import MANIFEST_NAME, check_whole, read_entries, write_manifest
from slivertune.core.saved_state import load_dictionary, pack_state
from slivertune.deltas import load
from slivertune.deltas.delta_file import DELTA_FILE
from slivertune.deltas.merge import UNDO_FILE, merge, unmerge
from slivertune.deltas.plain_checkpoint import UNDO_FOLDER
from slivertune.interop.checkpoints import load_tokens
from slivertune.parallel.checkpoint.sidecar import load_state, save_state
from slivertune.parallel.initialize import resolve_config
from slivertune.planning.configs import find_model
from tests.deltas.files import UP, deltas_of, with_hash, write_deltas
from tests.helpers.faults import snapshot
from tests.helpers.models import tiny_llama
from tests.helpers.trained import trained

LIMIT_BYTES = 256 * 2**20
"""What no reading of a file of some kilobytes may take."""
LIMIT_S = 5.0
"""Of this process's own time; it takes some milliseconds. What waits for ever ends the whole run."""

fuzzed = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
SHAPE = (48, 32)

LARGE = st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64, 10**30, -(2**63), -1])
NUMBERS = st.one_of(st.integers(-2, 50), LARGE, st.floats(), st.booleans())
NAMES = st.sampled_from(
    [
        UP,
        "",
        "..",
        "../x",
        "/etc/passwd",
        "model.layers.0.mlp.up_proj.weight\0",
        "a/b",
        "\u202e",
        "__metadata__",
        "\ud800",
    ]
)
TEXTS = st.one_of(NAMES, st.text(max_size=12), st.sampled_from(["F32", "I32", "float32", "load", 64 * "a", "1e999"]))
VALUES = st.recursive(
    st.one_of(st.none(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)
DEEP = 100_000 * "["


@dataclass
class Bomb:
    """Runs a command when it is unpickled."""

    path: Path

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.path}'",)


@contextmanager
def harmless(root: Path, *allowed: type[BaseException]) -> Iterator[None]:
    """The block ends well or with an error of ours; nothing is written, no memory taken, no time lost."""
    before, began = snapshot(root), time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except allowed:
        pass
    assert time.process_time() - began < LIMIT_S
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 < LIMIT_BYTES
    assert snapshot(root) == before


def write(path: Path, content: str | bytes) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@st.composite
def damaged_bytes(draw: Any, content: bytes) -> bytes:
    """Bytes flipped, cut out, cut off, put in, or taken from elsewhere in the file."""
    damaged = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(damaged) - 1)))
        kind = draw(st.sampled_from(["flip", "cut out", "cut off", "put in", "repeat", "replace"]))
        size = draw(st.sampled_from([1, 2, 4, 8, 64]))
        if kind == "flip" and damaged:
            damaged[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut out":
            del damaged[at : at + size]
        elif kind == "cut off":
            del damaged[at:]
        elif kind == "put in":
            damaged[at:at] = draw(st.binary(min_size=1, max_size=size))
        elif kind == "repeat":
            damaged[at:at] = damaged[at : at + size]
        else:
            damaged[at : at + size] = draw(st.binary(min_size=1, max_size=size))
    return bytes(damaged)


ARRAYS = st.one_of(
    st.builds(
        lambda values, dtype: numpy.array(values, dtype="int64").astype(dtype),
        st.lists(st.integers(-3, 2000), max_size=12),
        st.sampled_from(["int32", "int64", "uint8", "float32"]),
    ),
    st.builds(lambda values: numpy.array(values, dtype="int32"), st.lists(st.integers(0, 1535), max_size=12)),
    st.builds(
        lambda values: numpy.array(sorted(set(values)), dtype="int32"), st.lists(st.integers(0, 1600), max_size=12)
    ),
    st.builds(lambda values: numpy.array(values, dtype="float32"), st.lists(st.floats(width=32), max_size=12)),
    st.builds(lambda shape: numpy.zeros(shape, dtype="float32"), st.lists(st.integers(0, 3), max_size=3)),
)


@st.composite
def made_deltas(draw: Any, honest: dict[str, str]) -> bytes:
    """A well-formed file whose tensors and metadata somebody has made up, and whose hash is right."""
    tensors = {f"{UP}.indices": numpy.array([1, 5, 9], dtype="int32"), f"{UP}.values": numpy.ones(3, dtype="float32")}
    for _ in range(draw(st.integers(0, 2))):
        key = draw(st.sampled_from([f"{UP}.indices", f"{UP}.values", "x", "../x.indices"]))
        tensors[key] = draw(ARRAYS)
    metadata = dict(honest)
    for _ in range(draw(st.integers(0, 2))):
        key = draw(st.sampled_from([*honest, "extra"]))
        metadata[key] = draw(st.one_of(st.text(max_size=8), VALUES.map(json.dumps), st.just(DEEP), st.just("NaN")))
    if draw(st.booleans()):
        table = json.loads(honest["tensors"])
        table[UP][draw(st.sampled_from(["shape", "dtype", "sha256", "tied_names"]))] = draw(VALUES)
        metadata["tensors"] = json.dumps(table)
    for key in draw(st.sets(st.sampled_from(list(metadata)), max_size=1)):
        del metadata[key]
    return with_hash(safetensors.numpy.save(tensors, metadata))


@functools.cache
def tiny() -> Any:
    """One model for all examples."""
    return tiny_llama()


@pytest.fixture(scope="module")
def deltas(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, dict[str, str]]:
    """A folder of deltas, and the content and metadata of its file."""
    folder = write_deltas(tmp_path_factory.mktemp("deltas") / "deltas", tiny(), UP)
    with safe_open(folder / DELTA_FILE, "pt") as file:
        return folder, (folder / DELTA_FILE).read_bytes(), dict(file.metadata())


def read_deltas(folder: Path, content: bytes) -> None:
    (folder / DELTA_FILE).write_bytes(content)
    with harmless(folder, ValueError):
        for delta in load(folder).deltas.values():
            positions = delta.indices.long()
            assert bool(((positions >= 0) & (positions < delta.indices.new_tensor(delta.shape).prod())).all())
            assert bool((positions[1:] > positions[:-1]).all())
            assert bool(torch.isfinite(delta.values).all())


@given(data=st.data())
@settings(fuzzed, max_examples=400)
def test_made_up_deltas_with_a_right_hash(data: st.DataObject, deltas: tuple[Path, bytes, dict[str, str]]) -> None:
    folder, _, honest = deltas
    read_deltas(folder, data.draw(made_deltas(honest)))


@given(data=st.data())
@settings(fuzzed, max_examples=200)
def test_damaged_bytes_of_deltas(data: st.DataObject, deltas: tuple[Path, bytes, dict[str, str]]) -> None:
    folder, content, _ = deltas
    damaged = data.draw(damaged_bytes(content))
    read_deltas(folder, damaged)
    if damaged != content:
        with pytest.raises(ValueError):  # noqa: PT011
            load(folder)


HEADERS = st.one_of(
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.builds(
        lambda name, *said: json.dumps(
            {name: dict(zip(("dtype", "shape", "data_offsets"), said, strict=True))}
        ).encode(),
        NAMES,
        st.sampled_from(["F32", "I32", "BF16", "F4", "X"]),
        st.lists(st.sampled_from([0, 1, 2**31, 2**62, 2**64, -1]), max_size=4),
        st.lists(st.sampled_from([0, 4, 2**62, 2**64 - 1, -4]), max_size=3),
    ),
    st.just(DEEP.encode()),
    st.binary(max_size=40),
)
CLAIMED = st.one_of(st.none(), st.sampled_from([0, 1, 2**31, 100_000_000, 100_000_001, 2**62, 2**64 - 1]))


@given(header=HEADERS, body=st.binary(max_size=40), claimed=CLAIMED)
@settings(fuzzed, max_examples=200)
def test_headers_that_somebody_made_up(header: bytes, body: bytes, claimed: int | None, tmp_path: Path) -> None:
    content = struct.pack("<Q", len(header) if claimed is None else claimed) + header + body
    read_deltas(tmp_path, content)
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "model.safetensors").write_bytes(content)
    with harmless(tmp_path, ValueError):
        merge(tmp_path, deltas_of(tiny(), UP), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@given(
    index=st.one_of(
        VALUES,
        st.dictionaries(TEXTS, TEXTS, max_size=3).map(lambda table: {"weight_map": table}),
        VALUES.map(lambda value: {"weight_map": value}),
        st.just({"weight_map": {UP: "../outside.safetensors", "b": "/etc/passwd"}}),
        st.just({"weight_map": {UP: "pipe.safetensors"}}),
        st.just({"weight_map": {UP: "."}}),
    ),
    config=st.one_of(
        VALUES.map(json.dumps), VALUES.map(lambda value: json.dumps({"quantization_config": value})), st.just(DEEP)
    ),
)
@settings(fuzzed, max_examples=200)
def test_checkpoint_folders_that_somebody_made_up(index: Any, config: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text(config)
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "outside.safetensors").write_bytes(b"x")
    if not (base / "pipe.safetensors").exists():
        os.mkfifo(base / "pipe.safetensors")
    before = [each.name for each in tmp_path.iterdir()]
    with harmless(tmp_path / "none", ValueError, FileNotFoundError):
        merge(base, deltas_of(tiny(), UP), tmp_path / "merged")
    assert [each.name for each in tmp_path.iterdir()] == before


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A merged checkpoint, and the content of its undo file."""
    root = tmp_path_factory.mktemp("undo")
    tiny().save_pretrained(root / "base")
    merge(root / "base", deltas_of(tiny(), UP), root / "merged")
    return root / "merged", (root / "merged" / UNDO_FOLDER / UNDO_FILE).read_bytes()


@given(data=st.data())
@settings(fuzzed, max_examples=100)
def test_undo_files_that_somebody_made_up(data: st.DataObject, merged: tuple[Path, bytes]) -> None:
    folder, content = merged
    (folder / UNDO_FOLDER / UNDO_FILE).write_bytes(with_hash(data.draw(damaged_bytes(content))))
    before = [each.name for each in folder.parent.iterdir()]
    with harmless(folder, ValueError):
        unmerge(folder, folder.parent / "again")
    shutil.rmtree(folder.parent / "again", ignore_errors=True)
    assert [each.name for each in folder.parent.iterdir()] == before


class State:
    """A folder of HiFT's or SFT's state; the manifest agrees with whatever it holds, as a hostile one would."""

    def __init__(self, kind: str, root: Path) -> None:
        self.root, self.folder = root, root / kind
        self.optimizer = trained(kind, 2)
        save_state(self.optimizer, self.folder)
        self.name = "header.pt" if kind == "hift" else "state.pt"
        self.honest = (self.folder / self.name).read_bytes()
        self.value = torch.load(self.folder / self.name, weights_only=True)

    @contextmanager
    def holding(self, content: bytes, name: str = "") -> Iterator[None]:
        """Let a file, the state's own if none is named, have another content meanwhile."""
        path = self.folder / (name or self.name)
        before = path.read_bytes()
        path.write_bytes(content)
        write_manifest(self.folder)
        try:
            yield
        finally:
            path.write_bytes(before)

    def read(self) -> None:
        load_state(self.optimizer, self.folder)

    def try_content(self, content: bytes, name: str = "") -> None:
        with self.holding(content, name), harmless(self.root, ValueError):
            self.read()


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, State]:
    return {kind: State(kind, tmp_path_factory.mktemp(kind)) for kind in ("hift", "sft")}


@given(data=st.data())
@settings(fuzzed, max_examples=40)
@pytest.mark.parametrize("kind", ["hift", "sft"])
def test_damaged_bytes_of_a_state_whose_manifest_agrees(
    kind: str, data: st.DataObject, states: dict[str, State]
) -> None:
    state = states[kind]
    state.try_content(data.draw(damaged_bytes(state.honest)))
    for path in sorted(state.folder.glob("*.safetensors"))[:1]:
        state.try_content(data.draw(damaged_bytes(path.read_bytes())), path.name)


@pytest.mark.parametrize(
    "content", [b"", b"X", b"\x80", b"\x80\x02X\x01", b"PK\x03\x04", b"]", b"\x80\x02N.", b"\x80\x02]."]
)
@pytest.mark.parametrize("kind", ["hift", "sft"])
def test_what_torch_stumbles_over_is_no_state(kind: str, content: bytes, states: dict[str, State]) -> None:
    with pytest.raises(ValueError, match="holds no state that can be read"):
        load_dictionary(io.BytesIO(content), name="it")
    states[kind].try_content(content)


def replaced(value: Any, path: list[Any], new: Any) -> Any:
    """A copy of nested containers with one place changed."""
    if not path:
        return new
    if isinstance(value, dict):
        return {key: replaced(each, path[1:], new) if key == path[0] else each for key, each in value.items()}
    return [replaced(each, path[1:], new) if at == path[0] else each for at, each in enumerate(value)]


def places(value: Any) -> list[list[Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return [[], *([key, *rest] for key, each in inner for rest in places(each))]


PLAIN = st.one_of(
    st.none(),
    NUMBERS,
    st.sampled_from(["", "x", [], {}, [[]], {"a": 1}, (1, 2)]),
    st.sampled_from([torch.zeros(0), torch.zeros(3), torch.ones(2, 2, dtype=torch.int32), torch.tensor(float("nan"))]),
)


@given(data=st.data())
@settings(fuzzed, max_examples=70)
@pytest.mark.parametrize("kind", ["hift", "sft"])
def test_a_state_in_which_one_thing_is_another(kind: str, data: st.DataObject, states: dict[str, State]) -> None:
    state = states[kind]
    state.try_content(saved(replaced(state.value, data.draw(st.sampled_from(places(state.value))), data.draw(PLAIN))))


def leaf_at(value: Any, path: list[Any]) -> Any:
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize("odd", [True, math.nan, math.inf, "x", 2**80, -1])
@pytest.mark.parametrize("kind", ["hift", "sft"])
def test_each_number_of_a_state_that_is_another_kind_of_value_is_refused(
    kind: str, odd: Any, states: dict[str, State]
) -> None:
    state = states[kind]
    numbers = [path for path in places(state.value) if type(leaf_at(state.value, path)) in (int, float)]
    if odd in (2**80, -1):
        # What counts, and rates below zero; other hyperparameters have rules of their own.
        counts = [path for path in numbers if type(leaf_at(state.value, path)) is int and path[0] != "param_groups"]
        numbers = counts + [path for path in numbers if odd == -1 and path[-1] == "lr"]
    assert len(numbers) >= 2
    for path in numbers:
        with (
            state.holding(saved(replaced(state.value, path, odd))),
            pytest.raises(ValueError, match=r"saved state|holds no state|header\.pt names"),
        ):
            state.read()


@given(data=st.data())
@settings(fuzzed, max_examples=40)
@pytest.mark.parametrize("kind", ["hift", "sft"])
def test_a_dictionary_in_which_one_thing_is_another(kind: str, data: st.DataObject, states: dict[str, State]) -> None:
    optimizer = states[kind].optimizer
    whole = optimizer.state_dict()
    made_up = replaced(whole, data.draw(st.sampled_from(places(whole)[1:])), data.draw(PLAIN))
    with contextlib.suppress(ValueError):
        optimizer.load_state_dict(made_up)
    optimizer.load_state_dict(whole)


HOSTILE: dict[str, dict[str, tuple[list[Any], Any]]] = {
    "hift": {
        "updates, True": (["hift", "updates"], True),
        "updates, 2**80": (["hift", "updates"], 2**80),
        "updates, -5": (["hift", "updates"], -5),
        "a held rate, x": (["hift", "held_lr"], ["x"]),
        "a held rate, NaN": (["hift", "held_lr"], [math.nan]),
        "a rate, NaN": (["param_groups", 0, "lr"], math.nan),
        "a moment, int32": (["state", UP, "exp_avg"], torch.zeros(SHAPE, dtype=torch.int32)),
        "a moment, NaN": (["state", UP, "exp_avg_sq"], torch.full(SHAPE, math.nan)),
        "a step, -5": (["state", UP, "step"], torch.tensor(-5.0)),
    },
    "sft": {
        "updates, True": (["sft", "updates"], True),
        "updates, 2**80": (["sft", "updates"], 2**80),
        "updates, -5": (["sft", "updates"], -5),
        "a rate, x": (["param_groups", 0, "lr"], "x"),
        "a rate, NaN": (["param_groups", 0, "lr"], math.nan),
        "a moment, int32": (["state", UP, "exp_avg"], torch.int32),
        "a moment, NaN": (["state", UP, "exp_avg_sq"], math.nan),
        "an age, -5": (["state", UP, "age"], -5),
    },
}
"""By method: a place in its `state_dict`, and what somebody wrote there."""


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(("kind", "what"), [(kind, what) for kind, rows in HOSTILE.items() for what in rows])
def test_a_dictionary_with_a_hostile_value_is_refused(
    kind: str, what: str, packed: bool, states: dict[str, State]
) -> None:
    optimizer, (path, value) = states[kind].optimizer, HOSTILE[kind][what]
    whole = optimizer.state_dict()
    if isinstance(value, torch.dtype):
        value = leaf_at(whole, path).to(value)
    elif isinstance(leaf_at(whole, path), torch.Tensor) and not isinstance(value, torch.Tensor):
        value = torch.full_like(leaf_at(whole, path), value)
    made_up = replaced(whole, path, value)
    given = pack_state(made_up, optimizer.param_groups, optimizer.updates) if packed else made_up
    before = saved(whole)
    with pytest.raises(ValueError, match="the saved state"):
        optimizer.load_state_dict(given)
    assert saved(optimizer.state_dict()) == before


@pytest.mark.parametrize(
    ("place", "value"),
    [(place, value) for place in ("updates", "lr") for value in (True, -5, math.nan, "x")] + [("updates", 2**80)],
)
@pytest.mark.parametrize("kind", ["hift", "sft"])
def test_a_placeholder_with_a_hostile_value_is_refused(kind: str, place: str, value: Any) -> None:
    optimizer = trained(kind, 2)
    optimizer.use_sidecar()
    honest = optimizer.state_dict()
    path = ["param_groups", 0, "lr"] if place == "lr" else ["state", 0, f"{kind}_updates"]
    before = saved(optimizer.state_dict())
    with pytest.raises(ValueError, match="the saved state is damaged"):
        optimizer.load_state_dict(replaced(honest, path, value))
    assert saved(optimizer.state_dict()) == before


TENSORS = {
    "int32": lambda tensor: tensor.to(torch.int32),
    "NaN": lambda tensor: tensor.float().fill_(math.nan).to(tensor.dtype),
    "infinity": lambda tensor: tensor.float().index_fill(0, torch.tensor([0]), math.inf).to(tensor.dtype),
    "double": lambda tensor: tensor.double(),
}


@pytest.mark.parametrize("change", TENSORS)
def test_tensors_of_a_group_that_this_optimizer_would_not_have_are_refused(
    change: str, states: dict[str, State]
) -> None:
    state = states["hift"]
    path = sorted(state.folder.glob("*.safetensors"))[0]
    tensors, metadata = load_file(path), {}
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    for name in tensors:
        changed = save({**tensors, name: TENSORS[change](tensors[name])}, metadata)
        with state.holding(changed, path.name), pytest.raises(ValueError, match="saved state is damaged"):
            state.read()


@pytest.mark.parametrize(
    "rows", ["{", "[1]", "[" * 100_000, "9" * 6000, '{"x": NaN}', '{"x": true}', '{"x": -1}', f'{{"x": {2**80}}}', "{}"]
)
def test_first_rows_that_are_no_rows_are_refused(rows: str, states: dict[str, State]) -> None:
    state = states["hift"]
    path = sorted(state.folder.glob("*.safetensors"))[0]
    with (
        state.holding(save(load_file(path), {"first_rows": rows}), path.name),
        pytest.raises(ValueError, match=r"does not name the first row|saved state"),
    ):
        state.read()


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("delta", TENSORS["NaN"]),
        ("exp_avg", TENSORS["infinity"]),
        ("exp_avg_sq", TENSORS["int32"]),
        ("age", lambda tensor: torch.full_like(tensor, 32_767)),
        ("age", lambda tensor: torch.full_like(tensor, -1)),
        ("indices", TENSORS["double"]),
    ],
)
def test_tensors_of_sft_that_it_would_not_have_are_refused(key: str, change: Any, states: dict[str, State]) -> None:
    state = states["sft"]
    name = next(iter(state.value["state"]))
    with (
        state.holding(saved(replaced(state.value, ["state", name, key], change(state.value["state"][name][key])))),
        pytest.raises(ValueError, match="saved state"),
    ):
        state.read()


@pytest.mark.parametrize("step", [torch.tensor(math.nan), torch.tensor(-5.0), torch.ones(3), "x", True])
def test_a_count_of_steps_that_is_none_is_refused(step: Any, states: dict[str, State]) -> None:
    state = states["hift"]
    name = next(name for name, values in state.value["scalars"].items() if "step" in values)
    with (
        state.holding(saved(replaced(state.value, ["scalars", name, "step"], step))),
        pytest.raises(ValueError, match=r"saved state|holds no state"),
    ):
        state.read()


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


@pytest.mark.parametrize("num_ranks", [10**9, 0, -1, 2.0, True, "1"])
def test_a_number_of_ranks_without_their_files_is_refused(num_ranks: Any, states: dict[str, State]) -> None:
    state = states["hift"]
    with (
        state.holding(saved({**state.value, "num_ranks": num_ranks})),
        pytest.raises(ValueError, match=r"header\.pt names .* ranks, and \d+ files are there"),
    ):
        state.read()


@pytest.mark.parametrize("kind", ["hift", "sft"])
@pytest.mark.parametrize("form", ["pickle", "torch", "legacy"])
def test_nothing_in_a_state_is_executed(kind: str, form: str, states: dict[str, State], tmp_path: Path) -> None:
    value = {"state": Bomb(tmp_path / "was here")}
    zipped = {"_use_new_zipfile_serialization": form == "torch"}
    state = states[kind]
    with (
        state.holding(pickle.dumps(value) if form == "pickle" else saved(value, **zipped)),
        pytest.raises(ValueError, match=rf"{state.name} holds no state that can be read"),
    ):
        state.read()
    assert not (tmp_path / "was here").exists()


FILES: st.SearchStrategy[str | bytes] = st.one_of(VALUES.map(json.dumps), st.binary(max_size=30), st.just(DEEP))
MANIFESTS = st.one_of(
    VALUES,
    VALUES.map(lambda value: {"format": 2, "files": value}),
    st.dictionaries(NAMES, VALUES, max_size=2).map(lambda files: {"format": 2, "files": files}),
)
ENGINES = st.one_of(
    VALUES.map(lambda value: {"train_batch_size": 1, "zero_optimization": value}),
    VALUES.map(lambda value: {"train_batch_size": value, "bf16": value, "gradient_clipping": value}),
).map(json.dumps)
KINDS = st.sampled_from(["llama", "qwen3", "gpt2", "mixtral", "no such", 3])


@given(content=FILES, key=st.sampled_from(["version", "seed", "num_draws"]), value=VALUES)
@settings(fuzzed, max_examples=100)
def test_token_selections_that_somebody_made_up(content: str | bytes, key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    with TokenTune(ratio=0.5, seed=3).attach(tiny()) as handle:
        for each in (content, json.dumps({**handle.state_dict(), key: value})):
            write(path, each)
            handle.num_draws = 0
            with harmless(tmp_path, ValueError):
                load_tokens(handle, path)
            assert type(handle.num_draws) is int and handle.num_draws >= 0


FIGURES = tiny().config.to_dict()
MODELS = st.builds(
    lambda key, value, kind: json.dumps({**FIGURES, "model_type": kind, key: value}),
    st.sampled_from([*FIGURES, "quantization_config", "auto_map"]),
    VALUES,
    KINDS,
)


def model_of(path: Path) -> None:
    find_model(str(path.parent))


def entries_of(path: Path) -> None:
    with harmless(path.parent, ValueError):
        check_whole(path.parent)
    read_entries(path.parent)


READERS: dict[str, tuple[str, st.SearchStrategy[str | bytes], Callable[[Path], object]]] = {
    "manifest": (MANIFEST_NAME, MANIFESTS.map(json.dumps), entries_of),
    "configuration of a model": ("config.json", MODELS, model_of),
    "no configuration of a model": ("config.json", FILES, model_of),
    "DeepSpeed config": ("ds.json", st.one_of(FILES, ENGINES), lambda path: resolve_config(path, tiny())),
}
"""Name of the file, what somebody made up, and what reads it."""


@given(data=st.data())
@settings(fuzzed, max_examples=150)
@pytest.mark.parametrize("kind", READERS)
def test_files_that_somebody_made_up(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    name, contents, read = READERS[kind]
    write(tmp_path / name, data.draw(contents))
    with harmless(tmp_path, ValueError):
        read(tmp_path / name)


@pytest.mark.parametrize("names", [1, True, "LlamaForCausalLM", {"a": 1}, [1], [None], ["LlamaForCausalLM", 2]])
def test_architectures_that_are_no_names_are_refused(names: Any, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {**FIGURES, "architectures": names})
    with pytest.raises(ValueError, match=r"architectures=.* must be a list of class names"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("figures", [{"num_hidden_layers": 10**9}, {"text_config": {"num_hidden_layers": 10**9}}])
def test_a_number_of_layers_that_no_model_has_is_refused(figures: dict[str, Any], tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "qwen3", **figures})
    with (
        harmless(tmp_path),
        pytest.raises(ValueError, match=r"num_hidden_layers=1000000000, and no model has more than"),
    ):
        find_model(str(tmp_path))


def test_pickles_pipes_links_and_folders_in_the_place_of_deltas(tmp_path: Path) -> None:
    place: Callable[[str], Path] = lambda name: tmp_path / name / DELTA_FILE  # noqa: E731
    for name in ("pickle", "pipe", "folder", "link", "loop", "device"):
        (tmp_path / name).mkdir()
    place("pickle").write_bytes(pickle.dumps(Bomb(tmp_path / "was here")))
    os.mkfifo(place("pipe"))
    place("folder").mkdir()
    place("link").symlink_to("/etc/passwd")
    place("loop").symlink_to(place("loop"))
    place("device").symlink_to("/dev/zero")
    for name in ("pickle", "pipe", "folder", "link", "loop", "device"):
        with pytest.raises((ValueError, FileNotFoundError), match=DELTA_FILE):
            load(tmp_path / name)
    assert not (tmp_path / "was here").exists()


def test_the_examples_above_are_a_thousand_at_least() -> None:
    total = sum(
        function._hypothesis_internal_use_settings.max_examples
        for _, function in inspect.getmembers(sys.modules[__name__], lambda each: hasattr(each, "hypothesis"))
    )
    assert total >= 1000
