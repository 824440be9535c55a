"""Move an optimizer's state to a file and back: torch's own format, and those of `torch.distributed.checkpoint`.

Files of `torch.save` are read as tensors and plain containers. Nothing is executed, and errors name the damage.

The state has a packed form for `torch.distributed.checkpoint` (`get_state_dict`, `set_state_dict`). These functions
know states by parameter alone, keep no other keys, drop the state of parameters that are frozen when it is loaded, and
fill in place the state that the loading optimizer has already. HiFT's and SFT's state is known by name, most of it is
of frozen parameters, and its size depends on the step. So it travels whole, as one value of the first param group: the
bytes of `torch.save`, which `torch.load(weights_only=True)` reads. During a save, host memory holds them beside the
state.

torch announces by itself that it will ask for the state. It finds `optimizer.state` empty and makes a step, with rate 0
and zero gradients. Such a step changes nothing, and the `state_dict` that follows is packed.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

COUNT_LIMIT = 2**62
"""Upper bound of every count in a saved state, exclusive."""
_OF_OTHER_CONTENTS = (
    AttributeError,
    EOFError,
    LookupError,
    OverflowError,
    RecursionError,
    SafetensorError,
    TypeError,
    UnicodeError,
)
_KEY = "slivertune"
_UNFLATTENABLE = "flatten_optimizer_state_dict can't carry this optimizer"


class StateMismatchError(ValueError):
    """A saved state of another model, grouping, selection or optimizer, or a damaged one."""


def check_header(saved: Mapping[str, Any], method: str, title: str, versions: Sequence[int]) -> None:
    """Check that a state belongs to a method and has a known format, before anything of it is used.

    Args:
        saved: The state.
        method: Key of its header.
        title: Name of the method in messages.
        versions: Versions of the formats that can be read.

    Raises:
        StateMismatchError: If a part is missing or damaged. The message names it.
    """
    for key in ("state", "param_groups", method):
        if key not in saved:
            raise StateMismatchError(
                f"this is no state of {title}: it has no {key!r}. Save one with optimizer.state_dict()"
            )
    header = saved[method]
    if type(header.get("version")) is not int or header["version"] not in versions:
        raise StateMismatchError(
            f"the saved state has version {header.get('version')!r}, this library reads "
            f"{' and '.join(map(str, versions))}. Continue with the version that wrote it"
        )
    updates = header.get("updates")
    if not is_count(updates):
        raise StateMismatchError(f"the saved state is damaged: updates={str(updates)[:60]}. Use another checkpoint")


def is_count(value: object) -> bool:
    """Return whether a value counts something. True and False do not."""
    return type(value) is int and 0 <= value < COUNT_LIMIT


def describe_damage(place: object, problem: str) -> str:
    """Say that a saved state can't be read, and what to do.

    Args:
        place: The file or folder.
        problem: Description of the damage.

    Returns:
        The text of an error.
    """
    return (
        f"{place} holds no state that can be read ({problem}): it is damaged or was not written by slivertune. Use "
        "another checkpoint"
    )


@contextmanager
def refuse_damage(place: object) -> Iterator[None]:
    """Turn errors from reading foreign contents into a ValueError that names their place.

    Args:
        place: File or state that is read.

    Raises:
        StateMismatchError: In place of the errors of torch, safetensors and Python on such contents.
    """
    try:
        yield
    except _OF_OTHER_CONTENTS as error:
        raise StateMismatchError(describe_damage(place, f"{type(error).__name__}: {str(error)[:200]}")) from error


def load_dictionary(file: Path | io.BytesIO, *, name: str | None = None, mmap: bool = False) -> dict[str, Any]:
    """Read a dictionary of tensors and plain containers onto the host.

    Args:
        file: File that `torch.save` wrote.
        name: Name of the file in errors. None means its path.
        mmap: Whether tensors are read when they are needed.

    Raises:
        ValueError: If it is missing, damaged or holds something else, whatever error torch's readers raise.
    """
    try:
        value = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        if not isinstance(value, dict):
            raise TypeError(f"a {type(value).__name__} instead of a dictionary")
    except MemoryError:
        raise
    # The readers of pickles and of zip archives raise any kind of error on damaged bytes.
    except Exception as error:
        raise ValueError(describe_damage(name or file, f"{type(error).__name__}: {str(error)[:200]}")) from error
    return value


def check_loadable(file: Path | io.BytesIO) -> None:
    """Refuse a file that `torch.load(weights_only=True)` would not read back, while the state can still be saved.

    Args:
        file: File that `torch.save` has written.

    Raises:
        ValueError: If it holds objects of other classes. The message names the classes.
    """
    unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if unknown:
        raise ValueError(
            f"the base optimizer's state holds objects of {', '.join(unknown)}, which torch does not load unless they "
            f"are allowed. Call torch.serialization.add_safe_globals([...]) with them when the run starts"
        )


def is_initialising_step(param_groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a step looks like torch's own, which fills an optimizer's state: rate 0, gradients all zero.

    Gradients are only read if every rate is 0.

    Args:
        param_groups: Param groups of the optimizer.
    """
    rates = [group.get("lr", 0.0) for group in param_groups]
    if any(rate is not None and float(rate) != 0.0 for rate in rates):
        return False
    gradients = [parameter.grad for group in param_groups for parameter in group["params"]]
    return any(g is not None for g in gradients) and not any(g is not None and bool(g.any()) for g in gradients)


def pack_state(whole: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]], updates: int) -> dict[str, Any]:
    """Bring a state into torch's own form.

    Args:
        whole: The state, in plain containers and tensors.
        param_groups: Param groups of the optimizer. torch numbers their parameters in this order.
        updates: Number of updates applied so far.

    Returns:
        `state` and `param_groups`, in which the parameters are numbers.

    Raises:
        ValueError: If the state holds objects that could not be loaded again.
    """
    file = io.BytesIO()
    torch.save(dict(whole), file)
    file.seek(0)
    check_loadable(file)
    state: dict[int, Any] = {}
    groups = []
    for group in param_groups:
        numbers = range(len(state), len(state) + len(group["params"]))
        for number, parameter in zip(numbers, group["params"], strict=True):
            # Each parameter has an entry, or torch misses it. It has a dimension, or torch can't tell the device. And
            # it holds an object that torch refuses to flatten, since flattening would lose the state in silence.
            marker = torch.tensor([updates], device=parameter.device)
            state[number] = {f"{_KEY}_updates": marker, _KEY: _UNFLATTENABLE}
        groups.append({**group, "params": list(numbers)})
    groups[0][_KEY] = file.getvalue()
    return {"state": state, "param_groups": groups}


def unpack_state(state_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state that `pack_state` packed. None for any other state.

    Args:
        state_dict: State as it comes from torch, its parameters by name or number.

    Raises:
        ValueError: If the packed bytes are lost.
    """
    groups, states = state_dict.get("param_groups"), state_dict.get("state")
    first = groups[0] if isinstance(groups, (list, tuple)) and groups else None
    packed = first.get(_KEY) if isinstance(first, Mapping) else None
    if isinstance(packed, bytes):
        return load_dictionary(io.BytesIO(packed), name="the state packed for torch.distributed.checkpoint")
    values_of_each = states.values() if isinstance(states, Mapping) else ()
    if any(_KEY in values for values in values_of_each if isinstance(values, Mapping)):
        raise ValueError(
            "the saved state has lost the values of its first param group. Save and load it by get_state_dict and "
            "set_state_dict without flatten_optimizer_state_dict"
        )
    return None
