from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import custom_ops
from tests.custom_ops import strategies as s

PROVIDERS = ("reference", "triton")


def codes(q: torch.Tensor) -> list[list[int]]:
    return q.view(torch.uint8).tolist()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_by_hand(provider: str) -> None:
    x = torch.tensor([[448.0, 1.0, -2.0, 0.0], [300.0, 1.0, -300.0, 0.75]], device=s.DEVICE)
    q, scale = s.call("quant_fp8", provider, {"x": x, "block_size": 2, "round_scale": True})
    # amax 448, 2, 300, 300 over 448: 1, 1/224 -> 1/128, 0.67 -> 1, 0.67 -> 1
    assert scale.tolist() == [[1, 1 / 128], [1, 1]]
    # 448 = 1.75 * 2^8 is 0 1111 110; 1 is 0 0111 000; -256 is 1 1111 000; 300 rounds to 288 = 1.125 * 2^8
    assert codes(q) == [[0x7E, 0x38, 0xF8, 0x00], [0x79, 0x38, 0xF9, 0x34]]
    q, scale = s.call("quant_fp8", provider, {"x": x[:1], "block_size": 4, "round_scale": False})
    assert scale.tolist() == [[1]] and codes(q) == [[0x7E, 0x38, 0xC0, 0x00]]
    q, scale = s.call("quant_fp8", provider, {"x": x[:1, 1:3], "block_size": 2, "round_scale": False})
    assert scale.item() == torch.tensor(2.0).div(448).item() and codes(q) == [[0x76, 0xFE]]  # 224, -448


@pytest.mark.parametrize("provider", PROVIDERS)
def test_small_blocks_use_the_floor(provider: str) -> None:
    x = torch.tensor([[0.0, 0.0], [5e-5, -1e-6]], device=s.DEVICE)
    q, scale = s.call("quant_fp8", provider, {"x": x, "block_size": 2, "round_scale": False})
    floor = torch.tensor(1e-4).div(448).item()
    assert scale.tolist() == [[floor], [floor]]
    assert codes(q) == [[0, 0], [0x76, 0xC9]]  # 224; -4.48 rounds to -4.5 = -1.125 * 2^2


@pytest.mark.parametrize("provider", PROVIDERS)
def test_powers_of_two_are_not_rounded_up(provider: str) -> None:
    exponents = torch.arange(-13, 120, device=s.DEVICE)
    x = (448 * 2.0**exponents.float())[:, None].expand(-1, 2)
    _, scale = s.call("quant_fp8", provider, {"x": x, "block_size": 2, "round_scale": True})
    assert torch.equal(scale[:, 0], 2.0 ** exponents.float())
    above = torch.nextafter(x.contiguous(), torch.full_like(x, torch.inf))
    _, scale = s.call("quant_fp8", provider, {"x": above, "block_size": 2, "round_scale": True})
    assert torch.equal(scale[:, 0], 2.0 ** (exponents.float() + 1))


