"""The configuration of a model on the hub: from its cache, or by one small download."""

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

_CONFIG_NAME = "config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_PROBE_SECONDS = 10.0
"""How long one request may take that asks the hub whether it is there; a download would try for half a minute."""


def is_hub_id(name: str) -> bool:
    """Whether a name could be that of a model on the hub: `name` or `owner/name`."""
    return _HUB_ID.fullmatch(name) is not None


def download_config(model: str, *, ways_out: str) -> Path:
    """Find a model's `config.json`, in the hub's cache if it was downloaded before.

    Args:
        model: A hub id.
        ways_out: What else the user could name, for the error's end.

    Returns:
        The file.

    Raises:
        ValueError: If the hub has no such model, does not show it, or can't be reached.
    """
    cached = huggingface_hub.try_to_load_from_cache(model, _CONFIG_NAME)
    if isinstance(cached, str):
        return Path(cached)
    try:
        huggingface_hub.HfApi().model_info(model, timeout=_PROBE_SECONDS)
        return Path(huggingface_hub.hf_hub_download(model, _CONFIG_NAME))
    except GatedRepoError as error:
        raise ValueError(
            f"{model} is gated: accept its terms on the hub and log in with `hf auth login`. {ways_out}"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"there is no folder {model!r}, and the hub shows no model of that name (a private one needs "
            f"`hf auth login`). {ways_out}"
        ) from error
    except EntryNotFoundError as error:
        raise ValueError(f"{model} on the hub has no {_CONFIG_NAME}. {ways_out}") from error
    # Every transport has its own errors, and all say the same.
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"there is no folder {model!r}, and the hub can't be reached to look for a model of that name ({reason}). "
            f"{ways_out}"
        ) from error
