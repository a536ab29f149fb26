// sparse_mla of few heads, in one pass over the selected tokens; custom_ops/sparse_mla.py states what of.
//
// A row's selection is eight parts of ``part`` tokens. Each starts from an empty softmax state; those of a half are
// merged in order, then the halves. So the bits are the same whether one block takes a row or a cluster of 2 or 8 blocks
// shares it. A block takes TILE tokens at a time; while it computes, the STAGES - 1 tiles behind are on their way
// to its shared memory. Tokens and latent dims are the rows of the products and heads their columns, of which a tile has
// eight: few heads leave none of it empty. Scores: two warps for the tokens, times four for the dims. Softmax: a warp a
// head. Result: a warp 64 dims.
//
// LAYOUT: 0 bf16, 1 fp8_packed, 2 fp8; HEAD_TILES: of eight heads; STAGES; BLOCKS_PER_SM.

#ifndef SPARSE_MLA_HOST

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// Copies 16 bytes to shared memory, or puts zeros there.
__device__ __forceinline__ void copy_async(void* target, const void* source, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(target)), "l"(source), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// A barrier of shared memory that ``arrivals`` threads complete, together with the bytes that they announce.
__device__ __forceinline__ void set_up(unsigned long long* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void announce(unsigned long long* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void await(unsigned long long* barrier, int parity) {
    asm volatile("{ .reg .pred done;\n\t"
                 "again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n\t"
                 "@!done bra again; }" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}
// Copies to shared memory by the engine that counts on the barrier.
__device__ __forceinline__ void copy_bulk(void* target, const void* source, int bytes, unsigned long long* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(target)), "l"(source), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
// What was written before comes before what that engine writes later.
__device__ __forceinline__ void order_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8x8 tiles of 16-bit elements; lane i gives where row i % 8 of tile i / 8 begins.
__device__ __forceinline__ void load_tiles(unsigned (&a)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void load_transposed(unsigned (&a)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(shared_address(row)) : "memory");
}

// c [16, 8] += a [16, 16] @ b [16, 8]
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats rounded to bfloat16.
__device__ __forceinline__ unsigned narrowed(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The lower two of four e4m3.
__device__ __forceinline__ float2 widened_e4m3(unsigned codes) {
    float2 both;
    asm("{ .reg .b16 low, high; .reg .b32 pair; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 pair, low;\n\t"
        "mov.b32 {low, high}, pair; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(both.x), "=f"(both.y) : "r"(codes));
    return both;
}

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ unsigned cluster_size() {
    unsigned size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// What lies at ``mine`` in another block of the cluster.
__device__ __forceinline__ float load_of(unsigned rank, const float* mine) {
    float x;
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32 %0, [there]; }"
                 : "=f"(x) : "r"(shared_address(mine)), "r"(rank) : "memory");
    return x;
}

#define dynamic_shared sparse_mla_shared
extern __shared__ __align__(128) unsigned char sparse_mla_shared[];

#endif  // SPARSE_MLA_HOST

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
constexpr int WIDE = 2 * WIDTH + 16;  // from token to token, ready for the products: eight lie in different banks
constexpr int PITCH = LAYOUT == BF16 ? WIDE : STORED;
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
    unsigned char stages[STAGES][TILE * PITCH];  // of the first: the row's state, in the end
    unsigned char wide[LAYOUT == BF16 ? 16 : TILE * WIDE];
    float scores[SHARES][HEADS][SCORE_PITCH];  // the weights, bfloat16, in place of the first share
    float shrink[HEADS];
    float2 fold[HEADS];
    unsigned long long full[STAGES];
    int live[STAGES][TILE];
    alignas(16) State saved;  // of the first half of a row, or of the part where eight blocks share it
};

struct Arguments {
    const unsigned* q;  // pairs of bfloat16
    const unsigned char* cache;
    const int* topk;
    const int* select_lens;
    unsigned* out;  // pairs of bfloat16
    float scale;    // of the scores, for powers of two
    int k;
    int heads;
    int part;  // a multiple of TILE; PARTS of them hold k
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
__device__ __forceinline__ int place(int token, int piece) { return token * WIDE + 16 * piece; }

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

__device__ __forceinline__ void store_sums(State& state, const Sums& sums) {
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

__device__ __forceinline__ void sparse_mla_row(const Arguments& a) {
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned blocks = cluster_size();
    const unsigned rank = cluster_rank();
    const long long row = blockIdx.x / blocks;
    const int length = min(a.select_lens[row], a.k);
    const int each = PARTS / blocks * a.part, begin = rank * each;
    if (length <= each) {  // the first block has all of it
        if (rank) return;
        blocks = 1;
    }
    const int tiles = (max(min(length - begin, each), 0) + TILE - 1) / TILE;

    // Eight threads fetch a token. bf16: each of them copies pieces; else one lets the engine copy it, which takes the
    // row as it is stored and is the faster for such short ones.
    const int my_token = threadIdx.x / 8, sub = threadIdx.x % 8;
    auto load_slot = [&](int tile) {
        const int token = begin + tile * TILE + my_token;
        return tile < tiles && token < length ? a.topk[row * a.k + token] : -1;
    };
    auto fetch = [&](int tile, int slot) {
        if (tile < tiles) {
            if (begin + tile * TILE + my_token == 0) slot = max(slot, 0);  // not where it is loaded: that would wait
            const int stage = tile % STAGES;
            const unsigned char* from = a.cache + (long long)max(slot, 0) * STORED;
            unsigned char* to = s.stages[stage] + my_token * PITCH;
            if (sub == 0) s.live[stage][my_token] = slot >= 0;
            // Zeros where there is no token: weights of zero do not hide what may be NaN.
            if (LAYOUT == BF16) {
                from += 16 * sub;
                to += 16 * sub;
#pragma unroll
                for (int i = 0; i < STORED / 128; ++i) copy_async(to + 128 * i, from + 128 * i, slot >= 0);
            } else {
                if (slot < 0) {
#pragma unroll 1
                    for (int piece = sub; piece < STORED / 16; piece += 8) {
                        reinterpret_cast<uint4*>(to)[piece] = make_uint4(0, 0, 0, 0);
                    }
                    order_before_copies();
                }
                if (sub == 0) {
                    announce(&s.full[stage], slot >= 0 ? STORED : 0);
                    if (slot >= 0) copy_bulk(to, from, STORED, &s.full[stage]);
                }
            }
        }
        if (LAYOUT == BF16) close_copies();  // of none where there is no tile: groups are counted
    };
    if (LAYOUT != BF16) {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 0; i < STAGES; ++i) set_up(&s.full[i], TILE);
            order_before_copies();
        }
        __syncthreads();
    }
    int slots[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; ++i) slots[i] = load_slot(i);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fetch(i, slots[i]);
    int slot = slots[STAGES - 1];

    const int half = warp % 2, share = warp / 2;
    unsigned q[STEPS][HEAD_TILES][2];
#pragma unroll
    for (int n = 0; n < HEAD_TILES; ++n) {
        const int head = 8 * n + lane / 4;
        const unsigned* from = a.q + (row * a.heads + head) * (WIDTH / 2) + share * STEPS * 8 + lane % 4;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            q[step][n][0] = head < a.heads ? from[8 * step] : 0;
            q[step][n][1] = head < a.heads ? from[8 * step + 4] : 0;
        }
    }

    Merged all[HEAD_TILES], first_half[HEAD_TILES];
    float peak[HEAD_TILES], total[HEAD_TILES];  // of the part, of head warp + 8 n; a lane has the total of its tokens
    Sums sums = {}, all_sums = {};
#pragma unroll
    for (int n = 0; n < HEAD_TILES; ++n) peak[n] = NOTHING, total[n] = 0.0f;

    const int tiles_of_part = a.part / TILE;
    int left = tiles_of_part, part = 0;
    float4* aside = reinterpret_cast<float4*>(&s.saved) + threadIdx.x;  // what this thread has of the first half
    // all_sums, from the old and the fresh with the factors of each head.
    auto fold_sums = [&](auto old_of, auto fresh_of) {
        __syncthreads();
#pragma unroll
        for (int n = 0; n < HEAD_TILES; ++n) {
            const float2 one = s.fold[8 * n + lane % 4 * 2], other = s.fold[8 * n + lane % 4 * 2 + 1];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 fold = i % 2 ? other : one;
                    all_sums[m][n][i] = __fmaf_rn(old_of(m, n, i), fold.x, fresh_of(m, n, i) * fold.y);
                }
            }
        }
    };
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % STAGES;
        if (LAYOUT == BF16) await_copies<STAGES - 2>();
        else await(&s.full[stage], tile / STAGES % 2);
        __syncthreads();
        const unsigned char* tokens = s.stages[stage];
        if (LAYOUT != BF16) {
            widen_tile(s.wide, tokens);
            tokens = s.wide;
            __syncthreads();
        }
        // Three chains of sums: one alone would wait for itself.
        float score[3][HEAD_TILES][4] = {};
        unsigned fragments[STEPS][4];
        const unsigned char* mine = tokens + place(16 * half + lane % 16, 2 * share * STEPS + lane / 16);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) load_tiles(fragments[step], mine + place(0, 2 * step));
        fetch(tile + STAGES - 1, slot);
        slot = load_slot(tile + STAGES);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int n = 0; n < HEAD_TILES; ++n) multiply(score[step % 3][n], fragments[step], q[step][n]);
        }
