// GEMM y = x W^T with packed weights. Each element of y is one sum along K in one order, for any number of rows.
#pragma once
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>

#include "layout.h"
#include "pool.h"
#include "simd.h"

namespace minisgl {

// What adapters add to the sums of a GEMM: b[s - 1] inner for a token in slot s > 0, see ops/adapters.py.
struct Added {
    const LowRank* weights = nullptr;  // of the projection that the matrix is of, or null
    int64_t first = 0;                 // the row of the projection that is the matrix's first
    const int32_t* slots = nullptr;    // [rows of x], or null
    const void* inner = nullptr;       // X<T> [rows of x, P r]: a x + shift
};

// W [rows, cols] as panels of 16 rows, each [cols / kStep][16][kStep]. A panel takes the memory of its rows.
template <class T>
struct Matrix {
    const T* data = nullptr;
    int64_t rows = 0, cols = 0;     // `rows` may end within the last panel
    const float* bias = nullptr;    // [rows]
    Added added = {};

    int64_t panels() const { return (rows + kLanes - 1) / kLanes; }
    const T* panel(int64_t i) const { return data + i * kLanes * cols; }
    T at(int64_t row, int64_t col) const {
        constexpr int step = Dot<T>::kStep;
        return panel(row / kLanes)[col / step * kLanes * step + row % kLanes * step + col % step];
    }
};

// Matrix `i` of several of a shape, one after another, whose rows are a multiple of 16 each.
template <class M>
M stacked(M first, int64_t i) {
    first.data = first.panel(i * first.panels()), first.bias = first.bias ? first.bias + i * first.rows : nullptr;
    return first;
}

// Rows of x, and which of the stacked matrices they are multiplied with.
struct RowRange {
    int64_t first, stop, matrix = 0;
};
using RowRanges = std::vector<RowRange>;

// Pack in place with scratch memory for one panel. Rows must be a multiple of 16, cols a multiple of kStep.
template <class T>
void pack(T* w, int64_t rows, int64_t cols) {
    constexpr int step = Dot<T>::kStep;
    std::vector<T> old(kLanes * cols);
    for (int64_t first = 0; first < rows; first += kLanes) {
        T* panel = w + first * cols;
        memcpy(old.data(), panel, old.size() * sizeof(T));
        for (int64_t k = 0; k < cols; k += step)
            for (int i = 0; i < kLanes; ++i)
                for (int j = 0; j < step; ++j) panel[(k * kLanes) + i * step + j] = old[i * cols + k + j];
    }
}

constexpr int64_t kPrefetchBytes = 1 << 16;      // largest distance
constexpr int64_t kPrefetchBlocks = 4;           // row blocks that prefetch the next unit
constexpr int64_t kMaxSpreadBytes = 400 << 10;  // of a unit; two units and the rows fit into L2
constexpr int kUnit = 4;                         // panels that are computed together
constexpr int kRowBlock = 12;                    // rows that are computed together
#if defined(__AMX_BF16__)
constexpr int kTileRows = 32;  // rows of bfloat16 that are computed together: two AMX tiles
template <class T>
constexpr bool has_amx = std::is_same_v<T, bf16>;
#else
constexpr int kTileRows = kRowBlock;
template <class T>
constexpr bool has_amx = false;
#endif
// Rows whose sums with a whole unit fit into registers, on machines with many registers.
constexpr int kUnitRows = kAccumulators >= 24 ? kAccumulators / kUnit : kRowBlock;
constexpr int64_t kFew = 20;  // with more rows GEMMs are bound by arithmetic

template <class T, int PANELS>
void gemm_rows(int rows, const X<T>* x, int64_t ldx, const T* const* panels, int64_t steps, Prefetch ahead,
                  float* out) {
    constexpr int max_rows = std::clamp(kAccumulators / PANELS, 1, 12);
    for (int first = 0; first < rows;) {
        int passes = (rows - first + max_rows - 1) / max_rows, count = (rows - first + passes - 1) / passes;
        with_rows<max_rows>(count, [&](auto n) {
            Vec sums[n][PANELS];
            for (auto& row : sums)
                for (Vec& v : row) v = Vec::all(0.0f);
            const auto fetch = [&](int64_t k) INLINE_LAMBDA {
                UNROLL for (int j = 0; j < PANELS; ++j) ahead.fetch(panels[j], k);
            };
            accumulate<T, n, PANELS>(sums, x + first * ldx, ldx, panels, kLanes * Dot<T>::kStep, steps,
                                      first == 0 && ahead.offset, fetch);
            for (int i = 0; i < n; ++i)
                UNROLL for (int j = 0; j < PANELS; ++j) sums[i][j].store(out + ((first + i) * kUnit + j) * kLanes);
        });
        first += count;
    }
}

#if defined(__AMX_BF16__)
// Ask Linux for permission to use AMX tiles; false if refused.
inline bool request_amx() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0; }

