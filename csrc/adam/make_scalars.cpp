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

__attribute__((noinline)) void give_verdict(const DoubleDouble* squares, int64_t count, const VerdictTerms& terms,
                                            const VerdictHyper* hypers, int64_t num_hypers, StepVerdict* verdict,
                                            AdamScalars* scalars) {
  step_verdict_body(squares, count, terms, verdict);
  for (int64_t i = 0; i < num_hypers; ++i) verdict_scalars_body(hypers, *verdict, i, scalars);
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

void make_step_verdict(const DoubleDouble* squares, int64_t count, const VerdictTerms& terms, const VerdictHyper* hypers,
                       int64_t num_hypers, StepVerdict* verdict, AdamScalars* scalars) {
  const SubnormalGuard guard;
  give_verdict(squares, count, terms, hypers, num_hypers, verdict, scalars);
}

}  // namespace shardcore
