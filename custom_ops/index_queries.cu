// The indexer's bfloat16 queries, rotated, transformed and quantised in one pass; index_prepare.py states what of.
//
// Four threads a row: thread j of them holds the elements 32 c + 8 j + i, c < 4 and i < 8. So every access to memory is
// of 16 bytes (8 of a result), the two halves of a rotated pair are in one thread, and so are the pairs of five of the
// transform's seven stages; for the other two the four pass their elements around. Sums are taken in the order of
// ``hadamard_reference``; nothing is contracted (--fmad=false), what is fused is so by name.
//
// THREADS a block; BLOCKS_PER_SM at least.

#ifndef QUERIES_HOST

__device__ __forceinline__ float2 widened(unsigned pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Two floats rounded to bfloat16.
__device__ __forceinline__ unsigned narrowed(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Four floats as e4m3, side by side.
__device__ __forceinline__ unsigned quantised(float a, float b, float c, float d) {
    unsigned codes;
    asm("{ .reg .b16 low, high;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
        "mov.b32 %0, {low, high}; }" : "=r"(codes) : "f"(a), "f"(b), "f"(c), "f"(d));
    return codes;
}

// The larger of each of the two unsigned halves.
__device__ __forceinline__ unsigned larger_halves(unsigned a, unsigned b) {
    unsigned both;
    asm("max.u16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}

#endif  // QUERIES_HOST

constexpr unsigned EVERY_LANE = 0xffffffffu;
constexpr unsigned INFINITE = 0x7f800000u;
constexpr unsigned LEAST = 0x38d1b717u;  // 1e-4, below which no largest element lies
constexpr unsigned PASSED = 0x7fffffu - 0x600000u;  // carries a mantissa above 1.75 into the exponent

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

__device__ __forceinline__ void butterfly(float& a, float& b) {
    const float sum = a + b;
    b = a - b;
    a = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) prepare_queries(const Arguments a) {
    const int mine = (blockIdx.x * THREADS + threadIdx.x) / 4, part = threadIdx.x & 3;
    const int row = min(mine, a.rows - 1);  // all lanes stay: they exchange what they hold
    const int token = (unsigned)row / (unsigned)a.heads, head = row - token * a.heads;
    const uint4* source = a.q + token * a.token_stride + head * a.head_stride + part;
    const float4* angles = a.table + a.positions[token] * 16 + 2 * part;
    const uint4 chunks[4] = {source[0], source[4], source[8], source[12]};
    const float4 cosines[2] = {angles[0], angles[1]}, sines[2] = {angles[8], angles[9]};
    float x[4][8];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const unsigned pairs[4] = {chunks[c].x, chunks[c].y, chunks[c].z, chunks[c].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 both = widened(pairs[i]);
            x[c][2 * i] = both.x;
            x[c][2 * i + 1] = both.y;
        }
    }
    const float cosine[8] = {cosines[0].x, cosines[0].y, cosines[0].z, cosines[0].w,
                             cosines[1].x, cosines[1].y, cosines[1].z, cosines[1].w};
    const float sine[8] = {sines[0].x, sines[0].y, sines[0].z, sines[0].w, sines[1].x, sines[1].y, sines[1].z, sines[1].w};
    // Element i of the first chunk turns with that of the second, 32 dims behind it.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float first = x[0][i] * cosine[i] - x[1][i] * sine[i];
        x[1][i] = x[1][i] * cosine[i] + x[0][i] * sine[i];
        x[0][i] = first;
    }
    auto round_pairs = [&](int c, unsigned* pairs) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pairs[i] = narrowed(x[c][2 * i], x[c][2 * i + 1]);
            const float2 both = widened(pairs[i]);
            x[c][2 * i] = both.x;
            x[c][2 * i + 1] = both.y;
        }
    };
    unsigned rounded[4];
    round_pairs(0, rounded);
    round_pairs(1, rounded);
#pragma unroll
    for (int half = 1; half < 8; half *= 2) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (!(i & half)) butterfly(x[c][i], x[c][i + half]);
            }
        }
    }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
        const float sign = part & lanes ? -1.0f : 1.0f;  // the product is exact: the sum alone is rounded
#pragma unroll
        for (int c = 0; c < 4; ++c) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const unsigned other = __shfl_xor_sync(EVERY_LANE, __float_as_uint(x[c][i]), lanes);
                x[c][i] = __fmaf_rn(x[c][i], sign, __uint_as_float(other));
            }
        }
    }
#pragma unroll
    for (int half = 1; half < 4; half *= 2) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (!(c & half)) butterfly(x[c][i], x[c + half][i]);
            }
        }
    }
    // Magnitudes of bfloat16 are in the order of their bits, NaN above everything.
    unsigned largest = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[c][i] *= 0.08838834764831845f;
        round_pairs(c, rounded);
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = larger_halves(largest, rounded[i] & 0x7fff7fffu);
    }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
        largest = larger_halves(largest, __shfl_xor_sync(EVERY_LANE, largest, lanes));
    }
    largest = max(largest >> 16, largest & 0xffffu) << 16;
    // The power of two from largest / 448 upwards: 448 is 1.75 * 2^8, and no bfloat16 is so near to a multiple of it
    // by a power of two that the quotient's rounding would matter.
    unsigned scale = ((max(largest, LEAST) + PASSED) & INFINITE) - (8u << 23);
    float inverse = __uint_as_float(0x7f000000u - scale);
    if (largest >= INFINITE) {
        scale = largest;
        inverse = largest == INFINITE ? 0.0f : __uint_as_float(largest);
    }
    if (mine >= a.rows) return;
    uint2* target = a.q_fp8 + (long long)row * 16 + part;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        unsigned codes[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            codes[i] = quantised(x[c][4 * i] * inverse, x[c][4 * i + 1] * inverse, x[c][4 * i + 2] * inverse,
                                 x[c][4 * i + 3] * inverse);
        }
        target[4 * c] = make_uint2(codes[0], codes[1]);
    }
    if (part == 0) a.q_scale[row] = __uint_as_float(scale);
}
