"""State that waits in files, against the same run whose state waits in host memory."""

import copy
import errno
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slivertune import HiFT
from slivertune.core import direct_files
from slivertune.core.ledger import Ledger, StateCount
from slivertune.hift import host_room
from slivertune.hift.disk_state import groups_on_disk
from slivertune.hift.group_file import GroupFile
from tests.helpers.delayed_streams import delayed
from tests.helpers.models import assert_same_bits, assert_same_tree, differing, tiny_llama, token_batches, twin, weights
from tests.helpers.reference import train
from tests.hift.cases import BIG_VOCAB, DTYPES, hift_over, reloaded, run

BF16 = torch.bfloat16


class Transfers:
    """Every read and write of the threads; may be slow, or fail."""

    def __init__(self) -> None:
        self.read_bytes = self.written_bytes = 0
        self.seconds = 0.0
        self.errors: dict[str, int] = {}
        self.threads: set[str] = set()

    def pass_by(self, kind: str) -> None:
        self.threads.add(threading.current_thread().name)
        time.sleep(self.seconds)
        if kind in self.errors:
            raise OSError(self.errors[kind], os.strerror(self.errors[kind]))


@pytest.fixture(autouse=True)
def nothing_of_others() -> None:
    """What earlier tests have left unreachable still has its files and threads."""
    gc.collect()


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    made, read, write = Transfers(), os.preadv, os.pwritev

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        made.pass_by("read")
        number = read(descriptor, buffers, offset)
        made.read_bytes += number
        return number

    def pwritev(descriptor: int, buffers: Any, offset: int) -> int:
        made.pass_by("write")
        number = write(descriptor, buffers, offset)
        made.written_bytes += number
        return number

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(direct_files, "PART_BYTES", 8192)  # so that a file has several
    return made


def files_of(hift: HiFT) -> list[GroupFile]:
    return [each.file for each in hift._residencies]  # type: ignore[attr-defined]


def on_disk(folder: Path, dtype: torch.dtype = BF16, name: Any = "AdamW", **config: Any) -> tuple[Any, HiFT]:
    blocks = config.pop("blocks", 3)
    model = tiny_llama(dtype, vocab=BIG_VOCAB, blocks=blocks)
    return hift_over(model, name, **{"state": "disk", "state_dir": folder, "stream_bytes": 16_384, **config})


def assert_equals_host(folder: Path, dtype: torch.dtype, name: str, steps: int | None = None, **config: Any) -> HiFT:
    """Three cycles, and a state that is the same at the end."""
    how = {key: config.pop(key) for key in ("accumulation", "clip") if key in config}
    model, hift = on_disk(folder, dtype, name, **config)
    config.pop("state_ram_bytes", None)
    blocks = config.pop("blocks", 3)
    other = tiny_llama(dtype, vocab=BIG_VOCAB, blocks=blocks)
    other, reference = hift_over(other, name, **{"stream_bytes": 16_384, **config})
    steps = 3 * hift.cycle_length if steps is None else steps
    losses = run(model, hift, steps, hift=hift, **how)
    assert losses == run(other, reference, steps, hift=reference, **how)
    assert_same_bits(model, other)
    assert_same_tree(reloaded(hift.state_dict()), reloaded(reference.state_dict()))
    return hift


@DTYPES
@pytest.mark.parametrize("layers_per_group", [1, 4])
@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit"])
def test_state_on_disk_is_that_on_the_host_to_the_bit(
    name: str, layers_per_group: int, dtype: torch.dtype, tmp_path: Path, transfers: Transfers
) -> None:
    hift = assert_equals_host(tmp_path, dtype, name, layers_per_group=layers_per_group, blocks=3 * layers_per_group)
    assert hift.num_groups >= 4
    assert transfers.threads == {"slivertune-reader", "slivertune-writer"}


