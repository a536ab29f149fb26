"""Loading needs the rank's part and one shard of memory, no more."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from sparse_pcg.models import Rank, config_from_hf
from sparse_pcg.models.hf_names import model_names

safetensors = pytest.importorskip("safetensors.torch")

MB = 1 << 20
EXPERTS, HIDDEN, INTER = 64, 512, 384  # 64 * 3 * 512 * 384 * 2 bytes: 72 MB a layer
LAYERS = 2

LOAD = """
import resource, sys, torch
from sparse_pcg.models import Rank, load_model
from sparse_pcg.models.checkpoint import Checkpoint
torch.set_num_threads(1)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
Checkpoint(sys.argv[1])
torch.ones(10, 10, dtype=torch.bfloat16) @ torch.ones(10, 10, dtype=torch.bfloat16)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
before = resident()
model = load_model(sys.argv[1], rank=Rank(1, 4, expert_parallel=True), progress=False)
peak = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
print(peak - before, sum(t.nbytes for t in (*model.parameters(), *model.buffers())))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory(tmp_path):
    given = {
        "model_type": "glm_moe_dsa", "vocab_size": 64, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64, "v_head_dim": 32, "index_n_heads": 4, "index_head_dim": 128, "index_topk": 64,
        "intermediate_size": 64, "moe_intermediate_size": INTER, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "first_k_dense_replace": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(given))
    names = list(model_names(config_from_hf(given), Rank(), stacked=False, tied=False))
    shards, size = [{}], 0
    for wanted in names:
        tensor = torch.zeros(wanted.shape, dtype=torch.bfloat16)
        if size + tensor.nbytes > 24 * MB:
            shards, size = [*shards, {}], 0
        shards[-1][wanted.name] = tensor
        size += tensor.nbytes
    files = [f"model-{number:05}.safetensors" for number in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        safetensors.save_file(shard, tmp_path / file)
    shard_size = max((tmp_path / file).stat().st_size for file in files)
    total = sum((tmp_path / file).stat().st_size for file in files)
    del shards, shard, tensor
    done = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True)
    if "clear_refs" in done.stderr:
        pytest.skip("this system does not reset the peak of resident memory")
    assert done.returncode == 0, done.stderr
    peak, part = map(int, done.stdout.split())
    print(f"total {total >> 20}, part {part >> 20}, shard {shard_size >> 20}, peak {peak >> 20} MB")
    allowed = part + shard_size + 8 * MB
    assert peak <= allowed < total / 2
