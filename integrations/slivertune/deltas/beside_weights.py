"""Files beside the weights of a merged checkpoint: its configuration, its tokenizer and processor, and all others.

They are the base's bytes, or those that the training saved. transformers would write them anew, with the defaults and
the names of its own version.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slivertune.deltas.adapter_folder import MODEL_CONFIG, read_json
from slivertune.deltas.plain_checkpoint import INDEX_FILE, PlainCheckpoint

TEMPLATE = "chat_template.jinja"
_OLD_TEMPLATE = "chat_template.json"
"""A processor's chat template, which transformers prefer to a `TEMPLATE` beside it."""
_VOCABULARY = re.compile(r"tokenizer\.|vocab|merges|.*\.(model|tiktoken|spm|bpe)$")
"""Pattern of file names without which there is no tokenizer."""
_OF_TOKENIZER = re.compile(rf"tokenizer|{_VOCABULARY.pattern}|special_tokens|added_tokens|.*\.jinja$")
_OF_PROCESSOR = re.compile(r"(preprocessor|video_preprocessor|processor)_config\.json$|chat_template\.json$")
_NOT_SETTINGS = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version"})
"""Keys of a configuration that loading changes, whatever the base says."""


def tokenizer_files(folder: Path) -> list[Path]:
    """List the files of a tokenizer, and those of its chat templates.

    Args:
        folder: Folder of a model, an adapter or deltas.

    Returns:
        Paths relative to the folder; none if it has no vocabulary.
    """
    files = [each.relative_to(folder) for each in sorted(folder.glob("*")) if each.is_file()]
    templates = [each.relative_to(folder) for each in sorted(folder.glob("additional_chat_templates/*.jinja"))]
    if not any(_VOCABULARY.match(each.name) for each in files):
        return []
    return [each for each in (*files, *templates) if _OF_TOKENIZER.match(each.name)]


def copy_others(base: PlainCheckpoint, trained: Path, output: Path) -> None:
    """Copy all files of a base but its weights and configuration. Files of the training replace its own.

    Args:
        base: The base.
        trained: Folder that the training saved, which may hold a tokenizer or a processor.
        output: Folder to write to. Files of the same names are replaced.
    """
    source = next((folder for folder in (trained, base.folder) if tokenizer_files(folder)), None)
    tokenizer = [] if source is None else tokenizer_files(source)
    shards = {each.shard.relative_to(base.folder) for each in base.tensors.values()}
    # The tokenizer may be that of the training, to which files of the base's would not belong.
    left_out = {*shards, Path(MODEL_CONFIG), Path(INDEX_FILE), *tokenizer_files(base.folder)}
    if source == trained and Path(TEMPLATE) in tokenizer:
        left_out.add(Path(_OLD_TEMPLATE))
    copy_files(base.folder, [each for each in base.files if each not in left_out], output)
    copy_files(trained, [Path(each.name) for each in trained.glob("*") if _OF_PROCESSOR.match(each.name)], output)
    if source is not None:
        copy_files(source, tokenizer, output)


def template_files(folder: Path) -> list[Path]:
    """List the files of a checkpoint with chat templates of their own, relative to the folder.

    Args:
        folder: Folder of the checkpoint.
    """
    named = [Path(name) for name in (TEMPLATE, _OLD_TEMPLATE) if (folder / name).is_file()]
    return named + [each.relative_to(folder) for each in sorted(folder.glob("additional_chat_templates/*.jinja"))]


def chat_template(folder: Path) -> str | None:
    """Return the chat template that transformers read from a folder. None if there is none.

    Args:
        folder: Folder of a tokenizer.
    """
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    found = read_json(path).get("chat_template") if path.is_file() else None
    return found if isinstance(found, str) else None


def copy_files(source: Path, files: Iterable[Path], target: Path) -> None:
    """Copy files to the same places in another folder.

    Args:
        source: Folder of the files.
        files: Paths relative to it.
        target: Folder to write to. Files of the same names are replaced.
    """
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file, target / file)


def write_config(base: Path, merged: Any, output: Path) -> None:
    """Write the base's configuration with the changes of a merged model.

    Args:
        base: Folder of the base.
        merged: Model of transformers whose configuration may differ, for instance in its classes or tied embeddings.
        output: Folder to write to.
    """
    own, config = read_json(base / MODEL_CONFIG), merged.config
    if own.get("model_type") != config.model_type:
        # A part of a larger model, such as the language model of one for images, has a configuration of its own.
        config.save_pretrained(output)
        return
    before = type(config).from_pretrained(base)
    _change(own, before.to_dict(), config.to_dict(), getattr(config, "sub_configs", {}))
    own["architectures"] = [type(merged).__name__]
    (output / MODEL_CONFIG).write_text(json.dumps(own, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _change(own: dict[str, Any], before: Mapping[str, Any], after: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Set the values of `own` that differ between two configurations, in their parts as well."""
    for name in differing_settings(before, after):
        if name in parts and isinstance(before.get(name), Mapping):
            # Older files have the values of a part beside the others.
            _change(own[name] if isinstance(own.get(name), dict) else own, before[name], after[name], {})
        else:
            own[name] = after[name]
        if name == "id2label":
            own.pop("num_labels", None)


def differing_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """List the settings that differ between two configurations, without those that any loading changes.

    Args:
        before: A configuration, by `to_dict` or from its file.
        after: Another one.
    """
    names = [name for name in after if name not in _NOT_SETTINGS and not name.startswith("_")]
    return [name for name in names if _plain(before.get(name)) != _plain(after[name])]


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, in which keys are strings, without the keys that any loading changes."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items() if key not in _NOT_SETTINGS}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
