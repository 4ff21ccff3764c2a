// Vectors of 16 floats on every instruction set, bfloat16, and the dot-product loop of every GEMM and of attention.
//
// Each float operation is explicit (the build turns contraction off), so the bits of an element depend on its inputs
// only, not on how the compiler unrolls the loop.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace minisgl {

constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kWidth = 64, kAccumulators = 24;  // of 32 registers
#elif defined(__AVX2__)
constexpr int kWidth = 32, kAccumulators = 6;  // pairs of 16 registers
#elif defined(__aarch64__)
constexpr int kWidth = 16, kAccumulators = 6;  // groups of four of 32 registers
#else
constexpr int kWidth = 16, kAccumulators = 3;  // groups of four of 16 registers
#endif
constexpr int kRegs = 64 / kWidth;
typedef float Reg __attribute__((vector_size(kWidth), aligned(4), may_alias));
typedef int32_t Int __attribute__((vector_size(kWidth), aligned(4), may_alias));
typedef uint32_t Word __attribute__((vector_size(kWidth), aligned(4), may_alias));

INLINE Reg reg_fma(Reg a, Reg b, Reg c) {
#if defined(__AVX512F__)
    return (Reg)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Reg)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Reg)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

struct Vec {
    Reg r[kRegs];

    static INLINE Vec all(float x) {
        Vec v;
        UNROLL for (int i = 0; i < kRegs; ++i) v.r[i] = x - Reg{};
        return v;
    }
    static INLINE Vec load(const float* p) {
        Vec v;
        UNROLL for (int i = 0; i < kRegs; ++i) v.r[i] = *(const Reg*)(p + i * (kWidth / 4));
        return v;
    }
    INLINE void store(float* p) const {
        UNROLL for (int i = 0; i < kRegs; ++i) *(Reg*)(p + i * (kWidth / 4)) = r[i];
    }
};

#define MINISGL_VEC_OP(NAME, EXPR)                                  \
    INLINE Vec NAME(Vec a, Vec b) {                                 \
        Vec v;                                                      \
        UNROLL for (int i = 0; i < kRegs; ++i) {                    \
            Reg x = a.r[i], y = b.r[i];                             \
            v.r[i] = EXPR;                                          \
        }                                                           \
        return v;                                                   \
    }
MINISGL_VEC_OP(operator+, x + y)
MINISGL_VEC_OP(operator-, x - y)
MINISGL_VEC_OP(operator*, x* y)
MINISGL_VEC_OP(operator/, x / y)
MINISGL_VEC_OP(max, x > y ? x : y)  // y where either is NaN
MINISGL_VEC_OP(min, x < y ? x : y)
#undef MINISGL_VEC_OP

INLINE Vec fma(Vec a, Vec b, Vec c) {
    Vec v;
    UNROLL for (int i = 0; i < kRegs; ++i) v.r[i] = reg_fma(a.r[i], b.r[i], c.r[i]);
    return v;
}

// Load n of 16 floats and fill with zeros; store n of 16 floats.
INLINE Vec load_part(const float* p, int n) {
    if (n == kLanes) return Vec::load(p);
    float x[kLanes] = {};
    memcpy(x, p, n * sizeof(float));
    return Vec::load(x);
}
INLINE void store_part(float* p, Vec v, int n) {
    if (n == kLanes) return v.store(p);
    float x[kLanes];
    v.store(x);
    memcpy(p, x, n * sizeof(float));
}

// Pairwise, always in the same order.
INLINE float sum(Vec a) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)a.r[0]);
#else
    float x[kLanes];
    a.store(x);
    for (int n = kLanes / 2; n > 0; n /= 2)
        for (int i = 0; i < n; ++i) x[i] += x[i + n];
    return x[0];
#endif
}
INLINE float max_lane(Vec a) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)a.r[0]);
#else
    float x[kLanes];
    a.store(x);
    for (int n = kLanes / 2; n > 0; n /= 2)
        for (int i = 0; i < n; ++i) x[i] = x[i] > x[i + n] ? x[i] : x[i + n];
    return x[0];
#endif
}

