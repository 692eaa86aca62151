// What the CUDA kernels of Adam are compiled for, and which of them a list of tensors takes: one launch in each case.
#pragma once

#include <algorithm>
#include <iterator>
#include <type_traits>
#include <vector>

#include "adam/adam_segment.h"

namespace shardcore {

// What a kernel is compiled for. Where dtypes are given the compiler drops the tests for the others: fewer instructions a
// block, which matters where arithmetic is the bound, and fewer registers.
struct AdamForm {
  bool any_state = false;  // any mixture of moments, and amsgrad; else those of `state`
  StateDType state{};
  bool any_dtypes = true;  // of weights, gradients and masters; else the following
  DType param{}, grad{};
  Master master{};
};

// Steps that note changed weights take the last one, so that no other kernel has a test for it. Those that occur most, the more
// special ones first: 8-bit moments as `FusedAdam` and as `shard` (float32 sums of gradients) have them. tools/check_kernels.py
// has a rule for each.
inline constexpr AdamForm kAdamForms[] = {
    {.state = StateDType::q8, .any_dtypes = false, .param = DType::f32, .grad = DType::f32, .master = Master::none},
    {.state = StateDType::q8, .any_dtypes = false, .param = DType::bf16, .grad = DType::bf16, .master = Master::none},
    {.state = StateDType::q8, .any_dtypes = false, .param = DType::bf16, .grad = DType::bf16, .master = Master::f32},
    {.state = StateDType::q8, .any_dtypes = false, .param = DType::bf16, .grad = DType::bf16, .master = Master::split},
    {.state = StateDType::q8, .any_dtypes = false, .param = DType::bf16, .grad = DType::f32, .master = Master::f32},
    {.state = StateDType::q8, .any_dtypes = false, .param = DType::bf16, .grad = DType::f32, .master = Master::split},
    {.state = StateDType::f32},
    {.state = StateDType::bf16},
    {.state = StateDType::q8},
    {.any_state = true},
};
constexpr int kNumAdamForms = static_cast<int>(std::size(kAdamForms));

inline bool fits(const AdamForm& form, const AdamSegment& t) {
  if (form.any_state) return true;
  if (t.max_exp_avg_sq || t.changed || t.state_dtype != form.state) return false;
  return form.any_dtypes || (t.param_dtype == form.param && t.grad_dtype == form.grad && t.master_kind == form.master);
}

// The index of the first that fits all segments.
inline int adam_form_of(const std::vector<AdamSegment>& segments) {
  const auto fits_all = [&](const AdamForm& form) {
    return std::all_of(segments.begin(), segments.end(), [&](const AdamSegment& t) { return fits(form, t); });
  };
  return static_cast<int>(std::find_if(std::begin(kAdamForms), std::end(kAdamForms), fits_all) - std::begin(kAdamForms));
}

// run(index) with adam_cuda_body's template argument, a std::integral_constant.
template <int kForm = 0, typename Run>
void choose_adam_body(int form, const Run& run) {
  if (form == kForm) {
    run(std::integral_constant<int, kForm>());
  } else if constexpr (kForm + 1 < kNumAdamForms) {
    choose_adam_body<kForm + 1>(form, run);
  }
}

}  // namespace shardcore
