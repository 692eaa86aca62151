#include "bind/adam_lists.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "core/overlap.h"
#include "core/tile.h"

namespace shardcore::bind {
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

// Begins to read a tensor that is checked some calls later: the checks of many small tensors wait for memory most of the time.
void prefetch(const TensorList& list, size_t i) {
  constexpr size_t kAhead = 4;
  if (i + kAhead >= list.size()) return;
  const auto* const impl = reinterpret_cast<const char*>(list[i + kAhead].unsafeGetTensorImpl());
  for (size_t line = 0; line < sizeof(c10::TensorImpl); line += 64) __builtin_prefetch(impl + line);
}

// Checks index i of all lists, one list after the other, and gathers it as plain data.
class SegmentReader {
 public:
  SegmentReader(const AdamLists& lists, const at::Tensor& grad, size_t i, at::Device device)
      : lists_(lists), i_(i), device_(device), param_(lists.params[i]), grad_(grad) {}

  AdamSegment read() {
    read_param();
    read_grad();
    read_moments();
    t_.exp_avg_scale = read_scale("exp_avg_scales", lists_.exp_avg_scales);
    t_.exp_avg_sq_scale = read_scale("exp_avg_sq_scales", lists_.exp_avg_sq_scales);
    if (given(lists_.max_exp_avg_sqs)) read_maximum();
    if (given(lists_.masters)) read_master();
    if (given(lists_.changed)) read_changed();
    t_.aligned16 = is_aligned16(t_.param, t_.grad, t_.exp_avg, t_.exp_avg_sq, t_.master, t_.max_exp_avg_sq, t_.changed);
    return t_;
  }

 private:
  Where at(const char* name) const { return {kStepOp, name, lists_.place_of(i_)}; }
  bool given(const TensorList& list) const { return !list.empty() && list[i_].defined(); }

  // What every tensor but a scale must be: memory of its own on this device, of the parameter's shape and order.
  Where check_shaped(const char* name, const at::Tensor& tensor) const {
    const Where where = at(name);
    check_dense(where, tensor, device_);
    if (tensor.sizes() != param_.sizes())
      value_error(where, "shape ", tensor.sizes(), "; expected ", param_.sizes(), " (as params)");
    if (!same_order(tensor, param_)) {
      value_error(where, "strides ", tensor.strides(), "; expected ", param_.strides(),
                  " (as params: an optimizer's load_state_dict(state_dict()) makes its states anew)");
    }
    return where;
  }

  void read_param() {
    const Where where = at("params");
    check_dense(where, param_, device_);
    t_.numel = param_.numel();
    t_.param_dtype = float_dtype(where, param_);
    t_.param = param_.data_ptr();
  }

  void read_grad() {
    t_.grad_dtype = float_dtype(check_shaped("grads", grad_), grad_);
    t_.grad = grad_.const_data_ptr();
  }

  void read_moments() {
    const at::Tensor& exp_avg = lists_.exp_avgs[i_];
    const at::Tensor& exp_avg_sq = lists_.exp_avg_sqs[i_];
    const MomentDTypes& dtypes = moment_dtypes(check_shaped("exp_avgs", exp_avg), exp_avg.scalar_type());
    check_dtype(check_shaped("exp_avg_sqs", exp_avg_sq), exp_avg_sq, dtypes.exp_avg_sq, "as exp_avgs says");
    t_.state_dtype = dtypes.kind;
    t_.exp_avg = exp_avg.data_ptr();
    t_.exp_avg_sq = exp_avg_sq.data_ptr();
  }

  // The scales of 8-bit codes; null for other moments, which have none.
  float* read_scale(const char* name, const TensorList& list) const {
    const Where where = at(name);
    if (given(list) != (t_.state_dtype == StateDType::q8)) {
      value_error(where, given(list) ? "a tensor" : "None", "; expected ", given(list) ? "None" : "a tensor",
                  " (scales go with 8-bit codes)");
    }
    if (!given(list)) return nullptr;
    const at::Tensor& scale = list[i_];
    check_layout(where, scale, device_);
    check_f32(where, scale);
    if (scale.numel() != blocks_of(t_.numel)) {
      value_error(where, scale.numel(), " elements; expected ", blocks_of(t_.numel), " (one for 256 elements of params)");
    }
    return static_cast<float*>(scale.data_ptr());
  }

