import hashlib
import json
import shlex
from pathlib import Path

import pytest

from slivertune.core import manifest
from slivertune.core.manifest import (
    MANIFEST_NAME,
    DamagedCheckpointError,
    check_whole,
    find_damage,
    is_of_other_format,
    read_entries,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint of two files."""
    made = tmp_path / "step 3"
    (made / "deep").mkdir(parents=True)
    (made / "model.bin").write_bytes(bytes(range(256)) * 10)
    (made / "deep" / "state.bin").write_bytes(b"state")
    (made / "empty").touch()
    write_manifest(made, {"facts": {"method": "hift", "rate": 0.1}})
    return made


def test_a_whole_folder_has_no_damage_and_says_what_it_was_told(folder: Path) -> None:
    check_whole(folder)
    entries = read_entries(folder)
    assert entries["facts"] == {"method": "hift", "rate": 0.1}
    assert set(entries["files"]) == {"model.bin", "deep/state.bin", "empty"}


def test_a_hash_is_that_of_the_parts_whatever_is_read_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (folder / "model.bin").read_bytes()
    monkeypatch.setattr(manifest, "_READ_BYTES", 300)
    monkeypatch.setattr(manifest, "_PART_BYTES", 1000)
    write_manifest(folder)
    parts = [hashlib.blake2b(content[i : i + 1000], digest_size=32).digest() for i in (0, 1000, 2000)]
    wanted = hashlib.blake2b(b"".join(parts), digest_size=32).hexdigest()
    assert read_entries(folder)["files"]["model.bin"] == {"bytes": 2560, "blake2b": wanted}
    assert find_damage(folder) is None


@pytest.mark.parametrize("name", ["model.bin", "deep/state.bin", MANIFEST_NAME])
def test_a_bit_that_is_flipped_anywhere_is_noticed(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    for place in range(0, len(content), max(1, len(content) // 50)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << (place % 7)
        if name == MANIFEST_NAME and _same_json(damaged, content):
            continue
        (folder / name).write_bytes(damaged)
        assert name in str(find_damage(folder)), place
    (folder / name).write_bytes(content)
    assert find_damage(folder) is None


def _same_json(first: bytes, second: bytes) -> bool:
    """A flipped space may be a line's end, which changes nothing that is said."""
    try:
        return bool(json.loads(first) == json.loads(second))
    except ValueError:
        return False


def test_sizes_alone_are_told_without_reading(folder: Path) -> None:
    (folder / "model.bin").write_bytes(bytes(2560))
    assert find_damage(folder, read_files=False) is None
    assert find_damage(folder) == "model.bin holds other bytes than were written"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "can't be read"),
        ("[]", "can't be read"),
        ("null", "can't be read"),
        ("[" * 100_000, "can't be read"),
        ('{"format": 2}', "can't be read"),
        ('{"format": 1, "files": {}}', "has format 1, and this version reads 2"),
        ('{"format": 2, "files": []}', "can't be read"),
    ],
)
def test_a_manifest_that_says_nothing_is_damage(folder: Path, text: str, words: str) -> None:
    (folder / MANIFEST_NAME).write_text(text)
    assert words in str(find_damage(folder))


def test_a_manifest_of_another_version_is_told_from_damage_with_the_way_out(folder: Path) -> None:
    assert not is_of_other_format(folder)
    path, way_out = folder / MANIFEST_NAME, "Continue with the version of slivertune that wrote it"
    path.write_text('{"format": 1, "files": {}}')
    assert is_of_other_format(folder) and str(find_damage(folder)).endswith(f"this version reads 2. {way_out}")
    with pytest.raises(DamagedCheckpointError, match=way_out):
        check_whole(folder)
    path.write_text("{")
    assert not is_of_other_format(folder)
    path.unlink()
    assert not is_of_other_format(folder)


def write_by_hand(folder: Path, files: dict[str, object]) -> None:
    """A manifest of these files, as if it had been written whole."""
    said: dict[str, object] = {"format": 2, "files": files}
    (folder / MANIFEST_NAME).write_text(json.dumps({**said, manifest._OWN_HASH: manifest._digest_entries(said)}))


@pytest.mark.parametrize(
    "files",
    [
        {"../outside": {"bytes": 1, "blake2b": ""}},
        {"/etc/hostname": {"bytes": 1, "blake2b": ""}},
        {"model.bin": {"bytes": "2560", "blake2b": ""}},
        {"model.bin": {"bytes": 2560, "blake2b": None}},
        {"model.bin": 7},
    ],
)
def test_entries_that_no_save_writes_are_damage(folder: Path, files: dict[str, object]) -> None:
    write_by_hand(folder, files)
    assert "can't be read" in str(find_damage(folder))


