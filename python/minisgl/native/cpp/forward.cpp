// One step of a decoder: plan in, tokens out. Plain C ABI, see native/library.py.
#include <algorithm>
#include <memory>
#include <variant>

#include "attention.h"
#include "gated_delta.h"
#include "gemm_quantized.h"
#include "model.h"
#include "sample.h"

namespace minisgl {

constexpr int64_t kSlice = 512;   // tokens that go through a layer together
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kShrunk = 512;  // columns of a sum of an adapter, so that several threads compute a long one
constexpr int64_t kBacklog = 128;  // tokens of a row that wait for a drafter: more than a pause of its drafts has

// A matrix in the model's type T, or in 8 or 4 bits.
template <class T>
using Weight = std::variant<Matrix<T>, Matrix<Int8>, Matrix<Int4>>;

template <class T>
Weight<T> weight(const Packed& p) {
    if (p.bits == 8) return Matrix<Int8>{(const Int8*)p.data, p.rows, p.cols, p.bias, {p.adapter}};
    if (p.bits == 4) return Matrix<Int4>{(const Int4*)p.data, p.rows, p.cols, p.bias, {p.adapter}};
    return Matrix<T>{(const T*)p.data, p.rows, p.cols, p.bias, {p.adapter}};
}

// The rows of a matrix from `first` on, a multiple of 16.
template <class T>
Weight<T> rows_from(const Weight<T>& weight, int64_t first) {
    return std::visit([&](auto w) -> Weight<T> {
        w.data = w.panel(first / kLanes), w.rows -= first, w.bias = w.bias ? w.bias + first : nullptr;
        w.added.first += first;
        return w;
    }, weight);
}

// K/V are T or 8-bit floats; an untied embedding is T. A drafter is a decoder with a `target`: a model of the same vocabulary or, with
// `fc`, a layer on the target's hidden states: that of EAGLE-3 (speculative/eagle3.py) or, with an `embedding_norm`, one of the
// checkpoint (speculative/mtp.py), which joins them with embeddings first and has the target's head.
template <class T>
class Decoder : public Model {
    using X = typename Dot<T>::X;
    static constexpr int64_t kPadding = 64 / sizeof(X);  // rows a power of two apart share a cache set
    struct Mlp {
        Weight<T> up, down;
        int64_t size;  // of its intermediate result
        Activation f;
        bool is_gated;
    };
    struct Layer {
        Weight<T> qkv, kv, o, gate;  // kv is the part of qkv for tokens of which only K/V is needed
        Weight<T> beta_decay;
        Mlp mlp, shared;             // the experts are one stacked MLP
        Weight<T> input_gate, input_projection;
        Matrix<float> router;
        LayerWeights w;
        int64_t q_size, kv_size;  // of all heads; kv_size is 0 if the cache is an earlier layer's
        bool recurs() const { return w.recurrence.delta; }
    };
    struct Choice {  // a token's expert, its weight, and the row of `expert_out_` that it computes
        int64_t expert, row;
        float weight;
    };
    struct Piece {  // tokens of a sequence that go through the layers together
        int64_t row, start, stop, flags;
    };
    struct Sample {  // a token that is sampled, and the position that it will have
        int64_t row, position, flags;
    };
    // Tokens of a row from `first` on that the target has computed, but the drafter has not. A head reads
    // `states`, the target's outputs for each in 8 bits; after the last known token it reads its own output, `hidden`.
    struct Backlog {
        int64_t first = 0;
        std::vector<int32_t> ids;
        std::vector<QuantGroup> states;
        std::vector<float> hidden;
    };

  public:
    explicit Decoder(const ModelSpec& spec)
        : s_(spec),
          target_(static_cast<Decoder*>(static_cast<Model*>(spec.target))),
          threads_(target_ ? target_->threads_ : std::make_shared<Pool>((int)spec.threads)),
          pool_(*threads_),
          ahead_(spec.fc.data != nullptr),
          query_rows_(kQueryRows) {
        int64_t dim = 0;
        for (int64_t l = 0; l < s_.layers; ++l) {
            const LayerWeights& w = s_.weights[l];
            const int64_t q = w.o.cols;
            dim = std::max(dim, w.dim), query_rows_ = std::max(query_rows_, w.heads / std::max<int64_t>(w.kv_heads, 1));
            if (w.cache_scale) query_rows_ = std::max<int64_t>(query_rows_, kQueryRows8Bit);
            q_size_ = std::max(q_size_, q), qkv_size_ = std::max(qkv_size_, w.qkv.rows);
            const Weight<T> qkv = weight<T>(w.qkv);
            const auto mlp = [](const Packed& up, const Packed& down, int64_t f) -> Mlp {
                return {weight<T>(up), weight<T>(down), down.cols, (Activation)f, up.rows > down.cols};
            };
            layers_.push_back({qkv, rows_from<T>(qkv, q), weight<T>(w.o), weight<T>(w.gate),
                               weight<T>(w.beta_decay),
                               mlp(w.up, w.down, w.router.data ? s_.expert_activation : s_.activation),
                               mlp(w.shared_up, w.shared_down, s_.activation),
                               weight<T>(w.input_gate), weight<T>(w.input_projection),
                               {(const float*)w.router.data, w.router.rows, w.router.cols, w.router.bias}, w,
                               q, (w.qkv.rows - q) / 2});
        }
        joins_first_ = s_.embedding_norm != nullptr;
        scratch_.assign(pool_.size(), {query_rows_, dim}), delta_scratch_.resize(pool_.size());
        head_ = joins_first_ ? target_->head_ : weight<T>(s_.head), fc_ = weight<T>(s_.fc);
        input_projection_ = weight<T>(s_.input_projection), state_size_ = s_.num_taps * s_.hidden / kGroup;
        ld_hidden_ = (1 + ahead_) * s_.hidden + kPadding, ld_q_ = q_size_ + kPadding;
        if (target_) target_->drafter_ = this;
    }

