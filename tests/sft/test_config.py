import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from torch import nn

from slivertune import SFTConfig


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"density": 0.0}, r"density=0.0 must be in \(0, 1\]"),
        ({"density": 1.01}, r"density=1.01 must be in \(0, 1\]"),
        ({"density": -0.1}, r"density=-0.1 must be in \(0, 1\]"),
        ({"density": float("nan")}, r"density=nan must be in \(0, 1\]"),
        ({"density": "auto"}, "density='auto' must be a number"),
        ({"density": True}, "density=True must be a number"),
        ({"replacement_rate": None}, "replacement_rate=None must be a number"),
        ({"packed": "no"}, "packed='no' must be True or False"),
        ({"redistribute": "false"}, "redistribute='false' must be True or False"),
        ({"embeddings": None}, "embeddings=None must be True or False"),
        ({"replacement_rate": "0.2"}, "replacement_rate='0.2' must be a number"),
        ({"max_grad_norm": "1"}, "max_grad_norm='1' must be a number"),
        ({"num_weights": "auto"}, "num_weights='auto' must be an integer"),
        ({"density": 0.1, "num_weights": 5}, "density and num_weights set the same thing"),
        ({"num_weights": 0}, "num_weights=0 must be at least 1"),
        ({"equivalent_lora_rank": 1.5}, "equivalent_lora_rank=1.5 must be an integer"),
        ({"selection": "rigl"}, "selection='rigl' must be one of 'accumulated_gradient', 'momentum'"),
        ({"form": "dense"}, "form='dense' must be one of 'auto', 'optimizer', 'layer'"),
        ({"phi_gradient": "dense"}, "phi_gradient='dense' must be one of"),
        ({"estimation_steps": 0}, "estimation_steps=0 must be at least 1"),
        (
            {"reselection_interval": 5},
            "reselection_interval=5 must be greater than estimation_steps=5.*Raise it, lower estimation_steps",
        ),
        ({"reselection_interval": -1}, "reselection_interval=-1 must be at least 0"),
        ({"reselection_interval": None}, "reselection_interval=None must be an integer"),
        ({"replacement_rate": 1.5}, r"replacement_rate=1.5 must be in \[0, 1\]"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0 must be positive"),
        ({"seed": None}, "seed=None must be an integer"),
        ({"targets": "q_proj"}, r"targets is the string 'q_proj'\. Write a list of names, \['q_proj'\]"),
        ({"targets": []}, "targets is empty"),
        ({"targets": [3]}, r"targets has 3\. Give names and classes of modules"),
    ],
)
def test_a_bad_setting_is_named_with_its_rule(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SFTConfig(**options)


def test_the_interval_may_be_as_short_as_the_phase_where_there_is_no_phase() -> None:
    assert SFTConfig(selection="momentum", reselection_interval=1, estimation_steps=5).reselection_interval == 1


def test_the_defaults_are_the_papers() -> None:
    config = SFTConfig()
    assert (config.reselection_interval, config.estimation_steps, config.replacement_rate) == (20, 5, 0.2)
    assert config.selection == "accumulated_gradient"


def test_a_config_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SFTConfig(targets=[nn.Linear]).density = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        SFTConfig(0.1)  # type: ignore[misc]


def test_numbers_and_names_of_other_types_become_plain_ones() -> None:
    config = SFTConfig(density=np.float32(0.25), max_grad_norm=np.float64(1), targets=(name for name in ("a", "b")))
    assert json.loads(json.dumps(dataclasses.asdict(config)))["density"] == 0.25
    assert config.targets == ("a", "b")
