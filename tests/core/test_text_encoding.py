from pathlib import Path

import pytest

from slivertune.core.text_encoding import find_not_utf8

TEXTS = ["", "one\n", "naïve\n你好\n😀", "\ufeffone\ntwo", "a\nb\n" * 40 + "é"]


def first_wrong_line(content: bytes) -> int | None:
    """Naively: the whole at once."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return content[: error.start].count(b"\n") + 1
    return content[: content.index(b"\0")].count(b"\n") + 1 if b"\0" in content else None


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 5, 2**20])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16", "utf-16-le", "utf-16-be"])
def test_the_line_is_that_of_the_whole_text_however_it_is_read(
    encoding: str, chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slivertune.core.text_encoding._PIECE_BYTES", chunk_bytes)
    for text in TEXTS:
        content = text.encode(encoding, errors="ignore")
        (tmp_path / "text").write_bytes(content)
        line, said = first_wrong_line(content), find_not_utf8(tmp_path / "text")
        assert (said is None) == (line is None), (text, said)
        if said is not None and encoding == "latin-1":
            assert f"text is not UTF-8 text: line {line} has the byte 0x" in said and "-f latin1 -t utf-8" in said
        elif said is not None:
            # Of UTF-16 its mark is named, or its zeros, which may stand behind what can't be decoded.
            assert "text is not UTF-8 text: line 1 has " in said and "-f utf-16 -t utf-8" in said


def test_a_letter_that_the_end_cuts_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("one\né".encode()[:-1])
    said = find_not_utf8(tmp_path / "text")
    assert said is not None and "line 2 has the byte 0xc3" in said


def test_a_file_is_read_again_only_if_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read = tmp_path / "text", []
    file.write_bytes("é".encode("latin-1"))
    whole = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode: (read.append(self), whole(self, mode))[1])
    first = find_not_utf8(file)
    assert first is not None and find_not_utf8(file) == first and read == [file]
    file.write_bytes(b"two")
    read.clear()
    assert find_not_utf8(file) is None and read == [file]
