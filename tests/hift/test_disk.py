"""State that is stored in files, against the same run whose state is stored in host memory."""

import copy
import errno
import gc
import itertools
import os
import re
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from slivertune import HiFT
from slivertune.core.ledger import Ledger, StateCount
from slivertune.hift import group_file, host_room
from slivertune.hift.disk import Disk, groups_on_disk
from slivertune.hift.group_file import GroupFile
from slivertune.hift.prefetch import Prefetcher
from tests.helpers.delayed_streams import delayed
from tests.helpers.hift_parts import part_of
from tests.helpers.models import (
    assert_same_bits,
    assert_same_tree,
    differing,
    small_decoder,
    token_batches,
    twin,
    weights,
)
from tests.helpers.pairwise import rotated
from tests.helpers.ranks import quick
from tests.helpers.reference import train
from tests.hift.cases import BIG_VOCAB, hift_over, reloaded, run

BF16 = torch.bfloat16
PIECE = 30_000
"""Three pieces of each group."""


class Transfers:
    """Every read and write of the thread; may be slow, or fail."""

    def __init__(self) -> None:
        self.num_bytes = {"preadv": 0, "pwritev": 0, "fdatasync": 0}
        self.seconds = 0.0
        self.errors: dict[str, int] = {}
        self.threads: set[str] = set()

    def __call__(self, name: str, function: Any) -> Any:
        def call(descriptor: int, *rest: Any) -> Any:
            self.threads.add(threading.current_thread().name.partition("_")[0])
            time.sleep(self.seconds)
            if name in self.errors:
                raise OSError(self.errors[name], os.strerror(self.errors[name]))
            count = function(descriptor, *rest)
            self.num_bytes[name] += count or 0
            return count

        return call

    @contextmanager
    def failing(self, name: str, number: int) -> Iterator[None]:
        self.errors[name] = number
        try:
            yield
        finally:
            del self.errors[name]


@pytest.fixture(autouse=True)
def nothing_of_others() -> None:
    """Free what earlier tests have left unreachable, which still has its files and thread."""
    gc.collect()


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    made = Transfers()
    for name in made.num_bytes:
        monkeypatch.setattr(os, name, made(name, getattr(os, name)))
    monkeypatch.setattr(group_file, "_PART_BYTES", 8192)  # so that a file has several
    return made


