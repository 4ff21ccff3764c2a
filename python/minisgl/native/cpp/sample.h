// Choosing tokens as ops/sample.py does, for rows without filters: the same noise bits, the same rules for ties.
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
    Reg t = log_positive(u) * (zero - x) / y;  // log1p(-x) = log(u) (-x) / (u - 1) makes up for u's rounding
    t = y == 0.0f ? zero - x : t;
    return zero - log_positive(zero - t);
}

struct Choice {
    int32_t token;
    bool ok;  // false, with token 0: NaN, +Inf or nothing but -Inf
};

inline Choice choose(const float* logits, int64_t vocab, float temperature, int64_t key, int32_t position) {
    constexpr int width = kWidth / 4;
    float peak = -INFINITY;
    int64_t first = vocab;  // who has it
    bool is_nan = false;
    int64_t i = 0;
    Reg top = Reg{} - INFINITY;
    Int strange = {}, where = {};
    for (; i + width <= vocab; i += width) {
        Reg x = *(const Reg*)(logits + i);
        where = x > top ? (int32_t)i - Int{} : where;
        top = x > top ? x : top;
        strange |= x != x;
    }
    for (int lane = 0; lane < width; ++lane) {
        peak = top[lane] > peak ? top[lane] : peak;
        is_nan |= strange[lane] != 0;
    }
    for (int lane = 0; lane < width; ++lane)
        if (top[lane] == peak) first = std::min<int64_t>(first, where[lane] + lane);
    for (int64_t j = i; j < vocab; ++j) {
        if (logits[j] > peak) peak = logits[j], first = j;
        is_nan |= logits[j] != logits[j];
    }
    if (is_nan || !std::isfinite(peak)) return {0, false};
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
        z = (z - peak) / temperature + gumbel(x);
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
