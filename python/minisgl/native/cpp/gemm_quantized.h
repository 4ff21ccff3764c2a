// GEMM with weights of 8 or 4 bits: w = q * scale, with a scale for every 32 weights of a row.
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
constexpr int kIntSums = kAccumulators >= 24 ? 10 : kAccumulators;
constexpr int kPairRows = kAccumulators >= 24 ? kIntSums / 2 : kRowBlock;  // rows of a small block

#if defined(__AVX512VNNI__)
using Quant = int8_t;
constexpr int kByteOffset = 128;  // the instruction multiplies signed bytes with unsigned bytes
#else
using Quant = int16_t;
constexpr int kByteOffset = 0;
#endif
constexpr int kDepth = 4 / sizeof(Quant);  // columns per dot-product instruction
constexpr int kSteps = kGroup / kDepth;

// 16 rows x 32 columns. Each line has the numbers of one step, or in 4 bits of two: the lower halves are the first.
template <int BITS>
struct Block {
    static constexpr int kPer = 8 / BITS, kLines = kSteps / kPer;
    static constexpr int kOffset = BITS == 4 ? 8 : kByteOffset;  // added to stored weights

    uint8_t q[kLines][kLanes][kDepth];
    bf16 scale[kLanes];

    float at(int64_t lane, int64_t col) const {
        const int64_t step = col / kDepth;
        const uint8_t byte = q[step / kPer][lane][col % kDepth];
        const int number = BITS == 4 ? (byte >> step % 2 * 4 & 15) - kOffset : (int8_t)(byte - kOffset);
        return (float)number * to_float(scale[lane]);
    }
};
using Int8 = Block<8>;
using Int4 = Block<4>;
template <class B>
constexpr int kFetches = std::max<int>(B::kLines, (sizeof(B) + 63) / 64);  // prefetches of at most 64 bytes each

// W [rows, cols] as panels of 16 rows, each [cols / 32] blocks.
template <int BITS>
struct Matrix<Block<BITS>> {
    const Block<BITS>* data = nullptr;
    int64_t rows = 0, cols = 0;
    const float* bias = nullptr;
    Added added = {};

    int64_t panels() const { return (rows + kLanes - 1) / kLanes; }
    const Block<BITS>* panel(int64_t i) const { return data + i * (cols / kGroup); }
    float at(int64_t row, int64_t col) const {
        return panel(row / kLanes)[col / kGroup].at(row % kLanes, col % kGroup);
    }
};

// Pack numbers [rows, cols], of 8 bits or 0 to 15, and scales [rows, cols / 32] to rows / 16 * cols / 32 blocks.
// Rows must be a multiple of 16, cols of 32.
template <int BITS>
void pack(const uint8_t* q, const bf16* scale, int64_t rows, int64_t cols, Block<BITS>* out) {
    for (int64_t first = 0; first < rows; first += kLanes)
        for (int64_t col = 0; col < cols; col += kGroup, ++out) {
            memset(out->q, 0, sizeof(out->q));
            for (int lane = 0; lane < kLanes; ++lane) {
                const int64_t row = first + lane;
                out->scale[lane] = scale[(row * cols + col) / kGroup];
                for (int k = 0; k < kGroup; ++k) {
                    const int step = k / kDepth;
                    const int number = q[row * cols + col + k] + (BITS == 8 ? kByteOffset : 0);
                    out->q[step / out->kPer][lane][k % kDepth] |= number << step % out->kPer * 4;
                }
            }
        }
}

// 32 activations as x * scale.
struct QuantGroup {
    Quant x[kGroup];
    float scale;
    int32_t start;  // initial value of a sum, which cancels the weights' offset
};

