import json
import logging
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from slivertune.planning.configs import find_model
from slivertune.planning.shipped import SHIPPED_MODELS
from tests.planning.made import TINY_FIGURES, write_config


def test_a_shipped_name_and_its_hub_id_need_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    for name in ("llama-3-8b", "Llama-3-8B", "meta-llama/Meta-Llama-3-8B"):
        model = find_model(name)
        config: Any = model.config
        assert (config.vocab_size, config.num_key_value_heads, config.hidden_size) == (128256, 8, 4096)
        assert model.name_or_path == "meta-llama/Meta-Llama-3-8B"
        assert "come with slivertune" in model.source


def test_a_folder_or_the_file_in_it_is_read_before_a_shipped_name_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path / "llama-2-7b")
    monkeypatch.chdir(tmp_path)
    for name in ("llama-2-7b", "./llama-2-7b", "llama-2-7b/config.json"):
        model = find_model(name)
        assert getattr(model.config, "hidden_size", None) == 64
        assert Path(model.name_or_path).name == "llama-2-7b"
        assert model.source.endswith("config.json")


def test_figures_that_older_versions_of_the_library_wrote_are_understood(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "old", torch_dtype="float16", rope_theta=5e5, transformers_version="4.30.0")
    config: Any = find_model(str(folder)).config
    assert config.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(
    "kind",
    [
        # Sizes whose names speak of layers.
        "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "deepseek_v3", "esm",
        # Infinite figures.
        "mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h",
    ],
)  # fmt: skip
def test_figures_are_read_as_transformers_write_them(kind: str, tmp_path: Path) -> None:
    figures: Any = CONFIG_MAPPING[kind]()
    (tmp_path / "config.json").write_text(figures.to_json_string(), encoding="utf-8")
    assert find_model(str(tmp_path)).config.to_json_string() == figures.to_json_string()


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("llama-2-7b", ("causal_lm", "classification")),
        ("gpt2-large", ("causal_lm", "classification")),
        ("roberta-base", ("classification", "causal_lm")),
        ("gemma-3-4b", ("image_text", "causal_lm", "classification")),
    ],
)
def test_the_first_task_is_what_the_model_was_made_for(name: str, tasks: tuple[str, ...]) -> None:
    assert find_model(name).tasks() == tasks


def test_an_unknown_model_without_a_network_is_an_error_with_the_ways_out() -> None:
    # The tests run offline (HF_HUB_OFFLINE).
    with pytest.raises(ValueError, match=r"^there is no folder 'owner/absent', and the hub can't be reached") as caught:
        find_model("owner/absent")
    text = str(caught.value)
    assert all(name in text for name in SHIPPED_MODELS)
    assert "or a folder with the model's config.json" in text


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("llama2-7b", "Did you mean llama-2-7b?"),
        ("./absent", "there is no folder './absent'."),
        ("a/b/c", "there is no folder 'a/b/c'."),
    ],
)
def test_a_name_that_can_be_no_hub_id_or_is_near_a_shipped_one_is_told_so(name: str, part: str) -> None:
    with pytest.raises(ValueError, match=re.escape(part)):
        find_model(name)


def test_a_hub_model_in_the_cache_is_taken_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models--owner--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    write_config(folder / "snapshots" / ("0" * 40))
    real = huggingface_hub.try_to_load_from_cache
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: real(*args, cache_dir=str(tmp_path)))
    model = find_model("owner/tiny")
    assert getattr(model.config, "hidden_size", None) == 64
    assert (model.name_or_path, model.source) == ("owner/tiny", "config.json of owner/tiny")


@pytest.mark.parametrize(
    ("kind", "when", "part"),
    [
        (RepositoryNotFoundError, "model_info", "the hub shows no model of that name (a private one needs `hf auth"),
        (GatedRepoError, "hf_hub_download", "owner/x is gated: accept its terms on the hub and log in"),
        (EntryNotFoundError, "hf_hub_download", "owner/x on the hub has no config.json"),
    ],
)
def test_what_the_hub_refuses_is_told_apart(kind: Any, when: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        # The hub's errors are otherwise made from its answers.
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: None)
    owner: Any = huggingface_hub.HfApi if when == "model_info" else huggingface_hub
    monkeypatch.setattr(owner, when, refuse)
    with pytest.raises(ValueError, match=re.escape(part)) as caught:
        find_model("owner/x")
    assert "Name one of llama-2-7b" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "can't be read as JSON"),
        ("[1]", "is not a configuration of a transformer: it has no model_type"),
        (json.dumps({"hidden_size": 3}), "is not a configuration of a transformer: it has no model_type. Name the"),
        (json.dumps({"_class_name": "UNet2DConditionModel"}), "it has no model_type, but is of a UNet2DConditionModel"),
        (json.dumps({"model_type": 3}), "it has no model_type"),
        (json.dumps({"model_type": "resnet"}), "'resnet', which has no head for any of causal_lm, cl"),
        (json.dumps({"model_type": "never_heard_of"}), "the installed transformers library does not know. Try a newer"),
        (
            json.dumps({"model_type": "never_heard_of", "auto_map": {}}),
            "library does not know (it brings code of its own, which a plan never runs)",
        ),
        (json.dumps({**TINY_FIGURES, "hidden_size": "wide"}), "the figures of this 'llama' don't hold together"),
    ],
)
def test_a_file_that_is_no_transformers_configuration_is_an_error_that_says_what_it_lacks(
    content: str, part: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(part)):
        find_model(str(tmp_path))


