import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from slivertune.deltas import apply, delta_file
from slivertune.deltas.additions import add_rounded
from slivertune.deltas.delta import SparseDelta, read_flat, write_flat
from slivertune.deltas.delta_file import DELTA_FILE, load, save_pretrained
from slivertune.deltas.sparse_file import DeltaFileError
from slivertune.sft import SFT, SFTConfig
from tests.deltas.files import UP, change_table, damage, deltas_of, named, random_delta, sha256, write_deltas
from tests.helpers.models import tiny_llama, token_batches
from tests.sft.runs import train


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deltas_come_back_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_llama(dtype)
    deltas = deltas_of(model)
    config = {"density": 0.012, "selection": "momentum", "targets": None, "nested": {"a": [1, 2]}}
    save_pretrained(tmp_path / "deltas", deltas, config=config, base=named(model), base_model_name="owner/model")
    found = load(tmp_path / "deltas", base=named(model))
    assert found.config == config
    assert found.base_model_name == "owner/model"
    assert found.deltas.keys() == deltas.keys()
    for name, delta in deltas.items():
        assert torch.equal(found.deltas[name].indices, delta.indices)
        assert torch.equal(found.deltas[name].values.view(torch.int32), delta.values.view(torch.int32))
        assert found.deltas[name].shape == delta.shape
        assert found.base[name].sha256 == sha256(named(model)[name])
        assert found.base[name].dtype == str(dtype).removeprefix("torch.")


def test_the_file_is_safetensors_with_its_version_and_costs_8_bytes_a_weight(tmp_path: Path) -> None:
    write_deltas(tmp_path / "deltas", tiny_llama(), UP)
    with safe_open(tmp_path / "deltas" / DELTA_FILE, "pt") as file:
        assert file.metadata()["version"] == "2"
        assert {key: file.get_slice(key).get_dtype() for key in file.keys()} == {  # noqa: SIM118
            f"{UP}.indices": "I32",
            f"{UP}.values": "F32",
        }
    tensors = safetensors.torch.load_file(tmp_path / "deltas" / DELTA_FILE)
    assert sum(tensor.nbytes for tensor in tensors.values()) == 40 * 8


def test_nothing_is_ever_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled")

    for name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"):
        monkeypatch.setattr(name, fail)
    model = tiny_llama()
    write_deltas(tmp_path / "deltas", model)
    assert len(load(tmp_path / "deltas", base=named(model)).deltas) == 3
    torch.serialization.save({"a": torch.zeros(1)}, tmp_path / "deltas" / DELTA_FILE)
    with pytest.raises(DeltaFileError, match="is no safetensors file"):
        load(tmp_path / "deltas")


def test_two_names_may_share_their_memory_and_a_delta_may_be_empty(tmp_path: Path) -> None:
    base = {"a": torch.rand(4, 4), "b": torch.rand(4, 4), "c": torch.rand(4, 4)}
    shared = random_delta((4, 4), 5, seed=1)
    empty = SparseDelta(torch.zeros(0, dtype=torch.int32), torch.zeros(0), (4, 4))
    save_pretrained(tmp_path / "deltas", {"a": shared, "b": shared, "c": empty}, config={}, base=base)
    found = load(tmp_path / "deltas", base=base)
    assert torch.equal(found.deltas["a"].values, found.deltas["b"].values)
    assert found.deltas["c"].num_weights == 0


