"""Tiny random models and batches; everything follows from a seed, nothing is downloaded."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutput

VOCAB = 97
HIDDEN = 32
INNER = 48
BLOCKS = 3
SEQUENCE = 12
LAYERS = BLOCKS + 2
"""Embedding, the blocks, head."""

Batch = dict[str, torch.Tensor]


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a model from its own seed and leave the global generator as it was.

    Norms begin at ones, where bf16 is too coarse for a few updates to show, so they are drawn anew.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build().train()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and name.endswith("weight"):
                nn.init.uniform_(parameter, 0.2, 0.4)
        return model


def _built(
    kind: type[PreTrainedModel],
    dtype: torch.dtype,
    seed: int,
    tied: bool = False,
    vocab: int = VOCAB,
    blocks: int = BLOCKS,
) -> nn.Module:
    config = kind.config_class(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        use_cache=False,
    )
    return seeded(lambda: kind(config), seed).to(dtype)


def tiny_llama(dtype: torch.dtype = torch.float32, *, seed: int = 0, **sizes: Any) -> nn.Module:
    """A Llama of three blocks; `vocab=259` gives the embedding two pieces of at least 4,096 elements (8-bit state).

    Args:
        dtype: Of the weights.
        seed: Of the weights.
        **sizes: `tied`, `vocab` and `blocks`, where they are others.
    """
    return _built(LlamaForCausalLM, dtype, seed, **sizes)


class SmallAttention(nn.Module):
    """Causal attention of one head, whose queries are its keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query = self.q_proj(hidden).unsqueeze(1)
        mixed = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        return self.o_proj(mixed.squeeze(1))


class SmallBlock(GradientCheckpointingLayer):
    """Attention and an MLP, each after a norm, its result added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = SmallAttention()
        self.mlp = nn.Sequential(
            OrderedDict(
                up_proj=nn.Linear(HIDDEN, INNER, bias=False),
                act=nn.SiLU(),
                down_proj=nn.Linear(INNER, HIDDEN, bias=False),
            )
        )
        self.input_layernorm = nn.LayerNorm(HIDDEN, bias=False)
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class SmallModel(nn.Module):
    """An embedding, blocks one after another, a norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, HIDDEN)
        self.layers = nn.ModuleList([SmallBlock() for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(HIDDEN, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids)
        for block in self.layers:
            hidden = block(hidden)
        return self.norm(hidden)


class SmallConfig(LlamaConfig):
    """Sizes under a name of their own, so that nothing loads the weights into a Llama."""

    model_type = "slivertune_small"


class SmallForCausalLM(PreTrainedModel):
    """A decoder whose layers are torch's. Transformers checkpoints, ties and saves it, and can't load it as a Llama.

    Its attention is not in transformers' registry, so TokenTune does not intercept it.
    """

    config_class = SmallConfig
    supports_gradient_checkpointing = True
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = SmallModel(config)
        self.lm_head = nn.Linear(HIDDEN, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> CausalLMOutput:
        logits = self.lm_head(self.model(input_ids))
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


def small_decoder(dtype: torch.dtype = torch.float32, *, seed: int = 0, **sizes: Any) -> nn.Module:
    """A decoder of as many layers as `tiny_llama`, with fewer matrices, in a third of its time.

    It is for tests that are about no architecture. Its blocks take no keyword arguments, and it has no buffers.
    """
    return _built(SmallForCausalLM, dtype, seed, **sizes)


EXPERTS = 4

_MIXTURE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "use_cache": False,
    "pad_token_id": 0,
}


def tiny_mixtral(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Module:
    """Two blocks of four experts, whose matrices are stacked (expert, out, in); two of them take each token."""
    return seeded(lambda: MixtralForCausalLM(MixtralConfig(**_MIXTURE)), seed).to(dtype)


def tiny_gpt_oss(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Module:
    """Like `tiny_mixtral`, with matrices stacked (expert, in, out) and a bias for each expert."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return seeded(lambda: GptOssForCausalLM(GptOssConfig(**_MIXTURE, rope_parameters=rope)), seed).to(dtype)


def tiny_gpt2(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Module:
    """A GPT-2: tied head, biases, Conv1D weights."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=HIDDEN,
        n_layer=BLOCKS,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.1,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return seeded(lambda: GPT2LMHeadModel(config), seed).to(dtype)


def tiny_bert(dtype: torch.dtype = torch.float32, *, dropout: float = 0.0, seed: int = 0) -> nn.Module:
    """A BERT that classifies sequences into three classes."""
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.1,
        num_labels=3,
    )
    return seeded(lambda: BertForSequenceClassification(config), seed).to(dtype)


class OddBlock(nn.Module):
    """Parameters as real models have them now and then: without dimensions, transposed in memory, empty."""

    def __init__(self, with_empty: bool) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.3))
        self.across = nn.Parameter((torch.randn(48, HIDDEN) * 0.1).t())
        self.back = nn.Parameter(torch.randn(HIDDEN, 48) * 0.1)
        self.nothing = nn.Parameter(torch.empty(0, HIDDEN)) if with_empty else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.linear(torch.tanh(hidden @ self.across), self.back)
        if self.nothing is not None:
            inner = inner + nn.functional.linear(hidden, self.nothing).sum()
        return hidden + self.gate * inner


class OddModel(nn.Module):
    """An embedding, two odd blocks named `layers`, a head; loss of a causal model."""

    def __init__(self, with_empty: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([OddBlock(with_empty), OddBlock(with_empty)])
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        hidden = self.embed_tokens(input_ids)
        for block in self.layers:
            hidden = block(hidden)
        return SimpleNamespace(
            loss=nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())
        )


ODD_LAYERS = [["embed_tokens"], ["layers.0"], ["layers.1"], ["head"]]


def odd_model(
    dtype: torch.dtype = torch.float32, *, with_empty: bool = True, fp32_gates: bool = False, seed: int = 0
) -> nn.Module:
    """A model of parameters that a careless optimizer trips over; its layers are `ODD_LAYERS`."""
    model = seeded(lambda: OddModel(with_empty), seed)
    for name, parameter in model.named_parameters():
        if not (fp32_gates and name.endswith("gate")):
            parameter.data = parameter.data.to(dtype)
    return model


def token_batches(count: int, *, vocab: int = VOCAB, batch_size: int = 2, seed: int = 1) -> list[Batch]:
    """Batches for a causal model: int64 `input_ids` and `labels` of shape (batch_size, SEQUENCE)."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(0, vocab, (batch_size, SEQUENCE), generator=generator)
        batches.append({"input_ids": ids, "labels": ids.clone()})
    return batches


def label_batches(count: int, *, batch_size: int = 4, seed: int = 1) -> list[Batch]:
    """Batches for the classifier: `input_ids` (batch_size, SEQUENCE), `labels` (batch_size,) in [0, 3)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(0, VOCAB, (batch_size, SEQUENCE), generator=generator),
            "labels": torch.randint(0, 3, (batch_size,), generator=generator),
        }
        for _ in range(count)
    ]


