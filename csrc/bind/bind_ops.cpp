// sq_norm, sq_norm_add, norm_from_sq, clipping, ordered_sum, digest, dense.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>

#include "bind/checks.h"
#include "bind/cuda_table.h"
#include "bind/device_step.h"
#include "core/grad_scale.h"
#include "digest/digest_cpu.h"
#include "norm/norm_cpu.h"
#include "reduce/reduce_cpu.h"

#ifdef SHARDCORE_WITH_CUDA
#include "digest/digest_cuda.h"
#include "norm/norm_cuda.h"
#include "reduce/reduce_cuda.h"
#endif

namespace shardcore::bind {
namespace {

at::Tensor to_tensor(DoubleDouble sum) {
  const at::Tensor out = at::empty({2}, at::TensorOptions().dtype(at::kDouble));
  auto* const data = static_cast<double*>(out.data_ptr());
  data[0] = sum.high;
  data[1] = sum.low;
  return out;
}

at::Tensor sq_norm(const py::handle& tensors) {
  constexpr const char* op = "sq_norm";
  const TensorList list = tensors_of(op, "tensors", tensors);
  if (list.empty()) return to_tensor(DoubleDouble{});
  const at::Device device = list[0].device();
  check_device_supported({op, "tensors", 0}, device);
  std::vector<NormSegment> segments;
  for (size_t i = 0; i < list.size(); ++i) {
    const Where where{op, "tensors", static_cast<int64_t>(i)};
    check_dense(where, list[i], device);
    segments.push_back({list[i].const_data_ptr(), list[i].numel(), float_dtype(where, list[i])});
  }
  const py::gil_scoped_release no_gil;
#ifdef SHARDCORE_WITH_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    return queue_sq_norm(NormTable(segments, device), device, current_stream(device));
  }
#endif
  return to_tensor(sq_norm_cpu(segments.data(), static_cast<int64_t>(segments.size()), torch_executor()));
}

at::Tensor sq_norm_add(const at::Tensor& given) {
  const at::Tensor parts = given.contiguous();
  const auto* const data = parts.const_data_ptr<double>();
#ifdef SHARDCORE_WITH_CUDA
  if (parts.is_cuda()) {
    const c10::cuda::CUDAGuard guard(parts.device());
    const at::Tensor out = at::empty({2}, parts.options());
    add_partials_cuda(reinterpret_cast<const DoubleDouble*>(data), parts.size(0), static_cast<DoubleDouble*>(out.data_ptr()),
                      current_stream(parts.device()));
    return out;
  }
#endif
  DoubleDouble total{};
  for (int64_t i = 0; i < parts.size(0); ++i) total = dd_add(total, DoubleDouble{data[2 * i], data[2 * i + 1]});
  return to_tensor(total);
}

double norm_from_sq_of(const at::Tensor& total) {
  const auto* const data = total.const_data_ptr<double>();
  return static_cast<double>(norm_from_sq(DoubleDouble{data[0], data[1]}));
}

std::optional<double> clipped_scale_of(double scale, double norm, double max_norm) {
  const StepScale clipped = clipped_scale(scale, norm, max_norm);
  return clipped.skip ? std::nullopt : std::optional(clipped.grad_scale);
}

// Called by the engine alone, with its own buffers.
at::Tensor ordered_sum(const at::Tensor& pieces, int64_t world_size, const py::handle& scale, const at::Tensor& out,
                       bool accumulate, const std::optional<at::Tensor>& own, int64_t rank) {
  constexpr const char* name = "ordered_sum";
  const at::Device device = pieces.device();
  OrderedSum op{};
  op.piece_dtype = float_dtype({name, "pieces"}, pieces);
  op.out_dtype = float_dtype({name, "out"}, out);
  op.numel = out.numel();
  TORCH_INTERNAL_ASSERT(pieces.numel() == world_size * op.numel && (!own || own->numel() == op.numel));
  op.pieces = pieces.const_data_ptr();
  op.world_size = world_size;
  if (own) op.own = own->const_data_ptr();
  op.own_rank = rank;
  const DeviceNumber number = device_number({name, "scale"}, number_arg({name, "scale"}, scale), device);
  op.scale = device.is_cpu() ? read_number(number) : number.data != nullptr ? 1.0 : number.value;
  op.scale_at = device.is_cpu() ? nullptr : static_cast<const double*>(number.data);
  op.out = out.data_ptr();
  op.accumulate = accumulate;
  bump_version(out);
  const py::gil_scoped_release no_gil;
#ifdef SHARDCORE_WITH_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    const auto options = at::TensorOptions().dtype(at::kDouble).device(device);
    if (op.numel == 0) return at::zeros({2}, options);
    const at::Tensor sum = at::empty({2}, options);
    const at::Tensor partial = at::empty({ordered_sum_grid(op.numel), 2}, options);
    ordered_sum_cuda(op, static_cast<DoubleDouble*>(partial.data_ptr()), static_cast<DoubleDouble*>(sum.data_ptr()),
                     current_stream(device));
    return sum;
  }
#endif
  return to_tensor(ordered_sum_cpu(op, torch_executor()));
}

