"""What holds for every operator: a function of its name, a schema that matches it, a row in the document."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import custom_ops
from custom_ops import doc
from custom_ops._register import OPS

NAMES = sorted(OPS)
OTHERS = {"BatchMetadata", "ForwardContext", "current_context", "debug_checks", "providers_of",
          "use_context", "use_provider"}  # fmt: skip


def test_every_operator_is_exported() -> None:
    assert sorted(custom_ops.__all__) == sorted([*NAMES, *OTHERS])
    assert all(inspect.isfunction(getattr(custom_ops, name)) for name in NAMES)
    assert all(callable(getattr(custom_ops, name)) for name in OTHERS)


@pytest.mark.parametrize("name", NAMES)
def test_functions_take_what_the_schema_says(name: str) -> None:
    schema = OPS[name].overload._schema
    none = inspect.Parameter.empty
    want = [(a.name, a.default_value if a.has_default_value() else none) for a in schema.arguments]
    for function in (getattr(custom_ops, name), OPS[name].reference, OPS[name].fake, OPS[name].check):
        given = inspect.signature(function).parameters.values()
        if all(p.kind == p.POSITIONAL_OR_KEYWORD for p in given):
            # A check that serves two operators takes the name of the one as a last argument of its own.
            assert [(p.name, p.default) for p in given][: len(want)] == want, function


@pytest.mark.parametrize("name", NAMES)
def test_docstrings_name_every_argument(name: str) -> None:
    function = getattr(custom_ops, name)
    text = inspect.getdoc(function) or ""
    refers = [other for other in NAMES if f"``{other}``" in text or f"``{other}(" in text]
    text += "".join(inspect.getdoc(getattr(custom_ops, other)) or "" for other in refers)
    missing = [p for p in inspect.signature(function).parameters if p not in text]
    assert not missing, f"{name}: {missing} are not described"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_returned_that_was_given(name: str) -> None:
    schema = OPS[name].overload._schema
    assert all(r.alias_info is None for r in schema.returns)
    if any(a.alias_info is not None for a in schema.arguments):
        assert not schema.returns


def test_functions_trace_to_their_operators() -> None:
    seen: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def step(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        y = custom_ops.hadamard(x, 0.5)
        custom_ops.index_k_store(y, cache, slots)
        return y

    x, cache = torch.ones(3, 128), torch.zeros(2, 8448, dtype=torch.uint8)
    torch.compile(step, backend=backend, fullgraph=True)(x, cache, torch.tensor([1, 2, 70]))
    assert [str(t) for t in seen] == ["sparse_pcg.hadamard", "sparse_pcg.index_k_store"]
    assert int(cache.count_nonzero()) > 0


def test_every_operator_has_a_kernel() -> None:
    without = [n for n in NAMES if "triton" not in OPS[n].providers and not OPS[n].cut]
    assert not without


def test_cut_tag() -> None:
    tagged = [n for n in NAMES if torch.Tag.cudagraph_unsafe in OPS[n].overload.tags]
    assert tagged == [n for n in NAMES if OPS[n].cut]


def test_the_document_is_up_to_date() -> None:
    assert doc.DEFAULT_PATH.read_text() == doc.render(), "run python -m custom_ops.doc"


def test_the_example_of_the_document_runs(tmp_path: Path) -> None:
    example, *more = re.findall(r"```python\n(.*?)```", doc.DEFAULT_PATH.read_text(), re.DOTALL)
    assert not more
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(f"custom_ops.{name}" in example for name in OTHERS - {"current_context"})


@pytest.mark.parametrize("name", NAMES)
def test_the_document_lists_providers_in_the_order_they_are_tried(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = OPS[name]
    listed = doc.providers(op).split(", ")
    assert sorted(p.removesuffix(" (forced only)") for p in listed) == sorted(op.providers)
    refusing: set[str] = set()
    monkeypatch.setattr("custom_ops._register._on_cuda", lambda args: True)
    monkeypatch.delenv(op._env, raising=False)
    monkeypatch.setattr(op, "refusal", lambda provider: "refused" if provider in refusing else None)
    alike = {name: replace(provider, slower=lambda: None) for name, provider in op.providers.items()}
    monkeypatch.setattr(op, "providers", alike)  # the order is that of preference, whatever suits a shape
    for provider in listed:  # each is what is chosen once those before it refuse
        if provider.endswith(" (forced only)"):
            assert "reference" in refusing
        else:
            assert op.choose() == provider
            refusing.add(provider)


def test_the_document_has_a_row_for_every_operator() -> None:
    rows = [line for line in doc.render().splitlines() if line.startswith("| [`")]
    assert [row.split("`")[1] for row in rows] == NAMES
    assert all(row.count(" | ") == 4 for row in rows)