@pytest.mark.parametrize(
    "config",
    [
        {"accumulation": 3, "clip": 0.5},
        {"steps_per_group": 2},
        {"order": "random", "seed": 5},
        {"order": "top2down", "layers_per_group": 2, "steps_per_group": 2},
        {"gradients": "host", "max_grad_norm": 0.5},
        {"gradients": "stepped"},
        {"gradients": "stepped", "accumulation": 2},
        {"master": "none"},
        {"prefetch_bytes": 2**20},
        {"stream_bytes": 0},
        {"state_ram_bytes": 150_000},
        {"layers_per_group": 5},
        {"name": "torch Adafactor"},
        {"name": "SGD"},
        {"name": "SGD momentum"},
    ],
    ids=str,
)
def test_every_setting_gives_the_bits_of_host_state(config: dict[str, Any], tmp_path: Path) -> None:
    assert_equals_host(tmp_path, BF16, config.pop("name", "AdamW"), **config)


@pytest.mark.parametrize("config", [{}, {"gradients": "host"}, {"steps_per_group": 2}], ids=str)
def test_a_slow_disk_changes_no_bit(config: dict[str, Any], tmp_path: Path, transfers: Transfers) -> None:
    transfers.seconds = 0.01
    assert_equals_host(tmp_path, BF16, "AdamW", **config)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("config", [{}, {"prefetch_bytes": 60_000}, {"gradients": "host", "prefetch_bytes": 60_000}])
def test_copies_as_late_as_events_allow_change_no_bit(config: dict[str, Any], seed: int | None, tmp_path: Path) -> None:
    model, expected = (tiny_llama(BF16, vocab=BIG_VOCAB) for _ in range(2))
    with delayed(seed) as made:
        hift = hift_over(model, "AdamW", state="disk", state_dir=tmp_path, stream_bytes=16_384, **config)[1]
        run(model, hift, 17)
        state = copy.deepcopy(hift.state_dict()["state"])
    assert sum(streams.num_late for streams in made) > 50
    reference = hift_over(expected, "AdamW", stream_bytes=16_384, **config)[1]
    run(expected, reference, 17)
    assert_same_bits(model, expected)
    assert_same_tree(state, reference.state_dict()["state"])


def wait_until_read(hift: HiFT) -> None:
    """Nothing is asked of the optimizer meanwhile: what comes next is read by itself."""
    deadline = time.monotonic() + 20
    coming = [files_of(hift)[index] for index in hift.rotation.coming_groups[:2]]
    while any(file.buffer is None for file in coming):
        assert time.monotonic() < deadline, "the groups whose turns come next are not in memory"
        time.sleep(0.01)


def test_a_group_is_written_and_read_once_a_turn_and_ahead_of_it(tmp_path: Path, transfers: Transfers) -> None:
    model, hift = on_disk(tmp_path, steps_per_group=2)
    train(model, hift, token_batches(40, vocab=BIG_VOCAB), 20)
    found = []
    for _ in range(2):
        hift.state_dict()
        wait_until_read(hift)
        found.append((transfers.read_bytes, transfers.written_bytes))
        if len(found) == 1:
            train(model, hift, token_batches(40, vocab=BIG_VOCAB), 20, start=20)
    sizes = [path.stat().st_size for path in sorted(tmp_path.rglob("group-*.safetensors"))]
    # Two whole cycles; the headers, of one page or two, are not read.
    assert found[1][1] - found[0][1] == 2 * sum(sizes)
    read = found[1][0] - found[0][0]
    assert 2 * sum(sizes) - 2 * len(sizes) * 2 * direct_files.PAGE_BYTES <= read < 2 * sum(sizes)


def test_what_comes_next_is_read_while_the_last_step_is_still_to_come(tmp_path: Path) -> None:
    model, hift = on_disk(tmp_path)
    train(model, hift, token_batches(20, vocab=BIG_VOCAB), 6)
    wait_until_read(hift)


def test_groups_that_fit_into_the_memory_given_have_no_file(tmp_path: Path, transfers: Transfers) -> None:
    model, hift = on_disk(tmp_path / "disk", state_ram_bytes=2**30)
    train(model, hift, token_batches(20, vocab=BIG_VOCAB), 12)
    assert list((tmp_path / "disk").rglob("group-*")) == [] and transfers.written_bytes == 0
    # The smallest first, as many as fit.
    assert groups_on_disk([50, 10, 10, 10, 40], 29) == [0, 3, 4]
    assert groups_on_disk([50, 10, 10, 10, 40], 0) == [0, 1, 2, 3, 4]
    assert groups_on_disk([50, 10, 10, 10, 40], 80) == [0]


