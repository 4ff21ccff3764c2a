// Gated DeltaNet: the recurrence of ops/gated_delta.py, whose letters stand here, too.
//
// S advances token by token: each of its elements is multiplied by the decay, then gains k u. Chunks, folds and decoding
// tokens all do so, the last without storing S. So bits do not depend on where chunks and folds end. k and u are rounded
// to the model's type wherever they are used, since a slot keeps them so. Columns of S do not depend on each other, so a
// few at a time go through all tokens: those of a chunk stay in L1, those of a decoding token in registers.
#pragma once
#include "gemm.h"

namespace minisgl {

constexpr float kDeltaEps = 1e-6f;                                  // of the norms of q and k
constexpr int kDeltaVecs = 2;                                       // vectors of columns that are computed together
constexpr int kDeltaRows = kAccumulators >= 24 ? 8 : 2;             // rows of S in registers
constexpr int64_t kDeltaColumns = kDeltaVecs * kLanes;

// What a token adds to S: S = decay S + k u^T.
struct Triple {
    const float *k, *u;
    float decay;
};

// Tokens of one sequence that are adjacent in a slice. If it `decodes`, S is as of `state_len` tokens, else of `start`.
struct DeltaRun {
    int64_t row, start, stop, token;
    bool decodes;
};

// A thread's memory, for heads of Dk x Dv and up to R tokens.
struct DeltaScratch {
    Aligned<float> keys, us, block;
    std::vector<Triple> triples;

