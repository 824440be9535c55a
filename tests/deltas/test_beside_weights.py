"""Files beside the weights of a merged checkpoint have the bytes of the base or of the training."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
)

from slivertune.cli import main
from slivertune.deltas import merge_command
from slivertune.deltas.adapter_folder import TRAINED_CONFIG
from slivertune.deltas.delta_file import DELTA_FILE
from slivertune.deltas.merge import unmerge
from tests.deltas.adapters import save_adapter, save_base
from tests.deltas.files import UP, files_in, write_deltas
from tests.helpers.models import tiny_llama
from tests.training.tiny import word_tokenizer

pytestmark = [
    pytest.mark.usefixtures("own_folder"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]
BESIDE = {
    "tokenizer.json": '{"made": "by hand"}',
    "tokenizer_config.json": '{ "spaces":   1}',
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "chat_template.json": '{"chat_template": "of a processor"}',
    "preprocessor_config.json": "{}",
    "generation_config.json": '{"temperature": 0.25, "do_sample": true}',
    "own.py": "pass",
}


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(folder: str, files: dict[str, str]) -> None:
    for name, content in files.items():
        Path(folder, name).parent.mkdir(exist_ok=True)
        Path(folder, name).write_text(content, encoding="utf-8")


def read_config(folder: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    return content


def change_config(folder: str, name: str = "config.json", **changes: Any) -> None:
    path = Path(folder, name)
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def save_both(**more: Any) -> None:
    """A base and an adapter of it."""
    save_base(Path("base"), torch.bfloat16, **more)
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32))


def merge_adapter(*more: str) -> int:
    return main(["merge", "adapter", "--output_dir", "merged", *more])


def test_files_and_settings_of_the_base_keep_their_bytes_and_names() -> None:
    save_both()
    write("base", BESIDE)
    config = read_config("base")
    # As other versions write it, with what no version knows.
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "torch_dtype": config.pop("dtype"), "own": 1}
    Path("base/config.json").write_text(json.dumps(config), encoding="utf-8")
    assert merge_adapter() == 0
    assert read_config("merged") == config
    assert {name: Path("merged", name).read_text(encoding="utf-8") for name in BESIDE} == BESIDE


def test_what_the_training_saved_takes_the_place_of_the_bases() -> None:
    save_both(vocab_size=300)
    write("base", BESIDE)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{{ messages }} of the run"
    tokenizer.save_pretrained("adapter")
    write("adapter", {"preprocessor_config.json": '{"size": 3}'})
    assert merge_adapter() == 0
    merged = {str(each.relative_to("merged")) for each in Path("merged").rglob("*") if each.is_file()}
    own = {"generation_config.json", "own.py", "config.json", "model.safetensors", "chat_template.jinja"}
    assert merged == {*own, "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"}
    for name in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert Path("merged", name).read_bytes() == Path("adapter", name).read_bytes()


@pytest.mark.parametrize("of_base", [False, True], ids=["of the training", "of the base too"])
def test_a_token_without_a_row_is_refused_unless_the_base_has_it(
    of_base: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = word_tokenizer()
    save_both(vocab_size=len(tokenizer))
    if of_base:
        tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained("base")
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained("adapter")
    assert merge_adapter() == (0 if of_base else 2)
    said = f"the embeddings of base have {len(tokenizer) - 1} rows, and none of them is for '<image>', which"
    err = capfd.readouterr().err
    assert (said in err) is not of_base, err[-330:]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "problem_type"),
        ({"num_labels": 1, "problem_type": "regression"}, "problem_type"),
        ({"id2label": {0: "good", 1: "bad"}, "label2id": {"good": 0, "bad": 1}}, "id2label"),
    ],
)
def test_a_classifier_has_the_settings_of_its_training(settings: dict[str, Any], kept: str) -> None:
    save_base(Path("base"))
    model = AutoModelForSequenceClassification.from_pretrained("base", **settings)
    save_adapter(Path("adapter"), model, task_type="SEQ_CLS")
    model.config.to_json_file(f"adapter/{TRAINED_CONFIG}")
    assert merge_adapter() == 0
    merged = AutoModelForSequenceClassification.from_pretrained("merged").config
    assert getattr(merged, kept) == getattr(model.config, kept) and merged.num_labels == model.config.num_labels


def test_settings_of_the_training_that_are_not_the_bases_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    save_both()
    shutil.copyfile("base/config.json", f"adapter/{TRAINED_CONFIG}")
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    change_config("adapter", TRAINED_CONFIG, rope_parameters=scaled, use_cache=False)
    assert merge_adapter() == 0
    assert "the trained model's configuration has other values: rope_parameters\n" in capsys.readouterr().out


SIZES = {"hidden_size": 32, "intermediate_size": 48}
TEXT = {
    **SIZES,
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "layer_types": ["full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
    },
}
VISION = {**SIZES, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16, "patch_size": 4}
IMAGES = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


def save_model_of_images(**more: Any) -> None:
    """A base of a language model and a tower for images, and a tensor for several tokens at once."""
    made = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=TEXT, vision_config=VISION, **IMAGES, **more))
    made.to(torch.bfloat16).save_pretrained("base")
    tensors = load_file("base/model.safetensors") | {"mtp.fc.weight": torch.ones(4, 4, dtype=torch.bfloat16)}
    save_file(tensors, "base/model.safetensors", {"format": "pt"})


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning")
def test_weights_that_the_adapters_class_has_no_place_for_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    save_model_of_images(tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained("base")
    assert type(model) is Qwen3_5ForCausalLM
    save_adapter(Path("adapter"), model, target_modules=["q_proj"])
    assert merge_adapter() == 0
    left = load_file("base/model.safetensors").keys() - load_file("merged/model.safetensors").keys()
    first, *others = sorted(left)
    assert {"mtp.fc.weight", "model.visual.patch_embed.proj.weight"} <= left
    assert f"has no such weights: {first} and {len(others)} more\n" in capsys.readouterr().out
    assert read_config("merged")["model_type"] == "qwen3_5_text"


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=["tied", "untied"])
def test_an_adapter_of_the_whole_model_is_merged_whatever_task_it_names(
    targets: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    save_model_of_images(tie_word_embeddings=True)
    model = Qwen3_5ForConditionalGeneration.from_pretrained("base")
    save_adapter(Path("adapter"), model, target_modules=targets, task_type="CAUSAL_LM")
    assert merge_adapter() == 0
    assert "has no such weights: mtp.fc.weight\n" in capsys.readouterr().out
    base, config = read_config("base"), read_config("merged")
    assert config["tie_word_embeddings"] is ("lm_head" not in targets)
    for each in (base, config, base["text_config"], config["text_config"]):
        each.pop("tie_word_embeddings", None)
    assert config == base


def test_the_adapters_revision_of_the_base_is_taken_also_where_its_name_is_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_both()
    change_config("adapter", "adapter_config.json", base_model_name_or_path="owner/base", revision="abc")
    asked: list[Any] = []

    def download(name: str, *, revision: str | None, **more: Any) -> str:
        asked.append((name, revision))
        return "base"

    monkeypatch.setattr(merge_command.huggingface_hub, "snapshot_download", download)
    for more in ((), ("--model_name_or_path", "owner/base"), ("--model_name_or_path", "owner/other")):
        shutil.rmtree("merged", ignore_errors=True)
        assert merge_adapter(*more) == 0
    assert asked == [("owner/base", "abc"), ("owner/base", "abc"), ("owner/other", None)]


def test_an_adapter_and_deltas_in_one_folder_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    save_both()
    write("adapter", {DELTA_FILE: ""})
    assert merge_adapter() == 2
    assert "holds a LoRA adapter and SFT's deltas, and one of them is merged at a time" in capfd.readouterr().err


# ---- deltas


def save_deltas() -> None:
    model = tiny_llama()
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained("base")
    write("base", BESIDE)
    write_deltas(Path("deltas"), model, UP)


def test_deltas_bring_their_chat_template_and_unmerging_gives_the_bases_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_deltas()
    word_tokenizer().save_pretrained("base")
    before = files_in(Path("base"))
    write("deltas", {"chat_template.jinja": "{{ messages }} of the run"})
    assert main(["merge", "deltas", "--model_name_or_path", "base", "--output_dir", "merged"]) == 0
    assert "the chat template is that of deltas\n" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained("merged")
    assert tokenizer.chat_template == "{{ messages }} of the run"
    assert tokenizer.get_vocab() == word_tokenizer().get_vocab()
    gone = {"chat_template.json", "additional_chat_templates/tools.jinja"}
    assert not gone & {str(each.relative_to("merged")) for each in Path("merged").rglob("*")}
    unmerge("merged", "again")
    assert files_in(Path("again")) == before


@pytest.mark.parametrize("templates", [(BESIDE["chat_template.jinja"],), ("one", "other")], ids=["the base's", "two"])
def test_a_chat_template_of_the_base_or_of_several_deltas_changes_nothing(
    templates: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    save_deltas()
    folders = [f"deltas{index}" for index in range(len(templates))]
    for folder, template in zip(folders, templates, strict=True):
        shutil.copytree("deltas", folder)
        write(folder, {"chat_template.jinja": template})
    assert main(["merge", *folders, "--model_name_or_path", "base", "--output_dir", "merged"]) == 0
    said = "the chat template is the base's, since those of deltas0, deltas1 differ\n"
    assert (said in capsys.readouterr().out) == (len(templates) == 2)
    assert {name: Path("merged", name).read_text(encoding="utf-8") for name in BESIDE} == BESIDE


def test_other_modules_of_a_sentence_model_are_copied_and_weights_of_unknown_use_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_deltas()
    dense = {"2_Dense/model.safetensors": "weights", "2_Dense/config.json": "{}"}
    modules = json.dumps([{"path": "."}, {"path": "1_Pooling"}, {"path": "2_Dense"}])
    write("base", {**dense, "modules.json": modules, "onnx/model.onnx": "", "voices/en.pt": ""})
    assert main(["merge", "deltas", "--model_name_or_path", "base", "--output_dir", "merged"]) == 0
    said = "not copied, since they may hold the base's weights: onnx/model.onnx, voices/en.pt\n"
    assert said in capsys.readouterr().out
    assert {name: Path("merged", name).read_text(encoding="utf-8") for name in dense} == dense


def test_a_tensor_in_two_shards_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama()
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained("base", max_shard_size="30KB")
    first, *_, last = sorted(Path("base").glob("*.safetensors"))
    twice = next(iter(tensors := load_file(first)))
    save_file({**load_file(last), twice: tensors[twice]}, last, {"format": "pt"})
    write_deltas(Path("deltas"), model, UP)
    assert main(["merge", "deltas", "--model_name_or_path", "base", "--output_dir", "merged"]) == 2
    assert f"base holds {twice!r} in two shards, {first.name} and {last.name}" in capfd.readouterr().err
