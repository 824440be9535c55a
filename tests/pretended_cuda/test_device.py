"""What a pretended CUDA device is like: memory, devices that don't mix, random numbers and pinned memory of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pretended_cuda import library
from tests.pretended_cuda.library import NoDeviceError, build
from tests.pretended_cuda.on_device import on_device, require_device


def facts() -> dict[str, Any]:
    """What a script would ask."""
    born = torch.empty(8, device="cuda")
    kept = born.data_ptr()
    before = torch.cuda.memory_allocated()
    large = torch.ones(1024, device="cuda")
    grown = torch.cuda.memory_allocated() - before
    del large
    is_freed = torch.cuda.memory_allocated() == before
    torch.manual_seed(5)
    drawn, on_cpu = torch.rand(4, device="cuda"), torch.rand(4)
    torch.manual_seed(5)
    again, after_state = torch.rand(4, device="cuda"), torch.cuda.get_rng_state()
    dropped = torch.dropout(torch.ones(64, device="cuda"), 0.5, True)
    torch.cuda.set_rng_state(after_state)
    with torch.cuda.device(1):
        on_other = torch.empty(1, device="cuda").device
    return {
        "device": str(born.device),
        "is NaN at birth": bool(born.isnan().all()),
        "has an address": kept > 0,
        "grown bytes": grown,
        "freed": is_freed,
        "peak": torch.cuda.max_memory_allocated() - before >= grown,
        "the same after a seed": torch.equal(drawn, again),
        "takes nothing from the CPU's numbers": torch.equal(torch.rand(4), on_cpu),
        "dropout is repeated": torch.equal(torch.dropout(torch.ones(64, device="cuda"), 0.5, True), dropped),
        "other device": str(on_other),
        "pinned": torch.empty(4, pin_memory=True).is_pinned(),
        "not pinned": torch.empty(4).is_pinned(),
        "accelerator": str(torch.accelerator.current_accelerator()),
    }


def test_it_looks_like_a_card() -> None:
    assert on_device(facts, num_devices=2) == {
        "device": "cuda:0",
        "is NaN at birth": True,
        "has an address": True,
        "grown bytes": 4096,
        "freed": True,
        "peak": True,
        "the same after a seed": True,
        "takes nothing from the CPU's numbers": True,
        "dropout is repeated": True,
        "other device": "cuda:1",
        "pinned": True,
        "not pinned": False,
        "accelerator": "cuda",
    }


def error_of(other: str) -> str:
    try:
        torch.ones(3, device="cuda") + torch.ones(3, device=other)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_devices_do_not_mix(other: str) -> None:
    assert "Expected all tensors to be on the same device" in on_device(error_of, other, num_devices=2)


def beyond_the_limit() -> str:
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        torch.empty(2**20, device="cuda")
    except torch.OutOfMemoryError as error:
        return str(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return ""


def test_memory_beyond_the_processs_share_is_refused() -> None:
    assert "Tried to allocate 4194304 bytes" in on_device(beyond_the_limit)


def test_it_has_to_be_loaded_before_torch() -> None:
    with pytest.raises(RuntimeError, match="before torch is imported"):
        library.load()


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    require_device()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoDeviceError, match=r"no g\+\+"):
        build()


def test_a_source_that_does_not_compile_is_an_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require_device()
    broken = tmp_path / "device.cpp"
    broken.write_text("nonsense", encoding="utf-8")
    monkeypatch.setattr(library, "SOURCE", broken)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="nonsense"):
        build()
    assert list((tmp_path / "cache" / "slivertune-tests").iterdir()) == []


def test_a_process_of_its_own_has_no_device_of_its_parents() -> None:
    """Children are ordinary processes: nothing of the device is in the environment."""
    assert on_device(child_sees_cuda) == "False\n"


def child_sees_cuda() -> str:
    command = [sys.executable, "-c", "import torch; print(torch.cuda.is_available())"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
