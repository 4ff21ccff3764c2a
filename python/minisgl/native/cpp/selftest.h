// The test that a library must pass before it is used.
#pragma once

namespace minisgl {

// Weights [rows, cols] in the layout of `Matrix<W>`.
template <class W, class T>
std::vector<W> packed(std::vector<T> w, int64_t rows, int64_t cols) {
    if constexpr (std::is_same_v<T, W>) {
        pack(w.data(), rows, cols);
        return w;
    } else {
        std::vector<W> result(rows / kLanes * (cols / kGroup));
        quantize(w.data(), rows, cols, result.data());
        return result;
    }
}

// x as GEMMs with W read it: quantized for quantized weights.
template <class T, class W>
std::vector<double> gemm_inputs(const std::vector<X<T>>& x) {
    std::vector<double> result(x.size());
    for (size_t i = 0; i < x.size(); ++i) result[i] = to_float(x[i]);
    if constexpr (!std::is_same_v<T, W>)
        for (size_t i = 0; i + kGroup <= x.size(); i += kGroup) {
            QuantGroup r;
            quantize_group(&x[i], r);
            for (int k = 0; k < kGroup; ++k) result[i + k] = (double)r.x[k] * r.scale;
        }
    return result;
}

// Whether x W^T agrees with sums in double precision, for all numbers of rows up to 40.
template <class T, class W>
bool gemm_is_correct() {
    constexpr int64_t rows = 80, cols = 288, most = 40;
    std::vector<T> w(rows * cols);
    std::vector<X<T>> x((most + kLanes) * cols);
    uint32_t random = 1;
    for (T& value : w) put(&value, (float)(mix32(random++) >> 8) * 0x1p-24f - 0.5f);
    for (X<T>& value : x) put(&value, (float)(mix32(random++) >> 8) * 0x1p-24f - 0.5f);
    const std::vector<W> data = packed<W>(w, rows, cols);
    const Matrix<W> matrix{data.data(), rows, cols, nullptr};
    const std::vector<double> taken = gemm_inputs<T, W>(x);
    for (int64_t i = 0; i < rows * cols; ++i)
        if (!(std::fabs(to_float(matrix.at(i / cols, i % cols)) - to_float(w[i])) <= (std::is_same_v<T, W> ? 0 : 2e-3)))
            return false;
    for (size_t i = 0; i < x.size(); ++i)
        if (!(std::fabs(taken[i] - to_float(x[i])) <= (std::is_same_v<T, W> ? 0 : 2e-3))) return false;
    Pool pool(2);
    for (int64_t m = 1; m <= most; ++m) {
        std::vector<float> y(m * rows);
        linear<T>(pool, matrix, x.data(), cols, m, y.data(), rows, false);
        for (int64_t i = 0; i < m * rows; ++i) {
            double want = 0;
            for (int64_t k = 0; k < cols; ++k)
                want += taken[i / rows * cols + k] * (double)to_float(matrix.at(i % rows, k));
            if (!(std::fabs(y[i] - want) < 1e-4)) return false;  // the sums are about 1
        }
    }
    return true;
}

// Whether a tiny model gives the same finite logits, bit by bit, for a whole prompt and token by token.
template <class T, class W>
bool step_is_deterministic() {
    constexpr int64_t layers = 2, hidden = 64, inner = 96, vocab = 80, heads = 4, kv_heads = 2, dim = 96, page = 16;
    constexpr int64_t pages = 16, rows = 4, qkv = (heads + 2 * kv_heads) * dim, tokens = 90;
    uint32_t random = 1;
    auto matrix = [&](int64_t n, int64_t k) {
        std::vector<T> w(n * k);
        for (T& x : w) put(&x, ((float)(mix32(random++) >> 8) * 0x1p-24f - 0.5f) * 0.5f);
        return packed<W>(w, n, k);
    };
    const std::vector<float> ones(std::max(hidden, dim), 1.0f), angles(tokens * 2 * dim, 0.7071f);
    std::vector<std::vector<W>> store;
    LayerWeights weights[layers];
    for (LayerWeights& w : weights) {
        for (auto [n, k] : {std::pair{qkv, hidden}, {hidden, heads * dim}, {2 * inner, hidden}, {hidden, inner}})
            store.push_back(matrix(n, k));
        const auto last = store.end();
        w = {last[-4].data(), last[-3].data(), last[-2].data(), last[-1].data(), nullptr, nullptr, nullptr, nullptr,
             ones.data(), ones.data(), ones.data(), ones.data(), angles.data(), 0};
    }
    const std::vector<W> head = matrix(vocab, hidden);
    std::vector<T> cache(layers * pages * 2 * kv_heads * page * dim);
    std::vector<int32_t> table(rows * pages), last(rows), tokens_in(tokens), sampled(rows), finite(rows);
    std::vector<float> temperature(rows);
    std::vector<int64_t> key(rows);
    for (int i = 0; i < (int)tokens; ++i) tokens_in[i] = (int32_t)(mix32(i) % vocab);
    for (int64_t r = 0; r < 2; ++r)
        for (int64_t i = 0; i < 6; ++i) table[r * pages + i] = (int32_t)(r * 6 + 5 - i);
    ModelSpec spec = {};
    spec.is_bf16 = sizeof(T) == 2, spec.layers = layers, spec.hidden = hidden, spec.intermediate = inner;
    spec.vocab = vocab, spec.heads = heads, spec.kv_heads = kv_heads, spec.dim = dim, spec.page = page;
    spec.threads = 2, spec.is_tied = 1, spec.eps = 1e-6, spec.scale = 0.18, spec.weights = weights;
    spec.head = head.data(), spec.final_norm = ones.data(), spec.cache = cache.data();
    spec.layer_stride = pages * 2 * kv_heads * page * dim, spec.page_table = table.data(), spec.table_width = pages;
    spec.last_token = last.data(), spec.temperature = temperature.data();
    spec.noise_key = key.data();
    Decoder<T, W> net(spec);
    auto run = [&](const Slot& slot, int64_t first) {
        const StepPlan plan{&slot, &tokens_in[first], nullptr, 1, 0};
        net.step(plan, sampled.data(), finite.data());
        return std::vector<float>(net.logits.begin(), net.logits.begin() + vocab);
    };
    const std::vector<float> whole = run({0, 0, (int32_t)tokens, kSamples}, 0);
    std::vector<float> one_by_one;
    for (int32_t t = 0; t < (int32_t)tokens; ++t) one_by_one = run({1, t, t + 1, kSamples}, t);
    for (float x : whole)
        if (!std::isfinite(x)) return false;
    return whole == one_by_one && finite[0] == 1;
}

template <class T, class W = T>
bool passes_self_test() {
#if defined(__AMX_BF16__)
    if (!request_amx()) return false;
#endif
    return gemm_is_correct<T, W>() && step_is_deterministic<T, W>();
}

}  // namespace minisgl
