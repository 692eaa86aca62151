// The verdict on a step of the sharded engine, given where the gradients are: norm, clipping, skip, step counts and loss scale,
// without the host, which learns of it later from the norm alone.
//
// Host/device: the CUDA kernels, the CPU path and tests/cpp run the same bodies. They call what the host calls when it decides
// itself (grad_scale.h, loss_scale.h, adam_scalars.h), so to the same bits. All ranks have the same norm, and so the same
// verdict.
#pragma once

#include <cstdint>

#include "adam/adam_scalars.h"
#include "core/grad_scale.h"
#include "core/loss_scale.h"

namespace shardcore {

// What steps leave on the device: 8 words, an int64 tensor (8,) in Python (shardcore/engine/verdicts.py names them).
struct StepVerdict {
  LossScaleState loss;  // words 0 to 2
  double unscale;       // 1 / (ranks * scale): what the reduction multiplies with
  uint64_t updates;     // bit n: whether the last step with n as its number modulo 64 updated the weights
  double norm;          // of the averaged gradients at the last step, times |grad_scale|, before clipping
  double grad_scale;    // what the last step multiplied them with
  int64_t skip;         // whether it was skipped
};
static_assert(sizeof(StepVerdict) == 64, "8 words");

// What the host knows of a step. max_norm: infinity without clipping. number: of the step, modulo 64.
struct VerdictTerms {
  double grad_scale;
  double max_norm;
  int64_t number;
  double ranks;
  bool moves;  // the loss scale does, by `rule`
  LossScaleRule rule;
};

// Options of a group for parameters that had the same updates. options.step counts those that the host knows of, and the one to
// come; since: bits of the steps after these in which the parameters had a gradient. options.grad_scale is filled in.
struct VerdictHyper {
  AdamHyper options;
  uint64_t since;
};

// squares: (high, low) of each rank, or of each part of the only one, added in this order.
SHARDCORE_HD void step_verdict_body(const DoubleDouble* squares, int64_t count, const VerdictTerms& terms,
                                    StepVerdict* verdict) {
  DoubleDouble total{0.0, 0.0};
  for (int64_t i = 0; i < count; ++i) total = dd_add(total, squares[i]);
  const double norm = static_cast<double>(norm_from_sq(total));
  const StepScale scale = clipped_scale(terms.grad_scale, norm, terms.max_norm);
  const uint64_t bit = uint64_t{1} << terms.number;
  verdict->updates = scale.skip ? verdict->updates & ~bit : verdict->updates | bit;
  verdict->norm = norm * fabs(terms.grad_scale);
  verdict->grad_scale = scale.grad_scale;
  verdict->skip = scale.skip ? 1 : 0;
  if (!terms.moves) return;
  verdict->loss = loss_scale_after(terms.rule, verdict->loss, scale.skip);
  verdict->unscale = 1.0 / (terms.ranks * verdict->loss.scale);
}

// The scalars of hypers[i]: after step_verdict_body of the same step.
SHARDCORE_HD void verdict_scalars_body(const VerdictHyper* hypers, const StepVerdict& verdict, int64_t i,
                                       AdamScalars* scalars) {
  AdamHyper h = hypers[i].options;
  for (uint64_t left = hypers[i].since & verdict.updates; left != 0; left &= left - 1) ++h.step;
  h.grad_scale = verdict.grad_scale;
  scalars[i] = adam_scalars(h);
  scalars[i].skip = verdict.skip != 0 ? 1u : 0u;
}

}  // namespace shardcore
