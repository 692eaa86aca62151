// From the sum of squares to what multiplies the gradients, and whether there is a step at all: in double, on the host or on
// the device, to the same bits.
#pragma once

#include <cmath>

#include "core/double_double.h"
#include "core/macros.h"

namespace shardcore {

SHARDCORE_HD float norm_from_sq(DoubleDouble total) { return static_cast<float>(sqrt(total.high + total.low)); }

// NaN for a NaN norm: a minimum would hide it.
SHARDCORE_HD double clip_coefficient(double norm, double max_norm) {
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient > 1.0 ? 1.0 : coefficient;
}

struct StepScale {
  double grad_scale;  // multiplies the gradients
  bool skip;          // nothing may be written
};

// scale: multiplies the gradients before they are clipped. norm: of the gradients as they are.
SHARDCORE_HD StepScale clipped_scale(double scale, double norm, double max_norm) {
  const double scaled_norm = norm * fabs(scale);
  return {scale * clip_coefficient(scaled_norm, max_norm), !is_finite(scaled_norm)};
}

}  // namespace shardcore