  void read_maximum() {
    const at::Tensor& largest = lists_.max_exp_avg_sqs[i_];
    const Where where = check_shaped("max_exp_avg_sqs", largest);
    check_f32(where, largest);
    if (t_.state_dtype != StateDType::f32) value_error(where, "a tensor; expected None (amsgrad needs float32 moments)");
    t_.max_exp_avg_sq = static_cast<float*>(largest.data_ptr());
  }

  void read_master() {
    const at::Tensor& master = lists_.masters[i_];
    const Where where = check_shaped("masters", master);
    const bool split = master.scalar_type() == at::kShort;
    if (split && t_.param_dtype != DType::bf16) {
      type_error(where, "dtype Short (a split master) for a parameter of ", param_.scalar_type(),
                 "; expected BFloat16 parameters");
    }
    if (!split) check_f32(where, master);
    if (master.data_ptr() == t_.param && t_.param_dtype == DType::f32) return;  // a float32 parameter is its own master
    t_.master = master.data_ptr();
    t_.master_kind = split ? Master::split : Master::f32;
  }

  void read_changed() {
    const at::Tensor& bits = lists_.changed[i_];
    const Where where = at("changed");
    check_layout(where, bits, device_);
    check_dtype(where, bits, at::kByte, "a bit for each weight");
    if (t_.param_dtype == DType::f32) value_error(where, "a tensor; expected None (only 16-bit weights have bits)");
    if (bits.numel() != (t_.numel + 7) / 8) {
      value_error(where, bits.numel(), " elements; expected ", (t_.numel + 7) / 8, " (a bit for each element of params)");
    }
    t_.changed = static_cast<uint8_t*>(bits.data_ptr());
  }

  template <typename... Pointers>
  static bool is_aligned16(const Pointers*... data) {
    return ((reinterpret_cast<uintptr_t>(data) | ...) & 15u) == 0;
  }