template <int OFFSET, class T>
INLINE void quantize_group(const T* from, QuantGroup& to) {
    float f[kGroup], largest;
    uint32_t bits[kGroup], max_bits = 0;
    for (int k = 0; k < kGroup; ++k) f[k] = to_float(from[k]);
    memcpy(bits, f, sizeof(f));
    for (int k = 0; k < kGroup; ++k) max_bits = std::max(max_bits, bits[k] & 0x7fffffff);
    memcpy(&largest, &max_bits, 4);
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
    to.start = -OFFSET * all;
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
    // The bytes of a line, widened to numbers of 32 / `kDepth` bits: signed, or unsigned as halves are read.
    template <class Byte>
    static INLINE IntVec line(const uint8_t (&q)[kLanes][kDepth]) {
        IntVec p;
#if defined(__AVX512VNNI__)
        p.r[0] = *(const Int*)q;
#else
        typedef Byte Bytes __attribute__((vector_size(kWidth / 2), aligned(1), may_alias));
        typedef int16_t Halves __attribute__((vector_size(kWidth)));
        UNROLL for (int i = 0; i < kRegs; ++i) {
            const Bytes* from = (const Bytes*)q + i;
#if defined(__AVX512BW__)
            const __m256i bytes = _mm256_loadu_si256((const __m256i*)from);
            p.r[i] = (Int)(Byte(-1) < 0 ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes));
#else
            p.r[i] = (Int)__builtin_convertvector(*from, Halves);
#endif
        }
#endif
        return p;
    }
    // Step `k` of the `PER` of a line.
    template <int PER>
    static INLINE IntVec weights(const uint8_t (&q)[kLanes][kDepth], int k) {
        if constexpr (PER == 1) return line<int8_t>(q);
        constexpr int32_t mask = kDepth == 4 ? 0x0f0f0f0f : 0x000f000f;
        IntVec w = line<uint8_t>(q);
        UNROLL for (int i = 0; i < kRegs; ++i) w.r[i] = w.r[i] >> 4 * k & mask;
        return w;
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
template <class B, int ROWS, int PANELS>
INLINE void add_group(Vec (&totals)[ROWS][PANELS], const QuantGroup* x, int64_t ldx, const B* const* panels, int64_t g,
                      Prefetch ahead) {
    IntVec sums[ROWS][PANELS];
    UNROLL for (int i = 0; i < ROWS; ++i)
        UNROLL for (int j = 0; j < PANELS; ++j) sums[i][j] = IntVec::all(x[i * ldx].start);
    for (int line = 0; line < B::kLines; ++line) {
        UNROLL for (int k = 0; k < B::kPer; ++k) {
            IntVec w[PANELS];
            UNROLL for (int j = 0; j < PANELS; ++j) {
                w[j] = IntVec::weights<B::kPer>(panels[j][g].q[line], k);
                // Cheaper than a branch if there is nothing to fetch.
                if (k == 0) ahead.fetch(panels[j], g * kFetches<B> + line);
            }
            UNROLL for (int i = 0; i < ROWS; ++i) {
                int32_t some;
                memcpy(&some, x[i * ldx].x + (line * B::kPer + k) * kDepth, 4);
                UNROLL for (int j = 0; j < PANELS; ++j) sums[i][j].add(w[j], some);
            }
        }
    }
    UNROLL for (int j = 0; j < PANELS; ++j) {
        float scale[kLanes];
        for (int c = 0; c < kLanes; ++c) scale[c] = to_float(panels[j][g].scale[c]);
        const Vec weights = Vec::load(scale);
        if (kFetches<B> > B::kLines) ahead.fetch(panels[j], g * kFetches<B> + B::kLines);
        UNROLL for (int i = 0; i < ROWS; ++i)
            totals[i][j] = fma(sums[i][j].to_float(), weights * Vec::all(x[i * ldx].scale), totals[i][j]);
    }
}

// out [rows][kUnit * 16] for PANELS panels.
template <int PANELS, class B>
void gemm_rows(int rows, const QuantGroup* x, int64_t ldx, const B* const* panels, int64_t groups, Prefetch ahead,
                  float* out) {
    constexpr int kMaxRows = std::clamp(kIntSums / PANELS, 1, 6);
    for (int first = 0; first < rows;) {
        int passes = (rows - first + kMaxRows - 1) / kMaxRows, count = (rows - first + passes - 1) / passes;
        with_rows<kMaxRows>(count, [&](auto n) {
            Vec totals[n][PANELS];
            for (auto& row : totals)
                for (Vec& v : row) v = Vec::all(0.0f);
            for (int64_t g = 0; g < groups; ++g)
                add_group<B, n, PANELS>(totals, x + first * ldx + g, ldx, panels, g, first == 0 ? ahead : Prefetch());
            for (int i = 0; i < n; ++i)
                UNROLL for (int j = 0; j < PANELS; ++j) totals[i][j].store(out + ((first + i) * kUnit + j) * kLanes);
        });
        first += count;
    }
}

template <class B>
void gemm_block(int rows, const QuantGroup* x, int64_t ldx, const B* const* panels, int count, int64_t cols,
                Prefetch ahead, float* out) {
    const int64_t groups = cols / kGroup;
    if (count == kUnit && rows * kUnit <= kIntSums) return gemm_rows<kUnit>(rows, x, ldx, panels, groups, ahead, out);
    int i = 0;
    if constexpr (kIntSums >= 6)
        for (; i + 2 <= count; i += 2) gemm_rows<2>(rows, x, ldx, panels + i, groups, ahead, out + i * kLanes);
    for (; i < count; ++i) gemm_rows<1>(rows, x, ldx, panels + i, groups, ahead, out + i * kLanes);
}

// See `gemm` of floating-point weights; x is [rows, ldx] groups.
template <class T, int BITS, class A, class F>
void gemm(Pool& pool, const Matrix<Block<BITS>>& stack, const QuantGroup* x, int64_t ldx, const RowRanges& ranges,
          bool paired, const A& to, const F& finish) {
    using B = Block<BITS>;
    // Small blocks of few rows read weights evenly; larger blocks of many rows read a pair of panels less often.
    for_each_block<T>(
        pool, stack, ranges, kPairRows, kRowBlock, (sizeof(B) + kFetches<B> - 1) / kFetches<B>, paired,
        [&](int64_t row, int rows, const B* const* panels, int count, Prefetch ahead, float* tile) {
            gemm_block(rows, x + row * ldx, ldx, panels, count, stack.cols, ahead, tile);
        },
        to, finish);
}

template <class T, int BITS, class A, class F>
void gemm(Pool& pool, const Matrix<Block<BITS>>& stack, const X<T>* x, int64_t ldx, const RowRanges& ranges,
          bool paired, const A& to, const F& finish) {
    const int64_t m = ranges.back().stop, groups = stack.cols / kGroup;
    const std::unique_ptr<QuantGroup[]> quantized(new QuantGroup[m * groups]);
    const int pieces = (int)std::min<int64_t>(m * stack.cols / 8192 + 1, 8 * pool.size());
    pool.run(pieces, [&](int piece, int) {
        for (int64_t i = part(m * groups, pieces, piece); i < part(m * groups, pieces, piece + 1); ++i)
            quantize_group<Block<BITS>::kOffset>(x + i / groups * ldx + i % groups * kGroup, quantized[i]);
    });
    gemm<T>(pool, stack, quantized.get(), groups, ranges, paired, to, finish);
}

}  // namespace minisgl