// Keep configurations constexpr at namespace scope: GCC assumes that only the first 8 bytes of a local are read.
struct alignas(64) TileConfig {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
constexpr TileConfig kGemmTiles = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// Configures tiles for its lifetime. Each use needs its own: other libraries may configure tiles differently.
struct AmxScope {
    const bool is_used;

    explicit AmxScope(const TileConfig& config, bool is_used = true) : is_used(is_used) {
        if (is_used) _tile_loadconfig(&config);
    }
    ~AmxScope() {
        if (is_used) _tile_release();
    }
};

constexpr int64_t kAmxCols = 256;  // of x and of a unit's panels: both stay in L1

// `gemm_block` with AMX tiles of 16 x 16. Reads x and writes out up to the next multiple of 16 rows.
inline void gemm_amx(int rows, const bf16* x, int64_t ldx, const bf16* const* panels, int count, int64_t cols,
                          Prefetch ahead, float* out) {
    const AmxScope tiles(kGemmTiles);
    constexpr int stride = kUnit * kLanes;
    const int64_t fetch = 32 / Dot<bf16>::kStep * ahead.stride;  // bytes for every 32 columns
    const bool is_tall = rows > 16;
    const auto add = [&](int i, int64_t from, int64_t to) INLINE_LAMBDA {
        const bool is_wide = i + 1 < count;
        const bf16 *left = panels[i], *right = is_wide ? panels[i + 1] : left;
        float* sums = out + i * kLanes;
        if (from == 0) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, sums, stride * 4);
            if (is_wide) _tile_loadd(1, sums + kLanes, stride * 4);
            if (is_tall) _tile_loadd(2, sums + 16 * stride, stride * 4);
            if (is_tall && is_wide) _tile_loadd(3, sums + 16 * stride + kLanes, stride * 4);
        }
        for (int64_t k = from; k < to; k += 32) {
            for (int64_t at = ahead.offset + k / 32 * fetch; at < ahead.offset + (k / 32 + 1) * fetch; at += 64) {
                prefetch((const char*)left + at);
                if (is_wide) prefetch((const char*)right + at);
            }
            _tile_loadd(4, x + k, ldx * 2);
            _tile_loadd(6, left + k * kLanes, 64);
            _tile_dpbf16ps(0, 4, 6);
            if (is_tall) {
                _tile_loadd(5, x + 16 * ldx + k, ldx * 2);
                _tile_dpbf16ps(2, 5, 6);
            }
            if (is_wide) {
                _tile_loadd(7, right + k * kLanes, 64);
                _tile_dpbf16ps(1, 4, 7);
                if (is_tall) _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums, stride * 4);
        if (is_wide) _tile_stored(1, sums + kLanes, stride * 4);
        if (is_tall) _tile_stored(2, sums + 16 * stride, stride * 4);
        if (is_tall && is_wide) _tile_stored(3, sums + 16 * stride + kLanes, stride * 4);
    };
    for (int64_t k = 0; k < cols; k += kAmxCols)
        for (int i = 0; i < count; i += 2) add(i, k, std::min(cols, k + kAmxCols));
}
#endif

