// Sampling for rows without filters, as in ops/sampling.py: the same noise bits and the same rule for ties.
#pragma once
#include <algorithm>

#include "simd.h"

namespace minisgl {

INLINE uint32_t mix32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x21F0AAADu;
    x = (x ^ (x >> 15)) * 0x735A2D97u;
    return x ^ (x >> 15);
}

// ln x for positive normal x, Cephes' polynomial.
INLINE Reg log_positive(Reg x) {
    const Reg zero = {};
    Int bits = (Int)x;
    Int exponent = ((bits >> 23) & 255) - 126;
    Reg m = (Reg)((bits & 0x007fffff) | 0x3f000000);  // [0.5, 1)
    Int is_small = m < 0.707106781186547524f;
    Reg e = __builtin_convertvector(exponent + is_small, Reg);
    m = (is_small ? m + m : m) - 1.0f;
    Reg z = m * m;
    Reg p = zero + 7.0376836292e-2f;
    p = reg_fma(p, m, zero - 1.1514610310e-1f);
    p = reg_fma(p, m, zero + 1.1676998740e-1f);
    p = reg_fma(p, m, zero - 1.2420140846e-1f);
    p = reg_fma(p, m, zero + 1.4249322787e-1f);
    p = reg_fma(p, m, zero - 1.6668057665e-1f);
    p = reg_fma(p, m, zero + 2.0000714765e-1f);
    p = reg_fma(p, m, zero - 2.4999993993e-1f);
    p = reg_fma(p, m, zero + 3.3333331174e-1f);
    p = p * m * z;
    p = reg_fma(e, zero - 2.12194440e-4f, p);
    p = reg_fma(z, zero - 0.5f, p);
    return reg_fma(e, zero + 0.693359375f, m + p);
}

// -log(-log1p(-x)) for x = (bits + 0.5) / 2^32.
INLINE Reg gumbel(Word bits) {
    const Reg zero = {};
    Reg x = (__builtin_convertvector(bits, Reg) + 0.5f) * 0x1p-32f;
    const float largest = 1.0f - 0x1p-24f;
    x = x > largest ? zero + largest : x;
    Reg u = 1.0f - x, y = u - 1.0f;
    Reg t = log_positive(u) * (zero - x) / y;  // log1p(-x) = log(u) (-x) / (u - 1) corrects u's rounding
    t = y == 0.0f ? zero - x : t;
    return zero - log_positive(zero - t);
}

struct Sampled {
    int32_t token;
    bool is_finite;  // false, with token 0: some logit is NaN or +Inf, or all are -Inf
};

inline Sampled sample_token(const float* logits, int64_t vocab, float temperature, int64_t key, int32_t position) {
    constexpr int width = kWidth / 4;
    float max_logit = -INFINITY;
    int64_t first = vocab;  // first index of max_logit
    bool is_nan = false;
    int64_t i = 0;
    Reg top = Reg{} - INFINITY;
    Int nan_lanes = {}, max_index = {};
    for (; i + width <= vocab; i += width) {
        Reg x = *(const Reg*)(logits + i);
        max_index = x > top ? (int32_t)i - Int{} : max_index;
        top = x > top ? x : top;
        nan_lanes |= x != x;
    }
    for (int lane = 0; lane < width; ++lane) {
        max_logit = top[lane] > max_logit ? top[lane] : max_logit;
        is_nan |= nan_lanes[lane] != 0;
    }
    for (int lane = 0; lane < width; ++lane)
        if (top[lane] == max_logit) first = std::min<int64_t>(first, max_index[lane] + lane);
    for (int64_t j = i; j < vocab; ++j) {
        if (logits[j] > max_logit) max_logit = logits[j], first = j;
        is_nan |= logits[j] != logits[j];
    }
    if (is_nan || !std::isfinite(max_logit)) return {0, false};
    if (!(temperature > 0)) return {(int32_t)first, true};
    const uint32_t low = (uint32_t)key, high = (uint32_t)((uint64_t)key >> 32), at = (uint32_t)position;
    const uint32_t a = mix32(mix32(low + at * 0x9E3779B9u) ^ high);
    const uint32_t b = mix32(mix32(high + at * 0x85EBCA6Bu) ^ low ^ 0x6A09E667u);
    float best = -INFINITY;
    int64_t token = 0;
    for (i = 0; i < vocab; i += width) {
        Word x;
        Reg z;
        for (int lane = 0; lane < width; ++lane) x[lane] = (uint32_t)(i + lane);
        if (i + width <= vocab) {
            z = *(const Reg*)(logits + i);
        } else {
            for (int lane = 0; lane < width; ++lane) z[lane] = i + lane < vocab ? logits[i + lane] : -INFINITY;
        }
        x ^= a;
        x = (x ^ (x >> 16)) * 0x21F0AAADu;
        x = ((x ^ (x >> 15)) + b) * 0x735A2D97u;
        x ^= x >> 15;
        z = (z - max_logit) / temperature + gumbel(x);
        Int better = z > best;
        bool any = false;
        for (int lane = 0; lane < width; ++lane) any |= better[lane] != 0;
        if (!any) continue;
        for (int lane = 0; lane < width; ++lane)
            if (z[lane] > best) best = z[lane], token = i + lane;
    }
    return {(int32_t)token, true};
}

}  // namespace minisgl
