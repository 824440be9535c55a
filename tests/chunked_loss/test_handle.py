"""The handle on models of many kinds, which stand in two tables: longer than other files for that."""

import copy
import inspect
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.loss.loss_utils import ForCausalLMLoss

from slivertune import (
    SFT,
    HiFT,
    HiFTConfig,
    SFTConfig,
    TokenTune,
    attach_chunked_cross_entropy,
    why_not_chunked,
)
from slivertune.chunked_loss.absent_logits import READ, ChunkedLossError
from slivertune.core.checkpointing import enable_checkpointing
from tests.helpers.architectures import (
    BART,
    BLOOM,
    DECODER,
    ENCODER,
    GPT2,
    OPT,
    SIZES,
    llama,
    lora_llama,
)
from tests.helpers.models import assert_same_tree, tiny_llama, token_batches, twin, weights
from tests.helpers.tolerance import assert_step_close, assert_sums_close, with_exact

hf: Any = transformers
SMALL = 600
"""Bytes of a chunk: several chunks of rows and of classes in the tiny models."""
SCALED = {name: value for name, value in DECODER.items() if name != "head_dim"}


def mamba() -> nn.Module:
    config = hf.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4)
    return hf.MambaForCausalLM(config)  # type: ignore[no-any-return]


BAMBA = {**DECODER, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4}


def bamba(**settings: Any) -> nn.Module:
    config = hf.BambaConfig(**BAMBA, mamba_n_groups=1, mamba_chunk_size=8, **settings)
    return hf.BambaForCausalLM(config)  # type: ignore[no-any-return]


SERVED: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "llama, bf16": lambda: llama().to(torch.bfloat16),
    "mixtral with its routers' loss": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**DECODER, num_local_experts=2, output_router_logits=True)
    ),
    "gemma2 without a cap": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**DECODER, final_logit_softcapping=None)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(**OPT, word_embed_proj_dim=16)),
    "falcon": lambda: hf.FalconForCausalLM(hf.FalconConfig(**SIZES)),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(**BLOOM)),
    "neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**ENCODER)),
    "mamba, which widens its logits": mamba,
    "bamba without its own term": bamba,
    "llama that scores no pads": lambda: LlamaWithoutPadsForCausalLM(hf.LlamaConfig(**DECODER)),
    "mamba, bf16": lambda: mamba().to(torch.bfloat16),
    "a hook that scales the head's input": lambda: with_scaled_input(),
}


class LlamaWithTermForCausalLM(hf.LlamaForCausalLM):  # type: ignore[misc]
    """A Llama that adds to its loss what a function makes of the logits."""

    term: Callable[[torch.Tensor], Any]
    only_in_training: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if output.loss is not None and (self.training or not self.only_in_training):
            output.loss = output.loss + self.term(output.logits)
        return output


def with_term(term: Callable[[torch.Tensor], Any], *, only_in_training: bool = False) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = LlamaWithTermForCausalLM(hf.LlamaConfig(**DECODER))
        model.term, model.only_in_training = term, only_in_training
        return model

    return build


def with_scaled_input() -> nn.Module:
    model: Any = llama()
    model.lm_head.register_forward_pre_hook(lambda head, inputs: (inputs[0] * 0.5,))
    return model  # type: ignore[no-any-return]


class LlamaWithoutPadsForCausalLM(hf.LlamaForCausalLM):  # type: ignore[misc]
    """A Llama that leaves the first token of its vocabulary out of its loss."""

    def forward(self, *args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(
            *args, labels=None if labels is None else labels.masked_fill(labels == 0, -100), **kwargs
        )


NOT_SERVED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gemma2": (
        lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**DECODER)),
        READ,
    ),
    "cohere": (
        lambda: hf.CohereForCausalLM(hf.CohereConfig(**SCALED, eos_token_id=1)),
        READ,
    ),
    "granite": (
        lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**SCALED, logits_scaling=3.0)),
        READ,
    ),
    "bamba": (lambda: bamba(z_loss_coefficient=1e-3), READ),
    **{
        f"a term by {name}{', in training' * only_in_training}": (
            with_term(term, only_in_training=only_in_training),
            reason,
        )
        for only_in_training in (False, True)
        for name, term, reason in (
            ("sum", lambda logits: logits.sum(), "outside of the loss function (sum)"),
            ("slice", lambda logits: 0.0 * logits[..., :1].mean(), "outside of the loss function (getitem)"),
            ("writing", lambda logits: 0.0 * bool(logits.mul_(2) is logits), "outside of the loss function (mul)"),
            ("its maximum", lambda logits: logits.max(), "outside of the loss function (max)"),
            ("its size alone", lambda logits: 0.5 * logits.numel(), "its loss of two tokens is "),
        )
    },
    "bart": (
        lambda: hf.BartForCausalLM(hf.BartConfig(**{**BART, "decoder_layers": 2})),
        READ,
    ),
    "bert": (lambda: hf.BertForMaskedLM(hf.BertConfig(**ENCODER)), "its loss function is 'ForMaskedLMLoss'"),
    "a classifier": (
        lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**DECODER)),
        "its head is none, not a plain linear layer",
    ),
    "a head with an adapter": (lora_llama, "its head is ModulesToSaveWrapper, not a plain linear layer"),
    "no transformers model": (lambda: nn.Linear(2, 2), "Linear holds no transformers model"),
}