@contextmanager
def limited_files() -> Iterator[None]:
    """Let no file be written beyond its first 8 KiB, as the kernel does it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def disk_of(hift: HiFT) -> Disk:
    return part_of(hift, Disk)


def files_of(hift: HiFT) -> dict[int, GroupFile]:
    return disk_of(hift).files or {}


def wait_for_the_thread(hift: HiFT) -> None:
    """Until what was asked for by now is done; its errors stay for whoever waits for it."""
    disk_of(hift)._thread.submit(lambda: None).result()


def on_disk(folder: Path, dtype: torch.dtype = BF16, name: Any = "AdamW", **config: Any) -> tuple[Any, HiFT]:
    blocks = config.pop("blocks", 3)
    model = small_decoder(dtype, vocab=BIG_VOCAB, blocks=blocks)
    return hift_over(model, name, **{"state": "disk", "state_dir": folder, "stream_bytes": PIECE, **config})


def assert_equals_host(folder: Path, dtype: torch.dtype, name: str, steps: int | None = None, **config: Any) -> HiFT:
    """Two cycles and two updates, and a state that is the same at the end."""
    how = {key: config.pop(key) for key in ("accumulation", "clip") if key in config}
    model, hift = on_disk(folder, dtype, name, **config)
    config.pop("state_ram_bytes", None)
    blocks = config.pop("blocks", 3)
    other = small_decoder(dtype, vocab=BIG_VOCAB, blocks=blocks)
    other, reference = hift_over(other, name, **{"stream_bytes": PIECE, **config})
    steps = 2 * hift.cycle_length + 2 if steps is None else steps
    losses = run(model, hift, steps, hift=hift, **how)
    assert losses == run(other, reference, steps, hift=reference, **how)
    assert_same_bits(model, other)
    assert_same_tree(reloaded(hift.state_dict()), reloaded(reference.state_dict()))
    return hift


# Of their pairs each is in test_pairwise.py.
@rotated(name=["AdamW", "AdamW8bit"], layers_per_group=[3, 1], dtype=[torch.float32, BF16])
def test_state_on_disk_is_that_on_the_host_to_the_bit(
    name: str, layers_per_group: int, dtype: torch.dtype, tmp_path: Path, transfers: Transfers
) -> None:
    hift = assert_equals_host(tmp_path, dtype, name, layers_per_group=layers_per_group, blocks=3 * layers_per_group)
    assert hift.num_groups >= 4 and min(transfers.num_bytes["preadv"], transfers.num_bytes["pwritev"]) > 0
    assert transfers.threads == {"slivertune-disk"}


SETTINGS: list[dict[str, Any]] = [
    {"accumulation": 3, "clip": 0.5},
    {"state_ram_bytes": 150_000},
    {"name": "torch Adafactor"},
    {"name": "SGD"},
]
"""Those that test_pairwise.py does not have."""


@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_every_setting_gives_the_bits_of_host_state(config: dict[str, Any], tmp_path: Path) -> None:
    assert_equals_host(tmp_path, BF16, config.pop("name", "AdamW"), **config)


SLOW_DISK: list[dict[str, Any]] = [{}, {"gradients": "host"}, {"steps_per_group": 2}]


@pytest.mark.parametrize("config", quick(SLOW_DISK, SLOW_DISK[1:]), ids=str)
def test_a_slow_disk_changes_no_bit(config: dict[str, Any], tmp_path: Path, transfers: Transfers) -> None:
    transfers.seconds = 0.003
    assert_equals_host(tmp_path, BF16, "AdamW", **config)


LATE: list[dict[str, Any]] = [{}, {"prefetch_bytes": 60_000}, {"gradients": "host", "prefetch_bytes": 60_000}]


# test_pairwise.py has more.
@pytest.mark.parametrize(
    ("config", "seed"),
    quick(itertools.product(LATE, [None, 0, 1, 2]), [(LATE[0], 1), (LATE[1], None), (LATE[2], None)]),
)
def test_copies_as_late_as_events_allow_change_no_bit(config: dict[str, Any], seed: int | None, tmp_path: Path) -> None:
    model, expected = (small_decoder(BF16, vocab=BIG_VOCAB) for _ in range(2))
    with delayed(seed) as made:
        hift = hift_over(model, "AdamW", state="disk", state_dir=tmp_path, stream_bytes=PIECE, **config)[1]
        run(model, hift, 12)
        state = copy.deepcopy(hift.state_dict()["state"])
    assert sum(streams.num_late for streams in made) > 50
    reference = hift_over(expected, "AdamW", stream_bytes=PIECE, **config)[1]
    run(expected, reference, 12)
    assert_same_bits(model, expected)
    assert_same_tree(state, reference.state_dict()["state"])


def groups_in_memory(hift: HiFT) -> set[int]:
    wait_for_the_thread(hift)
    found = {buffer.content for buffer in disk_of(hift)._buffers}
    return {index for index, file in files_of(hift).items() if file in found}


def test_a_group_is_written_and_read_once_a_turn_and_ahead_of_it(tmp_path: Path, transfers: Transfers) -> None:
    model, hift = on_disk(tmp_path, steps_per_group=2)
    found = []
    for start in (0, 20):
        train(model, hift, token_batches(40, vocab=BIG_VOCAB), 20, start=start)
        assert groups_in_memory(hift) == set(hift.rotation.coming_groups[:2])
        found.append(dict(transfers.num_bytes))
    size = sum(file.used_bytes for file in files_of(hift).values())
    assert size >= 12 * sum(parameter.numel() for parameter in model.parameters())
    # Two whole cycles.
    assert {name: found[1][name] - found[0][name] for name in ("preadv", "pwritev")} == {
        "preadv": 2 * size,
        "pwritev": 2 * size,
    }


def test_a_group_that_is_not_changed_is_not_written_again(tmp_path: Path, transfers: Transfers) -> None:
    model, hift = on_disk(tmp_path)
    train(model, hift, token_batches(20, vocab=BIG_VOCAB), 7)
    hift.state_dict()
    written = transfers.num_bytes["pwritev"]
    hift.state_dict()
    assert transfers.num_bytes["pwritev"] == written


def test_groups_that_fit_into_the_memory_given_have_no_file(tmp_path: Path, transfers: Transfers) -> None:
    model, hift = on_disk(tmp_path / "disk", state_ram_bytes=2**30)
    train(model, hift, token_batches(20, vocab=BIG_VOCAB), 12)
    assert files_of(hift) == {} and transfers.num_bytes["pwritev"] == 0
    # The smallest first, as many as fit.
    assert groups_on_disk([50, 10, 10, 10, 40], 29) == [0, 3, 4]
    assert groups_on_disk([50, 10, 10, 10, 40], 0) == [0, 1, 2, 3, 4]
    assert groups_on_disk([50, 10, 10, 10, 40], 80) == [0]


def test_two_groups_are_in_memory_and_all_on_the_disk(tmp_path: Path) -> None:
    own = StateCount()  # other tests' optimizers may still live
    model, hift = on_disk(tmp_path, torch.float32, blocks=6)
    group_bytes = [sum(8 * w.parameter.numel() for w in hift.weights_of(index)) for index in range(hift.num_groups)]
    with Ledger(model) as ledger:
        train(model, hift, token_batches(40, vocab=BIG_VOCAB), 2 * hift.num_groups)
        assert ledger.highest.host <= 2 * (max(group_bytes) + 8192) + 30_000
        in_files = own.num_bytes()["disk"]
        assert sum(group_bytes) <= in_files <= sum(group_bytes) + hift.num_groups * 8192
        assert in_files == sum(os.fstat(file._descriptor).st_size for file in files_of(hift).values())
        assert in_files <= sum(os.fstat(file._descriptor).st_blocks * 512 for file in files_of(hift).values())
        assert in_files <= ledger.current().disk
    assert list(tmp_path.iterdir()) == [], "the files have no names"
    del hift
    gc.collect()
    assert own.num_bytes()["disk"] == 0


FAULTS = [
    ("limit", errno.EFBIG, {}),
    ("pwritev", errno.ENOSPC, {"gradients": "stepped"}),
    ("pwritev", errno.EROFS, {"steps_per_group": 2}),
    ("fdatasync", errno.EIO, {"gradients": "host", "max_grad_norm": 0.1}),
]


@pytest.mark.parametrize(("name", "number", "config"), quick(FAULTS, [FAULTS[0], FAULTS[1], FAULTS[3]]), ids=str)
def test_a_write_that_fails_shows_in_a_step_and_nothing_is_lost(
    name: str, number: int, config: dict[str, Any], tmp_path: Path, transfers: Transfers
) -> None:
    batches = token_batches(40, vocab=BIG_VOCAB)
    model, hift = on_disk(tmp_path, **config)
    other, reference = hift_over(twin(model), "AdamW", stream_bytes=PIECE, **config)
    start = 7 * hift.config.steps_per_group - 1
    train(model, hift, batches, start)
    wait_for_the_thread(hift)
    with limited_files() if name == "limit" else transfers.failing(name, number):
        train(model, hift, batches, 1, start=start)
        wait_for_the_thread(hift)  # the write behind this turn
        for _ in range(2):
            before = weights(model)
            with pytest.raises(OSError, match=r"group \d in .* could not be written: .*Nothing is lost") as error:
                train(model, hift, batches, 1, start=start + 1)
            assert error.value.errno == number and str(tmp_path) in str(error.value)
            assert differing(weights(model), before) == [] and hift.updates == start + 1
            model.zero_grad()
    train(model, hift, batches, hift.cycle_length + 1, start=start + 1)
    train(other, reference, batches, start + 2 + hift.cycle_length)
    assert_same_bits(model, other)
    assert_same_tree(hift.state_dict()["state"], reference.state_dict()["state"])


def test_a_write_that_works_again_before_the_next_step_is_not_told(tmp_path: Path, transfers: Transfers) -> None:
    batches = token_batches(20, vocab=BIG_VOCAB)
    model, hift = on_disk(tmp_path)
    other, reference = hift_over(twin(model), "AdamW", stream_bytes=PIECE)
    train(other, reference, batches, 14)
    train(model, hift, batches, 6)
    wait_for_the_thread(hift)
    with transfers.failing("pwritev", errno.ENOSPC):
        train(model, hift, batches, 1, start=6)
        wait_for_the_thread(hift)
    train(model, hift, batches, 7, start=7)
    assert_same_bits(model, other)


def test_a_failed_write_keeps_a_state_dict_from_being_made(tmp_path: Path, transfers: Transfers) -> None:
    batches = token_batches(20, vocab=BIG_VOCAB)
    model, hift = on_disk(tmp_path)
    train(model, hift, batches, 2)
    wait_for_the_thread(hift)  # else it may have written the last group before a write can fail
    with transfers.failing("pwritev", errno.ENOSPC):
        train(model, hift, batches, 1, start=2)
        with pytest.raises(OSError, match="Nothing is lost"):
            hift.state_dict()
    hift.state_dict()


def flip(file: GroupFile) -> None:
    """Turn one bit in the middle of a file."""
    place = file.used_bytes // 2
    (byte,) = os.pread(file._descriptor, 1, place)
    os.pwrite(file._descriptor, bytes([byte ^ 16]), place)


def cut_short(file: GroupFile) -> None:
    os.truncate(file._descriptor, 4096)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (None, r"Input/output error"),
        (flip, r"the disk has returned other bytes than were written"),
        (cut_short, r"the file ends after 4,096 of [\d,]+ bytes"),
    ],
)
def test_a_group_that_cannot_be_read_is_named_before_anything_is_stepped(
    damage: Any, reason: str, tmp_path: Path, transfers: Transfers
) -> None:
    batches = token_batches(20, vocab=BIG_VOCAB)
    model, hift = on_disk(tmp_path)
    other, reference = hift_over(twin(model), "AdamW", stream_bytes=PIECE)
    train(model, hift, batches, 5)
    train(other, reference, batches, 12)
    hift.state_dict()  # all groups are in their files
    group = hift.rotation.coming_groups[2]
    file = files_of(hift)[group]
    with transfers.failing("preadv", errno.EIO) if damage is None else damaged(file, damage):
        train(model, hift, batches, 1, start=5)
        wait_for_the_thread(hift)  # which has read the group ahead of its turn
        before = weights(model)
        title = rf"the state of group {group if damage else '.'} in {tmp_path}"
        for _ in range(2):
            with pytest.raises(OSError, match=rf"{title} could not be read: {reason}\. Continue from the last check"):
                train(model, hift, batches, 1, start=6)
            model.zero_grad()
        assert differing(weights(model), before) == [] and hift.updates == 6
    train(model, hift, batches, 6, start=6)
    assert_same_bits(model, other)


@contextmanager
def damaged(file: GroupFile, damage: Any) -> Iterator[None]:
    content = os.pread(file._descriptor, file.num_bytes, 0)
    damage(file)
    try:
        yield
    finally:
        os.pwrite(file._descriptor, content, 0)


def test_a_flipped_bit_keeps_a_state_dict_from_being_made(tmp_path: Path) -> None:
    model, hift = on_disk(tmp_path)
    train(model, hift, token_batches(20, vocab=BIG_VOCAB), 6)
    hift.state_dict()
    flip(files_of(hift)[hift.rotation.coming_groups[3]])
    with pytest.raises(OSError, match="other bytes than were written"):
        hift.state_dict()


@pytest.mark.parametrize("fault", ["in memory", "can't reserve", "read-only"])
def test_a_folder_that_is_unfit_is_named_before_the_first_update(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        number = errno.EROFS if fault == "read-only" else errno.EOPNOTSUPP
        raise OSError(number, os.strerror(number))

    model, hift = on_disk(tmp_path / "state")
    before = weights(model)
    model(**token_batches(1, vocab=BIG_VOCAB)[0]).loss.backward()
    with monkeypatch.context() as patch:
        if fault == "in memory":
            device = tmp_path.stat().st_dev
            mounts = tmp_path / "mountinfo"
            number = f"{os.major(device)}:{os.minor(device)}"
            mounts.write_text(f"1 1 0:0 / /proc rw - proc proc rw\n2 1 {number} / /tmp rw - tmpfs none rw\n")
            patch.setattr(group_file, "_MOUNTS", mounts)
        else:
            patch.setattr("os.posix_fallocate" if fault == "can't reserve" else "tempfile.TemporaryFile", refuse)
        with pytest.raises(OSError, match="state") as error:
            hift.step()
    said = {
        "in memory": r"can't store [\d,]{6,} bytes .*: it lies in memory \(tmpfs\)\. Name a folder on a local disk",
        "can't reserve": r"[\d,]{6,} bytes .*: its file system can't reserve space \(Operation not supported\)\. Name",
        "read-only": r"could not be written: Read-only file system",
    }
    assert re.search(said[fault], str(error.value)) and str(tmp_path / "state") in str(error.value)
    assert differing(weights(model), before) == [] and hift.updates == 0
    assert list((tmp_path / "state").iterdir()) == []
    hift.step()
    assert hift.updates == 1


def test_the_file_system_of_a_folder_is_known() -> None:
    assert group_file._file_system_of(Path("/proc")) == "proc"


def test_all_space_is_reserved_before_the_first_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    take = os.posix_fallocate

    def fallocate(descriptor: int, start: int, num_bytes: int) -> None:
        asked.append(num_bytes)
        take(descriptor, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    model, hift = on_disk(tmp_path)
    train(model, hift, token_batches(20, vocab=BIG_VOCAB), 1)
    sizes = [12 * sum(w.parameter.numel() for w in hift.weights_of(index)) for index in range(hift.num_groups)]
    assert len(asked) == hift.num_groups
    assert all(size <= reserved <= 1.1 * size for size, reserved in zip(sizes, asked, strict=True))
    train(model, hift, token_batches(20, vocab=BIG_VOCAB), 12)
    assert len(asked) == hift.num_groups


STATE_8BIT = ("master", "state1", "state2")


def test_a_state_dict_is_a_view_of_the_files_that_changes_with_training(tmp_path: Path) -> None:
    batches = token_batches(40, vocab=BIG_VOCAB)
    model, hift = on_disk(tmp_path, name="AdamW8bit")
    train(model, hift, batches, 8)
    state, then = hift.state_dict(), weights(model)
    kept, saved = copy.deepcopy(state), reloaded(state)
    assert_same_tree(reloaded(kept), saved)
    train(model, hift, batches, 12, start=8)
    after = weights(model)
    newer = hift.state_dict()["state"]  # writes the groups that are in memory
    for name, values in state["state"].items():
        assert_same_tree({key: values[key] for key in STATE_8BIT}, {key: newer[name][key] for key in STATE_8BIT})
    for name in state["state"]:
        state["state"][name]["master"].add_(1)  # reaches no file
    for loaded in (kept, saved):
        model.load_state_dict(then)
        hift.load_state_dict(loaded)
        train(model, hift, batches, 12, start=8)
        assert differing(weights(model), after) == []


@pytest.mark.parametrize("config", [{"order": "random", "steps_per_group": 2}, {"gradients": "stepped"}], ids=str)
def test_its_own_state_can_be_loaded_where_it_lies(config: dict[str, Any], tmp_path: Path) -> None:
    """The state is a view of the files that loading writes, stepped in another order than that of the weights."""
    batches = token_batches(40, vocab=BIG_VOCAB)
    model, hift = on_disk(tmp_path, name="AdamW8bit", **config)
    other, reference = hift_over(twin(model), "AdamW8bit", stream_bytes=PIECE, **config)
    train(other, reference, batches, 20)
    for start in (0, 8):
        train(model, hift, batches, 8, start=start)
        hift.load_state_dict(hift.state_dict())
    train(model, hift, batches, 4, start=16)
    assert_same_bits(model, other)


def test_a_state_dict_of_an_update_that_was_begun_and_not_made_is_whole(tmp_path: Path) -> None:
    model, hift = on_disk(tmp_path)
    other, reference = hift_over(twin(model), "AdamW", stream_bytes=PIECE)
    for each, optimizer in ((model, hift), (other, reference)):
        train(each, optimizer, token_batches(20, vocab=BIG_VOCAB), 3)
        optimizer.turns._begin_update()
    assert_same_tree(hift.state_dict()["state"], reference.state_dict()["state"])
    for each, optimizer in ((model, hift), (other, reference)):
        train(each, optimizer, token_batches(20, vocab=BIG_VOCAB), 10, start=3)
    assert_same_bits(model, other)


def test_masters_follow_what_others_have_written(tmp_path: Path) -> None:
    batches = token_batches(40, vocab=BIG_VOCAB)
    model, hift = on_disk(tmp_path)
    other, reference = hift_over(twin(model), "AdamW", stream_bytes=PIECE)
    for each, optimizer in ((model, hift), (other, reference)):
        train(each, optimizer, batches, 8)
        each.get_parameter("model.layers.1.mlp.up_proj.weight").data.mul_(1.5)
    assert_same_tree(hift.state_dict()["state"], reference.state_dict()["state"])
    for each, optimizer in ((model, hift), (other, reference)):
        train(each, optimizer, batches, 12, start=8)
    assert_same_bits(model, other)


def test_detaching_and_attaching_again_loses_nothing(tmp_path: Path) -> None:
    batches = token_batches(60, vocab=BIG_VOCAB)
    runs = [on_disk(tmp_path), hift_over(small_decoder(BF16, vocab=BIG_VOCAB), "AdamW", stream_bytes=PIECE)]
    for model, hift in runs:
        train(model, hift, batches, 7)
        hift.detach()
        state = hift.state_dict()["state"]
        hift.reattach()
        assert_same_tree(state, hift.state_dict()["state"])
        train(model, hift, batches, 13, start=7)
    assert_same_bits(runs[0][0], runs[1][0])


def test_an_interrupted_wait_loses_nothing(
    tmp_path: Path, transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = token_batches(20, vocab=BIG_VOCAB)
    model, hift = on_disk(tmp_path)
    other, reference = hift_over(twin(model), "AdamW", stream_bytes=PIECE)
    train(other, reference, batches, 14)
    transfers.seconds = 0.005
    result = Future.result
    interrupts = [True]

    def interrupted(self: "Future[Any]", timeout: float | None = None) -> Any:
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        return result(self, timeout)

    done = 0
    while done < 14:
        if done % 4 == 3:
            interrupts[:] = [True]
            with monkeypatch.context() as patch:
                patch.setattr(Future, "result", interrupted)
                try:
                    train(model, hift, batches, 1, start=done)
                except KeyboardInterrupt:
                    model.zero_grad()
        train(model, hift, batches, 1, start=hift.updates)
        done = hift.updates
    assert done == 14
    assert_same_bits(model, other)


def test_state_that_grows_beyond_its_buffer_is_kept(tmp_path: Path) -> None:
    class Growing(torch.optim.Optimizer):
        """Keeps every gradient's sum, in a longer and longer row."""

        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                row = self.state[parameter].get("row", parameter.new_zeros(0))
                self.state[parameter]["row"] = torch.cat([row, parameter.grad.sum().repeat(500)])
                parameter.add_(parameter.grad, alpha=-0.1 / (1 + len(row)))

    model, hift = on_disk(tmp_path, name=Growing)
    other, reference = hift_over(twin(model), Growing, stream_bytes=PIECE)
    for each, optimizer in ((model, hift), (other, reference)):
        train(each, optimizer, token_batches(30, vocab=BIG_VOCAB), 30)
    assert_same_bits(model, other)
    assert_same_tree(reloaded(hift.state_dict()["state"]), reloaded(reference.state_dict()["state"]))


