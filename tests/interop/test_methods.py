from dataclasses import dataclass

import pytest

from slivertune import HiFTConfig, SFTConfig, TokenTune
from slivertune.interop import methods
from slivertune.interop.methods import TrainerHiFT, TrainerMethod, TrainerSFT, method_of, register_method


@dataclass(frozen=True, kw_only=True)
class OwnHiFTConfig(HiFTConfig):
    """Settings of a project that has defaults of its own."""

    steps_per_group: int = 2


@pytest.mark.parametrize(
    ("setting", "kind"),
    [(HiFTConfig(), TrainerHiFT), (OwnHiFTConfig(), TrainerHiFT), (SFTConfig(density=0.1), TrainerSFT)],
)
def test_a_method_is_found_by_its_settings_and_those_derived_from_them(setting: object, kind: type) -> None:
    assert type(method_of(setting)) is kind


def test_a_method_of_another_package_is_found_once_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_methods", dict(methods._methods))

    class Settings:
        """Of another method."""

    method = TrainerMethod()
    assert method_of(Settings()) is None
    register_method(Settings, method)
    assert method_of(Settings()) is method
    assert method_of(TokenTune(ratio=0.5)) is None