// out [rows][kUnit * 16] for `count` panels.
template <class T>
void gemm_block(int rows, const X<T>* x, int64_t ldx, const T* const* panels, int count, int64_t cols, Prefetch ahead,
             float* out) {
#if defined(__AMX_BF16__)
    if constexpr (has_amx<T>)
        if (cols % 32 == 0) return gemm_amx(rows, x, ldx, panels, count, cols, ahead, out);
#endif
    const int64_t steps = cols / Dot<T>::kStep;
    if (count == kUnit && rows * kUnit <= kAccumulators)
        return gemm_rows<T, kUnit>(rows, x, ldx, panels, steps, ahead, out);
    int i = 0;
    if constexpr (kAccumulators >= 6)
        for (; i + 2 <= count; i += 2) gemm_rows<T, 2>(rows, x, ldx, panels + i, steps, ahead, out + i * kLanes);
    for (; i < count; ++i) gemm_rows<T, 1>(rows, x, ldx, panels + i, steps, ahead, out + i * kLanes);
}

// The ranks that adapter `i` (slot - 1) uses, a multiple of 16; all if the slot has NaN.
template <class T>
int64_t rank_of(const LowRank& w, int64_t i) {
    const float rank = to_float(((const T*)w.ranks)[i * w.stride]);
    return rank < (float)w.rank ? (int64_t)rank : w.rank;
}

// Prefetch what `add_adapters` reads for row `row`.
template <class T>
void prefetch_adapter(const Added& added, int64_t row, int64_t col) {
    const LowRank& w = *added.weights;
    const int64_t slot = added.slots[row], bytes = slot ? rank_of<T>(w, slot - 1) * kLanes * sizeof(T) : 0;
    const char* panel = (const char*)((const T*)w.b + (slot - 1) * w.stride + (added.first + col) * w.rank);
    for (int64_t i = 0; i < bytes; i += 64) prefetch(panel + i);
}

// Add to the sums [rows][kUnit * 16] of x's rows from `row` on, of one panel that begins at row `col` of the matrix.
template <class T>
void add_adapters(const Added& added, int64_t row, int rows, int64_t col, float* sums) {
    const LowRank& w = *added.weights;
    const int64_t ld = w.modules * w.rank;
    col += added.first;
    for (int i = 0, end; i < rows; i = end) {
        const int32_t slot = added.slots[row + i];
        for (end = i + 1; end < rows && added.slots[row + end] == slot;) ++end;
        const int64_t rank = slot ? rank_of<T>(w, slot - 1) : 0;
        for (const int64_t* part = w.rows; rank && part < w.rows + 3 * w.num_rows; part += 3) {
            const int first = (int)std::max<int64_t>(part[0] - col, 0), n = (int)std::min<int64_t>(part[1] - col, kLanes) - first;
            if (n <= 0) continue;
            alignas(64) float own[kTileRows * kUnit * kLanes];
            const T* panel = (const T*)w.b + (slot - 1) * w.stride + col * w.rank;
            const X<T>* inner = (const X<T>*)added.inner + (row + i) * ld + part[2] * w.rank;
            gemm_rows<T, 1>(end - i, inner, ld, &panel, rank / Dot<T>::kStep, Prefetch(), own);
            for (int t = i; t < end; ++t) {
                float* to = sums + t * kUnit * kLanes + first;
                store_part(to, load_part(to, n) + load_part(own + (t - i) * kUnit * kLanes + first, n), n);
            }
        }
    }
}

// What row block `b` prefetches while it is multiplied with a unit of W that has `step` bytes for each panel and step.
template <class W>
Prefetch prefetch_of(int64_t b, int64_t blocks, const Matrix<W>& w, bool paired, int64_t step) {
    const int64_t panel = (w.panel(1) - w.panel(0)) * sizeof(W), bytes = (paired ? kUnit / 2 : kUnit) * panel;
    // Each of the last row blocks prefetches a part of the next unit, so memory is busy all the time.
    if (1 < blocks && kMaxSpreadBytes / 16 <= bytes && bytes <= kMaxSpreadBytes) {
        const int64_t fetchers = std::min(blocks, kPrefetchBlocks), i = b - (blocks - fetchers);
        return i < 0 ? Prefetch() : Prefetch{bytes + panel * i / fetchers, (step + fetchers - 1) / fetchers};
    }
    // The first row block prefetches the next unit if it is near, else further parts of the same long panels.
    return b == 0 ? Prefetch{std::min(bytes, kPrefetchBytes), step} : Prefetch();
}

