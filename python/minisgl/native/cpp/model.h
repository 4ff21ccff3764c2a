// What a model is to its callers: the structures that Python fills, see native/library.py, and a step.
#pragma once
#include <cstdint>

#include "memory.h"

namespace minisgl {

// 8-byte fields throughout.
struct LayerWeights {
    const void *qkv, *o, *gate_up, *down;
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;  // or null
    const float *input_norm, *post_norm, *q_norm, *k_norm;      // the latter two or null
    const float* cos_sin;                                       // [positions, dim]
    int64_t window;                                             // 0 = none
};
struct ModelSpec {
    int64_t is_bf16, is_int8, layers, hidden, intermediate, vocab, heads, kv_heads, dim, page, threads, is_tied;
    double eps, scale;
    const LayerWeights* weights;
    const void *embedding, *head;  // `embedding` [vocab, hidden] as it is, unless tied: then only the packed head
    const float* final_norm;
    void* cache;           // [layers, pages, 2, kv_heads, page, dim]
    int64_t layer_stride;  // elements
    int32_t* page_table;   // [rows, width]
    int64_t table_width;
    int32_t* last_token;  // [rows], as are those below
    float* temperature;
    int32_t* top_k;
    float *top_p, *min_p;
    int64_t* noise_key;
};
struct Plan {
    const int32_t *slots, *tokens, *pages, *rows;  // as in core.py: BatchPlan
    int64_t num_slots, num_pages, num_rows;
};

class Model {
  public:
    virtual ~Model() = default;
    virtual void step(const Plan& plan, int32_t* tokens, int32_t* ok) = 0;
    Aligned<float> logits;  // [S, vocab] of the last step
};

}  // namespace minisgl
