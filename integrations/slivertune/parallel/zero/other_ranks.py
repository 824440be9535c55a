"""What DeepSpeed's own files of a checkpoint give to another number of ranks: counters, schedule, frozen weights.

DeepSpeed (0.19.8) lets a rank read the file of its own number alone, and cuts nothing again.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slivertune.core.manifest import read_entries
from slivertune.parallel.zero.deepspeed_internals import reading_files

_WHOLE_MODEL_FILE = "mp_rank_00_model_states.pt"
_SHARED_MODEL_FILE = "zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
_FROZEN = "frozen_param_fragments"
_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


@contextmanager
def reading_first(engine: Any, folder: Path) -> Iterator[None]:
    """Let `engine._load_checkpoint` read the model's file of rank 0 on every rank, without that rank's shares.

    Args:
        engine: DeepSpeed's; two of its methods are overridden meanwhile, on this instance.
        folder: The checkpoint's.
    """
    is_shared = engine.zero_optimization_stage() == 3
    path = folder / (_SHARED_MODEL_FILE.format(rank=0) if is_shared else _WHOLE_MODEL_FILE)
    own_load = engine.load_module_state_dict

    def load_unshared(checkpoint: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        kept = {key: value for key, value in checkpoint.items() if key != _FROZEN}
        return own_load(kept, *args, **options)

    if is_shared:
        engine.load_module_state_dict = load_unshared
    try:
        with reading_files(engine, [str(path)]):
            yield
    finally:
        if is_shared:
            del engine.load_module_state_dict


def ranks_of_states(folder: Path) -> int | None:
    """How many ranks' files of optimizer state the manifest of a checkpoint lists; None where there are none.

    Args:
        folder: Found to be whole.
    """
    found = [_STATES.fullmatch(name) for name in read_entries(folder)["files"]]
    return max((int(each[1]) + 1 for each in found if each), default=None)


def first_states(folder: Path) -> Any:
    """Rank 0's optimizer state in a checkpoint of DeepSpeed's, which is unpickled.

    Args:
        folder: Found to be whole.
    """
    listed = read_entries(folder)["files"]
    name = next(name for name in listed if (found := _STATES.fullmatch(name)) and found[1] == "0")
    return torch.load(folder / name, map_location="cpu", weights_only=False)["optimizer_state_dict"]


def fill_frozen(engine: Any, folder: Path, num_saved: int, trained: Collection[int]) -> None:
    """Load weights under ZeRO-3 that no optimizer of DeepSpeed's holds, whose shares lie in all ranks' files.

    Args:
        engine: DeepSpeed's.
        folder: The checkpoint's, found to be whole: DeepSpeed's files are unpickled.
        num_saved: Ranks that saved.
        trained: The `id` of each parameter to leave out.
    """
    left = {name: each for name, each in engine.module.named_parameters() if id(each) not in trained}
    if not left:
        return
    files = [
        torch.load(folder / _SHARED_MODEL_FILE.format(rank=rank), map_location="cpu", weights_only=False, mmap=True)
        for rank in range(num_saved)
    ]
    for name, parameter in left.items():
        if any(name not in (file.get(_FROZEN) or {}) for file in files):
            continue  # left out when it was saved, so it is what the model was built with
        whole = torch.cat([file[_FROZEN][name].view(-1) for file in files])
        share = parameter.ds_tensor
        first = share.ds_numel * dist.get_rank(parameter.ds_process_group)
        count = max(0, min(share.ds_numel, parameter.ds_numel - first))
        share.data.view(-1)[:count].copy_(whole[first : first + count])
