// What the indexer's queries and keys have in common: a row of 128 bfloat16, rotated, transformed and quantised.
//
// Four threads a row: thread j of them holds the elements 32 c + 8 j + i, c < 4 and i < 8, as x[c][i]. So every access
// to memory is of 16 bytes (8 of a result), the two halves of a rotated pair are in one thread, and so are the pairs of
// five of the transform's seven stages; for the other two the four pass their elements around. Sums are taken in the
// order of ``hadamard_reference``; nothing is contracted (--fmad=false), what is fused is so by name.

#include "machine.cuh"

#ifndef CUDA_HOST

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

#endif  // CUDA_HOST

constexpr unsigned EVERY_LANE = 0xffffffffu;
constexpr unsigned INFINITE = 0x7f800000u;
constexpr unsigned LEAST = 0x38d1b717u;  // 1e-4, below which no largest element lies
constexpr unsigned PASSED = 0x7fffffu - 0x600000u;  // carries a mantissa above 1.75 into the exponent

__device__ __forceinline__ void widen(uint4 chunk, float (&x)[8]) {
    const unsigned pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 both = widened(pairs[i]);
        x[2 * i] = both.x;
        x[2 * i + 1] = both.y;
    }
}

// The elements from 8 n on: of bfloat16, of float32.
__device__ __forceinline__ void read_eight(const uint4* source, int n, float (&x)[8]) {
    widen(source[n], x);
}
__device__ __forceinline__ void read_eight(const float4* source, int n, float (&x)[8]) {
    const float4 low = source[2 * n], high = source[2 * n + 1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// What thread ``part`` of a row's four holds of 128 elements.
template <class Quad>
__device__ __forceinline__ void read_row(const Quad* source, int part, float (&x)[4][8]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) read_eight(source, 4 * c + part, x[c]);
}

struct Angles {
    float cosine[8], sine[8];
};

__device__ __forceinline__ Angles read_angles(const float4* table, long long position, int part) {
    const float4* row = table + position * 16;
    Angles angles;
    read_eight(row, part, angles.cosine);
    read_eight(row, 4 + part, angles.sine);
    return angles;
}

// Rounds to bfloat16; returns the pairs.
__device__ __forceinline__ uint4 round_eight(float (&x)[8]) {
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = narrowed(x[2 * i], x[2 * i + 1]);
    const uint4 chunk = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    widen(chunk, x);
    return chunk;
}

// Element i of the first chunk turns with that of the second, 32 dims behind it; both are rounded.
__device__ __forceinline__ void rotate(float (&x)[4][8], const Angles& angles) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float first = x[0][i] * angles.cosine[i] - x[1][i] * angles.sine[i];
        x[1][i] = x[1][i] * angles.cosine[i] + x[0][i] * angles.sine[i];
        x[0][i] = first;
    }
    round_eight(x[0]);
    round_eight(x[1]);
}

__device__ __forceinline__ void butterfly(float& a, float& b) {
    const float sum = a + b;
    b = a - b;
    a = sum;
}

__device__ __forceinline__ void transform(float (&x)[4][8], int part) {
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
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[c][i] *= 0.08838834764831845f;
    }
}

// Rounds the row; returns the bits of its largest magnitude as a float's, NaN above everything.
__device__ __forceinline__ unsigned round_row(float (&x)[4][8]) {
    unsigned largest = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const uint4 pairs = round_eight(x[c]);
        largest = larger_halves(largest, pairs.x & 0x7fff7fffu);
        largest = larger_halves(largest, pairs.y & 0x7fff7fffu);
        largest = larger_halves(largest, pairs.z & 0x7fff7fffu);
        largest = larger_halves(largest, pairs.w & 0x7fff7fffu);
    }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
        largest = larger_halves(largest, __shfl_xor_sync(EVERY_LANE, largest, lanes));
    }
    return max(largest >> 16, largest & 0xffffu) << 16;
}

struct Scale {
    unsigned bits;
    float inverse;
};

// The power of two from largest / 448 upwards: 448 is 1.75 * 2^8, and no bfloat16 is so near to a multiple of it by a
// power of two that the quotient's rounding would matter.
__device__ __forceinline__ Scale scale_of(unsigned largest) {
    if (largest >= INFINITE) return {largest, largest == INFINITE ? 0.0f : __uint_as_float(largest)};
    const unsigned scale = ((max(largest, LEAST) + PASSED) & INFINITE) - (8u << 23);
    return {scale, __uint_as_float(0x7f000000u - scale)};
}

// target: the row's first code of this thread.
__device__ __forceinline__ void write_codes(const float (&x)[4][8], float inverse, uint2* target) {
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
}