    void step(const StepPlan& plan, int32_t* tokens, int32_t* finite) override {
        apply(plan);
        sampled_.clear(), captures_ = plan.captures, num_captures_ = plan.num_captures;
        const int32_t* ids = plan.tokens;
        for (int64_t i = 0; i < plan.num_sequences; ++i) {
            const Sequence& sequence = plan.sequences[i];
            const int64_t count = sequence.stop - sequence.start;
            if (sequence.flags & kDrafts) {
                int32_t own[1 + kMaxDrafts] = {s_.last_token[sequence.row]};
                std::copy_n(drafts(sequence.row), count - 1, own + 1);
                const int64_t start = s_.lengths[sequence.row] - 1;
                add({sequence.row, start, start + count, sequence.flags}, own);
            } else if (sequence.flags & kFromDevice) {
                add({sequence.row, sequence.start, sequence.stop, sequence.flags}, &s_.last_token[sequence.row]);
            } else {
                add({sequence.row, sequence.start, sequence.stop, sequence.flags}, ids);
                ids += count;
            }
        }
        if (!ids_.empty()) slice();
        sample(tokens, finite, plan.masks);
        for (size_t i = 0; i < sampled_.size(); ++i)
            if (is_plain(sampled_[i]) && !(sampled_[i].flags & kDrafts)) s_.last_token[sampled_[i].row] = tokens[i];
    }

    void fold(const Fold* folds, int64_t count) override {
        std::vector<const Layer*> recurrent;
        for (const Layer& layer : layers_)
            if (layer.recurs()) recurrent.push_back(&layer);
        for (const Layer* layer : recurrent) {
            const GatedDelta<T> delta = delta_of(*layer);
            for_each_item(count * delta.r.value_heads, [&](int64_t i, int thread) {
                delta.fold(folds[i / delta.r.value_heads], i % delta.r.value_heads, delta_scratch_[thread]);
            });
        }
    }

    void verify(const StepPlan& plan, const int32_t* tokens, const int32_t* finite, int32_t* confirmed,
                int32_t* ready) override {
        for (int64_t i = 0, column = 0; i < plan.num_sequences; ++i) {
            const Sequence& sequence = plan.sequences[i];
            if (!(sequence.flags & kSamples)) continue;
            const int64_t first = column, count = sequence.flags & kDrafts ? sequence.stop - sequence.start : 1;
            column += count;
            if (!(sequence.flags & kDrafts)) continue;
            int64_t accepted = 0;
            while (accepted + 1 < count && tokens[first + accepted] == drafts(sequence.row)[accepted] && finite[first + accepted])
                ++accepted;
            std::fill(confirmed + first + accepted + 1, confirmed + column, 0);
            s_.lengths[sequence.row] += (int32_t)accepted + 1;
            s_.last_token[sequence.row] = tokens[first + accepted];
            ready[first] = drafter_ && !(sequence.flags & kMasked) ? kMaxDrafts : 0;
        }
    }

    int64_t draft(const StepPlan& plan, int64_t number) override {
        if (number == 0) target_->apply(plan);
        sampled_.clear();
        for (int64_t i = 0; i < plan.num_sequences; ++i) {
            const Sequence& sequence = plan.sequences[i];
            if (!(sequence.flags & kDrafts) || sequence.stop - sequence.start - 1 <= number) continue;
            if (is_proposed(plan, sequence.row)) continue;
            const int64_t newest = s_.lengths[sequence.row] - 1, at = newest + number - ahead_;
            const int64_t flags = sequence.flags & (kSamples | kPenalized | kFiltered);
            if (number > 0) {
                add({sequence.row, at, at + 1, flags}, drafts(sequence.row) + number - 1);
                continue;
            }
            Backlog& b = backlog(sequence.row);
            const int64_t known = newest - b.first;
            if (known < 1 || known > (int64_t)b.ids.size()) {  // only in a trial step, which no step came before
                b.first = newest - 1, b.ids = {0};
                b.states.resize(kBacklog * state_size_);
            } else {
                b.ids.resize(known);
            }
            catch_up(sequence.row, s_.last_token[sequence.row], flags);
        }
        if (!ids_.empty()) slice();
        std::vector<int32_t> tokens(sampled_.size()), finite(sampled_.size());
        sample(tokens.data(), finite.data(), nullptr);
        for (size_t i = 0; i < sampled_.size(); ++i)
            if (is_plain(sampled_[i])) drafts(sampled_[i].row)[number] = tokens[i];
        return (int64_t)sampled_.size();
    }

  private:
    static bool is_plain(const Sample& s) { return !(s.flags & ~(kSamples | kFromDevice | kDrafts | kMasked | kAdapted)); }
    static bool is_proposed(const StepPlan& plan, int64_t row) {
        const auto is_of_row = [&](const Proposal& p) { return p.row == row; };
        return std::any_of(plan.proposals, plan.proposals + plan.num_proposals, is_of_row);
    }
    int32_t* drafts(int64_t row) const { return s_.drafts + row * kMaxDrafts; }

    // Apply the plan's page writes and row states. Doing so twice before `verify` changes nothing.
    void apply(const StepPlan& plan) {
        for (int64_t i = 0; i < plan.num_page_writes; ++i) {
            const PageWrite& w = plan.page_writes[i];
            s_.page_tables[(w.group * s_.table_rows + w.row) * s_.table_width + w.index] = w.page;
        }
        for (int64_t i = 0; i < plan.num_row_states; ++i) {
            const RowState& r = plan.row_states[i];
            s_.rows[r.row] = r.fields;
            if (drafter_) drafter_->backlog(r.row).first = -1, drafter_->backlog(r.row).ids.clear();
        }
        for (int64_t i = 0; i < plan.num_history_words;) {
            const HistoryHead& head = *(const HistoryHead*)(plan.histories + i);
            s_.lengths[head.row] = head.length;
            i += head.words;
        }
        for (int64_t i = 0; i < plan.num_proposals; ++i) {
            const Proposal& p = plan.proposals[i];
            for (int j = 0; j < kMaxDrafts; ++j)
                drafts(p.row)[j] = p.tokens[std::clamp(s_.lengths[p.row] - p.first + j, 0, kProposed - 1)];
        }
    }

    // Append tokens to the slice, and run it when it is full; `states` [tokens, state_size_] if the layer reads them.
    void add(Piece rest, const int32_t* ids, const QuantGroup* states = nullptr) {
        while (rest.start < rest.stop) {
            Piece piece = rest;
            piece.stop = std::min(rest.stop, rest.start + kSlice - (int64_t)ids_.size());
            const int64_t count = piece.stop - piece.start;
            if (piece.stop < rest.stop && !(piece.flags & kDrafts)) piece.flags &= ~kSamples;
            rest.start = piece.stop;
            slice_.push_back(piece);
            ids_.insert(ids_.end(), ids, ids + count), ids += count;
            if (states) states_.insert(states_.end(), states, states + count * state_size_);
            if (states) states += count * state_size_;
            for (int64_t t = piece.start; t < piece.stop; ++t) positions_.push_back(t), rows_.push_back(piece.row);
            if ((int64_t)ids_.size() == kSlice) slice();
        }
    }

