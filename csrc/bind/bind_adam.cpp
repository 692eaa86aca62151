// AdamHyper and AdamStepper.
#include <algorithm>
#include <cmath>
#include <optional>

#include "adam/adam_cpu.h"
#include "adam/make_scalars.h"
#include "bind/checks.h"
#include "bind/cuda_table.h"
#include "bind/initialized.h"
#include "core/overlap.h"
#include "core/tile.h"

#ifdef SHARDCORE_WITH_CUDA
#include "adam/adam_cuda.h"
#endif

namespace shardcore::bind {

struct __attribute__((visibility("hidden"))) PyAdamHyper {
  AdamScalars scalars;
};

namespace {

constexpr const char* kOp = "AdamStepper.step";

PyAdamHyper make_hyper(const py::handle& lr, const py::handle& beta1, const py::handle& beta2, const py::handle& eps,
                       const py::handle& weight_decay, const py::handle& step, const py::handle& grad_scale,
                       const py::handle& adam_w_mode, const py::handle& bias_correction, const py::handle& maximize,
                       const py::handle& stochastic_rounding, const py::handle& seed) {
  const auto at = [](const char* name) { return Where{"AdamHyper", name}; };
  const auto size = [&](const char* name, const py::handle& object) {
    const double value = number_of(at(name), object);
    if (!(value >= 0.0 && std::isfinite(value))) value_error(at(name), value, "; expected a finite number, 0 or more");
    return value;
  };
  const auto beta = [&](const char* name, const py::handle& object) {
    const double value = number_of(at(name), object);
    if (!(value >= 0.0 && value < 1.0)) value_error(at(name), value, "; expected a number in [0, 1)");
    return value;
  };
  AdamHyper hyper;
  hyper.lr = size("lr", lr);
  hyper.beta1 = beta("beta1", beta1);
  hyper.beta2 = beta("beta2", beta2);
  hyper.eps = size("eps", eps);
  hyper.weight_decay = size("weight_decay", weight_decay);
  hyper.grad_scale = number_of(at("grad_scale"), grad_scale);
  hyper.step = int_of(at("step"), step);
  if (hyper.step < 1) value_error(at("step"), hyper.step, "; expected 1 or more (the first step is 1)");
  hyper.adam_w_mode = bool_of(at("adam_w_mode"), adam_w_mode);
  hyper.bias_correction = bool_of(at("bias_correction"), bias_correction);
  hyper.maximize = bool_of(at("maximize"), maximize);
  hyper.stochastic_rounding = bool_of(at("stochastic_rounding"), stochastic_rounding);
  if (!PyLong_Check(seed.ptr())) type_error(at("seed"), "type ", Py_TYPE(seed.ptr())->tp_name, "; expected an int");
  hyper.seed = PyLong_AsUnsignedLongLongMask(seed.ptr());
  return {make_adam_scalars(hyper)};
}

std::vector<AdamScalars> scalars_of(const py::handle& sequence) {
  const py::object items = items_of({kOp, "hypers"}, sequence, "a list of AdamHyper");
  std::vector<AdamScalars> scalars;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
    const py::handle item = PySequence_Fast_GET_ITEM(items.ptr(), i);
    if (!py::isinstance<PyAdamHyper>(item)) {
      type_error({kOp, "hypers", i}, "type ", Py_TYPE(item.ptr())->tp_name, "; expected AdamHyper");
    }
    scalars.push_back(item.cast<const PyAdamHyper&>().scalars);
  }
  return scalars;
}

struct Key {
  uint64_t param_index;
  int64_t first_element;
};

std::vector<Key> keys_of(const py::handle& sequence, size_t count) {
  const py::object items = items_of({kOp, "keys"}, sequence, "a list of pairs of int");
  check_count(kOp, "keys", static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr())), "params", count);
  std::vector<Key> keys;
  keys.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const py::handle item = PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i));
    try {
      const auto [index, first] = item.cast<std::pair<int64_t, int64_t>>();
      if (index >= 0 && first >= 0) {
        keys.push_back({static_cast<uint64_t>(index), first});
        continue;
      }
    } catch (const py::cast_error&) {
    }
    value_error({kOp, "keys", static_cast<int64_t>(i)}, py::repr(item).cast<std::string>(),
                "; expected (parameter index, index of element 0 in the whole parameter), both 0 or more");
  }
  return keys;
}