DigestKind digest_kind(const Where& where, const at::Tensor& tensor, bool has_rest) {
  switch (tensor.scalar_type()) {
    case at::kInt:
      return DigestKind::words;
    case at::kByte:
    case at::kChar:
    case at::kBool:
      return DigestKind::bytes;
    default:
      return has_rest ? DigestKind::split : static_cast<DigestKind>(float_dtype(where, tensor));
  }
}

// Called by shardcore's own code alone, with lists of equal length on one device.
at::Tensor digest(const py::handle& tensors, const std::vector<uint64_t>& keys, const std::vector<uint64_t>& first_blocks,
                  const py::handle& rests) {
  constexpr const char* op = "digest";
  const TensorList list = tensors_of(op, "tensors", tensors), rest_list = tensors_of(op, "rests", rests, true);
  const auto count = static_cast<int64_t>(list.size());
  const at::Device device = list.empty() ? at::Device(at::kCPU) : list[0].device();
  TORCH_INTERNAL_ASSERT(keys.size() == list.size() && first_blocks.size() == list.size() && rest_list.size() == list.size());
  std::vector<DigestSegment> segments;
  for (size_t i = 0; i < list.size(); ++i) {
    const Where where{op, "tensors", static_cast<int64_t>(i)};
    const at::Tensor& rest = rest_list[i];
    check_layout(where, list[i], device);
    segments.push_back({list[i].const_data_ptr(), rest.defined() ? rest.const_data_ptr() : nullptr, list[i].numel(), keys[i],
                        first_blocks[i], digest_kind(where, list[i], rest.defined())});
  }
  const at::Tensor out = at::zeros({count}, at::TensorOptions().dtype(at::kLong).device(device));
  auto* const sums = static_cast<uint64_t*>(out.data_ptr());
  const py::gil_scoped_release no_gil;
#ifdef SHARDCORE_WITH_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    const DeviceTable<DigestSegment> table(segments, kDigestChunk, device);
    if (table.num_chunks != 0) digest_cuda(table.get(), table.num_chunks, sums, current_stream(device));
    return out;
  }
#endif
  digest_cpu(segments.data(), count, sums, torch_executor());
  return out;
}

// Whether a copy of a tensor is to have the strides of `like`, and not to be contiguous.
bool sets_order(const at::Tensor& like, const at::Tensor& tensor) {
  return is_plain(like) && like.layout() == at::kStrided && !like.is_contiguous() && like.sizes() == tensor.sizes() &&
         is_dense(like);
}

// What the optimizers read gradients through: one call for the list, since two checks per tensor in Python take longer.
py::list dense(const py::object& tensors, const py::object& likes) {
  const TensorList list = tensors_of("dense", "tensors", tensors);
  const TensorList like_list = likes.is_none() ? list : tensors_of("dense", "likes", likes);
  py::list out(tensors);
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < list.size(); ++i) {
    const at::Tensor &tensor = list[i], &like = like_list[i];
    const bool ordered = sets_order(like, tensor);
    if (!tensor.is_neg() && (ordered ? same_order(tensor, like) : tensor.is_contiguous())) continue;
    check_memory({"dense", "tensors", static_cast<int64_t>(i)}, tensor);
    out[i] = py::cast(ordered ? at::empty_strided(like.sizes(), like.strides(), tensor.options()).copy_(tensor)
                              : tensor.resolve_neg().contiguous());
  }
  return out;
}

// == would compare tensors. Anything but a list or tuple gives False.
bool same_objects(const py::handle& a, const py::handle& b) {
  const auto is_list = [](const py::handle& object) { return PyList_Check(object.ptr()) || PyTuple_Check(object.ptr()); };
  if (!is_list(a) || !is_list(b)) return false;
  PyObject* const* const first = PySequence_Fast_ITEMS(a.ptr());
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(a.ptr());
  return count == PySequence_Fast_GET_SIZE(b.ptr()) && std::equal(first, first + count, PySequence_Fast_ITEMS(b.ptr()));
}

}  // namespace

void bind_ops(py::module_& module) {
  module.def("digest", &digest, py::arg("tensors"), py::arg("keys"), py::arg("first_blocks"), py::arg("rests"));
  module.def("sq_norm", &sq_norm, py::arg("tensors"));
  module.def("sq_norm_add", &sq_norm_add, py::arg("parts"));
  module.def("norm_from_sq", &norm_from_sq_of, py::arg("total"));
  module.def("clip_coefficient", &clip_coefficient, py::arg("norm"), py::arg("max_norm"));
  module.def("clipped_scale", &clipped_scale_of, py::arg("scale"), py::arg("norm"), py::arg("max_norm"));
  module.def("ordered_sum", &ordered_sum, py::arg("pieces"), py::arg("world_size"), py::arg("scale"), py::arg("out"),
             py::arg("accumulate") = false, py::arg("own") = py::none(), py::arg("rank") = 0);
  module.def("dense", &dense, py::arg("tensors"), py::arg("likes") = py::none());
  module.def("is_dense", &is_dense, py::arg("tensor"));
  module.def("same_objects", &same_objects, py::arg("a"), py::arg("b"));
}

}  // namespace shardcore::bind