def twin(model: nn.Module) -> nn.Module:
    """An independent copy with the same bits, nothing frozen."""
    other = copy.deepcopy(model)
    other.requires_grad_(True)
    return other


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def trainable(model: nn.Module) -> set[str]:
    """Names of the parameters that require a gradient now."""
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bytes of a tensor, so that -0.0 and 0.0 differ and NaN equals itself."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bits, dtypes or shapes differ between two dictionaries of tensors, names in one alone included."""
    names = [name for name in left if name not in right] + [name for name in right if name not in left]
    for name in left.keys() & right.keys():
        a, b = left[name], right[name]
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(bits(a), bits(b)):
            names.append(name)
    return sorted(names)


def assert_same_bits(left: nn.Module, right: nn.Module) -> None:
    """Every parameter of two models has the same bits."""
    assert differing(weights(left), weights(right)) == []


def assert_all_moved(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """No parameter kept the bits it had: a comparison of two idle runs would prove nothing."""
    still = [
        name
        for name, value in before.items()
        if value.numel() and torch.equal(bits(value), bits(model.get_parameter(name)))
    ]
    assert not still, f"never updated: {still}"


def assert_same_tree(left: Any, right: Any, path: str = "") -> None:
    """Two nests of dicts, lists and tensors are equal, tensors to the bit."""
    assert type(left) is type(right), f"{path}: {type(left)} against {type(right)}"
    if isinstance(left, dict):
        assert list(left) == list(right), f"{path}: {list(left)} against {list(right)}"
        for key in left:
            assert_same_tree(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same_tree(a, b, f"{path}/{index}")
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape, path
        assert torch.equal(bits(left), bits(right)), path
    else:
        assert left == right, f"{path}: {left} against {right}"


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch refuse operators that may give other bits each time, as a Trainer's `full_determinism` does."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let torch make tensors of another dtype where none is named, as recipes do to build a model in bf16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
