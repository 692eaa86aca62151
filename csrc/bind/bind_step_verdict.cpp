// LossScaleRule, and step_verdict: how the sharded engine's step is decided on without the host.
#include <ATen/ops/empty.h>

#include <cmath>

#include "adam/make_scalars.h"
#include "bind/cuda_table.h"
#include "bind/device_step.h"
#include "bind/step_verdict.h"

#ifdef SHARDCORE_WITH_CUDA
#include "adam/adam_cuda.h"
#endif

namespace shardcore::bind {
namespace {

constexpr const char* kOp = "step_verdict";
constexpr int64_t kWords = sizeof(StepVerdict) / 8;

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

std::vector<VerdictHyper> hypers_with_since(const py::handle& hypers, const py::handle& since) {
  std::vector<VerdictHyper> list;
  for (const PyAdamHyper& hyper : hypers_of(hypers)) {
    if (hyper.lr.tensor.defined()) value_error({kOp, "hypers"}, "a tensor as lr; expected a number");
    list.push_back({hyper.hyper, 0});
  }
  const py::object items = items_of({kOp, "since"}, since, "a list of ints");
  const auto count = static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr()));
  check_count(kOp, "since", count, "hypers", list.size());
  for (size_t i = 0; i < count; ++i) {
    PyObject* const item = PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyLong_Check(item)) {
      type_error({kOp, "since", static_cast<int64_t>(i)}, "type ", Py_TYPE(item)->tp_name, "; expected an int");
    }
    list[i].since = PyLong_AsUnsignedLongLongMask(item);
  }
  return list;
}

PyDeviceScalars step_verdict(const py::handle& squares_object, const py::handle& hypers, const py::handle& since,
                             const py::handle& words_object, const py::handle& grad_scale, const py::handle& max_norm,
                             const py::handle& number, const py::handle& ranks, const py::object& rule) {
  const at::Tensor squares = tensor_of(kOp, "squares", squares_object), words = tensor_of(kOp, "words", words_object);
  const at::Device device = words.device();
  check_device_supported({kOp, "words"}, device);
  if (words.scalar_type() != at::kLong) type_error({kOp, "words"}, "dtype ", words.scalar_type(), "; expected Long");
  check_layout({kOp, "words"}, words, device);
  check_numel({kOp, "words"}, words, kWords, "a verdict");
  if (squares.scalar_type() != at::kDouble) type_error({kOp, "squares"}, "dtype ", squares.scalar_type(), "; expected Double");
  if (squares.dim() != 2 || squares.size(1) != 2) {
    value_error({kOp, "squares"}, "shape ", squares.sizes(), "; expected [n, 2] (high, low)");
  }
  check_layout({kOp, "squares"}, squares, device);
  const std::vector<VerdictHyper> list = hypers_with_since(hypers, since);
  VerdictTerms terms{};
  terms.grad_scale = number_of({kOp, "grad_scale"}, grad_scale);
  terms.max_norm = max_norm.is_none() ? HUGE_VAL : number_of({kOp, "max_norm"}, max_norm);
  terms.number = int_of({kOp, "number"}, number);
  terms.ranks = static_cast<double>(at_least_one({kOp, "ranks"}, ranks));
  if (!(terms.max_norm >= 0.0)) value_error({kOp, "max_norm"}, terms.max_norm, "; expected a number of at least 0");
  if (terms.number < 0 || terms.number > 63) value_error({kOp, "number"}, terms.number, "; expected 0 to 63");
  terms.moves = !rule.is_none();
  if (terms.moves) {
    if (!py::isinstance<PyLossScaleRule>(rule)) {
      type_error({kOp, "rule"}, "type ", Py_TYPE(rule.ptr())->tp_name, "; expected LossScaleRule or None");
    }
    terms.rule = rule.cast<const PyLossScaleRule&>().rule;
  }
  const auto count = static_cast<int64_t>(list.size());
  PyDeviceScalars made;
  for (const VerdictHyper& hyper : list) made.hypers.push_back(hyper.options);
  made.bytes =
      at::empty({count * static_cast<int64_t>(sizeof(AdamScalars))}, at::TensorOptions().dtype(at::kByte).device(device));
  const auto* const sums = static_cast<const DoubleDouble*>(squares.const_data_ptr());
  auto* const verdict = static_cast<StepVerdict*>(words.data_ptr());
  auto* const scalars = static_cast<AdamScalars*>(made.bytes.data_ptr());
  if (device.is_cpu()) make_step_verdict(sums, squares.size(0), terms, list.data(), count, verdict, scalars);
#ifdef SHARDCORE_WITH_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    if (count == 0) value_error({kOp, "hypers"}, "no items; expected one or more");
    const at::Tensor table = upload({bytes_of(list)}, device);
    step_verdict_cuda(sums, squares.size(0), terms, static_cast<const VerdictHyper*>(table.const_data_ptr()), count, verdict,
                      scalars, current_stream(device));
  }
#endif
  return made;
}

}  // namespace

void bind_step_verdict(py::module_& module) {
  py::class_<PyLossScaleRule>(module, "LossScaleRule")
      .def(py::init(&make_rule), py::kw_only(), py::arg("window"), py::arg("hysteresis"), py::arg("minimum"),
           py::arg("consecutive_hysteresis"))
      .def("after", &scale_after, py::arg("scale"), py::arg("stable_steps"), py::arg("hysteresis_left"), py::arg("overflow"));
  py::class_<PyDeviceScalars>(module, "DeviceScalars");
  module.def("step_verdict", &step_verdict, py::arg("squares"), py::arg("hypers"), py::arg("since"), py::arg("words"),
             py::kw_only(), py::arg("grad_scale"), py::arg("max_norm"), py::arg("number"), py::arg("ranks"),
             py::arg("rule") = py::none());
}

}  // namespace shardcore::bind
