"""Models of images, of speech, and ModernBERT: the plan of a tiny one against a real run of it."""

import inspect
import re
from typing import Any

import pytest
from transformers import (
    Gemma3Config,
    Llama4Config,
    LlavaConfig,
    ModernBertConfig,
    MoonshineConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from slivertune.planning.answer import train_command
from slivertune.planning.batches import image_form, make_batch
from slivertune.planning.make import make_plan
from tests.helpers.plan_requests import paper_request
from tests.planning.real import PLACEHOLDER, run_for_real

# HiFT says that text reaches no image tower, and that Whisper's positions of sound are never trained.
pytestmark = pytest.mark.filterwarnings("ignore:no gradient reached group", "ignore:.* do not require gradients")

TOLERANCE = 0.03
TOWER: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GEMMA = Gemma3Config(
    text_config={**TEXT, "head_dim": 32, "sliding_window": 32, "model_type": "gemma3_text"},
    vision_config={
        **TOWER,
        "intermediate_size": 128,
        "model_type": "siglip_vision_model",
        "image_size": 56,
        "patch_size": 14,
        "vision_use_head": False,
    },
    mm_tokens_per_image=4,
    image_token_index=PLACEHOLDER,
    boi_token_index=PLACEHOLDER + 1,
    eoi_token_index=PLACEHOLDER + 2,
)
LLAMA_4 = Llama4Config(
    text_config={
        **TEXT,
        "head_dim": 32,
        "intermediate_size_mlp": 256,
        "num_local_experts": 4,
        "attention_chunk_size": 64,
        "model_type": "llama4_text",
    },
    vision_config={
        **TOWER,
        "intermediate_size": 256,
        "image_size": 56,
        "patch_size": 14,
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
    },
    image_token_index=PLACEHOLDER,
)
QWEN = Qwen2_5_VLConfig(
    text_config={
        **TEXT,
        "model_type": "qwen2_5_vl_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    },
    # One block of three attends to whole images, the others to windows of four by four patches.
    vision_config={
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 128,
        "fullatt_block_indexes": [1],
        "window_size": 56,
    },
    image_token_id=PLACEHOLDER,
    video_token_id=PLACEHOLDER + 1,
    vision_start_token_id=PLACEHOLDER + 2,
    vision_end_token_id=PLACEHOLDER + 3,
)
PLANS_WHISPER = pytest.mark.skipif(
    "self.training and self.layerdrop > 0.0" not in inspect.getsource(WhisperEncoder.forward),
    reason="Whisper of transformers 5.16 draws a number for each layer, also where it drops none",
)
WHISPER = WhisperConfig(
    **SPECIAL,
    vocab_size=512,
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    max_source_positions=100,
    max_target_positions=64,
    num_mel_bins=20,
    decoder_start_token_id=1,
)
MODERN_BERT = ModernBertConfig(
    **SPECIAL,
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=256,
    local_attention=32,
    cls_token_id=1,
    sep_token_id=2,
)
IMAGES: dict[str, Any] = {"task": "image_text", "images": 2}
TWO_SIZES: dict[str, Any] = {**IMAGES, "image_size": 112}
HIFT: dict[str, Any] = {
    "method": "hift",
    "precision": "mixed_hi",
    "gradient_checkpointing": True,
    "stream_bytes": 2**18,
}
DENSE: dict[str, Any] = {"method": "dense"}
LORA: dict[str, Any] = {"method": "lora"}
IN_BF16: dict[str, Any] = {"method": "dense", "precision": "bf16"}
TEXT_ALONE: dict[str, Any] = {"task": "image_text"}
SPEECH: dict[str, Any] = {"task": "speech"}
CLASSES: dict[str, Any] = {"task": "classification"}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        *(slow(GEMMA, {**task, **run}) for task in (TEXT_ALONE, IMAGES) for run in (DENSE, HIFT, LORA)),
        *(slow(LLAMA_4, {**task, **run}) for task in (TEXT_ALONE, IMAGES) for run in (DENSE, HIFT)),
        *(slow(QWEN, {**task, **run}) for task in (TEXT_ALONE, TWO_SIZES) for run in (IN_BF16, HIFT, LORA)),
        slow(QWEN, {**TWO_SIZES, **DENSE}),
        # In fp32 a CPU and a GPU take different kernels, whose results lie differently in memory.
        pytest.param(WHISPER, {**SPEECH, **IN_BF16}, marks=PLANS_WHISPER),
        pytest.param(WHISPER, {**SPEECH, **HIFT}, marks=[pytest.mark.slow, PLANS_WHISPER]),
        (MODERN_BERT, {**CLASSES, **LORA}),
        *(slow(MODERN_BERT, {**CLASSES, **run}) for run in (DENSE, HIFT)),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "-".join(map(str, value.values())),
)
def test_a_model_of_more_than_text_is_as_planned(config: PreTrainedConfig, settings: dict[str, Any]) -> None:
    request = paper_request(batch_size=2, seq_length=64, **settings)
    real = run_for_real(request, config).peak
    plan = make_plan(request, config)
    assert plan.peak_bytes == pytest.approx(real.device, rel=TOLERANCE), (plan.peak, real)


@pytest.mark.parametrize(
    ("config", "image_size", "num_tokens", "pixels"),
    [
        (GEMMA, None, 4, (1, 3, 56, 56)),
        (LLAMA_4, 56, 4, (1, 3, 56, 56)),
        (QWEN, 112, 16, (64, 3 * 2 * 14 * 14)),
        (Gemma3Config(vision_config={"image_size": 896}), None, 256, (1, 3, 896, 896)),
    ],
)
def test_an_image_takes_as_many_tokens_as_the_model_gives_it(
    config: PreTrainedConfig, image_size: int | None, num_tokens: int, pixels: tuple[int, ...]
) -> None:
    form = image_form(config, image_size)
    assert (form.num_tokens, form.pixels) == (num_tokens, pixels)


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        (GEMMA, {"image_size": 112}, "image_size=112: a 'gemma3' takes images of 56 pixels per side. Leave it out"),
        (QWEN, {}, "image_size=None: a 'qwen2_5_vl' takes images of any size, in steps of 28 pixels. Give"),
        (QWEN, {"image_size": 100}, "Give image_size as a multiple of 28"),
        (GEMMA, {"images": 13}, "images=13 take 4 tokens each, 65 with one text token per image, and seq_length=64"),
        (LlavaConfig(), {}, "images of a 'llava' have no plan. Use images=0 to plan its sequences of text"),
    ],
)
def test_images_that_do_not_fit_are_refused_with_the_way_out(
    config: PreTrainedConfig, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make_batch(paper_request(seq_length=64, **{**IMAGES, **settings}), config)


def test_sound_of_another_form_than_whispers_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("the sound that a 'moonshine' takes has no plan, only that")):
        make_batch(paper_request(task="speech"), MoonshineConfig())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"images": 1}, "images=1 with task='causal_lm', which has none. Use task='image_text', or images=0"),
        ({"task": "image_text", "image_size": 112}, "image_size=112 with images=0. Give images, their number per"),
        ({**IMAGES, "token_ratio": 0.3}, "token_ratio=0.3 selects tokens of text, and has no plan with images"),
    ],
)
def test_settings_that_contradict_the_task_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        paper_request(**settings)


def test_adapters_beside_a_router_that_returns_several_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"can't stand beside .*router \(Llama4Router\), .*\. Plan another method"):
        make_plan(paper_request(**TEXT_ALONE, **LORA), LLAMA_4)


def test_a_task_that_train_does_not_have_gets_no_command() -> None:
    command = train_command(paper_request(task="speech"), "openai/whisper-tiny")
    assert command.arguments is None
    assert "slivertune train has no task='speech'" in command.notes[0]
