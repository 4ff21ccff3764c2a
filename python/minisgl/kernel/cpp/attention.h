// Paged attention: blocks of 64 keys from position 0 on with the online softmax (Milakov and Gimelshein 2018,
// arXiv:1805.02867), the same steps for each query whether it comes alone or in a prompt.
#pragma once
#include <vector>

#include "cache.h"

namespace minisgl {

constexpr int kQueryRows = 48;

// A thread's memory for one block.
template <class T>
struct AttentionScratch {
    std::vector<X<T>> q, p;
    std::vector<float> s, o, most, mass, keep;
    std::vector<T> keys, values;

    AttentionScratch(int64_t rows, int64_t dim) {
        q.resize(rows * dim), p.resize(rows * kKeys);
        s.resize(rows * kKeys), o.resize(rows * dim);
        const int64_t lanes = (rows + kLanes - 1) / kLanes * kLanes;
        most.resize(lanes), mass.resize(lanes), keep.resize(lanes);
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
        const Groups<T> g = find_block(cache, pages, h, first, count, scratch.keys.data(), scratch.values.data());
        if (count > kKeys - kLanes) {
            score_rows<T, kGroups>(rows, scratch.q.data(), dim, g.k, g.k_stride, keys, scratch.s.data());
        } else {
            for (int i = 0; i * kLanes < count; ++i)
                score_rows<T, 1>(rows, scratch.q.data(), dim, g.k + i, g.k_stride, keys, scratch.s.data() + i * kLanes);
        }
        soften<T>(
            rows, scale, [&](int r) { return span.window ? from + r / group + 1 - span.window - first : 0; },
            [&](int r) { return std::min<int64_t>(from + r / group + 1 - first, kKeys); }, scratch);
        int64_t panel = 0;
        for (; panel + 4 <= dim / kLanes; panel += 4)
            weigh_rows<T, 4>(rows, scratch.p.data(), g, panel, count, scratch.keep.data(), values, scratch.o.data(),
                             dim);
        for (; panel < dim / kLanes; ++panel)
            weigh_rows<T, 1>(rows, scratch.p.data(), g, panel, count, scratch.keep.data(), values, scratch.o.data(),
                             dim);
        for (; values.is_open(); ++values.done) values.ask(0);
    }
    for (int r = 0; r < rows; ++r) {
        X<T>* to_row = out + (span.token + from + r / group - span.start) * ld + column + r % group * dim;
        const Vec mass = Vec::all(scratch.mass[r]);
        for (int64_t d = 0; d < dim; d += kLanes) put(to_row + d, Vec::load(&scratch.o[r * dim + d]) / mass);
    }
}

}  // namespace minisgl
