// Exact top-k of each row in one read of it; custom_ops/topk.py states what is selected, topk_cuda.py launches it.
//
// A sample of the row gives a threshold that about 1.7 k of its elements reach. These are gathered in shared
// memory as the row streams by; a radix select finds the cut among them, and a bitmap over the positions puts the
// selected in order. Two things can go wrong, and then it is slower, never wrong: too many elements reach the
// threshold (what was gathered is cut back to the best k, and the threshold rises to the last of them), or fewer
// than k do (the row is read again, from a threshold that all reach).
//
// THREADS a block; CAPACITY elements gathered; MAX_K >= k; BINS of the histogram, 32 positions of the bitmap each;
// UNROLL: loads of 16 bytes in flight a thread. CAPACITY >= MAX_K + 4 * THREADS, BINS a multiple of THREADS.

#ifndef TOPK_HOST

extern __shared__ __align__(16) unsigned char dynamic_shared[];

__device__ __forceinline__ float4 load_quad(const float* at) {
    float4 v;  // every element is read once: not worth a line of L1
    asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
    return v;
}

__device__ __forceinline__ void prefetch_l2(const float* at, unsigned bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
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

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Where the object at ``mine`` lies in the shared memory of the cluster's first block.
__device__ __forceinline__ unsigned leaders(const void* mine) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(mine)));
    return there;
}

__device__ __forceinline__ unsigned leader_add(unsigned* mine, unsigned amount) {
    unsigned before;
    asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], %2;"
                 : "=r"(before) : "r"(leaders(mine)), "r"(amount) : "memory");
    return before;
}

__device__ __forceinline__ void leader_store(uint2* mine, uint2 value) {
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(leaders(mine)), "r"(value.x), "r"(value.y) : "memory");
}

#endif  // TOPK_HOST

constexpr unsigned ALL = 0xffffffffu;
constexpr int LAST = 0x7fffffff;
constexpr int WARPS = THREADS / 32;
constexpr int TILE = 4 * THREADS;  // elements: one load a thread
constexpr int LOG_BINS = BINS == 2048 ? 11 : BINS == 1024 ? 10 : BINS == 512 ? 9 : 6;
static_assert(BINS == 1 << LOG_BINS && BINS % THREADS == 0 && THREADS % 32 == 0 && THREADS <= 1024, "");
static_assert(CAPACITY >= MAX_K + TILE, "a tile must fit behind the best k");

struct Shared {
    uint2 items[CAPACITY];  // bits of the logit, position
    unsigned bins[BINS];    // the histogram of a select, then the bitmap
    unsigned stage[MAX_K];
    unsigned warp_sum[32];
    unsigned warp_low[32];
    unsigned warp_high[32];
    unsigned gathered[3];
    unsigned found[3];  // bin, how many above it, how many in it
    unsigned holes;
    unsigned movers;
};

struct Row {
    const float* first;  // its element 0
    int length;
    int lead;     // elements between the 16-byte boundary before it and element 0
    int quads;    // of 16 bytes that hold any of it
};

// What is selected: keys above ``key``, and at ``key`` positions up to ``position``.
struct Cut {
    unsigned key;
    int position;
};

// NaN lowest, -0 equal to +0.
__device__ __forceinline__ unsigned order_key(unsigned bits) {
    if (bits == 0x80000000u) bits = 0;
    const unsigned key = bits ^ ((unsigned)((int)bits >> 31) | 0x80000000u);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0 : key;
}

// The least float whose key is above ``key``; above +inf a NaN, which nothing reaches.
__device__ __forceinline__ float float_above(unsigned key) {
    const unsigned next = key < 0x007fffffu ? 0x007fffffu : key + 1;  // 0x007fffff: -inf
    return __uint_as_float(next & 0x80000000u ? next ^ 0x80000000u : ~next);
}

__device__ __forceinline__ float float_at(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

__device__ __forceinline__ bool selected(uint2 item, Cut cut) {
    const unsigned key = order_key(item.x);
    return key > cut.key || (key == cut.key && (int)item.y <= cut.position);
}

__device__ __forceinline__ int lane() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp() { return threadIdx.x >> 5; }

__device__ __forceinline__ unsigned warp_inclusive_sum(unsigned mine) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const unsigned other = __shfl_up_sync(ALL, mine, d);
        if (lane() >= d) mine += other;
    }
    return mine;
}

