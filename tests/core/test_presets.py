import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import ComputeEnvironment, DistributedType

from slivertune.core import presets

RUN_FILES = presets.run_file_names()
LAUNCH_PRESETS = [name for name in presets.preset_names() if name.endswith(".yaml") and name not in RUN_FILES]
DEEPSPEED_CONFIGS = [name for name in presets.preset_names() if name.endswith(".json")]


def run(command: list[str], cwd: Path, **variables: str) -> str:
    """Run a command with the environment's programs on its path and return what it printed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_preset_is_found_by_its_stem_and_by_its_file_name(checkout: Path) -> None:
    launch = checkout / "launch" / "single_gpu_24g.yaml"
    assert presets.preset_path("single_gpu_24g") == launch
    assert presets.preset_path("single_gpu_24g.yaml") == launch
    assert presets.preset_path("single_gpu_24g.json") == checkout / "ds_configs" / "single_gpu_24g.json"


@pytest.mark.parametrize("name", ["single_gpu", "", "README", "README.md", "../pyproject.toml", "single_gpu_24g.yml"])
def test_an_unknown_name_is_an_error_that_lists_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match="there is no preset") as error:
        presets.preset_path(name)
    assert repr(name) in str(error.value)
    assert "single_gpu_24g.yaml" in str(error.value) and "single_gpu_24g.json" in str(error.value)


def test_an_installation_without_presets_is_an_error_that_names_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "__file__", str(tmp_path / "a" / "b" / "core/presets.py"))
    with pytest.raises(FileNotFoundError, match="'launch'") as error:
        presets.preset_names()
    assert str(tmp_path / "a" / "b" / "launch") in str(error.value)
    assert str(tmp_path / "launch") in str(error.value)


def test_the_package_folder_comes_before_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a" / "b"
    for folder in (package, tmp_path):
        for name in ("launch/x.yaml", "ds_configs/x.json"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    monkeypatch.setattr(presets, "__file__", str(package / "core/presets.py"))
    assert presets.preset_path("x") == package / "launch" / "x.yaml"
    shutil.rmtree(package / "launch")
    assert presets.preset_path("x") == tmp_path / "launch" / "x.yaml"


@pytest.mark.parametrize("name", LAUNCH_PRESETS)
def test_a_launch_preset_opens_with_what_it_trains_on_what_and_the_command(name: str) -> None:
    comment = re.match(r"(?:#.*\n)+", presets.preset_path(name).read_text(encoding="utf-8"))
    assert comment is not None
    assert comment[0].startswith("# Trains: ")
    assert re.search(r"^# On: ", comment[0], re.MULTILINE)
    assert f"# Run: accelerate launch --config_file $(slivertune path {Path(name).stem}) train.py\n" in comment[0]
    assert re.search(r"^# Planned peak: \S", comment[0], re.MULTILINE)


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_run_file_opens_with_what_it_trains_on_what_and_the_command(name: str) -> None:
    path = presets.preset_path(name)
    text = path.read_text(encoding="utf-8")
    comment = re.match(r"(?:#.*\n)+", text)
    assert comment is not None
    assert comment[0].startswith("# Trains: ")
    command = f"slivertune train $(slivertune path {path.stem}) --model_name_or_path MODEL --dataset DATA.jsonl"
    assert f"\n# Run: {command}\n" in comment[0]
    for line in (r"^# On: one GPU with \d+ GB", r"^# Planned peak: \S", r"^#   config = st\.HiFTConfig\(|st\.HiFT\("):
        assert re.search(line, comment[0], re.MULTILINE)
    assert f"| `{path.stem}` |" in (path.parent / "README.md").read_text(encoding="utf-8")


def test_run_files_are_those_of_train_and_no_launch_presets() -> None:
    assert RUN_FILES == (
        "single_gpu_12g_8b.yaml",
        "single_gpu_24g_13b.yaml",
        "single_gpu_24g_32b.yaml",
        "single_gpu_24g_full.yaml",
        "single_gpu_48g_70b.yaml",
    )
    with pytest.raises(ValueError, match="there is no preset"):
        presets.preset_path("single_gpu_24g_32b.json")


@pytest.mark.parametrize("name", LAUNCH_PRESETS)
def test_a_launch_preset_has_a_twin_for_deepspeed_and_a_row_in_the_table(name: str) -> None:
    path = presets.preset_path(name)
    twin = presets.preset_path(f"{path.stem}.json")
    assert twin.stem == path.stem
    assert isinstance(json.loads(twin.read_text(encoding="utf-8")), dict)
    assert f"| `{path.stem}` |" in (path.parent / "README.md").read_text(encoding="utf-8")


def test_every_deepspeed_config_has_a_launch_preset() -> None:
    assert {Path(name).stem for name in DEEPSPEED_CONFIGS} == {Path(name).stem for name in LAUNCH_PRESETS}


def settings_of(name: str) -> dict[str, Any]:
    path = presets.preset_path(name)
    text = path.read_text(encoding="utf-8")
    settings: dict[str, Any] = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    return settings


@pytest.mark.parametrize("name", LAUNCH_PRESETS)
def test_a_launch_preset_is_one_that_accelerate_reads_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config_from_file(str(presets.preset_path(name)))
    assert isinstance(config, ClusterConfig)
    assert config.num_processes % config.num_machines == 0
    # Accelerate would look for it in the folder in which the launch is typed.
    assert "deepspeed_config_file" not in (config.deepspeed_config or {})
    assert config.use_cpu is False
    assert config.compute_environment == ComputeEnvironment.LOCAL_MACHINE
    assert bool(config.deepspeed_config) is (config.distributed_type == DistributedType.DEEPSPEED)
    assert bool(config.fsdp_config) is (config.distributed_type == DistributedType.FSDP)


ENGINES = {
    "single_gpu_24g": ("NO", 1, 1),
    "ddp": ("MULTI_GPU", 1, 4),
    "fsdp2": ("FSDP", 1, 4),
    "zero1": ("DEEPSPEED", 1, 4),
    "zero2": ("DEEPSPEED", 1, 4),
    "zero3": ("DEEPSPEED", 1, 4),
    "zero3_offload": ("DEEPSPEED", 1, 4),
    "multi_node_zero3": ("DEEPSPEED", 2, 16),
}
"""Engine, machines, processes on all of them together."""


def test_the_presets_are_those_of_the_design_on_the_machines_that_they_say() -> None:
    kinds = ("distributed_type", "num_machines", "num_processes")
    assert {Path(name).stem: tuple(settings_of(name)[kind] for kind in kinds) for name in LAUNCH_PRESETS} == ENGINES


TWIN_STAGES = {"NO": 2, "MULTI_GPU": 1, "FSDP": 3}
"""What DeepSpeed does most alike: weights and gradients whole on each GPU, or all cut."""


@pytest.mark.parametrize("stem", ENGINES)
def test_a_launch_preset_asks_for_what_its_twin_asks_for(stem: str) -> None:
    launch, twin = settings_of(f"{stem}.yaml"), settings_of(f"{stem}.json")
    zero = twin["zero_optimization"]
    # Under FSDP2, accelerate's bf16 means fp32 weights; bf16 weights come with the script, as everywhere.
    assert launch["mixed_precision"] == ("no" if launch["distributed_type"] == "FSDP" else "bf16")
    assert twin["bf16"] == {"enabled": "auto"}
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert twin[key] == "auto"
    if launch["distributed_type"] != "DEEPSPEED":
        assert "deepspeed_config" not in launch
        assert zero["stage"] == TWIN_STAGES[launch["distributed_type"]]
        assert "offload_param" not in zero
        return
    assert launch["deepspeed_config"].pop("deepspeed_multinode_launcher", None) in (None, "standard")
    assert launch["deepspeed_config"] == {
        "zero_stage": zero["stage"],
        "offload_param_device": zero.get("offload_param", {"device": "none"})["device"],
        "offload_optimizer_device": zero.get("offload_optimizer", {"device": "none"})["device"],
        "zero3_init_flag": zero["stage"] == 3,
        "zero3_save_16bit_model": zero.get("stage3_gather_16bit_weights_on_model_save", False),
        "gradient_clipping": twin["gradient_clipping"],
    }


@pytest.mark.parametrize("name", DEEPSPEED_CONFIGS)
def test_a_deepspeed_config_is_one_that_deepspeed_and_hift_take(name: str) -> None:
    zero_config = pytest.importorskip("deepspeed.runtime.zero.config")
    from slivertune.parallel.zero.unsupported import check_hift_config

    settings = settings_of(name)
    # DeepSpeed passes over keys that it does not know.
    fields = zero_config.DeepSpeedZeroConfig.model_fields
    known = {name for key, field in fields.items() for name in (key, field.alias)}
    assert set(settings["zero_optimization"]) <= known
    read = zero_config.get_zero_config(settings)
    assert int(read.stage) == check_hift_config(settings) == settings["zero_optimization"]["stage"]
    # Without the key, DeepSpeed would clip at 1.0 whatever the script says.
    assert "gradient_clipping" in settings
    # The bare launcher refuses optimizers that DeepSpeed has no test for, HiFT's bases among them.
    assert settings["zero_allow_untested_optimizer"] is True
    # With offload, accelerate would put DeepSpeedCPUAdam in the optimizer's place.
    assert settings.get("zero_force_ds_cpu_optimizer") is (
        False if "offload_param" in settings["zero_optimization"] else None
    )


def test_the_examples_are_found_by_file_name_and_are_no_presets(checkout: Path) -> None:
    for folder, name in (
        ("launch", "multi_node_zero3.slurm"),
        ("launch", "multi_node_zero3.hostfile"),
        ("examples", "trainer_hift.py"),
        ("examples", "first_steps.ipynb"),
    ):
        assert presets.preset_path(name) == checkout / folder / name
        assert name not in presets.preset_names()
        with pytest.raises(ValueError, match=name):
            presets.preset_path("nowhere")
    assert presets.preset_path("multi_node_zero3") == checkout / "launch" / "multi_node_zero3.yaml"


def test_the_slurm_script_is_bash_and_asks_for_the_machines_of_its_preset(tmp_path: Path) -> None:
    path = presets.preset_path("multi_node_zero3.slurm")
    run(["bash", "-n", str(path)], tmp_path)
    text = path.read_text(encoding="utf-8")
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    _, num_machines, num_processes = ENGINES["multi_node_zero3"]
    assert asked["nodes"] == str(num_machines)
    assert asked["gpus-per-node"] == str(num_processes // num_machines)
    assert asked["ntasks-per-node"] == "1"
    assert "sbatch $(slivertune path multi_node_zero3.slurm) train.py" in text


def test_the_hostfile_names_the_machines_of_its_preset() -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    machines = runner.fetch_hostfile(str(presets.preset_path("multi_node_zero3.hostfile")))
    _, num_machines, num_processes = ENGINES["multi_node_zero3"]
    assert list(machines.values()) == [num_processes // num_machines] * num_machines


HIFT_UNDER_ACCELERATE = """
import json

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import slivertune as st