#pragma unroll
        for (int n = 0; n < HEAD_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s.scores[share][8 * n + lane % 4 * 2 + i % 2][16 * half + lane / 4 + i / 2 * 8] =
                    score[0][n][i] + score[1][n][i] + score[2][n][i];
            }
        }
        __syncthreads();
        const bool live = s.live[stage][lane];
#pragma unroll
        for (int n = 0; n < HEAD_TILES; ++n) {
            const int head = 8 * n + warp;
            float x = s.scores[0][head][lane];
#pragma unroll
            for (int i = 1; i < SHARES; ++i) x += s.scores[i][head][lane];
            x = live ? x * a.scale : NOTHING;
            const float raised = fmaxf(peak[n], warp_max(x)), anchor = anchor_of(raised);
            const float weight = power_of_two(x - anchor), shrink = power_of_two(peak[n] - anchor);
            total[n] = __fmaf_rn(total[n], shrink, weight);
            peak[n] = raised;
            // Of every two lanes one writes both; warp_max has let all lanes read their scores.
            const float next = __uint_as_float(__shfl_xor_sync(ALL, __float_as_uint(weight), 1));
            if (lane % 2 == 0) reinterpret_cast<unsigned*>(s.scores[0][head])[lane / 2] = narrowed(weight, next);
            if (lane == 0) s.shrink[head] = shrink;
        }
        __syncthreads();
        unsigned weights[2][HEAD_TILES][2];
        float2 shrinks[HEAD_TILES];