    Backlog& backlog(int64_t row) {
        if (row >= (int64_t)backlogs_.size()) backlogs_.resize(row + 1);
        return backlogs_[row];
    }

    // Append the backlog of a row to the slice; `newest` is the token after it.
    void catch_up(int64_t row, int32_t newest, int64_t flags) {
        Backlog& b = backlog(row);
        const int64_t count = (int64_t)b.ids.size();
        b.ids.push_back(newest);
        add({row, b.first, b.first + count + 1 - ahead_, flags}, &b.ids[ahead_], ahead_ ? b.states.data() : nullptr);
        b.first += count, b.ids.clear();
    }

    // Add tokens that the target has computed, and its `states` for them. They replace rejected drafts.
    void note(const Piece& piece, const int32_t* ids, const QuantGroup* states) {
        Backlog& b = backlog(piece.row);
        const int64_t known = piece.start - b.first;
        const bool goes_on = 0 <= known && known <= (int64_t)b.ids.size();
        const int64_t count = piece.stop - piece.start;
        const bool has_drafts = piece.flags & kDrafts, is_prompt = !(piece.flags & (kDrafts | kFromDevice));
        b.first = goes_on ? b.first : piece.start, b.ids.resize(goes_on ? known : 0);
        b.states.resize(kBacklog * state_size_);
        // A prompt's pages are shared as soon as it is computed, so only its last token waits. Drafts wait together,
        // because they may be wrong. A row that decodes plainly for too long leaves a hole.
        if (is_prompt || (int64_t)b.ids.size() + count > kBacklog) {
            if ((is_prompt || has_drafts) && !b.ids.empty()) catch_up(piece.row, *ids, 0);
            b.first = piece.start, b.ids.clear();
        }
        int64_t first = 0;
        if (is_prompt) {
            add({piece.row, piece.start, piece.stop - ahead_, 0}, ids + ahead_, ahead_ ? states : nullptr);
            b.first = piece.stop - 1, first = count - 1;
        }
        b.ids.insert(b.ids.end(), ids + first, ids + count);
        std::copy_n(states + first * state_size_, (count - first) * state_size_,
                    b.states.data() + (b.ids.size() - (count - first)) * state_size_);
    }

    // Bit i of word w of `mask` allows token 32 w + i.
    void forbid(float* x, const int32_t* mask) const {
        for (int64_t first = 0; first < s_.vocab; first += 32, ++mask)
            for (int64_t i = 0; i < std::min<int64_t>(32, s_.vocab - first); ++i)
                x[first + i] = (uint32_t)*mask >> i & 1 ? x[first + i] : -INFINITY;
    }

    // `masks` [M, words] are those of the tokens with kMasked, or null.
    void sample(int32_t* tokens, int32_t* finite, const int32_t* masks) {
        std::vector<int64_t> mask(sampled_.size());
        for (size_t i = 1; i < mask.size(); ++i) mask[i] = mask[i - 1] + ((sampled_[i - 1].flags & kMasked) != 0);
        pool_.run((int)sampled_.size(), [&](int i, int) {
            const Sample& s = sampled_[i];
            if (!is_plain(s)) return;  // sampled by the caller
            float* x = &logits[i * s_.vocab];
            if (masks && s.flags & kMasked) forbid(x, masks + mask[i] * ((s_.vocab + 31) / 32));
            const Sampled c =
                sample_token(x, s_.vocab, s_.rows[s.row].temperature, s_.rows[s.row].noise_key, (int32_t)s.position);
            tokens[i] = c.token, finite[i] = c.is_finite;
        });
    }

    // Run the tokens in ids_, slice_, positions_ and rows_ through all layers, and compute the logits that are sampled.
    void slice() {
        int64_t m = (int64_t)ids_.size();
        grow(m);
        if (!states_.empty() && !joins_first_)
            linear<T>(pool_, std::get<Matrix<Int8>>(fc_), states_.data(), state_size_, {{0, m}}, x_.data(), s_.hidden, false);
        for (int64_t t = 0; t < m; ++t) adapters_.push_back(target_ ? 0 : s_.rows[rows_[t]].adapter);
        find_runs();
        for_each_token(m, [&](int64_t t) { begin(t); });
        if (joins_first_) multiply(fc_, normed_, ld_hidden_, m, x_.data(), s_.hidden, false);
        if (s_.input_size > 0) begin_inputs(m);
        std::vector<int64_t> kept;
        const int64_t first_sample = (int64_t)sampled_.size();
        int64_t token = 0;
        for (const Piece& piece : slice_)
            for (int64_t t = piece.start; t < piece.stop; ++t, ++token)
                if (piece.flags & kDrafts || (piece.flags & kSamples && t + 1 == piece.stop)) {
                    kept.push_back(token);
                    sampled_.push_back({piece.row, t + 1 + ahead_, piece.flags});
                }
        const int64_t inputs = s_.layers * s_.input_size;
        for (const Layer& layer : layers_) {
            if (!ahead_ || joins_first_) norm_before(layer.w.input_norm, m);
            const bool is_cut = &layer == &layers_.back() && !taps_last();
            const int64_t skipped = is_cut && kept.empty() && !layer.recurs() ? layer.q_size : 0;
            multiply(skipped ? layer.kv : layer.qkv, normed_, ld_hidden_, m, qkv_.data() + skipped, qkv_size_, false);
            if (layer.recurs()) {
                recur(layer, m);
            } else {
                rotate_and_store(layer, m, skipped ? 0 : layer.q_size);
                if (skipped) m = 0;
                if (m == 0) break;
                attention(layer);
            }
            if (is_cut) {  // only tokens with logits are still needed
                m = keep_adapters(kept);
                for (int64_t i = 0; i < m; ++i) {
                    memmove(&x_[i * s_.hidden], &x_[kept[i] * s_.hidden], s_.hidden * sizeof(float));
                    memmove(&normed_[i * ld_hidden_], &normed_[kept[i] * ld_hidden_], s_.hidden * sizeof(X));
                    memmove(&attended_[i * ld_q_], &attended_[kept[i] * ld_q_], layer.q_size * sizeof(X));
                    memmove(inputs_.data() + i * inputs, inputs_.data() + kept[i] * inputs, inputs * sizeof(float));
                }
            }
            if (m == 0) break;
            if (layer.w.gate.data) gate(layer, m);
            add_block(layer.w.attention_norm, m, [&](float* y, bool adds) {
                multiply(layer.o, attended_, ld_q_, m, y, s_.hidden, adds);
            });
            if (!s_.is_parallel) norm_before(layer.w.mlp_norm, m);
            add_block(layer.w.output_norm, m, [&](float* y, bool adds) {
                if (layer.w.router_norm) return join_experts(layer, m, y);
                if (layer.router.data) return mix_experts(layer, m, y, adds);
                feed_forward(layer.mlp, normed_.data(), {{0, m}}, y, adds);
            });
            if (layer.w.input_gate.data) add_inputs(layer, m);
            if (layer.w.output_scale != 1.0) scale(m, (float)layer.w.output_scale);
            if (drafter_ && drafter_->ahead_) tap(&layer - layers_.data(), m);
        }
        if (taps_last()) {
            m = keep_adapters(kept);
            for (int64_t i = 0; i < m; ++i) memmove(&x_[i * s_.hidden], &x_[kept[i] * s_.hidden], s_.hidden * sizeof(float));
        }
        for (int64_t i = 0; ahead_ && i < m; ++i) {
            std::vector<float>& hidden = backlog(sampled_[first_sample + i].row).hidden;
            hidden.resize(s_.hidden);
            norm(&x_[i * s_.hidden], joins_first_ ? s_.final_norm : nullptr, s_.hidden, s_.eps, false, hidden.data());
        }
        norm_before(s_.final_norm, m);
        compute_logits(first_sample, m);
        token = 0;
        for (size_t i = 0; drafter_ && i < slice_.size(); token += slice_[i].stop - slice_[i].start, ++i)
            drafter_->note(slice_[i], &ids_[token], taps_.data() + token * drafter_->state_size_);
        if (drafter_ && !drafter_->ids_.empty()) drafter_->slice();
        ids_.clear(), positions_.clear(), rows_.clear(), slice_.clear(), states_.clear(), adapters_.clear();
    }

