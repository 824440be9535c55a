"""`slivertune train` as `quality.py` starts it: with LISA, a HiFT whose rate is not held, and the task retrieval.

python benchmarks/quality_train.py --method lisa --max_steps 60
"""

import sys

import lisa
import not_held
import retrieval

from slivertune.cli import main


def register() -> None:
    """Let this process know what is the benchmark's own."""
    lisa.register()
    not_held.register()
    retrieval.register()


if __name__ == "__main__":
    register()
    sys.exit(main(["train", *sys.argv[1:]]))