// e^x to about 2 units in the last place: exactly 1 at 0, 0 below -87, finite above 88; keeps NaN. Cephes' polynomial.
INLINE Reg exp(Reg x) {
    const Reg zero = {};
    Reg y = x;
    y = y < -88.0f ? zero - 88.0f : y;
    y = y > 88.0f ? zero + 88.0f : y;
    Reg n = (y * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest whole number
    Reg f = reg_fma(n, zero - 0.693359375f, y);
    f = reg_fma(n, zero + 2.12194440e-4f, f);
    Reg p = zero + 1.9875691500e-4f;
    p = reg_fma(p, f, zero + 1.3981999507e-3f);
    p = reg_fma(p, f, zero + 8.3334519073e-3f);
    p = reg_fma(p, f, zero + 4.1665795894e-2f);
    p = reg_fma(p, f, zero + 1.6666665459e-1f);
    p = reg_fma(p, f, zero + 5.0000001201e-1f);
    p = reg_fma(p, f * f, f) + 1.0f;
    Int power = (__builtin_convertvector(n, Int) + 127) << 23;
    p = p * (Reg)power;
    return x < -87.0f ? zero : p;
}
INLINE Vec exp(Vec a) {
    UNROLL for (int i = 0; i < kRegs; ++i) a.r[i] = exp(a.r[i]);
    return a;
}
INLINE float exp(float x) { return exp(x - Reg{})[0]; }

// Keep lanes [low, high) of a, with -Inf elsewhere.
INLINE Vec mask_lanes(Vec a, int low, int high) {
    UNROLL for (int i = 0; i < kRegs; ++i) {
        Int lane;
        UNROLL for (int j = 0; j < kWidth / 4; ++j) lane[j] = i * (kWidth / 4) + j;
        a.r[i] = (lane >= low) & (lane < high) ? a.r[i] : Reg{} - INFINITY;
    }
    return a;
}

using bf16 = uint16_t;
INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
// Round to nearest, ties to even; keeps NaN.
INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
// 8-bit floats: E4M3, see "OCP 8-bit Floating Point Specification" 1.0. Neither function knows NaN.
INLINE uint8_t to_e4m3(float x) {  // |x| at most 448; to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80, exponent = 120 << 3;
    bits &= 0x7fffffff;
    const float large = std::fabs(x) + 16384.0f;  // its last bit is 2^-9, the smallest number of E4M3
    uint32_t small;
    memcpy(&small, &large, 4);
    const uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - exponent;
    return (uint8_t)(sign | (bits < 121u << 23 ? small - 0x46800000 : normal));
}
// 32-bit numbers from bytes. (GCC 12 converts vectors of bytes one by one.)
INLINE Int widen(const uint8_t* p) {
#if defined(__AVX512F__)
    return (Int)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (Int)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    typedef uint8_t Bytes __attribute__((vector_size(kWidth / 4), aligned(1), may_alias));
    return __builtin_convertvector(*(const Bytes*)p, Int);
#endif
}
INLINE Vec from_e4m3(const uint8_t* p) {
    Vec v;
    UNROLL for (int i = 0; i < kRegs; ++i) {
        const Int bits = widen(p + i * (kWidth / 4)), number = (bits & 0x7f) << 20;
        // Numbers below 2^-6 have no leading 1.
        const Reg x = (bits & 0x78) == 0 ? (Reg)(number + (121 << 23)) - 0.015625f : (Reg)(number + (120 << 23));
        v.r[i] = (Reg)((Int)x | (bits & 0x80) << 24);
    }
    return v;
}
// The lower halves of 32-bit numbers whose upper halves are 0.
INLINE void narrow(bf16* p, Word x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)x));
#elif defined(__AVX2__)
    const __m256i words = (__m256i)x;
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    for (int i = 0; i < kWidth / 4; ++i) p[i] = (bf16)x[i];
#endif
}
INLINE void put(float* p, float x) { *p = x; }
INLINE void put(bf16* p, float x) { *p = to_bf16(x); }
INLINE void put(float* p, Vec x) { x.store(p); }
INLINE void put(bf16* p, Vec x) {
#if defined(__AVX512BF16__)
    // vcvtneps2bf16 flushes denormals to 0, and so does the dot product that reads the result.
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x.r[0]));
#else
    UNROLL for (int i = 0; i < kRegs; ++i) {
        const Word bits = (Word)x.r[i], nearest = bits + 0x7fff + ((bits >> 16) & 1);
        narrow(p + i * (kWidth / 4), ((bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : nearest) >> 16);
    }
#endif
}

