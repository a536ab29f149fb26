// What a block of sparse_mla.cu keeps in its shared memory, and how tiles, sums and softmax states are laid out.

#include "sparse_mla_machine.cuh"

constexpr unsigned ALL = 0xffffffffu;
constexpr int BF16 = 0, PACKED = 1;
constexpr int THREADS = 256;
constexpr int PARTS = 8;
constexpr int TILE = 32;    // tokens
constexpr int SHARES = 4;   // warps that add up the score of a token
constexpr int LATENT = 512;
constexpr int WIDTH = LATENT + 64;
constexpr int STEPS = WIDTH / 16 / SHARES;
constexpr int STORED = LAYOUT == BF16 ? 2 * WIDTH : LAYOUT == PACKED ? LATENT + 16 + 128 : WIDTH;  // bytes of a token
// Bytes from token to token, ready for the products. Eight of them lie in different banks: lines are permuted where
// threads copy them, who want them whole; else there is a gap, which makes shorter work of the addresses.
constexpr int WIDE = 2 * WIDTH + (LAYOUT == BF16 ? 0 : 16);
constexpr int HEADS = 8 * HEAD_TILES;
constexpr int SCORE_PITCH = TILE + 4;  // as RESULT_PITCH: eight heads lie in different banks
constexpr int RESULT_PITCH = LATENT + 4;
#define NOTHING __uint_as_float(0xff800000u)

struct State {
    float sums[HEADS][RESULT_PITCH];
    float peak[HEADS];
    float total[HEADS];
};

struct Shared {
    unsigned char stages[STAGES][TILE * STORED];  // of the first: the row's state, in the end
    unsigned char wide[LAYOUT == BF16 ? 16 : TILE * WIDE];
    float scores[SHARES][HEADS][SCORE_PITCH];  // the weights, bfloat16, in place of the first share
    float shrink[HEADS];
    float2 fold[HEADS];
    unsigned long long full[STAGES];
    int live[STAGES][TILE];
    alignas(16) State saved;  // of the first half of a row, or of the part where eight blocks share it
};

// In the order of the bits: NaN is above or below everything.
__device__ __forceinline__ float warp_max(float x) {
    const unsigned bits = __float_as_uint(x), key = bits >> 31 ? ~bits : bits | 0x80000000u;
    const unsigned largest = __reduce_max_sync(ALL, key);
    return __uint_as_float(largest >> 31 ? largest & 0x7fffffffu : ~largest);
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = 16; d; d /= 2) x += __uint_as_float(__shfl_xor_sync(ALL, __float_as_uint(x), d));
    return x;
}
__device__ __forceinline__ float anchor_of(float peak) { return peak == NOTHING ? 0.0f : peak; }

// Where 16-byte piece ``piece`` of a token of a wide tile lies.
__device__ __forceinline__ int place(int token, int piece) {
    return token * WIDE + (LAYOUT == BF16 ? piece / 8 * 128 + ((piece ^ token) & 7) * 16 : 16 * piece);
}

// 16 float8 codes times a factor, as the two pieces from ``piece``.
__device__ __forceinline__ void widen(unsigned char* tile, const uint4& codes, int token, int piece, float factor,
                                      bool second_first) {
    const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
    unsigned pairs[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 low = widened_e4m3(words[i]), high = widened_e4m3(words[i] >> 16);
        pairs[2 * i] = narrowed(low.x * factor, low.y * factor);
        pairs[2 * i + 1] = narrowed(high.x * factor, high.y * factor);
    }
    const uint4 first = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    const uint4 second = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
    // Eight threads of a token: half of them start with the odd pieces, else they would meet in four banks.
    *reinterpret_cast<uint4*>(tile + place(token, piece + second_first)) = second_first ? second : first;
    *reinterpret_cast<uint4*>(tile + place(token, piece + !second_first)) = second_first ? first : second;
}

// A stored tile of float8 rows as bfloat16.
__device__ __forceinline__ void widen_tile(unsigned char* tile, const unsigned char* stored) {
    const int token = threadIdx.x / 8, sub = threadIdx.x % 8;
    const uint4* from = reinterpret_cast<const uint4*>(stored + token * STORED);
    constexpr int ROPE_AT = (LATENT + (LAYOUT == PACKED ? 16 : 0)) / 16, ROPES = LAYOUT == PACKED ? 8 : 4;
    uint4 codes[4], rope;
    float4 scales = {1.0f, 1.0f, 1.0f, 1.0f};
#pragma unroll
    for (int j = 0; j < 4; ++j) codes[j] = from[sub + 8 * j];
    if (LAYOUT == PACKED) scales = *reinterpret_cast<const float4*>(from + LATENT / 16);
    if (sub < ROPES) rope = from[ROPE_AT + sub];
    const float factors[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) widen(tile, codes[j], token, 2 * (sub + 8 * j), factors[j], sub >= 4);
    if (LAYOUT == PACKED) {
        *reinterpret_cast<uint4*>(tile + place(token, 64 + sub)) = rope;
    } else if (sub < ROPES) {
        widen(tile, rope, token, 64 + 2 * sub, 1.0f, false);
    }
}

// Fragments of 16 by 8 sums: dims (threadIdx.x % 32) / 4 and 8 more, heads 2 (threadIdx.x % 4) and one more.
using Sums = float[4][HEAD_TILES][4];

// peak(n), total(n): of the warp's n-th head.
template <class Peak, class Total>
__device__ __forceinline__ void store_state(State& state, const Sums& sums, const Peak& peak, const Total& total) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int n = 0; n < HEAD_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                state.sums[8 * n + lane % 4 * 2 + i % 2][64 * warp + 16 * m + lane / 4 + i / 2 * 8] = sums[m][n][i];
            }
        }
    }
#pragma unroll
    for (int n = 0; n < HEAD_TILES; ++n) {
        if (lane == 0) state.peak[8 * n + warp] = peak(n), state.total[8 * n + warp] = total(n);
    }
}

struct Merged {
    float peak = NOTHING, total = 0.0f;
    float old, fresh;  // factors of the last merge

    __device__ __forceinline__ void add(float peak_of_part, float total_of_part) {
        const float raised = fmaxf(peak, peak_of_part), anchor = anchor_of(raised);
        old = power_of_two(peak - anchor);
        fresh = power_of_two(peak_of_part - anchor);
        total = __fmaf_rn(total, old, total_of_part * fresh);
        peak = raised;
    }
};