  const AdamLists& lists_;
  const size_t i_;
  const at::Device device_;
  const at::Tensor& param_;
  const at::Tensor& grad_;
  AdamSegment t_{};
};

bool plain_float(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  return is_plain(tensor) && (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) &&
         tensor.layout() == at::kStrided;
}

PyAdamLists::ParamKind format_of(const at::Tensor& param) { return {param.scalar_type(), param.is_contiguous()}; }

// Returns the parameters' gradients: their own, or those given. Anything unusual gives None (the dtype and order of parameters
// included, on which masters and stochastic rounding depend): the caller then looks at every tensor, and copies or raises.
py::object plain_grads(const PyAdamLists& kept, const py::handle& idle_object, const std::optional<py::list>& given) {
  const TensorList idle = tensors_of("AdamLists.plain_grads", "idle", idle_object);
  for (size_t i = 0; i < idle.size(); ++i) {
    if (idle[i].grad().defined()) return py::none();
  }
  const TensorList& params = kept.lists.params;
  py::tuple grads(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    prefetch(params, i);
    const at::Tensor& param = params[i];
    PyObject* const item = given ? PyList_GET_ITEM(given->ptr(), static_cast<Py_ssize_t>(i)) : nullptr;
    if (item != nullptr && !THPVariable_Check(item)) return py::none();
    const at::Tensor& grad = item == nullptr ? param.grad() : THPVariable_Unpack(item);
    if (!grad.defined() || !plain_float(param) || !plain_float(grad) || format_of(param) != kept.param_kinds[i] ||
        grad.sizes() != param.sizes() || !same_order(grad, param) || param.device() != kept.device ||
        grad.device() != kept.device) {
      return py::none();
    }
    PyTuple_SET_ITEM(grads.ptr(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(grad));
  }
  return grads;
}

PyAdamLists make_adam_lists(const py::handle& params, const py::handle& exp_avgs, const py::handle& exp_avg_sqs,
                            const py::handle& hyper_index, const py::object& masters, const py::object& max_exp_avg_sqs,
                            const py::object& keys, const py::object& exp_avg_scales, const py::object& exp_avg_sq_scales) {
  PyAdamLists kept{adam_lists_of(params, exp_avgs, exp_avg_sqs, hyper_index, masters, max_exp_avg_sqs, keys, exp_avg_scales,
                                 exp_avg_sq_scales, py::none())};
  const TensorList& list = kept.lists.params;
  for (size_t i = 0; i < list.size(); ++i) kept.param_kinds.push_back(format_of(list[i]));
  if (!list.empty()) kept.device = list[0].device();
  return kept;
}

// The lists of a StateEntry's index.
constexpr std::array kStateLists = {&AdamLists::exp_avgs,        &AdamLists::exp_avg_sqs,    &AdamLists::masters,
                                    &AdamLists::max_exp_avg_sqs, &AdamLists::exp_avg_scales, &AdamLists::exp_avg_sq_scales};

StateEntry entry_of(const AdamLists& lists, size_t i, const py::handle& key, const py::handle& value) {
  StateEntry entry{py::reinterpret_borrow<py::object>(key), {}, -1};
  if (!THPVariable_Check(value.ptr())) {
    entry.value = py::reinterpret_borrow<py::object>(value);
    return entry;
  }
  const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
  for (size_t k = 0; k < kStateLists.size(); ++k) {
    const TensorList& list = lists.*kStateLists[k];
    if (!list.empty() && list[i].is_same(tensor)) entry.list = static_cast<int>(k);
  }
  return entry;
}

bool is_as_before(const StateEntry& entry, PyObject* key, PyObject* value) {
  return key == entry.key.ptr() && (entry.value ? value == entry.value.ptr() : THPVariable_Check(value));
}

std::vector<at::ScalarType> dtypes_of(const TensorList& list) {
  std::vector<at::ScalarType> dtypes(list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    prefetch(list, i);
    dtypes[i] = list[i].defined() ? list[i].scalar_type() : at::ScalarType::Undefined;
  }
  return dtypes;
}

// A dict as it is; an empty one for another kind of mapping, which is looked up from Python at each step.
py::dict dict_of(const py::handle& states) {
  return PyDict_Check(states.ptr()) ? py::reinterpret_borrow<py::dict>(states) : py::dict();
}

// Holds no state from now on, so that one which a user replaces, or moves away, frees its memory at once.
void release_states(PyAdamLists& kept, const py::handle& states) {
  const TensorList& params = kept.lists.params;
  std::unordered_map<PyObject*, size_t> index_of;
  for (size_t i = 0; i < params.size(); ++i) index_of[PyTuple_GET_ITEM(params.items(), static_cast<Py_ssize_t>(i))] = i;
  size_t num_found = 0, num_tensors = 0;
  for (const auto& [param, state] : dict_of(states)) {
    const auto found = index_of.find(param.ptr());
    const bool known = found != index_of.end() && PyDict_Check(state.ptr());
    kept.states.emplace_back(known ? static_cast<int64_t>(found->second) : -1, known ? PyDict_GET_SIZE(state.ptr()) : 0);
    if (!known) continue;
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(state)) {
      kept.entries.push_back(entry_of(kept.lists, found->second, key, value));
      if (kept.entries.back().list >= 0) ++num_found;
    }
  }
  kept.exp_avg_dtypes = dtypes_of(kept.lists.exp_avgs);
  kept.master_dtypes = dtypes_of(kept.lists.masters);
  for (const auto& list : kStateLists) {
    for (size_t i = 0; i < (kept.lists.*list).size(); ++i) num_tensors += (kept.lists.*list)[i].defined() ? 1 : 0;
    kept.lists.*list = {};
  }
  if (num_found != num_tensors) kept.states.clear();  // some are elsewhere: with_states finds nothing
}

// Returns the lists with the tensors that `states` has now, or nothing if more has changed there than tensors for others of
// their dtypes: the caller then looks at every state. What else a step reads of a tensor segment_of checks each time.
std::optional<PyAdamLists> with_states(const PyAdamLists& kept, const py::handle& states_object) {
  const py::dict states = dict_of(states_object);
  if (kept.states.empty() || states.size() != kept.states.size()) return std::nullopt;
  const TensorList& params = kept.lists.params;
  std::array<py::tuple, kStateLists.size()> made;
  auto known = kept.states.begin();
  auto entry = kept.entries.begin();
  for (const auto& [param, state] : states) {
    const auto [i, num_entries] = *known++;
    if (i < 0) continue;
    if (param.ptr() != PyTuple_GET_ITEM(params.items(), i) || !PyDict_Check(state.ptr()) ||
        PyDict_GET_SIZE(state.ptr()) != num_entries) {
      return std::nullopt;
    }
    Py_ssize_t place = 0;
    for (PyObject *key = nullptr, *value = nullptr; PyDict_Next(state.ptr(), &place, &key, &value); ++entry) {
      if (!is_as_before(*entry, key, value)) return std::nullopt;
      if (entry->list < 0) continue;
      py::tuple& list = made[static_cast<size_t>(entry->list)];
      if (list.empty()) list = py::tuple(params.size());
      PyTuple_SET_ITEM(list.ptr(), i, Py_NewRef(value));
    }
  }
  std::optional<PyAdamLists> now(std::in_place);
  now->lists.params = params;
  now->lists.hyper_index = kept.lists.hyper_index;
  now->lists.keys = kept.lists.keys;
  for (size_t k = 0; k < made.size(); ++k) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(made[k].ptr()); ++i) {
      if (PyTuple_GET_ITEM(made[k].ptr(), i) == nullptr) PyTuple_SET_ITEM(made[k].ptr(), i, Py_NewRef(Py_None));
    }
    now->lists.*kStateLists[k] = TensorList(std::move(made[k]));
  }
  // On these two the options of a group depend.
  if (dtypes_of(now->lists.exp_avgs) != kept.exp_avg_dtypes) return std::nullopt;
  if (dtypes_of(now->lists.masters) != kept.master_dtypes) return std::nullopt;
  return now;
}

