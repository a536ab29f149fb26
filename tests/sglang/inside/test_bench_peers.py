"""The bench beside SGLang's own backends, on emulated graphs: what is compared is the same model, and captured."""

from __future__ import annotations

import pytest

from sparse_pcg.bench import peers

from . import fake_graphs
from .harness import device_module, kernels

if kernels.ONE_RUNNER:
    pytest.skip("the bench compares with releases that have graph backends", allow_module_level=True)


def test_every_peer_is_captured_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_pool_and_stream", lambda: ((0, 7), device_module.current_stream()))
    chosen = ("sglang_eager", "sglang_breakable", "ours")
    captured = len(fake_graphs.CAPTURES)
    result = peers.run_peers(layers=3, hidden=8, tokens=4, repeats=2, peers=chosen, compiler="eager")
    assert set(result["peers"]) == set(chosen)
    assert len(fake_graphs.CAPTURES) - captured == 2 * 4  # of each of SGLang's: the parts around three cuts
    for row in result["peers"].values():
        assert row["differs_from_eager"] < 0.02 and row["build_s"] > 0 and row["host_us"] > 0


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="layers"):
        peers.run_peers(layers=0)
    with pytest.raises(ValueError, match="nobody"):
        peers.run_peers(peers=("nobody",))
