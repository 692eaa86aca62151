// LossScaleRule, and device_step: how a step is decided on without the host.
#include "bind/device_step.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>

#include "adam/make_scalars.h"
#include "bind/adam_lists.h"
#include "bind/cuda_table.h"

#ifdef SHARDCORE_WITH_CUDA
#include "adam/adam_cuda.h"
#endif

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

constexpr const char* kOp = "device_step";

int64_t at_least_one(const Where& where, const py::handle& object) {
  const int64_t value = int_of(where, object);
  if (value < 1) value_error(where, value, "; expected 1 or more");
  return value;
}

PyLossScaleRule make_rule(const py::handle& window, const py::handle& hysteresis, const py::handle& minimum,
                          const py::handle& consecutive_hysteresis) {
  constexpr const char* op = "LossScaleRule";
  LossScaleRule rule;
  rule.window = at_least_one({op, "window"}, window);
  rule.hysteresis = at_least_one({op, "hysteresis"}, hysteresis);
  rule.minimum = number_of({op, "minimum"}, minimum);
  if (!(rule.minimum > 0.0)) value_error({op, "minimum"}, rule.minimum, "; expected more than 0");
  rule.consecutive_hysteresis = bool_of({op, "consecutive_hysteresis"}, consecutive_hysteresis);
  return {rule};
}

py::tuple scale_after(const PyLossScaleRule& rule, const py::handle& scale, const py::handle& stable_steps,
                      const py::handle& hysteresis_left, const py::handle& overflow) {
  constexpr const char* op = "LossScaleRule.after";
  const LossScaleState before{number_of({op, "scale"}, scale), int_of({op, "stable_steps"}, stable_steps),
                              int_of({op, "hysteresis_left"}, hysteresis_left)};
  const LossScaleState s = loss_scale_after(rule.rule, before, bool_of({op, "overflow"}, overflow));
  return py::make_tuple(s.scale, s.stable_steps, s.hysteresis_left);
}

// The memory of an int64 tensor.
int64_t* int64_data(const Where& where, const at::Tensor& tensor, int64_t numel, at::Device device) {
  if (tensor.scalar_type() != at::kLong) type_error(where, "dtype ", tensor.scalar_type(), "; expected Long");
  check_numel(where, tensor, numel, numel == 1 ? "a counter" : "a state");
  check_layout(where, tensor, device);
  return static_cast<int64_t*>(tensor.data_ptr());
}

PyDeviceScalars device_step(const py::handle& state_object, const py::object& squares_object, const py::handle& counts_object,
                            const py::handle& hyper_index, const py::handle& hypers_object, const py::handle& grad_scale,
                            const py::handle& loss_scale, const py::handle& found_inf, const py::handle& max_norm,
                            const py::handle& ranks, const py::object& rule) {
  const at::Tensor state = tensor_of(kOp, "state", state_object);
  const at::Device device = state.device();
  check_device_supported({kOp, "state"}, device);
  auto* const words = reinterpret_cast<DeviceStepState*>(
      int64_data({kOp, "state"}, state, static_cast<int64_t>(sizeof(DeviceStepState) / 8), device));
  const auto number = [&](const char* name, const py::handle& object) {
    return device_number({kOp, name}, number_arg({kOp, name}, object), device);
  };
  DeviceStepTerms terms;
  terms.grad_scale = number("grad_scale", grad_scale);
  terms.loss_scale = number("loss_scale", loss_scale);
  terms.found_inf = number("found_inf", found_inf);
  terms.max_norm = max_norm.is_none() ? HUGE_VAL : number_of({kOp, "max_norm"}, max_norm);
  if (!(terms.max_norm >= 0.0)) value_error({kOp, "max_norm"}, terms.max_norm, "; expected a number of at least 0");
  terms.ranks = static_cast<double>(at_least_one({kOp, "ranks"}, ranks));
  if (!squares_object.is_none()) {
    const at::Tensor squares = tensor_of(kOp, "squares", squares_object);
    if (squares.scalar_type() != at::kDouble || squares.dim() != 2 || squares.size(1) != 2) {
      value_error({kOp, "squares"}, "dtype ", squares.scalar_type(), " and shape ", squares.sizes(),
                  "; expected Double, [n, 2] (high, low)");
    }
    check_layout({kOp, "squares"}, squares, device);
    terms.squares = static_cast<const DoubleDouble*>(squares.const_data_ptr());
    terms.num_squares = squares.size(0);
  }
  terms.moves = !rule.is_none();
  if (terms.moves) terms.rule = rule.cast<const PyLossScaleRule&>().rule;
  std::vector<DeviceHyper> hypers;
  for (const PyAdamHyper& hyper : hypers_of(hypers_object)) {
    const Where where{kOp, "hypers.lr", static_cast<int64_t>(hypers.size())};
    hypers.push_back({hyper.hyper, device_number(where, hyper.lr, device)});
  }
  const TensorList tensors = tensors_of(kOp, "counts", counts_object);
  const std::vector<int64_t> indices = hyper_indices_of(kOp, hyper_index, "counts", tensors.size());
  std::vector<DeviceCount> counts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (indices[i] < 0 || indices[i] >= static_cast<int64_t>(hypers.size())) {
      value_error({kOp, "hyper_index", index}, indices[i], "; expected an index of hypers, which has ", hypers.size(),
                  " items");
    }
    counts.push_back({int64_data({kOp, "counts", index}, tensors[i], 1, device), indices[i]});
  }
  const auto count = static_cast<int64_t>(counts.size());
  if (count == 0) value_error({kOp, "counts"}, "no items; expected one or more");
  PyDeviceScalars made{count, at::empty({count * static_cast<int64_t>(sizeof(AdamScalars))},
                                        at::TensorOptions().dtype(at::kByte).device(device))};
  auto* const scalars = static_cast<AdamScalars*>(made.bytes.data_ptr());
  if (device.is_cpu()) make_device_step(hypers.data(), counts.data(), count, terms, words, scalars);
#ifdef SHARDCORE_WITH_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    const at::Tensor table = upload({bytes_of(hypers), bytes_of(counts)}, device);
    const auto* const on_device = static_cast<const DeviceHyper*>(table.const_data_ptr());
    device_step_cuda(on_device, reinterpret_cast<const DeviceCount*>(on_device + hypers.size()), count, terms, words, scalars,
                     current_stream(device));
  }
#endif
  return made;
}

}  // namespace

void bind_device_step(py::module_& module) {
  py::class_<PyLossScaleRule>(module, "LossScaleRule")
      .def(py::init(&make_rule), py::kw_only(), py::arg("window"), py::arg("hysteresis"), py::arg("minimum"),
           py::arg("consecutive_hysteresis"))
      .def("after", &scale_after, py::arg("scale"), py::arg("stable_steps"), py::arg("hysteresis_left"), py::arg("overflow"));
  py::class_<PyDeviceScalars>(module, "DeviceScalars");
  module.def("device_step", &device_step, py::arg("state"), py::arg("squares"), py::arg("counts"), py::arg("hyper_index"),
             py::arg("hypers"), py::kw_only(), py::arg("grad_scale") = 1.0, py::arg("loss_scale") = 1.0,
             py::arg("found_inf") = 0.0, py::arg("max_norm") = py::none(), py::arg("ranks") = 1, py::arg("rule") = py::none());
}

}  // namespace shardcore::bind
