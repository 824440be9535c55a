import pytest

from slivertune.planning.plan import CUBLAS_WORKSPACE_BYTES, CUDA_CONTEXT_BYTES, Limits, add_allowance
from tests.helpers.plan_requests import paper_request
from tests.planning.made import GIB, moment, simple_plan


def test_an_allowance_adds_up_and_counts_collectives_on_several_gpus_alone() -> None:
    requests = [paper_request(), paper_request(layout="ddp", num_gpus=4)]
    one, four = (add_allowance(simple_plan(each, moment(residual=1000))).allowance for each in requests)
    assert (one.context, one.workspace, one.collectives) == (CUDA_CONTEXT_BYTES, CUBLAS_WORKSPACE_BYTES, 0)
    assert one.fragmentation == 50, "5 % of what moves"
    assert one.total == CUDA_CONTEXT_BYTES + CUBLAS_WORKSPACE_BYTES + 50
    assert four.total - one.total == four.collectives == 4 * 2**20 * 2 * 32
    for allowance in (one, four):
        parts = allowance.to_json()
        assert parts.pop("total_bytes") == sum(parts.values()) == allowance.total


@pytest.mark.parametrize(("offload", "moving"), [(False, 4 * GIB), (True, 16 * GIB)])
def test_resident_weights_do_not_fragment_and_streamed_ones_do(offload: bool, moving: int) -> None:
    requirement = add_allowance(
        simple_plan(
            paper_request(layout="fsdp2" if offload else "single", offload_parameters=offload),
            moment(parameters=12 * GIB, gradients=GIB, state=GIB, residual=2 * GIB),
        )
    )
    assert requirement.allowance.fragmentation == round(0.05 * moving)
    assert requirement.device_bytes == 16 * GIB + requirement.allowance.total


def test_a_requirement_fits_to_the_byte_and_says_what_lacks() -> None:
    requirement = add_allowance(simple_plan(paper_request(), moment(parameters=GIB), host_bytes=100))
    exactly = Limits(device_bytes=requirement.device_bytes)
    assert requirement.fits(exactly) and requirement.missing_device_bytes(exactly) == 0
    less = Limits(device_bytes=requirement.device_bytes - 1)
    assert not requirement.fits(less) and requirement.missing_device_bytes(less) == 1
    for host_bytes, missing in ((99, 1), (100, 0)):
        limits = Limits(device_bytes=requirement.device_bytes, host_bytes=host_bytes)
        assert requirement.missing_host_bytes(limits) == missing
        assert requirement.fits(limits) == (missing == 0)


def test_a_run_on_the_cpu_has_no_context_of_a_gpu() -> None:
    allowance = add_allowance(simple_plan(paper_request(kernels="cpu"), moment(residual=1000))).allowance
    assert allowance.total == allowance.fragmentation == 50
