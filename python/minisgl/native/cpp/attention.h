// Paged attention: blocks of 64 keys from position 0 on with the online softmax (Milakov and Gimelshein 2018,
// arXiv:1805.02867), the same steps for each query whether it comes alone or in a prompt.
#pragma once
#include "cache.h"
#include "gemm.h"
#include "memory.h"

namespace minisgl {

constexpr int kQueryRows = 48;

// A thread's memory for one block.
template <class T>
struct AttentionScratch {
    Aligned<X<T>> q, p;
    Aligned<float> s, o, most, mass, keep;
    Aligned<T> keys, values;

    AttentionScratch(int64_t rows, int64_t dim) {
        rows = (rows + kLanes - 1) / kLanes * kLanes;
        q.resize(rows * dim), p.resize(rows * kKeys);
        s.resize(rows * kKeys), o.resize(rows * dim);
        most.resize(rows), mass.resize(rows), keep.resize(rows);
        keys.resize(kKeys * dim), values.resize(kKeys * dim);
    }
};

template <class T, int GROUPS>
void score_rows(int rows, const X<T>* q, int64_t dim, const T* const* k, int64_t stride, Requests& next, float* s) {
    constexpr int most = kAccumulators / GROUPS > 0 ? (kAccumulators / GROUPS < 8 ? kAccumulators / GROUPS : 8) : 1;
    for (int first = 0; first < rows; first += most) {
        with_rows<most>(std::min(most, rows - first), [&](auto n) {
            Vec sums[n][GROUPS];
            for (auto& row : sums)
                for (Vec& v : row) v = Vec::all(0.0f);
            const int64_t steps = dim / Product<T>::kStep;
            accumulate<T, n, GROUPS>(sums, q + first * dim, dim, k, stride, steps, next.is_open(),
                                     [&](int64_t i) INLINE_LAMBDA { next.ask(i); });
            next.done += steps;
            for (int i = 0; i < n; ++i)
                UNROLL for (int j = 0; j < GROUPS; ++j) sums[i][j].store(s + (first + i) * kKeys + j * kLanes);
        });
    }
}

// o = o * keep + p V for PANELS * 16 dimensions.
template <class T, int PANELS>
void weigh_rows(int rows, const X<T>* p, const Groups<T>& g, int64_t column, int count, const float* keep,
                Requests& next, float* o, int64_t dim) {
    constexpr int step = Product<T>::kStep;
    constexpr int most = kAccumulators / PANELS > 0 ? (kAccumulators / PANELS < 8 ? kAccumulators / PANELS : 8) : 1;
    for (int first = 0; first < rows; first += most) {
        with_rows<most>(std::min(most, rows - first), [&](auto n) {
            Vec sums[n][PANELS];
            for (int i = 0; i < n; ++i)
                UNROLL for (int j = 0; j < PANELS; ++j)
                    sums[i][j] = Vec::load(o + (first + i) * dim + (column + j) * kLanes) * Vec::all(keep[first + i]);
            for (int i = 0; i * kLanes < count; ++i) {
                const T* panels[PANELS];
                UNROLL for (int j = 0; j < PANELS; ++j) panels[j] = g.v[i] + (column + j) * kLanes * step;
                const int steps = (std::min(kLanes, count - i * kLanes) + step - 1) / step;
                accumulate<T, n, PANELS>(sums, p + first * kKeys + i * kLanes, kKeys, panels, g.v_stride, steps,
                                         next.is_open(), [&](int64_t i) INLINE_LAMBDA { next.ask(i); });
                next.done += steps;
            }
            for (int i = 0; i < n; ++i)
                UNROLL for (int j = 0; j < PANELS; ++j)
                    sums[i][j].store(o + (first + i) * dim + (column + j) * kLanes);
        });
    }
}

#if defined(__AMX_BF16__)
// Tiles 5 and 7, of weights and values, have half the depth: pages may have 16 slots only. With up to 8 rows a product
// of theirs takes 9 cycles, with more 15.
constexpr TileConfig kManyRows = {1, 0, {}, {64, 64, 64, 64, 64, 32, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 8}};
constexpr TileConfig kFewRows = {1, 0, {}, {64, 64, 64, 64, 64, 32, 64, 64}, {8, 8, 8, 8, 8, 8, 16, 8}};

// As `score`, 16 rows at a time; reads q, and writes s, up to a multiple of 16 rows.
inline void score_tiles(int rows, const bf16* q, int64_t dim, const Groups<bf16>& g, int count, Requests& next,
                        float* s) {
    const int64_t stride = g.k_stride * 2;
    for (int first = 0; first < rows; first += kLanes) {
        const bool asks = next.is_open();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < dim; d += 32) {
            const int64_t at = d / 2 * g.k_stride;
            for (int i = 0; asks && i < 16; ++i) next.ask(d / 2 + i);
            _tile_loadd(4, q + first * dim + d, dim * 2);
            _tile_loadd(6, g.k[0] + at, stride);
            _tile_dpbf16ps(0, 4, 6);
            if (count <= 16) continue;
            _tile_loadd(6, g.k[1] + at, stride);
            _tile_dpbf16ps(1, 4, 6);
            if (count <= 32) continue;
            _tile_loadd(6, g.k[2] + at, stride);
            _tile_dpbf16ps(2, 4, 6);
            if (count <= 48) continue;
            _tile_loadd(6, g.k[3] + at, stride);
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

// As `weigh`, 16 rows at a time; reads p, and writes o, up to a multiple of 16 rows. A group of V is read as a whole.
inline void weigh_tiles(int rows, const bf16* p, const Groups<bf16>& g, int count, const float* keep, Requests& next,
                        float* o, int64_t dim) {
    const int64_t stride = g.v_stride * 2;
    for (int first = 0; first < rows; first += kLanes) {
        for (int r = first; r < std::min(first + kLanes, rows); ++r)
            for (int64_t d = 0; d < dim; d += kLanes)
                (Vec::load(o + r * dim + d) * Vec::all(keep[r])).store(o + r * dim + d);
        for (int64_t column = 0; column < dim; column += 64) {
            const bool is_wide = column + 32 < dim;
            float* out = o + first * dim + column;
            _tile_loadd(0, out, dim * 4);
            _tile_loadd(1, out + 16, dim * 4);
            if (is_wide) _tile_loadd(2, out + 32, dim * 4);
            if (is_wide) _tile_loadd(3, out + 48, dim * 4);
            for (int i = 0; i * kLanes < count; ++i) {
                const bf16* v = g.v[i] + column * 2;
                for (int j = 0; next.is_open() && j < 8; ++j, ++next.done) next.ask(0);
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

// The last group of a block with `count` keys, if it is not full, with zeros for what may be no numbers.
inline void fill_up(Groups<bf16>& g, int count, int64_t dim, bf16* memory) {
    const int last = count / kLanes, pairs = (count % kLanes + 1) / 2;
    if (pairs == 0) return;
    memcpy(memory, g.v[last], pairs * dim * 2 * sizeof(bf16));
    memset(memory + pairs * dim * 2, 0, (kLanes / 2 - pairs) * dim * 2 * sizeof(bf16));
    g.v[last] = memory;
}
#endif

// Whether attention is made of tiles.
template <class T>
bool is_tiled(int64_t dim) {
    return has_tiles<T> && dim % 32 == 0;
}

// s [rows][kKeys] = q K^T for `count` keys.
template <class T>
void score(int rows, const X<T>* q, int64_t dim, const Groups<T>& g, int count, Requests& next, float* s) {
#if defined(__AMX_BF16__)
    if constexpr (has_tiles<T>)
        if (is_tiled<T>(dim)) return score_tiles(rows, q, dim, g, count, next, s);
#endif
    if (count > kKeys - kLanes) return score_rows<T, kGroups>(rows, q, dim, g.k, g.k_stride, next, s);
    for (int i = 0; i * kLanes < count; ++i)
        score_rows<T, 1>(rows, q, dim, g.k + i, g.k_stride, next, s + i * kLanes);
}

// o [rows][dim] = o * keep + p V.
template <class T>
void weigh(int rows, const X<T>* p, const Groups<T>& g, int count, const float* keep, Requests& next, float* o,
           int64_t dim) {
#if defined(__AMX_BF16__)
    if constexpr (has_tiles<T>)
        if (is_tiled<T>(dim)) return weigh_tiles(rows, p, g, count, keep, next, o, dim);
#endif
    int64_t panel = 0;
    for (; panel + 4 <= dim / kLanes; panel += 4) weigh_rows<T, 4>(rows, p, g, panel, count, keep, next, o, dim);
    for (; panel < dim / kLanes; ++panel) weigh_rows<T, 1>(rows, p, g, panel, count, keep, next, o, dim);
}

// A block's scores -> its weights; `keep`: by what the rows have to multiply what they have gathered so far. The row r
// sees keys [low(r), high(r)). Row by row only what needs a row: the steps of many wait for nothing but each other.
template <class T, class L, class H>
void soften(int rows, float scale, const L& low, const H& high, AttentionScratch<T>& scratch) {
    for (int r = 0; r < rows; ++r) {
        const int64_t from = low(r), to = high(r);
        float* s = &scratch.s[r * kKeys];
        Vec top = Vec::all(scratch.most[r]);
        for (int at = 0; at < kKeys; at += kLanes) {
            Vec v = Vec::load(s + at) * Vec::all(scale);
            if (from > at || to < at + kLanes) v = only(v, (int)from - at, (int)to - at);
            v.store(s + at);
            top = max(v, top);
        }
        scratch.keep[r] = largest(top);
    }
    for (int r = 0; r < rows; r += kLanes) {
        const Vec peak = Vec::load(&scratch.keep[r]), keep = exp(Vec::load(&scratch.most[r]) - peak);
        peak.store(&scratch.most[r]);
        keep.store(&scratch.keep[r]);
        (Vec::load(&scratch.mass[r]) * keep).store(&scratch.mass[r]);
    }
    for (int r = 0; r < rows; ++r) {
        const Vec peak = Vec::all(scratch.most[r]);
        Vec total = Vec::all(0.0f);
        for (int at = 0; at < kKeys; at += kLanes) {
            const Vec v = exp(Vec::load(&scratch.s[r * kKeys + at]) - peak);
            total = total + v;
            put(&scratch.p[r * kKeys + at], v);
        }
        scratch.mass[r] += sum(total);
    }
}

// An item's part of q -> its part of out, both [tokens, ld], heads of `dim` side by side. For each block that it computes
// it asks for one of `ahead`.
template <class T>
void attend(const Cache<T>& cache, const Item& item, Walk& ahead, int64_t group, const int32_t* table,
            int64_t table_width, float scale, const X<T>* q, X<T>* out, int64_t ld, AttentionScratch<T>& scratch) {
    const Span& span = *item.span;
    const int64_t from = item.from, to = item.to, h = item.head, dim = cache.dim, column = h * group * dim;
    const int32_t* pages = table + span.row * table_width;
    const int rows = (int)((to - from) * group);
#if defined(__AMX_BF16__)
    const Tiles tiles(rows > 8 ? kManyRows : kFewRows, is_tiled<T>(dim));
#endif
    for (int r = 0; r < rows; ++r) {
        const X<T>* in = q + (span.token + from + r / group - span.start) * ld + column + r % group * dim;
        memcpy(&scratch.q[r * dim], in, dim * sizeof(X<T>));
        scratch.most[r] = -1e30f, scratch.mass[r] = 0.0f;
        memset(&scratch.o[r * dim], 0, dim * sizeof(float));
    }
    for (int64_t first = item.first_block(); first < to; first += kKeys) {
        Requests keys(cache, table, table_width, false, ahead), values(cache, table, table_width, true, ahead);
        ahead.next();
        const int count = (int)std::min<int64_t>(kKeys, to - first);
        Groups<T> g = find_block(cache, pages, h, first, count, scratch.keys.data(), scratch.values.data());
#if defined(__AMX_BF16__)
        if constexpr (has_tiles<T>)
            if (is_tiled<T>(dim) && cache.is_packed()) fill_up(g, count, dim, scratch.values.data());
#endif
        score<T>(rows, scratch.q.data(), dim, g, count, keys, scratch.s.data());
        soften<T>(
            rows, scale, [&](int r) { return span.window ? from + r / group + 1 - span.window - first : 0; },
            [&](int r) { return std::min<int64_t>(from + r / group + 1 - first, kKeys); }, scratch);
        weigh<T>(rows, scratch.p.data(), g, count, scratch.keep.data(), values, scratch.o.data(), dim);
        for (; values.is_open(); ++values.done) values.ask(0);
    }
    for (int r = 0; r < rows; ++r) {
        X<T>* to_row = out + (span.token + from + r / group - span.start) * ld + column + r % group * dim;
        const Vec mass = Vec::all(scratch.mass[r]);
        for (int64_t d = 0; d < dim; d += kLanes) put(to_row + d, Vec::load(&scratch.o[r * dim + d]) / mass);
    }
}

}  // namespace minisgl