@given(
    rows=s.tokens,
    blocks=st.integers(1, 3),
    block_size=st.sampled_from((1, 24, 64, 128)),
    round_scale=st.booleans(),
    dtype=s.floats,
    layout=s.layouts,
    std=st.sampled_from((1e-5, 1.0, 300.0)),
    seed=s.seeds,
)
def test_triton_equals_reference(
    rows: int,
    blocks: int,
    block_size: int,
    round_scale: bool,
    dtype: torch.dtype,
    layout: str,
    std: float,
    seed: int,
) -> None:
    x = s.randn((rows, 2, blocks * block_size), dtype, seed, layout, std)
    args = {"x": x, "block_size": block_size, "round_scale": round_scale}
    want, got = s.call("quant_fp8", "reference", args), s.call("quant_fp8", "triton", args)
    s.assert_same_meta(got[0], want[0])
    s.assert_e4m3(got[0], want[0])
    s.assert_bitwise(got[1], want[1])
    for result in (want, got):
        s.assert_fake_is_exact("quant_fp8", tuple(args.values()), result)
    # Rounding to 3 mantissa bits is off by at most 1/16 of a normal value, half a subnormal step below.
    q, scale = want
    back = q.float().unflatten(-1, (blocks, block_size)) * scale[..., None]
    error = (back - x.float().contiguous().unflatten(-1, (blocks, block_size))).abs()
    assert (error <= torch.maximum(back.abs() / 15, scale[..., None] * 2.0**-10) + 1e-12).all()


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("round_scale", [False, True])
def test_nan_stays_in_its_block_and_is_not_lost(provider: str, round_scale: bool) -> None:
    args = {"x": s.randn((5, 256)), "block_size": 128, "round_scale": round_scale}
    clean_q, clean_scale = s.call("quant_fp8", provider, args)
    args["x"][2, 130] = torch.nan
    q, scale = s.call("quant_fp8", provider, args)
    assert q[2, 128:].float().isnan().all() and scale[2, 1].isnan()
    q[2, 128:], scale[2, 1] = clean_q[2, 128:], clean_scale[2, 1]
    s.assert_bitwise(q, clean_q)
    s.assert_bitwise(scale, clean_scale)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_quotients_half_way_are_half_way(provider: str) -> None:
    # The largest is 7 b and the scale b / 64, so m b / 64 is m of them: half way between two values of e4m3, where
    # the product with a rounded 64 / b may be on either side.
    b = torch.arange(1.0, 2048.0, device=s.DEVICE)[:, None]
    m = torch.tensor([448.0, 17.0, -19.0, 21.0, 27.0, -0.0, 0.0, 1.0625], device=s.DEVICE)
    args = {"x": b * m / 64, "block_size": 8, "round_scale": False}
    q, scale = s.call("quant_fp8", provider, args)
    assert torch.equal(scale, b / 64)
    assert codes(q) == [[0x7E, 0x58, 0xDA, 0x5A, 0x5E, 0x80, 0x00, 0x38]] * len(b)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("round_scale", [False, True])
def test_beside_an_infinity_all_is_zero(provider: str, round_scale: bool) -> None:
    x = torch.tensor([[torch.inf, 1.0, -1e30, -0.0], [2.0, -1.0, 1e-30, 0.0]], device=s.DEVICE)
    q, scale = s.call("quant_fp8", provider, {"x": x, "block_size": 4, "round_scale": round_scale})
    assert scale[0].item() == torch.inf and scale[1].isfinite()
    assert q[0, 0].float().isnan() and codes(q)[0][1:] == [0x00, 0x80, 0x80]
    assert codes(q)[1][2:] == [0, 0]


def test_wrong_arguments() -> None:
    args = {"x": s.randn((3, 256)), "block_size": 128, "round_scale": False}
    s.assert_refused("quant_fp8", args | {"x": args["x"].double()}, "x", "got torch.float64")
    narrow = args["x"][:, :200]
    s.assert_refused("quant_fp8", args | {"x": narrow}, "x", "multiple of block_size 128 wide, got 200")
    s.assert_refused("quant_fp8", args | {"x": args["x"][:, :0]}, "x", "got 0")
    s.assert_refused("quant_fp8", args | {"block_size": 0}, "block_size", "positive, got 0")


def test_defaults() -> None:
    x = s.randn((3, 256))
    for got, want in zip(custom_ops.quant_fp8(x), custom_ops.quant_fp8(x, 128, False), strict=True):
        s.assert_bitwise(got, want)
    for got, want in zip(torch.ops.sparse_pcg.quant_fp8(x), custom_ops.quant_fp8(x, 128, False), strict=True):
        s.assert_bitwise(got, want)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_opcheck(rows: int) -> None:
    torch.library.opcheck(torch.ops.sparse_pcg.quant_fp8.default, (s.randn((rows, 256)), 128, True))


@pytest.mark.gpu
def test_bench() -> None:
    x = s.randn((512 * 64, 128), torch.bfloat16)
    s.bench("quant_fp8 32768 x 128 bf16", lambda: custom_ops.quant_fp8(x), 3 * x.numel() + 4 * 32768)
