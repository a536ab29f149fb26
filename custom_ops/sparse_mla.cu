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

#include "sparse_mla_tiles.cuh"

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
            unsigned char* to = s.stages[stage] + my_token * STORED;
            if (sub == 0) s.live[stage][my_token] = slot >= 0;
            // Zeros where there is no token: weights of zero do not hide what may be NaN.
            if (LAYOUT == BF16) {
                from += 16 * sub;
                to = s.stages[stage] + place(my_token, sub);
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
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            load_tiles(fragments[step], tokens + place(16 * half + lane % 16, 2 * (share * STEPS + step) + lane / 16));
        }
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
            // Of every two lanes one writes both, where all have read their scores.
            const float next = __uint_as_float(__shfl_xor_sync(ALL, __float_as_uint(weight), 1));
            __syncwarp();
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
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            unsigned fragments[4][4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const int token = 16 * step + lane / 16 * 8 + lane % 8;
                load_transposed(fragments[m], tokens + place(token, 8 * warp + 2 * m + lane / 8 % 2));
            }
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
            store_state(s.saved, sums, [&](int n) { return peak[n]; }, [&](int n) { return total[n]; });
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
        store_state(*state, all_sums, [&](int n) { return all[n].peak; }, [&](int n) { return all[n].total; });
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
        low = low * share_of_one + 0.0f;  // no negative zero: a sum that a merge shrinks to nothing has either sign
        high = high * share_of_one + 0.0f;
        a.out[(row * a.heads + head) * (LATENT / 2) + pair] = narrowed(low, high);
    }
    if (blocks > 1) cluster_barrier();  // nobody leaves while others read what it has
}

#ifndef CUDA_HOST
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sparse_mla_rows(const Arguments a) {
    sparse_mla_row(a);
}
#endif
