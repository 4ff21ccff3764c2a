// One step of a Llama-shaped model: plan in, tokens out. Plain C ABI, see native/library.py.
#include <algorithm>
#include <memory>
#include <variant>

#include "attention.h"
#include "gemm_quantized.h"
#include "model.h"
#include "sample.h"

namespace minisgl {

constexpr int64_t kSlice = 512;  // tokens that go through a layer together

// A matrix in the model's type T, or in 8 or 4 bits.
template <class T>
using Weight = std::variant<Matrix<T>, Matrix<Int8>, Matrix<Int4>>;

template <class T>
Weight<T> weight(const void* data, int64_t bits, int64_t rows, int64_t cols, const float* bias) {
    if (bits == 8) return Matrix<Int8>{(const Int8*)data, rows, cols, bias};
    if (bits == 4) return Matrix<Int4>{(const Int4*)data, rows, cols, bias};
    return Matrix<T>{(const T*)data, rows, cols, bias};
}

// K/V and an untied embedding are T.
template <class T>
class Decoder : public Model {
    using X = typename Dot<T>::X;
    struct Layer {
        Weight<T> qkv, o, gate_up, down;
        const LayerWeights* w;
    };
    struct Piece {  // tokens of a slot that go through the layers together
        int64_t row, start, stop, flags;
    };

  public:
    explicit Decoder(const ModelSpec& spec)
        : s_(spec),
          pool_((int)spec.threads),
          scratch_(spec.threads, {std::max<int64_t>(kQueryRows, spec.heads / spec.kv_heads), spec.dim}) {
        const int64_t h = s_.hidden, q = s_.heads * s_.dim, all = q + 2 * s_.kv_heads * s_.dim, i = s_.intermediate;
        for (int64_t l = 0; l < s_.layers; ++l) {
            weights_.push_back(s_.weights[l]);
            const LayerWeights& w = s_.weights[l];
            layers_.push_back({weight<T>(w.qkv, w.qkv_bits, all, h, w.qkv_bias),
                               weight<T>(w.o, w.o_bits, h, q, w.o_bias),
                               weight<T>(w.gate_up, w.gate_up_bits, 2 * i, h, w.gate_up_bias),
                               weight<T>(w.down, w.down_bits, h, i, w.down_bias), nullptr});
        }
        for (int64_t l = 0; l < s_.layers; ++l) layers_[l].w = &weights_[l];
        head_ = weight<T>(s_.head, s_.head_bits, s_.vocab, h, nullptr);
        q_size_ = q, qkv_size_ = all;
        constexpr int64_t line = 64 / sizeof(X);  // padding: rows a power of two apart share a cache set
        ld_hidden_ = h + line, ld_q_ = q + line, ld_inner_ = i + line;
    }

    void step(const StepPlan& plan, int32_t* tokens, int32_t* finite) override {
        apply(plan);
        int64_t num_samples = 0;
        for (int64_t i = 0; i < plan.num_slots; ++i) num_samples += (plan.slots[i].flags & kSamples) != 0;
        logits.resize(std::max<size_t>(logits.size(), num_samples * s_.vocab));
        std::vector<Piece> sampled;
        const int32_t* ids = plan.tokens;
        for (int64_t i = 0; i < plan.num_slots; ++i) {
            const Slot& slot = plan.slots[i];
            Piece rest{slot.row, slot.start, slot.stop, slot.flags};
            while (rest.start < rest.stop) {
                Piece piece = rest;
                piece.stop = std::min(rest.stop, rest.start + kSlice - (int64_t)ids_.size());
                if (piece.stop < rest.stop) piece.flags &= ~kSamples;
                rest.start = piece.stop;
                slice_.push_back(piece);
                for (int64_t t = piece.start; t < piece.stop; ++t) {
                    ids_.push_back(piece.flags & kFromDevice ? s_.last_token[piece.row] : *ids++);
                    positions_.push_back(t), rows_.push_back(piece.row);
                }
                if ((int64_t)ids_.size() == kSlice) slice(sampled);
            }
        }
        if (!ids_.empty()) slice(sampled);
        pool_.run((int)num_samples, [&](int i, int) {
            const Piece& piece = sampled[i];
            if (piece.flags & ~(kSamples | kFromDevice)) return;  // sampled by the caller
            const Sampled c = sample_token(&logits[i * s_.vocab], s_.vocab, s_.temperature[piece.row],
                                           s_.noise_key[piece.row], (int32_t)piece.stop);
            tokens[i] = c.token, finite[i] = c.is_finite;
        });
        for (int64_t i = 0; i < num_samples; ++i)  // a row may have several
            if (!(sampled[i].flags & ~(kSamples | kFromDevice))) s_.last_token[sampled[i].row] = tokens[i];
    }