def made(build: Callable[[], nn.Module]) -> Any:
    """A model in training, without dropout, which would differ from one forward to the next."""
    torch.manual_seed(0)
    model = build().train()
    for module in model.modules():
        for name in ("p",) if isinstance(module, nn.Dropout) else ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


@pytest.fixture
def model() -> Any:
    return made(llama)


TERMS = 16 + 32 + 24
"""Of a loss: products along the hidden size, classes in a log-sum-exp, and rows."""


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(1, 25).reshape(2, 12)
    labels = ids.clone()
    labels[0, 3:5] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: Any, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    """Loss, gradients and output of one training forward."""
    model.zero_grad()
    output = model(**{**batch(), **more})
    output.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return output.loss.detach(), found, output


CAP = 1e-4
"""What no limit exceeds in fp32; a row too many or too few is off by more than 1e-2."""
CAPS = {torch.float32: CAP, torch.bfloat16: 0.05}
"""In bf16 results are rounded to 4e-3 of them."""


def assert_same_step(one: Any, expected: Any, exact: Any) -> None:
    """Loss and gradients agree, but for the order of sums."""
    dtype = next(iter(expected[1].values())).dtype
    for part in range(2):
        assert_step_close(one[part], expected[part], exact[part], cap=CAPS[dtype], dtype=dtype)


def state_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """All that a handle could leave behind."""
    return {
        (path, key): dict(value) if isinstance(value, dict) else value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_modules", "_buffers")
    }


def assert_is_the_plain_step(model: Any, **more: Any) -> None:
    """Loss and gradients in chunks are those of the plain model, and there are no logits."""
    expected, exact = with_exact(partial(step, model, **more))
    with attach_chunked_cross_entropy(model, chunk_bytes=SMALL):
        found = step(model, **more)
    assert found[2].logits.shape == (2, 12, 0)
    assert_same_step(found, expected, exact)


@pytest.mark.parametrize("name", SERVED)
def test_loss_and_gradients_are_those_of_the_plain_model(name: str) -> None:
    model = made(SERVED[name])
    is_mamba = type(model) is hf.MambaForCausalLM
    if is_mamba and "loss_function" not in inspect.getsource(type(model).forward):  # before transformers 5.23
        assert "reads its head's output outside of the loss function (getitem)" in str(why_not_chunked(model))
        return
    assert why_not_chunked(model) is None
    assert_is_the_plain_step(model)
    assert_is_the_plain_step(model, num_items_in_batch=torch.tensor(31))


@pytest.mark.parametrize("name", NOT_SERVED)
def test_a_model_that_cant_be_served_is_told_apart_beforehand(name: str) -> None:
    build, reason = NOT_SERVED[name]
    model = made(build)
    for is_training in (True, False):
        before, rng = state_of(model.train(is_training)), torch.random.get_rng_state()
        found = why_not_chunked(model)
        assert found is not None and reason in found
        assert state_of(model) == before and torch.equal(torch.random.get_rng_state(), rng)