// Null before __init__.
PyAdamLists* lists_of(PyObject* self) {
  auto place = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
  return place.holder_constructed() ? place.value_ptr<PyAdamLists>() : nullptr;
}

// Makes tensors and values visible to Python's cycle collector: an attribute of a parameter may hold the owner of these lists.
void make_collectable(PyHeapTypeObject* heap_type) {
  PyTypeObject& type = heap_type->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
    Py_VISIT(Py_TYPE(self));
    if (const PyAdamLists* const kept = lists_of(self)) {
      for (const TensorList* list : kept->lists.all()) Py_VISIT(list->items());
      for (const StateEntry& entry : kept->entries) Py_VISIT(entry.value.ptr());
    }
    return 0;
  };
  type.tp_clear = [](PyObject* self) -> int {
    if (PyAdamLists* const kept = lists_of(self)) *kept = {};
    return 0;
  };
}

}  // namespace

AdamLists adam_lists_of(const py::handle& params, const py::handle& exp_avgs, const py::handle& exp_avg_sqs,
                        const py::handle& hyper_index, const py::object& masters, const py::object& max_exp_avg_sqs,
                        const py::object& keys, const py::object& exp_avg_scales, const py::object& exp_avg_sq_scales,
                        const py::object& changed) {
  AdamLists lists;
  lists.params = tensors_of(kStepOp, "params", params);
  const size_t count = lists.params.size();
  const auto read = [&](const char* name, const py::handle& sequence, bool optional) {
    if (optional && sequence.is_none()) return TensorList();
    TensorList tensors = tensors_of(kStepOp, name, sequence, optional);
    check_count(kStepOp, name, tensors.size(), "params", count);
    return tensors;
  };
  lists.exp_avgs = read("exp_avgs", exp_avgs, false);
  lists.exp_avg_sqs = read("exp_avg_sqs", exp_avg_sqs, false);
  lists.masters = read("masters", masters, true);
  lists.max_exp_avg_sqs = read("max_exp_avg_sqs", max_exp_avg_sqs, true);
  lists.exp_avg_scales = read("exp_avg_scales", exp_avg_scales, true);
  lists.exp_avg_sq_scales = read("exp_avg_sq_scales", exp_avg_sq_scales, true);
  lists.changed = read("changed", changed, true);
  lists.hyper_index = hyper_index.cast<std::vector<int64_t>>();
  if (keys.is_none()) return lists;
  for (const auto& [index, first] : keys.cast<std::vector<std::pair<uint64_t, int64_t>>>())
    lists.keys.push_back({index, first});
  return lists;
}