// Call compute(first row, rows, panels' addresses, panels, ahead, tile), then finish(W, first row, rows, first panel,
// panels, tile), for blocks of the ranges' rows with each unit of panels of their W in parallel. Blocks have up to
// `few` rows, or `many` in a range of many rows. Tile: [rows][kUnit * 16]. With `paired`, the second half of the
// addresses are the panels of W's second half that belong to the first ones (gate and up). The output, to(row, panel),
// is prefetched unless the GEMM is bound by memory.
template <class T, class W, class C, class A, class F>
void for_each_block(Pool& pool, const Matrix<W>& stack, const RowRanges& ranges, int64_t few, int64_t many,
                    int64_t step, bool paired, const C& compute, const A& to, const F& finish) {
    const int64_t across = paired ? stack.panels() / 2 : stack.panels(), each = paired ? kUnit / 2 : kUnit;
    const int64_t units = (across + each - 1) / each, all = units * (int64_t)ranges.size();
    const double work = (double)ranges.back().stop * stack.rows * stack.cols;
    const int pieces = (int)std::min<int64_t>(all, std::min<double>(work / 2e5 + 1, 16 * pool.size()));
    pool.run(pieces, [&](int piece, int) {
        alignas(64) float tile[kTileRows * kUnit * kLanes];
        for (int64_t u = part(all, pieces, piece); u < part(all, pieces, piece + 1); ++u) {
            const RowRange& range = ranges[u / units];
            const Matrix<W> w = stacked(stack, range.matrix);
            const int64_t first = u % units * each, m = range.stop - range.first, max_rows = m > kFew ? many : few;
            const int64_t blocks = (m + max_rows - 1) / max_rows;
            const int count = (int)std::min(each, across - first);
            const W* panels[kUnit];
            for (int64_t j = 0; j < count; ++j) {
                panels[j] = w.panel(first + j);
                if (paired) panels[count + j] = w.panel(across + first + j);
            }
            for (int64_t b = 0; b < blocks; ++b) {
                const int64_t row = range.first + m * b / blocks;
                const int rows = (int)(range.first + m * (b + 1) / blocks - row);
                for (int i = 0; i < rows && m > kFew; ++i)
                    for (int j = 0; j < count; ++j) prefetch(to(row + i, first + j));
                const auto each_panel = [&](const auto& f) {
                    for (int j = 0; w.added.slots && j < (paired ? 2 * count : count); ++j)
                        f((j < count ? first + j : across + first + j - count) * kLanes, tile + j * kLanes);
                };
                each_panel([&](int64_t col, float*) { prefetch_adapter<T>(w.added, row, col); });
                compute(row, rows, panels, paired ? 2 * count : count, prefetch_of(b, blocks, w, paired, step), tile);
                each_panel([&](int64_t col, float* sums) { add_adapters<T>(w.added, row, rows, col, sums); });
                finish(w, row, rows, first, count, tile);
            }
        }
    });
}

// Call finish(W, first row, rows, first panel, panels, tile [rows][kUnit * 16]) for all of x [rows, cols] W^T, in
// parallel, where each range of rows has its own W. `to`: see `for_each_block`.
template <class T, class A, class F>
void gemm(Pool& pool, const Matrix<T>& stack, const X<T>* x, int64_t ldx, const RowRanges& ranges, bool paired,
          const A& to, const F& finish) {
    // Few rows with a whole unit need the fewest loads of x, but W is then read once per few rows, if only from L2.
    constexpr int64_t few = has_amx<T> ? kTileRows : kRowBlock, many = has_amx<T> ? kTileRows : kUnitRows;
    constexpr int64_t step = kLanes * Dot<T>::kStep * sizeof(T);
    for_each_block<T>(
        pool, stack, ranges, few, many, step, paired,
        [&](int64_t row, int rows, const T* const* panels, int count, Prefetch ahead, float* tile) {
            gemm_block<T>(rows, x + row * ldx, ldx, panels, count, stack.cols, ahead, tile);
        },
        to, finish);
}

