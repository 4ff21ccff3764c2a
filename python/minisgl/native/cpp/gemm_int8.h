// GEMM with 8-bit weights: w = q * scale, with a scale for every 32 weights of a row.
//
// Activations are quantized to 8 bits, too, with a scale for the same 32. Sums of 32 products are then integers, exact
// on every instruction set.
#pragma once
#include <algorithm>
#include <memory>

#include "gemm.h"

namespace minisgl {

constexpr int kGroup = 32;
// Integer sums that are computed together: those and their float totals fit into registers.
constexpr int kInt8Sums = kAccumulators >= 24 ? 10 : kAccumulators;
constexpr int kPairRows = kAccumulators >= 24 ? kInt8Sums / 2 : kRowBlock;  // rows of a small block

#if defined(__AVX512VNNI__)
using Quant = int8_t;
constexpr int kOffset = 128;  // added to stored weights: the instruction multiplies signed bytes with unsigned bytes
#else
using Quant = int16_t;
constexpr int kOffset = 0;
#endif
constexpr int kDepth = 4 / sizeof(Quant);  // columns per dot-product instruction
constexpr int kSteps = kGroup / kDepth;
constexpr int kFetches = kSteps + 8 / kSteps;  // prefetches of a block, of at most 64 bytes each

// 16 rows x 32 columns.
struct Int8 {
    uint8_t q[kSteps][kLanes][kDepth];
    bf16 scale[kLanes];

    float at(int64_t lane, int64_t col) const {
        return (int8_t)(q[col / kDepth][lane][col % kDepth] - kOffset) * to_float(scale[lane]);
    }
};

// W [rows, cols] as panels of 16 rows, each [cols / 32] blocks.
template <>
struct Matrix<Int8> {
    const Int8* data = nullptr;
    int64_t rows = 0, cols = 0;
    const float* bias = nullptr;

    int64_t panels() const { return (rows + kLanes - 1) / kLanes; }
    const Int8* panel(int64_t i) const { return data + i * (cols / kGroup); }
    float at(int64_t row, int64_t col) const {
        return panel(row / kLanes)[col / kGroup].at(row % kLanes, col % kGroup);
    }
};

// Quantize w [rows, cols] to rows / 16 * cols / 32 blocks. Rows must be a multiple of 16, cols a multiple of 32.
template <class T>
void quantize(const T* w, int64_t rows, int64_t cols, Int8* out) {
    for (int64_t first = 0; first < rows; first += kLanes)
        for (int64_t col = 0; col < cols; col += kGroup, ++out)
            for (int lane = 0; lane < kLanes; ++lane) {
                const T* from = w + (first + lane) * cols + col;
                float most = 0.0f;
                for (int k = 0; k < kGroup; ++k) {
                    const float x = std::fabs(to_float(from[k]));
                    if (x > most || x != x) most = x;  // keeps NaN
                }
                uint32_t bits;
                memcpy(&bits, &(most /= 127.0f), 4);
                const bool is_finite = most < INFINITY;
                out->scale[lane] = is_finite ? (bits + 0xffff) >> 16 : to_bf16(NAN);  // up: no q beyond 127
                const float scale = to_float(out->scale[lane]);
                for (int k = 0; k < kGroup; ++k) {
                    const float x = is_finite && scale > 0.0f ? std::nearbyint(to_float(from[k]) / scale) : 0.0f;
                    out->q[k / kDepth][lane][k % kDepth] = (uint8_t)((int8_t)x + kOffset);
                }
            }
}

// 32 activations as x * scale.
struct QuantGroup {
    Quant x[kGroup];
    float scale;
    int32_t start;  // initial value of a sum, which cancels the weights' offset
};

template <class T>
INLINE void quantize_group(const T* from, QuantGroup& to) {
    float f[kGroup], largest;
    uint32_t bits[kGroup], most = 0;
    for (int k = 0; k < kGroup; ++k) f[k] = to_float(from[k]);
    memcpy(bits, f, sizeof(f));
    for (int k = 0; k < kGroup; ++k) most = std::max(most, bits[k] & 0x7fffffff);
    memcpy(&largest, &most, 4);
    const bool is_finite = largest < INFINITY;
    if (!is_finite || largest < 1e-30f) {  // keep Inf and NaN visible; take denormal groups for 0
        memset(&to, 0, sizeof(to));
        to.scale = is_finite ? 0.0f : NAN;
        return;
    }
    const float factor = 127.0f / largest;
    int32_t all = 0;
    for (int k = 0; k < kGroup; ++k) {
        const int32_t nearest = (int32_t)((f[k] * factor + 12582912.0f) - 12582912.0f);
        to.x[k] = (Quant)nearest;
        all += nearest;
    }
    to.scale = largest / 127.0f;
    to.start = -kOffset * all;
}

// sum + the dot product of `kDepth` numbers each; with VNNI w is unsigned.
INLINE Int reg_dot(Int sum, Int w, Int x) {
#if defined(__AVX512VNNI__)
    return (Int)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
    return sum + (Int)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVX2__)
    return sum + (Int)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__SSE2__)
    return sum + (Int)_mm_madd_epi16((__m128i)w, (__m128i)x);
