// Exact top-k of each row in one read of it; custom_ops/topk.py states what is selected, topk_cuda.py launches it.
//
// A row that fits into registers is selected from there. Of a longer one, a sample gives a threshold that about 1.6 k
// of its elements reach. These are gathered in shared memory as the row streams by; a radix select finds the cut among
// them, and a bitmap over the positions puts the selected in order. Two things can go wrong, and then it is slower,
// never wrong: too many elements reach the threshold (what was gathered is cut back to the best k, and the threshold
// rises to the last of them), or fewer than k do (the row is read again, from a threshold that all reach).
//
// THREADS a block; CAPACITY elements gathered; MAX_K >= k; UNROLL: loads of 16 bytes in flight a thread; SPLIT: 1
// where clusters share rows.

#include "topk_gather.cuh"

struct Sample {
    Filter filter;
    bool tied;     // many elements are equal to the threshold
    unsigned low;  // the threshold's key
    int shift;     // of bins from there to about the highest element
};

// A threshold that somewhat more than k of the row's elements reach: the sample's element of that rank.
__device__ __forceinline__ Sample take_sample(Shared& s, const Row& row, int k) {
    constexpr int SAMPLES = 4 * THREADS;
    const float share = (float)k / row.length, mean = SAMPLES * share;
    const int rank = (int)(mean + SAMPLE_SIGMAS * sqrtf(mean * (1 - share))) + 2;
    if (rank >= SAMPLES) return Sample{Filter{0, true}, true, 0, WHOLE_SHIFT};
    // One quad of each stretch, at a place that no period of the data can follow.
    const unsigned fraction = threadIdx.x << (32 - LOG_THREADS) | (threadIdx.x * 2654435761u) >> LOG_THREADS;
    const float4 v = load(row, __umulhi(fraction, row.quads));
    const unsigned keys[4] = {order_key(__float_as_uint(v.x)), order_key(__float_as_uint(v.y)),
                              order_key(__float_as_uint(v.z)), order_key(__float_as_uint(v.w))};
    Search search{0, WHOLE_SHIFT, rank / 16, false};
    const Cut cut = find_cut<true>(s, rank, row.length, search, [&](auto f) {
#pragma unroll
        for (int c = 0; c < 4; ++c) f(keys[c], 0u);
    });
    if (cut.key == 0) return Sample{Filter{0, true}, true, 0, WHOLE_SHIFT};
    const unsigned span = max(search.top << WHOLE_SHIFT, cut.key) - cut.key;
    return Sample{Filter{float_from(cut.key), false}, search.tied, cut.key, max(0, WHOLE_SHIFT - __clz(span))};
}

__device__ __forceinline__ int mapped(const int* table, int position) {
    return table ? table[position >> 6] * 64 + (position & 63) : position;  // pages of 64 tokens
}

// Appends the positions of the bitmap's ``words`` to the stage; bit 0 is position ``from``.
__device__ __forceinline__ unsigned stage_bits(Shared& s, int words, int from, unsigned written) {
    const int share = (words + THREADS - 1) / THREADS, first = threadIdx.x * share, stop = min(first + share, words);
    unsigned sum = 0, total;
    for (int i = first; i < stop; ++i) sum += __popc(s.bins[i]);
    unsigned rank = written + exclusive_sum(s, sum, total);
    for (int i = first; i < stop; ++i) {
        for (unsigned bits = s.bins[i]; bits; bits &= bits - 1) s.stage[rank++] = from + 32 * i + __ffs(bits) - 1;
    }
    __syncthreads();
    return written + total;
}

// Adds the first ``need`` bits of ``more`` to the bitmap.
__device__ __forceinline__ void add_first(Shared& s, const unsigned* more, int words, unsigned need) {
    const int share = (words + THREADS - 1) / THREADS, first = threadIdx.x * share, stop = min(first + share, words);
    unsigned sum = 0, total;
    for (int i = first; i < stop; ++i) sum += __popc(more[i]);
    unsigned before = exclusive_sum(s, sum, total);
    for (int i = first; i < stop && before < need; ++i) {
        unsigned bits = more[i];
        const int count = __popc(bits);
        for (int left = before + count - need; left > 0; --left) bits ^= 0x80000000u >> __clz(bits);
        s.bins[i] |= bits;
        before += count;
    }
}