def test_a_folder_inside_with_a_manifest_of_its_own_is_told_by_that_one(folder: Path) -> None:
    write_manifest(folder / "deep")
    write_manifest(folder)
    assert set(read_entries(folder)["files"]) == {"model.bin", f"deep/{MANIFEST_NAME}", "empty"}
    assert find_damage(folder) is None
    (folder / "deep" / "state.bin").write_bytes(b"STATE")
    assert find_damage(folder) == "in deep, state.bin holds other bytes than were written"


def test_a_link_that_leads_round_is_damage(folder: Path) -> None:
    (folder / "round").symlink_to(folder)
    for _ in range(3):  # until the size that it tells is its own
        size = (folder / MANIFEST_NAME).stat().st_size
        write_by_hand(folder, {f"round/{MANIFEST_NAME}": {"bytes": size, "blake2b": "0" * 64}})
    assert "too deeply" in str(find_damage(folder, read_files=False))
    assert "holds other bytes" in str(find_damage(folder))


def test_what_comes_later_is_not_looked_at_and_what_is_left_out_neither(folder: Path) -> None:
    (folder / "log.txt").write_text("one")
    assert find_damage(folder) is None
    write_manifest(folder, files=[folder / "model.bin"])
    (folder / "deep" / "state.bin").unlink()
    (folder / "log.txt").write_text("two")
    assert find_damage(folder) is None


def test_the_error_names_folder_file_and_way_out(folder: Path) -> None:
    older = folder.parent / "step 2"
    older.mkdir()
    (older / "model.bin").write_bytes(b"older")
    write_manifest(older)
    (folder / "model.bin").unlink()
    with pytest.raises(DamagedCheckpointError) as caught:
        check_whole(folder)
    assert str(folder) in str(caught.value) and "model.bin is missing" in str(caught.value)
    assert str(caught.value).endswith(f". Use an older checkpoint, such as {older}")
    with pytest.raises(DamagedCheckpointError, match="is not there, or not a folder"):
        check_whole(folder / "nowhere")


def test_a_folder_of_another_program_can_be_declared_whole_by_the_command_that_the_error_tells(folder: Path) -> None:
    (folder / MANIFEST_NAME).unlink()
    with pytest.raises(DamagedCheckpointError, match=r"writing was cut short.*python -c '(.*)'") as caught:
        check_whole(folder)
    code = str(caught.value).partition("python -c ")[2]
    exec(shlex.split(code)[0])
    check_whole(folder)
    (empty := folder.parent / "empty").mkdir()
    with pytest.raises(DamagedCheckpointError) as caught:
        check_whole(empty)
    assert "python -c" not in str(caught.value), "nothing that could be whole is there"


def test_a_manifest_that_cannot_be_written_leaves_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(manifest, "write_json", fail)
    with pytest.raises(OSError, match="full"):
        write_manifest(folder)
    assert "has no slivertune_checkpoint.json" in str(find_damage(folder))


def test_what_a_killed_write_has_left_is_no_part_of_a_checkpoint(folder: Path) -> None:
    for name in (MANIFEST_NAME, "model.bin"):
        left = folder / f".{name}.abcdefgh.partial"
        left.mkdir()
        (left / "lock").touch()
    write_manifest(folder)
    assert set(read_entries(folder)["files"]) == {"model.bin", "deep/state.bin", "empty"}
    check_whole(folder)


def test_files_that_an_earlier_version_told_by_size_alone_are_compared_by_size(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"12345")
    (tmp_path / "small").write_bytes(b"12345")
    write_manifest(tmp_path)
    path = tmp_path / MANIFEST_NAME
    said = json.loads(path.read_text())
    del said["files"]["large"]["blake2b"], said["blake2b of all else"]
    own = hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=32).hexdigest()
    path.write_text(json.dumps({**said, "blake2b of all else": own}))
    assert find_damage(tmp_path) is None
    (tmp_path / "large").write_bytes(b"54321")
    assert find_damage(tmp_path) is None
    (tmp_path / "large").write_bytes(b"1234")
    assert find_damage(tmp_path) == "large has 4 bytes where 5 were written"
    (tmp_path / "large").write_bytes(b"12345")
    (tmp_path / "small").write_bytes(b"54321")
    assert find_damage(tmp_path) == "small holds other bytes than were written"
