"""Find text that is not UTF-8 in a file, and say how to convert it."""

import codecs
from functools import lru_cache
from pathlib import Path

_PIECE_BYTES = 2**20
_MARKS_OF_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def find_not_utf8(path: Path) -> str | None:
    """Find the first place of a file that is not UTF-8 text. Reads the file in pieces, and an unchanged file once.

    Args:
        path: The file.

    Returns:
        Text of an error that names the file, the line and the way out. None if the whole file is UTF-8.

    Raises:
        OSError: If the file can't be read.
    """
    status = path.stat()
    return _find_in_version(path, (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=128)
def _find_in_version(path: Path, version: tuple[int, int, int]) -> str | None:
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with path.open("rb") as file:
        encoding = "utf-16" if file.read(2) in _MARKS_OF_UTF16 else "latin1"
        file.seek(0)
        while True:
            piece = file.read(_PIECE_BYTES)
            if (zero := piece.find(b"\0")) >= 0:
                # Most of a UTF-16 text is letters that are valid UTF-8, each beside a zero byte.
                return _explain(path, line + piece.count(b"\n", 0, zero), "a zero byte", "utf-16")
            try:
                decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                return _explain(path, line, f"the byte 0x{error.object[error.start]:02x}", encoding)
            if not piece:
                return None
            line += piece.count(b"\n")


def _explain(path: Path, line: int, what: str, encoding: str) -> str:
    return (
        f"{path} is not UTF-8 text: line {line} has {what}. Convert it, such as by iconv -f {encoding} -t utf-8, if it "
        f"is {encoding}"
    )