def test_two_groups_are_in_memory_and_all_on_the_disk(tmp_path: Path) -> None:
    own = StateCount()  # other tests' optimizers may still live
    model, hift = on_disk(tmp_path, torch.float32, blocks=12)
    group_bytes = [sum(8 * w.parameter.numel() for w in hift.weights_of(index)) for index in range(hift.num_groups)]
    with Ledger(model) as ledger:
        train(model, hift, token_batches(40, vocab=BIG_VOCAB), 28)
        assert ledger.highest.host <= 2 * (max(group_bytes) + 4 * direct_files.PAGE_BYTES) + 30_000
        files = settled(hift, tmp_path)
        in_files = own.num_bytes()["disk"]
        assert sum(group_bytes) <= in_files <= sum(group_bytes) + 14 * 4 * direct_files.PAGE_BYTES
        assert in_files == sum(path.stat().st_size for path in files) <= ledger.current().disk
    del hift
    gc.collect()
    assert list(tmp_path.iterdir()) == [] and own.num_bytes()["disk"] == 0


def settled(hift: HiFT, folder: Path) -> list[Path]:
    hift.state_dict()
    return sorted(folder.rglob("group-*.safetensors"))


@contextmanager
def failing(transfers: Transfers, kind: str, number: int) -> Iterator[None]:
    transfers.errors[kind] = number
    try:
        yield
    finally:
        del transfers.errors[kind]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("config", [{}, {"gradients": "stepped"}, {"gradients": "host", "max_grad_norm": 0.1}], ids=str)
def test_a_write_that_fails_shows_in_a_step_and_nothing_is_lost(
    config: dict[str, Any], number: int, tmp_path: Path, transfers: Transfers
) -> None:
    batches = token_batches(20, vocab=BIG_VOCAB)
    model, hift = on_disk(tmp_path, **config)
    other, reference = hift_over(twin(model), "AdamW", stream_bytes=16_384, **config)
    train(model, hift, batches, 7)
    train(other, reference, batches, 7)
    older = {path: path.read_bytes() for path in settled(hift, tmp_path)}
    with failing(transfers, "write", number):
        train(model, hift, batches, 1, start=7)
        file = files_of(hift)[hift.rotation.last_group]
        while file.failure is None:  # the write behind this turn
            time.sleep(0.001)
        before = weights(model)
        with pytest.raises(OSError, match="Nothing is lost") as error:
            train(model, hift, batches, 1, start=8)
        assert error.value.errno == number and str(tmp_path) in str(error.value)
        assert differing(weights(model), before) == [] and hift.updates == 8
        assert {path: path.read_bytes() for path in older} == older
        model.zero_grad()
    train(other, reference, batches, 1, start=7)
    for each, optimizer in ((model, hift), (other, reference)):
        train(each, optimizer, batches, 12, start=8)
    assert_same_bits(model, other)
    assert_same_tree(hift.state_dict()["state"], reference.state_dict()["state"])


def test_a_failed_write_keeps_a_state_dict_from_being_made(tmp_path: Path, transfers: Transfers) -> None:
    model, hift = on_disk(tmp_path)
    train(model, hift, token_batches(20, vocab=BIG_VOCAB), 3)
    with failing(transfers, "write", errno.ENOSPC), pytest.raises(OSError, match="Nothing is lost"):
        hift.state_dict()
    hift.state_dict()


def test_a_file_that_cannot_be_read_is_named_before_anything_is_stepped(tmp_path: Path, transfers: Transfers) -> None:
    batches = token_batches(20, vocab=BIG_VOCAB)
    model, hift = on_disk(tmp_path)
    other, reference = hift_over(twin(model), "AdamW", stream_bytes=16_384)
    train(model, hift, batches, 5)
    train(other, reference, batches, 12)
    with failing(transfers, "read", errno.EIO):
        with pytest.raises(OSError, match=r"group-0000\d\.safetensors could not be read.*last checkpoint"):
            train(model, hift, batches, 3, start=5)
        done, before = hift.updates, weights(model)
        assert done < 8
    model.zero_grad()
    assert differing(weights(model), before) == []
    train(model, hift, batches, 12 - done, start=done)
    assert_same_bits(model, other)


