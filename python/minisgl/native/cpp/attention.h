// Paged attention: blocks of 64 keys from position 0 on with the online softmax (Milakov and Gimelshein 2018,
// arXiv:1805.02867). A query takes the same steps alone, in a batch and in a prompt.
#pragma once
#include "cache.h"
#include "gemm.h"
#include "memory.h"

namespace minisgl {

// Rows of an item; blocks in 8 bits are decoded for each item, so more rows share that work.
constexpr int kQueryRows = 48, kQueryRows8Bit = 192;

// Scratch memory of one thread for one block of keys.
template <class T>
struct AttentionScratch {
    Aligned<X<T>> q, p;
    Aligned<float> s, o, row_max, row_sum, rescale;
    Aligned<T> keys, values;

    AttentionScratch(int64_t rows, int64_t dim) {
        rows = (rows + kLanes - 1) / kLanes * kLanes;
        q.resize(rows * dim), p.resize(rows * kKeys);
        s.resize(rows * kKeys), o.resize(rows * dim);
        row_max.resize(rows), row_sum.resize(rows), rescale.resize(rows);
        keys.resize(kKeys * dim), values.resize(kKeys * dim);
    }
};

template <class T, int GROUPS>
void score_rows(int rows, const X<T>* q, int64_t dim, const T* const* k, int64_t stride, BlockPrefetch& next,
                float* s) {
    constexpr int max_rows = std::clamp(kAccumulators / GROUPS, 1, 8);
    for (int first = 0; first < rows; first += max_rows) {
        with_rows<max_rows>(std::min(max_rows, rows - first), [&](auto n) {
            Vec sums[n][GROUPS];
            for (auto& row : sums)
                for (Vec& v : row) v = Vec::all(0.0f);
            const int64_t steps = dim / Dot<T>::kStep;
            accumulate<T, n, GROUPS>(sums, q + first * dim, dim, k, stride, steps, next.is_open(),
                                     [&](int64_t i) INLINE_LAMBDA { next.fetch(i); });
            next.done += steps;
            for (int i = 0; i < n; ++i)
                UNROLL for (int j = 0; j < GROUPS; ++j) sums[i][j].store(s + (first + i) * kKeys + j * kLanes);
        });
    }
}

// o = o * rescale + p V for PANELS * 16 dimensions.
template <class T, int PANELS>
void weigh_rows(int rows, const X<T>* p, const Groups<T>& g, int64_t column, int count, const float* rescale,
                BlockPrefetch& next, float* o, int64_t dim) {
    constexpr int step = Dot<T>::kStep;
    constexpr int max_rows = std::clamp(kAccumulators / PANELS, 1, 8);
    for (int first = 0; first < rows; first += max_rows) {
        with_rows<max_rows>(std::min(max_rows, rows - first), [&](auto n) {
            Vec sums[n][PANELS];
            for (int i = 0; i < n; ++i)
                UNROLL for (int j = 0; j < PANELS; ++j)
                    sums[i][j] =
                        Vec::load(o + (first + i) * dim + (column + j) * kLanes) * Vec::all(rescale[first + i]);
            for (int i = g.begin; i * kLanes < count; ++i) {
                const T* panels[PANELS];
                UNROLL for (int j = 0; j < PANELS; ++j) panels[j] = g.v[i] + (column + j) * kLanes * step;
                const int steps = (std::min(kLanes, count - i * kLanes) + step - 1) / step;
                accumulate<T, n, PANELS>(sums, p + first * kKeys + i * kLanes, kKeys, panels, g.v_stride, steps,
                                         next.is_open(), [&](int64_t i) INLINE_LAMBDA { next.fetch(i); });
                next.done += steps;
            }
            for (int i = 0; i < n; ++i)
                UNROLL for (int j = 0; j < PANELS; ++j)
                    sums[i][j].store(o + (first + i) * dim + (column + j) * kLanes);
        });
    }
}

#if defined(__AMX_BF16__)
// Tiles 5 and 7 (softmax weights and values) have half the depth, because a page may have 16 slots only. A tile
// multiplication takes 9 cycles with up to 8 rows, 15 cycles with more.
constexpr TileConfig kManyRows = {1, 0, {}, {64, 64, 64, 64, 64, 32, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 8}};
constexpr TileConfig kFewRows = {1, 0, {}, {64, 64, 64, 64, 64, 32, 64, 64}, {8, 8, 8, 8, 8, 8, 16, 8}};

// `score` with AMX, 16 rows at a time. Reads q and writes s up to the next multiple of 16 rows.
inline void score_amx(int rows, const bf16* q, int64_t dim, const Groups<bf16>& g, int count, BlockPrefetch& next,
                        float* s) {
    const int64_t stride = g.k_stride * 2;
    for (int first = 0; first < rows; first += kLanes) {
        const bool prefetches = next.is_open();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < dim; d += 32) {
            const int64_t offset = d / 2 * g.k_stride;
            for (int i = 0; prefetches && i < 16; ++i) next.fetch(d / 2 + i);
            _tile_loadd(4, q + first * dim + d, dim * 2);
            _tile_loadd(6, g.k[0] + offset, stride);
            _tile_dpbf16ps(0, 4, 6);
            if (count <= 16) continue;
            _tile_loadd(6, g.k[1] + offset, stride);
            _tile_dpbf16ps(1, 4, 6);
            if (count <= 32) continue;
            _tile_loadd(6, g.k[2] + offset, stride);
            _tile_dpbf16ps(2, 4, 6);
            if (count <= 48) continue;
            _tile_loadd(6, g.k[3] + offset, stride);
            _tile_dpbf16ps(3, 4, 6);
        }
        next.done += dim / 2;
        float* out = s + first * kKeys;
        _tile_stored(0, out, kKeys * 4);
        _tile_stored(1, out + 16, kKeys * 4);
        _tile_stored(2, out + 32, kKeys * 4);
        _tile_stored(3, out + 48, kKeys * 4);
    }
}

