"""Real runs of tiny models on the CPU, by the library's plain use, counted by its ledger."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import bitsandbytes
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    LlamaConfig,
    PreTrainedConfig,
    RobertaConfig,
)

from slivertune.chunked_loss import attach_chunked_cross_entropy
from slivertune.core.adapter_casts import skip_needless_casts
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.copy_streams import CopyStreams, Direction, Event, streams_made_by
from slivertune.core.kept_activations import keep_activations
from slivertune.core.ledger import Ledger, claim
from slivertune.core.offloaded_activations import offload_activations
from slivertune.core.token_tiles import tile_tokens
from slivertune.hift import HiFT, HiFTConfig
from slivertune.parked import park_layers
from slivertune.planning.request import PlanRequest
from slivertune.sft import SFT, SFTConfig, adam, largest
from slivertune.tokentune import TokenTune

LLAMA = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=128,
)
# No dropout: on the CPU its noise takes four bytes an element, on a GPU one.
ROBERTA = RobertaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=130,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)

PLACEHOLDER = 500
"""The token that stands for an image in the tiny models; those above it have other meanings."""
MODELS: dict[str, Any] = {
    "causal_lm": AutoModelForCausalLM,
    "classification": AutoModelForSequenceClassification,
    "image_text": AutoModelForImageTextToText,
    "speech": AutoModelForSpeechSeq2Seq,
}

LEFT_OUT = {
    "mamba": ["conv1d", "out_proj", "x_proj", "dt_proj"],
    **{kind: ["conv1d", "out_proj"] for kind in ("falcon_h1", "mamba2", "nemotron_h")},
}
"""Linear layers that can't have an adapter, by type of model."""


def real_model(request: PlanRequest, config: PreTrainedConfig) -> Any:
    """A model with weights, as a script of the library would set it up."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if request.precision in ("bf16", "mixed_hi") else torch.float32
    model = MODELS[request.task].from_config(config, dtype=dtype)
    model.config.use_cache = model.config.get_text_config().use_cache = False
    if request.load_in_4bit:
        quantise(model)
    if request.recipe == "peft-8bit":
        quantise_to_int8(model)
    if request.recipe == "peft-8bit" or (request.recipe is not None and request.load_in_4bit):
        from peft import prepare_model_for_kbit_training

        model.is_loaded_in_4bit = True
        with warnings.catch_warnings():
            # PEFT 0.21 calls it by the name that transformers 5.23 retires.
            warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is deprecated", FutureWarning)
            model = prepare_model_for_kbit_training(
                model, request.gradient_checkpointing, gradient_checkpointing_kwargs={"use_reentrant": False}
            )
    elif request.gradient_checkpointing:
        enable_checkpointing(model, {"use_reentrant": False})
    if request.method == "lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            task_type={"classification": "SEQ_CLS", "speech": None}.get(request.task, "CAUSAL_LM"),
            r=request.lora_rank,
            lora_alpha=32,
            target_modules="all-linear",
            exclude_modules=LEFT_OUT.get(model.config.model_type),
        )
        with warnings.catch_warnings():
            # PEFT 0.21 asks by the name that transformers 5.23 retires.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            model = get_peft_model(model, adapters)
        if request.recipe is None:
            skip_needless_casts(model)
    return model.train()


def attach_hooks(request: PlanRequest, model: Any) -> None:
    """Put the selection of tokens and the chunked loss on a model that has its optimizer, and let blocks keep."""
    if request.keep_activations:
        keep_activations(model, request.keep_activations)
    if request.offload_activations:
        offload_activations(model)
    if request.token_tile_size is not None:
        tile_tokens(model, request.token_tile_size)
    if request.token_ratio is not None:
        TokenTune(ratio=request.token_ratio).attach(model)
    if request.task in ("causal_lm", "image_text") and request.chunked_cross_entropy and request.recipe is None:
        attach_chunked_cross_entropy(model)


def quantise(model: Any) -> None:
    """Put the linear layers of the blocks into bitsandbytes' NF4."""
    from bitsandbytes.nn import Linear4bit

    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                layer = Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=False,
                    compute_dtype=child.weight.dtype,
                    quant_type="nf4",
                )
                layer.weight.data.copy_(child.weight.data)
                layer.support_avx512bf16_for_cpu = False
                setattr(parent, name, layer.to("cpu"))


