"""Single-line faults that the tests must notice: ``python -m tests.mutants [part of a file or test name]``.

Each is put into a copy of the tree, where the test named with it has to fail; without faults all pass.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ("custom_ops", "tests", "setup.cfg", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """file, and the test that must fail when ``old`` (found there exactly once) reads ``new``."""

    file: str
    old: str
    new: str
    test: str


def _ops(file: str, old: str, new: str, test: str) -> Mutant:
    return Mutant(f"custom_ops/{file}", old, new, f"tests/custom_ops/{test}")


MUTANTS = [
    # Hadamard
    _ops("hadamard.py", "tl.join(a + b, a - b)", "tl.join(a + b, b - a)", "test_hadamard.py::test_by_hand"),
    _ops("hadamard.py", "torch.stack((a + b, a - b), 2)", "torch.stack((a - b, a + b), 2)",
         "test_hadamard.py::test_reference_is_the_matrix_product"),
    # LayerNorm: eps outside the root, the variance of n - 1, a dropped bias
    _ops("layernorm.py", "tl.sqrt_rn(variance + eps)", "(tl.sqrt_rn(variance) + eps)",
         "test_layernorm.py::test_by_hand"),
    _ops("layernorm.py", "(centred * centred, 1) / columns", "(centred * centred, 1) / (columns - 1)",
         "test_layernorm.py::test_by_hand"),
    _ops("layernorm.py", "y + bias.float()", "y", "test_layernorm.py::test_by_hand"),
    # RoPE: the sign of the sine, the pair, the frequency
    _ops("rope.py", "x * cos - partner * sin", "x * cos + partner * sin", "test_rope.py::test_by_hand"),
    _ops("rope.py", "b * cos + a * sin", "b * cos - a * sin", "test_rope.py::test_by_hand"),
    _ops("rope.py", "dim ^ 1 if INTERLEAVED", "dim | 1 if INTERLEAVED", "test_rope.py::test_by_hand"),
    _ops("rope.py", "dim // 2 if INTERLEAVED", "dim % 2 if INTERLEAVED", "test_rope.py::test_by_hand"),
    # float8: the floor, the rounding of the scale, a lost NaN
    _ops("fp8_quant.py", "tl.maximum(amax, 1e-4)", "tl.maximum(amax, 1e-5)",
         "test_fp8_quant.py::test_small_blocks_use_the_floor"),
    _ops("fp8_quant.py", "((bits + 0x7FFFFF) &", "((bits + 0x7FFFFE) &",
         "test_fp8_quant.py::test_powers_of_two_are_not_rounded_up"),
    _ops("fp8_quant.py", "((bits + 0x7FFFFF) &", "((bits + 0x800000) &",
         "test_fp8_quant.py::test_powers_of_two_are_not_rounded_up"),
    _ops("fp8_quant.py", 'return tl.where(has_nan, float("nan"), scale)', "return scale",
         "test_fp8_quant.py::test_nan_stays_in_its_block_and_is_not_lost"),
    # Head gate: a dropped scale
    _ops("head_gate.py", "mask=mask, other=0.0) * softmax_scale", "mask=mask, other=0.0)",
         "test_head_gate.py::test_by_hand"),
    _ops("head_gate.py", "gate * q_scale.reshape(gate.shape) * softmax_scale", "gate * softmax_scale",
         "test_head_gate.py::test_by_hand"),
    # Index-K pages: a page or a token off by one, the scale dropped, `<` for `<=` between requests
    _ops("index_cache.py", "page, token = slot // 64, slot % 64", "page, token = (slot + 1) // 64, slot % 64",
         "test_index_cache.py::test_page_bytes_by_hand"),
    _ops("index_cache.py", "2048 + token, scale, mask", "2049 + token, scale, mask",
         "test_index_cache.py::test_page_bytes_by_hand"),
    _ops("index_cache.py", "token = slots // PAGE, slots % PAGE", "token = slots // 65, slots % PAGE",
         "test_index_cache.py::test_page_bytes_by_hand"),
    _ops("index_cache.py", "ends[None, :] <= row[:, None]", "ends[None, :] < row[:, None]",
         "test_index_cache.py::test_gather_by_hand"),
    _ops("index_cache.py", "row, right=True", "row, right=False", "test_index_cache.py::test_gather_by_hand"),
    _ops("_checks.py", "largest < high", "largest <= high",
         "test_index_cache.py::test_wrong_store_arguments"),
    # Fused K and Q: a missing rounding, a partner without its own weight
    _ops("index_prepare.py", "    y = y.to(dtype).to(tl.float32)\n    if HADAMARD:", "    if HADAMARD:",
         "test_index_prepare.py::test_q_triton_equals_the_single_operators"),
    _ops("index_prepare.py", "other = (other - mean) * rstd * tl.load(weight + partner)",
         "other = (other - mean) * rstd * tl.load(weight + dim)", "test_index_prepare.py::test_k_by_hand"),
    _ops("index_prepare.py", "layernorm_reference(k if hadamard else k.float()", "layernorm_reference(k",
         "test_index_prepare.py::test_k_agrees_with_the_single_operators"),
    # Latent KV rows: offsets within the packed row, the order of its parts, saturation
    _ops("mla_cache.py", "328 + 264 + dim", "328 + 263 + dim",
         "test_mla_cache.py::test_packed_bytes_by_hand"),
    _ops("mla_cache.py", "164 + 128 + block", "164 + 129 + block",
         "test_mla_cache.py::test_packed_bytes_by_hand"),
    _ops("mla_cache.py", "parts = (q, scale, k_rope", "parts = (scale, q, k_rope",
         "test_mla_cache.py::test_packed_bytes_by_hand"),
    _ops("mla_cache.py", ".float().clamp(-E4M3_MAX, E4M3_MAX)", ".float()",
         "test_mla_cache.py::test_plain_bytes_by_hand"),
]  # fmt: skip


def _run(tree: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "CI": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def survivors(mutants: list[Mutant]) -> list[str]:
    """Run the tests with and without each fault; a line for everything that is not as it should be."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        clean = _run(tree, *dict.fromkeys(m.test for m in mutants))
        if clean.returncode != 0:
            return [f"without any fault: {clean.stdout[-2000:]}{clean.stderr[-2000:]}"]
        for mutant in mutants:
            path = tree / mutant.file
            text = path.read_text()
            change = f"{mutant.file}: {mutant.old!r} -> {mutant.new!r}"
            if text.count(mutant.old) != 1:
                found.append(f"{change}: the text is there {text.count(mutant.old)} times, not once")
                continue
            path.write_text(text.replace(mutant.old, mutant.new))
            code = _run(tree, mutant.test).returncode
            path.write_text(text)
            print("caught" if code == 1 else "MISSED", change, flush=True)
            if code != 1:  # 1: tests ran and some failed
                found.append(f"{change}: {mutant.test} ended with {code}")
    return found


def main() -> int:
    """Exit code 0 when every fault is caught."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    missed = survivors([m for m in MUTANTS if wanted in m.file or wanted in m.test])
    print(*missed, sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
