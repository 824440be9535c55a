import gc
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import slivertune as st
from slivertune.core.checkpointing import enable_checkpointing
from tests.helpers.models import seeded

BLOCKS, HIDDEN, HEADS, VOCAB = 4, 192, 6, 512
BATCH, LENGTH = 2, 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 528,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}


def llama(key_heads: int) -> Any:
    return seeded(lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=key_heads, **SIZES)), 0)


def qwen3(key_heads: int) -> Any:
    config = Qwen3Config(head_dim=HIDDEN // HEADS, num_key_value_heads=key_heads, **SIZES)
    return seeded(lambda: Qwen3ForCausalLM(config), 0)


def saved_bytes(model: Any) -> int:
    """Bytes of all distinct storages that a forward saves for the backward, weights not counted."""
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    return sum(saved.values())


@pytest.mark.parametrize("build", [llama, qwen3])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("ratio", [0.5, 0.3, 0.1])
def test_saved_activations_are_the_selected_share_and_all_keys_and_values(
    build: Any, key_heads: int, ratio: float
) -> None:
    model = build(key_heads)
    dense = saved_bytes(model)
    with st.TokenTune(ratio=ratio).attach(model):
        saved = saved_bytes(model)
    keys_and_values = 2 * BLOCKS * BATCH * LENGTH * key_heads * (HIDDEN // HEADS) * 4
    floor = ratio * dense + (1 - ratio) * keys_and_values
    assert saved == pytest.approx(floor, rel=0.05)


def test_nothing_is_kept_alive_after_the_backward() -> None:
    model = llama(2)
    ids = torch.randint(VOCAB, (BATCH, LENGTH))
    with st.TokenTune(ratio=0.3).attach(model), st.Ledger(model) as ledger:
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            model.zero_grad()
            del loss
        # The last selection alone.
        assert ledger.current().residual == BATCH * round(0.3 * LENGTH) * 8


def test_checkpointed_layers_over_a_leaf_leave_nothing_to_the_garbage_collector() -> None:
    model = llama(2)
    # As PEFT does for checkpointing: what the first layer gets is a leaf, which gets a gradient.
    model.enable_input_require_grads()
    model.model.embed_tokens.requires_grad_(False)
    enable_checkpointing(model, {"use_reentrant": False})
    ids = torch.randint(VOCAB, (BATCH, LENGTH))
    gc.collect()
    gc.disable()
    try:
        with st.TokenTune(ratio=0.3).attach(model), st.Ledger(model) as ledger:
            for _ in range(2):
                model(input_ids=ids, labels=ids).loss.backward()
                model.zero_grad()
            assert ledger.current().residual == BATCH * round(0.3 * LENGTH) * 8
    finally:
        gc.enable()
