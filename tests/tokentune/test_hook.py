"""What a handle promises and what it refuses, on one tiny model: longer than other files for its many refusals."""

import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import slivertune as st
from slivertune.core.checkpointing import disable_checkpointing, enable_checkpointing
from tests.helpers.models import VOCAB, assert_same_tree, tiny_bert, tiny_gpt2, tiny_llama
from tests.helpers.tolerance import assert_step_close, with_exact
from tests.tokentune.reference import selected

TUNE = st.TokenTune(ratio=0.5)


@pytest.fixture
def model() -> Any:
    return tiny_llama()


def batch(length: int = 12, size: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCAB, (size, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def gradients(model: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**(inputs or batch())).loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def anatomy(model: nn.Module) -> Any:
    """All that hooking could leave behind: attributes, children and hooks of every module, and the state_dict."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_always_called")
    modules = {
        name: (
            {key: value for key, value in vars(module).items() if not key.startswith("_") or key == "_loss_function"},
            {key: id(child) for key, child in module.named_children()},
            {key: len(getattr(module, key)) for key in hooks},
        )
        for name, module in model.named_modules()
    }
    return modules, {name: each.clone() for name, each in model.state_dict().items()}


def registry() -> dict[str, Any]:
    return dict(ALL_ATTENTION_FUNCTIONS._local_mapping), dict(ALL_ATTENTION_FUNCTIONS._global_mapping)  # type: ignore[return-value]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_removed_in_any_order_everything_is_as_before(order: tuple[int, ...]) -> None:
    models = [tiny_llama(), tiny_gpt2(), tiny_llama(seed=1)]
    before = [(anatomy(model), gradients(model)) for model in models]
    for model in models:
        model.zero_grad()
    functions = registry()
    handles = [TUNE.attach(model) for model in models]
    assert registry() != functions
    for model in models:
        gradients(model)
        model.zero_grad()
    for index in order:
        handles[index].remove()
        handles[index].remove()  # a second time does nothing
        assert_same_tree(anatomy(models[index]), before[index][0])
        for still in set(range(3)) - set(order[: order.index(index) + 1]):
            norm = "model.norm.weight" if still != 1 else "transformer.ln_f.weight"
            assert not torch.equal(gradients(models[still])[norm], before[still][1][norm])
            models[still].zero_grad()
    assert registry() == functions
    for model, (_, expected) in zip(models, before, strict=True):
        assert_same_tree(gradients(model), expected)


def test_a_context_takes_the_hook_off_after_an_error(model: Any) -> None:
    before = anatomy(model)
    with pytest.raises(KeyError), TUNE.attach(model):
        raise KeyError
    assert_same_tree(anatomy(model), before)


@pytest.mark.parametrize(
    "mixer",
    [
        nn.Conv1d(1, 1, 1),
        nn.BatchNorm1d(32),
        nn.InstanceNorm1d(32),
        nn.GroupNorm(2, 32),
        nn.GRU(32, 32),
        nn.ZeroPad2d((0, 0, 1, -1)),  # shifts tokens by one, as RWKV does
    ],
    ids=lambda mixer: type(mixer).__name__,
)
def test_a_model_that_cannot_be_hooked_is_left_as_it_was(model: Any, mixer: nn.Module) -> None:
    model.model.layers[2].mlp = nn.Sequential(mixer)
    before, functions = anatomy(model), registry()
    with pytest.raises(ValueError, match=f"{type(mixer).__name__} in mlp mixes tokens inside a layer"):
        TUNE.attach(model)
    assert_same_tree(anatomy(model), before)
    assert registry() == functions
    model.model.layers[2].mlp = nn.Identity()
    TUNE.attach(model).remove()


def test_the_hook_changes_neither_parameters_nor_the_state_dict(model: Any) -> None:
    before = {name: each.clone() for name, each in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    with TUNE.attach(model):
        assert [name for name, _ in model.named_parameters()] == names
        assert_same_tree(dict(model.state_dict()), before)


def test_the_latest_training_selection_survives_evaluation_and_backward(model: Any) -> None:
    with TUNE.attach(model) as handle:
        assert handle.last_selection is None
        loss = model(**batch()).loss
        kept = selected(handle).clone()
        assert kept.dtype == torch.int64 and kept.shape == (2, 6)
        loss.backward()
        with torch.no_grad():
            model(**batch(seed=1))
        model.eval()
        model(**batch(seed=2))
        assert torch.equal(handle.last_selection, kept)
        assert handle.num_draws == 1
        model.train()
        model(**batch())
        assert not torch.equal(handle.last_selection, kept)
        assert handle.num_draws == 2


def test_a_resumed_run_draws_what_an_uninterrupted_one_would(model: Any) -> None:
    drawn = []
    with TUNE.attach(model) as handle:
        for index in range(4):
            if index == 2:
                state = handle.state_dict()
            model(**batch())
            drawn.append(handle.last_selection)
    with TUNE.attach(model) as handle:
        handle.load_state_dict(state)
        for expected in drawn[2:]:
            model(**batch())
            assert torch.equal(handle.last_selection, expected)


def test_the_state_is_plain_and_another_seed_or_version_is_refused(tmp_path: Any) -> None:
    with st.TokenTune(ratio=0.5, seed=3).attach(tiny_llama()) as handle:
        state = handle.state_dict()
        torch.save(state, tmp_path / "state.pt")
        assert torch.load(tmp_path / "state.pt", weights_only=True) == state
        with pytest.raises(ValueError, match="saved with seed=4, and this run has seed=3"):
            handle.load_state_dict({**state, "seed": 4})
        with pytest.raises(ValueError, match=r"has version 9, and this library reads 1\. Resume with"):
            handle.load_state_dict({**state, "version": 9})


def test_chunks_are_the_default_of_causal_models_and_single_tokens_of_others() -> None:
    def runs_of(model: Any, inputs: dict[str, torch.Tensor]) -> int:
        with st.TokenTune(ratio=0.25, seed=1).attach(model) as handle:
            model(**inputs)
        return int((selected(handle).diff(dim=1) > 1).sum(dim=1).max())

    assert runs_of(tiny_llama(), batch(64)) <= 1
    assert runs_of(tiny_bert(), {**batch(64), "labels": torch.tensor([0, 1])}) > 3


def test_classification_always_selects_the_first_and_the_last_real_token() -> None:
    model = tiny_bert()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 7:] = 0
    for seed in range(5):
        with st.TokenTune(ratio=0.2, seed=seed).attach(model) as handle:
            model(input_ids=batch()["input_ids"], attention_mask=mask, labels=torch.tensor([0, 1]))
        assert selected(handle).tolist() == [[0, 6], [0, 11]]


def test_a_distilled_classifier_has_a_second_position_in_every_draw() -> None:
    sizes = {"max_length": 32, "num_mel_bins": 16, "num_hidden_layers": 2}
    model = tiny("ASTForAudioClassification", "ASTConfig", **sizes)
    with st.TokenTune(num_tokens=3).attach(model) as handle:
        model(input_values=torch.randn(2, 32, 16), labels=torch.tensor([0, 1])).loss.backward()
    assert selected(handle)[:, :2].tolist() == [[0, 1]] * 2


def test_prefer_labels_selects_scored_positions_first(model: Any) -> None:
    inputs = batch(20)
    labels = inputs["labels"].clone()
    labels[:, :14] = -100  # positions 13 to 18 are scored, each on the next token
    with st.TokenTune(num_tokens=6, prefer_labels=True).attach(model) as handle:
        model(input_ids=inputs["input_ids"], labels=labels)
    assert selected(handle).tolist() == [[13, 14, 15, 16, 17, 18]] * 2


@pytest.mark.parametrize("take", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_hooked_model_is_not_hooked(take: Callable[[Any], Any], model: Any) -> None:
    expected = gradients(model)
    with TUNE.attach(model) as handle, st.attach_chunked_cross_entropy(model):
        twin = take(model)
        found = gradients(twin)
        assert handle.num_draws == 0 and twin(**batch()).logits.shape == (2, 12, VOCAB)
        assert twin.loss_function is type(tiny_llama()).loss_function.fget(tiny_llama())  # type: ignore[attr-defined]
    assert_same_tree(found, expected)


@pytest.mark.parametrize("take", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_handle_is_neither_copied_nor_pickled_and_says_what_to_do_instead(
    take: Callable[[Any], Any], model: Any
) -> None:
    with TUNE.attach(model) as handle, pytest.raises(TypeError, match=r"Attach handle.settings to it"):
        take(handle)
    with st.attach_chunked_cross_entropy(model) as chunks, pytest.raises(TypeError, match="Call attach_chunked"):
        take(chunks)


def _copied(path: str) -> Callable[[Any], None]:
    """Puts a copy in the place of a module."""

    def change(model: Any) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, copy.deepcopy(model.get_submodule(path)))

    return change


def _one_layer_more(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))


def _one_layer_less(model: Any) -> None:
    del model.model.layers[1]


def _new_list(model: Any) -> None:
    model.model.layers = nn.ModuleList(list(model.model.layers)[:1])


def _one_module_more(model: Any) -> None:
    model.model.layers[0].adapter = nn.Linear(32, 32)


@pytest.mark.parametrize(
    "change",
    [
        _copied("model.layers.1.self_attn"),
        _copied("model.layers.1"),
        _copied("model.layers.0.mlp"),
        _one_layer_more,
        _one_layer_less,
        _new_list,
        _one_module_more,
    ],
)
def test_a_model_whose_modules_were_changed_after_the_hook_is_refused_until_it_is_attached_again(
    change: Callable[[Any], None], model: Any
) -> None:
    handle = TUNE.attach(model)
    gradients(model)
    change(model)
    with pytest.raises(RuntimeError, match=r"replaced after TokenTune was attached.*remove\(\) on the handle, change"):
        model(**batch())
    handle.remove()
    model.config.num_hidden_layers = len(model.model.layers)
    with TUNE.attach(model):
        assert gradients(model)


@pytest.mark.parametrize("register", [ALL_ATTENTION_FUNCTIONS.register, ALL_ATTENTION_FUNCTIONS.__setitem__])
def test_a_function_that_is_registered_after_the_hook_is_refused_until_it_is_attached_again(
    register: Callable[[str, Any], None], monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    calls: list[int] = []

    def attend(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", dict(ALL_ATTENTION_FUNCTIONS._local_mapping))
    monkeypatch.setattr(type(ALL_ATTENTION_FUNCTIONS), "_global_mapping", dict(ALL_ATTENTION_FUNCTIONS._global_mapping))
    handle = TUNE.attach(model)
    register("sdpa", attend)
    with pytest.raises(RuntimeError, match=r"another function was registered .* remove\(\) on the handle, register"):
        model(**batch())
    handle.remove()
    with TUNE.attach(model):
        assert gradients(model) and calls


def test_what_a_script_may_do_between_steps_leaves_the_gradients_of_the_selected_tokens() -> None:
    def after(*changes: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
        model = tiny_llama()
        with TUNE.attach(model) as handle:
            for change in changes:
                change(model)
            found = gradients(model)
            assert handle.num_draws == 1
        return found

    expected = after()
    assert_same_tree(after(lambda model: model.eval(), lambda model: model(**batch()), lambda m: m.train()), expected)
    found = after(
        lambda model: enable_checkpointing(model, {"use_reentrant": False}),
        lambda model: disable_checkpointing(model),
    )
    assert_same_tree(found, expected)
    # The same operations once more, on rows that stand elsewhere in memory.
    found = after(lambda model: enable_checkpointing(model, {"use_reentrant": False}))
    assert_step_close(found, *with_exact(after), cap=1e-4)
    model = tiny_llama().to(torch.float64)
    with TUNE.attach(model):
        in_fp64 = gradients(model)
    assert_same_tree(after(lambda model: model.to(torch.float64)), in_fp64)


def test_hift_finds_the_layers_of_a_hooked_model(model: Any) -> None:
    expected = st.find_layers(tiny_llama())
    with TUNE.attach(model):
        assert st.find_layers(model) == expected


def test_layers_that_no_gradient_reaches_run_as_they_are(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("model.layers.2"))
    sizes: list[int] = []
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda module, args, output: sizes.append(output.shape[1]))
    with TUNE.attach(model):
        model(**batch())
    assert sizes == [12, 12, 6]  # of the last one's other rows, only keys and values are computed


SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}


def tiny(kind: str, config: str, **options: Any) -> Any:
    """A model of one layer, of a class that has no helper of its own."""
    settings = getattr(transformers, config)(**{**SIZES, "num_hidden_layers": 1, **options})
    return getattr(transformers, kind)(settings).train()


BART = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 1)


def flex() -> nn.Module:
    model = tiny_llama()
    model.config._attn_implementation = "flex_attention"
    return model


class Pair(nn.Module):
    """Two encoders, of which a script calls one or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.questions, self.answers = (transformers.BertModel(tiny_bert().config).train() for _ in range(2))


def timesformer() -> Any:
    return tiny("TimesformerForVideoClassification", "TimesformerConfig", image_size=8, patch_size=4, num_frames=2)


def two_stacks() -> nn.Module:
    model = tiny_llama()
    model.more = nn.ModuleList([copy.deepcopy(model.model.layers[0])])
    return model


@pytest.mark.parametrize(
    ("build", "settings", "text"),
    [
        (
            lambda: tiny("BartForConditionalGeneration", "BartConfig", d_model=16, **BART),
            {},
            "is an encoder-decoder: encoder and decoder have tokens of their own",
        ),
        (
            lambda: tiny("AlbertForMaskedLM", "AlbertConfig", embedding_size=16),
            {},
            "has no lists of transformer layers with attention",
        ),
        (flex, {}, "attn_implementation='flex_attention' takes no mask for single queries"),
        (two_stacks, {}, "has 2 lists of transformer layers"),
        (lambda: nn.Linear(2, 2), {}, "holds no transformers model"),
        (
            Pair,
            {},
            r"Pair holds another transformers model that trains, answers \(BertModel\), and TokenTune hooks one",
        ),
        (timesformer, {}, "attend over time and over space apart"),
        (
            tiny_bert,
            {"prefer_labels": True},
            r"BertForSequenceClassification has no label per token\. Leave out prefer_labels=True",
        ),
        (
            lambda: tiny("OPTForCausalLM", "OPTConfig", ffn_dim=16, word_embed_proj_dim=16),
            {"checkpoint_mlp": True},
            "checkpoint_mlp=True, but OPTDecoderLayer has no module for its feed-forward",
        ),
    ],
)
def test_models_that_it_cannot_hook_are_refused_with_the_reason(
    build: Callable[[], nn.Module], settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        st.TokenTune(ratio=0.5, **settings).attach(build())


def test_of_two_models_each_is_hooked_by_itself_and_a_frozen_one_is_none_of_ours() -> None:
    pair = Pair()
    for each in (pair.questions, pair.answers):
        with TUNE.attach(each) as handle:
            each(input_ids=batch()["input_ids"])
            assert handle.num_draws == 1
    pair.answers.requires_grad_(False)
    TUNE.attach(pair).remove()


def test_a_second_hook_on_the_same_model_is_refused(model: Any) -> None:
    with TUNE.attach(model):
        for each in (model, model.model):
            with pytest.raises(RuntimeError, match=r"has TokenTune attached already\. Call remove"):
                TUNE.attach(each)
    with TUNE.attach(model.model), pytest.raises(RuntimeError, match="has TokenTune attached already"):
        TUNE.attach(model)
    TUNE.attach(model).remove()


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"output_attentions": True}, "output_attentions=True in a training forward"),
        ({"output_hidden_states": True}, "output_hidden_states=True in a training forward"),
        ({"labels": None}, r"this training forward has no labels=\. A loss computed outside"),
        ({"labels": torch.ones(2, 5, dtype=torch.long)}, r"labels of shape \(2, 5\) don't match the tokens' \(2, 12\)"),
        ({"logits_to_keep": 3}, "logits_to_keep=3 in a training forward"),
        ({"input_ids": None}, "a training forward without input_ids= or inputs_embeds="),
    ],
)
def test_calls_that_it_cannot_serve_are_refused_with_the_reason(inputs: dict[str, Any], text: str, model: Any) -> None:
    with TUNE.attach(model):
        with pytest.raises(ValueError, match=text):
            model(**{**batch(), **inputs})
        model(**batch()).loss.backward()  # the refused call has left nothing behind
        if inputs.get("input_ids", batch) is not None:
            with torch.no_grad():
                model(**{**batch(), **inputs, "labels": None})  # evaluation is not concerned