// y [rows, ldy] = x W^T + bias; with `adds`, y += x W^T + bias.
template <class T, class W, class In>
void linear(Pool& pool, const Matrix<W>& stack, const In* x, int64_t ldx, const RowRanges& ranges, float* y,
            int64_t ldy, bool adds) {
    const auto to = [&](int64_t row, int64_t panel) { return y + row * ldy + panel * kLanes; };
    gemm<T>(pool, stack, x, ldx, ranges, false, to,
            [&](const Matrix<W>& w, int64_t row, int rows, int64_t panel, int count, const float* tile) {
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < count; ++j) {
                const int64_t col = (panel + j) * kLanes;
                float* out = to(row + i, panel + j);
                const int n = (int)std::min<int64_t>(kLanes, w.rows - col);
                Vec v = Vec::load(tile + (i * kUnit + j) * kLanes);
                if (w.bias) v = v + load_part(w.bias + col, n);
                if (adds) v = load_part(out, n) + v;
                store_part(out, v, n);
            }
    });
}

// See `ops/reference.py: ACTIVATIONS` and `OUTPUT_GATES`.
INLINE Vec activate(Activation kind, Vec x) {
    const Vec zero = Vec::all(0.0f), one = Vec::all(1.0f);
    if (kind == kRelu2) return max(zero, x) * max(zero, x);
    if (kind == kSigmoid) return one / (one + exp(zero - x));
    if (kind == kSoftplus) {  // log(1 + e^x) without overflow
        float logs[kLanes];
        exp(min(x, zero - x)).store(logs);
        for (float& e : logs) e = std::log1p(e);
        return max(zero, x) + Vec::load(logs);
    }
    if (kind == kGelu) {
        float erf[kLanes];
        (x * Vec::all(0.70710678f)).store(erf);
        for (float& e : erf) e = std::erf(e);
        return Vec::all(0.5f) * x * (one + Vec::load(erf));
    }
    // The tangent is a sigmoid: (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)).
    const Vec z = kind == kSilu ? x : Vec::all(1.59576912f) * fma(x * x * x, Vec::all(0.044715f), x);
    return x / (one + exp(zero - z));
}

// See `ops/reference.py: gate_and_mul`. NaN stays NaN.
INLINE Vec gate_and_mul(Activation kind, Vec gate, Vec up) {
    if (kind != kClamped) return activate(kind, gate) * up;
    const Vec zero = Vec::all(0.0f), one = Vec::all(1.0f), limit = Vec::all(7.0f);
    gate = min(limit, gate), up = max(zero - limit, min(limit, up));
    return gate / (one + exp(gate * Vec::all(-1.702f))) * (up + one);
}

// y [rows, ldy] = f(x W^T + bias); with `gated`, f of gate and up, where x W^T + bias has them side by side.
template <class T, class W>
void activated(Pool& pool, const Matrix<W>& stack, const X<T>* x, int64_t ldx, const RowRanges& ranges, X<T>* y,
               int64_t ldy, Activation f, bool gated) {
    const int64_t half = stack.rows / 2;
    const auto to = [&](int64_t row, int64_t panel) { return y + row * ldy + panel * kLanes; };
    gemm<T>(pool, stack, x, ldx, ranges, gated, to,
            [&](const Matrix<W>& w, int64_t row, int rows, int64_t panel, int count, const float* tile) {
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < count; ++j) {
                const int64_t col = (panel + j) * kLanes;
                const auto at = [&](int unit, int64_t first) INLINE_LAMBDA {
                    const Vec v = Vec::load(tile + (i * kUnit + unit) * kLanes);
                    return w.bias ? v + Vec::load(w.bias + first) : v;
                };
                put(to(row + i, panel + j), gated ? gate_and_mul(f, at(j, col), at(count + j, half + col))
                                                  : activate(f, at(j, col)));
            }
    });
}

}  // namespace minisgl