def test_a_file_that_somebody_cut_short_is_named(tmp_path: Path) -> None:
    batches = token_batches(20, vocab=BIG_VOCAB)
    model, hift = on_disk(tmp_path)
    train(model, hift, batches, 5)
    for path in settled(hift, tmp_path):
        os.truncate(path, 4096)
    with pytest.raises(OSError, match=r"group-\d+\.safetensors could not be read: .* ends after"):
        train(model, hift, batches, 5, start=5)


def test_a_read_only_folder_is_named_before_the_first_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    model, hift = on_disk(tmp_path)
    before = weights(model)
    model(**token_batches(1, vocab=BIG_VOCAB)[0]).loss.backward()
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.mkdtemp", refuse)
        with pytest.raises(OSError, match="Read-only") as error:
            hift.step()
    assert error.value.errno == errno.EROFS and str(tmp_path) in str(error.value)
    assert differing(weights(model), before) == [] and hift.updates == 0
    hift.step()
    assert hift.updates == 1


def test_room_for_all_groups_and_a_spare_is_taken_before_the_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    take = os.posix_fallocate

    def fallocate(descriptor: int, start: int, num_bytes: int) -> None:
        asked.append(num_bytes)
        take(descriptor, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    model, hift = on_disk(tmp_path)
    train(model, hift, token_batches(20, vocab=BIG_VOCAB), 1)
    sizes = [12 * sum(w.parameter.numel() for w in hift.weights_of(index)) for index in range(hift.num_groups)]
    # For each of the five and the spare one room for a header, too.
    needed = sum(sizes) + max(sizes) + 6 * 2**16
    assert needed <= asked[0] <= 1.1 * needed


def test_a_state_dict_stays_what_it_was_while_training_goes_on(tmp_path: Path) -> None:
    batches = token_batches(40, vocab=BIG_VOCAB)
    model, hift = on_disk(tmp_path)
    train(model, hift, batches, 8)
    state, then = hift.state_dict(), weights(model)
    kept = copy.deepcopy(state)
    train(model, hift, batches, 12, start=8)
    after = weights(model)
    assert_same_tree(state, kept)
    for name in state["state"]:
        state["state"][name]["master"].add_(1)  # reaches no file
    model.load_state_dict(then)
    hift.load_state_dict(kept)
    train(model, hift, batches, 12, start=8)
    assert differing(weights(model), after) == []


def test_a_state_dict_of_an_update_that_was_begun_and_not_made_is_whole(tmp_path: Path) -> None:
    model, hift = on_disk(tmp_path)
    other, reference = hift_over(twin(model), "AdamW", stream_bytes=16_384)
    for each, optimizer in ((model, hift), (other, reference)):
        train(each, optimizer, token_batches(20, vocab=BIG_VOCAB), 3)
        optimizer._begin_update()
    assert_same_tree(hift.state_dict()["state"], reference.state_dict()["state"])
    for each, optimizer in ((model, hift), (other, reference)):
        train(each, optimizer, token_batches(20, vocab=BIG_VOCAB), 10, start=3)
    assert_same_bits(model, other)


def test_masters_follow_what_others_have_written(tmp_path: Path) -> None:
    batches = token_batches(40, vocab=BIG_VOCAB)
    model, hift = on_disk(tmp_path)
    other, reference = hift_over(twin(model), "AdamW", stream_bytes=16_384)
    for each, optimizer in ((model, hift), (other, reference)):
        train(each, optimizer, batches, 8)
        each.get_parameter("model.layers.1.mlp.up_proj.weight").data.mul_(1.5)
    state = hift.state_dict()["state"]
    assert_same_tree(state, reference.state_dict()["state"])
    found = [hift.saved_file(index) is not None for index in range(hift.num_groups)]
    assert found == [True, True, False, True, True]
    for each, optimizer in ((model, hift), (other, reference)):
        train(each, optimizer, batches, 12, start=8)
    assert_same_bits(model, other)


def test_a_group_s_file_is_what_a_checkpoint_has_of_it(tmp_path: Path) -> None:
    model, hift = on_disk(tmp_path, name="AdamW8bit")
    train(model, hift, token_batches(20, vocab=BIG_VOCAB), 8)
    state = hift.state_dict()["state"]
    for group in hift.groups:
        path = hift.saved_file(group.index)
        assert path is not None
        found = {name: value for name, value in load_file(path).items() if not name.startswith("gap ")}
        expected = {
            f"{name}/{key}": value
            for name in group.parameter_names
            for key, value in state[name].items()
            if isinstance(value, torch.Tensor) and value.dim()
        }
        assert differing(found, expected) == [] and found.keys() == expected.keys()


def test_detaching_and_attaching_again_loses_nothing(tmp_path: Path) -> None:
    batches = token_batches(60, vocab=BIG_VOCAB)
    runs = [on_disk(tmp_path), hift_over(tiny_llama(BF16, vocab=BIG_VOCAB), "AdamW", stream_bytes=16_384)]
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
    other, reference = hift_over(twin(model), "AdamW", stream_bytes=16_384)
    train(other, reference, batches, 14)
    transfers.seconds = 0.02
    wait = threading.Condition.wait
    interrupts = [True]

    def interrupted(self: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread() and interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        return wait(self, timeout)

    done = 0
    while done < 14:
        if done % 4 == 3:
            interrupts[:] = [True]
            with monkeypatch.context() as patch:
                patch.setattr(threading.Condition, "wait", interrupted)
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
    other, reference = hift_over(twin(model), Growing, stream_bytes=16_384)
    for each, optimizer in ((model, hift), (other, reference)):
        train(each, optimizer, token_batches(30, vocab=BIG_VOCAB), 30)
    assert_same_bits(model, other)
    assert_same_tree(reloaded(hift.state_dict()["state"]), reloaded(reference.state_dict()["state"]))


def test_files_of_a_killed_process_are_removed_by_the_next_run_and_a_living_one_s_are_not(tmp_path: Path) -> None:
    dead = tmp_path / ".hift.abcdefgh.partial"
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    (dead / "group-00000.safetensors").write_bytes(b"half")
    runs = [on_disk(tmp_path) for _ in range(2)]
    for model, hift in runs:
        train(model, hift, token_batches(12, vocab=BIG_VOCAB), 6)
    assert not dead.exists()
    assert len(list(tmp_path.iterdir())) == 2
    assert_same_bits(runs[0][0], runs[1][0])


def test_the_threads_end_with_the_optimizer(tmp_path: Path) -> None:
    model, hift = on_disk(tmp_path)
    train(model, hift, token_batches(12, vocab=BIG_VOCAB), 6)
    threads = [each for each in threading.enumerate() if each.name.startswith("slivertune")]
    assert len(threads) >= 2
    alive = set(threads)
    del hift
    gc.collect()
    assert {each for each in alive if each.is_alive()} == set() and list(tmp_path.iterdir()) == []


def test_a_host_without_room_for_two_groups_is_said_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hift = on_disk(tmp_path, state_ram_bytes=100_000)
    sizes = sorted(12 * sum(w.parameter.numel() for w in hift.weights_of(index)) for index in range(hift.num_groups))
    # One block fits into the memory that was given; of the others two of the largest are there at a time.
    needed = sizes[0] + 2 * sizes[-1]
    model(**token_batches(1, vocab=BIG_VOCAB)[0]).loss.backward()
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: needed)
    with pytest.raises(MemoryError, match=r"two groups of state=\"disk\" and .* few layers a group"):
        hift.step()
    assert hift.updates == 0 and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: int(1.1 * needed))
    hift.step()


def test_a_model_on_another_device_takes_its_state_along(tmp_path: Path) -> None:
    """Pretended: the groups are told of another device, and make all that they have anew."""
    batches = token_batches(30, vocab=BIG_VOCAB)
    model, hift = on_disk(tmp_path)
    other, reference = hift_over(twin(model), "AdamW", stream_bytes=16_384)
    train(model, hift, batches, 8)
    for group in hift._residencies:
        group._offloaded_from = torch.device("meta")  # type: ignore[attr-defined]
        monkey = hift._prefetcher.slots_of(torch.device("cpu"))
        hift._prefetcher.slots[torch.device("meta")] = monkey
    train(model, hift, batches, 12, start=8)
    train(other, reference, batches, 20)
    assert_same_bits(model, other)