    // Find the runs of tokens with the same adapter.
    void find_runs() {
        runs_.clear();
        const int64_t m = (int64_t)adapters_.size();
        for (int64_t t = 0, end; t < m; t = end) {
            for (end = t + 1; end < std::min(m, t + kTileRows) && adapters_[end] == adapters_[t];) ++end;
            if (adapters_[t]) runs_.push_back({t, end, adapters_[t] - 1});
        }
    }
    int64_t keep_adapters(const std::vector<int64_t>& kept) {
        for (size_t i = 0; i < kept.size(); ++i) adapters_[i] = adapters_[kept[i]];
        adapters_.resize(kept.size());
        find_runs();
        return (int64_t)kept.size();
    }

    // Call f(W) with what adapters add to x W^T, for x [slice, ldx].
    template <class F>
    void adapted(const Weight<T>& weight, const X* x, int64_t ldx, const F& f) {
        std::visit([&](auto w) {
            if (w.added.weights && !runs_.empty()) shrink(w.added, w.cols, x, ldx);
            f(w);
        }, weight);
    }

    // Compute a x + shift for the tokens with an adapter. Each sum along K is one of sums of kShrunk columns.
    void shrink(Added& added, int64_t cols, const X* x, int64_t ldx) {
        const LowRank& w = *added.weights;
        const int64_t m = (int64_t)adapters_.size(), chunks = (cols + kShrunk - 1) / kShrunk;
        const int64_t width = w.modules * w.rank, panels = width / kLanes;
        reserve(sums_, m * chunks, width), reserve(shrunk_, m, width);
        for_each_item((int64_t)runs_.size() * panels * chunks, [&](int64_t i, int) {
            const RowRange& run = runs_[i / chunks / panels];
            const int64_t chunk = i % chunks, row = i / chunks % panels * kLanes, col = chunk * kShrunk;
            if (row % w.rank >= rank_of<T>(w, run.matrix)) return;
            alignas(64) float tile[kTileRows * kUnit * kLanes];
            const T* panel = (const T*)w.a + run.matrix * w.stride + row * cols + col * kLanes;
            const X* from = x + run.first * ldx + col;
            const Prefetch ahead = {kPageBytes, kLanes * Dot<T>::kStep * sizeof(T)};
            for (int64_t at = 0; at < kPageBytes; at += 64) prefetch((const char*)panel + at);
            gemm_block<T>((int)(run.stop - run.first), from, ldx, &panel, 1, std::min(kShrunk, cols - col), ahead, tile);
            for (int64_t t = run.first; t < run.stop; ++t)
                Vec::load(tile + (t - run.first) * kUnit * kLanes).store(&sums_[(t * chunks + chunk) * width + row]);
        });
        for_each_token(m, [&](int64_t t) {
            if (!adapters_[t]) return;
            float* sums = &sums_[t * chunks * width];
            const T* shift = (const T*)w.shift + (adapters_[t] - 1) * w.stride;
            for (int64_t i = width; i < chunks * width; ++i) sums[i % width] += sums[i];
            for (int64_t i = 0; i < width; ++i) put(&shrunk_[t * width + i], sums[i] + to_float(shift[i]));
        });
        added.slots = adapters_.data(), added.inner = shrunk_.data();
    }

    // The input of token `t`: its embedding; for a head, the next token's embedding and hidden states.
    void begin(int64_t t) {
        float* x = &x_[t * s_.hidden];
        if (!ahead_) return embed(ids_[t], x);
        float* embedded = &embedded_[t * s_.hidden];
        if (states_.empty()) std::copy_n(backlogs_[rows_[t]].hidden.data(), s_.hidden, x);
        for (int64_t k = 0; joins_first_ && !states_.empty() && k < s_.hidden; ++k) {
            const QuantGroup& group = states_[t * state_size_ + k / kGroup];
            x[k] = (float)group.x[k % kGroup] * group.scale;
        }
        target_->embed(ids_[t], embedded);
        X* joined = &normed_[t * ld_hidden_];
        norm(embedded, joins_first_ ? s_.embedding_norm : layers_[0].w.input_norm, s_.hidden, s_.eps, false, joined);
        norm(x, s_.hidden_norm, s_.hidden, s_.eps, false, joined + s_.hidden);
    }

    bool taps_last() const { return drafter_ && drafter_->joins_first_; }

    // inputs [m, layers, input_size] = norm(x W^T) + embedding; see models/gemma4.py: LayerInputs.
    void begin_inputs(int64_t m) {
        const int64_t size = s_.input_size, width = s_.layers * size;
        reserve(inputs_, m, width);
        norm_before(nullptr, m);
        multiply(input_projection_, normed_, ld_hidden_, m, inputs_.data(), width, false);
        for_each_token(m, [&](int64_t t) {
            const T* embedded = (const T*)s_.input_embedding + ids_[t] * width;
            float* x = &inputs_[t * width];
            for (int64_t i = 0; i < width; i += size) norm(x + i, s_.input_norm, size, s_.input_eps, false, x + i);
            for (int64_t i = 0; i < width; ++i) x[i] += to_float(embedded[i]) * (float)s_.input_scale;
        });
    }