// Writes k positions of the stage, or slots, or -1 from ``length`` on; the stage may be 0, 1, ..
template <bool STAGED>
__device__ __forceinline__ void write(const Shared& s, int k, int length, const int* table, int* out) {
    auto value = [&](int i) { return STAGED ? mapped(table, s.stage[i]) : i < length ? mapped(table, i) : -1; };
    if (k % 4 == 0 && reinterpret_cast<unsigned long long>(out) % 16 == 0) {
        for (int i = 4 * threadIdx.x; i < k; i += TILE) {
            *reinterpret_cast<int4*>(out + i) = make_int4(value(i), value(i + 1), value(i + 2), value(i + 3));
        }
    } else {
        for (int i = threadIdx.x; i < k; i += THREADS) out[i] = value(i);
    }
}

// The selection of a row of at most N tiles, which stays in registers.
template <int N>
__device__ __forceinline__ void select_in_registers(Shared& s, const Row& row, int k) {
    unsigned keys[N][4];
#pragma unroll
    for (int u = 0; u < N; ++u) {
        if (u * THREADS < row.quads) {
            const float4 v = load(row, u * THREADS + threadIdx.x);
            keys[u][0] = __float_as_uint(v.x);
            keys[u][1] = __float_as_uint(v.y);
            keys[u][2] = __float_as_uint(v.z);
            keys[u][3] = __float_as_uint(v.w);
        }
    }
#pragma unroll
    for (int u = 0; u < N; ++u) {
        if (u * THREADS < row.quads) {
#pragma unroll
            for (int c = 0; c < 4; ++c) keys[u][c] = order_key(keys[u][c]);
        }
    }
    // What is outside of the row has the key of NaN. It can be counted where only NaN is left to select, as tied.
    const int position = 4 * (int)threadIdx.x - row.lead;
    Search search{0, WHOLE_SHIFT, 0, false};
    const Cut cut = find_cut<false>(s, k, row.length, search, [&](auto f) {
#pragma unroll
        for (int u = 0; u < N; ++u) {
            if (u * THREADS < row.quads) {
#pragma unroll
                for (int c = 0; c < 4; ++c) f(keys[u][c], 0u);
            }
        }
    });
    // A word of a bitmap from the bits of eight threads.
    auto put_bits = [&](unsigned* words, int u, unsigned bits) {
        bits <<= 4 * (lane() & 7);
#pragma unroll
        for (int d = 1; d < 8; d *= 2) bits |= __shfl_xor_sync(ALL, bits, d);
        if ((lane() & 7) == 0) words[(u * THREADS + threadIdx.x) / 8] = bits;
    };
    static_assert(N * THREADS / 8 <= BINS / 2, "two bitmaps in the bins");
    const unsigned least = cut.key + search.tied;
#pragma unroll
    for (int u = 0; u < N; ++u) {
        if (u * THREADS < row.quads) {
            unsigned bits = 0;
#pragma unroll
            for (int c = 0; c < 4; ++c) bits |= (unsigned)(keys[u][c] >= least) << c;
            put_bits(s.bins, u, bits);
        }
    }
    const int words = (row.quads + 7) / 8;
    if (search.tied) {
        unsigned* ties = s.bins + BINS / 2;
#pragma unroll
        for (int u = 0; u < N; ++u) {
            if (u * THREADS < row.quads) {
                unsigned bits = 0;
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const bool of_row = (unsigned)(position + u * TILE + c) < (unsigned)row.length;
                    bits |= (unsigned)(keys[u][c] == cut.key && of_row) << c;
                }
                put_bits(ties, u, bits);
            }
        }
        __syncthreads();
        add_first(s, ties, words, search.need);
    }
    __syncthreads();
    stage_bits(s, words, -row.lead, 0);
}

