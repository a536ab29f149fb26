// Exact top-k of each row in one read of it; custom_ops/topk.py states what is selected, topk_cuda.py launches it.
//
// A row that fits into registers is selected from there. Of a longer one, a sample gives a threshold that somewhat more
// than k of its elements reach. These are gathered in shared memory as the row streams by, without a barrier; a radix
// select finds the cut among them, and a bitmap over the positions puts the selected in order. Where too many elements
// reach the threshold, or fewer than k do, it is slower, never wrong: the row is read again by another threshold; where
// that does not help, a tile at a time, and what was gathered is cut back to the best k whenever it is full.
//
// THREADS a block, BLOCKS_PER_SM at least; CAPACITY elements gathered; MAX_K >= k; UNROLL: loads of 16 bytes in flight a
// thread; IN_REGISTERS: of 16 bytes a thread at most of a row that is selected from registers; 1 << LOG_BINS: of a
// histogram; SAMPLE_SIGMAS: of a sample's error, as far the threshold lies on the side of too many; SPLIT: 1 where
// clusters share rows, which are read before their place is known.

#include "topk_gather.cuh"

struct Sample {
    unsigned low;        // the threshold's key; 0: none was found
    unsigned shift : 5;  // of bins from there to about the highest element
    unsigned tied : 1;   // many elements are equal to the threshold
};

// A threshold that somewhat more than k of the row's elements reach: the sample's element of that rank. The bins were
// cleared, by threads that have not met since.
__device__ __forceinline__ Sample take_sample(Shared& s, const Row& row, int k) {
    constexpr int SAMPLES = 4 * THREADS;
    const float share = (float)k / row.length, mean = SAMPLES * share;
    const int rank = (int)(mean + (float)SAMPLE_SIGMAS * sqrtf(mean * (1 - share))) + 2;
    if (rank >= SAMPLES) return Sample{};
    // One quad of each stretch, at a place that no period of the data can follow.
    const unsigned fraction = threadIdx.x << (32 - LOG_THREADS) | (threadIdx.x * 2654435761u) >> LOG_THREADS;
    const float4 v = load(row, __umulhi(fraction, row.quads));
    unsigned keys[4] = {__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)}, most = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) most = max(most, keys[c] = order_key(keys[c]));
    most = __reduce_max_sync(ALL, most);
    if (lane() == 0) s.warp_high[warp()] = most;
    __syncthreads();
    most = __reduce_max_sync(ALL, lane() < WARPS ? s.warp_high[lane()] : 0);
    // A guess that mostly holds, for one round less: the threshold is within 2^GUESSED keys, 16-fold, of the highest.
    constexpr int GUESSED = 25;
    const unsigned guess = most - min(most, 1u << GUESSED);
    const Search search{guess, GUESSED - LOG_BINS, rank / 16};
    const Range found = find_range<false>(s, rank, search, [&](auto f) {
#pragma unroll
        for (int c = 0; c < 4; ++c) f(keys[c], 0u);
    });
    if (found.low == 0) return Sample{};
    const unsigned low = max(found.low, MINUS_INFINITY), span = max(most, low) - low;
    return Sample{low, (unsigned)max(0, WHOLE_SHIFT - __clz(span)), found.tied};
}

__device__ __forceinline__ int mapped(const int* table, int position) {
    return table ? table[position >> 6] * 64 + (position & 63) : position;  // pages of 64 tokens
}

// The positions of the bitmap's ``words``, of which bit 0 is ``from``, behind those ``written`` before: to the stage; or
// mapped, to ``out``. Not inlined, so that there is one of it: a launch fetches its code from memory.
__device__ __noinline__ unsigned list_bits(Shared& s, int words, int from, unsigned written, const int* table,
                                       int* out) {
    const int share = (words + THREADS - 1) / THREADS, first = threadIdx.x * share, stop = min(first + share, words);
    unsigned sum = 0, total;
#pragma unroll 1
    for (int i = first; i < stop; ++i) sum += __popc(s.bins[i]);
    unsigned rank = written + exclusive_sum(s, sum, total) + sum;
#pragma unroll 1
    for (int i = stop - 1; i >= first; --i) {  // from behind: the highest bit is found at once
#pragma unroll 1
        for (unsigned bits = s.bins[i]; bits;) {
            const int top = 31 - __clz(bits), position = from + 32 * i + top;
            bits ^= 1u << top;
            if (out) out[--rank] = mapped(table, position);
            else s.stage[--rank] = position;
        }
    }
    __syncthreads();
    return written + total;
}

