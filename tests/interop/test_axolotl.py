"""The plugin for axolotl: its section of the YAML, the call that axolotl's Trainer makes, and its real base classes."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

import slivertune
from slivertune import HiFTConfig, SFTConfig, TokenTune
from slivertune.interop import axolotl as plugin
from slivertune.interop.axolotl import read_section
from tests.helpers.launching import run_python
from tests.helpers.models import VOCAB, tiny_llama, weights
from tests.training.tiny import quiet_arguments

SECTION: dict[str, Any] = {"hift": {"layers_per_group": 2}, "tokentune": {"ratio": 0.5, "seed": 3}}
WRITTEN: dict[str, Any] = {
    "base_model": "none",
    "datasets": [{"path": "none", "type": "alpaca"}],
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-2,
}
"""What axolotl's YAML must have besides."""


def test_the_section_becomes_the_settings_of_attach() -> None:
    assert read_section(SECTION) == ([HiFTConfig(layers_per_group=2), TokenTune(ratio=0.5, seed=3)], 0.0)
    momentum = {"sft": {"density": 0.1, "selection": "momentum"}, "momentum": 0.9}
    assert read_section(momentum) == ([SFTConfig(density=0.1, selection="momentum")], 0.9)
    assert read_section({"hift": None}) == ([HiFTConfig()], 0.0)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (None, r"slivertune: None\. Name hift, sft or tokentune under it"),
        ({}, r"slivertune: {}\. Name hift, sft or tokentune"),
        ({"momentum": 0.9}, "Name hift, sft or tokentune"),
        ("hift", "with its fields as a mapping"),
        ({"hift": {}, "tokenstune": {}}, r"tokenstune is unknown\. Use .* did you mean tokentune?"),
        ({"hift": {"layer_per_group": 1}}, "layer_per_group is no field of HiFTConfig; did you mean layers_per_group?"),
        ({"hift": {"zzz": 1}}, "zzz is no field of HiFTConfig. Use layers_per_group, .*, max_grad_norm"),
        ({"hift": 4}, "hift: 4 must be a mapping of fields of HiFTConfig. Write one field per line under hift"),
        ({"tokentune": {"ratio": 3}}, "ratio=3"),
    ],
)
def test_what_can_not_be_followed_is_said(section: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_section(section)


@pytest.mark.skipif(find_spec("axolotl") is None, reason="it is not here, and this file imports the module")
def test_nothing_of_axolotl_is_imported_with_the_module() -> None:
    code = "import sys, slivertune.interop.axolotl; print([name for name in sys.modules if name.startswith('axolotl')])"
    assert run_python("-c", code, cwd=Path.cwd()).stdout.strip() == "[]"


def test_a_name_that_the_module_has_not_is_none_of_axolotls() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Plugin'"):
        plugin.Plugin  # noqa: B018


class CallsAsAxolotl(Trainer):
    """Makes its optimizer as `AxolotlTrainer` of 0.19 does: the factory is given the Trainer's arguments as well."""

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer_cls_and_kwargs is None:
            return super().create_optimizer(model)
        if not self.optimizer:
            factory, options = self.optimizer_cls_and_kwargs
            self.optimizer = factory()(self.model if model is None else model, self.args, **options)
        return self.optimizer


def make_trainer(
    folder: Path, kind: type[Trainer] = Trainer, arguments_kind: type[TrainingArguments] = TrainingArguments
) -> Trainer:
    torch.manual_seed(1)
    rows = torch.randint(2, VOCAB, (16, 12)).tolist()
    settings = {"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_strategy": "no"}
    arguments = quiet_arguments(folder, arguments_kind, **settings)
    return kind(
        model=tiny_llama(), args=arguments, train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows})
    )


def trained_by_attach(folder: Path) -> Mapping[str, torch.Tensor]:
    trainer = make_trainer(folder)
    slivertune.attach(trainer, *read_section(SECTION)[0])
    trainer.train()
    return weights(trainer.model)


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_trainer_that_calls_as_axolotls_does_trains_what_attach_trains(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, CallsAsAxolotl)
    slivertune.attach(trainer, *read_section(SECTION)[0])
    trainer.train()
    assert_same(weights(trainer.model), trained_by_attach(tmp_path))


@pytest.mark.filterwarnings("ignore")  # what axolotl, and what it imports, ask others for that is deprecated
def test_axolotls_own_plugins_config_and_trainer_train_what_attach_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = pytest.importorskip(
        "axolotl.integrations.base", reason="axolotl is in the environment of `make test-oldest`"
    )
    config = pytest.importorskip("axolotl.utils.config")
    trainers = pytest.importorskip("axolotl.core.trainers.base")
    training_args = pytest.importorskip("axolotl.core.training_args")
    monkeypatch.setattr(base.PluginManager, "_instance", None)  # it is a singleton

    def read(section: Any) -> Any:
        given = {"plugins": ["slivertune.interop.axolotl.SlivertunePlugin"], "slivertune": section, **WRITTEN}
        config.prepare_plugins(base.DictDefault(given))
        return config.validate_config(base.DictDefault(given))

    with pytest.raises(ValueError, match="layer_per_group is no field"):
        read({"hift": {"layer_per_group": 1}})
    assert read_section(read({"hift": None, "momentum": 0}).slivertune) == ([HiFTConfig()], 0.0)
    cfg = read(SECTION)
    (own,) = base.PluginManager.get_instance().plugins.values()
    assert isinstance(own, base.BasePlugin)
    trainer = make_trainer(tmp_path, trainers.AxolotlTrainer, training_args.AxolotlTrainingArguments)
    base.PluginManager.get_instance().post_trainer_create(cfg, trainer)
    trainer.train()
    assert_same(weights(trainer.model), trained_by_attach(tmp_path))