def test_choices_are_refused_where_they_are_not_flat_and_hooked_where_they_are() -> None:
    model: Any = transformers.BertForMultipleChoice(tiny_bert().config).train()
    inputs = {"input_ids": batch(size=6)["input_ids"].view(2, 3, 12), "labels": torch.tensor([0, 2])}
    with TUNE.attach(model), pytest.raises(ValueError, match=r"input_ids of shape \(2, 3, 12\).*attach to the part"):
        model(**inputs)
    with st.TokenTune(ratio=0.5, always=(0, -1)).attach(model.base_model) as handle:
        model(**inputs).loss.backward()
    assert selected(handle).shape == (6, 6)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_removing_between_forward_and_backward_of_checkpointed_layers_is_refused(
    use_reentrant: bool, model: Any
) -> None:
    enable_checkpointing(model, {"use_reentrant": use_reentrant})
    with TUNE.attach(model):
        loss = model(**batch()).loss
    with pytest.raises(RuntimeError, match="removed between the forward and the backward of checkpointed layers"):
        loss.backward()


def test_removing_between_forward_and_backward_changes_nothing_without_checkpoints(model: Any) -> None:
    with TUNE.attach(model):
        expected = gradients(model)
    model.zero_grad()
    with TUNE.attach(model):
        loss = model(**batch()).loss
    loss.backward()
    assert_same_tree({name: each.grad for name, each in model.named_parameters()}, expected)