  private:
    void apply(const StepPlan& plan) {
        for (int64_t i = 0; i < plan.num_page_writes; ++i) {
            const PageWrite& w = plan.page_writes[i];
            s_.page_table[w.row * s_.table_width + w.index] = w.page;
        }
    }

    // Run the tokens in ids_, slice_, positions_ and rows_ through all layers, and compute the logits that are sampled.
    void slice(std::vector<Piece>& sampled) {
        int64_t m = (int64_t)ids_.size();
        grow(m);
        pool_.run(pieces(m * s_.hidden), [&](int i, int) {
            const int n = pieces(m * s_.hidden);
            for (int64_t t = part(m, n, i); t < part(m, n, i + 1); ++t) embed(ids_[t], &x_[t * s_.hidden]);
        });
        std::vector<int64_t> kept;
        const int64_t first_sample = (int64_t)sampled.size();
        int64_t token = 0;
        for (const Piece& piece : slice_) {
            token += piece.stop - piece.start;
            if (piece.flags & kSamples) kept.push_back(token - 1), sampled.push_back(piece);
        }
        for (const Layer& layer : layers_) {
            norm(layer.w->input_norm, m);
            multiply(layer.qkv, normed_, ld_hidden_, m, qkv_.data(), qkv_size_, false);
            rotate_and_store(layer, m);
            attention(layer);
            if (&layer == &layers_.back()) {  // only tokens with logits are still needed
                m = (int64_t)kept.size();
                for (int64_t i = 0; i < m; ++i) {
                    memmove(&x_[i * s_.hidden], &x_[kept[i] * s_.hidden], s_.hidden * sizeof(float));
                    memmove(&attended_[i * ld_q_], &attended_[kept[i] * ld_q_], q_size_ * sizeof(X));
                }
            }
            multiply(layer.o, attended_, ld_q_, m, x_.data(), s_.hidden, true);
            norm(layer.w->post_norm, m);
            std::visit([&](const auto& w) {
                gated<T>(pool_, w, normed_.data(), ld_hidden_, m, inner_.data(), ld_inner_);
            }, layer.gate_up);
            multiply(layer.down, inner_, ld_inner_, m, x_.data(), s_.hidden, true);
        }
        norm(s_.final_norm, m);
        float* out = logits.data() + first_sample * s_.vocab;
        multiply(head_, normed_, ld_hidden_, m, out, s_.vocab, false);
        ids_.clear(), positions_.clear(), rows_.clear(), slice_.clear();
    }

    int pieces(int64_t elements) const { return (int)std::min<int64_t>(elements / 8192 + 1, 8 * pool_.size()); }

    void grow(int64_t m) {
        m = (m + kLanes - 1) / kLanes * kLanes;  // GEMMs may read up to there
        if (m * s_.hidden <= (int64_t)x_.size()) return;
        x_.resize(m * s_.hidden), normed_.resize(m * ld_hidden_), qkv_.resize(m * qkv_size_);
        q_.resize(m * ld_q_), attended_.resize(m * ld_q_), inner_.resize(m * ld_inner_);
    }

    void embed(int64_t id, float* x) const {
        const T* row = (const T*)s_.embedding + id * s_.hidden;
        if (!s_.is_tied)
            for (int64_t k = 0; k < s_.hidden; ++k) x[k] = to_float(row[k]);
        else
            std::visit([&](const auto& w) {
                for (int64_t k = 0; k < s_.hidden; ++k) x[k] = to_float(w.at(id, k));
            }, head_);
    }