std::vector<int32_t> hyper_indices_of(const py::handle& sequence, size_t count, size_t num_hypers) {
  const py::object items = items_of({kOp, "hyper_index"}, sequence, "a list of int");
  check_count(kOp, "hyper_index", static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr())), "params", count);
  std::vector<int32_t> indices(count);
  for (size_t i = 0; i < count; ++i) {
    const Where where{kOp, "hyper_index", static_cast<int64_t>(i)};
    const int64_t index = int_of(where, PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i)));
    if (index < 0 || index >= static_cast<int64_t>(num_hypers)) {
      value_error(where, index, "; expected an index of hypers, which has ", num_hypers, " items");
    }
    indices[i] = static_cast<int32_t>(index);
  }
  return indices;
}

// The lists of one call. Holds references, so tensors stay while the GIL is released.
struct AdamLists {
  std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs, masters, max_exp_avg_sqs, exp_avg_scales, exp_avg_sq_scales;
};

// The dtypes of a moment kept as each StateDType.
struct MomentDTypes {
  StateDType kind;
  at::ScalarType exp_avg, exp_avg_sq;
};
constexpr MomentDTypes kMomentDTypes[] = {{StateDType::f32, at::kFloat, at::kFloat},
                                          {StateDType::bf16, at::kBFloat16, at::kBFloat16},
                                          {StateDType::q8, at::kChar, at::kByte}};

const MomentDTypes& moment_dtypes(const Where& where, at::ScalarType exp_avg) {
  for (const MomentDTypes& dtypes : kMomentDTypes) {
    if (dtypes.exp_avg == exp_avg) return dtypes;
  }
  type_error(where, "dtype ", exp_avg, "; expected Float, BFloat16 or Char (8-bit codes)");
}

void check_dtype(const Where& where, const at::Tensor& tensor, at::ScalarType expected, const char* why) {
  if (tensor.scalar_type() != expected)
    type_error(where, "dtype ", tensor.scalar_type(), "; expected ", expected, " (", why, ")");
}

// Checks index i of all lists and returns it as plain data.
AdamSegment segment_of(const AdamLists& lists, size_t i, at::Device device) {
  const auto index = static_cast<int64_t>(i);
  AdamSegment t{};
  const at::Tensor& param = lists.params[i];
  const Where param_at{kOp, "params", index};
  check_layout(param_at, param, device);
  t.numel = param.numel();
  t.param_dtype = float_dtype(param_at, param);
  const auto data = [&](const char* name, const at::Tensor& tensor) {
    const Where where{kOp, name, index};
    check_layout(where, tensor, device);
    check_numel(where, tensor, t.numel, "params");
    return where;
  };
  const auto given = [&](const std::vector<at::Tensor>& list) { return !list.empty() && list[i].defined(); };
  t.grad_dtype = float_dtype(data("grads", lists.grads[i]), lists.grads[i]);
  t.param = param.data_ptr();
  t.grad = lists.grads[i].const_data_ptr();

  const at::Tensor& exp_avg = lists.exp_avgs[i];
  const at::Tensor& exp_avg_sq = lists.exp_avg_sqs[i];
  const MomentDTypes& dtypes = moment_dtypes(data("exp_avgs", exp_avg), exp_avg.scalar_type());
  check_dtype(data("exp_avg_sqs", exp_avg_sq), exp_avg_sq, dtypes.exp_avg_sq, "as exp_avgs says");
  t.state_dtype = dtypes.kind;
  t.exp_avg = exp_avg.data_ptr();
  t.exp_avg_sq = exp_avg_sq.data_ptr();
  const auto scale = [&](const char* name, const std::vector<at::Tensor>& list) -> float* {
    const Where where{kOp, name, index};
    if (given(list) != (t.state_dtype == StateDType::q8)) {
      value_error(where, given(list) ? "a tensor" : "None", "; expected ", given(list) ? "None" : "a tensor",
                  " (scales go with 8-bit codes)");
    }
    if (!given(list)) return nullptr;
    check_layout(where, list[i], device);
    check_f32(where, list[i]);
    if (list[i].numel() != blocks_of(t.numel)) {
      value_error(where, list[i].numel(), " elements; expected ", blocks_of(t.numel), " (one for 256 elements of params)");
    }
    return static_cast<float*>(list[i].data_ptr());
  };
  t.exp_avg_scale = scale("exp_avg_scales", lists.exp_avg_scales);
  t.exp_avg_sq_scale = scale("exp_avg_sq_scales", lists.exp_avg_sq_scales);

  if (given(lists.max_exp_avg_sqs)) {
    const at::Tensor& largest = lists.max_exp_avg_sqs[i];
    check_f32(data("max_exp_avg_sqs", largest), largest);
    if (t.state_dtype != StateDType::f32) {
      value_error({kOp, "max_exp_avg_sqs", index}, "a tensor; expected None (amsgrad needs float32 moments)");
    }
    t.max_exp_avg_sq = static_cast<float*>(largest.data_ptr());
  }
  if (given(lists.masters)) {
    const at::Tensor& master = lists.masters[i];
    const Where where = data("masters", master);
    t.master = master.data_ptr();
    t.master_kind = master.scalar_type() == at::kShort ? Master::split : Master::f32;
    if (t.master_kind == Master::split && t.param_dtype != DType::bf16) {
      type_error(where, "dtype Short (a split master) for a parameter of ", param.scalar_type(),
                 "; expected BFloat16 parameters");
    }
    if (t.master_kind == Master::f32) check_f32(where, master);
    if (t.master == t.param && t.param_dtype == DType::f32) {  // a float32 parameter given as its own master
      t.master = nullptr;
      t.master_kind = Master::none;
    }
  }
  const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  t.aligned16 = ((address(t.param) | address(t.grad) | address(t.exp_avg) | address(t.exp_avg_sq) | address(t.master) |
                  address(t.max_exp_avg_sq)) &
                 15u) == 0;
  return t;
}

