"""Every preset, as it stands, trains HiFT on the engine that it names; seen from inside of the run.

`make test` lets accelerate's launcher read each preset, and trains on ranks that have the environment that it would
have given to its processes. It starts them where DeepSpeed's launcher comes in; `make test-all`, always.
"""

import functools
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml  # type: ignore[import-untyped]

from slivertune.core import presets
from tests.helpers.launching import (
    CHECKOUT,
    LaunchError,
    Report,
    asked_of_processes,
    launch,
    launch_preset,
    options_of_launch,
)
from tests.helpers.models import tiny_llama
from tests.helpers.ranks import run_ranks
from tests.parallel.launched import train

pytest.importorskip("deepspeed")

SCRIPT = CHECKOUT / "tests" / "parallel" / "launched.py"
BLOCKS = 2
UPDATES = 2 * (BLOCKS + 2)
"""Two cycles of embedding, blocks and head."""

ON_DEEPSPEED = {"distributed_type": "DEEPSPEED", "engine": "DeepSpeedEngine"}


def zero(stage: int, *offload: str) -> Report:
    return {
        **ON_DEEPSPEED,
        "layout": f"zero{stage}",
        "engine_facts": {
            "zero_stage": stage,
            "offload": list(offload),
            "clipping": 1.0,
            "accumulation": 1,
            "batch": 2,
            "bf16": True,
        },
        "is_sharded": stage == 3,
    }


WHOLE = {"engine": "LlamaForCausalLM", "engine_facts": {}, "is_sharded": False}
EXPECTED: dict[str, Report] = {
    "single_gpu_24g": {**WHOLE, "layout": "single", "distributed_type": "NO", "world_size": 1},
    "ddp": {**WHOLE, "layout": "ddp", "distributed_type": "MULTI_CPU"},
    "fsdp2": {
        "layout": "fsdp2",
        "distributed_type": "FSDP",
        "engine": "FSDPLlamaForCausalLM",
        "engine_facts": {"fsdp_version": 2, "reshards": True},
        "is_sharded": True,
        "mixed_precision": "no",
    },
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
    "zero3_offload": zero(3, "parameters"),
    "multi_node_zero3": zero(3),
}
"""What the ranks must say; two of them, in bf16, where nothing else stands."""

Launched = Callable[[str], list[Report]]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The script and its argument: a folder with a model in bf16."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(torch.bfloat16, blocks=BLOCKS).save_pretrained(folder)
    return [str(SCRIPT), str(folder)]


