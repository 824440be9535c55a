"""The units of the stand-in against those that accelerate makes of the same models, on two ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    RobertaConfig,
)

from slivertune.planning.gathered_units import GatheredUnits, units_of
from tests.helpers.ranks import run_ranks
from tests.parallel.reference import on_fsdp2_ranks

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(*, tied: bool = False) -> Any:
    return AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, intermediate_size=32, tie_word_embeddings=tied))


def with_adapters() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear"))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "tied llama": lambda: llama(tied=True),
    "llama with adapters": with_adapters,
    "gpt2": lambda: AutoModelForCausalLM.from_config(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2)),
    "opt": lambda: AutoModelForCausalLM.from_config(OPTConfig(**SMALL, ffn_dim=32, word_embed_proj_dim=16)),
    "roberta": lambda: AutoModelForSequenceClassification.from_config(RobertaConfig(**SMALL, intermediate_size=32)),
}


def fully_sharded_units(rank: int, num_ranks: int) -> dict[str, list[tuple[list[str], bool]]]:
    """By model: of each unit the names of its parameters, and whether it stays gathered after a forward."""
    found = {}
    for name, build in MODELS.items():
        blocks = ["RobertaLayer"] if name == "roberta" else None
        with on_fsdp2_ranks(plugin={"transformer_cls_names_to_wrap": blocks}) as accelerator:
            model = build()
            model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            model(input_ids=torch.ones(1, 4, dtype=torch.long))
            found[name] = list(_groups_of(model))
    return found


def _groups_of(model: nn.Module) -> Any:
    states = [each._get_fsdp_state() for each in model.modules() if isinstance(each, FSDPModule)]
    for group in (group for state in dict.fromkeys(states) for group in state._fsdp_param_groups):
        yield sorted(each._param_fqn for each in group.fsdp_params), not group._reshard_after_forward


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[list[str], bool]]]:
    found: dict[str, list[tuple[list[str], bool]]] = run_ranks(fully_sharded_units, 2)[0]
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks
@pytest.mark.parametrize("name", MODELS)
def test_units_are_those_that_accelerate_makes(name: str, expected: Any) -> None:
    model = MODELS[name]()
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    units = [unit for unit in units_of(model) if unit.parameters]
    found = [(sorted(name_of[id(each)] for each in unit.parameters), unit.stays) for unit in units]
    assert sorted(found) == sorted(expected[name])


def test_gradients_are_as_they_were_and_everything_is_taken_off() -> None:
    model, ids = llama(), torch.arange(8).view(1, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    stand_in = GatheredUnits(model, num_gpus=2, num_backwards=1, offloads=False)
    model(input_ids=ids, labels=ids).loss.backward()
    stand_in.remove()
    assert all(torch.equal(parameter.grad, each) for parameter, each in zip(model.parameters(), expected, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