// Refuses tensors that share memory which the step writes.
void check_overlap(const std::vector<AdamSegment>& segments, OverlapCheck& overlap) {
  constexpr const char* kNames[] = {"params",  "grads",           "exp_avgs",       "exp_avg_sqs",
                                    "masters", "max_exp_avg_sqs", "exp_avg_scales", "exp_avg_sq_scales"};
  const auto count = static_cast<int64_t>(segments.size());
  std::vector<MemoryRange> written, read;
  written.reserve(3 * segments.size());
  read.reserve(segments.size());
  for (int64_t i = 0; i < count; ++i) {
    const AdamSegment& t = segments[static_cast<size_t>(i)];
    if (t.numel == 0) continue;
    const auto add = [&](int64_t name, const void* data, int64_t size_bytes) {
      if (data != nullptr) (name == 1 ? read : written).push_back(memory_range(data, size_bytes, name * count + i));
    };
    add(0, t.param, t.numel * itemsize(t.param_dtype));
    add(1, t.grad, t.numel * itemsize(t.grad_dtype));
    add(2, t.exp_avg, t.numel * itemsize(t.state_dtype));
    add(3, t.exp_avg_sq, t.numel * itemsize(t.state_dtype));
    add(4, t.master, t.numel * (t.master_kind == Master::split ? 2 : 4));
    add(5, t.max_exp_avg_sq, t.numel * 4);
    add(6, t.exp_avg_scale, blocks_of(t.numel) * 4);
    add(7, t.exp_avg_sq_scale, blocks_of(t.numel) * 4);
  }
  if (const auto found = overlap.find(std::move(written), std::move(read))) {
    const auto at = [&](int64_t tag) { return Where{kOp, kNames[tag / count], tag % count}; };
    refuse_shared(at(found->second_tag), at(found->first_tag));
  }
}

// Why the step of this tensor needs random bits, or null.
const char* why_random(const AdamSegment& t, const AdamScalars& s) {
  if (t.state_dtype != StateDType::f32) return "has moments that are rounded stochastically";
  return rounds_weights_stochastically(t, s.stochastic_rounding != 0) ? "is bfloat16 without a master, rounded stochastically"
                                                                      : nullptr;
}

}  // namespace