#else
    return sum + (w << 16 >> 16) * (x << 16 >> 16) + (w >> 16) * (x >> 16);
#endif
}

// Integers of 16 rows: `kDepth` columns each, or one sum each.
struct IntVec {
    Int r[kRegs];

    static INLINE IntVec all(int32_t x) {
        IntVec s;
        UNROLL for (int i = 0; i < kRegs; ++i) s.r[i] = x - Int{};
        return s;
    }
    static INLINE IntVec weights(const uint8_t (&q)[kLanes][kDepth]) {
        IntVec p;
#if defined(__AVX512VNNI__)
        p.r[0] = *(const Int*)q;
#else
        typedef int8_t Bytes __attribute__((vector_size(kWidth / 2), aligned(1), may_alias));
        typedef int16_t Halves __attribute__((vector_size(kWidth)));
        UNROLL for (int i = 0; i < kRegs; ++i) {
            const Bytes* from = (const Bytes*)q + i;
#if defined(__AVX512BW__)
            p.r[i] = (Int)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
#else
            p.r[i] = (Int)__builtin_convertvector(*from, Halves);
#endif
        }
#endif
        return p;
    }
    INLINE void add(const IntVec& w, int32_t x) {
        UNROLL for (int i = 0; i < kRegs; ++i) r[i] = reg_dot(r[i], w.r[i], x - Int{});
    }
    INLINE Vec to_float() const {
        Vec v;
        UNROLL for (int i = 0; i < kRegs; ++i) v.r[i] = __builtin_convertvector(r[i], Reg);
        return v;
    }
};

// totals[row][panel] += dot product of x[row] and block `g` of the panel.
template <int ROWS, int PANELS>
INLINE void add_group(Vec (&totals)[ROWS][PANELS], const QuantGroup* x, int64_t ldx, const Int8* const* panels,
                      int64_t g, Prefetch ahead) {
    IntVec sums[ROWS][PANELS];
    UNROLL for (int i = 0; i < ROWS; ++i)
        UNROLL for (int j = 0; j < PANELS; ++j) sums[i][j] = IntVec::all(x[i * ldx].start);
    for (int k = 0; k < kSteps; ++k) {
        IntVec w[PANELS];
        UNROLL for (int j = 0; j < PANELS; ++j) {
            w[j] = IntVec::weights(panels[j][g].q[k]);
            ahead.fetch(panels[j], g * kFetches + k);  // cheaper than a branch if there is nothing to fetch
        }
        UNROLL for (int i = 0; i < ROWS; ++i) {
            int32_t some;
            memcpy(&some, x[i * ldx].x + k * kDepth, 4);
            UNROLL for (int j = 0; j < PANELS; ++j) sums[i][j].add(w[j], some);
        }
    }
    UNROLL for (int j = 0; j < PANELS; ++j) {
        float scale[kLanes];
        for (int c = 0; c < kLanes; ++c) scale[c] = to_float(panels[j][g].scale[c]);
        const Vec weights = Vec::load(scale);
        if (kFetches > kSteps) ahead.fetch(panels[j], g * kFetches + kSteps);
        UNROLL for (int i = 0; i < ROWS; ++i)
            totals[i][j] = fma(sums[i][j].to_float(), weights * Vec::all(x[i * ldx].scale), totals[i][j]);
    }
}

