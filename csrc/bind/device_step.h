// DeviceStep: what a capturable step reads and counts on the device, as Python gives it.
#pragma once

#include <optional>
#include <vector>

#include "adam/device_scalars.h"
#include "bind/checks.h"

namespace shardcore::bind {

// A number, or a tensor of one element that kernels read where it lies.
struct NumberArg {
  double value = 0.0;
  at::Tensor tensor;  // undefined: value
};

// The tensor is float32 or float64 and not read here; the number is not checked.
NumberArg number_arg(const Where& where, const py::handle& object);
// Refuses a tensor that is not on `device`.
DeviceNumber device_number(const Where& where, const NumberArg& number, at::Device device);

struct __attribute__((visibility("hidden"))) PyAdamHyper {
  AdamHyper hyper;
  NumberArg lr;  // hyper.lr, or a tensor for a device step to read
};

// The items of a list of AdamHyper.
std::vector<PyAdamHyper> hypers_of(const py::handle& sequence);
// What kernels read of them. Refuses a tensor as lr.
std::vector<AdamScalars> scalars_of(const char* op, const std::vector<PyAdamHyper>& hypers);

struct __attribute__((visibility("hidden"))) PyDeviceStep {
  TensorList counts;
  at::Tensor skipped;
  NumberArg grad_scale, loss_scale, found_inf;
  std::optional<double> max_norm;
};

// Plain data. decision.sq_norm is not set: the norm is not known before the kernels run.
struct DevicePlan {
  std::vector<DeviceHyper> hypers;
  std::vector<DeviceCount> counts;
  DeviceDecision decision;
  bool clips = false;
};

// Checks `step` for a call over hyper_index.size() tensors on `device`; leaves out the hypers.
DevicePlan plan_of(const PyDeviceStep& step, const std::vector<int64_t>& hyper_index, at::Device device);

void bind_device_step(py::module_& module);

}  // namespace shardcore::bind
