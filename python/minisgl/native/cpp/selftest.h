// The test that a library must pass before it is used.
#pragma once

namespace minisgl {

// Random weights [rows, cols] between -0.5 and 0.5: in the layout of `Matrix<W>`, and in double precision in `values`.
template <class T, class W>
std::vector<W> random_weights(int64_t rows, int64_t cols, uint32_t& random, std::vector<double>& values) {
    values.clear();
    if constexpr (std::is_same_v<T, W>) {
        std::vector<T> w(rows * cols);
        for (T& x : w) {
            put(&x, (float)(mix32(random++) >> 8) * 0x1p-24f - 0.5f);
            values.push_back(to_float(x));
        }
        pack(w.data(), rows, cols);
        return w;
    } else {
        constexpr int bits = 8 / W::kPer, half = 1 << (bits - 1);
        std::vector<uint8_t> q(rows * cols);
        std::vector<bf16> scale(rows * cols / kGroup);
        for (bf16& s : scale) s = to_bf16((float)((mix32(random++) >> 8) + (1 << 24)) * 0x1p-26f / half);
        for (size_t i = 0; i < q.size(); ++i) {
            const int number = (int)(mix32(random++) >> (32 - bits)) - half;
            q[i] = (uint8_t)(bits == 8 ? number : number + half);
            values.push_back((double)number * to_float(scale[i / kGroup]));
        }
        std::vector<W> result(rows / kLanes * (cols / kGroup));
        pack(q.data(), scale.data(), rows, cols, result.data());
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
            quantize_group<W::kOffset>(&x[i], r);
            for (int k = 0; k < kGroup; ++k) result[i + k] = (double)r.x[k] * r.scale;
        }
    return result;
}

// Whether x W^T agrees with sums in double precision, for all numbers of rows up to 40.
template <class T, class W>
bool gemm_is_correct() {
    constexpr int64_t rows = 80, cols = 288, max_rows = 40;
    std::vector<X<T>> x((max_rows + kLanes) * cols);
    uint32_t random = 1;
    std::vector<double> values;
    const std::vector<W> data = random_weights<T, W>(rows, cols, random, values);
    for (X<T>& value : x) put(&value, (float)(mix32(random++) >> 8) * 0x1p-24f - 0.5f);
    const Matrix<W> matrix{data.data(), rows, cols, nullptr};
    const std::vector<double> taken = gemm_inputs<T, W>(x);
    for (int64_t i = 0; i < rows * cols; ++i)
        if (to_float(matrix.at(i / cols, i % cols)) != values[i]) return false;
    for (size_t i = 0; i < x.size(); ++i)
        if (!(std::fabs(taken[i] - to_float(x[i])) <= (std::is_same_v<T, W> ? 0 : 2e-3))) return false;
    Pool pool(2);
    for (int64_t m = 1; m <= max_rows; ++m) {
        std::vector<float> y(m * rows);
        linear<T>(pool, matrix, x.data(), cols, {{0, m}}, y.data(), rows, false);
        for (int64_t i = 0; i < m * rows; ++i) {
            double want = 0;
            for (int64_t k = 0; k < cols; ++k) want += taken[i / rows * cols + k] * values[i % rows * cols + k];
            if (!(std::fabs(y[i] - want) < 1e-4)) return false;  // the sums are about 1
        }
    }
    return true;
}

// Whether all 8-bit floats are read right, and written again as they were.
inline bool e4m3_is_correct() {
    for (int first = 0; first < 256; first += kLanes) {
        uint8_t codes[kLanes];
        float values[kLanes];
        for (int i = 0; i < kLanes; ++i) codes[i] = (uint8_t)(first + i);
        from_e4m3(codes).store(values);
        for (int i = 0; i < kLanes; ++i) {
            const int exponent = codes[i] >> 3 & 15, fraction = codes[i] & 7;
            const double size = std::ldexp(exponent ? 8 + fraction : fraction, std::max(exponent, 1) - 10);
            const bool is_nan = (codes[i] & 0x7f) == 0x7f;
            if (!is_nan && values[i] != (codes[i] < 128 ? size : -size)) return false;
            if (!is_nan && to_e4m3(values[i]) != codes[i]) return false;
        }
    }
    return true;
}

// Whether a tiny model gives the same finite logits, bit by bit, for a whole prompt and for tokens that decode. With
// `has_experts`, two of three experts and a shared one, gates, a recurrent first layer, and LayerNorm before and after
// blocks.
template <class T, class W>
bool step_is_deterministic(bool has_scales, bool has_experts) {
    constexpr int64_t layers = 2, hidden = 64, inner = 96, vocab = 80, heads = 4, kv_heads = 2, dim = 96, page = 16;
    constexpr int64_t pages = 16, rows = 4, qkv = (heads + 2 * kv_heads) * dim, tokens = 90;
    constexpr int64_t bits = std::is_same_v<T, W> ? 0 : std::is_same_v<W, Int8> ? 8 : 4;
    uint32_t random = 1;
    std::vector<double> values;
    auto matrix = [&](int64_t n, int64_t k) { return random_weights<T, W>(n, k, random, values); };
    const std::vector<float> ones(2 * std::max(hidden, dim), 1.0f), angles(tokens * 2 * dim, 0.7071f);
    const int64_t experts = has_experts ? 3 : 1;
    const std::vector<float> router = random_weights<float, float>(kLanes, hidden, random, values);
    std::vector<std::vector<W>> store;
    constexpr int64_t data_bytes = 2 * kv_heads * page * dim * sizeof(T), page_bytes = data_bytes + 2 * kv_heads * page * 4;
    Aligned<char> cache(pages * layers * page_bytes);
    std::vector<int32_t> table(rows * pages), slots(rows * pages);
    constexpr int64_t value_heads = 8, value_dim = heads * dim / value_heads, channels = (2 * kv_heads + heads) * dim;
    constexpr int64_t recent = 20, width = 4, slot_size = value_heads * dim * value_dim, rings = 3 * recent * channels;
    const std::vector<float> conv = random_weights<float, float>(kLanes, channels, random, values);
    const std::vector<float> rates(value_heads, -0.5f);
    Aligned<float> states(2 * (slot_size + rings), NAN);  // of two rows
    LayerWeights weights[layers];
    for (LayerWeights& w : weights) {
        const auto packed = [&](int64_t rows, int64_t cols, int64_t count) -> Packed {
            store.push_back(matrix(count * rows, cols));
            return {store.back().data(), bits, rows, cols, nullptr};
        };
        w = {packed(qkv, hidden, 1), packed(hidden, heads * dim, 1), packed(2 * inner, hidden, experts),
             packed(hidden, inner, experts)};
        w.heads = heads, w.kv_heads = kv_heads, w.dim = dim, w.scale = 0.18, w.output_scale = 1;
        w.input_norm = w.mlp_norm = w.q_norm = w.k_norm = ones.data(), w.cos_sin = angles.data();
        w.page_table = table.data(), w.cache_stride = layers * page_bytes;
        w.cache = &cache[(&w - weights) * page_bytes];
        if (has_scales) w.cache_scale = (float*)&cache[(&w - weights) * page_bytes + data_bytes];
        if (!has_experts) continue;
        w.shared_up = packed(2 * inner, hidden, 1), w.shared_down = packed(hidden, inner, 1);
        w.router = {router.data(), 0, experts + 1, hidden, nullptr};
        w.attention_norm = w.output_norm = ones.data();
        if (&w != weights) {
            w.gate = packed(heads * dim, hidden, 1);
            continue;
        }
        w.qkv = packed(channels + heads * dim, hidden, 1), w.beta_decay = packed(2 * value_heads, hidden, 1);
        w.heads = w.kv_heads = 0, w.page_table = slots.data();
        float* ring = states.data() + slot_size;
        w.recurrence = {conv.data(), rates.data(), ones.data(), ones.data(), kv_heads, value_heads, dim, value_dim,
                        width, recent, (slot_size + rings) * 4, states.data(), ring, ring + recent * channels,
                        ring + rings / 2};
    }
    const std::vector<W> head = matrix(vocab, hidden);
    std::vector<int32_t> last(rows), tokens_in(tokens), sampled(rows), finite(rows);
    std::vector<Row> fields(rows);
    for (int i = 0; i < (int)tokens; ++i) tokens_in[i] = (int32_t)(mix32(i) % vocab);
    for (int64_t r = 0; r < 2; ++r)
        for (int64_t i = 0; i < 6; ++i) table[r * pages + i] = (int32_t)(r * 6 + 5 - i);
    ModelSpec spec = {};
    spec.is_bf16 = sizeof(T) == 2, spec.layers = layers, spec.hidden = hidden, spec.vocab = vocab;
    spec.is_layer_norm = has_experts, spec.experts = experts, spec.top_k = 2, spec.groups = 1;
    spec.top_groups = spec.normalises = 1, spec.embedding_scale = spec.expert_scale = 1, spec.block_eps = 1e-6;
    spec.gate_activation = kSoftplus, spec.page = page;
    spec.threads = 2, spec.is_tied = 1, spec.eps = 1e-6, spec.weights = weights;
    spec.head = {head.data(), bits, vocab, hidden, nullptr}, spec.final_norm = ones.data();
    spec.page_tables = table.data(), spec.table_rows = rows, spec.table_width = pages;
    spec.last_token = last.data(), spec.rows = fields.data();
    Decoder<T> net(spec);
    auto run = [&](const Sequence& sequence, int64_t first) {
        StepPlan plan = {};
        plan.sequences = &sequence, plan.num_sequences = 1, plan.tokens = &tokens_in[first];
        net.step(plan, sampled.data(), finite.data());
        return std::vector<float>(net.logits.begin(), net.logits.begin() + vocab);
    };
    const std::vector<float> whole = run({0, 0, (int32_t)tokens, kSamples}, 0);
    std::vector<float> one_by_one;
    slots[pages] = 1, slots[pages + kStateLen] = 1;
    for (int32_t t = 0; t < (int32_t)tokens; ++t) {
        const Fold due = {1, slots[pages + kStateLen], t};
        if (due.stop - due.start == 16) net.fold(&due, 1), slots[pages + kStateLen] = t;
        last[1] = tokens_in[t];
        one_by_one = run({1, t, t + 1, t > 0 ? kSamples | kFromDevice : kSamples}, t);
    }
    for (float x : whole)
        if (!std::isfinite(x)) return false;
    return whole == one_by_one && finite[0] == 1;
}

template <class T, class W = T>
bool passes_self_test() {
#if defined(__AMX_BF16__)
    if (!request_amx()) return false;
#endif
    if (!gemm_is_correct<T, W>() || !step_is_deterministic<T, W>(false, false)) return false;
    if (!step_is_deterministic<T, W>(false, true)) return false;
    return !std::is_same_v<T, W> || (e4m3_is_correct() && step_is_deterministic<T, W>(true, false));  // weights do not matter
}

}  // namespace minisgl
