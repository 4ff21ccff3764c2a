// y = x W^T for packed weights. Each element of y is one sum along K in one order, whatever the number of rows.
#pragma once
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "pool.h"
#include "simd.h"

namespace minisgl {

// W [rows, cols] as panels of 16 rows, each [cols / kStep][16][kStep]. A panel lies where its rows lay before.
template <class T>
struct Matrix {
    const T* data = nullptr;
    int64_t rows = 0, cols = 0;     // `rows` may end within the last panel
    const float* bias = nullptr;    // [rows]

    int64_t panels() const { return (rows + kLanes - 1) / kLanes; }
    const T* panel(int64_t i) const { return data + i * kLanes * cols; }
    T at(int64_t row, int64_t col) const {
        constexpr int step = Product<T>::kStep;
        return panel(row / kLanes)[col / step * kLanes * step + row % kLanes * step + col % step];
    }
};

// In place; rows must be a multiple of 16 and cols of kStep. Needs memory for one panel.
template <class T>
void pack(T* w, int64_t rows, int64_t cols) {
    constexpr int step = Product<T>::kStep;
    std::vector<T> old(kLanes * cols);
    for (int64_t first = 0; first < rows; first += kLanes) {
        T* panel = w + first * cols;
        memcpy(old.data(), panel, old.size() * sizeof(T));
        for (int64_t k = 0; k < cols; k += step)
            for (int i = 0; i < kLanes; ++i)
                for (int j = 0; j < step; ++j) panel[(k * kLanes) + i * step + j] = old[i * cols + k + j];
    }
}

constexpr int64_t kAhead = 1 << 16;          // bytes
constexpr int64_t kSpread = 4;               // blocks
constexpr int64_t kSpreadBytes = 400 << 10;  // of a unit; two and the rows fit into the second-level cache
constexpr int kUnit = 4;                     // panels that are computed together
constexpr int kRowBlock = 12;                // rows that are
#if defined(__AMX_BF16__)
constexpr int kTiledRows = 32;  // ... of bfloat16: two tiles
template <class T>
constexpr bool has_tiles = std::is_same_v<T, bf16>;
#else
constexpr int kTiledRows = kRowBlock;
template <class T>
constexpr bool has_tiles = false;
#endif
// Rows whose sums with a whole unit have registers, where there are many of these.
constexpr int kUnitRows = kAccumulators >= 24 ? kAccumulators / kUnit : kRowBlock;
constexpr int64_t kFew = 20;  // rows; of more the products are bound by arithmetic

template <class T, int PANELS>
void product_rows(int rows, const X<T>* x, int64_t ldx, const T* const* panels, int64_t steps, Ahead ahead,
                  float* out) {
    constexpr int most = kAccumulators / PANELS > 0 ? (kAccumulators / PANELS < 12 ? kAccumulators / PANELS : 12) : 1;
    for (int first = 0; first < rows;) {
        int left = (rows - first + most - 1) / most, count = (rows - first + left - 1) / left;
        with_rows<most>(count, [&](auto n) {
            Vec sums[n][PANELS];
            for (auto& row : sums)
                for (Vec& v : row) v = Vec::all(0.0f);
            const auto ask = [&](int64_t k) INLINE_LAMBDA {
                UNROLL for (int j = 0; j < PANELS; ++j) ahead.ask(panels[j], k);
            };
            accumulate<T, n, PANELS>(sums, x + first * ldx, ldx, panels, kLanes * Product<T>::kStep, steps,
                                      first == 0 && ahead.offset, ask);
            for (int i = 0; i < n; ++i)
                UNROLL for (int j = 0; j < PANELS; ++j) sums[i][j].store(out + ((first + i) * kUnit + j) * kLanes);
        });
        first += count;
    }
}

#if defined(__AMX_BF16__)
// Linux lets a process use tiles when it has asked; false where it says no.
inline bool may_use_tiles() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0; }

// Constants, not variables of a function: GCC takes no notice that more than the first 8 bytes are read.
struct alignas(64) TileConfig {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
constexpr TileConfig kWholeTiles = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// To be around every use of tiles by a thread: other libraries may have set them up otherwise.
struct Tiles {
    const bool is_used;

