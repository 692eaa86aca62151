#include "bind/adam_lists.h"

#include "core/tile.h"

namespace shardcore::bind {

std::vector<AdamKey> keys_of(const py::handle& sequence, size_t count) {
  const py::object items = items_of({kStepOp, "keys"}, sequence, "a list of pairs of int");
  check_count(kStepOp, "keys", static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr())), "params", count);
  std::vector<AdamKey> keys;
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
    value_error({kStepOp, "keys", static_cast<int64_t>(i)}, py::repr(item).cast<std::string>(),
                "; expected (parameter index, index of element 0 in the whole parameter), both 0 or more");
  }
  return keys;
}

std::vector<int32_t> hyper_indices_of(const py::handle& sequence, size_t count, size_t num_hypers) {
  const py::object items = items_of({kStepOp, "hyper_index"}, sequence, "a list of int");
  check_count(kStepOp, "hyper_index", static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr())), "params", count);
  std::vector<int32_t> indices(count);
  for (size_t i = 0; i < count; ++i) {
    const Where where{kStepOp, "hyper_index", static_cast<int64_t>(i)};
    const int64_t index = int_of(where, PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i)));
    if (index < 0 || index >= static_cast<int64_t>(num_hypers)) {
      value_error(where, index, "; expected an index of hypers, which has ", num_hypers, " items");
    }
    indices[i] = static_cast<int32_t>(index);
  }
  return indices;
}

namespace {

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

}  // namespace

AdamSegment segment_of(const AdamLists& lists, size_t i, at::Device device) {
  const auto index = static_cast<int64_t>(i);
  AdamSegment t{};
  const at::Tensor& param = lists.params[i];
  const Where param_at{kStepOp, "params", index};
  check_layout(param_at, param, device);
  t.numel = param.numel();
  t.param_dtype = float_dtype(param_at, param);
  const auto data = [&](const char* name, const at::Tensor& tensor) {
    const Where where{kStepOp, name, index};
    check_layout(where, tensor, device);
    if (tensor.sizes() != param.sizes())
      value_error(where, "shape ", tensor.sizes(), "; expected ", param.sizes(), " (as params)");
    return where;
  };
  const auto given = [&](const TensorList& list) { return !list.empty() && list[i].defined(); };
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
  const auto scale = [&](const char* name, const TensorList& list) -> float* {
    const Where where{kStepOp, name, index};
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
      value_error({kStepOp, "max_exp_avg_sqs", index}, "a tensor; expected None (amsgrad needs float32 moments)");
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

void check_overlap(const std::vector<AdamSegment>& segments, const std::vector<int64_t*>& counts, const int64_t* skipped,
                   OverlapCheck& overlap) {
  constexpr const char* kNames[] = {
      "params",          "grads",          "exp_avgs",          "exp_avg_sqs",        "masters",
      "max_exp_avg_sqs", "exp_avg_scales", "exp_avg_sq_scales", "device_step.counts", "device_step.skipped"};
  constexpr int kIndexBits = 40;  // of a tag; above them the name
  const auto count = static_cast<int64_t>(segments.size());
  std::vector<MemoryRange> written, read;
  written.reserve(3 * segments.size());
  read.reserve(segments.size());
  const auto add = [&](int64_t name, int64_t i, const void* data, int64_t size_bytes) {
    if (data != nullptr) (name == 1 ? read : written).push_back(memory_range(data, size_bytes, (name << kIndexBits) | i));
  };
  for (int64_t i = 0; i < count; ++i) {
    const AdamSegment& t = segments[static_cast<size_t>(i)];
    if (!counts.empty()) add(8, i, counts[static_cast<size_t>(i)], sizeof(int64_t));
    if (t.numel == 0) continue;
    add(0, i, t.param, t.numel * itemsize(t.param_dtype));
    add(1, i, t.grad, t.numel * itemsize(t.grad_dtype));
    add(2, i, t.exp_avg, t.numel * itemsize(t.state_dtype));
    add(3, i, t.exp_avg_sq, t.numel * itemsize(t.state_dtype));
    add(4, i, t.master, t.numel * (t.master_kind == Master::split ? 2 : 4));
    add(5, i, t.max_exp_avg_sq, t.numel * 4);
    add(6, i, t.exp_avg_scale, blocks_of(t.numel) * 4);
    add(7, i, t.exp_avg_sq_scale, blocks_of(t.numel) * 4);
  }
  add(9, count, skipped, sizeof(int64_t));
  if (const auto found = overlap.find(std::move(written), std::move(read))) {
    const auto at = [&](int64_t tag) {
      const int64_t name = tag >> kIndexBits, i = tag & ((int64_t{1} << kIndexBits) - 1);
      return Where{kStepOp, kNames[name], i < count ? i : -1};
    };
    refuse_shared(at(found->second_tag), at(found->first_tag));
  }
}

const char* why_random(const AdamSegment& t, bool stochastic_rounding) {
  if (t.state_dtype != StateDType::f32) return "has moments that are rounded stochastically";
  return rounds_weights_stochastically(t, stochastic_rounding) ? "is bfloat16 without a master, rounded stochastically"
                                                               : nullptr;
}

}  // namespace shardcore::bind