// Of the threads before this one; one barrier inside, and another before the next call.
__device__ unsigned exclusive_sum(Shared& s, unsigned mine, unsigned& total) {
    const unsigned inclusive = warp_inclusive_sum(mine);
    if (lane() == 31) s.warp_sum[warp()] = inclusive;
    __syncthreads();
    const unsigned sum = lane() < WARPS ? s.warp_sum[lane()] : 0;
    total = __reduce_add_sync(ALL, sum);
    return __reduce_add_sync(ALL, lane() < warp() ? sum : 0) + inclusive - mine;
}

// The next index from ``counter`` for each thread of the warp that wants one.
__device__ __forceinline__ unsigned claim(unsigned* counter, bool wants) {
    const unsigned wanting = __ballot_sync(ALL, wants);
    unsigned base = 0;
    if (lane() == 0 && wanting) base = atomicAdd(counter, __popc(wanting));
    return __shfl_sync(ALL, base, 0) + __popc(wanting & ((1u << lane()) - 1));
}

// The cut that selects k of items[0, count), and with ``slack`` up to k + slack; k <= count. An inexact one never
// cuts between equal keys. Needs a barrier before, has one after.
__device__ __noinline__ Cut find_cut(Shared& s, int count, int k, int length, int slack, bool exact) {
    unsigned low = ALL, high = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const unsigned key = order_key(s.items[i].x);
        low = min(low, key);
        high = max(high, key);
    }
    low = __reduce_min_sync(ALL, low);
    high = __reduce_max_sync(ALL, high);
    if (lane() == 0) {
        s.warp_low[warp()] = low;
        s.warp_high[warp()] = high;
    }
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
    __syncthreads();
    low = __reduce_min_sync(ALL, lane() < WARPS ? s.warp_low[lane()] : ALL);
    high = __reduce_max_sync(ALL, lane() < WARPS ? s.warp_high[lane()] : 0);

    unsigned width = high - low, need = k, tied_key = 0;
    bool by_position = false;  // among items of tied_key, the greater ~position ranks higher
    for (;;) {
        const int shift = max(0, 32 - __clz(width) - LOG_BINS);
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const uint2 item = s.items[i];
            const unsigned key = order_key(item.x);
            const unsigned offset = (by_position ? ~item.y : key) - low;
            if (offset <= width && (!by_position || key == tied_key)) atomicAdd(&s.bins[offset >> shift], 1);
        }
        __syncthreads();
        constexpr int MINE = BINS / THREADS;
        unsigned counts[MINE], sum = 0, total;
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            sum += counts[j] = s.bins[threadIdx.x * MINE + j];
            s.bins[threadIdx.x * MINE + j] = 0;
        }
        const unsigned before = exclusive_sum(s, sum, total);
        unsigned above = total - before - sum;
#pragma unroll
        for (int j = MINE - 1; j >= 0; --j) {
            if (above < need && need <= above + counts[j]) {
                s.found[0] = threadIdx.x * MINE + j;
                s.found[1] = above;
                s.found[2] = counts[j];
            }
            above += counts[j];
        }
        __syncthreads();
        const unsigned skipped = s.found[0] << shift;
        need -= s.found[1];
        low += skipped;
        width = min(width - skipped, (1u << shift) - 1);
        if (s.found[2] - need <= (unsigned)slack || (shift == 0 && !exact)) break;
        if (shift == 0) {
            by_position = true;
            tied_key = low;
            width = length - 1;
            low = ~width;
        }
    }
    return by_position ? Cut{tied_key, (int)~low} : Cut{low, LAST};
}

// Moves the selected k of items[0, count) to the front, in any order.
__device__ __noinline__ void keep_selected(Shared& s, int count, int k, Cut cut) {
    if (threadIdx.x == 0) s.holes = s.movers = 0;
    __syncthreads();
    for (int at = 0; at < k; at += THREADS) {
        const int i = at + threadIdx.x;
        const bool hole = i < k && !selected(s.items[i], cut);
        const unsigned index = claim(&s.holes, hole);
        if (hole) s.stage[index] = i;
    }
    __syncthreads();
    for (int at = k; at < count; at += THREADS) {
        const int i = at + threadIdx.x;
        const bool moves = i < count && selected(s.items[i], cut);
        const unsigned index = claim(&s.movers, moves);
        if (moves) s.items[s.stage[index]] = s.items[i];
    }
    __syncthreads();
}

// Which of the four elements belong to the row.
__device__ __forceinline__ unsigned inside(const Row& row, int quad) {
    const int at = 4 * quad - row.lead;
    if (at >= 0 && at + 4 <= row.length) return 15;
    unsigned mask = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) mask |= (unsigned)((unsigned)(at + c) < (unsigned)row.length) << c;
    return mask;
}

