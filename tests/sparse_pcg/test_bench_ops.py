"""``bench ops``, small and on the CPU: what it covers and what it says; the times are measured on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from custom_ops._register import OPS, Provider
from sparse_pcg.bench import floors, op_cases, ops, timing
from sparse_pcg.bench.plots import plot

NOT_BENCHED = {"fill_batch_metadata", "indexer_prefill", "k_cache_and_topk_result", "mla_attention"}


def test_every_operator_is_benched() -> None:
    assert set(op_cases.NAMES) | NOT_BENCHED == {name for name in OPS if not name.startswith("toy")}


def test_a_result(tmp_path: Path) -> None:
    partial = tmp_path / "ops.json"
    wanted = ("hadamard", "indexer_topk", "sparse_mla")
    result = ops.run_ops(rows=(3,), ops=wanted, kv_len=130, repeats=1, partial=partial)
    assert partial.stat().st_size > 0 and result["bench"] == "ops" and result["commit"]
    cases = result["cases"]
    assert {c["op"] for c in cases} == set(wanted) and all(c["rows"] == 3 for c in cases)
    for case in cases:
        assert case["default"] == "reference" and case["us"]["reference"] > 0 and case["bytes"] > 0
        assert case["holds"]["default"] and ("bandwidth" in case["holds"]) == (case["flops"] == 0)
    hadamard = cases[0]
    assert hadamard["bytes"] == 2 * 2 * 3 * 32 * 128
    assert "flash_mla" in next(c for c in cases if c["op"] == "sparse_mla")["absent"]
    plot(result, tmp_path / "ops.png")
    assert (tmp_path / "ops.png").stat().st_size > 1000


def test_who_is_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first preferred provider that serves the case and is not passed over; those left out are named."""
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: True)
    table = {
        "reference": OPS["hadamard"].providers["reference"],
        "triton": Provider(lambda *a: None),
        "vendor": Provider(lambda *a: None, slower=lambda *a: "small"),
        "broken": Provider(lambda *a: None, missing=lambda: "no such GPU"),
    }
    monkeypatch.setattr(OPS["hadamard"], "providers", table)
    monkeypatch.setattr(OPS["hadamard"], "preference", ("broken", "vendor", "triton"))
    case = op_cases.Case("hadamard", "", (None, 1.0), 4)
    assert ops._candidates(case, False, ()) == ("triton", ["vendor", "triton"], {"broken": "no such GPU"})
    absent = {"broken": "left out", "vendor": "left out"}
    assert ops._candidates(case, True, ()) == ("triton", ["triton"], absent)
    assert ops._candidates(case, False, ("hadamard:triton",))[0] == "reference"


@pytest.mark.parametrize("loads", [0, 1, 3])
def test_a_floor_waits_for_each_load(loads: int) -> None:
    run, out = floors.floor_run(1, loads)
    out.fill_(-1)
    run()
    assert out.item() == loads * floors.STRIDE


def test_a_floor_of_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    kernel = {(1,): lambda *args, LOADS, num_warps: launched.append(LOADS)}
    monkeypatch.setattr(floors, "_chase_kernel", kernel)
    floors.floor_run(3, 2)[0]()
    assert launched == [2, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "word"), [({"ops": ("nonsense",)}, "nonsense"), ({"rows": (0,)}, "rows"), ({"repeats": 0}, "repeats")]
)
def test_bad_arguments(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        ops.run_ops(**arguments)