    void multiply(const Weight<T>& weight, const Aligned<X>& x, int64_t ldx, int64_t m, float* y, int64_t ldy,
                  bool adds) {
        std::visit([&](const auto& w) { linear<T>(pool_, w, x.data(), ldx, m, y, ldy, adds); }, weight);
    }

    // y = x / sqrt(mean(x^2) + eps) * weight.
    template <class Y>
    void rms_norm(const float* x, const float* weight, int64_t n, Y* y) const {
        Vec squares = Vec::all(0.0f);
        for (int64_t i = 0; i < n; i += kLanes) squares = fma(Vec::load(x + i), Vec::load(x + i), squares);
        const Vec factor = Vec::all(1.0f / std::sqrt(sum(squares) / (float)n + (float)s_.eps));
        for (int64_t i = 0; i < n; i += kLanes) put(y + i, Vec::load(x + i) * factor * Vec::load(weight + i));
    }

    void norm(const float* weight, int64_t m) {
        const int n = pieces(m * s_.hidden);
        pool_.run(n, [&](int i, int) {
            for (int64_t t = part(m, n, i); t < part(m, n, i + 1); ++t)
                rms_norm(&x_[t * s_.hidden], weight, s_.hidden, &normed_[t * ld_hidden_]);
        });
    }

    // Normalise a head if it has a norm weight, and apply RoPE (halves rotated against each other).
    template <class Y>
    void rotate(float* head, const float* weight, const float* cos, Y* out) const {
        if (weight) rms_norm(head, weight, s_.dim, head);
        const int64_t half = s_.dim / 2;
        for (int64_t i = 0; i < half; i += kLanes) {
            const int n = (int)std::min<int64_t>(kLanes, half - i);
            const Vec a = load_part(head + i, n), b = load_part(head + half + i, n);
            const Vec c = load_part(cos + i, n), s = load_part(cos + half + i, n);
            store_part(head + i, a * c - b * s, n);
            store_part(head + half + i, b * c + a * s, n);
        }
        convert(head, out);
    }
    template <class Y>
    void convert(const float* head, Y* out) const {
        for (int64_t d = 0; d < s_.dim; d += kLanes) put(out + d, Vec::load(head + d));
    }

    void rotate_and_store(const Layer& layer, int64_t m) {
        const Cache<T> cache = cache_of(layer);
        const int n = (int)std::min<int64_t>(m, pieces(8 * m * qkv_size_));
        pool_.run(n, [&](int piece, int thread) {
            T *key = scratch_[thread].keys.data(), *value = scratch_[thread].values.data();
            for (int64_t t = part(m, n, piece); t < part(m, n, piece + 1); ++t) {
                const int64_t page = s_.page_table[rows_[t] * s_.table_width + positions_[t] / s_.page];
                const int64_t slot = page * s_.page + positions_[t] % s_.page;
                float* heads = &qkv_[t * qkv_size_];
                const float* cos = layer.w->cos_sin + positions_[t] * s_.dim;
                for (int64_t h = 0; h < s_.heads; ++h)
                    rotate(heads + h * s_.dim, layer.w->q_norm, cos, &q_[t * ld_q_ + h * s_.dim]);
                const bool is_first = t == 0 || rows_[t - 1] != rows_[t];
                const bool is_last = t + 1 == m || rows_[t + 1] != rows_[t];
                for (int64_t h = 0; h < s_.kv_heads; ++h) {
                    float *k = heads + q_size_ + h * s_.dim, *v = k + s_.kv_heads * s_.dim;
                    rotate(k, layer.w->k_norm, cos, key);
                    convert(v, value);
                    cache.store(slot, h, key, value, is_first, is_last);
                }
            }
        });
    }

