"""Model of the embedded default: a byte-level Llama trained on this machine, on Python's own docstrings.

Its tokenizer has 256 bytes and two special tokens: it reads any text in any language, and nothing is downloaded.

The first run trains it (`BaseRecipe`, one to two minutes on two cores) and keeps it in the
user's cache. Later runs of the same recipe under the same Python load it from there.
"""

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from slivertune.core import atomic
from slivertune.core.file_locks import wait_for_lock
from slivertune.core.manifest import find_damage, write_manifest
from slivertune.training.display import make_progress
from slivertune.training.embedded.corpus import collect_docstrings

_PAD_TOKEN = "<|pad|>"
_END_TOKEN = "<|end|>"
PAD_ID = 256
END_ID = 257
VOCABULARY_SIZE = 258
"""Number of tokens: 256 bytes, the padding and the end of a text."""

_LAYOUT_VERSION = 2
"""Version of this file. Raise it if the same recipe would make another model, so that older caches are not reused."""
NUM_LINES = 5
"""Number of loss lines printed while the base model is trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseRecipe:
    """Settings that determine the base model. Equal recipes under one Python share one cached model.

    Raises:
        ValueError: If a size is not positive or the width does not divide into heads.
    """

    hidden_size: int = 192
    """Width of the residual stream."""
    intermediate_size: int = 512
    """Width inside the feed-forward part."""
    num_layers: int = 6
    """Number of decoder blocks."""
    num_heads: int = 6
    """Attention heads per block."""
    max_positions: int = 1024
    """Maximum length of a sequence, in bytes."""
    initializer_range: float = 0.06
    """Standard deviation of the initial weights, near 1 / sqrt(width). The library's 0.02 is for wider models."""
    sequence_length: int = 128
    """Bytes per training window."""
    batch_size: int = 4
    """Training windows per update."""
    num_steps: int = 700
    """Number of updates."""
    learning_rate: float = 2e-3
    """Learning rate of AdamW after warm-up, which decays as a cosine to a tenth of this value."""
    weight_decay: float = 0.05
    """Decoupled weight decay of AdamW."""
    corpus_bytes: int | None = None
    """Maximum number of bytes of docstrings to train on. None for all."""
    seed: int = 0
    """Seed of the initial weights and of the windows."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "seed" and value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size={self.hidden_size} must be a multiple of num_heads={self.num_heads}")

    def key(self) -> str:
        """Return the name of this recipe's cached model. It changes with any field, and with the version of Python."""
        parts = {**asdict(self), "layout": _LAYOUT_VERSION, "python": platform.python_version()}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


BASE_RECIPE = BaseRecipe()
"""Recipe of the embedded default's model."""

StepReport: TypeAlias = Callable[[int, float], None]
"""Callback after each update of the base model, with the number of updates done and the update's loss in nats."""


def base_model_folder(recipe: BaseRecipe, cache: Path | None = None) -> Path:
    """Return the folder of a recipe's base model, whether it exists yet or not.

    Args:
        recipe: Recipe of the model.
        cache: Folder of all base models. The default is `slivertune/base_models` in the user's cache folder
            (`XDG_CACHE_HOME`, or `~/.cache`).
    """
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "slivertune" / "base_models"
    return cache / recipe.key()


