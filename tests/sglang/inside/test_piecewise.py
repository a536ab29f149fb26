"""SGLang's compile path: what its backend factory and its piece class get from us, and compiles while serving."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparse_pcg
from sparse_pcg.errors import CaptureError

from . import fake_graphs
from .harness import BATCHES, FLAGS, PIECEWISE, Server, equal, expected, kernels, make_body, served

pytestmark = pytest.mark.skipif(PIECEWISE not in FLAGS, reason="this release has no tc_piecewise to choose")


def test_a_compile_while_serving_never_captures() -> None:
    body = make_body()
    wanted = expected(body, PIECEWISE, [*BATCHES[:3], *BATCHES[:4] * 3])
    ours = Server(body, PIECEWISE, True)
    equal(served(ours, BATCHES[:3]), wanted[:3])
    captured = len(fake_graphs.CAPTURES), sparse_pcg.stats().captures
    # What was recorded is out of reach, and Dynamo has to trace again with the batch that is served.
    ours.served.variants.graphs.clear()
    torch._dynamo.reset()
    before = sparse_pcg.stats().fallbacks.get("recompile", 0)
    equal(served(ours, BATCHES[:4] * 3), wanted[3:])  # as many visits of a token count as a capture needs, and more
    assert (len(fake_graphs.CAPTURES), sparse_pcg.stats().captures) == captured
    assert sparse_pcg.stats().fallbacks["recompile"] > before  # it is counted, and logged once


def test_what_a_live_call_returns_is_read_by_the_next_graph() -> None:
    body = make_body()
    body.embed = torch.nn.Sequential(body.embed, Routed())
    ours = Server(body, PIECEWISE, True)
    found = served(ours, BATCHES[:4])
    ours.served.serving.uncaptured = True  # SGLang's own pieces read such outputs where the capture had them
    for pool in (ours.runner.pool.latent, ours.runner.pool.index):
        pool.zero_()
    equal(found, served(ours, BATCHES[:4]))


def test_what_a_live_call_returns_lives_as_long_as_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang 0.5.14 and before keep only the memory of graphs, of which this is none."""
    from sparse_pcg.integrations.sglang.served_graph import ServedGraph

    made: list[Any] = []

    def backend(gm: torch.fx.GraphModule, examples: list[Any]) -> Any:
        config = kernels.srt("compilation.compilation_config").CompilationConfig([4], "eager")
        made.append(ServedGraph(gm, examples, config, lambda run: None, lambda: 0))
        return made[0]

    torch._dynamo.reset()
    x = torch.ones(4, 3)
    with torch.no_grad():
        torch.compile(lambda x: Routed()(x + 1.0) * 2.0, backend=backend, fullgraph=True)(x)
    monkeypatch.setattr(kernels.SEGMENTED, "_weak_ref_if_tensor", lambda value: None)
    capture = SimpleNamespace(
        _end_current_segment=lambda: None, _begin_new_segment=lambda: None, _barrier_fn=None,
        cuda_graph=SimpleNamespace(_break_fns=[]),
    )  # fmt: skip
    token = kernels.SEGMENTED._current_capture_var.set(capture)
    RETURNED.clear()
    try:
        made[0].run_breaking([x])
    finally:
        kernels.SEGMENTED._current_capture_var.reset(token)
    capture.cuda_graph._break_fns.clear()
    gc.collect()
    assert [ref() is not None for ref in RETURNED] == [True]


class Routed(torch.nn.Module):
    """Experts behind a split op of the server's own."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.sglang.routed_experts_of_a_test(hidden)
        return found


RETURNED: list[Any] = []


def _routed(x: torch.Tensor) -> torch.Tensor:
    found = torch.sin(x) * 2.0
    RETURNED.append(weakref.ref(found))
    return found


kernels.srt("utils.custom_op").register_custom_op(
    _routed, op_name="routed_experts_of_a_test", out_shape="x"
)
kernels.srt("compilation.compilation_config").register_split_op("routed_experts_of_a_test")(_routed)


def _piece(visits_at: tuple[int, ...] = (16,), index: int = 0, total: int = 2) -> Any:
    from sparse_pcg.integrations.sglang.piece_class import Piece

    saved: list[int] = []
    backend = SimpleNamespace(compiler_manager=SimpleNamespace(save_to_file=lambda: saved.append(1)))
    config = SimpleNamespace(get_capture_sizes=lambda: list(visits_at))
    piece = Piece(None, config, {}, (0, 7), index, total, [0], lambda n, x: (x * n,), backend)
    return piece, saved


def test_the_seven_phases_of_a_piece() -> None:
    phase = kernels.PHASE
    warmup = phase.enable_piecewise_cuda_graph_compile if kernels.ONE_RUNNER else phase.enable_torch_compile_warmup
    x = torch.ones(16)
    piece, saved = _piece(index=1)
    before = len(fake_graphs.CAPTURES)
    assert piece(16, x)[0][0] == 16  # first of all: the general graph
    assert saved == [1]  # the last piece saves the compiler's cache
    with warmup(), phase.set_pcg_capture_stream(object()):
        for _ in range(3):
            piece(16, x)
    with phase.set_pcg_capture_stream(object()):
        piece(7, x), piece(7, x), piece(7, x)  # not a token count to capture
        piece(16, x)  # warms up
        assert len(fake_graphs.CAPTURES) == before
        real = piece(16, x)
    assert len(fake_graphs.CAPTURES) == before + 1
    assert fake_graphs.CAPTURES[-1].pool == (0, 7)
    x.fill_(3.0)
    assert piece(16, x)[0] is real[0] and real[0][0] == 48  # replayed
    with pytest.raises(CaptureError, match="has moved"):
        piece(16, x.clone())


def test_without_a_stream_a_piece_runs_uncaptured() -> None:
    piece, _ = _piece()
    before = len(fake_graphs.CAPTURES)
    for fill in range(5):
        x = torch.full((16,), float(fill))
        assert torch.equal(piece(16, x)[0], x * 16)
    assert len(fake_graphs.CAPTURES) == before


def test_a_piece_without_a_symbolic_size_is_never_captured() -> None:
    piece, _ = _piece()
    piece._row_arguments = []
    phase = kernels.PHASE
    before = len(fake_graphs.CAPTURES)
    with phase.set_pcg_capture_stream(object()):
        for _ in range(4):
            piece(16, torch.ones(16))
    assert len(fake_graphs.CAPTURES) == before


def test_the_piece_class_in_sglangs_own_split(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_pcg.integrations.sglang.piece_class import Piece

    body = make_body()
    wanted = expected(body, PIECEWISE)
    made: list[Any] = []

    class Counted(Piece):
        def __init__(self, *args: Any) -> None:
            assert len(args) == 9
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(kernels.srt("compilation.backend"), "CUDAPiecewiseBackend", Counted)
    captured = len(fake_graphs.CAPTURES)
    ours = Server(body, PIECEWISE, False)
    assert made and len(fake_graphs.CAPTURES) > captured
    equal(served(ours), wanted)