// Reads nothing outside the row.
__device__ __forceinline__ float4 load(const Row& row, int quad) {
    const int at = 4 * quad - row.lead;
    if (at >= 0 && at + 4 <= row.length) return load_quad(row.first + at);
    float v[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) v[c] = (unsigned)(at + c) < (unsigned)row.length ? row.first[at + c] : 0.0f;
    return make_float4(v[0], v[1], v[2], v[3]);
}

struct Filter {
    float threshold;
    bool all;  // NaN too
    __device__ __forceinline__ bool passes(float x) const { return x >= threshold || all; }
};

// Appends what passes of the N quads from ``quad``, THREADS apart, to the items from ``base``. What does not fit is
// counted and not stored. REMOTE: to the first block of the cluster.
template <int N, bool REMOTE>
__device__ __forceinline__ void push(Shared& s, unsigned* counter, unsigned base, const float4 (&v)[N], const Row& row,
                                     int quad, Filter filter) {
    unsigned passing = 0;
#pragma unroll
    for (int u = 0; u < N; ++u) {
        const unsigned four = (unsigned)filter.passes(v[u].x) | (unsigned)filter.passes(v[u].y) << 1 |
                              (unsigned)filter.passes(v[u].z) << 2 | (unsigned)filter.passes(v[u].w) << 3;
        passing |= (four & inside(row, quad + u * THREADS)) << (4 * u);
    }
    const unsigned mine = __popc(passing);
    const unsigned inclusive = warp_inclusive_sum(mine);
    unsigned start = 0;
    if (lane() == 31 && inclusive) start = REMOTE ? leader_add(counter, inclusive) : atomicAdd(counter, inclusive);
    const unsigned index = base + __shfl_sync(ALL, start, 31) + inclusive - mine;
    if (index + mine > CAPACITY) return;
    uint2* item = s.items + index;
    auto append = [&](int bit, float x, int position) {
        if (passing >> bit & 1) {
            const uint2 value = make_uint2(__float_as_uint(x), position);
            if (REMOTE) leader_store(item, value);
            else *item = value;
            ++item;
        }
    };
#pragma unroll
    for (int u = 0; u < N; ++u) {
        const int position = 4 * (quad + u * THREADS) - row.lead;
        append(4 * u + 0, v[u].x, position + 0);
        append(4 * u + 1, v[u].y, position + 1);
        append(4 * u + 2, v[u].z, position + 2);
        append(4 * u + 3, v[u].w, position + 3);
    }
}

// Gathers every element that passes, and at least the best k of the row if so many pass. Returns how many.
template <int UNROLL_>
__device__ __forceinline__ int gather(Shared& s, const Row& row, int k, Filter filter) {
    int kept = 0, slot = 0;
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
    for (int chunk = 0; chunk < row.quads; chunk += UNROLL_ * THREADS) {
        const int quad = chunk + threadIdx.x;
        float4 v[UNROLL_];
#pragma unroll
        for (int u = 0; u < UNROLL_; ++u) v[u] = load(row, quad + u * THREADS);
        push<UNROLL_, false>(s, &s.gathered[slot], kept, v, row, quad, filter);
        const int count = close();
        if (kept + count <= CAPACITY) {
            kept += count;
            continue;
        }
        for (int tile = chunk; tile < min(chunk + UNROLL_ * THREADS, row.quads); tile += THREADS) {
            if (kept + TILE > CAPACITY) {
                const Cut cut = find_cut(s, kept, k, row.length, 0, true);
                keep_selected(s, kept, k, cut);
                kept = k;
                // Elements come in order: of those equal to the last of the best, the ones behind lose.
                filter = Filter{float_above(cut.key), false};
            }
            const float4 one[1] = {load(row, tile + threadIdx.x)};
            push<1, false>(s, &s.gathered[slot], kept, one, row, tile + threadIdx.x, filter);
            kept += close();
        }
    }
    return kept;
}

// A filter that about ``goal`` of the row's elements pass: the sample's element of that rank.
__device__ __forceinline__ Filter sampled_filter(Shared& s, const Row& row, int k) {
    int log_quads = 32 - __clz(row.quads >> SAMPLE_STRIDE_LOG);
    log_quads = min(max(log_quads, SAMPLE_MIN_LOG), SAMPLE_MAX_LOG);
    const int quads = 1 << log_quads, samples = 4 * quads;
    for (int i = threadIdx.x; i < quads; i += THREADS) {
        // One quad of each stretch, at a place that no period of the data can follow.
        const unsigned fraction = (unsigned)i << (32 - log_quads) | ((unsigned)i * 2654435761u) >> log_quads;
        const int quad = __umulhi(fraction, row.quads);
        const float4 v = load(row, quad);
        const unsigned mask = inside(row, quad);
        const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            s.items[i + c * quads] = make_uint2(mask >> c & 1 ? __float_as_uint(values[c]) : 0x7fffffffu, 0);
        }
    }
    const float share = (float)k / row.length, mean = samples * share;
    const int rank = (int)(mean + SAMPLE_SIGMAS * sqrtf(mean * (1 - share))) + 2;
    if (rank >= samples) return Filter{0, true};
    __syncthreads();
    const Cut cut = find_cut(s, samples, rank, row.length, rank / 16, false);
    return cut.key == 0 ? Filter{0, true} : Filter{float_at(cut.key), false};
}

