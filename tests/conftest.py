"""What every test stands on: no network, a home of its own, fixed seeds and threads, no deprecated call."""

import gc
import logging
import os
import random
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.training.tiny_runs import Runs

CHECKOUT = Path(__file__).resolve().parents[1]

# Set before torch, transformers and datasets are imported, and inherited by the subprocesses that tests start.
# A cache of their own keeps datasets' files and accelerate's default configuration in a user's home out of the tests.
_CACHE = tempfile.TemporaryDirectory(prefix="slivertune-tests-", ignore_cleanup_errors=True)
os.environ.update(
    HF_HOME=_CACHE.name,
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"),
    # Threads that spin while they wait take the cores from the other test processes: ten times the time with two.
    OMP_WAIT_POLICY=os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    TOKENIZERS_PARALLELISM="false",
)


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C reach the processes of tests, and keep temporary folders out of memory, where `state="disk"` fails."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell script starts by `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    mounts = Path("/proc/self/mounts")
    lines = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()] if mounts.exists() else []
    is_in_memory = any(line[1:3] == [tempfile.gettempdir(), "tmpfs"] for line in lines)
    if is_in_memory and Path("/var/tmp").is_dir():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/var/tmp")
    config.pluginmanager.register(_Frozen())


def pytest_report_header() -> str:
    """Say what decides in which order this machine takes its sums."""
    import torch

    num_threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}: get_num_threads() = {num_threads}, get_cpu_capability() = {capability}"


_CAUSED_BY_OTHERS = {"`use_return_dict` is deprecated": "peft/peft_model.py"}
"""What is logged, and in which file; PEFT 0.20 asks transformers by this name."""


class _DeprecationLog(logging.Handler):
    """Collects the deprecations that transformers and accelerate log instead of warning of them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message, stack = record.getMessage(), "".join(traceback.format_stack(limit=12))
        if any(message.startswith(said) and path in stack for said, path in _CAUSED_BY_OTHERS.items()):
            return
        if re.search(r"\bdeprecat|will be removed in", message, re.IGNORECASE):
            self.records.append(f"{record.name}: {message}\n{stack}")


@pytest.fixture(autouse=True)
def no_deprecation_is_logged() -> Iterator[list[str]]:
    """Fail a test during which transformers or accelerate logs that something it was asked for is deprecated."""
    handler = _DeprecationLog()
    loggers = [logging.getLogger(name) for name in ("transformers", "accelerate")]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler.records
    for logger in loggers:
        logger.removeHandler(handler)
    if handler.records:
        pytest.fail("a deprecated call was logged:\n" + "\n".join(handler.records), pytrace=False)


class _Frozen:
    """Keeps the garbage collector from looking through what was imported, which takes longer than most tests."""

    def __init__(self) -> None:
        self._num_modules = 0

    def pytest_collectstart(self) -> None:
        gc.disable()

    def pytest_collection_finish(self) -> None:
        self._freeze()
        gc.enable()

    def pytest_runtest_logfinish(self) -> None:
        """Freeze again after a test that imported many modules; what it had is gone by now."""
        if len(sys.modules) > self._num_modules + 100:
            self._freeze()

    def _freeze(self) -> None:
        self._num_modules = len(sys.modules)
        gc.collect()  # what is garbage now would stay for good
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Let files reach the disk when they may: no test cuts the power, and waiting takes a sixth of a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # as picky about what is no open file
        yield


@pytest.fixture(autouse=True)
def no_checkpoint_goes_on() -> Iterator[None]:
    """End what torch's checkpoint has begun: an error inside leaves its hooks to the collector, and to later tests."""
    yield
    internals = sys.modules.get("slivertune.core.torch_internals")
    if internals is not None and internals.saved_tensors_hooks_now() is not None:
        gc.collect()


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # Without a device, `torch.manual_seed` notes a traceback for each kind, which takes longer than many a test.
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True)
def attention_as_registered() -> Iterator[None]:
    """Give transformers its attention back after a test whose model keeps its selection, as a trainer's does."""
    yield
    if "slivertune.tokentune.attention" in sys.modules:
        from tests.helpers.process_state import release_attention

        release_attention()


@pytest.fixture(scope="module", autouse=True)
def fresh_accelerate_state() -> Iterator[None]:
    """Forget accelerate's process-wide state after each test file, so that files may use different precisions."""
    yield
    if "accelerate" in sys.modules:
        from tests.helpers.process_state import forget_accelerate

        forget_accelerate()


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The top of the checkout."""
    return CHECKOUT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data sets that are too large for the repository; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("SLIVERTUNE_TEST_DATA", CHECKOUT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; name its folder in SLIVERTUNE_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level Llama of two blocks and its tokenizer."""
    from tests.training.tiny_runs import make_tiny_base

    return make_tiny_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jsonl file of sentences."""
    from tests.training.tiny_runs import write_texts

    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture
def runs(tiny_base: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> "Runs":
    """Runs of the command over the tiny base and the sentences."""
    from tests.training.tiny_runs import Runs

    return Runs(tiny_base, texts, tmp_path, capsys)
