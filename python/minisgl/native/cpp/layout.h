// Written by `python -m minisgl.native.abi`; what the fields mean stands in layout.py and native/abi.py.
#pragma once
#include <cstdint>

constexpr int64_t kLayoutVersion = 1113201357;

namespace minisgl {

enum Flag : int32_t { kSamples = 1, kFromDevice = 2, kPenalized = 4, kFiltered = 8, kLogprobs = 16, kPromptLogprobs = 32, kMasked = 64, kAdapted = 256, kDrafts = 128 };

enum Activation : int64_t { kSilu, kGeluTanh, kGelu, kRelu2, kClamped, kSigmoid, kSoftplus };
constexpr int kMaxDrafts = 8, kProposed = 17;
constexpr int kSlotId = 0, kStateLen = 1;

// Records of a plan: 32-bit words, without padding.
#pragma pack(push, 4)
struct Sequence {
    int32_t row, start, stop, flags;
};
static_assert(sizeof(Sequence) == 16);
struct PageWrite {
    int32_t group, row, index, page;
};
static_assert(sizeof(PageWrite) == 16);
struct Row {
    int64_t noise_key;
    float temperature;
    int32_t top_k;
    float top_p, min_p;
    int32_t adapter;
    char padding[4];
};
static_assert(sizeof(Row) == 32);
struct RowState {
    int32_t row;
    Row fields;
};
static_assert(sizeof(RowState) == 36);
struct HistoryHead {
    int32_t words, row, first, length;
};
static_assert(sizeof(HistoryHead) == 16);
struct Proposal {
    int32_t row, first, tokens[17];
};
static_assert(sizeof(Proposal) == 76);
struct Copy {
    int32_t source, target, row, position;
};
static_assert(sizeof(Copy) == 16);
struct Fold {
    int32_t slot, start, stop;
};
static_assert(sizeof(Fold) == 12);
#pragma pack(pop)

struct LowRank {
    const void *a, *shift, *b, *ranks;
    int64_t stride, rank, modules;
    const int64_t *rows;
    int64_t num_rows;
};
struct Packed {
    const void *data;
    int64_t bits, rows, cols;
    const float *bias;
    const LowRank *adapter;
};
struct Recurrence {
    const float *conv;
    const float *rate, *dt_bias, *norm;
    int64_t key_heads, value_heads, key_dim, value_dim, width, tokens;
    int64_t stride;
    void *delta, *recent, *decay, *inputs;
};
struct LayerWeights {
    Packed qkv, o;
    Packed up, down, shared_up, shared_down;
    Packed router;
    Packed gate;
    Packed input_gate, input_projection;
    Packed beta_decay;
    Recurrence recurrence;
    const float *rank_bias, *expert_scales;
    const float *input_norm, *attention_norm, *mlp_norm, *output_norm;
    const float *router_norm, *dense_norm, *experts_norm, *mixed_norm;
    const float *projection_norm;
    const float *q_norm, *k_norm, *v_norm;
    const float *cos_sin;
    int64_t heads, kv_heads, dim, window;
    const int32_t *page_table;
    int64_t cache_stride;
    void *cache;
    float *cache_scale;
    const float *sinks, *q_scale;
    double scale, softcap, output_scale;
};
struct ModelSpec {
    int64_t is_bf16, layers, hidden, vocab, page, threads, is_tied;
    int64_t is_parallel, is_layer_norm, norms_all_heads, activation, expert_activation, gate_activation;
    int64_t experts, top_k, groups, top_groups, is_sigmoid, normalises;
    double eps, block_eps, embedding_scale, expert_scale, router_cap, logit_cap;
    const LayerWeights *weights;
    const void *embedding;
    Packed head;
    const float *final_norm;
    int64_t input_size;
    const void *input_embedding;
    Packed input_projection;
    const float *input_norm;
    double input_scale, input_eps;
    int32_t *page_tables;
    int64_t table_rows, table_width;
    int32_t *last_token;
    Row *rows;
    int32_t *lengths, *drafts;
    void *target;
    Packed fc;
    const float *embedding_norm, *hidden_norm;
    const int64_t *draft_ids, *taps;
    int64_t num_taps;
};
struct StepPlan {
    const Sequence *sequences;
    const int32_t *tokens;
    const PageWrite *page_writes;
    const RowState *row_states;
    const int32_t *histories;
    const Proposal *proposals;
    const Copy *captures;
    const int32_t *masks;
    int64_t num_sequences, num_page_writes, num_row_states, num_history_words, num_proposals, num_captures;
};

}  // namespace minisgl
