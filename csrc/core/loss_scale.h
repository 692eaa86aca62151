// How a loss scale changes: one rule for the host and the device, to the same bits.
//
// Source: Micikevicius et al. 2018, section 3.2 (arXiv:1710.03740); the options are those that DeepSpeed documents
// (https://www.deepspeed.ai/docs/config-json/#fp16-training-options). shardcore/engine/loss_scale.py describes each.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace shardcore {

// window, hysteresis: 1 or more. minimum: more than 0.
struct LossScaleRule {
  int64_t window = 1000;
  int64_t hysteresis = 2;
  double minimum = 1.0;
  bool consecutive_hysteresis = false;
};

// stable_steps: updates since the last overflow. hysteresis_left: overflows until the scale halves, 1 or more.
struct LossScaleState {
  double scale;
  int64_t stable_steps;
  int64_t hysteresis_left;
};

// After a step that updated the weights, or was skipped (overflow). At the minimum an overflow leaves the scale there: that is
// an error, which the caller finds from the scale before.
SHARDCORE_HD LossScaleState loss_scale_after(const LossScaleRule& rule, LossScaleState s, bool overflow) {
  constexpr double largest = 0x1p127;  // of the powers of two in float32
  if (!overflow) {
    const bool grows = s.stable_steps > 0 && s.stable_steps % rule.window == 0;
    if (grows) s.scale = s.scale * 2.0 < largest ? s.scale * 2.0 : largest;
    if (grows || rule.consecutive_hysteresis) s.hysteresis_left = rule.hysteresis;
    ++s.stable_steps;
    return s;
  }
  s.stable_steps = 0;
  if (s.hysteresis_left > 1) {
    --s.hysteresis_left;
  } else {
    s.scale = s.scale / 2.0 > rule.minimum ? s.scale / 2.0 : rule.minimum;
  }
  return s;
}

}  // namespace shardcore
