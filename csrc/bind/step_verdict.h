// What Python has of a step's verdict: the rule of the loss scale, and scalars that a kernel made.
#pragma once

#include <vector>

#include "adam/step_verdict.h"
#include "bind/checks.h"

namespace shardcore::bind {

struct __attribute__((visibility("hidden"))) PyLossScaleRule {
  LossScaleRule rule;
};

// The scalars of a step where its tensors are, one AdamScalars for each of `hypers`, whose step and grad_scale they do not
// have.
struct __attribute__((visibility("hidden"))) PyDeviceScalars {
  std::vector<AdamHyper> hypers;
  at::Tensor bytes;
};

}  // namespace shardcore::bind