class NormOfRows(nn.BatchNorm1d):
    """Normalizes all tokens of a batch, and keeps running statistics in training."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.flatten(0, -2)).view_as(hidden)


def test_a_model_in_evaluation_keeps_its_modes_and_running_statistics(model: Any) -> None:
    model.eval().model.norm = NormOfRows(16).train()
    model.model.layers[0].self_attn.attention_dropout = 0.5
    before, buffers = state_of(model), {name: each.clone() for name, each in model.named_buffers()}
    assert why_not_chunked(model) is None
    assert state_of(model) == before
    assert_same_tree(dict(model.named_buffers()), buffers)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite", "bamba"])
def test_a_loss_that_would_be_wrong_is_an_error(name: str) -> None:
    model = made(NOT_SERVED[name][0])
    expected = step(model)
    handle = attach_chunked_cross_entropy(model)
    with pytest.raises(ChunkedLossError, match=r"reads its head's output outside .*Call remove\(\) on the handle"):
        model(**batch())
    handle.remove()
    assert_same_tree(step(model)[:2], expected[:2])


@pytest.mark.parametrize("name", ["bert", "a classifier", "a head with an adapter", "no transformers model"])
def test_other_heads_and_losses_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"can't be chunked: its (head|loss)|holds no transformers model"):
        attach_chunked_cross_entropy(made(NOT_SERVED[name][0]))


def test_the_model_is_as_before_when_the_handle_is_gone(model: Any) -> None:
    before = state_of(model)
    handle = attach_chunked_cross_entropy(model)
    assert state_of(model) != before
    handle.remove()
    assert state_of(model) == before
    handle.remove()
    with pytest.raises(KeyError), attach_chunked_cross_entropy(model):
        raise KeyError
    assert state_of(model) == before
    attach_chunked_cross_entropy(model).remove()


def test_only_training_with_labels_is_changed(model: Any) -> None:
    ids = {"input_ids": batch()["input_ids"]}

    def answers() -> list[torch.Tensor]:
        found = [model.train()(**ids).logits]
        with torch.no_grad():
            found += [model(**batch()).logits, model.eval()(**batch()).logits, model(**batch()).loss]
        found += [model(**batch()).logits, model.generate(**ids, max_new_tokens=3, do_sample=False, pad_token_id=0)]
        found.append(model.lm_head(torch.ones(1, 16)))
        return found

    expected = answers()
    with attach_chunked_cross_entropy(model):
        for one, other in zip(answers(), expected, strict=True):
            assert torch.equal(one, other)


def test_evaluation_is_chunked_where_that_is_asked_for() -> None:
    model = made(llama).eval()
    expected = model(**batch())
    with attach_chunked_cross_entropy(model, evaluation=True, chunk_bytes=SMALL), torch.no_grad():
        found = model(**batch())
        assert torch.equal(model(batch()["input_ids"]).logits, expected.logits)
    assert_sums_close(found.loss, expected.loss, TERMS)
    assert found.logits.shape == (2, 12, 0)


@pytest.mark.parametrize("name", ["llama", "mamba, which widens its logits"])
def test_a_model_in_inference_mode_is_served(name: str) -> None:
    model = made(SERVED[name]).eval()
    if why_not_chunked(model) is not None:
        pytest.skip("Mamba before transformers 5.23 computes its loss by itself")
    expected = model(**batch()).loss
    with attach_chunked_cross_entropy(model, evaluation=True, chunk_bytes=SMALL), torch.inference_mode():
        assert_sums_close(model(**batch()).loss, expected, TERMS)


@pytest.fixture
def dynamo() -> Iterator[None]:
    """No code that another test has compiled, or that was run as it is since it had raised."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo, of its own
