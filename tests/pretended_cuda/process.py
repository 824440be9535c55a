"""The process of a rank whose CUDA devices are pretended; nothing here may import torch before they are there."""

import importlib
import os
from multiprocessing.connection import Connection
from pathlib import Path


def serve(connection: Connection, rank: int, num_ranks: int, folder: Path, timeout_s: float) -> None:
    """Load the devices, and run cases as `tests.helpers.rank_worker.serve` does, which explains the arguments."""
    os.environ["DS_ACCELERATOR"] = "cuda"  # DeepSpeed chooses by what is installed otherwise
    importlib.import_module("tests.pretended_cuda.torch_cuda")
    importlib.import_module("tests.helpers.rank_worker").serve(connection, rank, num_ranks, folder, timeout_s)
