from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import custom_ops
from custom_ops import head_gate
from tests.custom_ops import strategies as s

PROVIDERS = ("reference", "triton")


def arguments(rows: int = 5, hidden: int = 200, heads: int = 7, dtype: torch.dtype = torch.bfloat16,
              seed: int = 0, layout: str = "contiguous") -> dict:  # fmt: skip
    return {
        "x": s.randn((rows, hidden), dtype, seed, layout),
        "weight": s.randn((heads, hidden), dtype, seed + 1, layout),
        "n_heads_inv_sqrt": heads**-0.5,
        "softmax_scale": 128**-0.5,
        "q_scale": s.randn((rows, heads, 1), seed=seed + 2).abs(),
    }


def raw_arguments(rows: int = 5, heads: int = 7, dtype: torch.dtype = torch.bfloat16, seed: int = 0,
                  layout: str = "contiguous") -> dict:  # fmt: skip
    args = arguments(rows, 8, heads, dtype, seed)
    return {"weights_raw": s.randn((rows, heads), dtype, seed, layout)} | {k: args[k] for k in list(args)[2:]}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_by_hand(provider: str) -> None:
    tensor = lambda *values: torch.tensor(values, device=s.DEVICE)  # noqa: E731
    rest = {"n_heads_inv_sqrt": 0.5, "softmax_scale": 0.25, "q_scale": tensor([[2.0], [4.0]])}
    args = {"x": tensor([1.0, 2.0]), "weight": tensor([3.0, 4.0], [-1.0, 0.0])} | rest
    want = tensor([[2.75], [-0.5]])  # 11 and -1, times 1/2, times 2 and 4, times 1/4
    s.assert_bitwise(s.call("logits_head_gate", provider, args), want)
    s.assert_bitwise(s.call("scale_head_gate", provider, {"weights_raw": tensor([11.0, -1.0])} | rest), want)


@given(
    rows=s.tokens,
    hidden=st.sampled_from((1, 64, 200, 300)),
    heads=st.sampled_from((1, 4, 17, 64)),
    dtype=s.floats,
    layout=s.layouts,
    flat_scale=st.booleans(),
    seed=s.seeds,
)
def test_gate_agrees_with_float64(
    rows: int, hidden: int, heads: int, dtype: torch.dtype, layout: str, flat_scale: bool, seed: int
) -> None:
    args = arguments(rows, hidden, heads, dtype, seed, layout)
    want = args["x"].double() @ args["weight"].double().T * args["n_heads_inv_sqrt"] * args["softmax_scale"]
    want = want[..., None] * args["q_scale"]
    if flat_scale:
        args["q_scale"] = args["q_scale"][..., 0]
    for provider in PROVIDERS:
        got = s.call("logits_head_gate", provider, args)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        s.assert_fake_is_exact("logits_head_gate", tuple(args.values()), got)


@given(rows=s.tokens, heads=st.sampled_from((1, 4, 17, 64)), dtype=s.floats, layout=s.layouts, seed=s.seeds)
def test_scaled_triton_equals_reference(rows: int, heads: int, dtype: torch.dtype, layout: str, seed: int) -> None:
    args = raw_arguments(rows, heads, dtype, seed, layout)
    want, got = (s.call("scale_head_gate", provider, args) for provider in PROVIDERS)
    s.assert_bitwise(got, want)
    for result in (want, got):
        s.assert_fake_is_exact("scale_head_gate", tuple(args.values()), result)


def test_a_row_does_not_depend_on_the_others() -> None:
    args = arguments(33)
    whole = s.call("logits_head_gate", "triton", args)
    for rows in (1, 2, 16, 17):
        part = args | {"x": args["x"][:rows], "q_scale": args["q_scale"][:rows]}
        s.assert_bitwise(s.call("logits_head_gate", "triton", part), whole[:rows])
    args["x"][20] = torch.nan
    got = s.call("logits_head_gate", "triton", args)
    assert got[20].isnan().all()
    got[20] = whole[20]
    s.assert_bitwise(got, whole)


@pytest.mark.parametrize("rows", [1, 33])
def test_whoever_sums_the_slices_the_bits_are_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(rows, hidden=2 * head_gate.SLICE + 100)
    results = []
    for few in (0, 10**6):
        monkeypatch.setattr(head_gate, "_FEW", few)
        results.append(s.call("logits_head_gate", "triton", args))
    s.assert_bitwise(results[1], results[0])
    want = s.call("logits_head_gate", "reference", args)
    torch.testing.assert_close(results[0], want, rtol=1e-3, atol=1e-3)


def test_wrong_arguments() -> None:
    args = arguments()
    refused = lambda change, *said: s.assert_refused("logits_head_gate", args | change, *said)  # noqa: E731
    refused({"x": args["x"].double()}, "x", "got torch.float64")
    refused({"x": args["x"][0]}, "x", "got [200]")
    refused({"weight": args["weight"].float()}, "weight", "got torch.float32")
    refused({"weight": args["weight"][:, :100]}, "weight", "[*, 200], got [7, 100]")
    refused({"q_scale": args["q_scale"][:4]}, "q_scale", "[5, 7, 1], got [4, 7, 1]")
    refused({"q_scale": args["q_scale"][..., 0, 0]}, "q_scale", "got [5]")
    refused({"q_scale": args["q_scale"].half()}, "q_scale", "got torch.float16")
    refused({"q_scale": args["q_scale"].repeat(2, 1, 1)[::2]}, "q_scale", "contiguous")
    s.assert_refused_on_another_device("logits_head_gate", args, "weight", "q_scale")
    raw = raw_arguments()
    s.assert_refused_on_another_device("scale_head_gate", raw, "q_scale")
    refused = lambda change, *said: s.assert_refused("scale_head_gate", raw | change, *said)  # noqa: E731
    refused({"weights_raw": raw["weights_raw"][0]}, "weights_raw", "got [7]")
    refused({"q_scale": raw["q_scale"][:, :6]}, "q_scale", "got [5, 6, 1]")


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_opcheck(rows: int) -> None:
    torch.library.opcheck(torch.ops.sparse_pcg.logits_head_gate.default, tuple(arguments(rows).values()))
    torch.library.opcheck(torch.ops.sparse_pcg.scale_head_gate.default, tuple(raw_arguments(rows).values()))


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "heads"), [(7168, 64), (6144, 32)])
def test_bench(hidden: int, heads: int) -> None:
    args = arguments(512, hidden, heads)
    traffic = 2 * hidden * (512 + heads)
    label = f"logits_head_gate 512 x {hidden}, {heads} heads"
    s.bench(label, lambda: custom_ops.logits_head_gate(**args), traffic)
    raw = raw_arguments(512, heads)
    label = f"scale_head_gate 512, {heads} heads"
    s.bench(label, lambda: custom_ops.scale_head_gate(**raw), 10 * 512 * heads)