@pytest.mark.parametrize("fullgraph", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_compiled_model_is_served(fullgraph: bool, model: Any) -> None:
    expected = model(**batch()).loss
    with attach_chunked_cross_entropy(model, chunk_bytes=SMALL):
        compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
        assert_sums_close(compiled(**batch()).loss, expected, TERMS)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo, of its own
@pytest.mark.parametrize(
    ("term", "compiled", "fullgraph"),
    [
        pytest.param("sum", "a wrapper", False, marks=pytest.mark.slow),
        ("its size alone, in training", "a wrapper", True),
        pytest.param("its size alone", "in place", False, marks=pytest.mark.slow),
        pytest.param("its maximum, in training", "the head", False, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_loss_that_would_be_wrong_is_an_error(term: str, compiled: str, fullgraph: bool) -> None:
    build, reason = NOT_SERVED[f"a term by {term}"]
    model = call = made(build)
    attach_chunked_cross_entropy(model)
    if compiled == "a wrapper":
        call = torch.compile(model, backend="eager", fullgraph=fullgraph)
    else:
        (model if compiled == "in place" else model.lm_head).compile(backend="eager")
    for _ in range(2):
        with pytest.raises(Exception if fullgraph else ChunkedLossError, match=re.escape(reason)):
            call(**batch())


def test_logits_that_are_absent_are_a_plain_tensor_once_the_forward_is_over(model: Any) -> None:
    with attach_chunked_cross_entropy(model):
        logits = model(**batch()).logits
    assert (logits + 1).shape == (2, 12, 0) and logits.isfinite().all() and logits.new_zeros(3).shape == (3,)
    assert torch.cat([logits, torch.ones(2, 12, 1)], -1).detach().sum() == 24
    assert type(copy.deepcopy(logits)) is type(pickle.loads(pickle.dumps(logits))) is torch.Tensor


@pytest.mark.parametrize(
    ("compute", "function"),
    [
        (lambda logits: logits.sum(), "sum"),
        (lambda logits: logits.float()[:, :-1].logsumexp(-1).square().mean(), "logsumexp"),
        (lambda logits: logits.flatten(0, 1).softmax(-1).pow(2).mean(), "mean"),
        (lambda logits: nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(24).long()), "cross_entropy"),
        (lambda logits: logits.argmax(-1), "argmax"),
    ],
)
def test_a_loss_that_is_made_of_absent_logits_after_the_forward_is_refused(
    compute: Callable[[torch.Tensor], Any], function: str, model: Any
) -> None:
    with (
        attach_chunked_cross_entropy(model),
        pytest.raises(ChunkedLossError, match=rf"after the forward \({function}\)"),
    ):
        compute(model(**batch()).logits)


def test_labels_that_are_shifted_already_are_taken_as_they_are(model: Any) -> None:
    shifted = batch()["labels"].roll(-1, 1)
    assert_is_the_plain_step(model, shift_labels=shifted)
    assert not torch.equal(step(model, shift_labels=shifted)[0], step(model)[0])


def test_labels_may_be_given_by_position_and_outputs_be_a_tuple(model: Any) -> None:
    arguments = (batch()["input_ids"], None, None, None, None, batch()["labels"])
    expected = model(*arguments).loss
    with attach_chunked_cross_entropy(model, chunk_bytes=SMALL):
        loss, logits = model(*arguments, return_dict=False)[:2]
    assert_sums_close(loss, expected, TERMS)
    assert logits.shape == (2, 12, 0)


@pytest.mark.parametrize("chunk_bytes", ["auto", "6", 0, None, 1.5])
def test_the_bytes_of_a_chunk_are_a_count(chunk_bytes: Any, model: Any) -> None:
    with pytest.raises(ValueError, match=f"chunk_bytes={chunk_bytes!r} must be"):
        attach_chunked_cross_entropy(model, chunk_bytes=chunk_bytes)


def test_one_model_has_one_handle(model: Any) -> None:
    with attach_chunked_cross_entropy(model), pytest.raises(RuntimeError, match="in chunks already"):
        attach_chunked_cross_entropy(model)


def test_a_loss_of_the_users_own_is_refused(model: Any) -> None:
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    reason = why_not_chunked(model)
    assert reason is not None and "its loss function is '<lambda>'" in reason


def test_a_head_that_is_wrapped_later_is_found_out(model: Any) -> None:
    handle = attach_chunked_cross_entropy(model)
    model.lm_head.forward = lambda hidden: nn.functional.linear(hidden, 2 * model.lm_head.weight)
    with pytest.raises(ChunkedLossError, match="forward was replaced after the handle was attached"):
        model(**batch())
    handle.remove()
    assert model(**batch()).logits.shape == (2, 12, 32)


def test_a_forward_that_failed_leaves_the_head_as_it_is(model: Any) -> None:
    expected = model.lm_head(torch.ones(1, 16))
    with attach_chunked_cross_entropy(model):
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[99]]), labels=torch.tensor([[1]]))
        assert torch.equal(model.lm_head(torch.ones(1, 16)), expected)