    explicit Tiles(const TileConfig& config, bool is_used = true) : is_used(is_used) {
        if (is_used) _tile_loadconfig(&config);
    }
    ~Tiles() {
        if (is_used) _tile_release();
    }
};

constexpr int64_t kTiledCols = 256;  // of x and of a unit's panels: they stay in the first-level cache together

// As `product`, on tiles of 16 x 16; reads x, and writes out, up to the next multiple of 16 rows.
inline void product_tiles(int rows, const bf16* x, int64_t ldx, const bf16* const* panels, int count, int64_t cols,
                          Ahead ahead, float* out) {
    const Tiles tiles(kWholeTiles);
    constexpr int stride = kUnit * kLanes;
    const int64_t ask = 32 / Product<bf16>::kStep * ahead.stride;  // bytes for each 32 columns
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
            for (int64_t at = ahead.offset + k / 32 * ask; at < ahead.offset + (k / 32 + 1) * ask; at += 64) {
                request((const char*)left + at);
                if (is_wide) request((const char*)right + at);
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
    for (int64_t k = 0; k < cols; k += kTiledCols)
        for (int i = 0; i < count; i += 2) add(i, k, std::min(cols, k + kTiledCols));
}
#endif

// out [rows][kUnit * 16] for `count` panels.
template <class T>
void product(int rows, const X<T>* x, int64_t ldx, const T* const* panels, int count, int64_t cols, Ahead ahead,
             float* out) {
#if defined(__AMX_BF16__)
    if constexpr (has_tiles<T>)
        if (cols % 32 == 0) return product_tiles(rows, x, ldx, panels, count, cols, ahead, out);
#endif
    const int64_t steps = cols / Product<T>::kStep;
    if (count == kUnit && rows * kUnit <= kAccumulators)
        return product_rows<T, kUnit>(rows, x, ldx, panels, steps, ahead, out);
    int i = 0;
    if constexpr (kAccumulators >= 6)
        for (; i + 2 <= count; i += 2) product_rows<T, 2>(rows, x, ldx, panels + i, steps, ahead, out + i * kLanes);
    for (; i < count; ++i) product_rows<T, 1>(rows, x, ldx, panels + i, steps, ahead, out + i * kLanes);
}

// f(first panel, panels, their addresses) in parallel for units of W's panels. With `paired`, row i of W's first half
// stands beside row i of its second: the addresses' second half.
template <class W, class F>
void each_unit(Pool& pool, const Matrix<W>& w, int64_t m, bool paired, const F& f) {
    const int64_t across = paired ? w.panels() / 2 : w.panels(), each = paired ? kUnit / 2 : kUnit;
    const int64_t units = (across + each - 1) / each;
    const double work = (double)m * w.rows * w.cols;
    int pieces = (int)std::min<int64_t>(units, std::min<double>(work / 2e5 + 1, 16 * pool.size()));
    pool.run(pieces, [&](int piece, int) {
        for (int64_t u = part(units, pieces, piece); u < part(units, pieces, piece + 1); ++u) {
            const int64_t first = u * each, count = std::min(each, across - first);
            const W* panels[kUnit];
            for (int64_t j = 0; j < count; ++j) {
                panels[j] = w.panel(first + j);
                if (paired) panels[count + j] = w.panel(across + first + j);
            }
            f(first, (int)count, panels);
        }
    });
}

// What block `b` of rows asks for while it is computed with a unit of W that has `step` bytes a panel and step.
template <class W>
Ahead asked_by(int64_t b, int64_t blocks, const Matrix<W>& w, bool paired, int64_t step) {
    const int64_t panel = (w.panel(1) - w.panel(0)) * sizeof(W), bytes = (paired ? kUnit / 2 : kUnit) * panel;
    // Some of the next unit by each of the last blocks, so that memory has work all the time.
    if (1 < blocks && kSpreadBytes / 16 <= bytes && bytes <= kSpreadBytes) {
        const int64_t askers = std::min(blocks, kSpread), i = b - (blocks - askers);
        return i < 0 ? Ahead() : Ahead{bytes + panel * i / askers, (step + askers - 1) / askers};
    }
    // By the first block: the next unit if that is near; a panel that is longer than that goes on for long.
    return b == 0 ? Ahead{std::min(bytes, kAhead), step} : Ahead();
}

// compute(first row, rows, panels' addresses, their number, ahead, tile) and then finish(first row, rows, first panel,
// panels, tile) for blocks of up to `most` of m rows with each unit of W, in parallel. A tile is [rows][kUnit * 16].
// Where `finish` writes is asked for before, to(row, panel) for each, unless memory is what the product waits for.
template <class W, class C, class A, class F>
void each_block(Pool& pool, const Matrix<W>& w, int64_t m, int64_t most, int64_t step, bool paired, const C& compute,
                const A& to, const F& finish) {
    const int64_t blocks = (m + most - 1) / most;
    each_unit(pool, w, m, paired, [&](int64_t first, int count, const W* const* panels) {
        alignas(64) float tile[kTiledRows * kUnit * kLanes];
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t row = m * b / blocks;
            const int rows = (int)(m * (b + 1) / blocks - row);
            for (int i = 0; i < rows && m > kFew; ++i)
                for (int j = 0; j < count; ++j) request(to(row + i, first + j));
            compute(row, rows, panels, paired ? 2 * count : count, asked_by(b, blocks, w, paired, step), tile);
            finish(row, rows, first, count, tile);
        }
    });
}

// finish(first row, rows, first panel, panels, tile [rows][kUnit * 16]) for all of x [m, cols] W^T, in parallel; `to` as
// in `each_block`.
template <class T, class A, class F>
void gemm(Pool& pool, const Matrix<T>& w, const X<T>* x, int64_t ldx, int64_t m, bool paired, const A& to,
          const F& finish) {
    if (m == 0) return;
    // Sums of few rows with a whole unit load the least; but then W comes once for each few, even if from near.
    const int64_t most = has_tiles<T> ? kTiledRows : m > kFew ? kUnitRows : kRowBlock;
    constexpr int64_t step = kLanes * Product<T>::kStep * sizeof(T);
    each_block(
        pool, w, m, most, step, paired,
        [&](int64_t row, int rows, const T* const* panels, int count, Ahead ahead, float* tile) {
            product<T>(rows, x + row * ldx, ldx, panels, count, w.cols, ahead, tile);
        },
        to, finish);
}

// y [m, ldy] = x W^T + bias, or y += that.
template <class T, class W>
void linear(Pool& pool, const Matrix<W>& w, const X<T>* x, int64_t ldx, int64_t m, float* y, int64_t ldy, bool adds) {
    const auto to = [&](int64_t row, int64_t panel) { return y + row * ldy + panel * kLanes; };
    gemm<T>(pool, w, x, ldx, m, false, to, [&](int64_t row, int rows, int64_t panel, int count, const float* tile) {
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

// y [m, ldy] = silu(gate) * up, where x W^T + bias is gate and up side by side.
template <class T, class W>
void gated(Pool& pool, const Matrix<W>& w, const X<T>* x, int64_t ldx, int64_t m, X<T>* y, int64_t ldy) {
    const int64_t half = w.rows / 2;
    const auto to = [&](int64_t row, int64_t panel) { return y + row * ldy + panel * kLanes; };
    gemm<T>(pool, w, x, ldx, m, true, to, [&](int64_t row, int rows, int64_t panel, int count, const float* tile) {
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < count; ++j) {
                const int64_t col = (panel + j) * kLanes;
                Vec gate = Vec::load(tile + (i * kUnit + j) * kLanes);
                Vec up = Vec::load(tile + (i * kUnit + count + j) * kLanes);
                if (w.bias) {
                    gate = gate + Vec::load(w.bias + col);
                    up = up + Vec::load(w.bias + half + col);
                }
                put(to(row + i, panel + j), gate / (Vec::all(1.0f) + exp(Vec::all(0.0f) - gate)) * up);
            }
    });
}

}  // namespace minisgl
