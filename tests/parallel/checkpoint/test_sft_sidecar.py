"""SFT's state beside the checkpoints of ranks that share the weights out."""

from pathlib import Path

from tests.helpers.ranks import run_ranks
from tests.parallel.contract.runs import load, running, save
from tests.parallel.contract.sft import SFTCase

CASE = SFTCase(accumulation=2, plugin={"state_dict_type": "FULL_STATE_DICT"})


def save_on_two(rank: int, num_ranks: int, folder: Path) -> None:
    with running(CASE, "fsdp2", rank) as run:
        run.train(0, 2)
        save(run, folder)


def load_alone(rank: int, num_ranks: int, folder: Path) -> int:
    with running(CASE, "single", rank, seed=5) as run:
        assert run.accelerator.num_processes == 1 and "MULTI" in str(run.accelerator.distributed_type)
        load(run, folder)
        updates: int = run.sliver.updates
        return updates


def test_a_single_process_that_a_launcher_started_reads_it(tmp_path: Path) -> None:
    run_ranks(save_on_two, 2, tmp_path / "state")
    assert run_ranks(load_alone, 1, tmp_path / "state") == [2]