AdamSegment segment_of(const AdamLists& lists, const TensorList& grads, size_t i, at::Device device) {
  for (const TensorList* list : {&lists.params, &grads, &lists.exp_avgs, &lists.exp_avg_sqs}) prefetch(*list, i);
  return SegmentReader(lists, grads[i], i, device).read();
}

void check_overlap(const AdamLists& lists, const std::vector<AdamSegment>& segments) {
  enum Name { params, grads, exp_avgs, exp_avg_sqs, masters, max_exp_avg_sqs, exp_avg_scales, exp_avg_sq_scales, changed };
  constexpr const char* kNames[] = {"params",          "grads",          "exp_avgs",          "exp_avg_sqs", "masters",
                                    "max_exp_avg_sqs", "exp_avg_scales", "exp_avg_sq_scales", "changed"};
  std::vector<MemoryRange> ranges;
  ranges.reserve(4 * segments.size());
  const auto add = [&](Name name, size_t i, const void* data, int64_t size_bytes) {
    if (data == nullptr) return;
    const auto begin = reinterpret_cast<uintptr_t>(data);
    ranges.push_back({begin, begin + static_cast<uintptr_t>(size_bytes), {name, i}, name != grads});
  };
  for (size_t i = 0; i < segments.size(); ++i) {
    const AdamSegment& t = segments[i];
    if (t.numel == 0) continue;
    add(params, i, t.param, t.numel * itemsize(t.param_dtype));
    add(grads, i, t.grad, t.numel * itemsize(t.grad_dtype));
    add(exp_avgs, i, t.exp_avg, t.numel * itemsize(t.state_dtype));
    add(exp_avg_sqs, i, t.exp_avg_sq, t.numel * itemsize(t.state_dtype));
    add(masters, i, t.master, t.numel * (t.master_kind == Master::split ? 2 : 4));
    add(max_exp_avg_sqs, i, t.max_exp_avg_sq, t.numel * 4);
    add(exp_avg_scales, i, t.exp_avg_scale, blocks_of(t.numel) * 4);
    add(exp_avg_sq_scales, i, t.exp_avg_sq_scale, blocks_of(t.numel) * 4);
    add(changed, i, t.changed, (t.numel + 7) / 8);
  }
  if (const auto found = find_shared(std::move(ranges))) {
    const auto& [first, second] = *found;
    // A parameter that is there twice shares all its memory; the error says so, and not which of its tensors was found.
    const bool twice = first.index != second.index && segments[first.index].param == segments[second.index].param;
    const auto where = [&](const MemoryOwner& owner) {
      return Where{kStepOp, kNames[twice ? params : owner.list], lists.place_of(owner.index)};
    };
    refuse_shared(where(second), where(first));
  }
}

void bind_adam_lists(py::module_& module) {
  py::class_<PyAdamLists>(module, "AdamLists", py::custom_type_setup(make_collectable))
      .def(py::init(&make_adam_lists), py::arg("params"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"), py::arg("hyper_index"),
           py::arg("masters") = py::none(), py::arg("max_exp_avg_sqs") = py::none(), py::arg("keys") = py::none(),
           py::arg("exp_avg_scales") = py::none(), py::arg("exp_avg_sq_scales") = py::none())
      .def("plain_grads", &plain_grads, py::arg("idle"), py::arg("given") = py::none())
      .def("release_states", &release_states, py::arg("states"))
      .def("with_states", &with_states, py::arg("states"));
}

}  // namespace shardcore::bind