    // x += the projection of f(x W^T) times the layer's inputs; see models/gemma4.py: LayerTail.
    void add_inputs(const Layer& layer, int64_t m) {
        const int64_t size = s_.input_size, width = s_.layers * size, ld = size + kPadding;
        norm_before(nullptr, m);
        project(layer.input_gate, m, (Activation)s_.activation, inner_, ld);
        for_each_token(m, [&](int64_t t) {
            X* x = &inner_[t * ld];
            const float* own = &inputs_[t * width + (&layer - layers_.data()) * size];
            for (int64_t i = 0; i < size; ++i) put(x + i, to_float(x[i]) * own[i]);
        });
        add_block(layer.w.projection_norm, m, [&](float* y, bool adds) {
            multiply(layer.input_projection, inner_, ld, m, y, s_.hidden, adds);
        });
    }

    // Multiply attention's output by f(normed W^T): each row of W is of one head or of one element.
    void gate(const Layer& layer, int64_t m) {
        const int64_t rows = layer.w.gate.rows, each = layer.q_size / rows, ld = rows + kPadding;
        project(layer.gate, m, (Activation)s_.gate_activation, gates_, ld);
        for_each_token(m, [&](int64_t t) {
            X* x = &attended_[t * ld_q_];
            for (int64_t row = 0; row < rows; ++row, x += each) {
                const float factor = to_float(gates_[t * ld + row]);
                for (int64_t i = 0; i < each; ++i) put(x + i, to_float(x[i]) * factor);
            }
        });
    }

    void scale(int64_t m, float factor) {
        for_each_token(m, [&](int64_t t) {
            for (int64_t i = t * s_.hidden; i < (t + 1) * s_.hidden; ++i) x_[i] *= factor;
        });
    }

    // Keep the output of a layer for the drafter if it reads it, that of the last layer normalised.
    void tap(int64_t layer, int64_t m) {
        taps_.resize(std::max<size_t>(taps_.size(), m * drafter_->state_size_));
        const int64_t groups = s_.hidden / kGroup;
        const float* weight = layer + 1 == s_.layers ? s_.final_norm : nullptr;
        for (int64_t i = 0; i < drafter_->s_.num_taps; ++i) {
            if (drafter_->s_.taps[i] != layer) continue;
            for_each_token(m, [&](int64_t t) {
                float* x = &out_[t * s_.hidden];
                norm(&x_[t * s_.hidden], weight, s_.hidden, s_.eps, s_.is_layer_norm, x);
                for (int64_t g = 0; g < groups; ++g)
                    quantize_group<Int8::kOffset>(x + g * kGroup,
                                                  taps_[t * drafter_->state_size_ + i * groups + g]);
            });
        }
    }

    // Logits of the first `m` rows of normed_; tokens without a draft id stay -Inf.
    void compute_logits(int64_t first_sample, int64_t m) {
        logits.resize(std::max<size_t>(logits.size(), sampled_.size() * s_.vocab), -INFINITY);
        float* out = logits.data() + first_sample * s_.vocab;
        if (!s_.draft_ids) {
            multiply(head_, normed_, ld_hidden_, m, out, s_.vocab, false);
            if (s_.logit_cap == 0) return;
            return pool_.run((int)m, [&](int i, int) { soft_cap(s_.vocab, 1.0f, (float)s_.logit_cap, out + i * s_.vocab); });
        }
        drafted_.resize(m * s_.head.rows);
        multiply(head_, normed_, ld_hidden_, m, drafted_.data(), s_.head.rows, false);
        for (int64_t i = 0; i < m * s_.head.rows; ++i)
            out[i / s_.head.rows * s_.vocab + s_.draft_ids[i % s_.head.rows]] = drafted_[i];
    }

    int pieces(int64_t elements) const { return (int)std::min<int64_t>(elements / 8192 + 1, 8 * pool_.size()); }

    // Call f(token) for all m tokens in parallel.
    template <class F>
    void for_each_token(int64_t m, const F& f) const {
        const int n = pieces(m * s_.hidden);
        pool_.run(n, [&](int i, int) {
            for (int64_t t = part(m, n, i); t < part(m, n, i + 1); ++t) f(t);
        });
    }

    // Let `memory` have this many rows, and those that GEMMs may read after them.
    template <class Y>
    static void reserve(Aligned<Y>& memory, int64_t rows, int64_t ld) {
        memory.resize(std::max<size_t>(memory.size(), (rows + kLanes) * ld));
    }

    void grow(int64_t m) {
        m = (m / kLanes + 2) * kLanes;  // GEMMs may read up to there
        if (m * s_.hidden <= (int64_t)x_.size()) return;
        x_.resize(m * s_.hidden), out_.resize(m * s_.hidden), normed_.resize(m * ld_hidden_), qkv_.resize(m * qkv_size_);
        embedded_.resize(ahead_ * m * s_.hidden);
        q_.resize(m * ld_q_), attended_.resize(m * ld_q_);
    }

    void embed(int64_t id, float* x) const {
        const T* row = (const T*)s_.embedding + id * s_.hidden;
        const float scale = (float)s_.embedding_scale;
        if (!s_.is_tied)
            for (int64_t k = 0; k < s_.hidden; ++k) x[k] = to_float(row[k]) * scale;
        else
            std::visit([&](const auto w) {  // a copy, which no write to x can change
                for (int64_t k = 0, n = s_.hidden; k < n; ++k) x[k] = to_float(w.at(id, k)) * scale;
            }, head_);
    }

    void multiply(const Weight<T>& weight, const Aligned<X>& x, int64_t ldx, int64_t m, float* y, int64_t ldy,
                  bool adds) {
        adapted(weight, x.data(), ldx, [&](const auto& w) {
            linear<T>(pool_, w, x.data(), ldx, {{0, m}}, y, ldy, adds);
        });
    }

    // y [m, ld] = f(normed W^T).
    void project(const Weight<T>& weight, int64_t m, Activation f, Aligned<X>& y, int64_t ld) {
        reserve(y, m, ld);
        adapted(weight, normed_.data(), ld_hidden_, [&](const auto& w) {
            activated<T>(pool_, w, normed_.data(), ld_hidden_, {{0, m}}, y.data(), ld, f, false);
        });
    }

