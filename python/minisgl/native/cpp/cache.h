// The layout of K/V pages, the blocks of keys that attention walks through, and their prefetching.
//
// Pages of at least 16 slots hold K as [D / kStep][page][kStep] and V as [page / kStep][D][kStep], so that both GEMMs
// of attention read them like packed weights. Smaller pages hold rows [page][D] and are copied into that layout first.
#pragma once
#include <algorithm>

#include "simd.h"

namespace minisgl {

constexpr int kKeys = 64, kGroups = kKeys / kLanes;  // keys in a block, and groups of 16 in a block
constexpr int kBlocksAhead = 2;  // prefetched: a short block leaves time for less than the next one

// One layer's K/V: [pages, 2, kv_heads, page, head_dim].
template <class T>
struct Cache {
    T* data;
    int64_t kv_heads, page, dim;

    static constexpr int kStep = Dot<T>::kStep;
    bool is_packed() const { return page >= kLanes; }
    T* head(int64_t page_id, bool is_v, int64_t h) const {
        return data + ((page_id * 2 + is_v) * kv_heads + h) * page * dim;
    }
    // Store one token. Slots beyond the last token are never scored, but the other value of a pair must be finite.
    // `is_first`, `is_last`: of its sequence in this step. If both are true, no other thread writes to the pair.
    void store(int64_t slot, int64_t h, const T* k, const T* v, bool is_first, bool is_last) const {
        T *ks = head(slot / page, false, h), *vs = head(slot / page, true, h);
        const int64_t offset = slot % page;
        if (!is_packed()) {
            memcpy(ks + offset * dim, k, dim * sizeof(T));
            memcpy(vs + offset * dim, v, dim * sizeof(T));
            return;
        }
        for (int64_t d = 0; d < dim; d += kStep) memcpy(ks + (d * page + offset * kStep), k + d, kStep * sizeof(T));
        T* pair = vs + offset / kStep * dim * kStep;
        if constexpr (kStep == 2)
            if (is_first && is_last) {
                for (int64_t d = 0; d < dim; ++d) {
                    uint32_t both;
                    memcpy(&both, pair + d * 2, 4);
                    both = offset % 2 ? (both & 0xffff) | (uint32_t)v[d] << 16 : v[d];
                    memcpy(pair + d * 2, &both, 4);
                }
                return;
            }
        for (int64_t d = 0; d < dim; ++d) pair[d * kStep + offset % kStep] = v[d];
        if (kStep == 2 && is_last && offset % 2 == 0)
            for (int64_t d = 0; d < dim; ++d) pair[d * 2 + 1] = 0;
    }
};

// Queries of one sequence at positions [start, stop).
struct Span {
    int64_t row, start, stop, token;  // `token`: index of the first in the step
    int64_t window;                   // positions that each query attends to, 0: all
};

// Queries [from, to) of `span` for the query heads of KV head `head`.
struct Item {
    const Span* span;
    int64_t from, to, head;

    int64_t first_block() const {
        return span->window ? std::max<int64_t>(from + 1 - span->window, 0) / kKeys * kKeys : 0;
    }
};

// Addresses of the keys and values of a block, for each group of 16.
template <class T>
struct Groups {
    const T *k[kGroups], *v[kGroups];
    int64_t k_stride, v_stride;  // elements from one step to the next
};

template <class T>
Groups<T> find_block(const Cache<T>& cache, const int32_t* pages, int64_t h, int64_t first, int count, T* keys,
                     T* values) {
    constexpr int step = Dot<T>::kStep;
    Groups<T> g;
    const int64_t dim = cache.dim, page = cache.page;
    g.k_stride = (cache.is_packed() ? page : kLanes) * step;
    g.v_stride = dim * step;
    for (int i = 0; i * kLanes < count; ++i) {
        const int64_t position = first + i * kLanes;
        if (cache.is_packed()) {
            const int64_t id = pages[position / page], offset = position % page;
            g.k[i] = cache.head(id, false, h) + offset * step;
            g.v[i] = cache.head(id, true, h) + offset * dim;
            continue;
        }
        T *k = keys + i * kLanes * dim, *v = values + i * kLanes * dim;
        for (int64_t j = 0; j < kLanes; ++j) {
            const bool is_there = i * kLanes + j < count;
            const int64_t id = is_there ? pages[(position + j) / page] : 0, offset = (position + j) % page;
            const T *from_k = cache.head(id, false, h) + offset * dim, *from_v = cache.head(id, true, h) + offset * dim;
            for (int64_t d = 0; d < dim; ++d) {
                k[(d / step * kLanes + j) * step + d % step] = is_there ? from_k[d] : T{};
                v[(j / step * dim + d) * step + j % step] = is_there ? from_v[d] : T{};
            }
        }
        g.k[i] = k, g.v[i] = v;
    }
    return g;
}

// Iterates over the blocks of keys of consecutive work items.
struct BlockIterator {
    const Item *item, *end;
    int64_t first;

    BlockIterator(const Item* begin, const Item* end, int64_t blocks)
        : item(begin), end(end), first(begin->first_block()) {
        for (; blocks > 0; --blocks) next();
    }
    void next() {
        if (item == end || (first += kKeys) < item->to) return;
        if (++item < end) first = item->first_block();
    }
};

// Prefetches a block's keys or values while another block is computed. Each fetch covers a cache line of every group;
// there are as many fetches as scoring has steps.
struct BlockPrefetch {
    const char* lines[kGroups] = {};
    int64_t stride = 0, count = 0, done = 0;

    template <class T>
    BlockPrefetch(const Cache<T>& cache, const int32_t* table, int64_t table_width, bool is_v,
                  const BlockIterator& walk) {
        if (!cache.is_packed() || walk.item == walk.end) return;
        constexpr int64_t step = Dot<T>::kStep;
        const Item& item = *walk.item;
        for (int i = 0; i < kGroups; ++i) {
            const int64_t position = walk.first + i * kLanes < item.to ? walk.first + i * kLanes : walk.first;
            const int64_t id = table[item.span->row * table_width + position / cache.page];
            const int64_t offset = position % cache.page;
            lines[i] = (const char*)(cache.head(id, is_v, item.head) + offset * (is_v ? cache.dim : step));
        }
        stride = is_v ? 64 : cache.page * step * (int64_t)sizeof(T);
        count = cache.dim / step;
    }
    bool is_open() const { return done < count; }
    INLINE void fetch(int64_t i) const {
        UNROLL for (int g = 0; g < kGroups; ++g) prefetch(lines[g] + (done + i) * stride);
    }
};

}  // namespace minisgl
