"""TokenTune with what else one trains with, against the naive reference for the selections that were drawn.

Longer than other files, since each combination is a test or two, and all share the comparison at its head.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import slivertune as st
from slivertune.training.options.table import RENAMED
from tests.helpers.models import assert_all_moved, weights
from tests.helpers.pairwise import rotated
from tests.helpers.tolerance import assert_step_close, exact_sums, with_exact
from tests.tokentune.families import (
    BATCH,
    CHECKPOINTING,
    FAMILIES,
    HIDDEN,
    VIT,
    VOCAB,
    Batch,
    Family,
    checkpointed,
    families,
    make_batch,
    make_model,
)
from tests.tokentune.reference import (
    CAP,
    Expected,
    Gradients,
    add,
    assert_same,
    assert_same_bits,
    assert_same_gradients,
    distance,
    model_gradients,
    reference_gradients,
    reference_loss,
    selected,
    take_gradients,
)

hf: Any = transformers

LLAMA = FAMILIES["llama, grouped"]
TUNE = st.TokenTune(ratio=0.4, pattern="random")
TUNE_AGAIN = st.TokenTune(ratio=0.4, pattern="random", checkpoint_mlp=True)

WITH_CHECKPOINTING = pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])
PLAIN_OR_CHECKPOINTING = pytest.mark.parametrize("use_reentrant", CHECKPOINTING.values(), ids=CHECKPOINTING)


def with_copy(family: Family, use_reentrant: bool | None = None) -> tuple[Any, Any]:
    """A model, as `checkpointed` makes it, and a plain copy that is not going to be hooked."""
    model = make_model(family)
    unhooked = copy.deepcopy(model)
    return checkpointed(model, use_reentrant), unhooked


def changes(model: nn.Module, before: dict[str, torch.Tensor]) -> Gradients:
    """What updates have added to the weights."""
    return {name: value - before[name] for name, value in weights(model).items()}


def assert_is_the_reference(
    model: nn.Module,
    family: Family,
    batch: Batch,
    tune: st.TokenTune = TUNE,
    *,
    unhooked: nn.Module | None = None,
    use_reentrant: bool | None = None,
    num_items: Any = None,
) -> None:
    """A hooked model's loss and gradients are those of the reference on a copy that was never hooked.

    Args:
        model: The model.
        family: Its family.
        batch: As the model takes it.
        tune: What to select.
        unhooked: The copy; None makes one.
        use_reentrant: How the layers are computed again in the backward; None keeps what they saved.
        num_items: Labels in all forwards of an update; None: the mean of this forward.
    """
    unhooked = copy.deepcopy(model) if unhooked is None else unhooked
    options = {} if num_items is None else {"num_items_in_batch": num_items}
    with tune.attach(checkpointed(model, use_reentrant)) as handle:
        loss, gradients = model_gradients(model, batch, **options)
        expected = reference_gradients(
            unhooked, family, batch, selected(handle), None if num_items is None else float(num_items)
        )
    assert_same(loss, gradients, expected)


# ---- LoRA, and weights in 4 bits


def lora(model: nn.Module, **options: Any) -> Any:
    """LoRA around all linear layers, with second matrices that are not zero, as after some training."""
    peft = pytest.importorskip("peft")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(**{"r": 3, "target_modules": names, "task_type": "CAUSAL_LM", **options})
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # peft asks transformers for what is deprecated
        torch.manual_seed(5)
        wrapped = peft.get_peft_model(model, config)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.15)
    return wrapped.train()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"layers_to_transform": [1]},  # nothing below is in the backward, and nothing but inputs above has gradients
        {"layers_to_transform": [2], "target_modules": ["down_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ],
    ids=["all", "dora", "one layer", "the last projection", "embedding and head, too"],
)
def test_lora_is_the_reference_with_lora(options: dict[str, Any]) -> None:
    model, unhooked = (lora(make_model(LLAMA), **options) for _ in range(2))
    assert_is_the_reference(model, LLAMA, make_batch(LLAMA, "padded right"), unhooked=unhooked)


@WITH_CHECKPOINTING
def test_lora_with_checkpointing_is_the_reference_with_lora(use_reentrant: bool) -> None:
    model, unhooked = (lora(make_model(LLAMA)) for _ in range(2))
    model.enable_input_require_grads()
    assert_is_the_reference(model, LLAMA, make_batch(LLAMA), unhooked=unhooked, use_reentrant=use_reentrant)


def quantised(folder: Path) -> Any:
    config = hf.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["lm_head"],
    )
    return hf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})


@PLAIN_OR_CHECKPOINTING
def test_lora_over_nf4_weights_is_the_reference_over_them(use_reentrant: bool | None, tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    make_model(LLAMA).save_pretrained(tmp_path)  # type: ignore[operator]
    model, unhooked = (lora(quantised(tmp_path)) for _ in range(2))
    assert sum(isinstance(module, bnb.nn.Linear4bit) for module in model.modules()) == 3 * 7
    if use_reentrant is not None:
        model.enable_input_require_grads()
    assert_is_the_reference(model, LLAMA, make_batch(LLAMA), unhooked=unhooked, use_reentrant=use_reentrant)


NAMES = ["q_proj", "v_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "activated": ("LoraConfig", {"r": 2, "target_modules": NAMES, "alora_invocation_tokens": [5]}, "ALoraLinear"),
    "lily": ("LilyConfig", {"target_modules": NAMES}, "LilyLayer in q_proj mixes tokens inside a layer"),
    "poly": ("PolyConfig", {"target_modules": NAMES}, "PolyLayer in q_proj mixes tokens inside a layer, or draws once"),
    "loha": ("LoHaConfig", {"target_modules": NAMES, "module_dropout": 0.1}, "module_dropout in q_proj mixes"),
    "lokr": ("LoKrConfig", {"target_modules": NAMES, "rank_dropout": 0.1}, "rank_dropout in q_proj mixes"),
    "boft": (
        "BOFTConfig",
        {"target_modules": NAMES, "boft_block_size": 8, "boft_dropout": 0.1},
        "MultiplicativeDropoutLayer in q_proj mixes",
    ),
    "adaption": ("AdaptionPromptConfig", {"adapter_layers": 1, "adapter_len": 4}, "self_attn is of PEFT's AdaptionPro"),
    "cpt": (
        "CPTConfig",
        {"cpt_token_ids": [3], "cpt_mask": [1], "cpt_tokens_type_mask": [1], "tokenizer_name_or_path": ""},
        "prompt_encoder.default is of PEFT's CPT, which adds",
    ),
}
"""Class of the configuration, its options, and a part of the error."""


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_that_treat_tokens_together_are_refused(name: str) -> None:
    peft = pytest.importorskip("peft")
    kind, options, text = ADAPTERS[name]
    try:
        config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    except (AttributeError, TypeError):
        pytest.skip(f"this version of PEFT has no {name}")
    model = peft.get_peft_model(make_model(LLAMA), config)
    with pytest.raises(ValueError, match=text):
        TUNE.attach(model)


# ---- gradient checkpointing


@pytest.mark.parametrize(
    ("name", "use_reentrant"),
    [
        *((name, None) for name in ("llama, grouped", "gemma3", "gpt2", "bert, masked", "mixtral", "vit")),
        ("llama, grouped", False),
        ("llama, grouped", True),
    ],
)
def test_checkpointed_feed_forward_parts_change_nothing_in_checkpointed_layers_neither(
    name: str, use_reentrant: bool | None
) -> None:
    family = FAMILIES[name]
    assert_is_the_reference(make_model(family), family, make_batch(family), TUNE_AGAIN, use_reentrant=use_reentrant)


@pytest.mark.parametrize("order", ["together", "first forward first", "last forward first"])
@PLAIN_OR_CHECKPOINTING
def test_two_forwards_before_their_backwards_each_have_their_own_selection(
    use_reentrant: bool | None, order: str
) -> None:
    model, unhooked = with_copy(LLAMA, use_reentrant)
    batches = [make_batch(LLAMA, "padded right"), short_batch()]
    with TUNE.attach(model) as handle:
        losses, selections = [], []
        for batch in batches:
            losses.append(model(**batch).loss)
            selections.append(selected(handle))
        evaluate(model, batches[0])  # between forwards and backwards, as when a loop logs
        if order == "together":
            (losses[0] + losses[1]).backward()
        else:
            for loss in losses if order == "first forward first" else reversed(losses):
                loss.backward()
        gradients = take_gradients(model)
    expected = [
        reference_gradients(unhooked, LLAMA, batch, chosen) for batch, chosen in zip(batches, selections, strict=True)
    ]
    for loss, alone in zip(losses, expected, strict=True):
        assert_step_close(loss, alone.loss, alone.exact_loss, cap=CAP)
    assert_same_gradients(gradients, *sums(expected))


@PLAIN_OR_CHECKPOINTING
def test_gradients_accumulate_over_two_steps_of_forward_and_backward(use_reentrant: bool | None) -> None:
    model, unhooked = with_copy(LLAMA, use_reentrant)
    parts = []
    with TUNE.attach(model) as handle:
        for batch in (make_batch(LLAMA, "padded right"), short_batch()):
            model(**batch).loss.backward()
            parts.append(reference_gradients(unhooked, LLAMA, batch, selected(handle)))
    assert_same_gradients(take_gradients(model), *sums(parts))


def sums(parts: list[Expected]) -> tuple[Gradients, Gradients]:
    """The gradients of two backwards together, and what they are with exact sums."""
    first, second = parts
    return add(first.gradients, second.gradients), add(first.exact_gradients, second.exact_gradients)


def short_batch() -> Batch:
    """Two sequences of eight tokens."""
    batch = make_batch(LLAMA, seed=7)
    return {name: value[:2, :8] for name, value in batch.items()}


def evaluate(model: Any, batch: Batch) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(**batch).logits
    model.train()
    return logits


# ---- dropout


def with_dropout(name: str) -> Any:
    model: Any = make_model(FAMILIES[name])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.2
    return model


def drop(model: nn.Module, batch: Batch, seed: int, tune: st.TokenTune = TUNE) -> Gradients:
    with tune.attach(model), torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_gradients(model, batch)[1]


def test_stochastic_depth_drops_all_tokens_of_a_sequence() -> None:
    options = {**VIT, "hidden_size": HIDDEN, "num_hidden_layers": 3, "mlp_ratio": 2, "drop_path_rate": 0.5}
    family = replace(
        FAMILIES["vit"],
        build=lambda attention: hf.Dinov2ForImageClassification(hf.Dinov2Config(**options)),
        layers="dinov2.encoder.layer",
    )
    model, unhooked = with_copy(family)
    for each in (model, unhooked):
        each.register_forward_pre_hook(lambda *_: torch.manual_seed(3) and None)
        each.dinov2.layernorm.requires_grad_(False)  # the head reads all tokens, and the reference cuts none behind it
    with torch.random.fork_rng():
        kept = model.dinov2.encoder.layer[0].drop_path(torch.ones(BATCH, 17, HIDDEN)).flatten(1)
        assert (kept == kept[:, :1]).all()
        assert_is_the_reference(model, family, make_batch(family), unhooked=unhooked)


@WITH_CHECKPOINTING
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "bert, masked", "bloom"])
def test_checkpointed_layers_drop_the_same_again(name: str, use_reentrant: bool) -> None:
    # All random numbers of a layer are drawn again from the state that the checkpoint restores, in the same order.
    model, batch = with_dropout(name), make_batch(FAMILIES[name])
    plain, other = drop(model, batch, seed=1), drop(model, batch, seed=2)
    assert distance(other, plain) > 1e-2, "nothing was dropped"
    # The same operators on the same values, so the same bits.
    assert_same_bits(drop(checkpointed(model, use_reentrant), batch, seed=1), plain)


@PLAIN_OR_CHECKPOINTING
def test_checkpointed_feed_forward_parts_drop_the_same_again(use_reentrant: bool | None) -> None:
    model, batch = with_dropout("gpt2"), make_batch(FAMILIES["gpt2"])
    expected = drop(model, batch, seed=1)
    assert_same_bits(drop(checkpointed(model, use_reentrant), batch, seed=1, tune=TUNE_AGAIN), expected)


# ---- reduced precision


def fp32_copy(gradients: Gradients) -> Gradients:
    return {name: None if value is None else value.float() for name, value in gradients.items()}


BF16: dict[str, tuple[torch.dtype, Callable[[], Any]]] = {
    "bf16 weights": (torch.bfloat16, nullcontext),
    "bf16 autocast": (torch.float32, partial(torch.autocast, "cpu", torch.bfloat16)),
}


@rotated(
    name=("llama, grouped", "gemma3", "gpt2", "gpt_neox", "bert, masked", "gpt_oss"),
    precision=BF16,
    checkpointing=CHECKPOINTING,
)
def test_in_bf16_gradients_are_as_near_to_the_truth_as_the_references(
    name: str, precision: str, checkpointing: str
) -> None:
    # bf16 has eight bits, and sums in another order round otherwise, so that two correct results differ by as much as
    # each differs from the fp32 one: some percent. A wrong gradient would be off by tens of percent.
    family, (dtype, context) = FAMILIES[name], BF16[precision]
    exact = make_model(family).to(dtype).float()
    unhooked = copy.deepcopy(exact).to(dtype)
    model, batch = copy.deepcopy(unhooked), make_batch(family, "padded right")
    checkpointed(model, CHECKPOINTING[checkpointing])
    with TUNE.attach(model) as handle:
        with context():
            loss = model(**batch).loss
        loss.backward()
        gradients = take_gradients(model)
    with context():
        reference = reference_loss(unhooked, family, batch, selected(handle))
    reference.backward()
    truth = reference_gradients(exact, family, batch, selected(handle))
    assert {value.dtype for value in gradients.values() if value is not None} == {dtype}
    near = distance(fp32_copy(take_gradients(unhooked)), truth[1])
    assert 1e-4 < near < 0.05
    assert distance(fp32_copy(gradients), truth[1]) < 1.5 * near
    assert_step_close(loss.detach(), reference.detach(), truth[0], cap=0.01, dtype=torch.bfloat16)


# ---- the HF Trainer


def trainer_arguments(folder: Path, **options: Any) -> Any:
    return hf.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        optim="sgd",
        learning_rate=0.3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=False,
        **options,
    )


CHECKPOINTED = {RENAMED.get("gradient_checkpointing", "gradient_checkpointing"): True}


@pytest.mark.parametrize("options", [{}, CHECKPOINTED], ids=["plain", "checkpointing"])
def test_the_hf_trainer_updates_as_a_loop_over_the_reference(options: dict[str, Any], tmp_path: Path) -> None:
    rows = trainer_rows(8)
    model, untrained = with_copy(LLAMA)
    before = weights(model)
    recorded: list[tuple[torch.Tensor, torch.Tensor]] = []
    with TUNE.attach(model) as handle:

        def record(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            recorded.append((ids.clone(), selected(handle)))

        model.register_forward_hook(record, with_kwargs=True)
        trainer = hf.Trainer(
            model=model,
            args=trainer_arguments(tmp_path, **options),
            train_dataset=rows,
            data_collator=hf.default_data_collator,
        )
        trainer.train()
    assert len(recorded) == 4

    def reference() -> Gradients:
        by_hand = copy.deepcopy(untrained)
        optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.3)
        for update in range(2):
            parts = [hf.default_data_collator(rows[start : start + 2]) for start in (4 * update, 4 * update + 2)]
            num_items = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
            for part, (ids, selection) in zip(parts, recorded[2 * update : 2 * update + 2], strict=True):
                assert torch.equal(part["input_ids"], ids)
                reference_loss(by_hand, LLAMA, part, selection, num_items).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_all_moved(by_hand, before)
        return changes(by_hand, before)

    assert_step_close(changes(model, before), *with_exact(reference), cap=CAP)


def trainer_rows(count: int) -> list[dict[str, list[int]]]:
    """Padded sequences of different lengths, so that the parts of an update have different numbers of labels."""
    rows = []
    for index in range(count):
        batch = make_batch(LLAMA, "padded right", seed=20 + index)
        rows.append({name: value[index % BATCH].tolist() for name, value in batch.items()})
    return rows


@pytest.mark.parametrize("num_items", [1, 7, torch.tensor(50)], ids=["one", "an int", "a tensor"])
@pytest.mark.parametrize("family", families("llama, grouped", "eurobert, masked"))
def test_num_items_in_batch_counts_for_the_selected_share(family: Family, num_items: Any) -> None:
    assert_is_the_reference(make_model(family), family, make_batch(family, "padded right"), num_items=num_items)


# ---- HiFT


@rotated(
    name=("llama, grouped", "gpt2", "bert, sequences"),
    order=("bottom2up", "top2down"),
    checkpointing=("plain", "not reentrant"),
)
def test_under_hift_a_cycle_is_hift_over_the_reference(name: str, order: Any, checkpointing: str) -> None:
    family = FAMILIES[name]
    model, unhooked = with_copy(family, CHECKPOINTING[checkpointing])
    before = weights(model)
    config = st.HiFTConfig.paper(order=order)
    exact = copy.deepcopy(unhooked)
    optimizers = [st.HiFT(each, torch.optim.SGD, config=config, lr=0.2) for each in (model, unhooked, exact)]
    with TUNE.attach(model) as handle:
        for step in range(optimizers[0].num_groups):
            batch = make_batch(family, seed=step)
            loss = model(**batch).loss
            expected = reference_loss(unhooked, family, batch, selected(handle))
            loss.backward()
            expected.backward()
            with exact_sums():
                truth = reference_loss(exact, family, batch, selected(handle))
                truth.backward()
            assert_step_close(loss, expected, truth, cap=CAP)
            assert {n for n, p in model.named_parameters() if p.grad is not None} == set(
                optimizers[0].groups[optimizers[0].active_group].parameter_names
            )
            for optimizer in optimizers:
                optimizer.step()
    assert_all_moved(unhooked, before)
    assert_step_close(changes(model, before), changes(unhooked, before), changes(exact, before), cap=CAP)


# ---- evaluation, generation


@pytest.mark.parametrize(
    "family", families("llama, grouped", "gpt2", "falcon, alibi", "bert, sequences", "gpt_oss", "vit")
)
def test_outside_of_training_a_hooked_model_has_the_bits_of_an_unhooked_one(family: Family) -> None:
    model, unhooked = with_copy(family)
    batch = make_batch(family)
    with TUNE.attach(model) as handle:
        assert torch.equal(model.eval()(**batch).logits, unhooked.eval()(**batch).logits)
        evaluated, expected = model_gradients(model, batch), model_gradients(unhooked, batch)
        assert torch.equal(evaluated[0], expected[0])
        assert_same_bits(evaluated[1], expected[1])
        with torch.no_grad():
            output, expected_output = model.train()(**batch), unhooked.train()(**batch)
        assert torch.equal(output.loss, expected_output.loss) and torch.equal(output.logits, expected_output.logits)
        assert handle.last_selection is None


@pytest.mark.parametrize("training", [False, True], ids=["in evaluation", "in training"])
@pytest.mark.parametrize("family", families("llama, grouped", "gpt2", "bloom", "gemma3"))
def test_a_hooked_model_generates_as_ever_and_trains_on(family: Family, training: bool) -> None:
    model, unhooked = with_copy(family)
    ids = make_batch(family)["input_ids"]
    mask = torch.ones_like(ids)
    wanted = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with TUNE.attach(model) as handle:
        model_gradients(model, make_batch(family))
        drawn = handle.last_selection
        generated = model.train(training).generate(ids, **wanted)
        assert torch.equal(generated, unhooked.train(training).generate(ids, **wanted))
        assert handle.last_selection is drawn
    model.train()
    assert_is_the_reference(model, family, make_batch(family), unhooked=unhooked.train())


# ---- calls of other kinds


def test_a_cache_that_the_model_makes_in_training_is_no_hindrance() -> None:
    model: Any = make_model(LLAMA)
    model.config.use_cache = True
    assert_is_the_reference(model, LLAMA, make_batch(LLAMA, "padded right"))


def test_embeddings_in_place_of_ids_get_the_references_gradients() -> None:
    model, unhooked = with_copy(LLAMA)
    batch = make_batch(LLAMA)
    labels = batch["labels"]
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach()
    mine = embedded.clone().requires_grad_()
    with TUNE.attach(model) as handle:
        loss, gradients = model_gradients(model, {"inputs_embeds": mine, "labels": labels})

    def reference() -> tuple[torch.Tensor, Gradients]:
        other = embedded.clone().requires_grad_()
        loss = reference_loss(unhooked, LLAMA, {"inputs_embeds": other, "labels": labels}, selected(handle))
        loss.backward()
        return loss.detach(), {**take_gradients(unhooked), "inputs": other.grad}

    expected, exact = with_exact(reference)
    assert_same(loss, {**gradients, "inputs": mine.grad}, Expected(*expected, *exact))


def test_positional_arguments_and_a_tuple_for_an_answer_are_fine() -> None:
    model, unhooked = with_copy(LLAMA)
    batch = make_batch(LLAMA, "padded right")
    with TUNE.attach(model) as handle:
        # input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, labels
        arguments = (batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"])
        loss, logits = model(*arguments, return_dict=False)
        loss.backward()
    expected = reference_gradients(unhooked, LLAMA, batch, selected(handle))
    assert logits.shape == (BATCH, 5, VOCAB)
    assert_same(loss.detach(), take_gradients(model), expected)


def test_targets_that_are_shifted_already_are_used_as_they_are() -> None:
    batch = make_batch(LLAMA)
    generator = torch.Generator().manual_seed(4)
    batch["shift_labels"] = torch.randint(0, VOCAB, batch["labels"].shape, generator=generator)
    assert_is_the_reference(make_model(LLAMA), LLAMA, batch)


@pytest.mark.parametrize("pattern", ["random", "chunks", "block"])
@pytest.mark.parametrize("family", families("llama, grouped", "bert, masked"))
def test_every_pattern_is_the_reference_for_what_it_drew(family: Family, pattern: Any) -> None:
    tune = st.TokenTune(ratio=0.4, pattern=pattern, chunk_size=2, always=(0, -1), seed=3)
    assert_is_the_reference(make_model(family), family, make_batch(family, "padded right"), tune)


@pytest.mark.parametrize(("sequences", "length"), [(1, 13), (3, 1), (1, 1), (3, 2)])
def test_one_token_may_be_enough(sequences: int, length: int) -> None:
    batch = {name: value[:sequences, :length] for name, value in make_batch(LLAMA).items()}
    batch["shift_labels"] = batch["input_ids"].flip(0)
    assert_is_the_reference(make_model(LLAMA), LLAMA, batch, st.TokenTune(num_tokens=1))


@pytest.mark.parametrize("num_items", [None, 9])
@pytest.mark.parametrize("family", families("llama, grouped", "gpt2", "bert, masked"))
def test_a_selection_without_a_label_gives_no_loss_and_no_gradient(family: Family, num_items: int | None) -> None:
    model, batch = make_model(family), make_batch(family)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    options = {} if num_items is None else {"num_items_in_batch": num_items}
    with TUNE.attach(model):
        loss, gradients = model_gradients(model, batch, **options)
    assert loss == 0
    assert all(value is None or not value.any() for value in gradients.values())


def test_a_gpt2_that_multiplies_in_fp32_is_the_reference() -> None:
    # It computes attention by a method of its own, past the functions that models look up.
    family = FAMILIES["gpt2"]
    model: Any = make_model(family, "eager")
    for block in model.transformer.h:
        block.attn.reorder_and_upcast_attn = True
    assert_is_the_reference(model, family, make_batch(family, "padded right"))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_for_every_pair_of_tokens_is_followed(attention: str) -> None:
    batch = make_batch(LLAMA)
    generator = torch.Generator().manual_seed(6)
    allowed = torch.rand(BATCH, 1, LLAMA.length, LLAMA.length, generator=generator) < 0.6
    allowed |= torch.eye(LLAMA.length, dtype=torch.bool)
    # Eager attention adds the mask to its scores.
    batch["attention_mask"] = allowed if attention == "sdpa" else torch.zeros(allowed.shape).where(allowed, -1e30)
    assert_is_the_reference(make_model(LLAMA, attention), LLAMA, batch)


def test_an_error_in_a_forward_leaves_nothing_behind() -> None:
    model, unhooked = with_copy(LLAMA)
    batch = make_batch(LLAMA)

    def fail(*_: Any) -> None:
        raise MemoryError

    with TUNE.attach(model) as handle:
        failing = model.model.layers[1].mlp.act_fn.register_forward_hook(fail)
        with pytest.raises(MemoryError):
            model(**batch)
        failing.remove()
        assert torch.equal(evaluate(model, batch), evaluate(unhooked, batch))
        loss, gradients = model_gradients(model, batch)
    expected = reference_gradients(unhooked, LLAMA, batch, selected(handle))
    assert_same(loss, gradients, expected)
