// adam_scalars and device_scalars on the host, whatever the calling thread's FTZ/DAZ.
#pragma once

#include "adam/device_scalars.h"

namespace shardcore {

AdamScalars make_adam_scalars(const AdamHyper& hyper);

// device_scalars_body for all of `num_tensors`, in host memory.
void make_device_scalars(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_tensors,
                         const DeviceDecision& decision, AdamScalars* scalars);

}  // namespace shardcore
