"""Batch of one forward, as fake tensors: tokens, labels, and the inputs for images or speech."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from slivertune.core.torch_internals import outside_of_modes
from slivertune.planning.known_values import set_values
from slivertune.planning.request import PlanRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageForm:
    """Form in which a model takes an image."""

    num_tokens: int
    """Tokens of an image in its sequence."""
    pixels: tuple[int, ...]
    """Shape of the pixel values of one image. All images are concatenated along the first dimension."""
    grid: tuple[int, int, int] | None = None
    """Patches along time, height and width. None for models that do not take them."""


def make_batch(request: PlanRequest, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Make the inputs of one forward: unpadded tokens, labels, and images or sound if the task has them.

    Args:
        request: Run, with its task, batch size and sequence length.
        config: Configuration of the model.

    Returns:
        Arguments of the model's forward, by name; fake tensors inside `without_data`.

    Raises:
        ValueError: If images or sound can't be planned for this model, or if images take more tokens than a sequence.
    """
    ids = torch.zeros(request.batch_size, request.seq_length, dtype=torch.long)
    if request.task == "classification":
        return {"input_ids": ids, "labels": torch.zeros(request.batch_size, dtype=torch.long)}
    if request.task == "speech":
        return {"input_features": _sound(request, config), "labels": ids}
    batch = {"input_ids": ids, "labels": ids.clone()}
    if request.images:
        _add_images(batch, request, config)
    if request.task == "image_text" and config.model_type == "gemma3":
        # Tokens of one image attend to each other. Gemma 3 builds that mask from these inputs, for text alone as well.
        batch.setdefault("token_type_ids", torch.zeros_like(ids))
        batch["attention_mask"] = torch.ones_like(ids)
    return batch


def image_form(config: PreTrainedConfig, image_size: int | None) -> ImageForm:
    """Return the form in which a model takes an image.

    Args:
        config: Configuration of the model.
        image_size: Pixels along each side; None for the size in the configuration.

    Returns:
        Tokens and pixels of one image.

    Raises:
        ValueError: If images can't be planned for this kind of model, or if the size does not fit it.
    """
    find = _FORMS.get(config.model_type)
    if find is None:
        raise ValueError(
            f"images of a {config.model_type!r} have no plan. Use images=0 to plan its sequences of text, or a model "
            f"of type {', '.join(map(repr, _FORMS))}"
        )
    return find(config, image_size)


def _sound(request: PlanRequest, config: Any) -> torch.Tensor:
    if config.model_type != "whisper":
        raise ValueError(
            f"the sound that a {config.model_type!r} takes has no plan, only that of 'whisper', whose encoder takes a "
            "spectrogram of a fixed length. Plan a model of that type"
        )
    # Two convolutions precede the encoder's positions. One has stride 2, so the input is twice as long.
    shape = (request.batch_size, config.num_mel_bins, 2 * config.max_source_positions)
    return torch.empty(shape, dtype=_dtype(request))


def _add_images(batch: dict[str, torch.Tensor], request: PlanRequest, config: Any) -> None:
    form = image_form(config, request.image_size)
    # One token of text precedes each image. The places of images in a sequence change no size.
    num_tokens = request.images * (form.num_tokens + 1)
    if num_tokens > request.seq_length:
        raise ValueError(
            f"images={request.images} take {form.num_tokens} tokens each, {num_tokens} with one text token per image, "
            f"and seq_length={request.seq_length}. Lengthen the sequence, or use fewer or smaller images"
        )
    num_images = request.batch_size * request.images
    with outside_of_modes():
        kinds = torch.zeros(request.batch_size, request.seq_length, dtype=torch.long)
        kinds[:, :num_tokens] = 1
        kinds[:, : num_tokens : form.num_tokens + 1] = 0
        ids = kinds * config.image_token_id
    for name, values in (("input_ids", ids), (_KINDS_OF_TOKENS.get(config.model_type), kinds)):
        if name is not None:
            batch[name] = set_values(torch.zeros(values.shape, dtype=torch.long), values)
    first, *others = form.pixels
    batch["pixel_values"] = torch.empty(num_images * first, *others, dtype=_dtype(request))
    if form.grid is not None:
        with outside_of_modes():
            grids = torch.tensor([form.grid] * num_images)
        batch["image_grid_thw"] = set_values(torch.zeros(grids.shape, dtype=torch.long), grids)
        # Positions along time, height and width. The model would compute them in Python, which a plan can't follow.
        batch["position_ids"] = torch.zeros(3, request.batch_size, request.seq_length, dtype=torch.long)


def _dtype(request: PlanRequest) -> torch.dtype:
    return torch.bfloat16 if request.has_bf16_weights else torch.float32


def _fixed_size(config: Any, image_size: int | None) -> int:
    """Return the only image size that a model takes, in pixels per side."""
    size: int = config.vision_config.image_size
    if image_size not in (None, size):
        raise ValueError(
            f"image_size={image_size}: a {config.model_type!r} takes images of {size} pixels per side. Leave it out"
        )
    return size


def _gemma3(config: Any, image_size: int | None) -> ImageForm:
    size = _fixed_size(config, image_size)
    return ImageForm(num_tokens=config.mm_tokens_per_image, pixels=(1, config.vision_config.num_channels, size, size))


def _llama4(config: Any, image_size: int | None) -> ImageForm:
    """Return the form of one tile (a large image has several tiles, and each counts as an image)."""
    vision, size = config.vision_config, _fixed_size(config, image_size)
    num_patches = (size // vision.patch_size) ** 2
    return ImageForm(
        num_tokens=int(num_patches * vision.pixel_shuffle_ratio**2), pixels=(1, vision.num_channels, size, size)
    )


def _qwen2_5_vl(config: Any, image_size: int | None) -> ImageForm:
    vision = config.vision_config
    step = vision.patch_size * vision.spatial_merge_size
    if image_size is None or image_size % step:
        raise ValueError(
            f"image_size={image_size}: a {config.model_type!r} takes images of any size, in steps of {step} pixels. "
            f"Give image_size as a multiple of {step}"
        )
    side = image_size // vision.patch_size
    numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return ImageForm(
        num_tokens=(side // vision.spatial_merge_size) ** 2, pixels=(side**2, numbers), grid=(1, side, side)
    )


_FORMS: dict[str, Callable[[Any, int | None], ImageForm]] = {
    "gemma3": _gemma3,
    "llama4": _llama4,
    "qwen2_5_vl": _qwen2_5_vl,
}
"""Functions that return the form of an image, by `model_type`."""
_KINDS_OF_TOKENS = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}
"""Names of the input that marks the tokens of images, by `model_type`, for models that take one."""