def test_hidden_states_of_checkpointed_layers_are_refused() -> None:
    model = tiny_bert()
    inputs = {**batch(), "labels": torch.tensor([0, 1]), "output_hidden_states": True}
    with TUNE.attach(model):
        assert len(model(**inputs).hidden_states) == len(model.bert.encoder.layer) + 1
        enable_checkpointing(model)
        with pytest.raises(
            ValueError, match="output_hidden_states=True in a training forward under TokenTune: checkpointed"
        ):
            model(**inputs)


def test_other_hooks_see_the_arguments_where_the_caller_put_them(model: Any) -> None:
    seen: list[tuple[int, set[str]]] = []
    with TUNE.attach(model):
        model.register_forward_hook(
            lambda module, args, kwargs, output: seen.append((len(args), set(kwargs))), with_kwargs=True
        )
        model(**batch())
        model(batch()["input_ids"], labels=batch()["labels"])
    assert seen == [(0, {"input_ids", "labels"}), (1, {"labels"})]


def cache_of_earlier_tokens(model: Any) -> dict[str, Any]:
    with torch.no_grad():
        return {"past_key_values": model(input_ids=batch()["input_ids"], use_cache=True).past_key_values}


@pytest.mark.parametrize(
    ("build", "options", "text"),
    [
        (
            lambda: tiny("DebertaV2ForMaskedLM", "DebertaV2Config", num_hidden_layers=2),
            lambda model: {},
            "reads the hidden states of all layers by itself",
        ),
        (
            lambda: tiny("MixtralForCausalLM", "MixtralConfig", num_key_value_heads=1, num_local_experts=2),
            lambda model: {"output_router_logits": True},
            "output_router_logits=True in a training forward",
        ),
        (tiny_llama, cache_of_earlier_tokens, "past_key_values in a training forward"),
    ],
)
def test_what_some_models_do_in_a_forward_is_refused(
    build: Callable[[], Any], options: Callable[[Any], dict[str, Any]], text: str
) -> None:
    model = build()
    given = options(model)
    with TUNE.attach(model), pytest.raises(ValueError, match=text):
        model(**batch(), **given)


