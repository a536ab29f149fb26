// The indexer's bfloat16 keys, normalised, rotated, transformed, quantised and stored to the paged index-K cache in one
// pass; index_prepare.py states what of. LayerNorm's values are rounded to bfloat16, as each step's are.
//
// THREADS a block, four a row (index_rows.cuh says what each holds); BLOCKS_PER_SM at least. AFFINE: what weight and
// bias are read by, float4 of float32 or uint4 of bfloat16.

#include "index_rows.cuh"

#ifndef CUDA_HOST

// 1 / x as Triton divides, up to two units of the last place off: the bits are to be the same.
__device__ __forceinline__ float reciprocal(float x) {
    float quotient;
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(1.0f), "f"(x));
    return quotient;
}

#endif  // CUDA_HOST

struct Arguments {
    const uint4* k;
    const AFFINE* weight;
    const AFFINE* bias;  // or null
    const long long* positions;
    const float4* table;
    unsigned char* cache;
    const long long* slots;
    long long row_stride;  // of 8 elements
    int rows;
    float eps;
};

// The sum over the row of what ``element`` gives for c, i. A thread adds eight elements side by side one by one; the
// sixteen sums are added by halves, those farthest apart first. Triton 3.6 does so with rows that begin at multiples of
// 16 elements; others and later versions have their own orders.
template <class Element>
__device__ __forceinline__ float row_sum(Element element) {
    float sums[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        sums[c] = element(c, 0);
#pragma unroll
        for (int i = 1; i < 8; ++i) sums[c] += element(c, i);
    }
    float sum = (sums[0] + sums[2]) + (sums[1] + sums[3]);
#pragma unroll
    for (int lanes = 2; lanes > 0; lanes /= 2) {
        sum += __uint_as_float(__shfl_xor_sync(EVERY_LANE, __float_as_uint(sum), lanes));
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) prepare_keys(const Arguments a) {
    const int mine = (blockIdx.x * THREADS + threadIdx.x) / 4, part = threadIdx.x & 3;
    const int row = min(mine, a.rows - 1);  // all lanes stay: they exchange what they hold
    float x[4][8], weight[4][8], bias[4][8];
    read_row(a.k + row * a.row_stride, part, x);
    const long long slot = a.slots[row];
    const Angles angles = read_angles(a.table, a.positions[row], part);
    read_row(a.weight, part, weight);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int i = 0; i < 8; ++i) bias[c][i] = -0.0f;  // added to anything, it leaves that as it is
    }
    if (a.bias) read_row(a.bias, part, bias);
    const float mean = row_sum([&](int c, int i) { return x[c][i]; }) * 0.0078125f;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[c][i] -= mean;
    }
    const float variance = row_sum([&](int c, int i) { return x[c][i] * x[c][i]; }) * 0.0078125f;
    const float rstd = reciprocal(__fsqrt_rn(variance + a.eps));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[c][i] = x[c][i] * rstd * weight[c][i] + bias[c][i];
        round_eight(x[c]);
    }
    rotate(x, angles);
    transform(x, part);
    const Scale scale = scale_of(round_row(x));
    if (mine >= a.rows) return;
    unsigned char* page = a.cache + (slot >> 6) * 8448;  // 64 tokens of 128 codes, then their scales
    const int token = (int)slot & 63;
    write_codes(x, scale.inverse, (uint2*)(page + token * 128) + part);
    if (part == 0) ((float*)(page + 8192))[token] = __uint_as_float(scale.bits);
}
