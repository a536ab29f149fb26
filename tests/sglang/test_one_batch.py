"""The bench that runs SGLang's one_batch in four processes: turns, medians, comparison, and a process that fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from sparse_pcg.bench import one_batch
from sparse_pcg.bench.cli import app
from sparse_pcg.bench.one_batch_model import config, write_model
from sparse_pcg.bench.one_batch_weights import draw_weights
from sparse_pcg.bench.one_batch_worker import Worker
from sparse_pcg.models.hf_config import config_from_hf

_FAKE = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


@pytest.fixture(autouse=True)
def _model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(one_batch, "_COMMAND", _FAKE)


def test_turns_medians_and_ratios(tmp_path: Path) -> None:
    out, picture = tmp_path / "one.json", tmp_path / "one.png"
    line = f"one-batch --heads 8 --layers 2 --repeats 3 --json {out} --plot {picture}"
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    assert set(result["workers"]) == set(one_batch.WORKERS) and result["sizes"] == list(one_batch.SIZES)
    for name, row in result["workers"].items():
        on = name.endswith("_on")
        assert row["log"] == ([f"sparse_pcg: {name[:-3]} 7 cuts"] if on else [])
        assert 64 <= row["ms"]["128"] - (0 if on else 64) <= 66  # without the first turn
        assert max(row["range_ms"]["128"]) - (0 if on else 64) <= 66
    assert result["ratios"]["2048"]["best_on/tc_piecewise_off"] == pytest.approx(0.5, abs=0.01)
    assert result["prompts"][0]["tc_piecewise_on"]["relative_l2_to_off"] == pytest.approx(0.01, abs=1e-4)
    assert "logits" not in result["prompts"][0]["breakable_on"]
    assert result["prompts"][0]["breakable_off"]["again_relative_l2"] == 0.5
    refused = next(p for p in result["prompts"] if p["prefix"] == 30)
    assert "of this prompt" in refused["breakable_on"]["error"] and refused["tc_piecewise_on"]["finite"]
    blind = next(p for p in result["prompts"] if p["prefix"] == 1900)
    assert "nothing is shown" in blind["tc_piecewise_on"]["error"] and "error" not in blind["breakable_on"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_prompt_says_how_far_its_runs_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = SimpleNamespace(uncaptured=False)
    graphs = {128: {"cut": SimpleNamespace(plan=SimpleNamespace(cuts=7))}}
    worker = Worker.__new__(Worker)
    slots = torch.tensor([[8, -1, 3, 5], [2, 9, 0, 1]], dtype=torch.int32)  # in the order that the kernel found them
    kernels = SimpleNamespace(fast_topk_transform_fused=lambda: slots)
    monkeypatch.setitem(sys.modules, "sgl_kernel", kernels)
    worker.backend = SimpleNamespace(serving=serving, variants=SimpleNamespace(chosen="cut", graphs=graphs))
    runs = 0

    def extend(new: list[int], prefix: int, seed: int, context: int = 0) -> torch.Tensor:
        nonlocal runs
        runs += 1
        slots = kernels.fast_topk_transform_fused()
        shift = 1.0 if context else 0.5 if serving.uncaptured else 0.25 if runs == 2 else 0.0
        shift += 0.0 if slots.tolist() == [[3, 5, 8, -1], [0, 1, 2, 9]] else 0.75
        return torch.tensor([[4.0 + 4 * shift, 0.0]])

    monkeypatch.setattr(worker, "_extend", extend)
    answer = worker.prompt([100], 2000, 3)
    assert answer.pop("logits").tolist() == [[4.0, 0.0]]
    assert answer == {
        "finite": True, "again_bitwise": False, "again_relative_l2": 0.25, "context_moves": 1.0, "variant": "cut",
        "cuts": 7, "uncaptured_bitwise": False, "uncaptured_relative_l2": 0.5, "own_order_relative_l2": 0.75,
    }  # fmt: skip
    assert not serving.uncaptured and kernels.fast_topk_transform_fused() is slots


def test_what_there_is_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[set[str]] = []
    one_batch.run_one_batch(layers=2, repeats=1, sizes=(4,), keep=lambda part: kept.append(set(part)))
    assert [sorted({"workers", "prompts", "ratios"} & names) for names in kept] == [
        ["workers"], ["prompts", "workers"], ["prompts", "ratios", "workers"],
    ]  # fmt: skip


def test_one_command_gives_both_parts_and_the_first_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_peers(**_: object) -> dict[str, object]:
        raise RuntimeError("of the toy")

    monkeypatch.setattr(one_batch, "PROMPTS", one_batch.PROMPTS[:1])
    monkeypatch.setattr("sparse_pcg.bench.peers.run_peers", run_peers)
    out = tmp_path / "peers.json"
    done = CliRunner().invoke(app, f"peers --one-batch 8,64 --json {out}".split())
    assert done.exit_code and "of the toy" in str(done.exception)
    heads = [part["heads"] for part in json.loads(out.read_text())["one_batch"]]
    monkeypatch.setattr("sparse_pcg.bench.peers.run_peers", lambda **_: {"bench": "peers", "peers": {}})
    done = CliRunner().invoke(app, f"peers --one-batch 8 --json {out}".split())
    assert heads == [8, 64] and {"peers", "one_batch"} <= set(json.loads(out.read_text()))


def test_a_process_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILS", "tc_piecewise_on")
    result = one_batch.run_one_batch(layers=2, repeats=1, sizes=(4,))
    failed = result["workers"]["tc_piecewise_on"]
    assert "no memory left" in failed["error"] and "ms" not in failed and failed["log"]
    assert "ms" in result["workers"]["breakable_off"] and result["ratios"] == {}


@pytest.mark.parametrize("bad", [{"repeats": 0}, {"heads": 0}, {"sizes": ()}, {"model": Path("/nowhere")}])
def test_bad_arguments(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        one_batch.run_one_batch(**bad)  # type: ignore[arg-type]


def test_the_invented_weights_let_the_context_reach_the_last_token(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {k: v for k, v in config(6, 4).items() if k not in ("architectures", "torch_dtype", "ep_size")}
    shape |= {"hidden_size": 256, "q_lora_rank": 128, "kv_lora_rank": 64, "vocab_size": 500, "n_routed_experts": 8}
    shape |= {"num_experts_per_tok": 2, "intermediate_size": 256, "index_n_heads": 4, "moe_intermediate_size": 128}
    of = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    models = [transformers.AutoModelForCausalLM.from_config(of).to(torch.bfloat16).eval() for _ in range(2)]
    for model in models:
        draw_weights(model)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(0, 500, (1, 100), generator=generator) for _ in range(2))
    b[0, -1] = a[0, -1]
    with torch.no_grad():
        want, again, other = (
            m(ids, use_cache=False).logits[0, -1].float()
            for m, ids in zip((*models, models[0]), (a, a, b), strict=True)
        )
    assert want.isfinite().all() and torch.equal(want, again)
    assert (other - want).norm() > one_batch.MOVES * want.norm()


def test_quantised_weights_are_not_invented() -> None:
    model = torch.nn.Linear(4, 4, bias=False).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="not quantised"):
        draw_weights(model)


def test_the_model_folder_is_one_that_transformers_reads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_model(tmp_path / "model", 20, 8)
    read = config_from_hf(folder)
    assert len(read.index_layers) == 7 and read.index_topk == 2048
    assert transformers.AutoTokenizer.from_pretrained(folder)("abc")["input_ids"] == [64, 65, 66]