torch.manual_seed(0)
model = torch.nn.ModuleDict({"low": torch.nn.Linear(4, 4), "high": torch.nn.Linear(4, 4)}).to(torch.bfloat16)
config = st.HiFTConfig.paper(layers=[["low"], ["high"]])
optimizer = st.HiFT(model, torch.optim.AdamW, config=config, lr=0.1)
before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

accelerator = Accelerator()
model, optimizer = accelerator.prepare(model, optimizer)
changed = []
for _ in range(2):
    loss = model["high"](model["low"](torch.ones(1, 4, dtype=torch.bfloat16, device=accelerator.device))).sum()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    changed.append(sorted(n for n, p in model.named_parameters() if not torch.equal(p.cpu(), before[n].cpu())))

state = AcceleratorState()
print(json.dumps({
    "distributed_type": state.distributed_type.value,
    "num_processes": state.num_processes,
    "mixed_precision": state.mixed_precision,
    "changed": changed,
}))
"""


@pytest.mark.slow
def test_single_gpu_24g_launches_hift_unedited(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HIFT_UNDER_ACCELERATE, encoding="utf-8")
    preset = str(presets.preset_path("single_gpu_24g"))
    printed = run(["accelerate", "launch", "--config_file", preset, "train.py"], tmp_path)
    low, both = ["low.bias", "low.weight"], ["high.bias", "high.weight", "low.bias", "low.weight"]
    assert json.loads(printed.splitlines()[-1]) == {
        "distributed_type": "NO",
        "num_processes": 1,
        "mixed_precision": "bf16",
        "changed": [low, both],
    }


DENSE_UNDER_DEEPSPEED = """
import json
import sys

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

