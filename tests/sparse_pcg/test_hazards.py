"""``check`` finds every planted fault at its line, and nothing in models that can be captured."""

from __future__ import annotations

import enum
import json
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sparse_pcg
from sparse_pcg import Finding, Options, PrefillRunner, check
from sparse_pcg.drafting import DraftRunner
from sparse_pcg.hazards import KINDS
from sparse_pcg.kv import PagedKV
from sparse_pcg.models import DSAModel, preset
from sparse_pcg.models.nextn import NextN
from tests.sparse_pcg import faulty, toys

SOURCE = Path(faulty.__file__)


def planted(path: Path) -> set[tuple[str, int]]:
    """(kind, line) of the marks in a file."""
    lines = enumerate(path.read_text().splitlines(), 1)
    return {(kind, number) for number, text in lines for kind in re.findall(r"# fault: (\w+)", text)}


def found(findings: list[Finding]) -> set[tuple[str, int]]:
    return {(f.kind, f.line) for f in findings}


@pytest.fixture(scope="module")
def findings() -> list[Finding]:
    torch.manual_seed(0)
    return check(faulty.Faulty(), torch.randn(12, 8), torch.arange(12), 5)


def test_every_planted_fault_is_found_at_its_line(findings: list[Finding]) -> None:
    assert found(findings) == planted(SOURCE)
    assert len({kind for kind, _ in planted(SOURCE)}) >= 12
    assert {f.file for f in findings} == {str(SOURCE)}


def test_a_finding_says_what_happens_and_what_to_do(findings: list[Finding]) -> None:
    for finding in findings:
        assert KINDS[finding.kind].harm in finding.message and finding.fix == KINDS[finding.kind].fix
    by_kind = {f.kind: f.message for f in findings}
    assert "self.calls" in by_kind["python_state"] and "self.state" in by_kind["rebound_tensor"]
    assert "faulty::widen" in by_kind["op_fake"] and "float64" in by_kind["op_fake"]


def test_the_model_and_its_arguments_are_left_alone() -> None:
    model, x, ids = faulty.Faulty(), torch.randn(12, 8), torch.arange(12)
    before, held, given = toys.state(model), model.state, x.clone()
    check(model, x, ids, 5)
    assert toys.same(toys.state(model), before) and model.state is held and model.calls == 0 and toys.same(x, given)


def _runner(**changes: Any) -> PrefillRunner:
    config = preset("tiny")
    kv = PagedKV(config.num_layers, num_pages=8, dtype=torch.float32)
    return PrefillRunner(DSAModel(config, dtype=torch.float32), kv, Options(capture_sizes=(16, 32), **changes))


def test_the_reference_model_is_clean() -> None:
    runner = _runner(compiler="eager")
    with sparse_pcg.stats().expect(captures=0):
        assert check(runner) == []
    assert runner.captured == []


def test_the_reference_draft_is_clean() -> None:
    config = preset("tiny")
    target, options = DSAModel(config, dtype=torch.float32), Options(capture_sizes=(16, 32), compiler="eager")
    kv = PagedKV(config.num_layers + 1, num_pages=8, dtype=torch.float32)
    runner = DraftRunner(NextN(target), kv, PrefillRunner(target, kv, options), options)
    assert check(runner) == []


def test_a_row_mixing_line_in_the_reference_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before = DSAModel.head
    runner = _runner(compiler="eager")
    norm = runner.model.layers[1].forward

    def mixed(x: torch.Tensor, *args: Any) -> Any:
        hidden, topk = norm(x, *args)
        return hidden - hidden.amax(0), topk

    monkeypatch.setattr(runner.model.layers[1], "forward", mixed)
    kinds = {f.kind for f in check(runner)}
    assert kinds == {"row_mixing"} and DSAModel.head is before


# Models that can be captured as they are.


class Mode(enum.Enum):
    EXTEND = 1


@dataclass(frozen=True)
class Config:
    width: int = 8


CONFIG, LOCK = Config(), threading.Lock()


class Clean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.5)
        self.register_buffer("pool", torch.zeros(64, 8))
        self.bytes = torch.zeros(64, dtype=torch.uint8)
        self.device, self.lock, self.mode, self.table = torch.device("cpu"), LOCK, Mode.EXTEND, None
        self.eval()

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm(self.lin(x)))
        rows = torch.arange(x.shape[0], device=x.device)
        y = y + rows.to(y.dtype)[:, None] + torch.zeros(8, device=self.device)
        self.pool[slots] = y  # rows of their own
        y = y + self.pool[slots]
        y = torch.where(y > 0, y, y * 0.1).masked_fill(y > 1e6, 0.0)
        y[y < -1e6] = 0.0  # a number: no size depends on the data
        if self.table is None:  # made once, on demand
            self.table = torch.ones(8, device=x.device)
        y = y * self.table * CONFIG.width + (1 if self.mode is Mode.EXTEND else 2)
        weights, ids = y.softmax(-1).topk(2, dim=-1)
        order = ids.flatten().argsort(stable=True)  # sorted by expert, and put back
        sorted_rows = y[order // 2]
        back = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=x.device))
        y = (sorted_rows[back].view(-1, 2, 8) * weights.unsqueeze(-1)).sum(1)
        self.bytes[8:40].view(torch.float32).copy_(self.table)
        y = y.cumsum(0)  # a row sees only rows before it, and pads come last
        with torch.no_grad():
            y = self.drop(y).to(x.device)
        out = torch.empty_like(y)
        torch.ops.faulty.reverse(y, out)  # a cut: what mixes in it is its own affair
        return y.to(torch.float64).float() + out


