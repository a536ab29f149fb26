"""``doctor``: what it says of this machine, and what it complains about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from custom_ops._register import OPS
from sparse_pcg import doctor
from sparse_pcg.cli import app


def test_it_says_what_is_here(tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    done = CliRunner().invoke(app, ["doctor", "--json", str(out)])
    said = json.loads(out.read_text())
    assert done.exit_code == (0 if said["ok"] else 1)
    assert said["versions"]["torch"] == torch.__version__
    assert {c["op"] for c in said["providers"]} == set(OPS)
    assert all(c["chosen"] and c["reason"] for c in said["providers"])
    if not torch.cuda.is_available():
        topk = next(c for c in said["providers"] if c["op"] == "sparse_mla")
        assert topk["chosen"] == "reference" and "triton" in topk["reason"]
        assert any(name == "flash_mla" and not usable and why for name, usable, why in topk["tried"])


def test_a_forced_provider_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_PCG_TOPK_SLOTS", "triton")
    choice = next(c for c in doctor.diagnose().providers if c.op == "topk_slots")
    assert (choice.chosen, choice.reason) == ("triton", "forced by SPARSE_PCG_TOPK_SLOTS")


@pytest.mark.parametrize(
    ("version", "switch", "said"),
    [
        (None, "1", "not installed"),
        ("0.5.17", "1", "tc_piecewise"),
        ("0.4.9", "1", "an unknown release"),
        ("9.0.0", "1", "an unknown release"),
        ("0.5.17", "0", "left as it is (SPARSE_PCG_SGLANG is off)"),
    ],
)
def test_how_sglang_is_served(version: str | None, switch: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: version if name == "sglang" else before(name))
    monkeypatch.setenv("SPARSE_PCG_SGLANG", switch)
    assert said in doctor.diagnose().sglang


@pytest.mark.parametrize(
    ("variable", "serious"), [("CUDA_LAUNCH_BLOCKING", True), ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", False)]
)
def test_bad_settings(variable: str, serious: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    found = doctor.diagnose()
    assert [c.serious for c in found.complaints if variable in c.what] == [serious]
    assert found.ok is not serious or not serious
    assert CliRunner().invoke(app, ["doctor"]).exit_code == (0 if found.ok else 1)


def test_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"triton": "3.5.1", "flashinfer-python": "0.6.2"}
    monkeypatch.setattr(doctor, "_version", lambda name: old.get(name))
    monkeypatch.setattr(torch, "__version__", "2.10.0+cu130")
    whats = {c.what: c.serious for c in doctor.diagnose().complaints}
    assert whats["torch 2.10.0+cu130 is older than 2.11"] and whats["triton 3.5.1 is older than 3.6"]
    assert whats["flashinfer-python 0.6.2 is older than 0.6.14"] is False
