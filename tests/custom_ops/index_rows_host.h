// What index_rows.cuh and the kernels that include it need of CUDA beyond cuda_host.h. Included before the kernel.
#include "tests/custom_ops/cuda_host.h"

// To nearest, ties to even, saturating; of the magnitude: 3 bits of mantissa from 2^-6 on, below it steps of 2^-9.
inline unsigned e4m3(float x) {
    const unsigned sign = __float_as_uint(x) >> 24 & 0x80;
    if (x != x) return 0x7f;
    const float size = std::fabs(x);
    if (size > 448) return sign | 0x7e;
    int exponent = size < 0.015625f ? -6 : std::ilogb(size);
    const float steps = std::nearbyint(std::ldexp(size, 3 - exponent));  // 8 to 16 of a normal number
    return sign | (steps < 8 ? (unsigned)steps : (unsigned)steps - 8 + (exponent + 7) * 8);
}
inline unsigned quantised(float a, float b, float c, float d) {
    return e4m3(a) | e4m3(b) << 8 | e4m3(c) << 16 | e4m3(d) << 24;
}
inline unsigned larger_halves(unsigned a, unsigned b) {
    return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16;
}
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float reciprocal(float x) { return 1.0f / x; }  // rounded as a division is, unlike a GPU's