__device__ __forceinline__ int mapped(const int* table, int position) {
    return table ? table[position >> 6] * 64 + (position & 63) : position;  // pages of 64 tokens
}

// Writes the selected items in order of position.
__device__ __forceinline__ void emit(Shared& s, const Row& row, int count, int k, Cut cut, const int* table, int* out) {
    constexpr int WINDOW = 32 * BINS;
    unsigned written = 0;
    for (int from = 0; from < row.length; from += WINDOW) {
        const int words = (min(row.length - from, WINDOW) + 31) / 32;
        for (int i = threadIdx.x; i < words; i += THREADS) s.bins[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const uint2 item = s.items[i];
            const unsigned at = item.y - from;
            if (at < WINDOW && selected(item, cut)) atomicOr(&s.bins[at >> 5], 1u << (at & 31));
        }
        __syncthreads();
        const int each = (words + THREADS - 1) / THREADS, first = threadIdx.x * each, stop = min(first + each, words);
        unsigned sum = 0, total;
        for (int i = first; i < stop; ++i) sum += __popc(s.bins[i]);
        unsigned rank = written + exclusive_sum(s, sum, total);
        for (int i = first; i < stop; ++i) {
            for (unsigned bits = s.bins[i]; bits; bits &= bits - 1) s.stage[rank++] = from + 32 * i + __ffs(bits) - 1;
        }
        written += total;
        __syncthreads();
    }
    for (int i = threadIdx.x; i < k; i += THREADS) out[i] = mapped(table, s.stage[i]);
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

template <bool SPLIT, int UNROLL_>
__device__ __forceinline__ void topk_row(const Arguments& a, int index) {
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
        if (part) return;
        for (int i = threadIdx.x; i < k; i += THREADS) out[i] = i < row.length ? mapped(table, i) : -1;
        return;
    }
    Filter filter{0, true};
    int count = 0;
    if (row.length > CAPACITY) {
        if (SPLIT) {
            if (threadIdx.x == 0) s.gathered[0] = 0;
        } else if (PREFETCH_BYTES && threadIdx.x == 0) {
            prefetch_l2(row.first - row.lead + (row.lead ? 4 : 0), min(PREFETCH_BYTES, row.length / 8 * 16));
        }
        filter = sampled_filter(s, row, k);
        if (SPLIT) {
            // The blocks of a cluster see the same sample, so the same filter; the first gathers for all.
            cluster_arrive();
            cluster_wait();
            for (int chunk = part * UNROLL_ * THREADS; chunk < row.quads; chunk += cluster_size() * UNROLL_ * THREADS) {
                const int quad = chunk + threadIdx.x;
                float4 v[UNROLL_];
#pragma unroll
                for (int u = 0; u < UNROLL_; ++u) v[u] = load(row, quad + u * THREADS);
                push<UNROLL_, true>(s, &s.gathered[0], 0, v, row, quad, filter);
            }
            cluster_arrive();
            cluster_wait();
            if (part) return;
            count = s.gathered[0];
            __syncthreads();
        }
    } else if (part) {
        return;
    }
    if (!SPLIT || count < k || count > CAPACITY) count = gather<UNROLL_>(s, row, k, filter);
    if (count < k) count = gather<UNROLL_>(s, row, k, Filter{0, true});
    const Cut cut = count > k ? find_cut(s, count, k, row.length, 0, true) : Cut{0, LAST};
    emit(s, row, count, k, cut, table, out);
}

// The longest rows of a prefill are its last: they start first.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) topk_rows(const Arguments a) {
    topk_row<false, UNROLL>(a, gridDim.x - 1 - blockIdx.x);
}

// For few rows: the blocks of a cluster share one.
extern "C" __global__ void __launch_bounds__(THREADS, 1) topk_split_rows(const Arguments a) {
    topk_row<true, SPLIT_UNROLL>(a, blockIdx.x / cluster_size());
}
