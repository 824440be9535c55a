"""Merging into checkpoints and out of them again.

One long file, as every test needs the same checkpoint on disk, its deltas, and a look at all files beside them.
"""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import slivertune
from slivertune.deltas import plain_checkpoint
from slivertune.deltas.applied import apply
from slivertune.deltas.delta import SparseDelta
from slivertune.deltas.delta_file import save_pretrained
from slivertune.deltas.hashes import hash_tensor
from slivertune.deltas.merge import REPORT_FILE, UNDO_FILE, merge, unmerge
from slivertune.deltas.plain_checkpoint import UNDO_FOLDER, StoredTensor, open_checkpoint
from slivertune.deltas.sparse_file import DeltaFileError
from tests.deltas.files import (
    DOWN,
    QUERY,
    UP,
    bits_of,
    change_table,
    damage,
    deltas_of,
    files_in,
    naive_sum,
    named,
    random_delta,
    same_bits,
    write_deltas,
)
from tests.helpers.models import tiny_llama

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def save_model(model: nn.Module, folder: Path, *, sharded: bool = False) -> Path:
    """A checkpoint as transformers writes it, with what lies beside one."""
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(folder, max_shard_size="30KB" if sharded else "1GB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    assert (folder / "model.safetensors.index.json").exists() == sharded
    return folder


def saved(folder: Path, dtype: torch.dtype = torch.float32, *, sharded: bool = False) -> tuple[nn.Module, Path, Path]:
    """A model, its checkpoint, and deltas of it."""
    model = tiny_llama(dtype)
    return model, save_model(model, folder / "base", sharded=sharded), write_deltas(folder / "deltas", model)


def assert_unmerging_gives_the_base(folder: Path) -> None:
    unmerge(folder / "merged", folder / "again")
    assert files_in(folder / "again") == files_in(folder / "base")


def load_model(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return model.train()


def leave_out_a_write(tensor: StoredTensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """A disk that says it has written, and has not."""


def round_twice(tensor: StoredTensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    rounded = (values.float() * (1 + 2**-7)).to(values.dtype)
    WRITE(tensor, indices, rounded)


def touch_a_neighbour(tensor: StoredTensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    WRITE(tensor, indices, values)
    with tensor.shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


WRITE = StoredTensor.write


@pytest.mark.parametrize("fault", [leave_out_a_write, round_twice, touch_a_neighbour])
@pytest.mark.parametrize("sharded", [False, True])
def test_what_is_not_written_as_it_was_summed_gets_no_name(
    fault: Callable[..., None], sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, base, deltas = saved(tmp_path, torch.bfloat16, sharded=sharded)
    before = entries(tmp_path)
    monkeypatch.setattr(StoredTensor, "write", fault)
    with pytest.raises(ValueError, match=r"was not written as the base's plus its delta\. Nothing was saved"):
        merge(base, deltas, tmp_path / "merged")
    assert entries(tmp_path) == before


@pytest.mark.parametrize("given", ["one", "different"])
@pytest.mark.parametrize("said", [True, False, None])
def test_copies_of_a_tied_embedding_are_changed_alike_or_not_at_all(
    given: str, said: bool | None, tmp_path: Path
) -> None:
    model = tiny_llama(tied=True)
    base = save_model(model, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    save_file({**tensors, HEAD: tensors[EMBEDDING].clone()}, base / "model.safetensors", {"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    config.pop("tie_word_embeddings")
    config |= {} if said is None else {"tie_word_embeddings": said}
    (base / "config.json").write_text(json.dumps(config))
    delta = random_delta(tuple(tensors[EMBEDDING].shape), 20, 0)
    merge(base, {EMBEDDING: delta, HEAD: delta}, tmp_path / "alike")
    alike = load_file(tmp_path / "alike" / "model.safetensors")
    assert torch.equal(alike[EMBEDDING], alike[HEAD]) and not torch.equal(alike[HEAD], tensors[EMBEDDING])
    deltas = {EMBEDDING: delta} if given == "one" else {EMBEDDING: delta, HEAD: random_delta(delta.shape, 20, 1)}
    if said is False:
        merge(base, deltas, tmp_path / "merged")
        return
    with pytest.raises(ValueError, match=r"stores one tied tensor as .*Give both the same delta, or say"):
        merge(base, deltas, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_merged_checkpoint_holds_what_applying_gives_and_unmerging_the_bases_bytes(
    dtype: torch.dtype, sharded: bool, tmp_path: Path
) -> None:
    model, base, deltas = saved(tmp_path, dtype, sharded=sharded)
    before, untouched = bits_of(model), files_in(base)
    merge(base, deltas, tmp_path / "merged")
    merged = bits_of(load_model(tmp_path / "merged"))
    assert not same_bits(merged, before)
    with apply(model, deltas):
        assert same_bits(merged, bits_of(model))
    files = files_in(tmp_path / "merged")
    assert files.keys() - untouched.keys() == {f"{UNDO_FOLDER}/{UNDO_FILE}", f"{UNDO_FOLDER}/{REPORT_FILE}"}
    assert all(files[name] == content for name, content in untouched.items() if not name.endswith(".safetensors"))
    unmerge(tmp_path / "merged", tmp_path / "again")
    assert same_bits(bits_of(load_model(tmp_path / "again")), before)
    assert files_in(tmp_path / "again") == untouched
    assert files_in(base) == untouched
    assert files_in(tmp_path / "merged") == files


# Less than the tensor's 64 MiB, and more than two of the 16 MiB pieces in which files are copied.
MERGE_IN_LITTLE_MEMORY = """
import resource, sys
import torch
from torch import nn
from slivertune.deltas.merge import merge, unmerge

torch.ones(1 << 20).add_(1)  # starts torch's threads, whose stacks count
nn.Module.__init__ = None
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
limit = int(status["VmData"].split()[0]) * 1024 + 48 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
merge("base", "deltas", "merged")
unmerge("merged", "again")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory by what Linux counts")
def test_no_model_is_built_and_no_tensor_loaded_whole(tmp_path: Path) -> None:
    base = {f"{name}.weight": torch.zeros(4096, 8192, dtype=torch.bfloat16) for name in ("first", "second")}
    (tmp_path / "base").mkdir()
    shards = {name: f"model-{number}-of-2.safetensors" for number, name in enumerate(base, 1)}
    for name, shard in shards.items():
        save_file({name: base[name]}, tmp_path / "base" / shard)
    (tmp_path / "base" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    deltas = {name: random_delta((4096, 8192), 9, seed=seed) for seed, name in enumerate(base)}
    save_pretrained(tmp_path / "deltas", deltas, config={}, base=base)
    done = subprocess.run(
        [sys.executable, "-c", MERGE_IN_LITTLE_MEMORY],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(slivertune.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert files_in(tmp_path / "again") == files_in(tmp_path / "base")


def test_several_deltas_are_merged_at_once_and_their_overlap_reported(tmp_path: Path) -> None:
    model = tiny_llama(torch.bfloat16)
    base = save_model(model, tmp_path / "base")
    folders = [write_deltas(tmp_path / str(seed), model, UP, DOWN, seed=seed) for seed in (0, 10)]
    merged = merge(base, folders, tmp_path / "merged")
    with apply(model, folders) as handle:
        assert same_bits(bits_of(load_model(tmp_path / "merged")), bits_of(model))
        assert merged.overlap_of == handle.overlap_of
    first, second = (deltas_of(model, UP, DOWN, seed=seed) for seed in (0, 10))
    both = {name: set(first[name].indices.tolist()) & set(second[name].indices.tolist()) for name in (UP, DOWN)}
    report = json.loads((tmp_path / "merged" / UNDO_FOLDER / REPORT_FILE).read_text(encoding="utf-8"))
    assert report["deltas"] == [str(folder) for folder in folders]
    for name, shared in both.items():
        assert report["tensors"][name] == {
            "num_touched": 80 - len(shared),
            "num_shared": len(shared),
            "share": len(shared) / (80 - len(shared)),
        }
    assert merged.overlap.num_shared == sum(map(len, both.values())) > 0
    assert_unmerging_gives_the_base(tmp_path)


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
@pytest.mark.parametrize("stored", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)])
def test_tied_weights_are_merged_under_whatever_names_they_are_stored(
    name: str, stored: tuple[str, ...], tmp_path: Path
) -> None:
    model = tiny_llama(torch.bfloat16, tied=True)
    base = save_model(model, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    weight = tensors.pop(EMBEDDING)
    save_file({**tensors, **{each: weight.clone() for each in stored}}, base / "model.safetensors", {"format": "pt"})
    deltas = write_deltas(tmp_path / "deltas", model, name)
    expected = naive_sum(weight, deltas_of(model, name)[name])
    merge(base, deltas, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {each for each in (EMBEDDING, HEAD) if each in merged} == set(stored)
    assert all(torch.equal(merged[each], expected) for each in stored)
    assert_unmerging_gives_the_base(tmp_path)


def test_deltas_of_blocks_are_merged_into_a_resized_base_and_those_of_its_embedding_are_refused(tmp_path: Path) -> None:
    model: Any = tiny_llama(torch.bfloat16)
    blocks, embedding = deltas_of(model, UP), deltas_of(model, EMBEDDING)
    write_deltas(tmp_path / "deltas", model, UP)
    model.resize_token_embeddings(120, mean_resizing=False)
    base = save_model(model, tmp_path / "base")
    with pytest.raises(DeltaFileError, match=r"embed_tokens.weight' has shape \(97, 32\), .* has \(120, 32\) there"):
        merge(base, {**blocks, **embedding}, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    merge(base, tmp_path / "deltas", tmp_path / "merged")
    merged, before = bits_of(load_model(tmp_path / "merged")), bits_of(model)
    assert same_bits({UP: merged[UP]}, {UP: naive_sum(named(model)[UP], blocks[UP]).view(torch.uint8)})
    assert [name for name in before if not torch.equal(merged[name], before[name])] == [UP]


def test_tensors_at_odd_addresses_and_of_no_touched_weight_are_merged(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    weights = {"fc.weight": torch.rand(5, 5).bfloat16(), "other.weight": torch.rand(3).bfloat16()}
    save_file(weights, base / "model.safetensors")
    content = (base / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    # Older writers did not pad the header, so that tensors began anywhere.
    header = content[8 : 8 + size].rstrip() + b" " * (1 - len(content[8 : 8 + size].rstrip()) % 2)
    odd = header if len(header) % 2 else header + b" "
    (base / "model.safetensors").write_bytes(len(odd).to_bytes(8, "little") + odd + content[8 + size :])
    assert open_checkpoint(base).tensors["fc.weight"].start % 2 == 1
    empty = SparseDelta(torch.zeros(0, dtype=torch.int32), torch.zeros(0), (3,))
    deltas = {"fc.weight": random_delta((5, 5), 6, 0), "other.weight": empty}
    merge(base, deltas, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(merged["fc.weight"], naive_sum(weights["fc.weight"], deltas["fc.weight"]))
    assert torch.equal(merged["other.weight"], weights["other.weight"])
    assert_unmerging_gives_the_base(tmp_path)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
def test_a_stored_tensor_has_the_hash_of_the_loaded_one(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_checkpoint, "_PIECE_BYTES", 7)
    tensors = {"a": (100 * torch.rand(3, 5)).to(dtype), "b": torch.zeros(2, 2, dtype=dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    stored = open_checkpoint(tmp_path).tensors
    assert {name: tensor.sha256() for name, tensor in stored.items()} == {
        name: hash_tensor(tensor) for name, tensor in tensors.items()
    }


def test_what_would_be_stale_is_left_out_and_said(tmp_path: Path) -> None:
    _, base, deltas = saved(tmp_path)
    stale = ["consolidated.00.pth", "model.gguf", "original.safetensors", "pytorch_model.bin", "training_args.bin"]
    foreign = [".git/config", "checkpoint-10/model.safetensors", "checkpoint-10/trainer_state.json", ".cache/x"]
    for name in (*stale, *foreign, "pytorch_model.bin.index.json"):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).touch()
    merged = merge(base, deltas, tmp_path / "merged")
    assert sorted(map(str, merged.left_out)) == sorted([*stale, "pytorch_model.bin.index.json"])
    assert not set(files_in(tmp_path / "merged")) & {*stale, *foreign, "pytorch_model.bin.index.json"}
    assert "1_Pooling/config.json" in files_in(tmp_path / "merged")


def test_links_are_followed_and_access_rights_are_those_of_any_file(tmp_path: Path) -> None:
    _, base, deltas = saved(tmp_path)
    (base / "model.safetensors").rename(tmp_path / "blob")
    (tmp_path / "blob").chmod(0o444)
    (base / "model.safetensors").symlink_to(tmp_path / "blob")
    content = (tmp_path / "blob").read_bytes()
    merge(base, deltas, tmp_path / "merged")
    path = tmp_path / "merged" / "model.safetensors"
    assert not path.is_symlink()
    assert (tmp_path / "blob").read_bytes() == content
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").touch()
    for ours, theirs in (
        (path, "file"),
        (tmp_path / "merged" / UNDO_FOLDER / UNDO_FILE, "file"),
        (tmp_path / "merged", ""),
    ):
        assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE((tmp_path / "plain" / theirs).stat().st_mode)


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    _, base, deltas = saved(tmp_path, sharded=True)
    reported: list[tuple[str, int, int]] = []
    merge(base, deltas, tmp_path / "merged", progress=lambda *it: reported.append(it))
    copied = [(done, total) for stage, done, total in reported if stage == "copying"]
    size = sum(map(len, files_in(base).values()))
    assert copied == sorted(copied) and copied[-1] == (size, size)
    stages = list(dict.fromkeys(stage for stage, *_ in reported))
    assert stages == ["checking the base", "copying", "adding", "checking", "writing"]
    reported.clear()
    unmerge(tmp_path / "merged", tmp_path / "again", progress=lambda *it: reported.append(it))
    assert list(dict.fromkeys(stage for stage, *_ in reported)) == ["checking", "copying", "restoring", "writing"]


def refused(error: type[Exception], message: str, folder: Path, base: str = "base", **more: Any) -> None:
    """Merging the folder's deltas into its base raises, and nothing is written."""
    before = files_in(folder), entries(folder)
    with pytest.raises(error, match=message):
        merge(folder / base, **{"deltas": folder / "deltas", "output": folder / "merged", **more})
    assert (files_in(folder), entries(folder)) == before


def test_another_base_is_refused_and_nothing_written(tmp_path: Path) -> None:
    write_deltas(tmp_path / "deltas", tiny_llama(torch.bfloat16), base_model_name="owner/base")
    for number, (model, message) in enumerate(
        (
            (tiny_llama(torch.bfloat16, seed=1), f"'{UP}' was trained on another base"),
            (tiny_llama(), rf"'{UP}' was trained on a bfloat16 tensor, and this one is float32\. .*dtype='bfloat16'"),
            (
                tiny_llama(torch.bfloat16, blocks=2),
                r"'model.layers.2.self_attn.q_proj.weight' names no tensor of .*owner/base",
            ),
        )
    ):
        refused(DeltaFileError, message, tmp_path, save_model(model, tmp_path / f"base{number}").name)


def test_a_hostile_file_is_refused_and_nothing_written(tmp_path: Path) -> None:
    damage(saved(tmp_path)[2], lambda tensors, _: tensors[f"{DOWN}.indices"].__setitem__(-1, 10**6))
    refused(DeltaFileError, r"indices\[39\]=1000000 must be in", tmp_path)


def test_a_sum_beyond_the_dtype_is_refused_and_nothing_written(tmp_path: Path) -> None:
    deltas = deltas_of(saved(tmp_path, torch.float16)[0])
    deltas[QUERY].values[3] = 70_000.0
    refused(ValueError, "is beyond the range of float16", tmp_path, deltas=deltas)


def mine(output: Path) -> None:
    output.mkdir()
    (output / "mine").touch()


@pytest.mark.parametrize(
    "make",
    [mine, Path.mkdir, lambda output: output.write_text("mine"), lambda output: output.symlink_to("nowhere")],
    ids=["folder", "empty folder", "file", "dangling link"],
)
def test_an_output_that_exists_is_refused(make: Callable[[Path], object], tmp_path: Path) -> None:
    _, base, deltas = saved(tmp_path)
    merge(base, deltas, tmp_path / "merged")
    output = tmp_path / "output"
    make(output)
    before = files_in(tmp_path), entries(tmp_path)

    def work(*done: object) -> None:
        raise AssertionError("an hour's work may lie before the error")

    for write in (partial(merge, base, deltas), partial(unmerge, tmp_path / "merged")):
        with pytest.raises(FileExistsError, match=r"output exists already\. Name a new folder, or move it"):
            write(output, progress=work)
    assert (files_in(tmp_path), entries(tmp_path)) == before


def test_an_output_that_appears_meanwhile_is_left_alone(tmp_path: Path) -> None:
    _, base, deltas = saved(tmp_path)
    output = tmp_path / "merged"

    def intrude(stage: str, done: int, total: int) -> None:
        if stage == "writing":
            output.mkdir()

    with pytest.raises(FileExistsError, match="merged exists already"):
        merge(base, deltas, output, progress=intrude)
    assert list(output.iterdir()) == []
    assert entries(tmp_path) == ["base", "deltas", "merged"]


@pytest.mark.parametrize("command", ["merge", "unmerge"])
@pytest.mark.parametrize("stage", ["copying", "adding", "restoring", "writing"])
def test_an_interruption_leaves_nothing_half_written(command: str, stage: str, tmp_path: Path) -> None:
    _, base, deltas = saved(tmp_path)
    merge(base, deltas, tmp_path / "merged")
    before = files_in(tmp_path)
    stages = []

    def interrupt(now: str, done: int, total: int) -> None:
        stages.append(now)
        # In the midst of a stage, after part of it was written.
        if now == stage and stages.count(now) > (now != "writing"):
            raise KeyboardInterrupt

    write = partial(merge, base, deltas) if command == "merge" else partial(unmerge, tmp_path / "merged")
    if stage == ("restoring" if command == "merge" else "adding"):
        write(tmp_path / "output", progress=interrupt)
        assert stage not in stages
        return
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "output", progress=interrupt)
    assert files_in(tmp_path) == before
    assert entries(tmp_path) == ["base", "deltas", "merged"]


def test_a_4_bit_checkpoint_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    path = saved(tmp_path, torch.bfloat16)[1] / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path.write_text(json.dumps(config), encoding="utf-8")
    message = (
        r"base is quantised \(bitsandbytes in 4 bits\): .*\. Merge into the 16-bit checkpoint that it was made from .*"
        "or keep the deltas beside it"
    )
    refused(ValueError, message, tmp_path)


def test_codes_without_a_configuration_are_refused_as_well(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    save_file({UP: torch.zeros(768, 1, dtype=torch.uint8)}, tmp_path / "base" / "model.safetensors")
    write_deltas(tmp_path / "deltas", tiny_llama(), UP)
    message = r"holds uint8 there\. Deltas merge only into float32, bfloat16 and float16\. Merge into the 16-bit"
    refused(DeltaFileError, message, tmp_path)


def test_deltas_over_a_4_bit_base_are_merged_into_the_plain_one_on_request_alone(tmp_path: Path) -> None:
    model = tiny_llama(torch.bfloat16)
    base = save_model(model, tmp_path / "base")
    delta = deltas_of(model, UP)
    save_pretrained(tmp_path / "deltas", delta, config={}, base={UP: torch.zeros(768, 1, dtype=torch.uint8)})
    message = "was trained over uint8 codes, and these bfloat16 weights may not be their source"
    refused(DeltaFileError, message, tmp_path)
    merge(base, tmp_path / "deltas", tmp_path / "merged", allow_quantized_base=True)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(merged[UP], naive_sum(named(model)[UP], delta[UP]))
    assert_unmerging_gives_the_base(tmp_path)


def test_a_merged_checkpoint_is_no_base(tmp_path: Path) -> None:
    _, base, deltas = saved(tmp_path)
    merge(base, deltas, tmp_path / "merged")
    message = r"merged has deltas merged already\. Remove them first .slivertune unmerge., or merge all of them"
    refused(ValueError, message, tmp_path, "merged", output=tmp_path / "twice")


def write_index(content: Any) -> Callable[[Path, Path], object]:
    return lambda index, shard: index.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda index, shard: index.unlink(),
            FileNotFoundError,
            r"holds neither model.safetensors nor .*, and other forms are not read\. Load the model",
        ),
        (lambda index, shard: shard.unlink(), ValueError, "names the shard 'model-.*', which is not a file in"),
        (
            lambda index, shard: shard.write_bytes(shard.read_bytes()[:-1]),
            ValueError,
            "is no whole safetensors file",
        ),
        (
            write_index({"weight_map": {UP: "../deltas/sft_delta.safetensors"}}),
            ValueError,
            "names the shard '../deltas/sft_delta.safetensors', which is not a file in",
        ),
        (write_index({}), ValueError, r"has no weight_map\. Get the checkpoint again"),
        (write_index("{"), ValueError, "index.json is no JSON"),
        (write_index([]), ValueError, "index.json holds no JSON object"),
        (
            lambda index, shard: index.write_text(json.dumps({"weight_map": {"absent": shard.name}})),
            ValueError,
            "names 'absent', which its shard lacks",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    change: Callable[[Path, Path], object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    _, base, _ = saved(tmp_path, sharded=True)
    change(base / "model.safetensors.index.json", next(iter(base.glob("model-*.safetensors"))))
    refused(error, message, tmp_path)


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere is no folder\. Name that of a checkpoint"):
        merge(tmp_path / "nowhere", deltas_of(tiny_llama()), tmp_path / "merged")
    base = save_model(tiny_llama(), tmp_path / "base")
    with pytest.raises(FileNotFoundError, match=f"{UNDO_FILE} is not there, so .*base can't be unmerged"):
        unmerge(base, tmp_path / "again")


def test_a_merged_checkpoint_that_was_changed_is_not_unmerged(tmp_path: Path) -> None:
    _, base, deltas = saved(tmp_path, torch.bfloat16)
    merged = tmp_path / "merged"
    merge(base, deltas, merged)
    content = load_file(merged / "model.safetensors")
    for tensors, message in (
        (
            {**content, UP: content[UP] + 1},
            rf"'{UP}' was changed since it was merged, so the base can't be restored from it\. Use the base",
        ),
        (
            {**content, UP: content[UP].float()},
            rf"'{UP}' was .48, 32. bfloat16 when it was merged, and is .*float32.* now\. Use the base",
        ),
        (
            {name: it for name, it in content.items() if name != UP},
            r"when it was merged, and is absent now\. Use the base",
        ),
    ):
        save_file(tensors, merged / "model.safetensors", {"format": "pt"})
        with pytest.raises(DeltaFileError, match=message):
            unmerge(merged, tmp_path / "again")
        assert entries(tmp_path) == ["base", "deltas", "merged"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, _: tensors[f"{UP}.indices"].__setitem__(0, -1), r"indices\[0\]=-1 must be in"),
        (
            lambda tensors, _: tensors.update({f"{UP}.values": tensors[f"{UP}.values"].float()}),
            "has dtype F32, it must",
        ),
        (
            lambda tensors, _: tensors[f"{UP}.values"].__setitem__(0, 9),
            "is not restored: the file is damaged",
        ),
        (lambda _, metadata: metadata.update(version="9"), "has version '9', and this library reads 2"),
        (lambda _, metadata: metadata.update(format="slivertune.sft_delta"), "has format 'slivertune.sft_delta', not"),
        (lambda _, metadata: change_table(metadata, UP, dtype=7), r"it must be 7\. The file is damaged"),
        (lambda _, metadata: change_table(metadata, UP, base_sha256="a"), "is not restored: the file"),
    ],
)
def test_a_hostile_undo_file_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    _, base, deltas = saved(tmp_path, torch.bfloat16)
    merge(base, deltas, tmp_path / "merged")
    damage(tmp_path / "merged" / UNDO_FOLDER, change, name=UNDO_FILE)
    before = files_in(tmp_path)
    with pytest.raises(DeltaFileError, match=message):
        unmerge(tmp_path / "merged", tmp_path / "again")
    assert files_in(tmp_path) == before
    assert entries(tmp_path) == ["base", "deltas", "merged"]


def test_a_base_that_holds_nan_comes_back_to_the_bit(tmp_path: Path) -> None:
    model = tiny_llama(torch.bfloat16)
    model.get_parameter(UP).data.view(torch.int16)[:] = 0x7FC1
    merge(save_model(model, tmp_path / "base"), write_deltas(tmp_path / "deltas", model), tmp_path / "merged")
    assert_unmerging_gives_the_base(tmp_path)
