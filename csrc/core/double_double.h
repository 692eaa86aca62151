// Double-double addition (D. Knuth's two-sum): sums of squares whose grouping does not show in a float32.
//
// Invariant: an infinite or NaN sum keeps low at 0, so the norm of infinite gradients is infinite, not NaN.
#pragma once

#include "core/macros.h"

namespace shardcore {

struct DoubleDouble {
  double high;
  double low;
};

SHARDCORE_HD bool is_finite(double x) { return x - x == 0.0; }

// high + low == a + b exactly, for finite a and b.
SHARDCORE_HD DoubleDouble two_sum(double a, double b) {
  const double sum = a + b;
  const double b_part = sum - a;
  const double error = (a - (sum - b_part)) + (b - b_part);
  return {sum, is_finite(sum) ? error : 0.0};
}

SHARDCORE_HD DoubleDouble dd_add(DoubleDouble a, DoubleDouble b) {
  const DoubleDouble s = two_sum(a.high, b.high);
  return two_sum(s.high, s.low + (a.low + b.low));
}

SHARDCORE_HD DoubleDouble dd_add(DoubleDouble a, double b) { return dd_add(a, DoubleDouble{b, 0.0}); }

}  // namespace shardcore
