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

#include "topk_select.cuh"

struct Row {
    const float* first;  // its element 0
    int length;
    int lead;     // elements between the 16-byte boundary before it and element 0
    int quads;    // of 16 bytes that hold any of it
};

// Which of the four elements belong to the row.
__device__ __forceinline__ unsigned inside(const Row& row, int quad) {
    const int at = 4 * quad - row.lead;
    if (at >= 0 && at + 4 <= row.length) return 15;
    unsigned mask = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) mask |= (unsigned)((unsigned)(at + c) < (unsigned)row.length) << c;
    return mask;
}

// A quad that only partly belongs to the row. Not inlined: the code of a load that is all but never needed.
__device__ __noinline__ float4 load_part(const float* first, int at, int length) {
    float v[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        v[c] = (unsigned)(at + c) < (unsigned)length ? first[at + c] : __uint_as_float(0x7fffffffu);
    }
    return make_float4(v[0], v[1], v[2], v[3]);
}

// Reads nothing outside the row; what is outside is NaN.
__device__ __forceinline__ float4 load(const Row& row, int quad) {
    const int at = 4 * quad - row.lead;
    if (at >= 0 && at + 4 <= row.length) return load_quad(row.first + at);
    return load_part(row.first, at, row.length);
}

// Loads N quads from ``quad``, THREADS apart; the tile ``from`` is the block's first. Which elements are of the row.
template <int N>
__device__ __forceinline__ unsigned load_tiles(const Row& row, int from, float4 (&v)[N]) {
    const int quad = from + threadIdx.x;
    if (4 * from >= row.lead && 4 * (from + N * THREADS) - row.lead <= row.length) {
        const float* at = row.first + (4 * quad - row.lead);
#pragma unroll
        for (int u = 0; u < N; ++u) v[u] = load_quad(at + u * TILE);
        return ALL >> (32 - 4 * N);
    }
    unsigned valid = 0;
#pragma unroll
    for (int u = 0; u < N; ++u) v[u] = load(row, quad + u * THREADS);
#pragma unroll 1
    for (int u = 0; u < N; ++u) valid |= inside(row, quad + u * THREADS) << (4 * u);
    return valid;
}

struct Filter {
    float threshold;
    bool all;  // NaN too
};

// Lets through what is above all that ``filter`` does not, and above the least that it does.
__device__ __forceinline__ Filter strictly(Filter filter) {
    const unsigned least = filter.all ? 0 : order_key(__float_as_uint(filter.threshold));
    return Filter{float_from(least + 1), false};
}

// Appends what passes of the quads to the items from ``base``. What does not fit is counted and not stored. REMOTE: to
// the first block of the cluster.
template <int N, bool REMOTE>
__device__ __forceinline__ void append(Shared& s, unsigned* counter, unsigned base, const float4 (&v)[N], unsigned valid,
                                       int position, Filter filter) {
    unsigned passing = 0;
#pragma unroll
    for (int u = 0; u < N; ++u) {
        if (v[u].x >= filter.threshold) passing |= 1u << (4 * u);
        if (v[u].y >= filter.threshold) passing |= 2u << (4 * u);
        if (v[u].z >= filter.threshold) passing |= 4u << (4 * u);
        if (v[u].w >= filter.threshold) passing |= 8u << (4 * u);
    }
    passing = (filter.all ? ALL : passing) & valid;
    const unsigned mine = __popc(passing);
    const unsigned inclusive = warp_inclusive_sum(mine);
    unsigned start = 0;
    if (lane() == 31 && inclusive) start = REMOTE ? leader_add(counter, inclusive) : atomicAdd(counter, inclusive);
    const unsigned index = base + __shfl_sync(ALL, start, 31) + inclusive - mine;
    if (index + mine > CAPACITY) return;
    uint2* item = s.items + index;
    auto put = [&](int bit, float x) {
        if (passing >> bit & 1) {
            const uint2 value = make_uint2(__float_as_uint(x), position + bit / 4 * TILE + bit % 4);
            if (REMOTE) leader_store(item, value);
            else *item = value;
            ++item;
        }
    };
#pragma unroll
    for (int u = 0; u < N; ++u) {
        put(4 * u + 0, v[u].x);
        put(4 * u + 1, v[u].y);
        put(4 * u + 2, v[u].z);
        put(4 * u + 3, v[u].w);
    }
}

__device__ __forceinline__ Cut cut_of_items(Shared& s, int count, int k, int length, unsigned low, int shift) {
    Search search{low, shift, 0, true};
    return find_cut<true>(s, k, length, search, [&](auto f) {
        for (int i = threadIdx.x; i < count; i += THREADS) f(order_key(s.items[i].x), s.items[i].y);
    });
}

