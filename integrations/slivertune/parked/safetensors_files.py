"""The safetensors files of a checkpoint in a folder."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME


def file_by_tensor(folder: Path) -> Mapping[str, str]:
    """Return the file's name of each tensor of a checkpoint.

    Args:
        folder: Folder of the checkpoint.

    Raises:
        FileNotFoundError: If there are no safetensors.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        weight_map: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return weight_map
    if not (folder / SAFE_WEIGHTS_NAME).is_file():
        raise FileNotFoundError(
            f"{folder} holds neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}. Save the model by "
            "save_pretrained(folder) first"
        )
    with safe_open(folder / SAFE_WEIGHTS_NAME, "pt") as file:
        return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
