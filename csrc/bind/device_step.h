// What Python passes to a step that the device decides on, and the scalars that the device makes.
#pragma once

#include <vector>

#include "adam/device_step.h"
#include "bind/checks.h"

namespace shardcore::bind {

// A number, or a tensor of one element that kernels read on its device.
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

struct __attribute__((visibility("hidden"))) PyLossScaleRule {
  LossScaleRule rule;
};

// `count` AdamScalars where the tensors of their step are.
struct __attribute__((visibility("hidden"))) PyDeviceScalars {
  int64_t count = 0;
  at::Tensor bytes;
};

void bind_device_step(py::module_& module);

}  // namespace shardcore::bind
