"""A folder that is replaced until its process is killed; imports nothing that starts threads before it is forked."""

import os
import signal
import sys
from pathlib import Path

from slivertune.core.atomic import atomic_folder
from tests.helpers.faults import Operations, counted, killed


def replace(target: Path, files: dict[str, str]) -> None:
    with atomic_folder(target) as folder:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def main(root: Path, can_exchange: bool) -> int:
    """Kill one child at each operation; the number of the child that ended well."""
    number = 0
    while True:
        number += 1
        target = root / str(number) / "model"
        child = os.fork()
        if child == 0:
            replace(target, {"a": "old", "sub/b": "old"})
            with counted(Operations(number, killed), can_exchange=can_exchange):
                replace(target, {"b": "new", "sub/c": "new", "sub/deep/d": "new"})
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return number
        assert os.WTERMSIG(status) == signal.SIGKILL


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), sys.argv[2] == "True"))
