// The scalars of a step made where the tensors are (FusedAdam's capturable): step counts, learning rate, scales, norm and the
// decision to skip are read from device memory, so that each replay of a CUDA graph is the next step.
//
// Host/device: the CUDA kernel, the CPU path and tests/cpp run the same body. It makes an AdamHyper of what it read and calls
// the same adam_scalars as the host.
#pragma once

#include <cstdint>

#include "adam/adam_scalars.h"
#include "core/grad_scale.h"

namespace shardcore {

// A number known when the kernel is launched (a graph keeps it), or one in memory (each replay reads it).
struct DeviceNumber {
  double value = 0.0;
  const void* data = nullptr;  // null: value; else a double or a float
  bool f64 = false;
};

SHARDCORE_HD double read_number(const DeviceNumber& number) {
  if (number.data == nullptr) return number.value;
  return number.f64 ? *static_cast<const double*>(number.data) : static_cast<double>(*static_cast<const float*>(number.data));
}

// The options of a group. options.lr, .step and .grad_scale are filled in by the body.
struct DeviceHyper {
  AdamHyper options;
  DeviceNumber lr;
};

// One tensor: how many steps it made (its own; written), and its options.
struct DeviceCount {
  int64_t* count;
  int64_t hyper_index;

  bool operator==(const DeviceCount& o) const { return count == o.count && hyper_index == o.hyper_index; }
};

// What all tensors of a step share.
struct DeviceDecision {
  DeviceNumber grad_scale{1.0};  // multiplies
  DeviceNumber loss_scale{1.0};  // divides
  DeviceNumber found_inf{0.0};   // not 0: skip
  double max_norm = 0.0;
  const DoubleDouble* sq_norm = nullptr;  // of the gradients; null: no clipping, and no look at the norm
  int64_t* skipped = nullptr;             // counts skipped steps
};

// A scale that the host would refuse (not finite, as float32 not, a loss scale of 0) skips the step: on the device nobody can
// raise.
SHARDCORE_HD StepScale decide(const DeviceDecision& d) {
  const double multiplier = read_number(d.grad_scale), divisor = read_number(d.loss_scale);
  const double scale = multiplier / divisor;
  const bool usable = is_finite(static_cast<float>(scale)) && is_finite(divisor) && read_number(d.found_inf) == 0.0;
  if (!usable || d.sq_norm == nullptr) return {scale, !usable};
  return clipped_scale(scale, static_cast<double>(norm_from_sq(*d.sq_norm)), d.max_norm);
}

// Tensor i: its scalars, and its count moved on unless the step is skipped. Tensors do not wait for each other.
SHARDCORE_HD void device_scalars_body(const DeviceHyper* hypers, const DeviceCount* counts, const DeviceDecision& decision,
                                      int64_t i, AdamScalars* scalars) {
  const StepScale scale = decide(decision);
  const DeviceCount count = counts[i];
  const DeviceHyper& hyper = hypers[count.hyper_index];
  AdamHyper h = hyper.options;
  h.lr = read_number(hyper.lr);
  h.step = *count.count + 1;
  h.grad_scale = scale.grad_scale;
  scalars[i] = adam_scalars(h);
  scalars[i].skip = scale.skip ? 1u : 0u;
  if (!scale.skip) *count.count = h.step;
  if (scale.skip && i == 0) ++*decision.skipped;
}

}  // namespace shardcore
