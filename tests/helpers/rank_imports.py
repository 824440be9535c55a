"""Imports for every rank; a process from which the ranks are forked imports this once, for seconds of a core each."""

import importlib
import os
from contextlib import suppress

from tqdm import tqdm

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed looks for a device as soon as it is imported
for name in (
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "deepspeed",
    "peft",
    "setuptools",  # adds to sys.path
    "tests.parallel.contract.cases",
):
    with suppress(ImportError):
        importlib.import_module(name)

tqdm.monitor_interval = 0  # no thread that outlives the first bar