def quantise_to_int8(model: Any) -> None:
    """Put the linear layers of the blocks into bitsandbytes' LLM.int8."""
    from bitsandbytes.nn import Linear8bitLt

    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                layer = Linear8bitLt(
                    child.in_features, child.out_features, bias=False, has_fp16_weights=False, threshold=6.0
                )
                layer.load_state_dict(child.state_dict())
                setattr(parent, name, layer.to("cpu"))


def real_batch(request: PlanRequest, config: Any) -> dict[str, torch.Tensor]:
    shape = request.batch_size, request.seq_length
    if request.task == "image_text":
        return batch_of_images(request, config)
    ids = torch.randint(2, config.vocab_size, shape)
    if request.task == "speech":
        dtype = torch.bfloat16 if request.precision in ("bf16", "mixed_hi") else torch.float32
        sound = torch.randn(request.batch_size, config.num_mel_bins, 2 * config.max_source_positions, dtype=dtype)
        return {"input_features": sound, "labels": ids}
    return {"input_ids": ids, "labels": ids if request.task == "causal_lm" else ids[:, 0] % 2}


def batch_of_images(request: PlanRequest, config: Any) -> dict[str, torch.Tensor]:
    """Images as a model's processor cuts them, three tokens between two; those of text come before `PLACEHOLDER`."""
    ids = torch.randint(2, PLACEHOLDER, (request.batch_size, request.seq_length))
    batch, num_images = {"input_ids": ids, "labels": ids.clone()}, request.batch_size * request.images
    kinds = torch.zeros_like(ids)
    if request.images:
        dtype = torch.bfloat16 if request.precision in ("bf16", "mixed_hi") else torch.float32
        vision = config.vision_config
        if config.model_type == "qwen2_5_vl":
            side = (request.image_size or 0) // 14
            num_tokens = side**2 // 4
            batch["pixel_values"] = torch.randn(num_images * side**2, 3 * 2 * 14 * 14, dtype=dtype)
            batch["image_grid_thw"] = torch.tensor([[1, side, side]] * num_images)
        else:
            num_tokens = 4
            batch["pixel_values"] = torch.randn(num_images, 3, vision.image_size, vision.image_size, dtype=dtype)
        for index in range(request.images):
            kinds[:, index * (num_tokens + 3) :][:, :num_tokens] = 1
        ids[kinds == 1] = config.image_token_id
    if config.model_type == "gemma3":
        batch |= {"token_type_ids": kinds, "attention_mask": torch.ones_like(ids)}
    elif request.images and config.model_type == "qwen2_5_vl":
        batch["mm_token_type_ids"] = kinds
    return batch


def base_optimizer(request: PlanRequest) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    if request.optimizer == "adamw":
        return torch.optim.AdamW, {"lr": 1e-3, "fused": True}
    if request.optimizer == "adagrad":
        return torch.optim.Adagrad, {"lr": 1e-3, "foreach": request.kernels == "gpu"}
    if request.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor, {"lr": 1e-3, "scale_parameter": False, "relative_step": False}
    if request.optimizer == "adamw8bit":
        return bitsandbytes.optim.AdamW8bit, {"lr": 1e-3}
    momentum = 0.9 if request.optimizer == "sgd_momentum" else 0.0
    return torch.optim.SGD, {"lr": 1e-3, "momentum": momentum, "foreach": request.kernels == "gpu"}


def real_optimizer(request: PlanRequest, model: nn.Module) -> torch.optim.Optimizer:
    if request.method == "sft":
        return SFT(
            model,
            config=SFTConfig(
                density=request.density,
                selection=request.selection,
                estimation_steps=request.estimation_steps,
                reselection_interval=request.reselection_interval,
                replacement_rate=request.replacement_rate,
                redistribute=request.redistribute,
                form="layer" if request.parks else "auto",
            ),
            lr=1e-3,
            total_steps=1000,
        )
    optimizer_class, arguments = base_optimizer(request)
    if request.optimizer == "adamw8bit":
        manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, nn.Embedding):  # as the Trainer
                manager.register_module_override(module, "weight", {"optim_bits": 32})
    if request.method != "hift":
        return optimizer_class([each for each in model.parameters() if each.requires_grad], **arguments)
    return HiFT(
        model,
        optimizer_class,
        config=HiFTConfig.paper(
            layers_per_group=request.layers_per_group,
            steps_per_group=request.steps_per_group,
            state=request.state,
            # What fp32 weights don't need, and ZeRO keeps for all.
            master="fp32" if request.precision in ("fp32", "mixed") else request.master_kind,
            stream_bytes=request.stream_bytes,
            gradients=request.gradients,
            inactive=request.inactive,
            waiting=request.waiting,
            weights=request.weights,
            **_budget(request),
        ),
        **arguments,
    )


