"""An optimizer's state on its way to a file and back: torch's own, and those of `torch.distributed.checkpoint`."""

from slivertune.core.saved_state.errors import StateMismatchError, check_header
from slivertune.core.saved_state.file import check_loadable, describe_damage, load_dictionary
from slivertune.core.saved_state.packed import is_initialising_step, pack_state, unpack_state

__all__ = [
    "StateMismatchError",
    "check_header",
    "check_loadable",
    "describe_damage",
    "is_initialising_step",
    "load_dictionary",
    "pack_state",
    "unpack_state",
]
