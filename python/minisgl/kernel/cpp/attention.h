// Paged attention: blocks of 64 keys from position 0 on with the online softmax (Milakov and Gimelshein 2018,
// arXiv:1805.02867), the same steps for each query whether it comes alone or in a prompt.
//
// Pages of at least 16 slots hold K as [D / kStep][page][kStep] and V as [page / kStep][D][kStep], so that both products
// read them like packed weights; smaller pages hold rows [page][D] and are put together first.
#pragma once
#include "gemm.h"

namespace minisgl {

constexpr int kBlocksAhead = 2;  // where a block is short, the one before makes up for it
constexpr int kKeys = 64, kGroups = kKeys / kLanes, kQueryRows = 48;

// One layer's K/V: [pages, 2, kv_heads, page, head_dim].
template <class T>
struct Cache {
    T* data;
    int64_t kv_heads, page, dim;

    static constexpr int kStep = Product<T>::kStep;
    bool is_packed() const { return page >= kLanes; }
    T* head(int64_t page_id, bool is_v, int64_t h) const {
        return data + ((page_id * 2 + is_v) * kv_heads + h) * page * dim;
    }
    // What is beyond the last token of a sequence is never scored, but V's partner in a step of K must be a number.
    // `is_first`, `is_last`: of its sequence in this step; so nobody else writes to a pair with one who is both.
    void store(int64_t slot, int64_t h, const T* k, const T* v, bool is_first, bool is_last) const {
        T *ks = head(slot / page, false, h), *vs = head(slot / page, true, h);
        const int64_t at = slot % page;
        if (!is_packed()) {
            memcpy(ks + at * dim, k, dim * sizeof(T));
            memcpy(vs + at * dim, v, dim * sizeof(T));
            return;
        }
        for (int64_t d = 0; d < dim; d += kStep) memcpy(ks + (d * page + at * kStep), k + d, kStep * sizeof(T));
        T* pair = vs + at / kStep * dim * kStep;
        if constexpr (kStep == 2)
            if (is_first && is_last) {
                for (int64_t d = 0; d < dim; ++d) {
                    uint32_t both;
                    memcpy(&both, pair + d * 2, 4);
                    both = at % 2 ? (both & 0xffff) | (uint32_t)v[d] << 16 : v[d];
                    memcpy(pair + d * 2, &both, 4);
                }
                return;
            }
        for (int64_t d = 0; d < dim; ++d) pair[d * kStep + at % kStep] = v[d];
        if (kStep == 2 && is_last && at % 2 == 0)
            for (int64_t d = 0; d < dim; ++d) pair[d * 2 + 1] = 0;
    }
};

// Queries of one sequence at positions [start, stop).
struct Span {
    int64_t row, start, stop, token;  // `token`: where the first stands in the step
    int64_t window;                   // positions that each sees, 0: all
};

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

// Queries [from, to) of `span` for the query heads of KV head `head`.
struct Item {
    const Span* span;
    int64_t from, to, head;

    int64_t first_block() const {
        return span->window ? std::max<int64_t>(from + 1 - span->window, 0) / kKeys * kKeys : 0;
    }
};

// Where a group of 16 keys and values is, one pointer for each of the block's groups.
template <class T>
struct Groups {
    const T *k[kGroups], *v[kGroups];
    int64_t k_stride, v_stride;  // elements from one step to the next
};

template <class T>
Groups<T> find_block(const Cache<T>& cache, const int32_t* pages, int64_t h, int64_t first, int count,
                     AttentionScratch<T>& scratch) {
    constexpr int step = Product<T>::kStep;
    Groups<T> g;
    const int64_t dim = cache.dim, page = cache.page;
    g.k_stride = (cache.is_packed() ? page : kLanes) * step;
    g.v_stride = dim * step;
    for (int i = 0; i * kLanes < count; ++i) {
        const int64_t position = first + i * kLanes;
        if (cache.is_packed()) {
            const int64_t id = pages[position / page], at = position % page;
            g.k[i] = cache.head(id, false, h) + at * step;
            g.v[i] = cache.head(id, true, h) + at * dim;
            continue;
        }
        T *k = &scratch.keys[i * kLanes * dim], *v = &scratch.values[i * kLanes * dim];
        for (int64_t j = 0; j < kLanes; ++j) {
            const bool is_there = i * kLanes + j < count;
            const int64_t id = is_there ? pages[(position + j) / page] : 0, at = (position + j) % page;
            const T *from_k = cache.head(id, false, h) + at * dim, *from_v = cache.head(id, true, h) + at * dim;
            for (int64_t d = 0; d < dim; ++d) {
                k[(d / step * kLanes + j) * step + d % step] = is_there ? from_k[d] : T{};
                v[(j / step * dim + d) * step + j % step] = is_there ? from_v[d] : T{};
            }
        }
        g.k[i] = k, g.v[i] = v;
    }
    return g;
}

// The blocks of items, one after the other.
struct Walk {
    const Item *item, *end;
    int64_t first;

    Walk(const Item* begin, const Item* end, int64_t blocks) : item(begin), end(end), first(begin->first_block()) {
        for (; blocks > 0; --blocks) next();
    }
    void next() {
        if (item == end || (first += kKeys) < item->to) return;
        if (++item < end) first = item->first_block();
    }
};

// Requests for a block's keys or values, each for a line of every group. They are spread over what is computed meanwhile:
// there are as many as scores have steps.
struct Requests {
    const char* at[kGroups] = {};
    int64_t stride = 0, count = 0, done = 0;

    template <class T>
    Requests(const Cache<T>& cache, const int32_t* table, int64_t table_width, bool is_v, const Walk& walk) {
        if (!cache.is_packed() || walk.item == walk.end) return;
        constexpr int64_t step = Product<T>::kStep;
        const Item& item = *walk.item;
        for (int i = 0; i < kGroups; ++i) {
            const int64_t position = walk.first + i * kLanes < item.to ? walk.first + i * kLanes : walk.first;
            const int64_t id = table[item.span->row * table_width + position / cache.page], at = position % cache.page;
            this->at[i] = (const char*)(cache.head(id, is_v, item.head) + at * (is_v ? cache.dim : step));
        }
        stride = is_v ? 64 : cache.page * step * (int64_t)sizeof(T);
        count = cache.dim / step;
    }
    bool is_open() const { return done < count; }
    INLINE void ask(int64_t i) const {
        UNROLL for (int g = 0; g < kGroups; ++g) request(at[g] + (done + i) * stride);
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

// An item's part of q -> its part of out, both [tokens, ld], heads of `dim` side by side. While it computes its blocks, it
// asks for as many of `ahead`.
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
        const Groups<T> g = find_block(cache, pages, h, first, count, scratch);
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
            weigh_rows<T, 4>(rows, scratch.p.data(), g, panel, count, scratch.keep.data(), values, scratch.o.data(), dim);
        for (; panel < dim / kLanes; ++panel)
            weigh_rows<T, 1>(rows, scratch.p.data(), g, panel, count, scratch.keep.data(), values, scratch.o.data(), dim);
        for (; values.is_open(); ++values.done) values.ask(0);
    }
    for (int r = 0; r < rows; ++r) {
        X<T>* to_row = out + (span.token + from + r / group - span.start) * ld + column + r % group * dim;
        const Vec mass = Vec::all(scratch.mass[r]);
        for (int64_t d = 0; d < dim; d += kLanes) put(to_row + d, Vec::load(&scratch.o[r * dim + d]) / mass);
    }
}

}  // namespace minisgl