# On a CPU DeepSpeed would first compile its shared-memory collectives for a minute; gloo does for one process.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(config)
before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
arguments = TrainingArguments(
    output_dir="out",
    deepspeed=sys.argv[1],
    use_cpu=True,
    bf16=True,
    per_device_train_batch_size=3,
    gradient_accumulation_steps=2,
    max_grad_norm=0.5,
    max_steps=2,
    learning_rate=0.1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
trainer = Trainer(model=model, args=arguments, train_dataset=[row] * 12)
trainer.train()
engine = trainer.model_wrapped
print(json.dumps({
    "engine": type(engine).__name__,
    "bf16": engine.bfloat16_enabled(),
    "stage": engine.zero_optimization_stage(),
    "micro_batch": engine.train_micro_batch_size_per_gpu(),
    "accumulation": engine.gradient_accumulation_steps(),
    "batch": engine.train_batch_size(),
    "clipping": engine.gradient_clipping(),
    "unchanged": [n for n, p in model.named_parameters() if torch.equal(p.detach().float(), before[n])],
}))
"""


@pytest.mark.slow
def test_single_gpu_24g_under_deepspeed_takes_every_auto_value_from_the_trainers_arguments(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    (tmp_path / "train.py").write_text(DENSE_UNDER_DEEPSPEED, encoding="utf-8")
    launch = ["torchrun", "--standalone", "--nproc_per_node", "1", "train.py"]
    printed = run([*launch, str(presets.preset_path("single_gpu_24g.json"))], tmp_path, DS_ACCELERATOR="cpu")
    assert json.loads(printed.splitlines()[-1]) == {
        "engine": "DeepSpeedEngine",
        "bf16": True,
        "stage": 2,
        "micro_batch": 3,
        "accumulation": 2,
        "batch": 6,
        "clipping": 0.5,
        "unchanged": [],
    }
