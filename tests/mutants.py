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

from tests.sglang.releases import paths

ROOT = Path(__file__).parent.parent
COPIED = ("custom_ops", "sparse_pcg", "tests", "setup.cfg", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """file, and the test that must fail when ``old`` (found there exactly once) reads ``new``."""

    file: str
    old: str
    new: str
    test: str


def _ops(file: str, old: str, new: str, test: str) -> Mutant:
    return Mutant(f"custom_ops/{file}", old, new, f"tests/custom_ops/{test}")


def _backend(file: str, old: str, new: str, test: str) -> Mutant:
    return Mutant(f"sparse_pcg/{file}", old, new, f"tests/sparse_pcg/{test}")


def _sglang(file: str, old: str, new: str, release: str = "0.5.23") -> Mutant:
    test = f"tests/sglang/test_releases.py::test_release[{release}]"
    return Mutant(f"sparse_pcg/integrations/sglang/{file}", old, new, test)


def _can_run(mutant: Mutant) -> bool:
    """Whether the SGLang release that its test needs was fetched."""
    release = mutant.test.partition("test_release[")[2].rstrip("]")
    return not release or paths(release) is not None


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
    _ops("rope.py", "return a * cos - b * sin", "return a * cos + b * sin", "test_rope.py::test_by_hand"),
    _ops("rope.py", "(a * cos - b * sin, b * cos + a * sin)", "(a * cos - b * sin, b * cos - a * sin)",
         "test_rope.py::test_by_hand"),
    _ops("rope.py", "return a, b", "return b, a", "test_rope.py::test_by_hand"),
    _ops("rope.py", "if not INTERLEAVED:", "if INTERLEAVED:", "test_rope.py::test_by_hand"),
    # float8: the floor, the rounding of the scale, a lost NaN
    _ops("fp8_quant.py", "tl.maximum(amax, 1e-4)", "tl.maximum(amax, 1e-5)",
         "test_fp8_quant.py::test_small_blocks_use_the_floor"),
    _ops("fp8_quant.py", "((bits + 0x7FFFFF) &", "((bits + 0x7FFFFE) &",
         "test_fp8_quant.py::test_powers_of_two_are_not_rounded_up"),
    _ops("fp8_quant.py", "((bits + 0x7FFFFF) &", "((bits + 0x800000) &",
         "test_fp8_quant.py::test_powers_of_two_are_not_rounded_up"),
    _ops("fp8_quant.py", 'return tl.where(amax < float("inf"), scale, amax)', "return scale",
         "test_fp8_quant.py::test_nan_stays_in_its_block_and_is_not_lost"),
    _ops("fp8_quant.py", "return tl.fma(tl.fma(q, divisor, opposite), minus_inverse, q)", "return x * inverse",
         "test_fp8_quant.py::test_quotients_half_way_are_half_way"),
    _ops("fp8_quant.py", "x * -1.0, inverse * -1.0", "-x, -inverse",
         "test_fp8_quant.py::test_beside_an_infinity_all_is_zero"),
    _ops("fp8_quant.py", "divisor = tl.where(inverse == 0.0, 0.0, scale)", "divisor = scale",
         "test_fp8_quant.py::test_beside_an_infinity_all_is_zero"),
    _ops("fp8_quant.py", 'tl.where(scale == float("inf"), 0.0, scale)', "scale",
         "test_fp8_quant.py::test_beside_an_infinity_all_is_zero"),
    # Head gate: a dropped scale
    _ops("head_gate.py", "mask=mask, other=0.0) * softmax_scale", "mask=mask, other=0.0)",
         "test_head_gate.py::test_by_hand"),
    _ops("head_gate.py", "gate * q_scale.reshape(gate.shape) * softmax_scale", "gate * softmax_scale",
         "test_head_gate.py::test_by_hand"),
    _ops("head_gate.py", "tl.where(whole, gate + part_sum, gate)", "tl.where(whole, part_sum, gate)",
         "test_head_gate.py::test_whoever_sums_the_slices_the_bits_are_the_same"),
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
    _ops("index_prepare.py", "low = low.to(dtype).to(tl.float32)\n    high = high", "high = high",
         "test_index_prepare.py::test_q_triton_equals_the_single_operators"),
    _ops("index_prepare.py", "(b - mean) * rstd * weight_b", "(b - mean) * rstd * weight_a",
         "test_index_prepare.py::test_k_by_hand"),
    _ops("index_prepare.py", "layernorm_reference(k if hadamard else k.float()", "layernorm_reference(k",
         "test_index_prepare.py::test_k_agrees_with_the_single_operators"),
    # Transformed queries and keys in CUDA C++: the exponent a scale rounds up to, who subtracts, a missing rounding
    _ops("index_rows.cuh", "0x7fffffu - 0x600000u", "0x7fffffu - 0x5fffffu",
         "test_index_keys_cuda.py::test_the_scale_of_every_power"),
    _ops("index_rows.cuh", "part & lanes ? -1.0f : 1.0f", "1.0f",
         "test_index_queries_cuda.py::test_equals_the_reference"),
    _ops("index_rows.cuh", "    round_eight(x[1]);\n", "",
         "test_index_queries_cuda.py::test_equals_the_reference"),
    # Queries: rows that are not the block's next, a position of the row before, rows of the first round alone
    _ops("index_queries.cu", "row + step", "row + ROWS",
         "test_index_queries_cuda.py::test_blocks_take_rows_until_none_are_left"),
    _ops("index_queries.cu", "next = load_row(a, row + step, part);",
         "const long long old = next.position; next = load_row(a, row + step, part); next.position = old;",
         "test_index_queries_cuda.py::test_blocks_take_rows_until_none_are_left"),
    _ops("index_queries.cu", "first += step", "first += a.rows",
         "test_index_queries_cuda.py::test_blocks_take_rows_until_none_are_left"),
    # Keys: the order of a sum, a lost bias, a missing rounding, the page, what lies between rows
    _ops("index_keys.cu", "(sums[0] + sums[2]) + (sums[1] + sums[3])", "(sums[0] + sums[1]) + (sums[2] + sums[3])",
         "test_index_keys_cuda.py::test_sums_in_its_order"),
    _ops("index_keys.cu", "int lanes = 2; lanes > 0; lanes /= 2", "int lanes = 1; lanes < 4; lanes *= 2",
         "test_index_keys_cuda.py::test_sums_in_its_order"),
    _ops("index_keys.cu", "bias[c][i] = -0.0f;", "bias[c][i] = 0.0f;",
         "test_index_keys_cuda.py::test_no_bias_leaves_the_sign_of_zero"),
    _ops("index_keys.cu", "        round_eight(x[c]);\n", "",
         "test_index_keys_cuda.py::test_equals_the_reference_but_for_the_order_of_sums"),
    _ops("index_keys.cu", "(slot >> 6) * 8448", "(slot >> 6) * 8192",
         "test_index_keys_cuda.py::test_equals_the_reference"),
    _ops("index_keys.cu", "variance + a.eps", "variance", "test_index_keys_cuda.py::test_rows_without_variance"),
    _ops("index_keys.cu", "row * a.row_stride", "row * 16ll",
         "test_index_keys_cuda.py::test_equals_the_reference_but_for_the_order_of_sums"),
    # Latent KV rows: offsets within the packed row, the order of the parts
    _ops("mla_cache.py", "328 + 264 + dim", "328 + 263 + dim",
         "test_mla_cache.py::test_packed_bytes_by_hand"),
    _ops("mla_cache.py", "164 + 128 + block", "164 + 129 + block",
         "test_mla_cache.py::test_packed_bytes_by_hand"),
    _ops("mla_cache.py", "parts = (q, scale, k_rope", "parts = (scale, q, k_rope",
         "test_mla_cache.py::test_packed_bytes_by_hand"),
    _ops("mla_cache.py", "row = torch.cat((k_nope, k_rope), 1)", "row = torch.cat((k_rope, k_nope), 1)",
         "test_mla_cache.py::test_plain_bytes_by_hand"),
    # Selection: ties, NaN, zeros, the page, several blocks
    _ops("topk_triton.py", "((equal != 0) & (equal_rank < need))", "((equal != 0) & (equal_rank <= need))",
         "test_topk.py::test_nothing_is_written_beyond_the_rows"),
    _ops("topk.py", "ranked = (order_keys(logits).long() << 32) + (width - 1 - column)",
         "ranked = (order_keys(logits).long() << 32) + column", "test_topk.py::test_by_hand"),
    _ops("topk_triton.py", "key = tl.where(x != x, -0x7FFFFFFF, key)", "key = tl.where(x != x, key, key)",
         "test_topk.py::test_by_hand"),
    _ops("topk.py", "return torch.where(torch.isnan(logits), _INT_MIN + 1, keys)", "return keys",
         "test_topk.py::test_by_hand"),
    _ops("topk_triton.py", "bits = tl.where(x == 0.0, 0.0, x)", "bits = tl.where(x == 0.0, x, x)",
         "test_topk.py::test_by_hand"),
    _ops("topk_triton.py", "inside = inside & ((key >> (low + 8)) == prefix)",
         "inside = inside & ((key >> (low + 8)) >= prefix)",
         "test_topk.py::test_both_providers_follow_the_contract"),
    _ops("topk_triton.py", "page = tl.load(table + position // PAGE_SIZE, mask=mask, other=0)",
         "page = tl.load(table + (position + 1) // PAGE_SIZE, mask=mask, other=0)",
         "test_topk.py::test_slots_by_hand"),
    _ops("topk_triton.py", "need -= tl.sum(tl.where(digits > digit, counts, 0))",
         "need -= tl.sum(tl.where(digits >= digit, counts, 0))", "test_topk.py::test_by_hand"),
    _ops("topk_triton.py", "equal_seen += tl.sum(equal)", "equal_seen += 0",
         "test_topk.py::test_rows_of_several_blocks"),
    # the CUDA C++ top-k: the order of ties, NaN, zeros, overflow, a filter too strict, windows of positions
    _ops("topk_select.cuh", "key == cut.key && position <= (unsigned)cut.position", "key == cut.key",
         "test_topk_cuda.py::test_every_kind"),
    _ops("topk_select.cuh", "return x == x ? bits", "return true ? bits", "test_topk_cuda.py::test_every_kind"),
    _ops("topk_select.cuh", "const float x = __uint_as_float(bits) + 0.0f;", "const float x = __uint_as_float(bits);",
         "test_topk_cuda.py::test_every_kind"),
    _ops("topk.cu", "other.x == mine.x && other.y > mine.y", "other.x == mine.x && other.y < mine.y",
         "test_topk_cuda.py::test_every_kind"),
    _ops("topk_gather.cuh", "if (kept + TILE > CAPACITY) {", "if (false) {", "test_topk_cuda.py::test_every_kind"),
    _ops("topk_gather.cuh", "++least;", "least += 1u << 23;", "test_topk_cuda.py::test_a_sample_that_misleads"),
    _ops("topk_gather.cuh", "if (left <= 4 * u * stride + 3) v[u].w = nan;", "",
         "test_topk_cuda.py::test_what_lies_behind_rows_that_are_read_ahead"),
    _ops("topk.cu", "if (count > CAPACITY) count", "if (false) count",
         "test_topk_cuda.py::test_a_sample_that_misleads"),
    _ops("topk.cu", "if (count < k) {", "if (false) {", "test_topk_cuda.py::test_every_kind"),
    _ops("topk.cu", "for (int left = before + count - need; left > 0; --left) bits ^= 0x80000000u >> __clz(bits);", "",
         "test_topk_cuda.py::test_every_kind"),
    _ops("topk.cu", "keys[u][c] == found.low && of_row", "keys[u][c] == found.low",
         "test_topk_cuda.py::test_every_kind"),
    _ops("topk.cu", "const unsigned at = position - from;", "const unsigned at = position;",
         "test_topk_cuda.py::test_positions_beyond_one_bitmap"),
    _ops("topk.cu", "if (index < a.valid_rows) {", "if (true) {",
         "test_topk_cuda.py::test_rows_behind_the_valid_ones_and_no_starts"),
    _ops("topk_cuda.py", "4 * (64 + 1 + 3 + 2)", "4 * (64 + 3 + 2)",
         "test_topk_cuda.py::test_the_launch_knows_how_much_shared_memory_it_needs"),
    _ops("topk.py", "inside = (column >= first) & (column < first + lengths.long().unsqueeze(1))",
         "inside = (column >= first) & (column <= first + lengths.long().unsqueeze(1))",
         "test_topk.py::test_columns_outside_the_range_by_hand"),
    # Logits: a dropped scale, ReLU, NaN, a page or a request off
    _ops("mqa_logits_kernels.py", "axis=2) * k_scale[:, None]", "axis=2)",
         "test_mqa_logits.py::test_by_hand"),
    _ops("mqa_logits_kernels.py", "0.0, propagate_nan=tl.PropagateNan.ALL) * gates", "0.0) * gates",
         "test_mqa_logits.py::test_nan_stays_in_its_row"),
    _ops("mqa_logits_kernels.py", "scores = tl.maximum(tl.dot(k, tl.trans(q)), 0.0,",
         "scores = tl.maximum(tl.dot(k, tl.trans(q)), -9.0,",
         "test_mqa_logits.py::test_paged_is_the_formula"),
    _ops("mqa_logits_kernels.py", "page * SCALE_ROW + SCALES_AT + token", "page * SCALE_ROW + token",
         "test_mqa_logits.py::test_page_layout_by_hand"),
    _ops("mqa_logits_kernels.py", "pair % HEADS_P2 < HEADS", "pair % HEADS_P2 <= HEADS",
         "test_mqa_logits.py::test_paged_is_the_formula"),
    _ops("mqa_logits_kernels.py", "request = tl.min(tl.where(owner > request, owner, 0x7FFFFFFF))",
         "request = 0x7FFFFFFF", "test_mqa_logits.py::test_paged_is_the_formula"),
    _ops("mqa_logits.py", "out[at : at + step] = (total * scale).float()",
         "out[at : at + step] = total.float()", "test_mqa_logits.py::test_by_hand"),
    # The cut: chunks, pad rows, the short body
    # Vendor kernels: chosen where they do not pay, a request's distance, the first place, empty rows
    _ops("indexer.py", "_DEEP_GEMM_ROWS_EACH * requests)", "requests)",
         "test_vendor.py::test_deep_gemm_is_left_where_gathering_costs_more"),
    _ops("index_cache.py", "mask=inside, other=0) * pages * 64", "mask=inside, other=0) * 64",
         "test_vendor.py::test_gather_for_rows"),
    _ops("vendor.py", "tl.cdiv(tl.maximum(tl.load(select_lens + row), 1), GRAIN)", "1",
         "test_vendor.py::test_flash_mla"),
    _ops("vendor.py", "slot = tl.where((place == 0) & (slot < 0), 0, slot)", "slot = slot",
         "test_vendor.py::test_flash_mla"),
    _ops("index_prepare.py", "tl.maximum(magnitude(low), magnitude(high))", "magnitude(low)",
         "test_index_prepare.py::test_q_triton_equals_the_single_operators"),
    _ops("vendor.py", "rows <= _FEW_ROWS and", "rows < _FEW_ROWS and",
         "test_vendor.py::test_who_serves_few_rows_is_a_matter_of_all_rows"),
    _ops("_register.py", "        return provider.run(", "        return self.providers[self.choose(*args)].run(",
         "test_vendor.py::test_who_serves_few_rows_is_a_matter_of_all_rows"),
    _ops("trtllm_mla.py", '"seq_lens": select_lens.clamp(min=1)', '"seq_lens": select_lens',
         "test_vendor.py::test_trtllm"),
    _ops("trtllm_mla.py", "out.masked_fill_((select_lens == 0)[:, None, None], 0.0)", "out.add_(0)",
         "test_vendor.py::test_trtllm"),
    _ops("vendor.py", "is_neox=not interleaved", "is_neox=interleaved", "test_vendor.py::test_flashinfer_rope"),
    _backend("bench/ops.py", "op.providers[name].slower(*case.args) is None", "True",
             "test_bench_ops.py::test_who_is_default"),
    _ops("indexer.py", "yield slice(at, min(at + step, rows))", "yield slice(at, min(at + step, rows - 1))",
         "test_indexer.py::test_is_logits_then_selection"),
    _ops("indexer.py", "if part.stop == valid else topk_result[part]",
         "if part.stop == -1 else topk_result[part]", "test_indexer.py::test_is_logits_then_selection"),
    _ops("indexer.py", "step = max(1, context.workspace_bytes // (4 * _logits_stride(metadata)))",
         "step = max(1, context.workspace_bytes // _logits_stride(metadata))",
         "test_indexer.py::test_chunks_fit_the_workspace"),
    _ops("indexer.py", "positions = torch.where(position < lens, position, -1)",
         "positions = torch.where(position <= lens, position, -1)",
         "test_indexer.py::test_short_body_equals_the_cut"),
    _ops("indexer.py", "inside = position < tl.minimum(tl.load(kv_lens + row), k)", "inside = position < k",
         "test_indexer.py::test_short_body_equals_the_cut"),
    # Sparse MLA: a dropped scale, -1, the running maximum, the length
    _ops("sparse_mla_kernels.py", "latent = tl.reshape(grouped * factor[:, :, None], (TOKENS, LATENT_DIM))",
         "latent = tl.reshape(grouped, (TOKENS, LATENT_DIM))", "test_sparse_mla.py::test_by_hand"),
    _ops("sparse_mla_kernels.py", "slot = tl.where((token == 0) & (slot < 0), 0, slot)",
         "slot = tl.where(slot < 0, 0, slot)", "test_sparse_mla.py::test_is_the_formula"),
    _ops("sparse_mla_kernels.py", "attended * tl.expand_dims(shrink, DIM_AXIS)", "attended",
         "test_sparse_mla.py::test_is_the_formula"),
    _ops("sparse_mla_kernels.py", "live = slot >= 0", "live = slot > 0",
         "test_sparse_mla.py::test_pad_rows_attend_slot_0"),
    _ops("sparse_mla.cu", "slot = max(slot, 0);  // not", "slot = slot;  // not",
         "test_sparse_mla_cuda.py::test_is_the_formula"),
    _ops("sparse_mla.cu", "high * share_of_one + 0.0f", "high * share_of_one",
         "test_sparse_mla_cuda.py::test_a_sum_that_a_merge_shrinks_to_nothing_has_no_sign"),
    _ops("sparse_mla.cu", "tokens = s.wide;\n            __syncthreads();", "tokens = s.wide;",
         "test_sparse_mla_cuda.py::test_is_the_formula"),
    _ops("sparse_mla.cu", "if (slot < 0) {", "if (false) {",
         "test_sparse_mla_cuda.py::test_what_is_not_selected_does_not_matter"),
    _ops("sparse_mla.cu", "from + 128 * i, slot >= 0)", "from + 128 * i, true)",
         "test_sparse_mla_cuda.py::test_what_is_not_selected_does_not_matter"),
    _ops("sparse_mla.cu", "await_copies<STAGES - 2>();", "await_copies<STAGES - 1>();",
         "test_sparse_mla_cuda.py::test_is_the_formula"),
    _ops("sparse_mla.cu", "sums[m][n][i] *= i % 2 ? shrinks[n].y : shrinks[n].x;", "sums[m][n][i] *= shrinks[n].x;",
         "test_sparse_mla_cuda.py::test_is_the_formula"),
    _ops("sparse_mla.cu", "if (++part == PARTS / 2 && blocks == 1)", "if (++part == PARTS && blocks == 1)",
         "test_sparse_mla_cuda.py::test_parts_in_order_then_halves"),
    _ops("sparse_mla.cu", "? PARTS / 2 : 1, found", "? PARTS : 1, found",
         "test_sparse_mla_cuda.py::test_parts_in_order_then_halves"),
    _ops("sparse_mla_tiles.cuh", "total = __fmaf_rn(total, old, total_of_part * fresh);", "total += total_of_part;",
         "test_sparse_mla_cuda.py::test_is_the_formula"),
    _ops("sparse_mla_tiles.cuh", "second_first ? second : first;", "first;",
         "test_sparse_mla_cuda.py::test_is_the_formula"),
    _ops("sparse_mla.py", "chosen[:, 0].clamp_(min=0)", "chosen[:, 0].clamp_(min=-1)",
         "test_sparse_mla.py::test_pad_rows_attend_slot_0"),
    _ops("sparse_mla_kernels.py", "tl.where(total == 0.0, 1.0, total)", "total",
         "test_sparse_mla.py::test_is_the_formula"),
    _ops("sparse_mla_kernels.py", "* chunks + part", "* chunks",
         "test_sparse_mla.py::test_whoever_takes_the_chunks_the_bits_are_the_same"),
    _ops("sparse_mla_kernels.py", "chunk_total * new)", "chunk_total)",
         "test_sparse_mla.py::test_whoever_takes_the_chunks_the_bits_are_the_same"),
    # Metadata: `<` for `<=` between requests, a carry, 32 bits
    _ops("metadata_kernels.py", "passed = (end[None, :] <= row[:, None])",
         "passed = (end[None, :] < row[:, None])", "test_metadata_fill.py::test_by_hand"),
    _ops("metadata_fill.py", "request = torch.searchsorted(ends, row, right=True)",
         "request = torch.searchsorted(ends, row, right=False)", "test_metadata_fill.py::test_by_hand"),
    _ops("metadata_kernels.py", "total += tl.sum(length)", "total = tl.sum(length)",
         "test_metadata_fill.py::test_more_requests_than_one_block"),
    _ops("metadata_kernels.py", "slot = page.to(tl.int64) * PAGE_SIZE", "slot = page * PAGE_SIZE",
         "test_metadata_fill.py::test_large_slots_are_64_bit"),
    # Composites: what is bound
    _ops("composites.py", 'bind("slots", rows_like=key)', 'bind("positions", rows_like=key)',
         "test_composites.py::test_store_is_seen_by_the_selection"),
    _ops("composites.py", "torch.bmm(attended.transpose(0, 1), w_vc)",
         "torch.bmm(attended.transpose(0, 1).flip(0), w_vc)",
         "test_composites.py::test_attention_is_unabsorbed_attention"),
    # Backend. Padding: a tail that keeps what was there, small buckets captured first
    _ops("metadata_fill.py", "input_ids.copy_(torch.where(valid, taken, 0))",
         "input_ids.copy_(torch.where(valid, taken, input_ids))", "test_metadata_fill.py::test_ids_by_hand"),
    _ops("metadata_header.py", 'FILL_BATCH_METADATA.choose(metadata.positions) == "reference"',
         "not metadata.positions.is_cuda",
         "test_metadata_fill.py::test_a_header_is_read_by_the_provider_that_the_environment_names"),
    _ops("metadata_kernels.py", "(row - first == own - 1)", "(row - first == own)",
         "test_metadata_fill.py::test_ids_by_hand"),
    _backend("graph_runner.py", "sorted(set(self.sizes) - set(self._buckets), reverse=True)",
             "sorted(set(self.sizes) - set(self._buckets))",
             "test_failures.py::test_stale_row_buffers_reach_nothing"),
    # A gate that stays on, short graphs for long prompts, a seed buffer for another batch
    _backend("gates.py", '"page-sharded KV": self.page_sharded_kv', '"page-sharded KV": False',
             "test_gates.py::test_each_deployment_turns_all_off_and_says_why[page_sharded_kv]"),
    _backend("rewrite.py", "if op.name in context.whole:", "if False:",
             "test_gates.py::test_cuts_of_the_published_models[glm5_2-21-78-by_symbols]"),
    _backend("graph_runner.py", 'plans["short"] if short and "short" in plans', 'plans["short"] if "short" in plans',
             "test_end_to_end.py::test_logprobs_and_greedy_ids_are_those_with_breaks"),
    _backend("drafting.py", "seed_out, (torch.int32,), (requests, self.index_topk)",
             "seed_out, (torch.int32,), (seed_out.shape[0], self.index_topk)",
             "test_refusals_of_batches.py::test_a_seed_buffer_for_another_number_of_requests"),
    _backend("batch.py", "together.min() < 1", "together.min() < 0",
             "test_refusals_of_batches.py::test_a_page_table_that_does_not_hold_the_batch"),
    # Random batches through target and draft see a seed from other rows; a floor ignored; a bench that keeps its pages
    _backend("drafting.py", "last = self.metadata.last_rows[: self._seed.shape[0]]",
             "last = self.metadata.last_rows[: self._seed.shape[0]].clamp(max=7)",
             "test_draft_sequences.py::test_replay_equals_uncaptured_and_breaks"),
    _backend("graph_runner.py", "self.floor is None or size < self.floor", "self.floor is None",
             "test_row_regimes.py::test_below_the_floor_the_op_is_a_cut_and_every_replay_equals_breaks"),
    _backend("bench/serve.py", "part.pages.close()", "pass", "test_bench_prefill.py::test_serve_of_several_lanes"),
    # Metadata: a variant chosen by the row count, what a context held when the model was compiled
    _backend("graph_runner.py", "return host.max_kv_len <= self.index_topk", "return host.rows <= self.index_topk",
             "test_runner.py::test_variant_follows_what_rows_see_not_how_many_there_are"),
    _backend("rewrite.py", "resolve = partial(_from_context, name, layer_id)", "resolve = partial(_itself, real)",
             "test_failures.py::test_without_a_context_the_model_says_so"),
    # Keys and recompiles: another symbol, the token dim, a graph of one size, a trace after freeze(), autograd
    _backend("compiled_graph.py", "for read in self._symbols.values())",
             "for read in list(self._symbols.values())[:1])",
             "test_backend.py::test_the_key_is_every_symbol_and_the_token_dim_is_found_by_symbol"),
    _backend("compiled_graph.py", "list(self._symbols).index(self._row_symbol)", "0",
             "test_failures.py::test_the_first_dynamic_dim_is_the_token_dim"),
    _backend("compiled_graph.py", "if given[i] is tokens)", "if given[i] is self)",
             "test_failures.py::test_the_first_dynamic_dim_is_the_token_dim"),
    _backend("compiled_graph.py", "return True  # a static graph", "return False  # a static graph",
             "test_failures.py::test_few_rows_in_any_order"),
    _backend("backend.py", "    if session.frozen():", "    if session.frozen() and False:",
             "test_failures.py::test_another_kind_of_argument"),
    _backend("collectives.py", "if here != there:", "if False:",
             "test_collectives.py::test_a_difference_names_the_rank_and_what_differs_on_every_rank"),
    _backend("collectives.py", 'json.dumps({**mine, "withdrawn"', 'json.dumps(mine) or ({**mine, "withdrawn"',
             "test_collectives.py::test_a_silent_rank_is_named_in_time"),
    _backend("collectives.py", "if not outermost:", "if False:",
             "test_rank_faults.py::test_a_rank_that_is_killed_ends_the_other_in_seconds"),
    _backend("collectives.py", "            self._vote(None)", "            pass",
             "test_collectives.py::test_a_capture_takes_effect_on_all_ranks_or_on_none"),
    _backend("collectives.py", '                self._ranks.withdraw("a capture", error)', "                pass",
             "test_collectives.py::test_a_rank_that_is_interrupted_in_a_capture_lets_nobody_wait"),
    _backend("collectives.py", "weakref.finalize(group, _retire, ranks).atexit = False", "pass",
             "test_collectives.py::test_the_watch_ends_with_its_process_group"),
    _backend("graph_runner.py", 'with together(self._ranks(), "an eager run"', 'with together(None, "an eager run"',
             "test_runner.py::test_what_the_model_runs_of_itself_is_watched_too"),
    _backend("compiled_graph.py", 'with together(self.ranks, "a run', 'with together(None, "a run',
             "test_backend.py::TestArguments::test_a_graph_that_runs_as_it_is_is_watched_too"),
    _backend("launch.py", "        if status == 0:", "        if False:",
             "test_launch.py::test_an_exit_without_an_error_ends_in_order"),
    _backend("launch.py", "    elif callable(show):", "    elif False:",
             "test_launch.py::test_an_error_has_its_own_status_and_message"),
    _backend("liveness.py", '_start_of(state["pid"]) != state["start"]', "False",
             "test_liveness.py::test_a_process_that_is_gone_is_noticed_before_its_silence"),
    _backend("liveness.py", "elif self._answered - changed > self._timeout:", "elif False:",
             "test_liveness.py::test_a_rank_without_a_sign_of_life_is_lost"),
    _backend("liveness.py", "not self._stop.is_set() and not self._who_left():", "True:",
             "test_liveness.py::test_a_store_that_ends_with_a_rank_that_left_is_no_loss"),
    _backend("liveness.py", "if not _under_way_on_gpu(self._mark):", "if True:",
             "test_liveness.py::test_a_gpu_that_is_behind_is_not_one_that_hangs[inf]"),
    _backend("liveness.py", "            _leave_captures_alone()", "            pass",
             "test_liveness.py::test_the_thread_that_judges_breaks_no_capture_and_asks_only_about_work_under_way"),
    _backend("liveness.py", "        self._done = recorded", "        pass",
             "test_liveness.py::test_the_thread_that_judges_breaks_no_capture_and_asks_only_about_work_under_way"),
    _backend("liveness.py", "self.lost or (self._who_left() if self._is_silent(now) else None)", "self.lost",
             "test_liveness.py::test_who_asks_a_store_that_went_silent_with_a_rank_that_left_ends"),
    _backend("liveness.py", "            stream.flush()", "            pass",
             "test_liveness.py::test_what_was_printed_gets_out_before_the_process_ends"),
    _backend("collectives.py", "self.watch.asking = what", "pass",
             "test_liveness.py::test_who_asks_a_store_that_answers_no_more_ends"),
    _backend("collectives.py", "Watch(store.clone(), ", "Watch(store, ",
             "test_liveness.py::test_who_waits_for_a_key_shows_signs_of_life"),
    _backend("collectives.py", "_formed[group.group_name] += 1", "pass",
             "test_collectives.py::test_a_group_that_is_formed_anew_finds_no_messages_of_the_one_before"),
    _backend("graph_runner.py", 'moved = ranks.vote("refresh()", moved or None) or ""', "pass",
             "test_runner.py::TestOwnRunner::test_weights_that_moved_on_another_rank"),
    _backend("plan.py", "if torch.is_grad_enabled():", "if False:",
             "test_plan.py::test_the_steps_run_without_autograd_whatever_the_caller_is_in"),
    # Launches by address: random numbers that stand still, a capture or a device not asked about, C++ ops taken along
    _backend("graph_launch.py", "if not calls.seen and generator", "if generator",
             "test_graph_launch.py::test_random_numbers_in_a_graph_leave_its_launch_to_torch"),
    _backend("graph_launch.py", "torch._C._cuda_isCurrentStreamCapturing() or ", "",
             "test_graph_launch.py::test_inside_a_capture_torch_is_asked_and_refuses"),
    _backend("graph_launch.py", "if torch._C._cuda_getDevice() != device:", "if False:",
             "test_graph_launch.py::test_on_another_device_than_the_current_one"),
    _backend("op_body.py", "if not _OF_PYTHON.search(repr(kernel)):", "if False:",
             "test_op_body.py::test_ops_that_are_left_to_the_dispatcher"),
    _backend("memory.py", "view.conj() if like.is_conj() else view", "view",
             "test_failures_of_graphs.py::test_lazy_conjugation_of_arguments_and_results"),
    # Recording: memory that another view still needs, a failed capture tried again, the wrong op or step named
    _backend("plan.py", "if pointer and not live[pointer]:", "if pointer:",
             "test_failures_of_graphs.py::test_addresses_and_aliases"),
    _backend("plan.py", "if self.plan.failure is not None:", "if False:",
             "test_plan.py::test_a_capture_that_fails_half_way_has_every_effect_once"),
    _backend("compiled_graph.py", "if key in self._failed:", "if False:",
             "test_plan.py::test_a_capture_that_fails_half_way_has_every_effect_once"),
    _backend("plan.py", "reached[-1].op ==", "reached[0].op !=",
             "test_plan.py::test_the_error_names_piece_op_line_and_size"),
    _backend("graph_launch.py", "self._labels[place - before]", "self._labels[0]",
             "test_plan.py::test_an_error_in_a_step_names_it"),
    _backend("memory.py", "self._free.append(piece)", "pass",
             "test_plan.py::test_memory_of_dead_values_is_used_again"),
    # Profiling and benches: an observer that stays, another batch's pages written, paths of this machine
    _backend("profiling.py", "    Plan.observer = before", "    Plan.observer = observer",
             "test_plan.py::test_an_observer_goes_also_when_the_block_fails"),
    _backend("profiling.py", "fill(runner.metadata, batch, host, runner._staging)", "pass",
             "test_profiling.py::test_the_steps_of_a_bucket"),
    _backend("profiling.py", "torch.cuda.nvtx.range) if on", "torch.cuda.nvtx.range) if not on",
             "test_profiling.py::test_nvtx_names_plan_and_steps_until_it_is_off"),
    _backend("bench/timing.py", "Path(w).name if before in outputs else w", "w",
             "test_bench_graphs.py::test_a_result_says_how_to_get_it_again"),
    # Addresses: a moved tensor, an argument not written back, a result not copied, lost aliases
    _backend("compiled_graph.py", "tuple(inputs[i].data_ptr() for i in self._pinned))", "())",
             "test_failures_of_graphs.py::test_an_attribute_that_comes_and_goes"),
    _backend("compiled_graph.py", "self._copied = [i for i in self.moving if i not in touching]",
             "self._copied = self.moving",
             "test_failures_of_graphs.py::test_an_argument_that_overlaps_a_buffer_of_the_model"),
    _backend("compiled_graph.py", "entry.inputs.copy_back(inputs)", "pass",
             "test_failures_of_graphs.py::test_addresses_and_aliases"),
    _backend("static_inputs.py", "copy = view_bytes(outputs[members[0]], start, stop).clone()",
             "copy = view_bytes(outputs[members[0]], start, stop)",
             "test_failures_of_graphs.py::test_addresses_and_aliases"),
    _backend("static_inputs.py", "return view_like(args[self.members[0]], out, start)", "return out.clone()",
             "test_failures_of_graphs.py::test_addresses_and_aliases"),
    _backend("memory.py", "(pointer := storage_ptr(out)) in self._inputs:", "(pointer := storage_ptr(out)) in ():",
             "test_memory.py::test_stable_outputs_keep_aliases_and_addresses"),
    _backend("plan.py", "elif step.kind == CUT and not step.outputs and not moving:",
             "elif step.kind == CUT and not moving:", "test_failures_of_graphs.py::test_pieces_and_cuts"),
    _backend("plan.py", "last[leaf.index] = i", "last.setdefault(leaf.index, i)",
             "test_failures_of_graphs.py::test_pieces_and_cuts"),
    # Splitting: results of a cut in the next piece, an allocation as a graph, sizes that only a run can tell
    _backend("split.py", "node.target is operator.getitem and node.args[0] in made_by:",
             "node.target is operator.getitem and node.args[0] in ():",
             "test_failures_of_graphs.py::test_pieces_and_cuts"),
    _backend("split.py", "if all(f.kernels == 0 for f in facts):", "if not facts:",
             "test_failures_of_graphs.py::test_pieces_and_cuts"),
    _backend("program.py", "if symbols_of(analysis.values.get(n)) - known)",
             "if symbols_of(analysis.values.get(n)) - known and False)",
             "test_failures_of_graphs.py::test_a_size_that_depends_on_the_data"),
    # Sharing: what a key must hold
    _backend("pieces.py", 'parts.append(f"alias{group}+{_canonical(value.storage_offset(), symbols)}")', "pass",
             "test_piece_sharing.py::test_one_block_that_differs_is_compiled_apart_and_right"),
    _backend("pieces.py", "(*value.shape, -1, *value.stride())", "value.shape",
             "test_piece_sharing.py::test_one_block_that_differs_is_compiled_apart_and_right"),
    _backend("pieces.py", 'return f"{type(value).__name__}:{value!r}"', "return type(value).__name__",
             "test_piece_sharing.py::test_one_block_that_differs_is_compiled_apart_and_right"),
    # record(): an empty graph, a size read from the device, results of a cut that move, writes lost
    _backend("recording.py", "if launches(func) and (writes or", "if (writes or",
             "test_recording.py::test_replays_equal_the_function_on_new_values"),
    _backend("recording.py", "and not _by_numbers(func, args)", "and False",
             "test_recording.py::test_a_read_on_the_host_names_the_op"),
    _backend("recording.py", "result = pytree.tree_unflatten(stable.tensors, spec)", "pass",
             "test_recording.py::test_replays_equal_the_function_on_new_values"),
    # Load-back: a wait left out, pages given back too early, content that is newer, a failure forgotten
    _backend("graph_runner.py", "context.loads.wait()  # a graph cannot", "pass  # a graph cannot",
             "test_load_back.py::test_a_replay_starts_when_every_layer_is_there"),
    _backend("graph_runner.py", "context.loads.wait()  # a graph cannot", "context.loads  # a graph cannot",
             "test_draft_sequences.py::test_pages_that_came_back_equal_those_that_stayed"),
    Mutant("custom_ops/batch_metadata.py", "self.loads.wait(layer_id)", "pass",
           "tests/sparse_pcg/test_load_back.py::test_a_forward_waits_for_what_it_reads"),
    _backend("plan.py", "self.before(i)", "pass", "test_load_back.py::test_a_forward_waits_for_what_it_reads"),
    _backend("compiled_graph.py", "for layer_id in layers[step]:", "for layer_id in layers[step][:1]:",
             "test_load_back.py::test_an_uncaptured_forward_waits_layer_by_layer"),
    _backend("kv/transfers.py", "self._changed.wait_for(lambda: transfer.done > last or",
             "self._changed.wait_for(lambda: transfer.done >= last or",
             "test_load_back.py::test_a_replay_starts_when_every_layer_is_there"),
    _backend("kv/transfers.py", "transfer.error, transfer.done = None, 0",
             "transfer.error, transfer.done = None, self.num_layers",
             "test_kv_host.py::test_a_failed_load_is_an_error_at_each_wait_until_it_works"),
    _backend("kv/host.py", "self._leaving.append(_Leaving(transfer, [page for page, _ in pairs]))",
             "self.kv.allocator.free([page for page, _ in pairs])",
             "test_kv_host.py::test_a_request_that_is_still_leaving_takes_its_pages_back"),
    _backend("kv/host.py", "return not (load.awaited and self._queue.issued(load.transfer))", "return True",
             "test_kv_host.py::test_a_load_whose_pages_were_written_on_is_over"),
    _backend("kv/host.py", "return not (load.awaited and self._queue.issued(load.transfer))", "return False",
             "test_kv_host.py::test_an_eviction_after_a_failed_load_keeps_what_the_host_has"),
    _backend("kv/host.py", "            if not self._wanted[source]:", "            if False:",
             "test_kv_host.py::test_what_was_written_after_a_load_is_evicted_too"),
    _backend("kv/host.py", "load.transfer.pairs = [(h, p) for h, p in load.transfer.pairs if p not in gone]", "pass",
             "test_kv_host.py::test_a_failed_load_is_called_off_with_its_request"),
    _backend("kv/allocator.py", "self.on_short(count - len(self._free))", "pass",
             "test_kv_host.py::test_pages_come_back_once_copied_and_an_allocation_waits_for_them"),
    # Generation: rows and contexts that a decode graph is blind to, a page that goes before those that follow it
    _backend("generation.py", "metadata.num_rows = metadata.num_requests = size",
             "metadata.num_rows = metadata.num_requests = 1",
             "test_generation.py::test_a_decode_graph_equals_its_pieces_uncaptured"),
    _backend("generation.py", "1 << (context - 1).bit_length())", "1 << (context - 1).bit_length() - 1)",
             "test_generation.py::test_a_decode_graph_equals_its_pieces_uncaptured"),
    _backend("kv/prefix_cache.py", "for key in reversed(keys):", "for key in keys:",
             "test_generation.py::test_room_is_made_from_the_ends_of_what_was_used_least_recently"),
    _backend("kv/prefix_cache.py", "self._walk(tokens[: max(len(tokens) - 1, 0)])", "self._walk(tokens)",
             "test_generation.py::test_cached_pages_are_found_by_all_tokens_up_to_them"),
    # Looking and telling: where a new tensor lies, a sort undone, a call's own state, times at the wrong step, scale
    _backend("hazards/functions.py", "return DEVICE if on_device else func(*args)", "return func(*args)",
             "test_hazards.py::test_clean_idioms_raise_no_alarm"),
    _backend("hazards/watch.py", "generator is not None and before is not None and not torch.equal",
             "generator is not None or torch.equal",
             "test_hazards.py::test_what_a_gpu_does_is_told_not_what_the_cpu_does_here"),
    _backend("hazards/rows.py", "for suspect in sorted(healed, reverse=True):", "for suspect in ():",
             "test_hazards.py::test_clean_idioms_raise_no_alarm"),
    _backend("hazards/rows.py", "part = slice(0, self.rows.valid) if by_rows else slice(None)", "part = slice(0, 0)",
             "test_hazards.py::test_clean_idioms_raise_no_alarm"),
    _backend("hazards/__init__.py", "        self._quiet_run(module, args)\n        changes", "        changes",
             "test_hazards.py::test_every_planted_fault_is_found_at_its_line"),
    _backend("report.py", "            at += 1", "            at += 0", "test_report.py::test_a_toy_of_three_layers"),
    _backend("report_page.py", "_bar(s, s.us or 0.0 if widest else 1.0)", "_bar(s, 1.0)",
             "test_report.py::test_widths_are_to_scale"),
    # Experts: the plan, a block's rows, what no expert wrote, the weights, the order of gate and up
    _ops("moe_kernels.py", "listed += tl.sum(mine)", "listed += 0",
         "test_moe_experts.py::test_whole_numbers_are_exact"),
    _ops("moe_kernels.py", "* BM + tl.arange(0, BM)", "* 0 + tl.arange(0, BM)",
         "test_moe_experts.py::test_whole_numbers_are_exact"),
    _ops("moe_kernels.py", "to(tl.int32), 1) == 1", "to(tl.int32), 1) >= 1",
         "test_moe_experts.py::test_by_hand"),
    _ops("moe_kernels.py", "choice * MOST + rank", "choice * MOST",
         "test_moe_experts.py::test_by_hand"),
    _ops("moe_kernels.py", "tl.where(passed, totals, 0)", "tl.where(passed, 0, 0)",
         "test_moe_experts.py::test_by_hand"),
    _ops("moe_kernels.py", "(row < tokens) & (tl.sum", "(row < 0) & (tl.sum",
         "test_moe_experts.py::test_what_was_in_memory_is_not_seen"),
    _ops("moe_kernels.py", "tl.where(part < count, HIDDEN, 0)", "tl.where(part <= count, HIDDEN, 0)",
         "test_moe_experts.py::test_what_was_in_memory_is_not_seen"),
    _ops("moe_kernels.py", ".to(tl.float32) + 0.0", ".to(tl.float32)",
         "test_moe_experts.py::test_zero_is_positive"),
    _ops("moe_few_rows.py", "tl.sum(tl.where(serves, shares, 0.0), 1)", "tl.sum(shares, 1)",
         "test_moe_experts.py::test_by_hand"),
    _ops("moe_few_rows.py", "        active += BM * INTER\n", "", "test_moe_experts.py::test_by_hand"),
    _ops("moe_few_rows.py", "made.to(out.dtype.element_ty).to(tl.float32), total)", "made, total)",
         "test_moe_experts.py::test_few_rows_have_the_bits_of_many"),
    _ops("moe_tiles.py", "gate * tl.sigmoid(gate) * up", "up * tl.sigmoid(up) * gate",
         "test_moe_experts.py::test_by_hand"),
    _ops("moe_kernels.py", "tl.load(gates + choice,", "tl.load(gates + row,",
         "test_moe_experts.py::test_by_hand"),
    _ops("moe_experts.py", "torch.where(gates != 0, active * gates, 0.0)", "(active * gates)",
         "test_moe_experts.py::test_an_expert_that_overflows_on_a_row_it_does_not_serve_is_harmless"),
    _ops("moe_experts.py", "x.contiguous(), weights.contiguous(), ids", "x, weights, ids",
         "test_moe_experts.py::test_agrees_with_the_definition"),
    # Fakes: a shape, a dtype
    _ops("mqa_logits.py", "(q_fp8.shape[0], k_fp8.shape[0]), dtype", "(q_fp8.shape[0], k_fp8.shape[0] + 1), dtype",
         "test_mqa_logits.py::test_opcheck"),
    # the model's experts, its ranks, the float32 indexer
    _backend("models/moe.py", "valid.unsqueeze(1) & (ids >= first)", "(ids >= first)",
             "test_moe.py::test_choices_of_experts_elsewhere_and_of_pad_rows"),
    _backend("models/moe.py", "where(here, ids - first, count)", "where(here, ids, count)",
             "test_moe.py::test_choices_of_experts_elsewhere_and_of_pad_rows"),
    _backend("models/sharding.py", "return self.index * (total // self.size)", "return 0 * (total // self.size)",
             "test_moe.py::test_experts_of_other_ranks_add_nothing"),
    _backend("models/sharding.py", "return replace(", "return replace(config) if self.expert_parallel else replace(",
             "test_weights.py::test_what_the_ranks_give_sums_to_the_whole"),
    _backend("models/indexers.py", "keys[slots[request]].T).relu()", "keys[slots[request]].T)",
             "test_hf_parity.py::test_float32_logits_and_selections"),
    _backend("models/indexers.py", "keys[slots[request]]", "keys[slots[0]]",
             "test_hf_parity.py::test_float32_logits_and_selections"),
    _backend("models/dsa.py", "self.q_a_norm, config.lora_norm_eps", "self.q_a_norm, config.rms_norm_eps",
             "test_hf_parity.py::test_float32_logits_and_selections"),
    _backend("models/config.py", "self.mscale_all_dim) ** 2", "self.mscale) ** 2",
             "test_hf_parity.py::test_float32_logits_and_selections"),
    # weights from checkpoints
    _backend("models/hf_config.py", "2 if offset is None else offset", "1 if offset is None else offset",
             "test_hf_config.py::test_sharing_in_each_way"),
    _backend("models/hf_config.py", "float(mscale_all_dim or 0.0)", "float(mscale_all_dim or 1.0)",
             "test_hf_config.py::test_yarn_without_its_factors"),
    _backend("models/hf_names.py", "keys, values = tensor", "values, keys = tensor",
             "test_weights.py::test_sharded_stacked_or_in_one_file"),
    _backend("models/hf_names.py", "_slice((half * inter + width[0], width[1]))", "_slice((half * inter, width[1]))",
             "test_weights.py::test_a_rank_gets_its_part_and_reads_no_more"),
    _backend("models/hf_names.py", "(replace(tensor, part=None) for tensor in wanted)", "()",
             "test_weights.py::test_every_fault_is_named_and_nothing_is_read"),
    # A model that ranks share: the second half of gate and up, rows drawn in parts, a sum left out, a wait after a cut
    _backend("models/sharding.py", "(whole[dim] // 2 + self.index * count, count)", "(whole[dim] // 2, count)",
             "test_tensor_parallel.py::test_random_weights_of_a_rank_are_its_part_of_the_whole"),
    _backend("models/drawing.py", "drawn[low - start : high - start]", "drawn[: high - low]",
             "test_tensor_parallel.py::test_random_weights_of_a_rank_are_its_part_of_the_whole"),
    _backend("models/dsa.py", "return x + self.rank.sum(self.mlp(", "return x + (self.mlp(",
             "test_tensor_parallel.py::test_two_ranks_equal_one"),
    _backend("split.py", "home[source] != cuts:", "False:",
             "test_tensor_parallel.py::test_sums_among_writes_reads_and_cuts"),
    _backend("models/checkpoint.py", "((start + torch.arange(n)) // b", "(torch.arange(n) // b",
             "test_weights.py::test_block_scaled_float8"),
    _backend("models/weights.py", "extra = [name for name in tensors if", "extra = [name for name in () if",
             "test_weights.py::test_every_fault_is_named_and_nothing_is_read"),
    _backend("models/weights.py", "if given.shape != shapes[name]:", "if False:",
             "test_weights.py::test_every_fault_is_named_and_nothing_is_read"),
    _backend("integrations/transformers.py", "elif tensor.dtype != dtype and not", "elif False and not",
             "test_hf_convert.py::test_what_cannot_be_converted_is_named_and_left_alone"),
    _backend("integrations/transformers.py", "parameter.data = rows", "rows",
             "test_hf_convert.py::test_all_memory_is_shared"),
    _backend("integrations/transformers.py", "elif tensor.dtype not in DTYPES:", "elif False:",
             "test_hf_convert.py::test_what_cannot_be_converted_is_named_and_left_alone"),
    # SGLang: known releases, the choice of a variant, state that a replay reads, waiting, phases of a piece
    _sglang("__init__.py", "FIRST, LAST = (0, 5, 13)", "FIRST, LAST = (0, 5, 12)"),
    _sglang("deployment.py", "int(lens.max()) <= self.index_topk", "int(lens.max()) <= self.index_topk + 1"),
    _sglang("deployment.py", "counter.wait_until(counter.num_layers - 1)", "counter.wait_until(0)"),
    _sglang("deployment.py", '"dsa_index_kpool", None) or 1)', '"dsa_kpool", None) or 1)'),
    _sglang("variants.py", "self.serving.rows.fill(forward_batch, bucket)", "pass"),
    _sglang("variants.py", "if self.chosen == CUT or self.serving.needs_metadata or", "if False and"),
    _sglang("recording.py", "selection[:, 0] = 0", "pass"),
    _sglang("recording.py", "return now.variant == SHORT", "return True"),
    _sglang("rows.py", "torch.where(valid, seen.clamp(max=self.index_topk), 1)", "torch.where(valid, seen, 1)"),
    _sglang("breakable.py", "            block.alt_stream = None", "            pass", "0.5.17"),
    # The NextN draft: another graph's selection, a seed of the wrong rows or variant, what is no prefill of tokens
    _sglang("draft.py", "found[:] = [output[-1]]", "found[:] = found or [output[-1]]"),
    _sglang("draft.py", "if rows is None else selection[rows]", "if True else selection[rows]", "0.5.17"),
    _sglang("breakable.py", "draft.selections[size, self.variants.chosen]", "draft.selections[size, CUT]"),
    _sglang("breakable.py", "with self._replaying():", "if True:"),
    _sglang("draft.py", "if not forward_batch.forward_mode.is_extend_without_speculative():", "if False:"),
    _sglang("draft.py", " or forward_batch.contains_mm_inputs():", ":"),
    _sglang("draft.py", "_index_by_layer(cuda_graph_runner, self._decoder.self_attn.layer_id)", "pass", "0.5.17"),
    _sglang("hooks.py", "if is_one_layer_view(cuda_graph_runner.model_runner):", "if False:"),
    _sglang("deployment.py", "return reasons.get(DRAFT) or", "return"),
    _sglang("served_graph.py", "if self._visits[tokens] > 1:", "if self._visits[tokens] > 2:", "0.5.14"),
    _sglang("compiled_prefill.py", "if stream is None:", "if False:", "0.5.14"),
    _sglang("compiled_prefill.py", "elif self._plain:", "elif False:", "0.5.13.post1"),
    _sglang("compiled_prefill.py", "record_prefill(variant, pool=self._pool,", "record_prefill(variant, pool=(9, 9),",
            "0.5.13.post1"),
    _sglang("deployment.py", "before + 1 if padding is None else", "0 if padding is None else", "0.5.14"),
    _sglang("hooks.py", "elif model_runner.is_draft_worker:", "elif False:", "0.5.13.post1"),
    _sglang("piecewise_runner.py", "                own(body, **kwargs)", "                raise", "0.5.13.post1"),
    _sglang("piecewise_runner.py", "            self._prepare_forward_metadata_for_replay(batch, None, bucket)",
            "            self._init_forward_metadata(batch)", "0.5.13.post1"),
    _sglang("piecewise_runner.py", "len(forward_batch.input_ids))]", "len(forward_batch.input_ids) + 1)]",
            "0.5.13.post1"),
    _sglang("served_graph.py", "self._bridges.append(result)", "pass", "0.5.14"),
    _sglang("deployment.py", 'fused = _environment("SGLANG_DSA_FUSE_TOPK")', "fused = True", "0.5.14"),
    _sglang("variants.py", " or self.serving.uncaptured:", ":", "0.5.14"),
    _sglang("variants.py", "self._held.append(getattr(backend,", "print(getattr(backend,"),
    _sglang("piecewise.py", 'getattr(shape_key, "size", shape_key)', "shape_key.size", "0.5.14"),
    _sglang("deployment.py", "self.floor <= bucket <= self.ceiling", "self.floor <= bucket"),
    _sglang("deployment.py", "len(short), _cuts(short),", "len(short), 0,"),
    _sglang("deployment.py", 'if _environment("SGLANG_DSA_TOPK_BROADCAST"):', "if False:"),
    _sglang("segments.py", "not any(_EMPTY in str(w.message) for w in said)", "True"),
    _sglang("segments.py", '                warnings.simplefilter("always")', "                pass"),
    _sglang("hooks.py", "if not is_sparse(serving.attn_backend):", "if False:", "0.5.14"),
    _sglang("hooks.py", "if not is_sparse(model_runner.attn_backend):", "if False:", "0.5.13.post1"),
    _sglang("hooks.py", "elif model_runner.spec_algorithm.is_eagle() and", "elif False and", "0.5.13.post1"),
    _sglang("compiled_prefill.py", "            graph.drop()", "            pass", "0.5.13.post1"),
    _sglang("compiled_prefill.py", " and self.variants.graphs:", ":", "0.5.13.post1"),
    _sglang("recording.py", "delattr(owner, name) if own is owner else setattr(owner, name, own)",
            "setattr(owner, name, getattr(owner, name) if own is owner else own)", "0.5.13.post1"),
    _sglang("piece_class.py", "if _addresses(args) != held.addresses:", "if False:", "0.5.14"),
    _sglang("piece_class.py", "if held is None or layout.warms_up():", "if held is None:", "0.5.14"),
    # Streams and events that Dynamo hands over by number; Triton kernels of the model; the bench of SGLang's one_batch
    _backend("plan.py", 'inputs), self.objects.in_table():', 'inputs):',
             "test_handed_objects.py::test_a_run_past_dynamo_finds_the_objects_of_its_own_graph"),
    _backend("plan.py", "plan.steps = program.objects.around(plan.steps)", "pass",
             "test_handed_objects.py::test_a_run_past_dynamo_finds_the_objects_of_its_own_graph"),
    _backend("compiled_graph.py", "            self.program.objects.keep()", "            pass",
             "test_handed_objects.py::test_a_call_through_dynamo_brings_its_own_objects"),
    _backend("handed_objects.py", "found if self._numbers is None else self._numbers & set(found)", "found",
             "test_handed_objects.py::test_objects_that_the_graph_does_not_read_are_not_kept"),
    _backend("handed_objects.py", "None if hidden else {", "{",
             "test_handed_objects.py::test_of_a_leaf_function_all_objects_are_kept"),
    _backend("rewrite.py", "    drop_unread(gm.graph)", "    pass",
             "test_handed_objects.py::test_a_stream_that_is_only_asked_for_is_no_part_of_the_graph"),
    _backend("analysis.py", "self.facts.writes |= {storage_of(values[n]) for n in written if",
             "self.facts.writes |= {storage_of(values[n]) for n in values if",
             "test_triton_kernels.py::test_kernels_of_the_model_are_in_pieces_and_what_they_write_is_known"),
    _backend("pieces.py", 'named["constant_args_idx"] = tuple(', "_ = tuple(",
             "test_triton_kernels.py::test_kernels_of_the_model_are_in_pieces_and_what_they_write_is_known"),
    Mutant("sparse_pcg/bench/one_batch.py", "< MOVES:", "< 0.0:",
           "tests/sglang/test_one_batch.py::test_turns_medians_and_ratios"),
    Mutant("sparse_pcg/bench/one_batch.py", "size: taken[1:] for", "size: taken for",
           "tests/sglang/test_one_batch.py::test_turns_medians_and_ratios"),
    Mutant("sparse_pcg/bench/one_batch_worker.py", "with slots_in_order():", "if True:",
           "tests/sglang/test_one_batch.py::test_a_prompt_says_how_far_its_runs_lie_apart"),
    Mutant("sparse_pcg/bench/one_batch_worker.py", "relative_l2(plain, logits)", "relative_l2(again, logits)",
           "tests/sglang/test_one_batch.py::test_a_prompt_says_how_far_its_runs_lie_apart"),
    Mutant("sparse_pcg/bench/one_batch_weights.py", "bound = scale * math.sqrt(3", "bound = 1e-3 * (3",
           "tests/sglang/test_one_batch.py::test_the_invented_weights_let_the_context_reach_the_last_token"),
    Mutant("sparse_pcg/bench/cli.py", "[*batches, part]", "[part]",
           "tests/sglang/test_one_batch.py::test_one_command_gives_both_parts_and_the_first_stays"),
]  # fmt: skip


def _run(tree: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "CI": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def survivors(mutants: list[Mutant]) -> list[str]:
    """Run the tests with and without each fault; a line for everything that is not as it should be."""
    found = []
    for mutant in mutants:
        if not _can_run(mutant):
            print("not run", mutant.file, "(python -m tests.sglang.releases fetches what its test needs)")
    mutants = [mutant for mutant in mutants if _can_run(mutant)]
    if not mutants:
        return found
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