#pragma unroll
        for (int n = 0; n < HEAD_TILES; ++n) {
            const unsigned* of_head = reinterpret_cast<const unsigned*>(s.scores[0][8 * n + lane / 4]) + lane % 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[i / 2][n][i % 2] = of_head[4 * i];
            shrinks[n] = *reinterpret_cast<const float2*>(&s.shrink[8 * n + lane % 4 * 2]);
        }
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
            for (int n = 0; n < HEAD_TILES; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[m][n][i] *= i % 2 ? shrinks[n].y : shrinks[n].x;
            }
        }
        mine = tokens + place(lane / 16 * 8 + lane % 8, 8 * warp + lane / 8 % 2);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            unsigned fragments[4][4];
#pragma unroll
            for (int m = 0; m < 4; ++m) load_transposed(fragments[m], mine + place(16 * step, 2 * m));
#pragma unroll
            for (int m = 0; m < 4; ++m) {
#pragma unroll
                for (int n = 0; n < HEAD_TILES; ++n) multiply(sums[m][n], fragments[m], weights[step][n]);
            }
        }
        if (--left && tile + 1 < tiles) continue;
        left = tiles_of_part;
#pragma unroll
        for (int n = 0; n < HEAD_TILES; ++n) total[n] = warp_sum(total[n]);
        if (blocks > 2) {
            State& state = s.saved;
            store_sums(state, sums);
#pragma unroll
            for (int n = 0; n < HEAD_TILES; ++n) {
                if (lane == 0) state.peak[8 * n + warp] = peak[n], state.total[8 * n + warp] = total[n];
            }
        } else {
#pragma unroll
            for (int n = 0; n < HEAD_TILES; ++n) {
                all[n].add(peak[n], total[n]);
                if (lane == 0) s.fold[8 * n + warp] = {all[n].old, all[n].fresh};
            }
            fold_sums([&](int m, int n, int i) { return all_sums[m][n][i]; },
                      [&](int m, int n, int i) { return sums[m][n][i]; });
        }
        if (++part == PARTS / 2 && blocks == 1) {
#pragma unroll
            for (int n = 0; n < HEAD_TILES; ++n) {
                first_half[n] = all[n];
                all[n] = Merged();
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    float (&x)[4] = all_sums[m][n];
                    aside[(m * HEAD_TILES + n) * THREADS] = make_float4(x[0], x[1], x[2], x[3]);
                    x[0] = x[1] = x[2] = x[3] = 0.0f;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < HEAD_TILES; ++n) {
            peak[n] = NOTHING;
            total[n] = 0.0f;
#pragma unroll
            for (int m = 0; m < 4; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
            }
        }
    }

    if (blocks == 1 && part >= PARTS / 2) {
        __syncthreads();  // everyone has read the factors of the last fold
#pragma unroll
        for (int n = 0; n < HEAD_TILES; ++n) {
            first_half[n].add(all[n].peak, all[n].total);
            all[n] = first_half[n];
            if (lane == 0) s.fold[8 * n + warp] = {all[n].old, all[n].fresh};
        }
        fold_sums([&](int m, int n, int i) { return (&aside[(m * HEAD_TILES + n) * THREADS].x)[i]; },
                  [&](int m, int n, int i) { return all_sums[m][n][i]; });
    }

    // Merge what the blocks have; each block writes its share of the dims.
    State* state = &s.saved;
    if (blocks <= 2) {
        state = reinterpret_cast<State*>(s.stages);
        __syncthreads();  // the stages are free
        store_sums(*state, all_sums);
#pragma unroll
        for (int n = 0; n < HEAD_TILES; ++n) {
            if (lane == 0) state->peak[8 * n + warp] = all[n].peak, state->total[8 * n + warp] = all[n].total;
        }
    }
    if (blocks > 1) cluster_barrier();
    else __syncthreads();
    const int of_half = blocks > 2 ? PARTS / 2 : 1, found = blocks > 1 ? (length + each - 1) / each : 1;
    const int pairs = LATENT / 2 / blocks;
    for (int i = threadIdx.x; i < pairs * a.heads; i += THREADS) {
        const int head = i / pairs, pair = rank * pairs + i % pairs;
        Merged merged;
        float low = 0.0f, high = 0.0f;
        for (int p = 0; p < found;) {
            Merged half;
            float half_low = 0.0f, half_high = 0.0f;
            for (const int end = min(p + of_half, found); p < end; ++p) {
                auto load = [&](const float& x) { return blocks > 1 ? load_of(p, &x) : x; };
                half.add(load(state->peak[head]), load(state->total[head]));
                half_low = __fmaf_rn(half_low, half.old, load(state->sums[head][2 * pair]) * half.fresh);
                half_high = __fmaf_rn(half_high, half.old, load(state->sums[head][2 * pair + 1]) * half.fresh);
            }
            merged.add(half.peak, half.total);
            low = __fmaf_rn(low, merged.old, half_low * merged.fresh);
            high = __fmaf_rn(high, merged.old, half_high * merged.fresh);
        }
        const float share_of_one = 1.0f / (merged.total == 0.0f ? 1.0f : merged.total);
        a.out[(row * a.heads + head) * (LATENT / 2) + pair] = narrowed(low * share_of_one, high * share_of_one);
    }
    if (blocks > 1) cluster_barrier();  // nobody leaves while others read what it has
}

#ifndef SPARSE_MLA_HOST
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sparse_mla_rows(const Arguments a) {
    sparse_mla_row(a);
}
#endif
