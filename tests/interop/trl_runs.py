"""TRL's trainers on a tiny Llama of bytes: every mode of SFT, and those that learn from preferences and rewards."""

import copy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
)

from slivertune.training.embedded.base_model import VOCABULARY_SIZE, make_byte_tokenizer
from tests.helpers.models import tiny_llama

SFT_TAKES_TOKENS = find_spec("trl") is not None and hasattr(import_module("trl.trainer.utils"), "add_fused_lm_head")
"""Whether SFTTrainer has a head that TokenTune goes with, as from trl 1.15 on."""
LR = 1e-2
CHAT = (
    "{% for message in messages %}{{ message['role'] }}:{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}\n"
    "{% endfor %}"
)
PREFERENCES = [{"prompt": f"a{i}", "chosen": f" yes{i}", "rejected": f" no{i * 7}"} for i in range(16)]
PROMPTS = [{"prompt": f"a{i}"} for i in range(16)]
JUDGED = [{"prompt": f"a{i}", "completion": f" yes{i * 7}", "label": bool(i % 2)} for i in range(16)]
TEXTS = [{"text": f"some words {i} here" * (1 + i % 3)} for i in range(32)]
COMPLETIONS = [{"prompt": f"a{i}", "completion": f" yes it is {i * 7}"} for i in range(32)]
CHATS = [
    {"messages": [{"role": "user", "content": f"hi {i}"}, {"role": "assistant", "content": f"yes {i * 7}"}]}
    for i in range(32)
]
SFT_MODES: dict[str, dict[str, Any]] = {
    "text": {},
    "bfd packing": {"packing": True, "packing_strategy": "bfd", "max_length": 32},
    "bfd split packing": {"packing": True, "packing_strategy": "bfd_split", "max_length": 32},
    "wrapped packing": {"packing": True, "packing_strategy": "wrapped", "max_length": 32},
    "padding free": {"padding_free": True, "max_length": None},
    "assistant only": {"assistant_only_loss": True},
    "completion only": {"completion_only_loss": True},
    "whole completion": {"completion_only_loss": False},
    "dft": {"loss_type": "dft"},
    "no accumulation": {"gradient_accumulation_steps": 1},
    "checkpointed": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "selectively checkpointed": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"selective": True},
    },
    "lora": {},
}
"""Arguments of SFTTrainer; what is not named is accumulated over two forwards and not checkpointed."""


def arguments(output: Path, **options: Any) -> dict[str, Any]:
    """What all trainers here are given."""
    return {
        "output_dir": str(output),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 7,
        "learning_rate": LR,
        "optim": "adamw_torch",  # as a reference's: the fused one rounds otherwise
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "seed": 3,
        **options,
    }


def adapters(task: str = "CAUSAL_LM", *, modules: tuple[str, ...] = ("q_proj", "up_proj")) -> LoraConfig:
    """Adapters that begin at random, so that both of their matrices have gradients at once."""
    return LoraConfig(r=2, target_modules=list(modules), task_type=task, init_lora_weights=False)


def sft_trainer(output: Path, mode: str = "text", model: nn.Module | None = None, **options: Any) -> Any:
    """A SFTTrainer in one of its modes."""
    import trl

    tokenizer = make_byte_tokenizer(64)
    rows: list[dict[str, Any]] = TEXTS
    if mode == "assistant only":
        tokenizer.chat_template, rows = CHAT, CHATS
    elif mode in ("completion only", "whole completion"):
        rows = COMPLETIONS
    model = model or tiny_llama(vocab=VOCABULARY_SIZE)
    torch.manual_seed(0)  # of the adapters
    return trl.SFTTrainer(
        model,
        args=trl.SFTConfig(**arguments(output, **{"max_length": 48, **copy.deepcopy(SFT_MODES[mode]), **options})),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:4]),
        processing_class=tokenizer,
        peft_config=adapters() if mode == "lora" else None,
    )


def qlora_trainer(output: Path, **options: Any) -> Any:
    """A SFTTrainer of adapters over 4-bit weights."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    base = output / "base"
    if not base.exists():
        tiny_llama(vocab=VOCABULARY_SIZE).save_pretrained(base)  # type: ignore[operator]
    config = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = LlamaForCausalLM.from_pretrained(base, quantization_config=config, device_map={"": "cpu"})
    trainer = sft_trainer(output, "lora", model, **options)
    assert any(isinstance(module, bitsandbytes.nn.Linear4bit) for module in trainer.model.modules())
    # TRL keeps adapters over 4-bit weights in bf16, which rounds by more than what is looked for.
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return trainer


def mixture_trainer(output: Path, **options: Any) -> Any:
    """A SFTTrainer of a mixture of experts."""
    config = MixtralConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    return sft_trainer(output, "text", MixtralForCausalLM(config), **options)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 17) for text in completions]


def preference_trainer(kind: str, output: Path, *, lora: bool = False, **options: Any) -> Any:
    """A trainer of TRL that is no SFTTrainer."""
    import trl
    import trl.experimental.cpo
    import trl.experimental.orpo

    model = tiny_llama(vocab=VOCABULARY_SIZE)
    given = arguments(output, **options)
    short = {**given, "max_length": 24}
    sampled = {**given, "num_generations": 2, "max_completion_length": 6}
    common: dict[str, Any] = {"processing_class": make_byte_tokenizer(64)}
    if lora:
        common["peft_config"] = adapters("SEQ_CLS" if kind == "reward" else "CAUSAL_LM")
    reference = {} if lora else {"ref_model": tiny_llama(vocab=VOCABULARY_SIZE).requires_grad_(False)}
    preferences, prompts = Dataset.from_list(PREFERENCES), Dataset.from_list(PROMPTS)
    torch.manual_seed(0)  # of the adapters, and of the reward's head
    if kind == "dpo":
        return trl.DPOTrainer(model, args=trl.DPOConfig(**short), train_dataset=preferences, **reference, **common)
    if kind == "kto":
        judged = Dataset.from_list(JUDGED)
        return trl.KTOTrainer(model, args=trl.KTOConfig(**short), train_dataset=judged, **reference, **common)
    if kind == "orpo":
        orpo = trl.experimental.orpo
        return orpo.ORPOTrainer(model, args=orpo.ORPOConfig(**short), train_dataset=preferences, **common)
    if kind == "cpo":
        cpo = trl.experimental.cpo
        return cpo.CPOTrainer(model, args=cpo.CPOConfig(**short), train_dataset=preferences, **common)
    if kind == "grpo":
        args = trl.GRPOConfig(**sampled)
        return trl.GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=prompts, **common)
    if kind == "rloo":
        if not lora:  # it would look for its reference on the hub
            sampled["beta"] = 0.0
        args = trl.RLOOConfig(**sampled)
        return trl.RLOOTrainer(model, reward_funcs=reward, args=args, train_dataset=prompts, **common)
    assert kind == "reward"
    config = model.config
    config.num_labels, config.pad_token_id = 1, common["processing_class"].pad_token_id
    return trl.RewardTrainer(
        LlamaForSequenceClassification(config), args=trl.RewardConfig(**short), train_dataset=preferences, **common
    )