    void grow(const Recurrence& r) {
        keys.resize(std::max<size_t>(keys.size(), r.tokens * r.key_dim));
        us.resize(std::max<size_t>(us.size(), r.tokens * r.value_dim));
        block.resize(std::max<size_t>(block.size(), r.key_dim * kDeltaColumns));
    }
};

INLINE Vec load(const float* p) { return Vec::load(p); }
INLINE Vec load(const bf16* p) {
    float x[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = to_float(p[i]);
    return Vec::load(x);
}

template <class T>
INLINE Vec rounded(Vec x) {
    T p[kLanes];
    put(p, x);
    return load(p);
}

// Advance columns of S by `count` triples; store S if there is `to`. With q and k of the next token, whose decay is
// `decay`, sum what they read then. Rows are `ld_from` and `ld_to` elements apart; without `from`, S is 0.
template <int VECS>
INLINE void advance(int64_t dk, const float* from, int64_t ld_from, float* to, int64_t ld_to, const Triple* triples,
                    int64_t count, int64_t column, const float* k, const float* q, float decay, Vec (&read)[2][VECS]) {
    for (int64_t row = 0; row < dk; row += kDeltaRows) {
        Vec s[kDeltaRows][VECS];
        UNROLL for (int i = 0; i < kDeltaRows; ++i)
            UNROLL for (int j = 0; j < VECS; ++j)
                s[i][j] = from ? Vec::load(from + (row + i) * ld_from + j * kLanes) : Vec::all(0.0f);
        for (const Triple* t = triples; t != triples + count; ++t) {
            const Vec factor = Vec::all(t->decay);
            Vec u[VECS];
            UNROLL for (int j = 0; j < VECS; ++j) u[j] = Vec::load(t->u + column + j * kLanes);
            UNROLL for (int i = 0; i < kDeltaRows; ++i) {
                const Vec key = Vec::all(t->k[row + i]);
                UNROLL for (int j = 0; j < VECS; ++j) s[i][j] = fma(key, u[j], s[i][j] * factor);
            }
        }
        if (to)
            UNROLL for (int i = 0; i < kDeltaRows; ++i)
                UNROLL for (int j = 0; j < VECS; ++j) s[i][j].store(to + (row + i) * ld_to + j * kLanes);
        if (!k) continue;
        UNROLL for (int i = 0; i < kDeltaRows; ++i) {
            const Vec own = Vec::all(k[row + i]), query = Vec::all(q[row + i]);
            UNROLL for (int j = 0; j < VECS; ++j) {
                const Vec x = s[i][j] * Vec::all(decay);
                read[0][j] = fma(own, x, read[0][j]), read[1][j] = fma(query, x, read[1][j]);
            }
        }
    }
}

// One layer in a slice: x [m, ldx] has the projections to q, k, v and z, gates [m, 2 Hv] those to beta and g.
template <class T>
struct GatedDelta {
    const Recurrence& r;
    const int32_t* table;  // [rows, width] of STATE
    int64_t width;
    const Copy* captures;
    int64_t num_captures;
    const float* x;
    int64_t ldx;
    float *gates, *mixed;  // mixed [m, C]: q, k and v after the convolution; outputs replace v

    int64_t keys() const { return r.key_heads * r.key_dim; }
    int64_t channels() const { return 2 * keys() + r.value_heads * r.value_dim; }
    template <class E>
    E* at(void* state, int64_t slot, int64_t index, int64_t size) const {
        return (E*)((char*)state + slot * r.stride) + index * size;
    }
    int64_t slot(int64_t row) const { return table[row * width + kSlotId]; }
    float* delta(int64_t slot, int64_t head) const { return at<float>(r.delta, slot, head, r.key_dim * r.value_dim); }
    T* recent(int64_t slot, int64_t position) const {
        return at<T>(r.recent, slot, position % r.tokens, keys() + r.value_heads * r.value_dim);
    }
    float* decay(int64_t slot, int64_t position) const {
        return at<float>(r.decay, slot, position % r.tokens, r.value_heads);
    }
    T* input(int64_t slot, int64_t position) const {
        return at<T>(r.inputs, slot, position % (r.tokens + r.width - 1), channels());
    }

    // Make q, k, v, beta and the decays of token i of a run. A decoding one stores k and g, which no other token reads
    // before the next region of the pool.
    void convolve(const DeltaRun& run, int64_t i) const {
        const int64_t size = channels(), position = run.start + i, slot = this->slot(run.row);
        float* out = mixed + (run.token + i) * size;
        std::fill_n(out, size, 0.0f);
        for (int64_t j = 0; j < r.width; ++j) {
            const int64_t back = r.width - 1 - j;
            if (back > position) continue;
            const float *w = r.conv + j * size, *own = x + (run.token + i - back) * ldx;
            const T* before = input(slot, position - back);
            for (int64_t c = 0; c < size; c += kLanes) {
                const Vec in = back <= i ? rounded<T>(Vec::load(own + c)) : load(before + c);
                fma(in, Vec::load(w + c), Vec::load(out + c)).store(out + c);
            }
        }
        for (int64_t c = 0; c < size; c += kLanes) rounded<T>(activate(kSilu, Vec::load(out + c))).store(out + c);
        for (int64_t c = 0; c < 2 * keys(); c += r.key_dim) {
            const bool is_q = c < keys();
            Vec squares = Vec::all(0.0f);
            for (int64_t d = 0; d < r.key_dim; d += kLanes) {
                const Vec v = Vec::load(out + c + d);
                squares = fma(v, v, squares);
            }
            const float norm = 1.0f / std::sqrt(sum(squares) + kDeltaEps);
            const Vec factor = Vec::all(is_q ? norm / std::sqrt((float)r.key_dim) : norm);
            for (int64_t d = 0; d < r.key_dim; d += kLanes) {
                const Vec v = Vec::load(out + c + d) * factor;
                (is_q ? v : rounded<T>(v)).store(out + c + d);
            }
        }
        float *beta = gates + (run.token + i) * 2 * r.value_heads, *factor = beta + r.value_heads;
        float* stored = run.decodes ? decay(slot, position) : nullptr;
        for (int64_t h = 0; h < r.value_heads; ++h) {
            const float a = factor[h] + r.dt_bias[h], large = std::max(a, 0.0f);
            const float g = r.rate[h] * (large + std::log1p(exp(std::min(a, -a))));  // NaN stays NaN
            beta[h] = 1.0f / (1.0f + exp(-beta[h])), factor[h] = exp(g);
            if (stored) stored[h] = g;
        }
        if (!run.decodes) return;
        T* k = recent(slot, position);
        for (int64_t c = 0; c < keys(); c += kLanes) put(k + c, Vec::load(out + keys() + c));
    }

    // Store the last inputs of a run, and those before its captures, which may be in its slot.
    void store_inputs(const DeltaRun& run) const {
        const int64_t own = slot(run.row);
        const auto copy = [&](int64_t target, int64_t first, int64_t stop) {
            for (int64_t p = std::max<int64_t>(first, 0); p < stop; ++p) {
                T* to = input(target, p);
                if (p < run.start) {
                    memmove(to, input(own, p), channels() * sizeof(T));
                    continue;
                }
                const float* from = x + (run.token + p - run.start) * ldx;
                for (int64_t c = 0; c < channels(); c += kLanes) put(to + c, Vec::load(from + c));
            }
        };
        for_each_capture(run, [&](const Copy& c) { copy(c.target, c.position - r.width + 1, c.position); });
        copy(own, run.decodes ? run.start : std::max(run.start, run.stop - r.width + 1), run.stop);
    }

    template <class F>
    void for_each_capture(const DeltaRun& run, const F& f) const {
        for (const Copy* c = captures; c != captures + num_captures && !run.decodes; ++c)
            if (c->row == run.row && run.start < c->position && c->position <= run.stop) f(*c);
    }

    // Mix the tokens of a run for a value head. `mixed` has the outputs instead of v then.
    void mix(const DeltaRun& run, int64_t head, DeltaScratch& scratch) const {
        scratch.triples.clear();
        // In a trial step, an empty slot would have more tokens than R.
        const int64_t first = std::max<int64_t>(table[run.row * width + kStateLen], run.stop - r.tokens);
        if (run.decodes) collect(slot(run.row), first, run.start, head, scratch);
        for_columns([&](auto n, int64_t column) {
            run.decodes ? decode<n>(run, head, column, scratch) : prefill<n>(run, head, column, scratch);
        });
    }

    // Call f(vectors, column) for all columns of S.
    template <class F>
    void for_columns(const F& f) const {
        for (int64_t column = 0; column < r.value_dim; column += kDeltaColumns)
            with_rows<kDeltaVecs>((int)std::min<int64_t>(kDeltaVecs, (r.value_dim - column) / kLanes),
                                  [&](auto n) { f(n, column); });
    }

    // Gather the triples of positions [first, stop) for a head.
    void collect(int64_t slot, int64_t first, int64_t stop, int64_t head, DeltaScratch& scratch) const {
        scratch.grow(r);
        for (int64_t p = first; p < stop; ++p) {
            const int64_t i = (int64_t)scratch.triples.size();
            float *k = &scratch.keys[i * r.key_dim], *u = &scratch.us[i * r.value_dim];
            const T *from = recent(slot, p), *from_u = from + keys() + head * r.value_dim;
            from += head / (r.value_heads / r.key_heads) * r.key_dim;
            for (int64_t d = 0; d < r.key_dim; d += kLanes) load(from + d).store(k + d);
            for (int64_t d = 0; d < r.value_dim; d += kLanes) load(from_u + d).store(u + d);
            scratch.triples.push_back({k, u, exp(decay(slot, p)[head])});
        }
    }

    // What token i of a run has for a head.
    struct Token {
        const float *q, *k;
        float *v, beta, decay;
    };
    Token token(const DeltaRun& run, int64_t i, int64_t head) const {
        const int64_t t = run.token + i, key = head / (r.value_heads / r.key_heads) * r.key_dim;
        float *q = mixed + t * channels(), *own = gates + t * 2 * r.value_heads + head;
        return {q + key, q + keys() + key, q + 2 * keys() + head * r.value_dim, own[0], own[r.value_heads]};
    }

    // Replace v by the output; u [VECS * 16] is what the token adds.
    template <int VECS>
    void finish(const Token& t, int64_t column, const Vec (&read)[2][VECS], float* u) const {
        Vec products = Vec::all(0.0f);
        for (int64_t d = 0; d < r.key_dim; d += kLanes) products = fma(Vec::load(t.k + d), Vec::load(t.q + d), products);
        const Vec qk = Vec::all(sum(products)), beta = Vec::all(t.beta);
        for (int j = 0; j < VECS; ++j) {
            float* v = t.v + column + j * kLanes;
            const Vec own = rounded<T>(beta * (Vec::load(v) - read[0][j]));
            own.store(u + j * kLanes);
            fma(qk, own, read[1][j]).store(v);
        }
    }

    template <int VECS>
    void decode(const DeltaRun& run, int64_t head, int64_t column, DeltaScratch& scratch) const {
        const int64_t slot = this->slot(run.row), before = (int64_t)scratch.triples.size();
        const float* s = delta(slot, head) + column;
        for (int64_t i = 0; i < run.stop - run.start; ++i) {
            const Token t = token(run, i, head);
            Vec read[2][VECS] = {};
            advance<VECS>(r.key_dim, s, r.value_dim, nullptr, 0, scratch.triples.data(), before + i, column, t.k, t.q,
                          t.decay, read);
            float* u = &scratch.us[(before + i) * r.value_dim];
            finish<VECS>(t, column, read, u + column);
            T* stored = recent(slot, run.start + i) + keys() + head * r.value_dim + column;
            for (int j = 0; j < VECS; ++j) put(stored + j * kLanes, Vec::load(u + column + j * kLanes));
            scratch.triples.push_back({t.k, u, t.decay});
        }
        scratch.triples.resize(before);
    }

    template <int VECS>
    void prefill(const DeltaRun& run, int64_t head, int64_t column, DeltaScratch& scratch) const {
        scratch.grow(r);
        const int64_t slot = this->slot(run.row), count = run.stop - run.start, ld = VECS * kLanes;
        float *own = delta(slot, head) + column, *block = scratch.block.data(), u[VECS * kLanes];
        const float* from = run.start ? own : nullptr;  // a text begins with zeros
        Triple last = {nullptr, u - column, 0.0f};
        for (int64_t i = 0; i <= count; ++i) {
            const Token t = token(run, std::min(i, count - 1), head);
            Vec read[2][VECS] = {};
            float* to = i < count ? block : own;
            advance<VECS>(r.key_dim, from, i ? ld : r.value_dim, to, i < count ? ld : r.value_dim, &last, i > 0, column,
                          i < count ? t.k : nullptr, t.q, t.decay, read);
            from = block;
            for_each_capture(run, [&](const Copy& c) {
                if (c.position != run.start + i) return;
                for (int64_t row = 0; row < r.key_dim; ++row)
                    memcpy(delta(c.target, head) + row * r.value_dim + column, to + row * (i < count ? ld : r.value_dim),
                           ld * sizeof(float));
            });
            if (i == count) break;
            finish<VECS>(t, column, read, u);
            last.k = t.k, last.decay = t.decay;
        }
    }

    // Move S of a head on.
    void fold(const Fold& f, int64_t head, DeltaScratch& scratch) const {
        scratch.triples.clear();
        collect(f.slot, f.start, f.stop, head, scratch);
        for_columns([&](auto n, int64_t column) {
            float* s = delta(f.slot, head) + column;
            Vec read[2][n];
            advance<n>(r.key_dim, s, r.value_dim, s, r.value_dim, scratch.triples.data(),
                       (int64_t)scratch.triples.size(), column, nullptr, nullptr, 0.0f, read);
        });
    }
};

}  // namespace minisgl