def test_more_tokens_than_the_batch_has_are_refused() -> None:
    tune, model = st.TokenTune(num_tokens=13), tiny_llama()
    with tune.attach(model), pytest.raises(ValueError, match="num_tokens=13 is more than the 12"):
        model(**batch())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks by the old name
def test_peft_after_the_hook_is_refused(model: Any) -> None:
    peft = pytest.importorskip("peft")
    TUNE.attach(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    # PEFT before 0.21 calls the model's forward, past the hooks.
    replaced, past = "of LlamaAttention, or its forward, was replaced after", "runs outside of a call of Llama"
    with pytest.raises(RuntimeError, match=f"{replaced} TokenTune|{past}ForCausalLM, where TokenTune draws"):
        wrapped(**batch())


def test_a_forward_that_was_replaced_after_the_hook_is_refused_and_stays(model: Any) -> None:
    handle = TUNE.attach(model)
    projection = model.model.layers[0].self_attn.q_proj
    projection.forward = replacement = partial(projection.forward)
    with pytest.raises(RuntimeError, match="q_proj of LlamaAttention, or its forward, was replaced"):
        model(**batch())
    handle.remove()
    assert projection.forward is replacement  # not ours to take off
    projection.forward(torch.zeros(1, 32))


@pytest.mark.parametrize("dressed", [lambda own: lambda function: function, wraps], ids=["plain", "wraps"])
@pytest.mark.parametrize("attach_first", [False, True], ids=["before", "after"])
def test_a_models_forward_that_was_replaced_by_one_with_more_arguments(
    attach_first: bool, dressed: Callable[[Any], Any], model: Any
) -> None:
    own = model.forward

    @dressed(own)
    def weighted(input_ids: Any, labels: Any = None, weight: float = 1.0, **kwargs: Any) -> Any:
        output = own(input_ids=input_ids, labels=labels, **kwargs)
        output["loss"] = output.loss * weight
        return output

    if not attach_first:
        model.forward = weighted
    with TUNE.attach(model) as handle:
        model.forward = weighted
        inputs = batch()
        losses = []
        for weight in (1.0, 3.0):
            handle.num_draws = 0
            losses.append(model(**inputs, weight=weight).loss)
            assert handle.returns_selected and handle.num_draws == 1
    assert torch.equal(losses[1], losses[0] * 3.0)


def test_changing_the_attention_after_the_hook_is_refused(model: Any) -> None:
    with TUNE.attach(model):
        model.set_attn_implementation("eager")
        with pytest.raises(RuntimeError, match="the attention was changed from 'sdpa' to 'eager'"):
            model(**batch())


def test_layers_that_are_called_without_the_model_are_refused(model: Any) -> None:
    with TUNE.attach(model):
        with pytest.raises(RuntimeError, match=r"runs outside of a call of LlamaForCausalLM.*attach to the part"):
            model.model(input_ids=batch()["input_ids"])
        with torch.no_grad():
            model.model(input_ids=batch()["input_ids"])


def test_checkpoint_mlp_gives_the_same_gradients_and_saves_less(model: Any) -> None:
    saved, found = {}, {}
    for checkpoint_mlp in (False, True):
        with st.TokenTune(ratio=0.5, checkpoint_mlp=checkpoint_mlp).attach(model):
            storages: dict[int, int] = {}

            def pack(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model(**batch()).loss
            saved[checkpoint_mlp] = sum(storages.values())
            model.zero_grad()
            loss.backward()
            found[checkpoint_mlp] = {name: each.grad.clone() for name, each in model.named_parameters()}
    assert_same_tree(found[True], found[False])
    assert saved[True] < 0.8 * saved[False]


def test_a_bare_backbone_gives_hidden_states_of_all_tokens() -> None:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = tiny("BertModel", "BertConfig", num_hidden_layers=2, **dropout)
    ids = batch()["input_ids"]
    expected, exact = with_exact(lambda: model(ids).last_hidden_state)
    with TUNE.attach(model) as handle:
        hidden = model(ids).last_hidden_state
        # Of some rows, and of all.
        assert_step_close(hidden, expected, exact, cap=1e-4)
        (gradient,) = torch.autograd.grad(hidden.square().sum(), [model.embeddings.position_embeddings.weight])
        used = set(selected(handle).flatten().tolist())
        assert {row for row in range(12) if gradient[row].abs().sum() > 0} == used


def test_accelerate_saves_and_restores_the_draws(tmp_path: Any) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(tiny_llama())
    with TUNE.attach(model) as handle:
        accelerator.register_for_checkpointing(handle)
        model(**batch())
        accelerator.save_state(str(tmp_path))
        model(**batch())
        expected = selected(handle)
        accelerator.load_state(str(tmp_path))
        assert handle.num_draws == 1
        model(**batch())
        assert torch.equal(selected(handle), expected)
