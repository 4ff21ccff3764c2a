// The layout of K/V pages, the blocks of keys that attention walks through, and their prefetching.
//
// Pages of at least 16 slots hold K as [D / kStep][page][kStep] and V as [page / kStep][D][kStep], so that both GEMMs
// of attention read them like packed weights. Smaller pages hold rows [page][D] and are copied into that layout first.
// Pages in 8 bits (E4M3, with a scale for each row) have at least 16 slots, and are decoded into that layout.
#pragma once
#include <algorithm>

#include "simd.h"

namespace minisgl {

constexpr int kKeys = 64, kGroups = kKeys / kLanes;  // keys in a block, and groups of 16 in a block
constexpr int kBlocksAhead = 2;  // prefetched: a short block leaves time for less than the next one

// One layer's K/V: [pages, 2, kv_heads, page, head_dim] of T, or of E4M3 with `scale` [pages, 2, kv_heads, page]; both
// with `stride` bytes from page to page.
template <class T>
struct Cache {
    char* data;
    int64_t stride, kv_heads, page, dim;
    char* scale;  // null for pages of T

    static constexpr int kStep = Dot<T>::kStep;
    bool is_packed() const { return page >= kLanes; }
    int64_t width() const { return scale ? 1 : sizeof(T); }  // bytes of an element
    int64_t row(bool is_v, int64_t h) const { return (is_v * kv_heads + h) * page; }
    template <class E>
    E* head(int64_t page_id, bool is_v, int64_t h) const {
        return (E*)(data + page_id * stride + row(is_v, h) * dim * width());
    }
    float* scales(int64_t page_id, bool is_v, int64_t h) const {
        return (float*)(scale + page_id * stride) + row(is_v, h);
    }
    // Store one token. Slots beyond the last token are never scored, but the other value of a pair must be finite.
    // `is_first`, `is_last`: of its sequence in this step. If both are true, no other thread writes to the pair.
    void store(int64_t slot, int64_t h, const T* k, const T* v, bool is_first, bool is_last) const {
        const int64_t id = slot / page, offset = slot % page;
        if (scale) return store_8bit(id, offset, h, k, v);
        T *ks = head<T>(id, false, h), *vs = head<T>(id, true, h);
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
    void store_8bit(int64_t id, int64_t offset, int64_t h, const T* k, const T* v) const {
        uint8_t *ks = head<uint8_t>(id, false, h), *vs = head<uint8_t>(id, true, h);
        const float k_scale = scales(id, false, h)[offset] = row_scale(k);
        const float v_scale = scales(id, true, h)[offset] = row_scale(v);
        for (int64_t d = 0; d < dim; ++d) {
            ks[(d / kStep * page + offset) * kStep + d % kStep] = to_e4m3(to_float(k[d]) / k_scale);
            vs[(offset / kStep * dim + d) * kStep + offset % kStep] = to_e4m3(to_float(v[d]) / v_scale);
        }
    }
    // NaN for a row with a number that is not finite.
    float row_scale(const T* x) const {
        float amax = 0.0f, zero = 0.0f;  // `zero` is NaN after a number that is not finite
        for (int64_t d = 0; d < dim; ++d) {
            amax = std::max(amax, std::fabs(to_float(x[d])));
            zero += to_float(x[d]) * 0.0f;
        }
        const float found = amax / 448.0f;  // 0 for the smallest numbers, too
        return (found > 0.0f ? found : 1.0f) + zero;
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

    // The first position that a query attends to. Pages before it may be another sequence's.
    int64_t low() const { return span->window ? std::max<int64_t>(from + 1 - span->window, 0) : 0; }
    int64_t first_block() const { return low() / kKeys * kKeys; }
};

// Addresses of the keys and values of a block, for each group of 16 from `begin` on.
template <class T>
struct Groups {
    int begin;
    const T *k[kGroups], *v[kGroups];
    int64_t k_stride, v_stride;  // elements from one step to the next
};

// Decode `count` of 16 slots from `offset` of a page on. Values of the other slots are 0.
template <class T>
void decode_group(const Cache<T>& cache, int64_t id, int64_t offset, int64_t h, int count, T* keys, T* values) {
    constexpr int step = Dot<T>::kStep;
    const int64_t dim = cache.dim;
    const uint8_t* k = cache.template head<uint8_t>(id, false, h) + offset * step;
    const uint8_t* v = cache.template head<uint8_t>(id, true, h) + offset * dim;
    float k_scale[kLanes * step], v_scale[kLanes] = {};
    for (int i = 0; i < kLanes * step; ++i) k_scale[i] = cache.scales(id, false, h)[offset + i / step];
    std::copy_n(cache.scales(id, true, h) + offset, count, v_scale);
    for (int64_t d = 0; d < dim; d += step)
        UNROLL for (int i = 0; i < kLanes * step; i += kLanes)
            put(keys + d * kLanes + i, from_e4m3(k + d * cache.page + i) * Vec::load(k_scale + i));
    for (int j = 0; j < kLanes; j += step) {
        float factors[kLanes];
        for (int i = 0; i < kLanes; ++i) factors[i] = v_scale[j + i % step];
        const Vec factor = Vec::load(factors);
        for (int64_t i = j * dim; i < (j + step) * dim; i += kLanes)
            put(values + i, j < count ? from_e4m3(v + i) * factor : Vec::all(0.0f));
    }
}

// The block of `count` keys at `first`, without those before `low`.
template <class T>
Groups<T> find_block(const Cache<T>& cache, const int32_t* pages, int64_t h, int64_t first, int count, int64_t low,
                     T* keys, T* values) {
    constexpr int step = Dot<T>::kStep;
    Groups<T> g;
    g.begin = (int)(std::max<int64_t>(low - first, 0) / kLanes);
    const int64_t dim = cache.dim, page = cache.page;
    g.k_stride = (cache.is_packed() && !cache.scale ? page : kLanes) * step;
    g.v_stride = dim * step;
    for (int i = 0; i * kLanes < count; ++i) {
        const int64_t position = first + i * kLanes;
        if (cache.is_packed()) {
            const int64_t id = pages[position / page], offset = position % page;
            g.k[i] = cache.template head<T>(id, false, h) + offset * step;
            g.v[i] = cache.template head<T>(id, true, h) + offset * dim;
            if (!cache.scale) continue;
            g.k[i] = keys + i * kLanes * dim, g.v[i] = values + i * kLanes * dim;
            decode_group(cache, id, offset, h, std::min(kLanes, count - i * kLanes), keys + i * kLanes * dim,
                         values + i * kLanes * dim);
            continue;
        }
        T *k = keys + i * kLanes * dim, *v = values + i * kLanes * dim;
        for (int64_t j = 0; j < kLanes; ++j) {
            const bool is_there = i * kLanes + j < count && position + j >= low;
            const int64_t id = is_there ? pages[(position + j) / page] : 0, offset = (position + j) % page;
            const T* from_k = cache.template head<T>(id, false, h) + offset * dim;
            const T* from_v = cache.template head<T>(id, true, h) + offset * dim;
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
            const int64_t bytes = offset * (is_v ? cache.dim : step) * cache.width();
            lines[i] = cache.template head<char>(id, is_v, item.head) + bytes;
        }
        stride = is_v ? 64 : cache.page * step * cache.width();
        count = cache.dim / step;
    }
    bool is_open() const { return done < count; }
    INLINE void fetch(int64_t i) const {
        UNROLL for (int g = 0; g < kGroups; ++g) prefetch(lines[g] + (done + i) * stride);
    }
};

}  // namespace minisgl
