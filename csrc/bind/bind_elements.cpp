// element_step: SGD, Adagrad and Lion over lists of tensors; cast.
#include <algorithm>
#include <array>
#include <iterator>
#include <string>

#include "bind/checks.h"
#include "bind/cuda_table.h"
#include "elementwise/element_cpu.h"

#ifdef SHARDCORE_WITH_CUDA
#include "elementwise/element_cuda.h"
#endif

namespace shardcore::bind {
namespace {

ElementScalars element_scalars(const std::string& formula, double grad_scale, double l2, double decay, double lr,
                               const std::array<double, 2>& of_direction, const std::array<double, 2>& of_state, double eps) {
  constexpr const char* kNames[] = {"sgd", "momentum", "nesterov", "adagrad", "lion"};
  ElementScalars s{};
  const auto* const name = std::find(std::begin(kNames), std::end(kNames), formula);
  TORCH_INTERNAL_ASSERT(name != std::end(kNames));
  s.formula = static_cast<Formula>(name - std::begin(kNames));
  s.grad_scale = static_cast<float>(grad_scale);
  s.l2 = static_cast<float>(l2);
  s.decay = static_cast<float>(decay);
  s.minus_lr = static_cast<float>(-lr);
  s.beta1 = static_cast<float>(of_direction[0]);
  s.one_minus1 = static_cast<float>(of_direction[1]);
  s.beta2 = static_cast<float>(of_state[0]);
  s.one_minus2 = static_cast<float>(of_state[1]);
  s.eps = static_cast<float>(eps);
  return s;
}

void run(const std::vector<ElementSegment>& segments, const ElementScalars& scalars, at::Device device) {
  const py::gil_scoped_release no_gil;
  if (device.is_cpu()) {
    update_elements_cpu(segments.data(), static_cast<int64_t>(segments.size()), scalars, torch_executor());
  }
#ifdef SHARDCORE_WITH_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    const DeviceTable<ElementSegment> table(segments, kElementChunk, device);
    if (table.num_chunks != 0) update_elements_cuda(table.get(), table.num_chunks, scalars, current_stream(device));
  }
#endif
}

// Called by the engine alone, with its own flat buffers.
void element_step(const py::handle& params, const py::handle& grads, const py::handle& states, const py::handle& masters,
                  const ElementScalars& scalars) {
  constexpr const char* op = "element_step";
  const TensorList param_list = tensors_of(op, "params", params), grad_list = tensors_of(op, "grads", grads);
  const TensorList state_list = tensors_of(op, "states", states, true), master_list = tensors_of(op, "masters", masters, true);
  if (param_list.empty()) return;
  const at::Device device = param_list[0].device();
  std::vector<ElementSegment> segments;
  for (size_t i = 0; i < param_list.size(); ++i) {
    const Where where{op, "params", static_cast<int64_t>(i)};
    const at::Tensor &param = param_list[i], &grad = grad_list[i], &state = state_list[i], &master = master_list[i];
    TORCH_INTERNAL_ASSERT(grad.numel() == param.numel() && state.defined() == (scalars.formula != Formula::sgd));
    ElementSegment t{};
    t.numel = param.numel();
    t.param = param.data_ptr(), t.param_dtype = float_dtype(where, param);
    t.grad = grad.const_data_ptr(), t.grad_dtype = float_dtype(where, grad);
    if (state.defined()) t.state = state.data_ptr(), t.state_dtype = float_dtype(where, state);
    if (master.defined()) t.master = static_cast<float*>(master.data_ptr());
    segments.push_back(t);
    bump_version(param);
    if (state.defined()) bump_version(state);
  }
  run(segments, scalars, device);
}

void cast(const py::handle& dsts, const py::handle& srcs) {
  constexpr const char* op = "cast";
  const TensorList dst_list = tensors_of(op, "dsts", dsts), src_list = tensors_of(op, "srcs", srcs);
  check_count(op, "srcs", src_list.size(), "dsts", dst_list.size());
  if (dst_list.empty()) return;
  const at::Device device = dst_list[0].device();
  check_device_supported({op, "dsts", 0}, device);
  std::vector<ElementSegment> segments;
  for (size_t i = 0; i < dst_list.size(); ++i) {
    const Where dst_at{op, "dsts", static_cast<int64_t>(i)}, src_at{op, "srcs", static_cast<int64_t>(i)};
    const at::Tensor &dst = dst_list[i], &src = src_list[i];
    check_layout(dst_at, dst, device);
    check_layout(src_at, src, device);
    check_numel(src_at, src, dst.numel(), "dsts");
    segments.push_back(
        assignment(dst.data_ptr(), float_dtype(dst_at, dst), src.const_data_ptr(), float_dtype(src_at, src), dst.numel()));
  }
  for (size_t i = 0; i < dst_list.size(); ++i) bump_version(dst_list[i]);
  run(segments, kAssign, device);
}

}  // namespace

void bind_elements(py::module_& module) {
  py::class_<ElementScalars>(module, "ElementScalars")
      .def(py::init(&element_scalars), py::arg("formula"), py::kw_only(), py::arg("grad_scale") = 1.0, py::arg("l2") = 0.0,
           py::arg("decay") = 1.0, py::arg("lr") = 0.0, py::arg("of_direction") = std::array<double, 2>{},
           py::arg("of_state") = std::array<double, 2>{}, py::arg("eps") = 0.0);
  module.def("element_step", &element_step, py::arg("params"), py::arg("grads"), py::arg("states"), py::arg("masters"),
             py::arg("scalars"));
  module.def("cast", &cast, py::arg("dsts"), py::arg("srcs"));
}

}  // namespace shardcore::bind