// Leaves the best k of items[0, count) in front, in any order. The key of the last of them.
__device__ __noinline__ unsigned prune(Shared& s, int count, int k, int length) {
    const Cut cut = cut_of_items(s, count, k, length, 0, WHOLE_SHIFT);
    auto stays = [&](int i) { return selected(order_key(s.items[i].x), s.items[i].y, cut); };
    if (threadIdx.x == 0) s.holes = s.movers = 0;
    __syncthreads();
    for (int at = 0; at < k; at += THREADS) {
        const int i = at + threadIdx.x;
        const bool hole = i < k && !stays(i);
        const unsigned index = claim(&s.holes, hole);
        if (hole) s.stage[index] = i;
    }
    __syncthreads();
    for (int at = k; at < count; at += THREADS) {
        const int i = at + threadIdx.x;
        const bool moves = i < count && stays(i);
        const unsigned index = claim(&s.movers, moves);
        if (moves) s.items[s.stage[index]] = s.items[i];
    }
    __syncthreads();
    return cut.key;
}

// Gathers every element that passes, and at least the best k of the row if so many pass. Returns how many.
template <int N>
__device__ __forceinline__ int gather(Shared& s, const Row& row, int k, Filter filter, bool careful) {
    int kept = 0, slot = 0;
    int singles = careful ? N : 0;  // tiles to take one by one, as all at once might not fit
    bool strict = false;
    __syncthreads();
    if (threadIdx.x < 3) s.gathered[threadIdx.x] = 0;
    __syncthreads();
    // Counters take turns: one is zeroed two barriers before it is used again.
    auto close = [&]() {
        __syncthreads();
        const int count = s.gathered[slot];
        const int next = slot == 2 ? 0 : slot + 1;
        if (threadIdx.x == 0) s.gathered[3 - slot - next] = 0;
        slot = next;
        return count;
    };
    for (int from = 0; from < row.quads;) {
        const int position = 4 * (from + (int)threadIdx.x) - row.lead;
        if (singles == 0) {
            float4 v[N];
            const unsigned valid = load_tiles(row, from, v);
            append<N, false>(s, &s.gathered[slot], kept, v, valid, position, filter);
            const int count = close();
            if (kept + count > CAPACITY) {
                singles = N;
            } else {
                kept += count;
                from += N * THREADS;
            }
        } else {
            if (kept + TILE > CAPACITY) {
                filter = Filter{float_from(prune(s, kept, k, row.length) + 1), false};
                strict = true;
                kept = k;
            }
            float4 v[1];
            const unsigned valid = load_tiles(row, from, v);
            append<1, false>(s, &s.gathered[slot], kept, v, valid, position, filter);
            kept += close();
            from += THREADS;
            --singles;
        }
        // Elements come in order: of those equal to the k-th best so far, the ones behind lose.
        if (!strict && kept >= k) {
            filter = strictly(filter);
            strict = true;
            singles = 0;
        }
    }
    return kept;
}

// For the first block of a cluster, behind ``kept`` items above the threshold: as many of the first elements equal to
// it as make k, and some more.
__device__ __forceinline__ int gather_ties(Shared& s, const Row& row, int k, float threshold, int kept) {
    for (int from = 0; from < row.quads && kept < k; from += THREADS) {
        __syncthreads();
        if (threadIdx.x == 0) s.gathered[1] = 0;
        __syncthreads();
        float4 v[1];
        unsigned valid = load_tiles(row, from, v);
        valid &= (unsigned)(v[0].x == threshold) | (unsigned)(v[0].y == threshold) << 1 |
                 (unsigned)(v[0].z == threshold) << 2 | (unsigned)(v[0].w == threshold) << 3;
        append<1, false>(s, &s.gathered[1], kept, v, valid, 4 * (from + (int)threadIdx.x) - row.lead, Filter{0, true});
        __syncthreads();
        kept += s.gathered[1];
    }
    return kept;
}

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
    // What is outside of the row has the key of NaN, and a position behind or below all: it loses.
    const int position = 4 * (int)threadIdx.x - row.lead;
    Search search{0, WHOLE_SHIFT, 0, true};
    const Cut cut = find_cut<false>(s, k, row.length, search, [&](auto f) {
#pragma unroll
        for (int u = 0; u < N; ++u) {
            if (u * THREADS < row.quads) {
#pragma unroll
                for (int c = 0; c < 4; ++c) f(keys[u][c], (unsigned)(position + u * TILE + c));
            }
        }
    });
#pragma unroll
    for (int u = 0; u < N; ++u) {
        if (u * THREADS < row.quads) {
            unsigned bits = 0;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                bits |= (unsigned)selected(keys[u][c], (unsigned)(position + u * TILE + c), cut) << c;
            }
            bits <<= 4 * (lane() & 7);
#pragma unroll
            for (int d = 1; d < 8; d *= 2) bits |= __shfl_xor_sync(ALL, bits, d);
            if ((lane() & 7) == 0) s.bins[(u * THREADS + threadIdx.x) / 8] = bits;
        }
    }
    __syncthreads();
    stage_bits(s, (row.quads + 7) / 8, -row.lead, 0);
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
