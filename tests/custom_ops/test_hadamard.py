from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import custom_ops
from custom_ops._register import use_provider
from custom_ops.hadamard import hadamard_reference
from tests.custom_ops import strategies as s


def matrix(n: int) -> torch.Tensor:
    """H_n from its definition."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    return torch.tensor(signs, device=s.DEVICE)


def test_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=s.DEVICE)
    want = torch.tensor([[5.0, -1.0, -2.0, 0.0]], device=s.DEVICE)  # half of (10, -2, -4, 0)
    s.assert_bitwise(custom_ops.hadamard(x, 0.5), want)
    with use_provider("hadamard", "triton"):
        s.assert_bitwise(custom_ops.hadamard(x, 0.5), want)


@pytest.mark.parametrize("n", [1, 2, 64, 128, 1024])
def test_reference_is_the_matrix_product(n: int) -> None:
    x = s.randn((3, n), torch.float32)
    torch.testing.assert_close(hadamard_reference(x, 1.0), x @ matrix(n), rtol=1e-5, atol=1e-4)


@given(rows=s.tokens, log_n=st.integers(0, 9), dtype=s.floats, layout=s.layouts, seed=s.seeds)
def test_triton_equals_reference(rows: int, log_n: int, dtype: torch.dtype, layout: str, seed: int) -> None:
    x = s.randn((rows, 3, 2**log_n), dtype, seed, layout)
    scale = 2 ** (-log_n / 2)
    want = hadamard_reference(x, scale)
    with use_provider("hadamard", "triton"):
        got = custom_ops.hadamard(x, scale)
    s.assert_bitwise(got, want)
    s.assert_fake_is_exact("hadamard", (x, scale), got)
    s.assert_fake_is_exact("hadamard", (x, scale), want)


@pytest.mark.parametrize("provider", ["reference", "triton"])
def test_nan_stays_in_its_row(provider: str) -> None:
    x = s.randn((5, 128), torch.bfloat16)
    clean = hadamard_reference(x, 1.0)
    x[2, 17] = torch.nan
    with use_provider("hadamard", provider):
        got = custom_ops.hadamard(x, 1.0)
    assert got[2].isnan().all()
    others = [0, 1, 3, 4]
    s.assert_bitwise(got[others], clean[others])


@pytest.mark.parametrize(("x", "said"), [
    (torch.zeros(2, 96), "power of two up to 4096 wide, got 96"),
    (torch.zeros(2, 8192), "power of two up to 4096 wide, got 8192"),
    (torch.zeros(2, 0), "power of two up to 4096 wide, got 0"),
    (torch.zeros(2, 64, dtype=torch.int32), "bfloat16, float16 or float32, got torch.int32"),
])  # fmt: skip
def test_wrong_arguments(x: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=f"hadamard: x must be .*{said}"):
        custom_ops.hadamard(x, 1.0)


@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (7, 2, 8)])
def test_opcheck(shape: tuple[int, ...]) -> None:
    torch.library.opcheck(torch.ops.sparse_pcg.hadamard.default, (s.randn(shape, torch.bfloat16), 0.5))


@pytest.mark.gpu
def test_bench() -> None:
    x = torch.randn(512 * 64, 128, device="cuda", dtype=torch.bfloat16)
    s.bench("hadamard 32768 x 128 bf16", lambda: custom_ops.hadamard(x, 128**-0.5), 2 * 2 * x.numel())