// accumulators += weights * x, in steps of `kStep` along the summed dimension K. Weights of 16 columns have the layout
// [K / kStep][16][kStep]. `X` is the type of the other operand.
template <class T>
struct Dot;

template <>
struct Dot<float> {
    using X = float;
    static constexpr int kStep = 1;
    using Weights = Vec;
    using Factor = Vec;
    static INLINE Weights weights(const float* p) { return Vec::load(p); }
    static INLINE Factor factor(const float* p) { return Vec::all(*p); }
    static INLINE void add(Vec& sum, const Weights& w, const Factor& x) { sum = fma(w, x, sum); }
};

template <>
struct Dot<bf16> {
    static constexpr int kStep = 2;
#if defined(__AVX512BF16__)
    using X = bf16;
    using Weights = __m512bh;
    using Factor = __m512bh;
    static INLINE Weights weights(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
    static INLINE Factor factor(const bf16* p) {
        int32_t pair;
        memcpy(&pair, p, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static INLINE void add(Vec& sum, const Weights& w, const Factor& x) {
        sum.r[0] = (Reg)_mm512_dpbf16_ps((__m512)sum.r[0], w, x);
    }
#else
    using X = float;
    struct Weights {
        Vec even, odd;
    };
    struct Factor {
        Vec even, odd;
    };
    static INLINE Weights weights(const bf16* p) {
        Weights w;
        UNROLL for (int i = 0; i < kRegs; ++i) {
            Word pair = *(const Word*)(p + i * (kWidth / 2));
            w.even.r[i] = (Reg)(pair << 16);
            w.odd.r[i] = (Reg)(pair & 0xffff0000u);
        }
        return w;
    }
    static INLINE Factor factor(const float* p) { return {Vec::all(p[0]), Vec::all(p[1])}; }
    static INLINE void add(Vec& sum, const Weights& w, const Factor& x) {
        sum = fma(w.odd, x.odd, fma(w.even, x.even, sum));
    }
#endif
};

template <class T>
using X = typename Dot<T>::X;

// Prefetch a cache line into L2. (Prefetches into L1 compete with its own misses: two cores with scattered reads got 24
// instead of 38 GB/s.)
INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// What to prefetch while a panel is read: at step i the line `offset` + i * `stride` bytes after the panel's begin.
struct Prefetch {
    int64_t offset = 0, stride = 0;  // bytes; no prefetch if both are 0

    INLINE void fetch(const void* panel, int64_t step) const {
        prefetch((const char*)panel + offset + step * stride);
    }
};

// sums[row][panel] += dot product of x[row, :] and the panel, in `steps` steps; x has `ldx` elements a row, a panel
// `stride` a step. With `prefetches`, each step calls fetch(step).
template <class T, int ROWS, int PANELS, class Fetch>
INLINE void accumulate(Vec (&sums)[ROWS][PANELS], const X<T>* x, int64_t ldx, const T* const* panels, int64_t stride,
                       int64_t steps, bool prefetches, const Fetch& fetch) {
    using P = Dot<T>;
    const auto run = [&](auto prefetches) INLINE_LAMBDA {
        for (int64_t k = 0; k < steps; ++k) {
            typename P::Weights w[PANELS];
            UNROLL for (int j = 0; j < PANELS; ++j) w[j] = P::weights(panels[j] + k * stride);
            if (prefetches) fetch(k);
            UNROLL for (int i = 0; i < ROWS; ++i) {
                auto factor = P::factor(x + i * ldx + k * P::kStep);
                UNROLL for (int j = 0; j < PANELS; ++j) P::add(sums[i][j], w[j], factor);
            }
        }
    };
    prefetches ? run(std::true_type{}) : run(std::false_type{});
}

// Call f(integral constant) with the number of rows, 1 to MAX.
template <int MAX, class F>
INLINE void with_rows(int rows, const F& f) {
    if constexpr (MAX > 1) {
        if (rows < MAX) return with_rows<MAX - 1>(rows, f);
    }
    f(std::integral_constant<int, MAX>{});
}

}  // namespace minisgl
