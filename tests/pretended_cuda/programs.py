"""Small trainings on a device, each beside one that must give the same bits and moves less.

Each takes the name of a device and returns tensors on the CPU: losses, and weights as they are saved.
"""

import copy
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments

import slivertune as st
from slivertune import SFT, HiFT, HiFTConfig, SFTConfig
from tests.helpers.models import VOCAB, tiny_gpt2, tiny_llama, token_batches, twin

NUM_UPDATES = 12


def batches(device: str, number: int = NUM_UPDATES) -> Iterator[dict[str, torch.Tensor]]:
    """Batches on a device."""
    for batch in token_batches(number):
        yield {name: value.to(device) for name, value in batch.items()}


def trained(model: Any, optimizer: Any, device: str, end: int = NUM_UPDATES, start: int = 0) -> list[torch.Tensor]:
    """Train from one update to another; the losses."""
    losses = []
    for batch in itertools.islice(batches(device, end), start, None):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


def weights(model: nn.Module) -> list[torch.Tensor]:
    """The weights, as they are saved."""
    return [value.detach().cpu().clone() for value in model.state_dict().values()]


def checkpointed(model: Any, is_reentrant: bool | None) -> Any:
    """The model, its blocks checkpointed unless None."""
    if is_reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
    return model.train()


def sft(device: str, dtype: torch.dtype = torch.bfloat16, reentrant: bool | None = None, **settings: Any) -> Any:
    """SFT over two reselections and more, its state read and loaded again."""
    model = checkpointed(tiny_llama(dtype).to(device), reentrant)
    estimation = {} if settings.get("selection") == "momentum" else {"estimation_steps": 2}
    config = SFTConfig(num_weights=600, reselection_interval=3, **estimation, **settings)
    optimizer = SFT(model, config=config, total_steps=20, lr=1e-2)
    losses = trained(model, optimizer, device, 6)
    optimizer.load_state_dict(optimizer.state_dict())
    losses += trained(model, optimizer, device, 2)
    optimizer.detach()
    return [*losses, *weights(model)]


def tokentune(
    device: str,
    build: Callable[[], nn.Module] = tiny_llama,
    reentrant: bool | None = None,
    hift: bool = False,
    chunked: bool = False,
    **settings: Any,
) -> Any:
    """TokenTune over AdamW or HiFT, also with the chunked loss."""
    model = checkpointed(build().to(device), reentrant)
    config = HiFTConfig.paper(stream_bytes=20_000)
    optimizer: Any = HiFT(model, torch.optim.AdamW, lr=1e-3, config=config) if hift else None
    tuning = st.TokenTune(**{"ratio": 0.4, **settings})
    with tuning.attach(model), st.attach_chunked_cross_entropy(model) if chunked else nullcontext():
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = trained(model, optimizer, device, 6)
    return [*losses, *weights(model)]


def hift(
    device: str,
    *,
    moved: Iterable[Callable[[nn.Module], Any]] = (),
    reentrant: bool | None = False,
    stream: bool = False,
    **settings: Any,
) -> Any:
    """HiFT with handles that move activations, on the computing stream or on one of the user's own."""
    model = checkpointed(tiny_llama(torch.bfloat16).to(device), reentrant)
    optimizer = HiFT(model, torch.optim.AdamW, lr=1e-2, config=HiFTConfig.paper(stream_bytes=20_000, **settings))
    handles = [move(model) for move in moved]
    side = torch.cuda.Stream(device) if stream and device != "cpu" else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(device))
    with nullcontext() if side is None else torch.cuda.stream(side):
        losses = trained(model, optimizer, device)
        optimizer.detach()
        for handle in handles:
            handle.remove()
        return [*losses, *weights(model)]