    void attention(const Layer& layer) {
        const Cache<T> cache = cache_of(layer);
        const int64_t group = s_.heads / s_.kv_heads, each = std::max<int64_t>(1, kQueryRows / group);
        items_.clear(), spans_.clear();
        int64_t token = 0;
        double work = 0;
        spans_.reserve(slice_.size());
        for (const Piece& piece : slice_) {
            spans_.push_back({piece.row, piece.start, piece.stop, token, layer.w->window});
            token += piece.stop - piece.start;
            work += (double)(piece.stop - piece.start) * (double)piece.stop;
            for (int64_t to = piece.stop; to > piece.start; to -= each)  // items with the most keys first
                for (int64_t h = 0; h < s_.kv_heads; ++h)
                    items_.push_back({&spans_.back(), std::max(piece.start, to - each), to, h});
        }
        const double most = std::min<double>((double)items_.size(), 64 * pool_.size());
        const int n = (int)std::min(most, work * (double)q_size_ / 5e4 + 1);
        pool_.run(n, [&](int piece, int thread) {
            const Item *item = &items_[part(items_.size(), n, piece)], *end = items_.data() + items_.size();
            BlockIterator ahead(item, end, kBlocksAhead);
            for (; item != &items_[0] + part(items_.size(), n, piece + 1); ++item)
                attend<T>(cache, *item, ahead, group, s_.page_table, s_.table_width, (float)s_.scale, q_.data(),
                          attended_.data(), ld_q_, scratch_[thread]);
        });
    }

    Cache<T> cache_of(const Layer& layer) const {
        return {(T*)s_.cache + (&layer - layers_.data()) * s_.layer_stride, s_.kv_heads, s_.page, s_.dim};
    }

    ModelSpec s_;
    Pool pool_;
    std::vector<AttentionScratch<T>> scratch_;
    std::vector<LayerWeights> weights_;
    std::vector<Layer> layers_;
    Weight<T> head_;
    int64_t q_size_, qkv_size_, ld_hidden_, ld_q_, ld_inner_;
    // The current slice.
    std::vector<int64_t> ids_, positions_, rows_;
    std::vector<Piece> slice_;
    std::vector<Item> items_;
    std::vector<Span> spans_;
    Aligned<float> x_, qkv_;
    Aligned<X> normed_, q_, attended_, inner_;
};

}  // namespace minisgl

#include "selftest.h"

using namespace minisgl;

extern "C" {
int64_t minisgl_layout_version() { return kLayoutVersion; }

// 0 if GEMMs and a tiny model pass; see selftest.h.
int minisgl_self_test() {
    const bool passes = passes_self_test<float>() && passes_self_test<bf16>();
    return passes && passes_self_test<float, Int8>() && passes_self_test<bf16, Int8>() &&
           passes_self_test<float, Int4>() && passes_self_test<bf16, Int4>() ? 0 : 1;
}

void* minisgl_create(const ModelSpec* spec) {
#if defined(__AMX_BF16__)
    request_amx();  // granted: the self-test has asked before
#endif
    return spec->is_bf16 ? static_cast<Model*>(new Decoder<bf16>(*spec)) : new Decoder<float>(*spec);
}
void minisgl_destroy(void* model) { delete static_cast<Model*>(model); }

// tokens, finite [S]; entries of slots with flags other than kSamples and kFromDevice are left as they are.
void minisgl_step(void* model, const StepPlan* plan, int32_t* tokens, int32_t* finite) {
    static_cast<Model*>(model)->step(*plan, tokens, finite);
}
const float* minisgl_logits(void* model) { return static_cast<Model*>(model)->logits.data(); }

// Pack `weight` [rows, cols] in place; rows a multiple of 16.
void minisgl_pack(void* weight, int64_t is_bf16, int64_t rows, int64_t cols) {
    if (is_bf16) return pack((bf16*)weight, rows, cols);
    pack((float*)weight, rows, cols);
}

// Bytes of a weight [rows, cols] in 8 or 4 bits; rows a multiple of 16 and cols of 32.
int64_t minisgl_quantized_size(int64_t bits, int64_t rows, int64_t cols) {
    return rows / kLanes * (cols / kGroup) * (bits == 8 ? sizeof(Int8) : sizeof(Int4));
}

// Pack numbers [rows, cols], int8 or 0 to 15 in bytes, with scales [rows, cols / 32]; see `minisgl_quantized_size`.
void minisgl_pack_quantized(int64_t bits, const uint8_t* q, const bf16* scale, int64_t rows, int64_t cols, void* out) {
    if (bits == 8) return pack(q, scale, rows, cols, (Int8*)out);
    pack(q, scale, rows, cols, (Int4*)out);
}
}
