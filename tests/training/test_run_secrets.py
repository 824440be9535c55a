"""Nothing that a run or a comparison keeps or shows has a secret of its command, its file or its environment."""

import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from slivertune.cli import main
from slivertune.core import masking
from slivertune.core.masking import MASK
from slivertune.training.run_process import FailedError
from tests.helpers.ranks import quick
from tests.training.tiny_runs import UNMEASURED, Runs, complaint, train_arguments

TOKEN, KEY, PASSWORD = "hf-of-the-hub-4711", "of the environment", "pass-of-a-url"
SECRETS = (TOKEN, KEY, PASSWORD)
PROMPT = f"https://me:{PASSWORD}@host {KEY}"


@pytest.fixture(autouse=True)
def secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_known", set())
    monkeypatch.setenv("SOME_API_KEY", KEY)


def assert_kept_nowhere(folder: Path, printed: str) -> None:
    """Search all files, in which pickles have texts as they are, and what was printed."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 3
    found = [(path, each) for path in files for each in SECRETS if each.encode() in path.read_bytes()]
    assert found == [] and [each for each in SECRETS if each in printed] == []


def typed(how: str, folder: Path) -> tuple[list[str], list[str]]:
    """Return the words before all options and those after them."""
    if how == "in a file":
        (folder / "run.yaml").write_text(f"hub_token: {TOKEN}\n", encoding="utf-8")
        return [str(folder / "run.yaml")], []
    return [], {"as two words": ["--hub_token", TOKEN], "as one word": [f"--hub-token={TOKEN}"]}[how]


@pytest.mark.parametrize("how", quick(["as two words", "as one word", "in a file"], ["as one word", "in a file"]))
def test_a_run_keeps_and_shows_no_secret(
    how: str, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = typed(how, tmp_path)
    words = runs.arguments("out", "--save_steps", "3", "--sample_prompt", PROMPT, *UNMEASURED, *after)
    words = [*words[:1], *before, *words[1:], "--max_steps", "3", "--resume_from_checkpoint", "auto"]
    monkeypatch.setattr("sys.argv", ["slivertune", *words])
    assert main() == 0
    # A second time it says that it is finished, and by which command.
    assert main(words) == 0
    captured = capsys.readouterr()
    assert MASK in captured.out and "nothing was trained" in captured.out
    assert_kept_nowhere(runs["out"], captured.out + captured.err + " ".join(sys.argv))
    for folder in ("model", "checkpoint-3"):
        kept = torch.load(runs["out"] / folder / "training_args.bin", weights_only=False)
        assert kept.hub_token == MASK and kept.seed == 42
    # What was kept is no command until the secrets are filled in.
    assert f"has {MASK} in place of a secret, as in a saved command" in complaint(
        capsys, ["train", str(runs["out"] / "slivertune_run.yaml")]
    )


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (RuntimeError(f"no entry with {TOKEN} and {PROMPT}"), 1)]
)
def test_a_run_that_ends_early_shows_no_secret(
    error: BaseException, code: int, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.Trainer.train", Mock(side_effect=error))
    words = runs.arguments("out", "--hub_token", TOKEN, "--sample_prompt", PROMPT, *UNMEASURED)
    said = complaint(runs._capsys, ["--debug", *words], code)
    assert [each for each in SECRETS if each in said] == [] and MASK in said


@pytest.fixture
def compared(tiny_base: Path, texts: Path, tmp_path: Path) -> list[str]:
    """A comparison in the folder `compared`, whose rows and common options have secrets."""
    common = train_arguments(tiny_base, texts, tmp_path, *UNMEASURED)[7:]
    words = ["compare", "--output_dir", str(tmp_path / "compared"), *common[common.index("--max_length") :]]
    words += ["--rows", "dense", f"m2:--method hift --hub_token {TOKEN}"]
    words += ["--model_name_or_path", str(tiny_base), "--dataset", str(texts)]
    return [*words, "--max_steps", "1", "--hub_token", TOKEN, "--sample_prompt", PROMPT]


def test_a_comparison_keeps_and_shows_no_secret(
    compared: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run(words: list[str], *_: object) -> None:
        ran.append(words)
        assert main(words[2:]) == 0

    monkeypatch.setattr("slivertune.training.comparison.comparison.run_process", run)
    assert main(compared) == 0
    # The runs themselves had it; and the same command finds that all is there.
    assert all(TOKEN in each for each in ran) and len(ran) == 2
    assert main(compared) == 0 and len(ran) == 2
    captured = capsys.readouterr()
    assert_kept_nowhere(tmp_path / "compared", captured.out + captured.err)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted; continue with the missing runs: slivertune compare"),
        (FailedError(f"no entry with {TOKEN} and {PROMPT}"), 1, "2 of 2 rows failed"),
    ],
)
def test_a_comparison_that_ends_early_shows_no_secret(
    error: BaseException,
    code: int,
    said: str,
    compared: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slivertune.training.comparison.comparison.run_process", Mock(side_effect=error))
    assert main(compared) == code
    captured = capsys.readouterr()
    assert said in captured.err and MASK in captured.err + captured.out
    kept = "".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("compared/*.json"))
    assert [each for each in SECRETS if each in captured.out + captured.err + kept] == []


@pytest.mark.slow
def test_the_logs_of_the_processes_of_a_comparison_have_no_secret(
    compared: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "compared"
    for _ in range(2):
        assert main(compared) == 0
        # Without its record, each process says that its run is finished, and by which command.
        (folder / "compare.json").unlink()
    logs = [path.read_text(encoding="utf-8") for path in folder.rglob("*.log")]
    assert len(logs) == 2 and all(f"--hub_token '{MASK}'" in log for log in logs)
    captured = capsys.readouterr()
    assert_kept_nowhere(folder, captured.out + captured.err)


@pytest.mark.parametrize(
    "words",
    [
        ["--run_name", KEY],
        ["--hub_model_id", f"https://me:{PASSWORD}@host/x"],
        ["--accelerator_config", f'{{"api_key": "{TOKEN}"}}'],
        ["--deepspeed", f'{{"comet": {{"api_key": "{TOKEN}"}}}}'],
    ],
    ids=lambda words: words[0],
)
def test_a_secret_that_the_trainer_would_pickle_and_publish_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = complaint(capsys, ["train", *words])
    assert f"{words[0]} " in said and "holds a secret" in said and [each for each in SECRETS if each in said] == []
    assert list(tmp_path.iterdir()) == [], shlex.join(words)


def test_a_run_publishes_no_secret(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    hub, published = Mock(), dict[str, bytes]()
    hub.create_repo.return_value.repo_id = "me/tuned"

    def upload(folder_path: str, **_: object) -> Mock:
        files = [path for path in Path(folder_path).rglob("*") if path.is_file()]
        published.update({path.name: published.get(path.name, b"") + path.read_bytes() for path in files})
        return Mock()

    hub.upload_folder.side_effect = upload
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    words = ["--hub_token", TOKEN, "--push_to_hub", "true", "--hub_model_id", "me/tuned", "--report_to", "tensorboard"]
    words += ["--sample_prompt", PROMPT, "--max_steps", "3", "--save_steps", "3", *UNMEASURED]
    runs.train("out", *words)
    # The hub itself was given the token.
    assert all(call.kwargs["token"] == TOKEN for call in hub.upload_folder.call_args_list)
    events = [name for name in published if name.startswith("events.out.tfevents")]
    assert events and {"README.md", "config.json", "slivertune_run.yaml", "training_args.bin"} <= published.keys()
    assert b'"per_device_train_batch_size": 2' in published[events[0]] and b"name: tuned" in published["README.md"]
    assert [(name, each) for name, kept in published.items() for each in SECRETS if each.encode() in kept] == []
    printed = capsys.readouterr()
    assert_kept_nowhere(runs["out"], printed.out + printed.err)