def parked(device: str, *, reentrant: bool | None = False, by_sft: bool = False, **settings: Any) -> Any:
    """A LoRA, or SFT's layers of deltas, over parked weights; evaluated in between, and restored at the end."""
    model: Any = tiny_llama(torch.bfloat16, blocks=4)
    if settings.get("place") != "host":
        model = model.to(device)
    checkpointed(model, reentrant)
    if by_sft:
        config = SFTConfig(form="layer", num_weights=600, reselection_interval=3, estimation_steps=2)
        optimizer: Any = SFT(model, config=config, total_steps=20, lr=1e-2)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT asks for what is deprecated
            model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights="gaussian"))
        model.enable_input_require_grads()
    handle = st.park_layers(model, **settings) if settings else nullcontext()
    if not by_sft:
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    with handle:
        losses = trained(model, optimizer, device, 5)
        with torch.no_grad():
            losses.append(model(**next(batches(device))).loss.cpu())
        losses += trained(model, optimizer, device, 8, 5)
        if by_sft:
            optimizer.detach(merge=False)
    return [*losses, *weights(model)]


def resumed(device: str, **settings: Any) -> Any:
    """HiFT over a fused AdamW, whose step counts lie on the device; saved after a cycle and more, and resumed."""
    model: Any = tiny_llama(torch.bfloat16)
    saved: Any = None
    losses: list[torch.Tensor] = []
    for start, end in ((0, 7), (7, 14)):
        with tempfile.TemporaryDirectory() as folder:
            where = {"state_dir": folder} if settings.get("state") == "disk" else {}
            model = twin(model).to("cpu" if settings.get("weights") == "host" else device)
            config = HiFTConfig.paper(stream_bytes=20_000, **settings, **where)
            optimizer = HiFT(model, torch.optim.AdamW, lr=1e-2, fused=True, config=config)
            if saved is not None:
                optimizer.load_state_dict(saved)
            losses += trained(model, optimizer, device, end, start)
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.detach()
    return [*losses, *weights(model)]


def skipped(device: str, **settings: Any) -> Any:
    """HiFT in a loop that drops a gradient now and then, and steps without one."""
    model = checkpointed(tiny_llama(torch.bfloat16).to(device), False)
    optimizer = HiFT(model, torch.optim.AdamW, lr=1e-2, config=HiFTConfig.paper(stream_bytes=20_000, **settings))
    for update, batch in enumerate(batches(device, 7)):
        if update % 2:
            model(**batch).loss.backward()
            model.zero_grad()
            optimizer.step()
        trained(model, optimizer, device, update + 1, update)
    saved = copy.deepcopy(optimizer.state_dict())
    model(**next(batches(device))).loss.backward()
    optimizer.load_state_dict(saved)
    losses = trained(model, optimizer, device, 4)
    optimizer.detach()
    return [*losses, *weights(model)]


def chunked_loss(device: str) -> Any:
    """The chunked loss over AdamW."""
    model = tiny_gpt2().to(device).train()
    with st.attach_chunked_cross_entropy(model):
        losses = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3), device)
    return [*losses, *weights(model)]