    // y [rows, hidden] = down(f(up(x))), or plus y; each range of rows has its own of the stacked MLPs.
    void feed_forward(const Mlp& mlp, const X* x, const RowRanges& ranges, float* y, bool adds) {
        const int64_t ld = mlp.size + kPadding;
        reserve(inner_, ranges.back().stop, ld);
        adapted(mlp.up, x, ld_hidden_, [&](const auto& w) {
            activated<T>(pool_, w, x, ld_hidden_, ranges, inner_.data(), ld, mlp.f, mlp.is_gated);
        });
        adapted(mlp.down, inner_.data(), ld, [&](const auto& w) {
            linear<T>(pool_, w, inner_.data(), ld, ranges, y, s_.hidden, adds);
        });
    }

    // y [m, hidden] = the normalised outputs of the MLP and of the experts; see models/gemma4.py: BesideMLP.
    void join_experts(const Layer& layer, int64_t m, float* y) {
        feed_forward(layer.shared, normed_.data(), {{0, m}}, y, false);
        norm_before(layer.w.experts_norm, m);
        reserve(mixed_, m, s_.hidden);
        mix_experts(layer, m, mixed_.data(), false);
        for_each_token(m, [&](int64_t t) {
            float* out = y + t * s_.hidden;
            norm(out, layer.w.dense_norm, s_.hidden, s_.block_eps, false, out);
            norm(&mixed_[t * s_.hidden], layer.w.mixed_norm, s_.hidden, s_.block_eps, false, out, true);
        });
    }

    // The mixture of experts: y [m, hidden] = the weighted sum of each token's MLPs, or plus y. See models/mlp.py.
    void mix_experts(const Layer& layer, int64_t m, float* y, bool adds) {
        const int64_t h = s_.hidden, k = s_.top_k, rows = layer.router.rows;
        const int64_t has_shared = layer.shared.size > 0 && !layer.w.router_norm;
        reserve(expert_in_, m * k, ld_hidden_), reserve(expert_out_, m * (k + has_shared), h);
        router_in_.resize(m * h), scores_.resize(m * rows), choices_.resize(m * (k + has_shared));
        for_each_token(m, [&](int64_t t) {
            if (layer.w.router_norm)
                return norm(&x_[t * h], layer.w.router_norm, h, s_.block_eps, false, &router_in_[t * h]);
            for (int64_t i = 0; i < h; ++i) router_in_[t * h + i] = to_float(normed_[t * ld_hidden_ + i]);
        });
        linear<float>(pool_, layer.router, router_in_.data(), h, {{0, m}}, scores_.data(), rows, false);
        if (Added gate{layer.w.router.adapter}; gate.weights && !runs_.empty()) {
            shrink(gate, h, normed_.data(), ld_hidden_);
            for (int64_t t = 0; t < m; ++t) {
                float sums[kUnit * kLanes] = {};
                add_adapters<T>(gate, t, 1, 0, sums);
                scores_[(t + 1) * rows - 1] += sums[0];
            }
        }
        for_each_token(m, [&](int64_t t) {
            Choice* chosen = &choices_[t * (k + has_shared)];
            const float gate = scores_[(t + 1) * rows - 1];
            if (s_.router_cap != 0) soft_cap(s_.experts, 1.0f, (float)s_.router_cap, &scores_[t * rows]);
            choose(&scores_[t * rows], layer.w, chosen);
            if (has_shared) chosen[k] = {s_.experts, m * k + t, rows > s_.experts ? sigmoid(gate) : 1.0f};
        });
        // Rows of one expert lie side by side, in the order of tokens.
        std::vector<int64_t> next(s_.experts + 2);
        RowRanges ranges;
        for (const Choice& c : choices_) ++next[c.expert + 1];
        for (int64_t e = 0; e < s_.experts; ++e) {
            next[e + 1] += next[e];
            if (next[e] < next[e + 1]) ranges.push_back({next[e], next[e + 1], e});
        }
        for (Choice& c : choices_)
            if (c.expert < s_.experts) c.row = next[c.expert]++;
        for_each_token(m, [&](int64_t t) {
            for (int64_t i = t * (k + has_shared), end = i + k; i < end; ++i)
                memcpy(&expert_in_[choices_[i].row * ld_hidden_], &normed_[t * ld_hidden_], h * sizeof(X));
        });
        feed_forward(layer.mlp, expert_in_.data(), ranges, expert_out_.data(), false);
        if (has_shared) feed_forward(layer.shared, normed_.data(), {{0, m}}, &expert_out_[m * k * h], false);
        for_each_token(m, [&](int64_t t) {
            const Choice *first = &choices_[t * (k + has_shared)], *end = first + k + has_shared;
            for (int64_t i = 0; i < h; i += kLanes) {
                Vec total = Vec::all(0.0f);
                for (const Choice* c = first; c != end; ++c)
                    total = fma(Vec::load(&expert_out_[c->row * h + i]), Vec::all(c->weight), total);
                (adds ? Vec::load(y + t * h + i) + total : total).store(y + t * h + i);
            }
        });
    }

    static float sigmoid(float x) { return 1.0f / (1.0f + exp(0.0f - x)); }

    // Choose a token's experts by the router's outputs, which become scores, as `ops/reference.py: chosen_scores` does.
    // Among equal ones the lowest is chosen, and NaN before all others, so that it shows.
    void choose(float* scores, const LayerWeights& w, Choice* chosen) const {
        const int64_t n = s_.experts, each = n / s_.groups;
        const float top = *std::max_element(scores, scores + n);
        float total = 0;
        for (int64_t e = 0; e < n; ++e) total += scores[e] = s_.is_sigmoid ? sigmoid(scores[e]) : exp(scores[e] - top);
        std::vector<float> ranks(n), best(s_.groups);
        for (int64_t e = 0; e < n; ++e) {
            if (!s_.is_sigmoid) scores[e] /= total;
            ranks[e] = scores[e] + (w.rank_bias ? w.rank_bias[e] : 0.0f);
        }
        for (int64_t g = 0; g < s_.groups && s_.groups > s_.top_groups; ++g) {
            std::vector<float> sorted(&ranks[g * each], &ranks[g * each] + each);
            std::sort(sorted.begin(), sorted.end(), std::greater<float>());
            best[g] = sorted[0] + (each > 1 ? sorted[1] : 0.0f);
        }
        for (int64_t dropped = s_.top_groups; dropped < s_.groups; ++dropped) {
            const int64_t g = std::min_element(best.begin(), best.end()) - best.begin();
            best[g] = INFINITY;
            std::fill_n(&ranks[g * each], each, -INFINITY);
        }
        float sum = 0;
        for (int64_t i = 0; i < s_.top_k; ++i) {
            int64_t e = 0;
            for (int64_t other = 1; other < n; ++other)
                if (!(ranks[e] >= ranks[other])) e = other;
            ranks[e] = -INFINITY;
            chosen[i] = {e, 0, scores[e]};
            sum += scores[e];
        }
        for (int64_t i = 0; i < s_.top_k; ++i) {
            chosen[i].weight *= (float)s_.expert_scale / (s_.normalises ? sum : 1.0f);
            if (w.expert_scales) chosen[i].weight *= w.expert_scales[chosen[i].expert];
        }
    }

