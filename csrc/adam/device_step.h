// A step that is decided where its tensors are, without the host: skip or clip, step counts, Adam's scalars, the loss scale. So
// no step waits for the device, and each replay of a CUDA graph is the next step.
//
// Host/device: the CUDA kernel, the CPU path and tests/cpp run the same functions. They call what the host calls when it
// decides itself (grad_scale.h, loss_scale.h, adam_scalars.h), so to the same bits. All ranks have the same squares, and so
// decide the same.
#pragma once

#include <cstdint>

#include "adam/adam_scalars.h"
#include "core/grad_scale.h"
#include "core/loss_scale.h"

namespace shardcore {

// A number known when the kernel is launched (fixed in a graph), or one in memory (read at each replay).
struct DeviceNumber {
  double value = 0.0;
  const void* data = nullptr;  // null: value; else a double or a float
  bool f64 = false;
};

SHARDCORE_HD double read_number(const DeviceNumber& number) {
  if (number.data == nullptr) return number.value;
  return number.f64 ? *static_cast<const double*>(number.data) : static_cast<double>(*static_cast<const float*>(number.data));
}

// The options of a group. options.lr, .step and .grad_scale are filled in on the device.
struct DeviceHyper {
  AdamHyper options;
  DeviceNumber lr;
};

// One parameter: how many steps it made (its own; written), and its group's options.
struct DeviceCount {
  int64_t* count;
  int64_t hyper_index;
};

// What steps leave on the device: 6 words, an int64 tensor (6,) in Python (shardcore/optim/tensor_lists.py).
struct DeviceStepState {
  LossScaleState loss;  // words 0 to 2
  double unscale;       // 1 / (ranks * scale): what the reduction multiplies with
  double norm;          // of the gradients at the last step that took it, times |scale|, before clipping
  int64_t skipped;      // how many steps were skipped
};
static_assert(sizeof(DeviceStepState) == 48, "6 words");

struct DeviceStepTerms {
  DeviceNumber grad_scale{1.0};           // multiplies
  DeviceNumber loss_scale{1.0};           // divides
  DeviceNumber found_inf{0.0};            // not 0: skip
  const DoubleDouble* squares = nullptr;  // of the gradients' norm, added in this order; null: no look at the norm
  int64_t num_squares = 0;
  double max_norm = 0.0;  // infinity: no clipping
  double ranks = 1.0;
  bool moves = false;  // whether `rule` updates the loss scale of the state
  LossScaleRule rule;
};

struct StepDecision {
  double grad_scale;  // multiplies the gradients
  double norm;
  uint32_t skip;  // nothing may be written
};

// A scale that the host would refuse (not finite, not finite in float32, a loss scale of 0) skips the step: the device cannot
// raise an error.
SHARDCORE_HD StepDecision decide_step(const DeviceStepTerms& terms) {
  const double divisor = read_number(terms.loss_scale), scale = read_number(terms.grad_scale) / divisor;
  const bool usable = is_finite(static_cast<float>(scale)) && is_finite(divisor) && read_number(terms.found_inf) == 0.0;
  if (terms.squares == nullptr) return {scale, 0.0, usable ? 0u : 1u};
  DoubleDouble total{0.0, 0.0};
  for (int64_t i = 0; i < terms.num_squares; ++i) total = dd_add(total, terms.squares[i]);
  const double norm = static_cast<double>(norm_from_sq(total));
  const StepScale clipped = clipped_scale(scale, norm, terms.max_norm);
  return {clipped.grad_scale, norm * fabs(scale), usable && !clipped.skip ? 0u : 1u};
}

// Called once per step.
SHARDCORE_HD void move_state(const StepDecision& decision, const DeviceStepTerms& terms, DeviceStepState* state) {
  if (terms.squares != nullptr) state->norm = decision.norm;
  state->skipped += decision.skip;
  if (!terms.moves) return;
  state->loss = loss_scale_after(terms.rule, state->loss, decision.skip != 0);
  state->unscale = 1.0 / (terms.ranks * state->loss.scale);
}

// Makes the scalars of parameter i, and increments its count unless the step is skipped. Parameters do not wait for each other.
SHARDCORE_HD void step_scalars_body(const DeviceHyper* hypers, const DeviceCount* counts, const StepDecision& decision,
                                    int64_t i, AdamScalars* scalars) {
  const DeviceCount count = counts[i];
  const DeviceHyper& hyper = hypers[count.hyper_index];
  AdamHyper h = hyper.options;
  h.lr = read_number(hyper.lr);
  h.step = *count.count + 1;
  h.grad_scale = decision.grad_scale;
  scalars[i] = adam_scalars(h);
  scalars[i].skip = decision.skip;
  if (decision.skip == 0) *count.count = h.step;
}

constexpr int kStepThreads = 128;

// The kernel, one thread per parameter. Each block decides for itself, from memory that no block writes; the first updates the
// state. shared: the block's shared memory.
template <typename Block>
SHARDCORE_HD void device_step_body(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_counts,
                                   const DeviceStepTerms& terms, DeviceStepState* state, AdamScalars* scalars,
                                   StepDecision* shared, int64_t block_index, int thread, const Block& block) {
  if (thread == 0) *shared = decide_step(terms);
  block.sync();
  const int64_t i = block_index * kStepThreads + thread;
  if (i < num_counts) step_scalars_body(hypers, counts, *shared, i, scalars);
  if (i == 0) move_state(*shared, terms, state);
}

}  // namespace shardcore