@pytest.fixture(scope="module")
def launched(script: list[str], tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Launches a preset as it stands; once, whoever asks."""

    @functools.cache
    def reports(name: str) -> list[Report]:
        folder = tmp_path_factory.mktemp(name)
        if name == "multi_node_zero3":
            return launch_by_slurm(script, folder)
        return launch_preset(presets.preset_path(f"{name}.yaml"), script, folder)

    return reports


def train_as_asked(rank: int, num_ranks: int, preset: Path, script: tuple[str, str]) -> Report:
    """Train as a process does that accelerate's launcher would start under a preset."""
    if num_ranks == 1:  # which is started without a group
        dist.destroy_process_group()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    num_processes, environment = asked_of_processes(preset, script)
    assert num_processes == num_ranks
    os.environ.update(environment)
    return train(script[1])[1]


@pytest.fixture(scope="module")
def trained(script: list[str]) -> Launched:
    """Trains as a preset asks; once, whoever asks."""

    @functools.cache
    def reports(name: str) -> list[Report]:
        preset = presets.preset_path(f"{name}.yaml")
        return run_ranks(train_as_asked, options_of_launch(preset)[1], preset, tuple(script))

    return reports


def check(reports: list[Report], expected: Report) -> None:
    """Each rank saw the engine that was expected, trained every weight on it, and ended with the others' weights."""
    expected = {"world_size": 2, "mixed_precision": "bf16", "dtypes": ["torch.bfloat16"], **expected}
    for seen in reports:
        assert {name: seen[name] for name in expected} == expected
        assert seen["num_processes"] == expected["world_size"] == len(reports)
        assert seen["unchanged"] == [] and len(seen["losses"]) == seen["num_updates"] == UPDATES
        assert seen["weights"] == reports[0]["weights"]
    if len(reports) > 1:
        assert reports[0]["losses"] != reports[1]["losses"], "the ranks trained on the same data"


def test_every_preset_has_its_expectation_here() -> None:
    run_files = presets.run_file_names()
    yaml_names = {name for name in presets.preset_names() if name.endswith(".yaml")}
    assert set(EXPECTED) == {Path(name).stem for name in yaml_names.difference(run_files)}


@pytest.mark.parametrize("name", EXPECTED)
def test_ranks_that_are_as_a_preset_asks_train_on_the_engine_that_it_names(name: str, trained: Launched) -> None:
    check(trained(name), EXPECTED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_a_preset_launches_the_engine_that_it_names(name: str, launched: Launched) -> None:
    check(launched(name), EXPECTED[name])


def test_presets_with_two_processes_make_the_same_updates_to_the_bit(trained: Launched) -> None:
    reports = {name: trained(name)[0] for name in EXPECTED if EXPECTED[name].get("world_size", 2) == 2}
    assert len(reports) == 7
    assert_same_updates(reports)


@pytest.mark.slow
def test_launched_presets_with_two_processes_make_the_same_updates_to_the_bit(launched: Launched) -> None:
    assert_same_updates({name: launched(name)[0] for name in EXPECTED if EXPECTED[name].get("world_size", 2) == 2})


def assert_same_updates(reports: dict[str, Report]) -> None:
    """They end with the same weights, but for a difference of transformers 5.16."""
    # It loads a model with rotary frequencies in bf16 under ZeRO-3.
    rounded = {name for name, each in reports.items() if each["buffers"] == ["torch.bfloat16"]}
    assert rounded in (set(), {name for name, each in EXPECTED.items() if each["layout"] == "zero3"} & set(reports))
    for names in (reports.keys() - rounded, rounded):
        weights = {name: reports[name]["weights"] for name in names}
        assert len(set(weights.values())) == min(1, len(names)), weights


FAKE_SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames node[0-1]" ] && printf '127.0.0.1\\nnode1\\n'
"""
FAKE_SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
for machine in 0 1; do SLURM_NODEID=$machine "$@" & started[machine]=$!; done
wait "${started[0]}" && wait "${started[1]}"
"""


FAKE_ACCELERATE = """#!/bin/bash
printf '%s\\n' "$@" > asked-"$SLURM_NODEID"
"""


def launch_by_slurm(script: list[str], tmp_path: Path, num_reports: int = 2, **more: str) -> list[Report]:
    """Both machines are this one; the script and the preset are the shipped ones, with a process for each machine.

    Args:
        script: The script and its arguments.
        tmp_path: `work` in it becomes the working folder.
        num_reports: Of the script.
        **more: Programs in place of those that are installed.
    """
    programs, folder = tmp_path / "bin", tmp_path / "work"
    programs.mkdir()
    folder.mkdir()
    for name, text in {"scontrol": FAKE_SCONTROL, "srun": FAKE_SRUN, **more}.items():
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_ID": str(free_port(20000) - 20000),
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
    }
    return launch(
        ["bash", str(presets.preset_path("multi_node_zero3.slurm")), *script],
        folder,
        num_reports,
        variables=slurm,
        programs=programs,
    )


def test_the_slurm_script_calls_the_launcher_once_on_each_machine(tmp_path: Path) -> None:
    """`make test-all` lets it launch."""
    assert launch_by_slurm(["train.py", "--two words", "3"], tmp_path, num_reports=0, accelerate=FAKE_ACCELERATE) == []
    ports = set()
    for machine in (0, 1):
        words = (tmp_path / "work" / f"asked-{machine}").read_text(encoding="utf-8").splitlines()
        assert (words[0], words[-3:]) == ("launch", ["train.py", "--two words", "3"])
        options = dict(zip(words[1:-3:2], words[2:-3:2], strict=True))
        ports.add(int(options.pop("--main_process_port")))
        assert options == {
            "--config_file": str(presets.preset_path("multi_node_zero3.yaml")),
            "--num_machines": "2",
            "--num_processes": "2",
            "--machine_rank": str(machine),
            "--main_process_ip": "127.0.0.1",
        }
    assert len(ports) == 1 and 20000 <= min(ports) < 30000


def free_port(first: int) -> int:
    """A free port at or above one; below those that the system hands out by itself."""
    for port in range(first + os.getpid() % 5000, first + 10000):
        with socket.socket() as server:
            try:
                server.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")


def launcher_of(name: str, twin: Path) -> list[str]:
    """A launcher's command up to the script; accelerate's names the twin itself, for the others the script does."""
    if name == "deepspeed":
        return ["deepspeed", "--num_accelerators", "2", "--master_port", str(free_port(20000))]
    if name == "torchrun":
        return ["torchrun", "--standalone", "--nproc_per_node", "2"]
    return [
        "accelerate",
        "launch",
        "--use_deepspeed",
        "--deepspeed_config_file",
        str(twin),
        "--mixed_precision",
        "bf16",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--main_process_port",
        "0",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("accelerate", "zero1"),
        ("deepspeed", "zero2"),
        ("torchrun", "zero3"),
    ],
)
def test_a_json_twin_runs_as_its_preset_does(
    name: str, stem: str, script: list[str], trained: Launched, tmp_path: Path
) -> None:
    twin = presets.preset_path(f"{stem}.json")
    reports = launch([*launcher_of(name, twin), *script, *([] if name == "accelerate" else [str(twin)])], tmp_path, 2)
    check(reports, EXPECTED[stem])
    assert reports[0]["weights"] == trained(stem)[0]["weights"]


def broken(name: str, folder: Path, **changes: Any) -> Path:
    """A copy of a preset with some settings changed; None takes one out."""
    settings = yaml.safe_load(presets.preset_path(f"{name}.yaml").read_text(encoding="utf-8"))
    settings = {key: value for key, value in {**settings, **changes}.items() if value is not None}
    path = folder / "broken.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "seen"),
    [
        ("zero2", {"distributed_type": "MULTI_GPU", "deepspeed_config": None}, "MULTI_CPU"),
        ("fsdp2", {"distributed_type": "MULTI_GPU", "fsdp_config": None}, "MULTI_CPU"),
        ("zero3", {"deepspeed_config": {"zero_stage": 2}}, "'zero_stage': 2"),
        ("ddp", {"num_processes": 1, "distributed_type": "NO"}, "'world_size': 1"),
    ],
)
def test_a_preset_that_fell_to_another_engine_is_seen(
    name: str, changes: dict[str, Any], seen: str, script: list[str], tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    reports = launch_preset(broken(name, tmp_path, **changes), script, work)
    with pytest.raises(AssertionError, match=re.escape(seen)):
        check(reports, EXPECTED[name])


@pytest.mark.slow
def test_a_script_that_fails_on_one_rank_is_seen_with_what_it_printed(tmp_path: Path) -> None:
    failing = tmp_path / "failing.py"
    failing.write_text('import os\nassert os.environ["RANK"] == "0", "no good on this rank"\n', encoding="utf-8")
    with pytest.raises(LaunchError, match="no good on this rank"):
        launch_preset(presets.preset_path("ddp.yaml"), [str(failing)], tmp_path)