    // y = (x - mean) / sqrt(variance + eps) * weight + bias, where the bias follows the weight; without `centers`, mean
    // and bias are 0. Without a weight, y = x. With `adds`, y += that.
    template <class Y>
    static void norm(const float* x, const float* weight, int64_t n, double eps, bool centers, Y* y, bool adds = false) {
        Vec mean = Vec::all(0.0f), squares = mean;
        for (int64_t i = 0; centers && i < n; i += kLanes) mean = mean + Vec::load(x + i);
        if (centers) mean = Vec::all(sum(mean) / (float)n);
        for (int64_t i = 0; weight && i < n; i += kLanes) {
            const Vec v = Vec::load(x + i) - mean;
            squares = fma(v, v, squares);
        }
        const Vec factor = Vec::all(1.0f / std::sqrt(sum(squares) / (float)n + (float)eps));
        for (int64_t i = 0; i < n; i += kLanes) {
            Vec v = Vec::load(x + i);
            if (weight) v = (v - mean) * factor * Vec::load(weight + i);
            if (centers && weight) v = v + Vec::load(weight + n + i);
            if constexpr (std::is_same_v<Y, float>)
                if (adds) v = Vec::load(y + i) + v;
            put(y + i, v);
        }
    }

    void norm_before(const float* weight, int64_t m) {
        for_each_token(m, [&](int64_t t) {
            norm(&x_[t * s_.hidden], weight, s_.hidden, s_.eps, s_.is_layer_norm, &normed_[t * ld_hidden_]);
        });
    }

    // Add to x what block(y, adds) writes or adds to y, normalised first if there is a weight.
    template <class B>
    void add_block(const float* weight, int64_t m, const B& block) {
        if (!weight) return block(x_.data(), true);
        block(out_.data(), false);
        for_each_token(m, [&](int64_t t) {
            const int64_t first = t * s_.hidden;
            norm(&out_[first], weight, s_.hidden, s_.block_eps, s_.is_layer_norm, &x_[first], true);
        });
    }

    // Normalise each head, or all heads together, if there is a weight.
    void norm_heads(float* heads, int64_t size, int64_t dim, const float* weight) const {
        const int64_t each = s_.norms_all_heads ? size : dim;
        for (int64_t i = 0; weight && i < size; i += each)
            norm(heads + i, weight, each, s_.block_eps, false, heads + i);
    }

    // Apply RoPE to a head (halves rotated against each other), and scale the result.
    template <class Y>
    static void rotate(float* head, int64_t dim, const float* cos, float scale, Y* out) {
        const int64_t half = dim / 2;
        for (int64_t i = 0; i < half; i += kLanes) {
            const int n = (int)std::min<int64_t>(kLanes, half - i);
            const Vec a = load_part(head + i, n), b = load_part(head + half + i, n);
            const Vec c = load_part(cos + i, n), s = load_part(cos + half + i, n);
            store_part(head + i, a * c - b * s, n);
            store_part(head + half + i, b * c + a * s, n);
        }
        convert(head, dim, scale, out);
    }
    template <class Y>
    static void convert(const float* head, int64_t dim, float scale, Y* out) {
        for (int64_t d = 0; d < dim; d += kLanes) put(out + d, Vec::load(head + d) * Vec::all(scale));
    }

    void rotate_and_store(const Layer& layer, int64_t m, int64_t q_size) {
        const Cache<T> cache = cache_of(layer);
        const int64_t dim = layer.w.dim, kv_size = layer.kv_size;
        const int n = (int)std::min<int64_t>(m, pieces(8 * m * qkv_size_));
        pool_.run(n, [&](int piece, int thread) {
            T *key = scratch_[thread].keys.data(), *value = scratch_[thread].values.data();
            for (int64_t t = part(m, n, piece); t < part(m, n, piece + 1); ++t) {
                const int64_t page = layer.w.page_table[rows_[t] * s_.table_width + positions_[t] / s_.page];
                const int64_t slot = page * s_.page + positions_[t] % s_.page;
                float* heads = &qkv_[t * qkv_size_];
                const float* cos = layer.w.cos_sin + positions_[t] * dim;
                const float q_scale = layer.w.q_scale ? layer.w.q_scale[positions_[t]] : 1.0f;
                float *keys = heads + layer.q_size, *values = keys + kv_size;
                norm_heads(heads, q_size, dim, layer.w.q_norm);
                norm_heads(keys, kv_size, dim, layer.w.k_norm);
                norm_heads(values, kv_size, dim, layer.w.v_norm);
                for (int64_t i = 0; i < q_size; i += dim) rotate(heads + i, dim, cos, q_scale, &q_[t * ld_q_ + i]);
                const bool is_first = t == 0 || rows_[t - 1] != rows_[t];
                const bool is_last = t + 1 == m || rows_[t + 1] != rows_[t];
                for (int64_t i = 0; i < kv_size; i += dim) {
                    rotate(keys + i, dim, cos, 1.0f, key);
                    convert(values + i, dim, 1.0f, value);
                    cache.store(slot, i / dim, key, value, is_first, is_last);
                }
            }
        });
    }

    void attention(const Layer& layer) {
        const Cache<T> cache = cache_of(layer);
        const int64_t group = layer.w.heads / layer.w.kv_heads, each = query_rows_ / group;
        items_.clear(), spans_.clear();
        int64_t token = 0;
        double work = 0;
        spans_.reserve(slice_.size());
        for (const Piece& piece : slice_) {
            spans_.push_back({piece.row, piece.start, piece.stop, token, layer.w.window});
            token += piece.stop - piece.start;
            work += (double)(piece.stop - piece.start) * (double)piece.stop;
            for (int64_t to = piece.stop; to > piece.start; to -= each)  // items with the most keys first
                for (int64_t h = 0; h < layer.w.kv_heads; ++h)
                    items_.push_back({&spans_.back(), std::max(piece.start, to - each), to, h});
        }
        const double limit = std::min<double>((double)items_.size(), 64 * pool_.size());
        const int n = (int)std::min(limit, work * (double)layer.q_size / 5e4 + 1);
        pool_.run(n, [&](int piece, int thread) {
            const Item *item = &items_[part(items_.size(), n, piece)], *end = items_.data() + items_.size();
            BlockIterator ahead(item, end, kBlocksAhead);
            for (; item != &items_[0] + part(items_.size(), n, piece + 1); ++item)
                attend<T>(cache, *item, ahead, group, layer.w.page_table, s_.table_width, (float)layer.w.scale,
                          (float)layer.w.softcap, layer.w.sinks, q_.data(), attended_.data(), ld_q_, scratch_[thread]);
        });
    }

