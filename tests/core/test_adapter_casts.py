import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from slivertune.core.adapter_casts import skip_needless_casts
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.ledger import Ledger

# PEFT 0.21 asks by the name that transformers 5.23 retires.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

BATCH, LENGTH, HIDDEN = 2, 24, 64


def adapted(*, four_bit: bool = False, dropout: float = 0.0) -> PeftModel:
    """Adapters in fp32 beside weights in bf16 or NF4, as training holds them, with something to pass back."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    if four_bit:
        from tests.planning.real import quantise

        quantise(model)
    settings: Any = {"r": 4, "lora_dropout": dropout, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = get_peft_model(model, LoraConfig(**settings))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    assert {each.dtype for each in model.parameters() if each.requires_grad} == {torch.float32}
    return model.train()


def lora_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def train(model: Any, *, num_steps: int = 3) -> tuple[list[torch.Tensor], int]:
    """Losses, gradients and adapters of some steps under autocast, and the most that forward and backward took."""
    generator = torch.Generator().manual_seed(1)
    adapters = [each for each in model.parameters() if each.requires_grad]
    optimizer, seen = torch.optim.AdamW(adapters, lr=1e-2), []
    with Ledger(model) as ledger:
        for _ in range(num_steps):
            ids = torch.randint(0, 128, (BATCH, LENGTH), generator=generator)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            seen += [loss.detach(), *(each.grad.clone() for each in adapters)]
            optimizer.step()
            optimizer.zero_grad()
    return [*seen, *(each.detach() for each in adapters)], ledger.highest.residual


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("four_bit", [False, True])
def test_training_without_the_casts_is_the_same_to_the_bit(four_bit: bool, checkpointing: bool) -> None:
    results = []
    for is_skipped in (False, True):
        model = adapted(four_bit=four_bit)
        if checkpointing:
            enable_checkpointing(model.get_base_model(), {"use_reentrant": False})
        if is_skipped:
            skip_needless_casts(model)
        results.append(train(model))
        assert {layer.cast_input_dtype_enabled for layer in lora_layers(model)} == {not is_skipped}
    (with_casts, before), (without, after) = results
    assert all(torch.equal(each, other) for each, other in zip(with_casts, without, strict=True))
    assert after < before


def test_adapters_that_share_an_input_keep_it_once() -> None:
    kept = []
    for is_skipped in (False, True):
        model = adapted()
        if is_skipped:
            skip_needless_casts(model)
        ids = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH)
        with Ledger(model) as ledger:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(input_ids=ids).logits
            kept.append(ledger.current().residual)
        del logits
    # The block's inputs to queries, keys, values (one), gate and up (one), output and down: seven copies without, and
    # with it none, but for the three inputs that nothing else keeps.
    inputs = BATCH * LENGTH * HIDDEN * 2
    copies, shared = 5 * inputs + inputs + 2 * inputs, 2 * inputs
    assert kept[0] - kept[1] >= 2 * (copies - shared - 2 * inputs)


def test_without_autocast_inputs_are_cast_as_ever() -> None:
    model, ids = adapted(), torch.arange(8).unsqueeze(0)
    expected = model(input_ids=ids).logits
    with skip_needless_casts(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(input_ids=ids)
        assert not any(layer.cast_input_dtype_enabled for layer in lora_layers(model))
        assert torch.equal(model(input_ids=ids).logits, expected)
        assert torch.equal(model.get_base_model()(input_ids=ids).logits, expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(input_ids=ids)
        # Generation does not pass through PEFT's own forward.
        model.generate(input_ids=ids, max_new_tokens=2, pad_token_id=0)  # type: ignore[operator]


def test_adapters_with_dropout_cast_first_since_their_noise_depends_on_the_dtype() -> None:
    model, ids = adapted(dropout=0.5), torch.arange(8).unsqueeze(0)
    with skip_needless_casts(model), torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=ids)
    assert all(layer.cast_input_dtype_enabled for layer in lora_layers(model))


def test_a_model_is_as_before_once_it_is_taken_off() -> None:
    model, ids = adapted(), torch.arange(8).unsqueeze(0)
    hooks = {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    lora_layers(model)[0].cast_input_dtype_enabled = False
    with skip_needless_casts(model), torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=ids)
    assert [layer.cast_input_dtype_enabled for layer in lora_layers(model)][:2] == [False, True]
    assert {name: len(module._forward_pre_hooks) for name, module in model.named_modules()} == hooks


def test_a_copy_of_the_model_casts_as_it_did_and_a_handle_is_not_copied() -> None:
    model = adapted()
    handle = skip_needless_casts(model)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=torch.arange(8).unsqueeze(0))
    assert all(layer.cast_input_dtype_enabled for layer in lora_layers(twin))
    with pytest.raises(TypeError, match="Call skip_needless_casts on it"):
        copy.copy(handle)