// The selection among gathered items.
__device__ __forceinline__ void select_items(Shared& s, const Row& row, int count, int k, unsigned low, int shift) {
    constexpr int WINDOW = 32 * BINS;
    __syncthreads();
    Cut cut{0, LAST};
    if (count > k) cut = cut_of_items(s, count, k, row.length, low, shift);
    else clear_bins(s);
    unsigned written = 0;
    for (int from = 0; from < row.length; from += WINDOW) {
        if (from) clear_bins(s);
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const uint2 item = s.items[i];
            const unsigned at = item.y - from;
            if (at < WINDOW && selected(order_key(item.x), item.y, cut)) atomicOr(&s.bins[at >> 5], 1u << (at & 31));
        }
        __syncthreads();
        written = stage_bits(s, (min(row.length - from, WINDOW) + 31) / 32, from, written);
    }
}

struct Arguments {
    const float* logits;
    const int* starts;          // null: every row starts at column 0
    const int* lengths;
    const int* request_of_row;  // null, with page_table: positions, not slots
    const int* page_table;
    int* out;
    long long row_stride;
    long long table_stride;
    int valid_rows;
    int k;
};

__device__ __forceinline__ void topk_row(const Arguments& a, int index) {
    constexpr int N = UNROLL;
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared);
    const int k = a.k;
    int* out = a.out + (long long)index * k;
    Row row{};
    const int* table = nullptr;
    if (index < a.valid_rows) {
        row.length = a.lengths[index];
        row.first = a.logits + index * a.row_stride + (a.starts ? a.starts[index] : 0);
        row.lead = (int)(reinterpret_cast<unsigned long long>(row.first) >> 2 & 3);
        row.quads = (row.lead + row.length + 3) / 4;
        if (a.page_table) table = a.page_table + a.request_of_row[index] * a.table_stride;
    }
    const unsigned part = SPLIT ? cluster_rank() : 0;
    if (row.length <= k) {
        if (part == 0) write<false>(s, k, row.length, table, out);
        return;
    }
    if (row.quads <= N * THREADS) {
        if (part) return;
        select_in_registers<N>(s, row, k);
        write<true>(s, k, row.length, table, out);
        return;
    }
    if (PREFETCH_BYTES && !SPLIT && threadIdx.x == 0) {
        prefetch_l2(row.first - row.lead + (row.lead ? 4 : 0), min(PREFETCH_BYTES, row.length / 8 * 16));
    }
    const Sample sample = take_sample(s, row, k);
    unsigned low = sample.low;
    int shift = sample.shift, count = 0;
    if (SPLIT) {
        // The blocks of a cluster see the same sample, so the same threshold; the first gathers for all.
        const Filter above = sample.tied ? strictly(sample.filter) : sample.filter;
        if (threadIdx.x == 0) s.gathered[0] = 0;
        cluster_arrive();
        cluster_wait();
        for (int from = part * N * THREADS; from < row.quads; from += cluster_size() * N * THREADS) {
            float4 v[N];
            const unsigned valid = load_tiles(row, from, v);
            append<N, true>(s, &s.gathered[0], 0, v, valid, 4 * (from + (int)threadIdx.x) - row.lead, above);
        }
        cluster_arrive();
        cluster_wait();
        if (part) return;
        count = s.gathered[0];
        if (sample.tied && !sample.filter.all && count < k) count = gather_ties(s, row, k, sample.filter.threshold, count);
    }
    Filter filter = sample.filter;
    bool careful = sample.tied, gathered = SPLIT && count >= k && count <= CAPACITY;
    while (!gathered) {
        count = gather<N>(s, row, k, filter, careful);
        gathered = count >= k;
        if (gathered) break;
        filter = Filter{0, true};
        careful = true;
        low = 0;
        shift = WHOLE_SHIFT;
    }
    select_items(s, row, count, k, low, shift);
    write<true>(s, k, row.length, table, out);
}

// The longest rows of a prefill are its last: they start first. Where there are few, the blocks of a cluster share one.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) topk_rows(const Arguments a) {
    topk_row(a, SPLIT ? blockIdx.x / cluster_size() : gridDim.x - 1 - blockIdx.x);
}