// `weigh` with AMX, 16 rows at a time. Reads p and writes o up to the next multiple of 16 rows, and whole groups of V.
inline void weigh_amx(int rows, const bf16* p, const Groups<bf16>& g, int count, const float* rescale,
                      BlockPrefetch& next, float* o, int64_t dim) {
    const int64_t stride = g.v_stride * 2;
    for (int first = 0; first < rows; first += kLanes) {
        for (int r = first; r < std::min(first + kLanes, rows); ++r)
            for (int64_t d = 0; d < dim; d += kLanes)
                (Vec::load(o + r * dim + d) * Vec::all(rescale[r])).store(o + r * dim + d);
        for (int64_t column = 0; column < dim; column += 64) {
            const bool is_wide = column + 32 < dim;
            float* out = o + first * dim + column;
            _tile_loadd(0, out, dim * 4);
            _tile_loadd(1, out + 16, dim * 4);
            if (is_wide) _tile_loadd(2, out + 32, dim * 4);
            if (is_wide) _tile_loadd(3, out + 48, dim * 4);
            for (int i = g.begin; i * kLanes < count; ++i) {
                const bf16* v = g.v[i] + column * 2;
                for (int j = 0; next.is_open() && j < 8; ++j, ++next.done) next.fetch(0);
                _tile_loadd(5, p + first * kKeys + i * kLanes, kKeys * 2);
                _tile_loadd(7, v, stride);
                _tile_dpbf16ps(0, 5, 7);
                _tile_loadd(7, v + 32, stride);
                _tile_dpbf16ps(1, 5, 7);
                if (!is_wide) continue;
                _tile_loadd(7, v + 64, stride);
                _tile_dpbf16ps(2, 5, 7);
                _tile_loadd(7, v + 96, stride);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, out, dim * 4);
            _tile_stored(1, out + 16, dim * 4);
            if (is_wide) _tile_stored(2, out + 32, dim * 4);
            if (is_wide) _tile_stored(3, out + 48, dim * 4);
        }
    }
}

