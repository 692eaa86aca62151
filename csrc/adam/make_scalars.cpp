#include "adam/make_scalars.h"

#include "core/fp_env.h"

namespace shardcore {
namespace {

// A call of its own, so that no arithmetic is scheduled before the guard.
__attribute__((noinline)) AdamScalars compute(const AdamHyper& hyper) { return adam_scalars(hyper); }

}  // namespace

AdamScalars make_adam_scalars(const AdamHyper& hyper) {
  const SubnormalGuard guard;
  return compute(hyper);
}

}  // namespace shardcore
