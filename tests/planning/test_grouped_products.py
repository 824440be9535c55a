import pytest
import torch
import torch.nn.functional as F

from slivertune.core.ledger import Ledger
from slivertune.planning.fake import without_data
from slivertune.planning.kernels import attention_seen_by

TOKENS, GROUPS, WIDTH, OUT = 24, 3, 16, 32


def product(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    ends = torch.tensor([8, 16, 24], dtype=torch.int32)
    return F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)


def factors(dtype: torch.dtype, *, frozen: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.ones(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    return rows, torch.nn.Parameter(torch.ones(GROUPS, OUT, WIDTH, dtype=dtype), requires_grad=not frozen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_have_the_form_that_torchs_own_have(dtype: torch.dtype) -> None:
    forms = []
    for has_data in (True, False):
        rows, matrices = factors(dtype, frozen=False)
        if has_data:
            result = product(rows, matrices)
            (result * 2).sum().backward()
        else:
            with without_data():
                rows, matrices = factors(dtype, frozen=False)
                result = product(rows, matrices)
                (result * 2).sum().backward()
        assert rows.grad is not None and matrices.grad is not None
        forms.append([(each.shape, each.stride(), each.dtype) for each in (result, rows.grad, matrices.grad)])
    assert forms[0] == forms[1]


@pytest.mark.parametrize("frozen", [True, False])
def test_rows_are_kept_for_experts_that_train_alone(frozen: bool) -> None:
    with without_data():
        rows, matrices = factors(torch.float32, frozen=frozen)
        model = torch.nn.Module()
        model.matrices = torch.nn.Parameter(matrices.detach(), requires_grad=not frozen)
        with Ledger(model) as ledger:
            result = product(rows * 2, model.matrices)
            residual = ledger.current().residual
    kept = (0 if frozen else TOKENS * WIDTH * 4) + result.nbytes
    # The rows' ends, and what holds them, are a few bytes more.
    assert kept <= residual < kept + 64


def test_operations_of_experts_are_told() -> None:
    seen: list[tuple[int, int]] = []
    with without_data(), attention_seen_by(lambda flops, num_bytes, _: seen.append((flops, num_bytes))):
        (product(*factors(torch.float32, frozen=False)) * 2).sum().backward()
    assert [flops for flops, _ in seen] == 3 * [2 * TOKENS * WIDTH * OUT]


def test_rows_that_torchs_kernels_refuse_have_no_plan() -> None:
    with without_data():
        rows, matrices = torch.empty(4, 6), torch.empty(2, 8, 6)
        with pytest.raises(ValueError, match=r"experts of width 6 in torch\.float32 .* multiple of 16 bytes"):
            F.grouped_mm(rows, matrices.transpose(1, 2), offs=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="16 bytes"):
        F.grouped_mm(torch.ones(4, 6), torch.ones(2, 8, 6).transpose(1, 2), offs=torch.tensor([2, 4]).int())