// Copy the last group of a block of `count` keys if the group is partial, with zeros for slots that may hold NaN.
inline void fill_up(Groups<bf16>& g, int count, int64_t dim, bf16* memory) {
    const int last = count / kLanes, pairs = (count % kLanes + 1) / 2;
    if (pairs == 0) return;
    memcpy(memory, g.v[last], pairs * dim * 2 * sizeof(bf16));
    memset(memory + pairs * dim * 2, 0, (kLanes / 2 - pairs) * dim * 2 * sizeof(bf16));
    g.v[last] = memory;
}
#endif

// Whether attention uses AMX tiles.
template <class T>
bool uses_amx(int64_t dim) {
    return has_amx<T> && dim % 32 == 0;
}

// s [rows][kKeys] = q K^T for `count` keys.
template <class T>
void score(int rows, const X<T>* q, int64_t dim, const Groups<T>& g, int count, BlockPrefetch& next, float* s) {
#if defined(__AMX_BF16__)
    if constexpr (has_amx<T>)
        if (uses_amx<T>(dim)) return score_amx(rows, q, dim, g, count, next, s);
#endif
    if (count > kKeys - kLanes) return score_rows<T, kGroups>(rows, q, dim, g.k, g.k_stride, next, s);
    for (int i = 0; i * kLanes < count; ++i)
        score_rows<T, 1>(rows, q, dim, g.k + i, g.k_stride, next, s + i * kLanes);
}

// o [rows][dim] = o * rescale + p V.
template <class T>
void weigh(int rows, const X<T>* p, const Groups<T>& g, int count, const float* rescale, BlockPrefetch& next, float* o,
           int64_t dim) {
#if defined(__AMX_BF16__)
    if constexpr (has_amx<T>)
        if (uses_amx<T>(dim)) return weigh_amx(rows, p, g, count, rescale, next, o, dim);
#endif
    int64_t panel = 0;
    for (; panel + 4 <= dim / kLanes; panel += 4) weigh_rows<T, 4>(rows, p, g, panel, count, rescale, next, o, dim);
    for (; panel < dim / kLanes; ++panel) weigh_rows<T, 1>(rows, p, g, panel, count, rescale, next, o, dim);
}

// s = cap tanh(scale s / cap), where tanh(x) = 1 - 2 / (1 + exp(2 x)).
inline void soft_cap(int64_t count, float scale, float cap, float* s) {
    const Vec one = Vec::all(1.0f), two = Vec::all(2.0f), factor = Vec::all(2.0f * scale / cap);
    for (int64_t i = 0; i < count; i += kLanes) {
        const int n = (int)std::min<int64_t>(kLanes, count - i);
        store_part(s + i, (one - two / (one + exp(load_part(s + i, n) * factor))) * Vec::all(cap), n);
    }
}

// Turn a block's scores into softmax weights, and set `rescale`, the factor for each row's sums so far. Row r attends
// to keys [low(r), high(r)). Exponentials of 16 rows are computed together, as one row's steps wait for each other.
template <class T, class L, class H>
void softmax_block(int rows, float scale, const L& low, const H& high, AttentionScratch<T>& scratch) {
    for (int r = 0; r < rows; ++r) {
        const int64_t from = low(r), to = high(r);
        float* s = &scratch.s[r * kKeys];
        Vec top = Vec::all(scratch.row_max[r]);
        for (int offset = 0; offset < kKeys; offset += kLanes) {
            Vec v = Vec::load(s + offset) * Vec::all(scale);
            if (from > offset || to < offset + kLanes) v = mask_lanes(v, (int)from - offset, (int)to - offset);
            v.store(s + offset);
            top = max(v, top);
        }
        scratch.rescale[r] = max_lane(top);
    }
    for (int r = 0; r < rows; r += kLanes) {
        const Vec peak = Vec::load(&scratch.rescale[r]), rescale = exp(Vec::load(&scratch.row_max[r]) - peak);
        peak.store(&scratch.row_max[r]);
        rescale.store(&scratch.rescale[r]);
        (Vec::load(&scratch.row_sum[r]) * rescale).store(&scratch.row_sum[r]);
    }
    for (int r = 0; r < rows; ++r) {
        const Vec peak = Vec::all(scratch.row_max[r]);
        Vec total = Vec::all(0.0f);
        for (int offset = 0; offset < kKeys; offset += kLanes) {
            const Vec v = exp(Vec::load(&scratch.s[r * kKeys + offset]) - peak);
            total = total + v;
            put(&scratch.p[r * kKeys + offset], v);
        }
        scratch.row_sum[r] += sum(total);
    }
}

