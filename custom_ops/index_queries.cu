// The indexer's bfloat16 queries, rotated, transformed and quantised in one pass; index_prepare.py states what of.
//
// THREADS a block, four a row (index_rows.cuh says what each holds); BLOCKS_PER_SM at least.

#include "index_rows.cuh"

struct Arguments {
    const uint4* q;
    const long long* positions;
    const float4* table;
    uint2* q_fp8;
    float* q_scale;
    long long token_stride;  // of 8 elements, as head_stride
    long long head_stride;
    int rows;  // tokens * heads
    int heads;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) prepare_queries(const Arguments a) {
    const int mine = (blockIdx.x * THREADS + threadIdx.x) / 4, part = threadIdx.x & 3;
    const int row = min(mine, a.rows - 1);  // all lanes stay: they exchange what they hold
    const int token = (unsigned)row / (unsigned)a.heads, head = row - token * a.heads;
    float x[4][8];
    read_row(a.q + token * a.token_stride + head * a.head_stride, part, x);
    rotate(x, read_angles(a.table, a.positions[token], part));
    transform(x, part);
    const Scale scale = scale_of(round_row(x));
    if (mine >= a.rows) return;
    write_codes(x, scale.inverse, a.q_fp8 + (long long)row * 16 + part);
    if (part == 0) a.q_scale[row] = __uint_as_float(scale.bits);
}
