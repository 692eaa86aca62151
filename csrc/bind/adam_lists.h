// The lists of tensors of one Adam call: read from Python, checked, as plain data.
#pragma once

#include <vector>

#include "adam/adam_segment.h"
#include "bind/checks.h"
#include "core/overlap.h"

namespace shardcore::bind {

inline constexpr const char* kStepOp = "AdamStepper.step";

struct AdamLists {
  TensorList params, grads, exp_avgs, exp_avg_sqs, masters, max_exp_avg_sqs, exp_avg_scales, exp_avg_sq_scales;

  void prefetch(size_t i) const {
    for (const TensorList* list : {&params, &grads, &exp_avgs, &exp_avg_sqs, &masters, &max_exp_avg_sqs}) list->prefetch(i);
  }
};

// The random key of a tensor: its parameter, and which of that one's elements is its first.
struct AdamKey {
  uint64_t param_index;
  int64_t first_element;
};

std::vector<AdamKey> keys_of(const py::handle& sequence, size_t count);
std::vector<int32_t> hyper_indices_of(const py::handle& sequence, size_t count, size_t num_hypers);

// Checks index i of all lists and returns it as plain data, without what keys and hypers say.
AdamSegment segment_of(const AdamLists& lists, size_t i, at::Device device);

// Refuses tensors that share memory which the step writes. counts (empty, or one a segment) and skipped (or null) are int64.
void check_overlap(const std::vector<AdamSegment>& segments, const std::vector<int64_t*>& counts, const int64_t* skipped,
                   OverlapCheck& overlap);

// Why the step of this tensor needs random bits, or null. stochastic_rounding: the option of its group.
const char* why_random(const AdamSegment& t, bool stochastic_rounding);

}  // namespace shardcore::bind