def test_clean_idioms_raise_no_alarm() -> None:
    x, slots = toys.inputs(12)
    assert [str(f) for f in check(Clean(), x, slots)] == []


def test_the_same_cut_untagged_is_named() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            torch.ops.toy.mix_untagged(x.flip(0) * 1, out) if False else torch.ops.toy.mix_untagged(x, out)
            return out.flip(0).flip(0)

    x = torch.randn(8, 8)
    assert check(Model(), x, cut_ops=["toy::mix_untagged"]) == []


@given(
    st.sampled_from(["mean", "amax", "softmax", "sort", "flip", "roll", "last", "batch_norm", "matmul"]),
    st.booleans(),
    st.integers(5, 20),
)
def test_rows_that_mix(name: str, undone: bool, rows: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        mixed = {
            "mean": lambda: y - y.mean(0),
            "amax": lambda: y / y.abs().amax(),
            "softmax": lambda: y.softmax(0),
            "sort": lambda: y.sort(0).values,
            "flip": lambda: y.flip(0),
            "roll": lambda: y.roll(-2, 0),
            "last": lambda: y + y[-1],
            "batch_norm": lambda: F.batch_norm(y, None, None, training=True),
            "matmul": lambda: (y @ y.t()) @ y,
        }[name]()
        return torch.where(torch.ones_like(y, dtype=torch.bool), y, mixed) if undone else mixed

    kinds = {f.kind for f in check(function, torch.randn(rows, 4)) if f.kind == "row_mixing"}
    assert kinds == (set() if undone else {"row_mixing"})


def test_two_dtypes_over_one_memory() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.raw = torch.zeros(64, dtype=torch.uint8)
            self.wide = self.raw.view(torch.float32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.wide[:8].copy_(x[0])
            return x + self.raw[0]

    assert {f.kind for f in check(Model(), torch.randn(12, 8))} == {"mixed_dtype_alias"}


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (lambda x: F.scaled_dot_product_attention(*(x[None, None],) * 3, is_causal=True)[0, 0], set()),
        (lambda x: F.scaled_dot_product_attention(*(x[None, None],) * 3, None, 0.5, True)[0, 0], {"random"}),
        (lambda x: x + F.one_hot(x.argmax(-1), 8), set()),
        (lambda x: x + F.one_hot(x.argmax(-1)).sum(-1, keepdim=True), {"host_read"}),
        (lambda x: x - x.quantile(0.5, dim=1, keepdim=True), set()),
        (lambda x: x - x.quantile(0.5, dim=0), {"row_mixing"}),
        (lambda x: (repr(x), x * 2)[1], {"host_read"}),
    ],
)
def test_what_a_gpu_does_is_told_not_what_the_cpu_does_here(function: Any, kinds: set[str]) -> None:
    assert {f.kind for f in check(function, torch.randn(12, 8))} == kinds


def test_earlier_checks_hide_nothing() -> None:
    for value in (torch.arange(12), 5, 7, 0.5, 5):
        found = check(lambda x, n: x * n[:, None] if isinstance(n, torch.Tensor) else x * n, torch.randn(12, 8), value)
        assert [f.kind for f in found] == ([] if isinstance(value, torch.Tensor) else ["python_read"])


def _largest(x: torch.Tensor) -> Any:
    return x.max().item()  # as (here:1 in a comment) or for x in y


def test_a_read_in_a_function_that_the_model_calls_is_told_once_at_its_line() -> None:
    found = check(lambda x: x / _largest(x.abs()), torch.randn(12, 8))
    assert [(f.kind, f.line) for f in found] == [("host_read", _largest.__code__.co_firstlineno + 1)]


@pytest.mark.parametrize(
    ("module", "args", "said"),
    [
        (nn.Linear(4, 4), (torch.randn(2, 4),), "at least 4 rows"),
        (3, (), "module"),
        (nn.Linear(4, 4), (torch.randn(8, 4), {"dynamic_dims": {"y": 0}}), "dynamic_dims"),
    ],
)
def test_what_cannot_be_checked_is_refused(module: Any, args: tuple[Any, ...], said: str) -> None:
    settings = args[-1] if args and isinstance(args[-1], dict) else {}
    with pytest.raises(ValueError, match=said):
        check(module, *[a for a in args if not isinstance(a, dict)], **settings)


def test_earlier_graphs_stay_captured_and_work() -> None:
    torch._dynamo.reset()
    sparse_pcg.reset()
    model = toys.Toy(1)
    fn = sparse_pcg.compile(model, capture_sizes=[8], compiler="eager")
    x, slots = toys.inputs(8)
    fn(x, slots)
    want = fn(x, slots)
    check(model, x, slots)
    with sparse_pcg.stats().expect(replays=1, captures=0, graphs=0):
        assert toys.same(fn(x, slots), want)
    sparse_pcg.reset()


def test_findings_are_plain_data(findings: list[Finding]) -> None:
    json.dumps([f.__dict__ for f in findings])