def test_the_thread_ends_with_the_optimizer(tmp_path: Path) -> None:
    model, hift = on_disk(tmp_path)
    train(model, hift, token_batches(12, vocab=BIG_VOCAB), 6)
    (thread,) = disk_of(hift)._thread._threads
    descriptors = [file._descriptor for file in files_of(hift).values()]
    del hift
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_host_without_room_for_two_groups_is_said_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hift = on_disk(tmp_path, state_ram_bytes=100_000)
    sizes = sorted(12 * sum(w.parameter.numel() for w in hift.weights_of(index)) for index in range(hift.num_groups))
    # One block fits into the memory that was given; of the others two of the largest are there at a time.
    needed = sizes[0] + 2 * sizes[-1]
    model(**token_batches(1, vocab=BIG_VOCAB)[0]).loss.backward()
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: needed)
    with pytest.raises(MemoryError, match=r"two groups of state=\"disk\" and .* few layers per group"):
        hift.step()
    assert hift.updates == 0 and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: int(1.1 * needed))
    hift.step()


def test_a_model_on_another_device_takes_its_state_along(tmp_path: Path) -> None:
    """Pretended: the groups are told of another device, and make all that they have anew."""
    batches = token_batches(30, vocab=BIG_VOCAB)
    model, hift = on_disk(tmp_path)
    other, reference = hift_over(twin(model), "AdamW", stream_bytes=PIECE)
    train(model, hift, batches, 8)
    for group in hift.turns.states:
        group._store.device = torch.device("meta")  # type: ignore[attr-defined]
        monkey = part_of(hift, Prefetcher).slots_of(torch.device("cpu"))
        part_of(hift, Prefetcher).slots[torch.device("meta")] = monkey
    train(model, hift, batches, 12, start=8)
    train(other, reference, batches, 20)
    assert_same_bits(model, other)