    // Gated DeltaNet of the slice: attended_ = norm(output) silu(z) for each head.
    void recur(const Layer& layer, int64_t m) {
        const Recurrence& r = layer.w.recurrence;
        reserve(betas_, m, 2 * r.value_heads), reserve(mixed_, m, layer.w.qkv.rows - layer.q_size);
        multiply(layer.beta_decay, normed_, ld_hidden_, m, betas_.data(), 2 * r.value_heads, false);
        const GatedDelta<T> delta = delta_of(layer);
        const int64_t channels = delta.channels(), first = channels - layer.q_size;
        std::vector<DeltaRun> runs;
        std::vector<int64_t> run_of_token(m);
        int64_t token = 0;
        for (const Piece& piece : slice_) {
            const bool decodes = piece.flags & (kFromDevice | kDrafts);
            const bool goes_on = !runs.empty() && runs.back().row == piece.row && !runs.back().decodes && !decodes;
            if (goes_on) runs.back().stop = piece.stop;
            else runs.push_back({piece.row, piece.start, piece.stop, token, decodes});
            std::fill_n(&run_of_token[token], piece.stop - piece.start, (int64_t)runs.size() - 1);
            token += piece.stop - piece.start;
        }
        for_each_token(m, [&](int64_t t) {
            const DeltaRun& run = runs[run_of_token[t]];
            delta.convolve(run, t - run.token);
        });
        const int64_t each = r.value_heads + 1;
        for_each_item((int64_t)runs.size() * each, [&](int64_t i, int thread) {
            if (i % each == r.value_heads) return delta.store_inputs(runs[i / each]);
            delta.mix(runs[i / each], i % each, delta_scratch_[thread]);
        });
        for_each_token(m, [&](int64_t t) {
            float* heads = &mixed_[t * channels + first];
            const float* z = &qkv_[t * qkv_size_ + channels];
            for (int64_t i = 0; i < layer.q_size; i += r.value_dim)
                norm(heads + i, r.norm, r.value_dim, s_.block_eps, false, heads + i);
            for (int64_t i = 0; i < layer.q_size; i += kLanes)
                put(&attended_[t * ld_q_ + i], Vec::load(heads + i) * activate(kSilu, Vec::load(z + i)));
        });
    }

    // Call f(item, thread) for items of some microseconds each, in parallel.
    template <class F>
    void for_each_item(int64_t count, const F& f) const {
        const int n = (int)std::min<int64_t>(count, 64 * pool_.size());
        pool_.run(n, [&](int piece, int thread) {
            for (int64_t i = part(count, n, piece); i < part(count, n, piece + 1); ++i) f(i, thread);
        });
    }

    GatedDelta<T> delta_of(const Layer& layer) {
        return {layer.w.recurrence, layer.w.page_table, s_.table_width, captures_,       num_captures_,
                qkv_.data(),        qkv_size_,          betas_.data(),  mixed_.data()};
    }

    Cache<T> cache_of(const Layer& layer) const {
        const LayerWeights& w = layer.w;
        return {(char*)w.cache, w.cache_stride, w.kv_heads, s_.page, w.dim, (char*)w.cache_scale};
    }

    ModelSpec s_;
    Decoder *target_, *drafter_ = nullptr;  // of a drafter, and of its target
    std::shared_ptr<Pool> threads_;         // a drafter's are its target's
    Pool& pool_;
    int64_t ahead_;  // the token at which a position's output is computed, counted from the position's own
    int64_t query_rows_;  // of an item of attention, at most
    std::vector<AttentionScratch<T>> scratch_;
    std::vector<DeltaScratch> delta_scratch_;
    std::vector<Layer> layers_;
    Weight<T> head_, input_projection_;
    Weight<T> fc_;
    bool joins_first_;  // embedding and hidden state of a head, before its layer
    int64_t q_size_ = 0, qkv_size_ = 0;  // of the largest layer
    int64_t ld_hidden_, ld_q_, state_size_;
    std::vector<Backlog> backlogs_;  // of a drafter, by row
    std::vector<Sample> sampled_;    // by the current step
    const Copy* captures_ = nullptr;  // of the current step
    int64_t num_captures_ = 0;
    // The current slice.
    std::vector<int32_t> ids_;
    std::vector<int64_t> positions_, rows_;
    std::vector<Piece> slice_;
    std::vector<Item> items_;
    std::vector<Span> spans_;
    std::vector<int32_t> adapters_;  // the tokens' slots
    RowRanges runs_;                 // of tokens with adapter `matrix`
    std::vector<Choice> choices_;
    Aligned<float> x_, out_, embedded_, qkv_, drafted_, sums_, router_in_, scores_, expert_out_, mixed_, inputs_, betas_;
    Aligned<X> normed_, q_, attended_, gates_, inner_, expert_in_, shrunk_;
    std::vector<QuantGroup> states_, taps_;
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

// tokens, finite [S]; entries of sequences that `is_plain` does not hold for are left as they are.
void minisgl_step(void* model, const StepPlan* plan, int32_t* tokens, int32_t* finite) {
    static_cast<Model*>(model)->step(*plan, tokens, finite);
}
// Move the states of recurrent layers on.
void minisgl_fold(void* model, const Fold* folds, int64_t count) { static_cast<Model*>(model)->fold(folds, count); }
// Confirm the drafts of a step: `confirmed` [S] has ones, which become 0 after a rejected draft.
void minisgl_verify(void* model, const StepPlan* plan, const int32_t* tokens, const int32_t* finite, int32_t* confirmed,
                    int32_t* ready) {
    static_cast<Model*>(model)->verify(*plan, tokens, finite, confirmed, ready);
}
// Make draft `number` of the step's sequences that have so many, and return the number of these sequences. The caller
// samples those with flags that `minisgl_step` does not sample, from the logits.
int64_t minisgl_draft(void* drafter, const StepPlan* plan, int64_t number) {
    return static_cast<Model*>(drafter)->draft(*plan, number);
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
