// adam_scalars, device_scalars and step_verdict on the host, whatever the calling thread's FTZ/DAZ.
#pragma once

#include "adam/device_scalars.h"
#include "adam/step_verdict.h"

namespace shardcore {

AdamScalars make_adam_scalars(const AdamHyper& hyper);

// device_scalars_body for all of `num_tensors`, in host memory.
void make_device_scalars(const DeviceHyper* hypers, const DeviceCount* counts, int64_t num_tensors,
                         const DeviceDecision& decision, AdamScalars* scalars);

// step_verdict_body, and verdict_scalars_body for all of `num_hypers`, in host memory.
void make_step_verdict(const DoubleDouble* squares, int64_t count, const VerdictTerms& terms, const VerdictHyper* hypers,
                       int64_t num_hypers, StepVerdict* verdict, AdamScalars* scalars);

}  // namespace shardcore
