"""Run the `slivertune` command as `python -m slivertune`."""

import sys

from slivertune.cli import main

if __name__ == "__main__":
    sys.exit(main())