def test_a_folder_without_a_configuration_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("has no config.json. Name one in which a model was saved")):
        find_model(str(tmp_path))


KERAS = "https://github.com/keras-team/keras-hub/blob/main/keras_hub/src/models/{0}/{0}_presets.py"
KVFIT = "https://github.com/debaditc/kvfit/blob/main/scripts/build_registry.py"
PAPER = "HiFT, tables 6 and 3"
HUB = "what the weights on the hub add up to"
# Numbers of parameters as published with the weights, tied ones once, and where: the presets of keras-hub, a registry
# of the hub's own counts of safetensors, and for some the weights on the hub themselves. Those of the RoBERTas are of
# the model with a classifier's head for two classes, as the HiFT paper has them (124.65 and 355.36 million). keras-hub
# is no source for all: it counts the head of the Llama 3.2 twice, leaves a few rows out of Gemma 3's vocabulary, ties
# the embeddings of Qwen2.5-7B, and gives SmolLM3 norms of its own.
PUBLISHED: dict[str, tuple[int, str]] = {
    "llama-2-7b": (6_738_415_616, PAPER),
    "llama-2-13b": (13_015_864_320, HUB),
    "llama-3-8b": (8_030_261_248, KVFIT),
    "llama-3-70b": (70_553_706_496, KVFIT),
    "llama-3.1-8b": (8_030_261_248, KVFIT),
    "llama-3.1-70b": (70_553_706_496, KVFIT),
    "llama-3.2-1b": (1_235_814_400, "TestsParameterCount in https://github.com/ModelCloud/GPTQModel"),
    "llama-3.2-3b": (3_212_749_824, KVFIT),
    "qwen2.5-0.5b": (494_032_768, KERAS.format("qwen")),
    "qwen2.5-1.5b": (1_543_714_304, HUB),
    "qwen2.5-3b": (3_085_938_688, KERAS.format("qwen")),
    "qwen2.5-7b": (7_615_616_512, KVFIT),
    "qwen2.5-14b": (14_770_033_664, HUB),
    "qwen2.5-32b": (32_763_876_352, KERAS.format("qwen")),
    "qwen2.5-72b": (72_706_203_648, KERAS.format("qwen")),
    "qwen3-0.6b": (596_049_920, KERAS.format("qwen3")),
    "qwen3-1.7b": (1_720_574_976, KERAS.format("qwen3")),
    "qwen3-4b": (4_022_468_096, KERAS.format("qwen3")),
    "qwen3-8b": (8_190_735_360, KERAS.format("qwen3")),
    "qwen3-14b": (14_768_307_200, KERAS.format("qwen3")),
    "qwen3-32b": (32_762_123_264, KERAS.format("qwen3")),
    "qwen3-30b-a3b": (30_532_122_624, KERAS.format("qwen3_moe")),
    "gemma-3-4b": (4_300_079_472, KVFIT),
    "gemma-3-12b": (12_187_325_040, KVFIT),
    "gemma-3-27b": (27_432_406_640, KVFIT),
    "mistral-7b": (7_241_732_096, KVFIT),
    "mistral-small-24b": (23_572_403_200, "magistral_small_2506_en of " + KERAS.format("mistral")),
    "phi-4": (14_659_507_200, KVFIT),
    "gpt-oss-20b": (20_914_757_184, KERAS.format("gpt_oss")),
    "smollm3-3b": (3_075_098_624, "model.safetensors.index.json at https://huggingface.co/HuggingFaceTB/SmolLM3-3B"),
    "roberta-base": (124_647_170, PAPER),
    "roberta-large": (355_361_794, PAPER),
    "gpt2-large": (774_030_080, HUB),
    "gpt-neo-2.7b": (2_651_307_520, HUB),
    "opt-13b": (12_853_473_280, HUB),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_model_has_exactly_the_published_number_of_parameters(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    figures = SHIPPED_MODELS[name].figures
    config = AutoConfig.for_model(**figures)
    is_encoder = "MaskedLM" in figures["architectures"][0]
    auto: Any = AutoModelForSequenceClassification if is_encoder else AutoModelForCausalLM
    with torch.device("meta"), caplog.at_level(logging.ERROR):
        model = auto.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name][0]
    if not is_encoder:
        assert type(model).__name__ == figures["architectures"][0]


def test_every_shipped_model_has_a_published_number() -> None:
    assert SHIPPED_MODELS.keys() == PUBLISHED.keys()


def test_every_shipped_model_says_where_its_figures_can_be_read() -> None:
    assert all(model.source.startswith("https://") for model in SHIPPED_MODELS.values())
