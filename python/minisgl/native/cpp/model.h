// The interface of a model.
#pragma once
#include "layout.h"
#include "memory.h"

namespace minisgl {

class Model {
  public:
    virtual ~Model() = default;
    virtual void step(const StepPlan& plan, int32_t* tokens, int32_t* finite) = 0;
    virtual void fold(const Fold* folds, int64_t count) = 0;
    virtual void verify(const StepPlan& plan, const int32_t* tokens, const int32_t* finite, int32_t* confirmed,
                        int32_t* ready) = 0;
    virtual int64_t draft(const StepPlan& plan, int64_t number) = 0;
    Aligned<float> logits;  // [S, vocab] of the last step
};

}  // namespace minisgl
