#include "bind/device_step.h"

#include <torch/csrc/autograd/python_variable.h>

#include "bind/adam_lists.h"

namespace shardcore::bind {

NumberArg number_arg(const Where& where, const py::handle& object) {
  if (!THPVariable_Check(object.ptr())) return {number_of(where, object), {}};
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  if (tensor.scalar_type() != at::kFloat && tensor.scalar_type() != at::kDouble) {
    type_error(where, "dtype ", tensor.scalar_type(), "; expected Float or Double");
  }
  if (tensor.numel() != 1) value_error(where, tensor.numel(), " elements; expected 1");
  return {0.0, tensor};
}

DeviceNumber device_number(const Where& where, const NumberArg& number, at::Device device) {
  DeviceNumber out;
  out.value = number.value;
  if (!number.tensor.defined()) return out;
  check_layout(where, number.tensor, device);
  out.data = number.tensor.const_data_ptr();
  out.f64 = number.tensor.scalar_type() == at::kDouble;
  return out;
}

namespace {

PyDeviceStep make_device_step(const py::handle& counts, const py::handle& skipped, const py::handle& grad_scale,
                              const py::handle& loss_scale, const py::handle& found_inf, const py::handle& max_norm) {
  constexpr const char* op = "DeviceStep";
  PyDeviceStep step;
  step.counts = tensors_of(op, "counts", counts);
  step.skipped = tensor_of(op, "skipped", skipped);
  step.grad_scale = number_arg({op, "grad_scale"}, grad_scale);
  step.loss_scale = number_arg({op, "loss_scale"}, loss_scale);
  step.found_inf = number_arg({op, "found_inf"}, found_inf);
  if (!max_norm.is_none()) {
    step.max_norm = number_of({op, "max_norm"}, max_norm);
    if (!(*step.max_norm >= 0.0)) value_error({op, "max_norm"}, *step.max_norm, "; expected a number of at least 0");
  }
  return step;
}

int64_t* counter(const Where& where, const at::Tensor& tensor, at::Device device) {
  if (tensor.scalar_type() != at::kLong) type_error(where, "dtype ", tensor.scalar_type(), "; expected Long");
  check_numel(where, tensor, 1, "a counter");
  check_layout(where, tensor, device);
  return static_cast<int64_t*>(tensor.data_ptr());
}

}  // namespace

DevicePlan plan_of(const PyDeviceStep& step, const std::vector<int64_t>& hyper_index, at::Device device) {
  const auto at = [](const char* name, int64_t i = -1) { return Where{kStepOp, name, i}; };
  check_count(kStepOp, "device_step.counts", step.counts.size(), "params", hyper_index.size());
  DevicePlan plan;
  for (size_t i = 0; i < hyper_index.size(); ++i) {
    plan.counts.push_back({counter(at("device_step.counts", static_cast<int64_t>(i)), step.counts[i], device), hyper_index[i]});
  }
  DeviceDecision& decision = plan.decision;
  decision.skipped = counter(at("device_step.skipped"), step.skipped, device);
  decision.grad_scale = device_number(at("device_step.grad_scale"), step.grad_scale, device);
  decision.loss_scale = device_number(at("device_step.loss_scale"), step.loss_scale, device);
  decision.found_inf = device_number(at("device_step.found_inf"), step.found_inf, device);
  plan.clips = step.max_norm.has_value();
  decision.max_norm = step.max_norm.value_or(0.0);
  return plan;
}

void bind_device_step(py::module_& module) {
  py::class_<PyDeviceStep>(module, "DeviceStep")
      .def(py::init(&make_device_step), py::arg("counts"), py::arg("skipped"), py::kw_only(), py::arg("grad_scale") = 1.0,
           py::arg("loss_scale") = 1.0, py::arg("found_inf") = 0.0, py::arg("max_norm") = py::none());
}

}  // namespace shardcore::bind
