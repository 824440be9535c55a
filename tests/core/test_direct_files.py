"""Files read and written part by part, on a file system that has direct access and on one that has not."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from slivertune.core.direct_files import PAGE_BYTES, in_pages, page_memory, read_file, write_file


def go_on() -> None:
    """Of a transfer that nobody ends."""


@pytest.fixture(params=["direct", "cached"], autouse=True)
def access(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slivertune.core.direct_files.PART_BYTES", PAGE_BYTES)
    own = os.open

    def without_direct(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return own(path, flags, *args, **options)

    if request.param == "cached":
        monkeypatch.setattr(os, "open", without_direct)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    content = os.urandom(5 * PAGE_BYTES - 100)
    header, data = page_memory(b"head", PAGE_BYTES), page_memory(content, in_pages(len(content)))
    write_file(tmp_path / "file", [header, data], go_on)
    assert (tmp_path / "file").read_bytes() == b"head".ljust(PAGE_BYTES, b"\0") + content + bytes(100)
    found = page_memory(b"", len(data))
    read_file(tmp_path / "file", PAGE_BYTES, found, go_on)
    assert found == data


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    write_file(tmp_path / "file", [page_memory(b"", 2 * PAGE_BYTES)], go_on)
    with pytest.raises(OSError, match=r"file ends after 8,192 bytes, and 12,288 were written"):
        read_file(tmp_path / "file", 0, page_memory(b"", 3 * PAGE_BYTES), go_on)


def test_a_transfer_that_is_ended_leaves_no_file(tmp_path: Path) -> None:
    calls: list[int] = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        write_file(tmp_path / "file", [page_memory(b"", 8 * PAGE_BYTES)], stop)
    assert list(tmp_path.iterdir()) == []


def test_the_room_is_taken_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(os, "pwritev", lambda *_: pytest.fail("nothing is written"))
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "file", [page_memory(b"", PAGE_BYTES)], go_on)
    assert list(tmp_path.iterdir()) == []
