// adam_scalars and a device step on the host, whatever the calling thread's FTZ/DAZ.
#pragma once

#include "adam/device_step.h"

namespace shardcore {

AdamScalars make_adam_scalars(const AdamHyper& hyper);

// A device step over `num_counts` parameters, in host memory.
void make_device_step(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_counts, const DeviceStepTerms& terms,
                      DeviceStepState* state, AdamScalars* scalars);

}  // namespace shardcore