// Adds the first ``need`` bits of ``more`` to the bitmap.
__device__ __noinline__ void add_first(Shared& s, const unsigned* more, int words, unsigned need) {
    const int share = (words + THREADS - 1) / THREADS, first = threadIdx.x * share, stop = min(first + share, words);
    unsigned sum = 0, total;
#pragma unroll 1
    for (int i = first; i < stop; ++i) sum += __popc(more[i]);
    unsigned before = exclusive_sum(s, sum, total);
#pragma unroll 1
    for (int i = first; i < stop && before < need; ++i) {
        unsigned bits = more[i];
        const int count = __popc(bits);
#pragma unroll 1
        for (int left = before + count - need; left > 0; --left) bits ^= 0x80000000u >> __clz(bits);
        s.bins[i] |= bits;
        before += count;
    }
}

// Writes k positions, or slots, of the stage, which may be 0, 1, ..; -1 from ``length`` on.
__device__ __noinline__ void write(const Shared& s, bool staged, int k, int length, const int* table, int* out) {
    auto value = [&](int i) { return i < length ? mapped(table, staged ? s.stage[i] : i) : -1; };
    if (k % 4 == 0 && reinterpret_cast<unsigned long long>(out) % 16 == 0) {
#pragma unroll 2
        for (int i = 4 * threadIdx.x; i < k; i += TILE) {
            *reinterpret_cast<int4*>(out + i) = make_int4(value(i), value(i + 1), value(i + 2), value(i + 3));
        }
    } else {
#pragma unroll 1
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
    __syncthreads();
    const Range found = find_range<false>(s, k, Search{0, WHOLE_SHIFT, 0}, [&](auto f) {
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
    const unsigned least = found.low + found.tied;
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
    if (found.tied) {
        unsigned* ties = s.bins + BINS / 2;
#pragma unroll
        for (int u = 0; u < N; ++u) {
            if (u * THREADS < row.quads) {
                unsigned bits = 0;
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const bool of_row = (unsigned)(position + u * TILE + c) < (unsigned)row.length;
                    bits |= (unsigned)(keys[u][c] == found.low && of_row) << c;
                }
                put_bits(ties, u, bits);
            }
        }
        __syncthreads();
        add_first(s, ties, words, found.need);
    }
    __syncthreads();
    list_bits(s, words, -row.lead, 0, nullptr, nullptr);
}

// Writes the selection among gathered items.
__device__ __forceinline__ void select_items(Shared& s, const Row& row, int count, int k, unsigned low, int shift,
                                             const int* table, int* out) {
    constexpr int WINDOW = 32 * BINS;
    Range r{0, ALL, (unsigned)count, (unsigned)count, false, 0, false};
    if (count > k) r = range_of_items<true>(s, count, k, row.length, low, shift);
    // By key: ``least`` and above is selected, if any is, and of what is ``close`` the caller's few are ranked.
    const unsigned high = r.low + r.width, close_low = r.by_position ? r.key : r.low;
    const unsigned close_width = r.by_position ? 0 : r.width;
    const unsigned least = r.by_position ? r.key + 1 : r.tied ? high + 1 : r.low;
    const bool any = r.by_position || !r.tied || high != ALL;
    const bool one_window = row.length <= WINDOW;
    unsigned written = 0;
    for (int from = 0; from < row.length; from += WINDOW) {
        if (from) {
            clear_bins(s);
            if (threadIdx.x == 0) s.few_count = 0;
            __syncthreads();
        }
        auto mark = [&](unsigned position) {
            const unsigned at = position - from;
            if (at < WINDOW) atomicOr(&s.bins[at >> 5], 1u << (at & 31));
        };
        each_item(s, count, [&](unsigned key, unsigned position) {
            if (key >= least && any) {
                mark(position);
            } else if (key - close_low <= close_width) {
                const unsigned value = r.by_position ? ~position : key;
                if (r.by_position && (value > high || (value >= r.low && !r.tied))) mark(position);
                else if (value - r.low <= r.width) s.few[shared_add(&s.few_count, 1)] = make_uint2(key, ~position);
            }
        });
        __syncthreads();
        if (r.tied) {
            if (warp() == 0) {
                const uint2 mine = lane() < (int)r.inside ? s.few[lane()] : make_uint2(0, 0);
                unsigned greater = 0;
                for (int j = 0; j < (int)r.inside; ++j) {
                    const uint2 other = s.few[j];
                    greater += other.x > mine.x || (other.x == mine.x && other.y > mine.y);
                }
                if (lane() < (int)r.inside && greater < r.need) mark(~mine.y);
            }
            __syncthreads();
        }
        const int words = (min(row.length - from, WINDOW) + 31) / 32;
        written = list_bits(s, words, from, written, table, one_window ? nullptr : out);
    }
    if (one_window) write(s, true, k, row.length, table, out);
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
    int width;  // columns of ``logits``
};

__device__ __forceinline__ void topk_row(const Arguments& a, int index) {
    constexpr int N = UNROLL;
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared);
    const int k = a.k;
    int* out = a.out + (long long)index * k;
    // The tiles of a row take turns among the blocks that share it.
    const int part = SPLIT ? cluster_rank() : 0, stride = SPLIT ? cluster_size() * THREADS : THREADS;
    int from = part * THREADS, start = 0;
    float4 v[N];
    Row row{};
    const int* table = nullptr;
    if (index < a.valid_rows) {
        const float* columns = a.logits + index * a.row_stride;
        if (SPLIT) load_tiles(row_at(columns, a.width), from, stride, v);
        if (a.starts) start = a.starts[index];
        row = row_at(columns + start, a.lengths[index]);
        if (a.page_table) table = a.page_table + a.request_of_row[index] * a.table_stride;
    }
    if (row.length <= k) {
        if (part == 0) write(s, false, k, row.length, table, out);
        return;
    }
    clear_bins(s);
    if (threadIdx.x == 0) s.few_count = s.gathered = 0;
    if (IN_REGISTERS && row.quads <= IN_REGISTERS * THREADS) {
        if (part) return;
        select_in_registers<IN_REGISTERS>(s, row, k);
        write(s, true, k, row.length, table, out);
        return;
    }
    if (SPLIT) cluster_arrive();  // what others append to is ready
    if (SPLIT && start == 0) drop_behind(row, from, stride, v);
    else load_tiles(row, from, stride, v);
    const Sample sample = take_sample(s, row, k);
    if (SPLIT) cluster_wait();
    unsigned low = sample.low;
    if (low) {
        // All blocks of a cluster see the same sample, so the same threshold; the first gathers for all.
        const float below = float_below(low + sample.tied);
        for (;;) {
            const int position = 4 * (from + (int)threadIdx.x) - row.lead;
            append<N, true, SPLIT>(s, v, elements_above(v, below), position, stride);
            from += N * stride;
            if (from >= row.quads) break;
            load_tiles(row, from, stride, v);
        }
        if (SPLIT) {
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
    }
    if (part) return;
    int count = low ? s.gathered : 0, shift = sample.shift;
    if (sample.tied && count < k) count = gather_ties(s, row, k, float_of(low));
    if (low && (count < k || count > CAPACITY)) {
        // The sample misled. So far below, or above, it seldom does: a sixteenth of what is up to the highest element.
        const unsigned step = 1u << (shift + LOG_BINS - 4);
        low = count < k ? low - min(low - MINUS_INFINITY, step) : low + min(ALL - low, step);
        count = stream(s, row, float_below(max(low, MINUS_INFINITY + 1)));
    }
    if (count < k) {
        low = 0;
        shift = WHOLE_SHIFT;
    }
    if (count < k || count > CAPACITY) count = gather(s, row, k, low);
    select_items(s, row, count, k, low, shift, table, out);
}

// The longest rows of a prefill are its last: they start first. Where there are few, the blocks of a cluster share one.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) topk_rows(const Arguments a) {
    topk_row(a, SPLIT ? blockIdx.x / cluster_size() : gridDim.x - 1 - blockIdx.x);
}