def _budget(request: PlanRequest) -> dict[str, Any]:
    if request.device_bytes is not None:
        return {"device_bytes": request.device_bytes}
    return {"resident_bytes": request.resident_bytes or 0, "prefetch_bytes": request.prefetch_bytes or 0}


class StreamsWithEvents(CopyStreams):
    """As on a GPU, where a copy's end is an event, and what it reads is kept until the computation waits for that."""

    def record(self, direction: Direction | None = None) -> Event:
        return (direction,)

    def compute_after(self, event: Event) -> None:
        assert event is None or isinstance(event, tuple)

    def wait_on_host(self, event: Event) -> None:
        assert event is None or isinstance(event, tuple)


def run_for_real(
    request: PlanRequest, config: PreTrainedConfig, *, num_steps: int | None = None, first: int = 0
) -> Ledger:
    """What a real run took.

    Args:
        request: The run.
        config: The model.
        num_steps: Updates; None for two of HiFT's cycles, or three updates of any other method.
        first: The first update that counts.

    Returns:
        The ledger that counted it.
    """
    model, batch = real_model(request, config), real_batch(request, config)
    streams = streams_made_by(StreamsWithEvents) if request.kernels == "gpu" else nullcontext()
    products = int8_products_of_a_gpu() if request.recipe == "peft-8bit" else nullcontext()
    overrides = mock.patch.object(bitsandbytes.optim.GlobalOptimManager, "_instance", None)
    with streams, searched_as_on_a_gpu(), products, overrides:
        return _counted(request, model, batch, num_steps, first)


def _is_nowhere(mask: torch.Tensor) -> bool:
    return False


def int8_products_of_a_gpu() -> AbstractContextManager[Any]:
    """bitsandbytes' products in int8, in place of those by a dense copy of the weight that it makes on a CPU."""
    from bitsandbytes.autograd import _functions

    return mock.patch.object(_functions, "MatMul8bitFp", _functions.MatMul8bitLt)


def searched_as_on_a_gpu() -> AbstractContextManager[Any]:
    """SFT's search as plans have it: of a GPU, where it has the same sizes whatever the values are."""
    return mock.patch.object(largest, "_is_on_host", _is_nowhere)  # a Mock with a return value would keep each mask


def _counted(
    request: PlanRequest, model: nn.Module, batch: dict[str, torch.Tensor], num_steps: int | None, first: int
) -> Ledger:
    optimizer = real_optimizer(request, model)
    if request.parks and request.method != "hift":
        form = request.waiting or "exact"
        park_layers(model, form=form, place=request.weights, resident_bytes=request.resident_bytes or 0)
    attach_hooks(request, model)
    # SFT's tables of bias corrections outlive a run; here they are to be counted in each.
    adam._corrections.cache_clear()
    if num_steps is None:
        num_steps = 2 * optimizer.cycle_length if isinstance(optimizer, HiFT) else 3
    with Ledger(model) as ledger:
        if isinstance(optimizer, SFT):
            optimizer.claim_state()
        _claim_scales(model, ledger)
        for step in range(num_steps):
            if step == first:
                ledger.reset_peak()
            for index in range(request.gradient_accumulation_steps):
                autocast: Any = nullcontext()
                if request.has_autocast:
                    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
                with autocast:
                    outputs = model(**batch)
                    loss = outputs.loss
                if request.recipe != "peft-loop":
                    del outputs
                is_last = index == request.gradient_accumulation_steps - 1
                with nullcontext() if is_last or not isinstance(optimizer, HiFT) else optimizer.accumulating():
                    loss.backward()
                del loss
            optimizer.step()
            optimizer.zero_grad()
            _claim_state(optimizer)
    return ledger


def _claim_state(optimizer: torch.optim.Optimizer) -> None:
    for values in optimizer.state.values():
        for value in values.values():
            if isinstance(value, torch.Tensor):
                claim(value, "state")


def _claim_scales(model: nn.Module, ledger: Ledger) -> None:
    """Count the scales of 4-bit weights, which hang on their parameters and are buffers of no module."""
    for parameter in model.parameters():
        state: Any = getattr(parameter, "quant_state", None)
        if state is not None:
            for tensor in (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code):
                claim(tensor, "parameters")
                ledger.track([tensor])