def prepare_base_model(recipe: BaseRecipe, console: Console, *, bar: bool) -> Path:
    """Find or train the base model, and print its folder.

    Args:
        recipe: Recipe of the model.
        console: Console to write to.
        bar: Whether to draw a progress bar.

    Returns:
        Folder of the model and its tokenizer.

    Raises:
        RuntimeError: If this Python has nothing to train it on.
    """
    folder = base_model_folder(recipe)
    say = partial(console.print, highlight=False, soft_wrap=True)
    if folder.is_dir():
        damage = find_damage(folder)
        if damage is None:
            say(f"base model: {folder}, from an earlier run")
            return folder
        say(f"base model: {folder} is damaged ({damage}) and is trained again")
    say(
        f"base model: training it on the docstrings of Python's standard library, {recipe.num_steps} updates. It is "
        f"saved in {folder} for later runs"
    )
    with make_progress(console, enabled=bar) as progress:
        task = progress.add_task("base model", total=recipe.num_steps, status="")

        def report(step: int, loss: float) -> None:
            progress.update(task, completed=step)
            if step % max(1, recipe.num_steps // NUM_LINES) == 0:
                progress.console.print(f"step {step:>4}/{recipe.num_steps}  loss {loss:.3f}", highlight=False)

        return ensure_base_model(recipe, report=report)


def ensure_base_model(recipe: BaseRecipe, *, cache: Path | None = None, report: StepReport | None = None) -> Path:
    """Find the base model, or train and save it. A damaged model is trained again.

    Args:
        recipe: Recipe of the model.
        cache: Folder of all base models; see `base_model_folder`.
        report: Callback after each update, if the model has to be trained.

    Returns:
        Folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    Raises:
        RuntimeError: If this Python comes without the sources of its docstrings.
    """
    folder = base_model_folder(recipe, cache)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A second run started meanwhile gets the first one's model. The lock is released when its process ends.
    with folder.with_suffix(".lock").open("w") as lock:
        wait_for_lock(lock)
        if not folder.is_dir() or find_damage(folder) is not None:
            model = train_base_model(recipe, collect_docstrings(), report or (lambda step, loss: None))
            save_base_model(model, recipe, folder)
    return folder


def save_base_model(model: LlamaForCausalLM, recipe: BaseRecipe, folder: Path) -> None:
    """Save a base model with its tokenizer and recipe, atomically.

    Args:
        model: Model from `train_base_model`.
        recipe: Recipe of the model.
        folder: Folder to write.
    """
    with atomic.atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        make_byte_tokenizer(recipe.max_positions).save_pretrained(temporary)
        atomic.write_json(temporary / "recipe.json", {**asdict(recipe), "python": platform.python_version()})
        write_manifest(temporary)


def train_base_model(recipe: BaseRecipe, texts: list[str], report: StepReport) -> LlamaForCausalLM:
    """Train a byte-level Llama from scratch on the CPU, with every parameter in fp32.

    Args:
        recipe: Sizes and schedule.
        texts: Documents. Each is followed by an end token.
        report: Callback after each update, with the number of updates done and the loss.

    Returns:
        The model, in evaluation mode. The caller's random state is left as it was.

    Raises:
        RuntimeError: If the texts are shorter than one window.
    """
    tokens = _as_tokens(texts, recipe.corpus_bytes)
    if len(tokens) <= recipe.sequence_length:
        raise RuntimeError(
            f"{len(tokens)} bytes of docstrings are too few for windows of {recipe.sequence_length}. "
            "Name a model with --model_name_or_path"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model: LlamaForCausalLM = LlamaForCausalLM(_llama_config(recipe))
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=recipe.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=recipe.weight_decay,
        )
        schedule = LambdaLR(optimizer, lambda step: _warm_up_and_cosine(step, recipe.num_steps))
        model.train()
        for step in range(1, recipe.num_steps + 1):
            starts = torch.randint(0, len(tokens) - recipe.sequence_length, (recipe.batch_size, 1))
            windows = tokens[starts + torch.arange(recipe.sequence_length)]
            loss = model(input_ids=windows, labels=windows).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            report(step, loss.item())
    model.train(False)
    return model


def make_byte_tokenizer(max_length: int | None) -> PreTrainedTokenizerFast:
    """Build the tokenizer.

    Args:
        max_length: Maximum length of a sequence, in bytes; None for no limit.

    Returns:
        A tokenizer with one token per byte of UTF-8. `AutoTokenizer` loads it if it is saved beside a model.
    """
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, _PAD_TOKEN: PAD_ID, _END_TOKEN: END_ID}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=_PAD_TOKEN,
        eos_token=_END_TOKEN,
        clean_up_tokenization_spaces=False,
        **({} if max_length is None else {"model_max_length": max_length}),
    )


def _llama_config(recipe: BaseRecipe) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        max_position_embeddings=recipe.max_positions,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=END_ID,
    )


def _as_tokens(texts: list[str], limit: int | None) -> torch.Tensor:
    """Concatenate all documents to int64 token ids, shape (bytes + documents,), up to a limit."""
    encoded = make_byte_tokenizer(None)(texts)["input_ids"]
    return torch.tensor([token for ids in encoded for token in (*ids, END_ID)][:limit])


def _warm_up_and_cosine(step: int, num_steps: int) -> float:
    warm_up = max(1, num_steps // 20)
    return min(1.0, (step + 1) / warm_up) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))