// out [rows][kUnit * 16] for PANELS panels.
template <int PANELS>
void gemm_rows(int rows, const QuantGroup* x, int64_t ldx, const Int8* const* panels, int64_t groups, Prefetch ahead,
                  float* out) {
    constexpr int most = std::clamp(kInt8Sums / PANELS, 1, 6);
    for (int first = 0; first < rows;) {
        int passes = (rows - first + most - 1) / most, count = (rows - first + passes - 1) / passes;
        with_rows<most>(count, [&](auto n) {
            Vec totals[n][PANELS];
            for (auto& row : totals)
                for (Vec& v : row) v = Vec::all(0.0f);
            for (int64_t g = 0; g < groups; ++g)
                add_group<n, PANELS>(totals, x + first * ldx + g, ldx, panels, g, first == 0 ? ahead : Prefetch());
            for (int i = 0; i < n; ++i)
                UNROLL for (int j = 0; j < PANELS; ++j) totals[i][j].store(out + ((first + i) * kUnit + j) * kLanes);
        });
        first += count;
    }
}

inline void gemm_block(int rows, const QuantGroup* x, int64_t ldx, const Int8* const* panels, int count, int64_t cols,
                    Prefetch ahead, float* out) {
    const int64_t groups = cols / kGroup;
    if (count == kUnit && rows * kUnit <= kInt8Sums) return gemm_rows<kUnit>(rows, x, ldx, panels, groups, ahead, out);
    int i = 0;
    if constexpr (kInt8Sums >= 6)
        for (; i + 2 <= count; i += 2) gemm_rows<2>(rows, x, ldx, panels + i, groups, ahead, out + i * kLanes);
    for (; i < count; ++i) gemm_rows<1>(rows, x, ldx, panels + i, groups, ahead, out + i * kLanes);
}

// See `gemm` of floating-point weights.
template <class T, class A, class F>
void gemm(Pool& pool, const Matrix<Int8>& w, const X<T>* x, int64_t ldx, int64_t m, bool paired, const A& to,
          const F& finish) {
    if (m == 0) return;
    const int64_t groups = w.cols / kGroup;
    const std::unique_ptr<QuantGroup[]> quantized(new QuantGroup[m * groups]);
    const int pieces = (int)std::min<int64_t>(m * w.cols / 8192 + 1, 8 * pool.size());
    pool.run(pieces, [&](int piece, int) {
        for (int64_t i = part(m * groups, pieces, piece); i < part(m * groups, pieces, piece + 1); ++i)
            quantize_group(x + i / groups * ldx + i % groups * kGroup, quantized[i]);
    });
    // Small blocks of few rows read weights evenly; larger blocks of many rows read a pair of panels less often.
    const int64_t most = m > kFew ? kRowBlock : kPairRows;
    for_each_block(
        pool, w, m, most, (sizeof(Int8) + kFetches - 1) / kFetches, paired,
        [&](int64_t row, int rows, const Int8* const* panels, int count, Prefetch ahead, float* tile) {
            gemm_block(rows, &quantized[row * groups], groups, panels, count, w.cols, ahead, tile);
        },
        to, finish);
}

}  // namespace minisgl
