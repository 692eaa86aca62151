// The lists of tensors of one Adam call: read from Python, checked, as plain data.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "adam/adam_cpu.h"
#include "adam/adam_segment.h"
#include "bind/checks.h"

namespace shardcore::bind {

inline constexpr const char* kStepOp = "AdamStepper.step";

// The random key of a tensor: its parameter, and which of that one's elements is its first.
struct AdamKey {
  uint64_t param_index;
  int64_t first_element;
};

// All that the steps of one list of tensors have in common: every list but the gradients.
struct __attribute__((visibility("hidden"))) AdamLists {
  TensorList params, exp_avgs, exp_avg_sqs, masters, max_exp_avg_sqs, exp_avg_scales, exp_avg_sq_scales, changed;
  std::vector<int64_t> hyper_index;
  std::vector<AdamKey> keys;  // empty: none

  // How errors number index i: as its parameter, which is another one where parameters before it have no gradient.
  int64_t place_of(size_t i) const { return static_cast<int64_t>(keys.empty() ? i : keys[i].param_index); }

  std::array<const TensorList*, 8> all() const {
    return {&params, &exp_avgs, &exp_avg_sqs, &masters, &max_exp_avg_sqs, &exp_avg_scales, &exp_avg_sq_scales, &changed};
  }
};

// Reads Python's lists: types and lengths. The tensors themselves may change from step to step: segment_of checks them.
AdamLists adam_lists_of(const py::handle& params, const py::handle& exp_avgs, const py::handle& exp_avg_sqs,
                        const py::handle& hyper_index, const py::object& masters, const py::object& max_exp_avg_sqs,
                        const py::object& keys, const py::object& exp_avg_scales, const py::object& exp_avg_sq_scales,
                        const py::object& changed);

// Checks index i of all lists and returns it as plain data, without what keys and hypers say.
AdamSegment segment_of(const AdamLists& lists, const TensorList& grads, size_t i, at::Device device);

// Refuses tensors of these segments of `lists` that share memory which the step writes.
void check_overlap(const AdamLists& lists, const std::vector<AdamSegment>& segments);

// An entry of a parameter's state, by which a step recognizes that only values have changed since the last.
struct __attribute__((visibility("hidden"))) StateEntry {
  py::object key;
  py::object value;  // unless it is a tensor: the count, which a write to "step" replaces
  int list;          // the index of the list that has the tensor; -1: none
};

// Lists read once, for steps that repeat the last one.
struct __attribute__((visibility("hidden"))) PyAdamLists {
  AdamLists lists;
  using ParamKind = std::pair<at::ScalarType, bool>;  // is it contiguous
  std::vector<ParamKind> param_kinds;                 // when the lists were read, as the device
  at::Device device = at::kCPU;
  // Once the states were released: of each entry of optimizer.state which parameter it is, -1 for none of these, and how many
  // entries its state has; and these, all in the order of the dicts.
  std::vector<std::pair<int64_t, Py_ssize_t>> states;
  std::vector<StateEntry> entries;
  std::vector<at::ScalarType> exp_avg_dtypes, master_dtypes;  // Undefined: None
};

void bind_adam_lists(py::module_& module);

}  // namespace shardcore::bind