def test_tied_names_are_part_of_the_file(tmp_path: Path) -> None:
    model = tiny_llama(tied=True)
    embedding = "model.embed_tokens.weight"
    assert load(write_deltas(tmp_path / "deltas", model, embedding, UP)).base[embedding].tied_names == (
        "lm_head.weight",
    )
    assert load(tmp_path / "deltas").base[UP].tied_names == ()


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_appears_whole_or_not_at_all(
    error: BaseException, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    folder = tmp_path / "deep" / "deltas"
    if exists:
        write_deltas(folder, model, seed=1)
    before = sorted((path, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file())
    write = delta_file.write_sparse_file

    def fail(path: Path, **more: Any) -> None:
        write(path, **more)
        raise error

    monkeypatch.setattr(delta_file, "write_sparse_file", fail)
    with pytest.raises(type(error)):
        write_deltas(folder, model, seed=2)
    assert sorted((path, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()) == before
    assert folder.exists() == exists


def test_a_file_in_a_folder_that_exists_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    model = tiny_llama()
    (tmp_path / "notes.txt").write_text("mine")
    write_deltas(tmp_path, model, seed=1)
    write_deltas(tmp_path, model, seed=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", DELTA_FILE]
    assert torch.equal(load(tmp_path).deltas[UP].values, deltas_of(model, seed=2)[UP].values)


def test_what_is_saved_is_as_readable_as_any_file(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").touch()
    write_deltas(tmp_path / "new", tiny_llama())
    (tmp_path / "old").mkdir()
    write_deltas(tmp_path / "old", tiny_llama())
    for folder in ("new", "old"):
        for ours, theirs in ((DELTA_FILE, "file"), ("", "")):
            modes = [(tmp_path / part).stat().st_mode for part in (f"{folder}/{ours}", f"plain/{theirs}")]
            assert stat.S_IMODE(modes[0]) == stat.S_IMODE(modes[1])


def not_finite(value: float) -> SparseDelta:
    delta = random_delta((48, 32), 4, seed=0)
    delta.values[2] = value
    return delta


@pytest.mark.parametrize(
    ("deltas", "config", "message"),
    [
        ({}, {}, r"there are no deltas to save\. Name the weights"),
        ({"other": random_delta((2,), 1, 0)}, {}, "'other' has a delta but no base tensor"),
        (
            {UP: random_delta((2, 2), 1, 0)},
            {},
            rf"'{UP}' has a delta for shape \(2, 2\), the base tensor has \(48, 32\)",
        ),
        ({UP: not_finite(float("nan"))}, {}, rf"delta of '{UP}': values\[2\]=nan must be finite"),
        ({UP: random_delta((48, 32), 4, 0)}, {"a": object()}, "config can't be written as JSON"),
        ({UP: random_delta((48, 32), 4, 0)}, {"a": float("inf")}, "config can't be written as JSON"),
    ],
)
def test_what_could_not_be_read_again_is_not_saved(
    deltas: dict[str, SparseDelta], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        save_pretrained(tmp_path / "deltas", deltas, config=config, base=named(tiny_llama()))
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_the_folder_should_be_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "deltas").write_text("mine")
    with pytest.raises(FileExistsError, match=r"deltas exists already\. Name a new folder"):
        write_deltas(tmp_path / "deltas", tiny_llama())
    assert (tmp_path / "deltas").read_text() == "mine"


Change = Callable[[dict[str, torch.Tensor], dict[str, str]], object]


def put(part: str, at: int, value: float) -> Change:
    return lambda tensors, _: tensors[f"{UP}.{part}"].__setitem__(at, value)


def replace(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors, _: tensors.update({f"{UP}.{part}": change(tensors[f"{UP}.{part}"])})


def say(**said: Any) -> Change:
    return lambda _, metadata: change_table(metadata, UP, **said)


def meta(key: str, value: str | None) -> Change:
    return lambda _, metadata: metadata.pop(key) if value is None else metadata.update({key: value})


HOSTILE: list[tuple[Change, str]] = [
    (put("indices", -1, 1536), r"'UP': indices\[39\]=1536 must be in \[0, 1535\] for shape \(48, 32\)"),
    (put("indices", 0, -1), r"'UP': indices\[0\]=-1 must be in \[0, 1535\]"),
    (put("indices", 7, -(2**31)), r"'UP': indices\[7\]=-2147483648 must be in"),
    (
        replace("indices", lambda old: old.flip(0)),
        r"'UP': indices\[1\]=\d+ follows \d+, and indices must increase strictly",
    ),
    (lambda t, _: t[f"{UP}.indices"].__setitem__(3, t[f"{UP}.indices"][2]), r"'UP': indices\[3\]=\d+ appears twice"),
    (put("values", 5, float("nan")), r"'UP': values\[5\]=nan must be finite"),
    (put("values", 5, float("-inf")), r"'UP': values\[5\]=-inf must be finite"),
    (replace("indices", torch.Tensor.long), r"UP.indices has dtype I64, it must be 'int32'"),
    (replace("values", torch.Tensor.bfloat16), r"UP.values has dtype BF16, it must be 'float32'"),
    (replace("values", lambda old: old[:-1].clone()), r"'UP' has 40 indices and 39 values, not as many"),
    (replace("indices", lambda old: old.view(4, 10)), r"UP.indices has shape \[4, 10\], it must have one dimension"),
    (lambda tensors, _: tensors.pop(f"{UP}.values"), r"lacks the tensor 'UP.values'"),
    (lambda tensors, _: tensors.update(extra=torch.zeros(1)), r"has, beyond its table, the tensor 'extra'"),
    (meta("version", "1"), r"has version '1', and this library reads 2\. Use the version of slivertune that wrote it"),
    (meta("version", None), r"has version None, and this library reads 2"),
    (meta("file_sha256", None), r"holds other bytes than were written \(its SHA-256 differs\)\. The file is damaged"),
    (meta("file_sha256", 64 * "F"), r"holds other bytes than were written"),
    (meta("note", '{"file_sha256":"x'), r"holds other bytes than were written|no JSON"),
    (meta("format", "pt"), r"has format 'pt', not 'slivertune.sft_delta'\. Name a file of 'sli"),
    (meta("tensors", None), r"its metadata 'tensors' is absent or no JSON"),
    (meta("tensors", "{"), r"its metadata 'tensors' is absent or no JSON"),
    (meta("tensors", "[" * 100_000), r"its metadata 'tensors' is absent or no JSON"),
    (meta("tensors", "{}"), r"its table of tensors is {}"),
    (meta("tensors", "[1]"), r"its table of tensors is \[1\]"),
    (meta("config", "3"), r"config must be a JSON object"),
    (meta("base_model_name", "[]"), r"base_model_name a string or null"),
    (say(shape=[48, -32]), r"'UP' has shape \[48, -32\], it must be at most 8 positive integers"),
    (say(shape=[48.0, 32]), r"'UP' has shape \[48.0, 32\]"),
    (say(shape=[True] * 3), r"'UP' has shape \[True, True, True\]"),
    (say(shape="48"), r"'UP' has shape '48'"),
    (say(shape=[1] * 9), r"'UP' has shape \[1, 1, 1, 1, 1, 1, 1, 1, 1\]"),
    (say(shape=[65536, 65536]), r"'UP' has shape \[65536, 65536\], beyond the 2147483647 elements"),
    (say(sha256="ab"), r"'UP' has base hash 'ab', it must be 64 hexadecimal digits"),
    (say(sha256=None), r"'UP' has base hash 'None'"),
    (say(dtype="load"), r"'UP' has base dtype 'load', it must be one of torch's"),
    (say(tied_names=["a", 1]), r"'UP' has tied_names .*, it must be a list of names"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE, ids=[message[:40] for _, message in HOSTILE])
def test_a_hostile_file_is_refused_with_what_is_wrong_with_it(change: Change, message: str, tmp_path: Path) -> None:
    folder = damage(write_deltas(tmp_path / "deltas", tiny_llama()), change)
    with pytest.raises(DeltaFileError, match=message.replace("UP", UP.replace(".", r"\."))):
        load(folder)


def test_a_table_that_holds_no_fields_is_refused(tmp_path: Path) -> None:
    folder = write_deltas(tmp_path / "deltas", tiny_llama(), UP)
    damage(folder, tensors=json.dumps({UP: 3}))
    with pytest.raises(DeltaFileError, match="has shape None"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64])
def test_a_file_that_is_no_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / DELTA_FILE).write_bytes(content)
    with pytest.raises(DeltaFileError, match=r"is no safetensors file .*\. The file is damaged or not to be trusted"):
        load(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write_deltas(tmp_path / "deltas", tiny_llama()) / DELTA_FILE
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DeltaFileError, match="is no safetensors file"):
        load(path.parent)


def test_a_folder_without_deltas_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{DELTA_FILE} is not there\. Name the folder that save_pretrained"):
        load(tmp_path)


def test_another_base_is_refused(tmp_path: Path) -> None:
    folder = write_deltas(tmp_path / "deltas", tiny_llama(torch.bfloat16))
    other = named(tiny_llama(torch.bfloat16, seed=1))
    with pytest.raises(DeltaFileError, match=rf"deltas: '{UP}' was trained on another base \(SHA-256"):
        load(folder, base=other)
    one_bit = named(tiny_llama(torch.bfloat16))
    one_bit[UP].data.view(torch.int16)[-1, -1] ^= 1
    with pytest.raises(DeltaFileError, match=f"'{UP}' was trained on another base"):
        load(folder, base=one_bit)
    with pytest.raises(
        DeltaFileError, match=r"was trained on a bfloat16 tensor, and this one is float32\. .*dtype='bfloat16'"
    ):
        load(folder, base=named(tiny_llama()))
    with pytest.raises(DeltaFileError, match=f"'{UP}' has a delta but no base tensor"):
        load(folder, base={})
    with pytest.raises(DeltaFileError, match=r"shape \(48, 32\), the base tensor has \(3,\)"):
        load(folder, base={**other, UP: torch.zeros(3, dtype=torch.bfloat16)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_holds_the_sums_is_saved_with_the_pretrained_values_beside(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_llama(dtype)
    deltas = deltas_of(model)
    values = {name: read_flat(model.get_parameter(name), delta.indices) for name, delta in deltas.items()}
    for name, delta in deltas.items():
        write_flat(model.get_parameter(name), delta.indices, add_rounded(name, values[name], delta.values))
    save_pretrained(tmp_path / "deltas", deltas, config={}, base=named(model), base_values=values)
    load(tmp_path / "deltas", base=named(tiny_llama(dtype)))
    with pytest.raises(DeltaFileError, match="was trained on another base"):
        load(tmp_path / "deltas", base=named(model))
    for wrong, message in (
        (values[UP][1:], rf"base_values of '{UP}' are \(39,\) in .*, the delta has \(40,\)"),
        (values[UP].double(), rf"base_values of '{UP}' are \(40,\) in float64, .*\. Give the pretrained values there"),
    ):
        with pytest.raises(ValueError, match=message):
            save_pretrained(tmp_path / "x", deltas, config={}, base=named(model), base_values={**values, UP: wrong})
    assert not (tmp_path / "x").exists()


def test_deltas_over_codes_are_known_by_the_codes(tmp_path: Path) -> None:
    codes = torch.randint(0, 255, (768, 1), dtype=torch.uint8)
    save_pretrained(tmp_path / "deltas", {UP: random_delta((48, 32), 9, 0)}, config={}, base={UP: codes})
    assert load(tmp_path / "deltas", base={UP: codes}).base[UP].is_quantized
    with pytest.raises(DeltaFileError, match="was trained on another base"):
        load(tmp_path / "deltas", base={UP: codes + 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_saves_what_it_trained_over_the_pretrained_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    model, fresh = tiny_llama(dtype), tiny_llama(dtype)
    config = SFTConfig(
        density=0.1, targets=[torch.nn.Linear, "embed_tokens"], reselection_interval=4, estimation_steps=2
    )
    optimizer = SFT(model, config=config, lr=1e-2, total_steps=6)
    train(model, optimizer, token_batches(6))
    optimizer.save_pretrained(tmp_path / "deltas", base_model_name="org/base")
    file = load(tmp_path / "deltas", base=named(fresh))
    assert file.base_model_name == "org/base"
    assert file.config["targets"] == ["Linear", "embed_tokens"] and file.config["reselection_interval"] == 4
    assert file.deltas.keys() == optimizer.deltas().keys()
    with apply(fresh, file):
        trained = named(model)
        assert all(torch.equal(each, trained[name]) for name, each in named(fresh).items())