class __attribute__((visibility("hidden"))) AdamStepper {
 public:
  void step(const py::handle& params, const py::handle& grads, const py::handle& exp_avgs, const py::handle& exp_avg_sqs,
            const py::handle& hypers, const py::handle& hyper_index, const py::object& masters,
            const py::object& max_exp_avg_sqs, const py::object& keys, const py::object& exp_avg_scales,
            const py::object& exp_avg_sq_scales) {
    AdamLists lists;
    lists.params = tensors_of(kOp, "params", params);
    const size_t count = lists.params.size();
    const auto read = [&](const char* name, const py::handle& sequence, bool optional) {
      std::vector<at::Tensor> tensors;
      if (optional && sequence.is_none()) return tensors;
      tensors = tensors_of(kOp, name, sequence, optional);
      check_count(kOp, name, tensors.size(), "params", count);
      return tensors;
    };
    lists.grads = read("grads", grads, false);
    lists.exp_avgs = read("exp_avgs", exp_avgs, false);
    lists.exp_avg_sqs = read("exp_avg_sqs", exp_avg_sqs, false);
    lists.masters = read("masters", masters, true);
    lists.max_exp_avg_sqs = read("max_exp_avg_sqs", max_exp_avg_sqs, true);
    lists.exp_avg_scales = read("exp_avg_scales", exp_avg_scales, true);
    lists.exp_avg_sq_scales = read("exp_avg_sq_scales", exp_avg_sq_scales, true);
    const std::vector<AdamScalars> scalars = scalars_of(hypers);
    const std::vector<int32_t> indices = hyper_indices_of(hyper_index, count, scalars.size());
    const std::vector<Key> key_list = keys.is_none() ? std::vector<Key>() : keys_of(keys, count);
    if (count == 0) return;

    const at::Device device = lists.params[0].device();
    check_device_supported({kOp, "params", 0}, device);
    std::vector<AdamSegment> segments(count);
    for (size_t i = 0; i < count; ++i) {
      AdamSegment& t = segments[i] = segment_of(lists, i, device);
      t.hyper_index = indices[i];
      if (!key_list.empty()) {
        t.param_index = key_list[i].param_index;
        t.first_element = key_list[i].first_element;
      } else if (const char* why = why_random(t, scalars[static_cast<size_t>(t.hyper_index)])) {
        value_error({kOp, "keys"}, "None; expected a key for each of params (params[", i, "] ", why, ")");
      }
      if (t.state_dtype == StateDType::q8 && t.first_element % kBlock != 0) {
        value_error({kOp, "keys", static_cast<int64_t>(i)}, "first element ", t.first_element,
                    "; expected a multiple of 256 (8-bit blocks must not be cut)");
      }
    }
    check_overlap(segments, overlap_);
    for (const at::Tensor& param : lists.params) mark_written(param);  // states are not part of any graph
    const py::gil_scoped_release no_gil;
    if (device.is_cpu()) adam_cpu(segments.data(), static_cast<int64_t>(count), scalars.data(), torch_executor());
#ifdef SHARDCORE_WITH_CUDA
    if (device.is_cuda()) step_cuda(std::move(segments), scalars, device);
#endif
  }

  int64_t table_builds() const { return table_builds_; }

 private:
#ifdef SHARDCORE_WITH_CUDA
  void step_cuda(std::vector<AdamSegment> segments, const std::vector<AdamScalars>& scalars, at::Device device) {
    const c10::cuda::CUDAGuard guard(device);
    const cudaStream_t stream = current_stream(device);
    if (segments != segments_ || device != table_device_ || stream != table_stream_) {
      table_ = DeviceTable<AdamSegment>(segments, kAdamChunk, device);
      segments_ = std::move(segments);
      table_device_ = device;
      table_stream_ = stream;
      ++table_builds_;
    }
    if (table_.num_chunks == 0) return;
    const bool reduced = std::any_of(segments_.begin(), segments_.end(), [](const AdamSegment& t) {
      return t.state_dtype != StateDType::f32 || t.master_kind == Master::split;
    });
    const at::Tensor scalars_bytes = upload(scalars.data(), scalars.size() * sizeof(AdamScalars), device);
    adam_cuda(table_.segments(), table_.chunks(), table_.num_chunks,
              static_cast<const AdamScalars*>(scalars_bytes.const_data_ptr()), reduced, stream);
  }

  std::vector<AdamSegment> segments_;  // what table_ was made from
  DeviceTable<AdamSegment> table_;
  std::optional<at::Device> table_device_;
  cudaStream_t table_stream_ = nullptr;
#endif
  OverlapCheck overlap_;
  int64_t table_builds_ = 0;
};

void bind_adam(py::module_& module) {
  py::class_<PyAdamHyper>(module, "AdamHyper")
      .def(py::init(&make_hyper), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("step"), py::arg("grad_scale") = 1.0, py::arg("adam_w_mode") = true,
           py::arg("bias_correction") = true, py::arg("maximize") = false, py::arg("stochastic_rounding") = false,
           py::arg("seed") = 0);
  py::class_<AdamStepper>(module, "AdamStepper")
      .def(py::init<>())
      .def("step", &AdamStepper::step, py::arg("params"), py::arg("grads"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"),
           py::arg("hypers"), py::arg("hyper_index"), py::arg("masters") = py::none(), py::arg("max_exp_avg_sqs") = py::none(),
           py::arg("keys") = py::none(), py::arg("exp_avg_scales") = py::none(), py::arg("exp_avg_sq_scales") = py::none())
      .def_property_readonly("table_builds", &AdamStepper::table_builds);
}

}  // namespace shardcore::bind
