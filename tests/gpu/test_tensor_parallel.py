"""Two GPUs share a model over NCCL: its all-reduces are captured, replays are bitwise equal to uncaptured runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.sparse_pcg.test_tensor_parallel import judge_model, judge_sums, look

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_two_gpus_equal_one(tmp_path: Path) -> None:
    found = look(["columns", "experts", "bfloat16", "sums", "sums inductor", "demo"], "cuda", tmp_path)
    for name in ("columns", "experts", "bfloat16"):
        judge_model(name, found[name], "cuda")
    for name in ("sums", "sums inductor"):
        judge_sums(name, found[name])
    assert all(rank["ok"] and rank["ranks"] == 2 for rank in found["demo"])
