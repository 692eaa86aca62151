#include "adam/make_scalars.h"

#include "core/fp_env.h"

namespace shardcore {
namespace {

// Calls of their own, so that no arithmetic is scheduled before the guard.
__attribute__((noinline)) AdamScalars compute(const AdamHyper& hyper) { return adam_scalars(hyper); }

__attribute__((noinline)) void compute_step(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_counts,
                                            const DeviceStepTerms& terms, DeviceStepState* state, AdamScalars* scalars) {
  const StepDecision decision = decide_step(terms);
  for (int64_t i = 0; i < num_counts; ++i) step_scalars_body(hypers, counts, decision, i, scalars);
  move_state(decision, terms, state);
}

}  // namespace

AdamScalars make_adam_scalars(const AdamHyper& hyper) {
  const SubnormalGuard guard;
  return compute(hyper);
}

void make_device_step(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_counts, const DeviceStepTerms& terms,
                      DeviceStepState* state, AdamScalars* scalars) {
  const SubnormalGuard guard;
  compute_step(hypers, counts, num_counts, terms, state, scalars);
}

}  // namespace shardcore