def trainer(device: str, **settings: Any) -> Any:
    """The Trainer with `attach`: half a run, saved, then resumed by another."""
    rows = torch.randint(0, VOCAB, (16, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        for max_steps in (6, 12):
            model = tiny_llama(torch.bfloat16)
            arguments = TrainingArguments(
                folder,
                max_steps=max_steps,
                lr_scheduler_type="constant",
                save_steps=6,
                report_to="none",
                use_cpu=device == "cpu",
                per_device_train_batch_size=2,
                disable_tqdm=True,
                learning_rate=1e-3,
                dataloader_pin_memory=device != "cpu",
            )
            training = Trainer(model, arguments, train_dataset=data)
            st.attach(training, HiFTConfig.paper(**settings))
            training.train(resume_from_checkpoint=max_steps > 6)
    return weights(model)


stays = partial(hift, state="device")
PROGRAMS: dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]] = {
    **{
        name: (program, program)
        for name, program in {
            "SFT by accumulated gradients": sft,
            "SFT by momentum": partial(sft, selection="momentum"),
            "SFT, packed": partial(sft, packed=True),
            "SFT with layers of deltas, checkpointed": partial(sft, form="layer", reentrant=False),
            "SFT, redistributed": partial(sft, redistribute=True),
            "TokenTune": tokentune,
            "TokenTune, checkpointed": partial(tokentune, reentrant=False),
            "TokenTune, checkpointed with reentrant passes": partial(tokentune, reentrant=True),
            "TokenTune, GPT-2": partial(tokentune, build=tiny_gpt2),
            "TokenTune by chunks": partial(tokentune, pattern="chunks"),
            "TokenTune by blocks": partial(tokentune, pattern="block"),
            "TokenTune over HiFT with the chunked loss": partial(tokentune, hift=True, chunked=True),
            "the chunked loss": chunked_loss,
        }.items()
    },
    "LoRA over blocks on the host": (partial(parked, place="host", resident_bytes=0), parked),
    "LoRA over blocks on the host, not checkpointed": (
        partial(parked, place="host", resident_bytes=40_000, reentrant=None),
        partial(parked, reentrant=None),
    ),
    "LoRA over codes on the host, re-entered": (
        partial(parked, form="int8", place="host", resident_bytes=0, reentrant=True),
        partial(parked, form="int8", place="device", reentrant=True),
    ),
    "SFT over blocks on the host": (
        partial(parked, place="host", resident_bytes=0, by_sft=True),
        partial(parked, by_sft=True),
    ),
    "SFT over codes on the host": (
        partial(parked, form="int8", place="host", resident_bytes=0, by_sft=True, reentrant=None),
        partial(parked, form="int8", place="device", by_sft=True, reentrant=None),
    ),
    "HiFT, resumed": (resumed, partial(resumed, state="device")),
    "HiFT whose chunks stay, resumed in mid-turn": (
        partial(resumed, steps_per_group=3, prefetch_bytes=10**9),
        partial(resumed, steps_per_group=3, state="device"),
    ),
    "HiFT with weights on the host, resumed": (partial(resumed, weights="host"), partial(resumed, state="device")),
    "HiFT with state on disk, resumed": (partial(resumed, state="disk"), partial(resumed, state="device")),
    "HiFT with activations that wait on the host": (partial(hift, moved=[st.offload_activations]), stays),
    "HiFT that keeps as many activations as fit": (
        partial(hift, moved=[partial(st.keep_activations, num_blocks="auto")], steps_per_group=3),
        partial(stays, steps_per_group=3),
    ),
    "HiFT over tiles of tokens": (
        partial(hift, moved=[partial(st.tile_tokens, tile_size=4)]),
        partial(stays, moved=[partial(st.tile_tokens, tile_size=4)]),
    ),
    "HiFT over compiled blocks": (
        partial(hift, moved=[partial(st.compile_blocks, backend="eager")], reentrant=None),
        partial(stays, moved=[partial(st.compile_blocks, backend="eager")], reentrant=None),
    ),
    "HiFT on a stream of the user": (partial(hift, stream=True, prefetch_bytes="auto"), stays),
    "HiFT on a stream of the user, gradients on the host": (partial(hift, stream=True, gradients="host"), stays),
    "HiFT with activations that wait on the host, re-entered": (
        partial(hift, moved=[st.offload_activations], reentrant=True),
        partial(stays, reentrant=True),
    ),
    "HiFT, steps skipped": (skipped, partial(skipped, state="device")),
    **{
        f"HiFT, steps skipped, {name} chunks stay": (
            partial(skipped, steps_per_group=3, prefetch_bytes=room),
            partial(skipped, steps_per_group=3, state="device"),
        )
        for name, room in (("some", 60_000), ("all", 10**9))
    },
    "HiFT with gradients on the host, steps skipped": (
        partial(skipped, gradients="host"),
        partial(skipped, state="device"),
    ),
    "the Trainer": (trainer, partial(trainer, state="device")),
    "the Trainer, gradients on the host": (partial(trainer, gradients="host"), partial(trainer, state="device")),
}
"""A program, and one with the same bits; itself without the detector, under which copies arrive late."""
