"""The batch of one forward, without data: tokens, and what stands beside them for images and speech."""

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
    """How a model takes images."""

    num_tokens: int
    """Tokens that stand for an image in its sequence."""
    pixels: tuple[int, ...]
    """Shape of what the model is given of one image; all images are joined along the first dimension."""
    grid: tuple[int, int, int] | None = None
    """Patches along time, height and width, for models that take them."""


def make_batch(request: PlanRequest, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Tokens and labels of one forward, and images or sound if the task has any; no sequence is padded.

    Args:
        request: Task, batch and length.
        config: The model's configuration.

    Returns:
        Arguments of the model's forward, among tensors without data.

    Raises:
        ValueError: If the images have no plan, or more tokens than the sequence.
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
        # Its mask shows all of an image to each of its tokens, and is made of this, for sequences of text as well.
        batch.setdefault("token_type_ids", torch.zeros_like(ids))
        batch["attention_mask"] = torch.ones_like(ids)
    return batch


def image_form(config: PreTrainedConfig, image_size: int | None) -> ImageForm:
    """How a model takes an image.

    Args:
        config: The model's configuration.
        image_size: Pixels along each side; None for what the configuration says.

    Returns:
        Its tokens and pixels.

    Raises:
        ValueError: If this kind of model has no plan with images, or the size does not fit it.
    """
    find = _FORMS.get(config.model_type)
    if find is None:
        raise ValueError(
            f"images of a {config.model_type!r} have no plan; images=0 plans its sequences of text. Those of "
            f"{', '.join(map(repr, _FORMS))} have one"
        )
    return find(config, image_size)


def _sound(request: PlanRequest, config: Any) -> torch.Tensor:
    if config.model_type != "whisper":
        raise ValueError(
            f"the sound that a {config.model_type!r} takes has no plan; that of 'whisper' has one, whose encoder takes "
            "a spectrogram of a fixed length"
        )
    # Two convolutions, one of stride 2, come before the encoder's positions.
    shape = (request.batch_size, config.num_mel_bins, 2 * config.max_source_positions)
    return torch.empty(shape, dtype=_dtype(request))


def _add_images(batch: dict[str, torch.Tensor], request: PlanRequest, config: Any) -> None:
    form = image_form(config, request.image_size)
    # Tokens of text stand between images; where they stand in a sequence changes no size.
    num_tokens = request.images * (form.num_tokens + 1)
    if num_tokens > request.seq_length:
        raise ValueError(
            f"images={request.images} take {form.num_tokens} tokens each, {num_tokens} with one of text beside each, "
            f"and seq_length={request.seq_length}; lengthen the sequence, or take fewer or smaller images"
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
        # Along time, height and width; the model would compute them from lists of numbers, which a plan can't follow.
        batch["position_ids"] = torch.zeros(3, request.batch_size, request.seq_length, dtype=torch.long)


def _dtype(request: PlanRequest) -> torch.dtype:
    return torch.bfloat16 if request.has_bf16_weights else torch.float32


def _fixed_size(config: Any, image_size: int | None) -> int:
    """The side of an image in pixels, of a model that takes no other."""
    size: int = config.vision_config.image_size
    if image_size not in (None, size):
        raise ValueError(
            f"image_size={image_size}: a {config.model_type!r} takes images of {size} pixels a side; leave it out"
        )
    return size


def _gemma3(config: Any, image_size: int | None) -> ImageForm:
    size = _fixed_size(config, image_size)
    return ImageForm(num_tokens=config.mm_tokens_per_image, pixels=(1, config.vision_config.num_channels, size, size))


def _llama4(config: Any, image_size: int | None) -> ImageForm:
    """One tile; a large image has several, each as an image of its own."""
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
            f"image_size={image_size}: a {config.model_type!r} takes images of any size, in steps of {step} pixels; "
            f"give image_size as a multiple of {step}"
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
"""By `model_type`."""
_KINDS_OF_TOKENS = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}
"""The argument that says which tokens stand for an image, of models that ask for it."""
