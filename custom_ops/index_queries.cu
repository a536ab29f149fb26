// The indexer's bfloat16 queries, rotated, transformed and quantised in one pass; index_prepare.py states what of.
//
// THREADS a block, four a row (index_rows.cuh says what each holds); BLOCKS_PER_SM at least. Any number of blocks will
// do: each takes rows until none are left, and reads the next ones while it computes.

#include "index_rows.cuh"

struct Arguments {
    const uint4* q;
    const long long* positions;
    const float4* table;
    uint2* q_fp8;
    float* q_scale;
    long long token_stride;  // of 8 elements, as head_stride
    long long head_stride;
    unsigned rows;  // tokens * heads, up to 2^31: with all blocks' rows on top it is still a number
    unsigned heads;
};

constexpr unsigned ROWS = THREADS / 4;  // of a block at a time

struct Loaded {
    uint4 chunks[4];  // of which each x[c] is made
    long long position;
};

// What thread ``part`` of a row's four needs of it. Behind the last row it is the last: all lanes stay, they exchange
// what they hold.
__device__ __forceinline__ Loaded load_row(const Arguments& a, unsigned row, int part) {
    row = min(row, a.rows - 1);
    const unsigned token = row / a.heads, head = row - token * a.heads;
    const uint4* source = a.q + token * a.token_stride + head * a.head_stride;
    Loaded loaded;
#pragma unroll
    for (int c = 0; c < 4; ++c) loaded.chunks[c] = source[4 * c + part];
    loaded.position = a.positions[token];
    return loaded;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) prepare_queries(const Arguments a) {
    const int part = threadIdx.x & 3;
    const unsigned step = gridDim.x * ROWS;
    Loaded next = load_row(a, blockIdx.x * ROWS + threadIdx.x / 4, part);
    // Bounded by the block's first row, not by each thread's own: the compiler sees that warps stay together.
    for (unsigned first = blockIdx.x * ROWS; first < a.rows; first += step) {
        const unsigned row = first + threadIdx.x / 4;
        const Angles angles = read_angles(a.table, next.position, part);
        float x[4][8];
#pragma unroll
        for (int c = 0; c < 4; ++c) widen(next.chunks[c], x[c]);
        next = load_row(a, row + step, part);
        rotate(x, angles);
        transform(x, part);
        const Scale scale = scale_of(round_row(x));
        if (row < a.rows) {
            write_codes(x, scale.inverse, a.q_fp8 + (long long)row * 16 + part);
            if (part == 0) a.q_scale[row] = __uint_as_float(scale.bits);
        }
    }
}
