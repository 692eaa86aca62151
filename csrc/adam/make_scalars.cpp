#include "adam/make_scalars.h"

#include "core/fp_env.h"

namespace shardcore {
namespace {

// Calls of their own, so that no arithmetic is scheduled before the guard.
__attribute__((noinline)) AdamScalars compute(const AdamHyper& hyper) { return adam_scalars(hyper); }

__attribute__((noinline)) void compute_all(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_tensors,
                                           const DeviceDecision& decision, AdamScalars* scalars) {
  for (int64_t i = 0; i < num_tensors; ++i) device_scalars_body(hypers, counts, decision, i, scalars);
}

}  // namespace

AdamScalars make_adam_scalars(const AdamHyper& hyper) {
  const SubnormalGuard guard;
  return compute(hyper);
}

void make_device_scalars(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_tensors,
                         const DeviceDecision& decision, AdamScalars* scalars) {
  const SubnormalGuard guard;
  compute_all(hypers, counts, num_tensors, decision, scalars);
}

}  // namespace shardcore
