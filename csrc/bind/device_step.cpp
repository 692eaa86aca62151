// LossScaleRule, and device_step: how a step is decided on without the host.
#include "bind/device_step.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <optional>

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

PyLossScaleRule make_rule(int64_t window, int64_t hysteresis, double minimum, bool consecutive_hysteresis) {
  return {{window, hysteresis, minimum, consecutive_hysteresis}};
}

py::tuple scale_after(const PyLossScaleRule& rule, double scale, int64_t stable_steps, int64_t hysteresis_left, bool overflow) {
  const LossScaleState s = loss_scale_after(rule.rule, {scale, stable_steps, hysteresis_left}, overflow);
  return py::make_tuple(s.scale, s.stable_steps, s.hysteresis_left);
}

// The memory of an int64 tensor.
int64_t* int64_data(const at::Tensor& tensor, int64_t numel, at::Device device) {
  TORCH_INTERNAL_ASSERT(tensor.scalar_type() == at::kLong && tensor.numel() == numel && tensor.device() == device &&
                        tensor.is_contiguous());
  return static_cast<int64_t*>(tensor.data_ptr());
}

// Called with the package's own state, counts, indices and rule; the four terms may be a user's tensors.
PyDeviceScalars device_step(const at::Tensor& state, const std::optional<at::Tensor>& squares,
                            const std::vector<at::Tensor>& counters, const std::vector<int64_t>& hyper_index,
                            const py::handle& hypers_object, const py::handle& grad_scale, const py::handle& loss_scale,
                            const py::handle& found_inf, std::optional<double> max_norm, int64_t ranks,
                            const PyLossScaleRule* rule) {
  const at::Device device = state.device();
  auto* const words =
      reinterpret_cast<DeviceStepState*>(int64_data(state, static_cast<int64_t>(sizeof(DeviceStepState) / 8), device));
  const auto number = [&](const char* name, const py::handle& object) {
    return device_number({kOp, name}, number_arg({kOp, name}, object), device);
  };
  DeviceStepTerms terms;
  terms.grad_scale = number("grad_scale", grad_scale);
  terms.loss_scale = number("loss_scale", loss_scale);
  terms.found_inf = number("found_inf", found_inf);
  terms.max_norm = max_norm.value_or(HUGE_VAL);
  terms.ranks = static_cast<double>(ranks);
  if (squares) {
    TORCH_INTERNAL_ASSERT(squares->dim() == 2 && squares->size(1) == 2 && squares->device() == device &&
                          squares->is_contiguous());
    terms.squares = reinterpret_cast<const DoubleDouble*>(squares->const_data_ptr<double>());
    terms.num_squares = squares->size(0);
  }
  terms.moves = rule != nullptr;
  if (terms.moves) terms.rule = rule->rule;
  std::vector<DeviceHyper> hypers;
  for (const PyAdamHyper& hyper : hypers_of(hypers_object)) {
    const Where where{kOp, "hypers.lr", static_cast<int64_t>(hypers.size())};
    hypers.push_back({hyper.hyper, device_number(where, hyper.lr, device)});
  }
  const auto count = static_cast<int64_t>(counters.size());
  TORCH_INTERNAL_ASSERT(count != 0 && hyper_index.size() == counters.size() &&
                        *std::max_element(hyper_index.begin(), hyper_index.end()) < static_cast<int64_t>(hypers.size()));
  std::vector<DeviceCount> counts;
  for (size_t i = 0; i < counters.size(); ++i) counts.push_back({int64_data(counters[i], 1, device), hyper_index[i]});
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

// Called with a copy of another object's bytes.
PyDeviceScalars scalars_from(at::Tensor bytes) {
  constexpr auto size = static_cast<int64_t>(sizeof(AdamScalars));
  TORCH_INTERNAL_ASSERT(bytes.scalar_type() == at::kByte && bytes.is_contiguous() && bytes.numel() % size == 0);
  return {bytes.numel() / size, std::move(bytes)};
}

}  // namespace

void bind_device_step(py::module_& module) {
  py::class_<PyLossScaleRule>(module, "LossScaleRule")
      .def(py::init(&make_rule), py::kw_only(), py::arg("window"), py::arg("hysteresis"), py::arg("minimum"),
           py::arg("consecutive_hysteresis"))
      .def("after", &scale_after, py::arg("scale"), py::arg("stable_steps"), py::arg("hysteresis_left"), py::arg("overflow"));
  py::class_<PyDeviceScalars>(module, "DeviceScalars")
      .def(py::init(&scalars_from), py::arg("bytes"))
      .def_readonly("bytes", &PyDeviceScalars::bytes);
  module.def("device_step", &device_step, py::arg("state"), py::arg("squares"), py::arg("counts"), py::arg("hyper_index"),
             py::arg("hypers"), py::kw_only(), py::arg("grad_scale") = 1.0, py::arg("loss_scale") = 1.0,
             py::arg("found_inf") = 0.0, py::arg("max_norm") = py::none(), py::arg("ranks") = 1, py::arg("rule") = py::none());
}

}  // namespace shardcore::bind