def test_a_copy_of_the_model_has_no_handle(model: Any) -> None:
    expected = step(model)
    with attach_chunked_cross_entropy(model):
        other = copy.deepcopy(model)
        found = step(other)
        assert found[2].logits.shape == (2, 12, 32)
        assert_same_tree(found[:2], expected[:2])
        with attach_chunked_cross_entropy(other):
            assert step(other)[2].logits.shape == (2, 12, 0)
    with TokenTune(ratio=0.5).attach(model), attach_chunked_cross_entropy(model):
        other = copy.deepcopy(model)
        assert other.loss_function is ForCausalLMLoss, "a copy must not hold the handle of its original"
        assert_same_tree(step(other)[:2], expected[:2])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(reentrant: bool, model: Any) -> None:
    expected, exact = with_exact(partial(step, model))
    enable_checkpointing(model, {"use_reentrant": reentrant})
    with attach_chunked_cross_entropy(model, chunk_bytes=SMALL):
        assert_same_step(step(model), expected, exact)


def test_micro_batches_add_up(model: Any) -> None:
    num_items = (batch()["labels"][:, 1:] != -100).sum()
    expected, exact = with_exact(lambda: step(model)[1])
    with attach_chunked_cross_entropy(model, chunk_bytes=SMALL):
        for row in range(2):
            part = {name: value[row : row + 1] for name, value in batch().items()}
            model(**part, num_items_in_batch=num_items).loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_step_close(found, expected, exact, cap=CAP)


def test_autocast_is_followed(model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch()).loss
        with attach_chunked_cross_entropy(model, chunk_bytes=SMALL):
            found = model(**batch()).loss
    # Scores are rounded to bf16 at the same place, and summed in fp32.
    assert_sums_close(found, expected, TERMS)
    assert not torch.equal(found, model(**batch()).loss)


def test_the_weight_is_read_inside_the_heads_own_forward(model: Any) -> None:
    # As engines do that gather a weight before a module's forward and let go of it afterwards.
    model.lm_head.weight.requires_grad_(False)
    expected, exact = with_exact(partial(step, model))
    whole = model.lm_head.weight.data
    model.lm_head.weight.data = torch.zeros_like(whole)

    def gather(module: Any, args: Any) -> None:
        module.weight.data = whole

    def release(module: Any, args: Any, output: Any) -> None:
        module.weight.data = torch.zeros_like(whole)

    model.lm_head.register_forward_pre_hook(gather)
    model.lm_head.register_forward_hook(release)
    with attach_chunked_cross_entropy(model, chunk_bytes=SMALL):
        assert_same_step(step(model), expected, exact)


def attached_if(chunked: bool, model: nn.Module) -> AbstractContextManager[object]:
    return attach_chunked_cross_entropy(model, chunk_bytes=SMALL) if chunked else nullcontext()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("order", ["bottom2up", "top2down"])
def test_hift_trains_the_same_with_the_head_active_and_frozen(order: Any, tied: bool) -> None:
    start = tiny_llama(tied=tied)

    def trained(*, chunked: bool) -> dict[str, torch.Tensor]:
        model = twin(start)
        with attached_if(chunked, model):
            optimizer = HiFT(model, torch.optim.SGD, lr=0.1, config=HiFTConfig.paper(order=order))
            for one in token_batches(2 * optimizer.num_groups):
                model(**one).loss.backward()
                head = model.get_output_embeddings().weight  # type: ignore[operator]
                assert (head.grad is not None) is bool(head.requires_grad)
                optimizer.step()
        return {name: value - before[name] for name, value in weights(model).items()}

    before = weights(start)
    expected, exact = with_exact(partial(trained, chunked=False))
    # How far the weights moved, so that their own size hides nothing.
    assert_step_close(trained(chunked=True), expected, exact, cap=1e-3)


def test_sft_takes_the_heads_active_entries_out_of_its_gradient() -> None:
    start = tiny_llama()

    def trained(*, chunked: bool) -> dict[str, Any]:
        model = twin(start)
        config = SFTConfig(
            density=0.1, form="optimizer", targets=["lm_head", "q_proj"], selection="momentum", reselection_interval=3
        )
        with attached_if(chunked, model):
            optimizer = SFT(model, config=config, lr=1e-2, total_steps=8)
            for one in token_batches(8):
                model(**one).loss.backward()
                optimizer.step()
        return optimizer.deltas()

    expected, exact = with_exact(partial(trained, chunked=False))
    found = trained(chunked=True)
    assert "lm_head.weight" in expected
    for deltas in (found, exact):
        assert all(torch.equal(deltas[name].indices, delta.indices) for name, delta in expected.items())
    values = [{name: delta.values for name, delta in deltas.items()} for deltas in (found, expected, exact)]
    assert_step_close(*values, cap=1e-3)