// Attention of one work item: reads its part of q, writes its part of out, both [tokens, ld] with heads of `dim` side
// by side. Each block of keys prefetches one block of `ahead`. A row with a sink begins with the sum of its exponential.
template <class T>
void attend(const Cache<T>& cache, const Item& item, BlockIterator& ahead, int64_t group, const int32_t* table,
            int64_t table_width, float scale, float cap, const float* sinks, const X<T>* q, X<T>* out, int64_t ld,
            AttentionScratch<T>& scratch) {
    const Span& span = *item.span;
    const int64_t from = item.from, to = item.to, h = item.head, dim = cache.dim, column = h * group * dim;
    const int32_t* pages = table + span.row * table_width;
    const int rows = (int)((to - from) * group);
#if defined(__AMX_BF16__)
    const AmxScope tiles(rows > 8 ? kManyRows : kFewRows, uses_amx<T>(dim));
#endif
    for (int r = 0; r < rows; ++r) {
        const X<T>* in = q + (span.token + from + r / group - span.start) * ld + column + r % group * dim;
        memcpy(&scratch.q[r * dim], in, dim * sizeof(X<T>));
        scratch.row_max[r] = sinks ? sinks[h * group + r % group] : -1e30f, scratch.row_sum[r] = sinks ? 1.0f : 0.0f;
        memset(&scratch.o[r * dim], 0, dim * sizeof(float));
    }
    for (int64_t first = item.first_block(); first < to; first += kKeys) {
        BlockPrefetch keys(cache, table, table_width, false, ahead), values(cache, table, table_width, true, ahead);
        ahead.next();
        const int count = (int)std::min<int64_t>(kKeys, to - first);
        Groups<T> g = find_block(cache, pages, h, first, count, item.low(), scratch.keys.data(), scratch.values.data());
#if defined(__AMX_BF16__)
        if constexpr (has_amx<T>)
            if (uses_amx<T>(dim) && cache.is_packed() && !cache.scale) fill_up(g, count, dim, scratch.values.data());
#endif
        score<T>(rows, scratch.q.data(), dim, g, count, keys, scratch.s.data());
        if (cap != 0.0f) soft_cap(rows * kKeys, scale, cap, scratch.s.data());
        softmax_block<T>(
            rows, cap != 0.0f ? 1.0f : scale, [&](int r) { return span.window ? from + r / group + 1 - span.window - first : 0; },
            [&](int r) { return std::min<int64_t>(from + r / group + 1 - first, kKeys); }, scratch);
        weigh<T>(rows, scratch.p.data(), g, count, scratch.rescale.data(), values, scratch.o.data(), dim);
        for (; values.is_open(); ++values.done) values.fetch(0);
    }
    for (int r = 0; r < rows; ++r) {
        X<T>* to_row = out + (span.token + from + r / group - span.start) * ld + column + r % group * dim;
        const Vec total = Vec::all(scratch.row_sum[r]);
        for (int64_t d = 0; d < dim; d += kLanes) put(to_row + d, Vec::load(&scratch.o[r * dim + d]) / total);
    }
}

}  // namespace minisgl
