// Written by `python -m minisgl.native.abi`; what the fields mean stands in layout.py and native/abi.py.
#pragma once
#include <cstdint>

constexpr int64_t kLayoutVersion = 218370359;

namespace minisgl {

enum Flag : int32_t {
    kSamples = 1,
    kFromDevice = 2,
    kPenalized = 4,
    kFiltered = 8,
    kLogprobs = 16,
    kPromptLogprobs = 32,
    kMasked = 64,
};

// Records of a plan: 32-bit words, without padding.
#pragma pack(push, 4)
struct Slot {
    int32_t row;
    int32_t start;
    int32_t stop;
    int32_t flags;
};
static_assert(sizeof(Slot) == 16);
struct PageWrite {
    int32_t row;
    int32_t index;
    int32_t page;
};
static_assert(sizeof(PageWrite) == 12);
struct RowState {
    int32_t row;
    float temperature;
    int32_t top_k;
    float top_p;
    float min_p;
    int64_t noise_key;
};
static_assert(sizeof(RowState) == 28);
#pragma pack(pop)

struct LayerWeights {
    const void* qkv;
    const void* o;
    const void* gate_up;
    const void* down;
    const float* qkv_bias;
    const float* o_bias;
    const float* gate_up_bias;
    const float* down_bias;
    const float* input_norm;
    const float* post_norm;
    const float* q_norm;
    const float* k_norm;
    const float* cos_sin;
    int64_t window;
};
struct ModelSpec {
    int64_t is_bf16;
    int64_t is_int8;
    int64_t layers;
    int64_t hidden;
    int64_t intermediate;
    int64_t vocab;
    int64_t heads;
    int64_t kv_heads;
    int64_t dim;
    int64_t page;
    int64_t threads;
    int64_t is_tied;
    double eps;
    double scale;
    const LayerWeights* weights;
    const void* embedding;
    const void* head;
    const float* final_norm;
    void* cache;
    int64_t layer_stride;
    int32_t* page_table;
    int64_t table_width;
    int32_t* last_token;
    int32_t* top_k;
    float* temperature;
    float* top_p;
    float* min_p;
    int64_t* noise_key;
};
struct StepPlan {
    const Slot* slots;
    const int32_t* tokens;
    const PageWrite* page_writes;
    const RowState* row_states;
    int64_t num_slots;
    int64_t num_page_writes;
    int64_t num_row_states;
};

}  // namespace minisgl