@pytest.mark.parametrize("four_bit", [False, True])
def test_adapters_under_a_plain_head(four_bit: bool) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_llama()
    if four_bit:
        bitsandbytes = pytest.importorskip("bitsandbytes")
        for layer in model.model.layers:  # type: ignore[union-attr]
            old = layer.self_attn.q_proj
            new = bitsandbytes.nn.Linear4bit(old.in_features, old.out_features, bias=False, quant_type="nf4")
            new.load_state_dict({"weight": old.weight.data})
            layer.self_attn.q_proj = new.to("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for what is deprecated
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.train()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    assert why_not_chunked(adapted) is None
    assert_is_the_plain_step(adapted)


def test_a_head_in_another_dtype_than_its_hidden_states_is_served_wherever_autocast_lets_it_run(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.bfloat16())
    # Asked inside of autocast or not, where its own forward could not run either.
    assert why_not_chunked(model) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert why_not_chunked(model) is None
        expected, exact = with_exact(partial(step, model))
    with attach_chunked_cross_entropy(model, chunk_bytes=SMALL):
        with pytest.raises(
            ValueError, match=r"hidden states in torch.float32 .* torch.bfloat16\. Use one dtype, or autocast"
        ):
            model(**batch())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = step(model)
    assert_step_close(found[0], expected[0], exact[0], cap=1e-3)


@pytest.mark.parametrize("num_items", [None, torch.tensor(40)], ids=["mean", "num_items"])
@pytest.mark.parametrize("chunked_first", [False, True])
@pytest.mark.parametrize("removed_first", ["tokens", "chunks"])
def test_tokentune_scores_its_selected_rows_in_chunks(
    removed_first: str, chunked_first: bool, num_items: torch.Tensor | None, model: Any
) -> None:
    dense, exact_dense = with_exact(partial(step, model))
    before = state_of(model)

    def tuned() -> Any:
        with TokenTune(ratio=0.4, seed=3).attach(model):
            return step(model, num_items_in_batch=num_items)

    expected, exact = with_exact(tuned)
    assert not torch.equal(expected[0], dense[0])
    attaches: dict[str, Callable[[], Any]] = {
        "tokens": lambda: TokenTune(ratio=0.4, seed=3).attach(model),
        "chunks": lambda: attach_chunked_cross_entropy(model, chunk_bytes=SMALL),
    }
    order = ("chunks", "tokens") if chunked_first else ("tokens", "chunks")
    if not chunked_first:
        with attaches["tokens"]():
            assert why_not_chunked(model) is None
    handles = {name: attaches[name]() for name in order}
    found = step(model, num_items_in_batch=num_items)
    assert found[2].logits.shape == (2, 5, 0)
    assert_same_step(found, expected, exact)
    handles.pop(removed_first).remove()
    if removed_first == "tokens":
        assert_same_step(step(model), dense, exact_dense)
    else:
        assert step(model)[2].logits.shape == (2, 5, 32)
    handles.popitem()[1].remove()
    assert state_of(model) == before
    assert_same_tree(step(model)[:2], dense[:2])


def test_a_model_that_fsdp2_has_sharded_is_refused_in_training() -> None:
    model = tiny_llama()
    with attach_chunked_cross_entropy(model):
        # What fully_shard does to a model's class.
        model.__class__ = type("FSDPLlamaForCausalLM", (FSDPModule, type(model)), {})
        ids = torch.arange(12).view(1, 12)
        with pytest.raises(ChunkedLossError, match="FSDP2 shards the head's weight over the ranks"):
            model(input_ids=ids, labels=ids)
        with torch.no_grad():
            assert model(input_ids=ids, labels=ids).logits.shape[1] == 12


def test_a_model_that_zero3_has_sharded_is_refused_in_training() -> None:
    model = tiny_llama()
    with attach_chunked_cross_entropy(model):
        # What DeepSpeed puts on every parameter that it shares out.
        model.lm_head.weight.ds_id = 0  # type: ignore[assignment]
        ids = torch.arange(12).view(1, 12)
        with pytest.raises(ChunkedLossError, match="ZeRO-3 shards the head's weight over the ranks"):
            model(input_ids=ids, labels=ids)
        with torch.no_grad():
            assert model(input_ids=ids, labels=ids).logits.shape[1] == 12
