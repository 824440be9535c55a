"""`python -m slivertune` is the `slivertune` command."""

import sys

from slivertune.cli import main

if __name__ == "__main__":
    sys.exit(main())
