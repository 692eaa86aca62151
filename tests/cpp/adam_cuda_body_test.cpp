// The CUDA kernel's body, run on the host over all blocks, warps and threads, against the CPU path: same bits, nothing else
// touched.
// Vector accesses assume 16-byte alignment; the address sanitizer's build checks that they have it.
#include "cpp/adam_problem.h"

namespace shardcore::testing {
namespace {

std::vector<TensorSpec> every_dtype_mix(int64_t numel, int64_t misalign) {
  std::vector<TensorSpec> specs;
  for (const DType param : kDTypes) {
    for (const DType grad : kDTypes) {
      for (const Master master : {Master::none, Master::f32}) {
        const auto hyper = static_cast<int32_t>((static_cast<int64_t>(specs.size()) / 2 + numel) % 4);
        specs.push_back({numel, param, grad, master, specs.size() % 2 == 0, misalign, hyper, specs.size(), 77 * numel + hyper});
      }
    }
  }
  return specs;
}

// Whether the kernel's body has the bits of the CPU.
bool has_the_cpu_bits(AdamProblem& problem, const std::vector<AdamHyper>& hypers = various_hypers()) {
  problem.reset();
  problem.run_cpu(hypers);
  const auto want = problem.result();
  problem.reset();
  problem.run_cuda_body(hypers);
  return problem.result() == want;
}

TEST(adam_cuda_body, has_the_cpu_bits_for_every_mix) {
  constexpr int64_t kRound = 8 * kAdamThreads;
  for (const int64_t misalign : {0, 1, 4}) {  // elements
    for (const int64_t numel : {int64_t{1}, int64_t{9}, int64_t{255}, int64_t{256}, int64_t{257}, kRound - 1, kRound,
                                kRound + 3, kAdamChunk + kRound + 3}) {
      if (kThreadSanitizer && (misalign > 1 || numel != 257)) continue;  // a thread for each thread takes its time
      std::vector<TensorSpec> specs = {{0}};
      for (const auto& some : {every_dtype_mix(numel, misalign), every_reduced_mix(numel, misalign)}) {
        specs.insert(specs.end(), some.begin(), some.end());
        specs.push_back({0});
      }
      const auto values = numel % 2 ? AdamProblem::Values::with_specials : AdamProblem::Values::normal;
      AdamProblem problem(specs, static_cast<uint32_t>(numel + misalign), values);
      ASSERT_TRUE(has_the_cpu_bits(problem)) << numel << " elements, misaligned by " << misalign;
    }
  }
}

TEST(adam_cuda_body, notes_the_changed_weights_that_the_cpu_notes) {
  std::vector<AdamHyper> hypers = various_hypers();
  for (AdamHyper& hyper : hypers) hyper.lr = 1e-3;
  for (const int64_t misalign : {0, 1}) {
    for (const int64_t numel : {1, 9, 257, 8 * kAdamThreads + 3, kAdamChunk + 519}) {
      if (kThreadSanitizer && (misalign > 0 || numel != 257)) continue;
      std::vector<TensorSpec> specs = every_dtype_mix(numel, misalign);
      const std::vector<TensorSpec> reduced = every_reduced_mix(numel, misalign);
      specs.insert(specs.end(), reduced.begin(), reduced.end());
      AdamProblem problem(noting_changes(specs), static_cast<uint32_t>(numel + misalign));
      EXPECT_EQ(adam_form_of(problem.segments()), kNumAdamForms - 1);
      ASSERT_TRUE(has_the_cpu_bits(problem, hypers)) << numel << " elements, misaligned by " << misalign;
      if (numel < 257) continue;
      const auto want = problem.result();
      problem.reset();  // a twin that notes nothing
      for (AdamSegment& t : problem.segments()) t.changed = nullptr;
      problem.run_cuda_body(hypers);
      EXPECT_NE(problem.result(), want);
    }
  }
}

TensorSpec spec_of(const AdamForm& form, int64_t numel) {
  return {numel, form.param, form.grad, form.master, false, 0, 0, 0, 0, form.state};
}

TEST(adam_cuda_body, is_the_first_form_that_fits_the_whole_list) {
  constexpr int kAny = kNumAdamForms - 1;
  for (int form = 0; form < kAny; ++form) {
    TensorSpec spec = spec_of(kAdamForms[form], 3);
    if (kAdamForms[form].any_dtypes) spec.param = DType::f16;  // of which no form is made
    const auto chosen = [](const std::vector<TensorSpec>& specs) { return adam_form_of(AdamProblem(specs, 1).segments()); };
    EXPECT_EQ(chosen({spec, spec}), form);
    TensorSpec other = spec;
    other.param = DType::f16;
    const int without_dtypes = chosen({spec, other});
    EXPECT_TRUE(kAdamForms[without_dtypes].any_dtypes && kAdamForms[without_dtypes].state == spec.state);
    other.state = spec.state == StateDType::bf16 ? StateDType::f32 : StateDType::bf16;
    EXPECT_EQ(chosen({spec, other}), kAny);
    EXPECT_EQ(chosen({other, spec}), kAny);
  }
  EXPECT_EQ(adam_form_of(AdamProblem({{3, DType::f32, DType::f32, Master::none, true}}, 1).segments()), kAny);
}

// Every form with all that fits it, at first elements that are and are not a block's.
TEST(adam_cuda_body, has_the_cpu_bits_in_every_form) {
  for (int form = kSlow ? kNumAdamForms - 1 : 0; form < kNumAdamForms; ++form) {
    std::vector<TensorSpec> specs;
    for (int32_t hyper = 0; hyper < 4; ++hyper) {
      specs.push_back(spec_of(kAdamForms[form], 8 * kAdamThreads + 259));
      specs.back().hyper = hyper, specs.back().param_index = specs.size(), specs.back().first_element = hyper % 2 ? 77 : 512;
    }
    for (const auto values : {AdamProblem::Values::normal, AdamProblem::Values::with_specials}) {
      if (kThreadSanitizer && values == AdamProblem::Values::normal) continue;
      AdamProblem problem(specs, 45, values);
      problem.run_cpu(various_hypers());
      const auto want = problem.result();
      problem.reset();
      problem.run_cuda_body(AdamProblem::scalars_of(various_hypers()), form);
      ASSERT_EQ(problem.result(), want) << "form " << form;
    }
  }
}

TEST(adam_cuda_body, does_a_list_of_mixed_state_dtypes_in_one_launch) {
  std::vector<TensorSpec> specs;
  for (const StateDType state : {StateDType::bf16, StateDType::f32, StateDType::q8}) {
    specs.push_back({8 * kAdamThreads + 3, DType::bf16, DType::f32, Master::f32, false, 0, 0, specs.size(), 0, state});
  }
  for (const size_t count : {specs.size(), size_t{2}}) {
    specs.resize(count);
    AdamProblem problem(specs, 43);
    EXPECT_TRUE(has_the_cpu_bits(problem));
    if (kSlow || count > 2) continue;  // the twin would read scales that are not there
    const auto want = problem.result();
    problem.reset();  // a twin that takes the kernel for the first
    problem.run_cuda_body(AdamProblem::scalars_of(various_hypers()), adam_form_of({problem.segments()[0]}));
    EXPECT_NE(problem.result(), want);
  }
}

TEST(adam_cuda_body, reads_few_scalars_from_the_launch_and_many_from_a_table) {
  constexpr size_t kFew = AdamScalarsArg::kFew;
  std::vector<AdamHyper> hypers(kFew + 1);
  std::vector<TensorSpec> specs;
  for (size_t i = 0; i < hypers.size(); ++i) {
    hypers[i].lr = 0.01 * static_cast<double>(i + 1);
    specs.push_back({300, DType::f32, DType::f32, Master::none, false, 0, static_cast<int32_t>(i), i});
  }
  for (const size_t count : {kFew + 1, kFew}) {
    hypers.resize(count);
    specs.resize(count);
    EXPECT_EQ(AdamScalarsArg().try_assign(AdamProblem::scalars_of(hypers)), count == kFew);
    AdamProblem problem(specs, 44);
    EXPECT_TRUE(has_the_cpu_bits(problem, hypers));
    const auto want = problem.result();
    std::swap(hypers[0], hypers[count - 1]);  // a twin that reads those of other tensors
    problem.reset();
    problem.run_cuda_body(hypers);
    EXPECT_NE(problem.result(), want);
    std::swap(hypers[0], hypers[count - 1]);
  }
}

// Every option of a step: AdamW or Adam with decay, maximize, bias correction, stochastic rounding.
std::vector<AdamHyper> every_hyper() {
  std::vector<AdamHyper> hypers;
  for (int options = 0; options < 16; ++options) {
    AdamHyper hyper;
    hyper.lr = 0.01, hyper.weight_decay = 0.1, hyper.grad_scale = 0.37, hyper.step = 3 + options, hyper.seed = 7;
    hyper.adam_w_mode = options & 1, hyper.maximize = options & 2;
    hyper.bias_correction = options & 4, hyper.stochastic_rounding = options & 8;
    hypers.push_back(hyper);
  }
  return hypers;
}

// Every combination of dtypes, masters and amsgrad that there is with this state dtype, each with four of those options, at
// first elements that are and are not a block's. So each dtype and each master meets every option.
std::vector<TensorSpec> every_combination(StateDType state, int64_t numel, int64_t misalign) {
  std::vector<TensorSpec> specs;
  for (const Master master : {Master::none, Master::f32, Master::split}) {
    for (const DType param : kDTypes) {
      if (master == Master::split && param != DType::bf16) continue;
      for (const DType grad : kDTypes) {
        for (const bool amsgrad : {false, true}) {
          if (amsgrad && state != StateDType::f32) continue;
          for (auto hyper = static_cast<int32_t>(specs.size() / 4 % 4); hyper < 16; hyper += kThreadSanitizer ? 16 : 4) {
            const int64_t first = hyper % 2 ? 77 * hyper : 256 * hyper;
            specs.push_back({numel, param, grad, master, amsgrad, misalign, hyper, specs.size(), first, state});
          }
        }
      }
    }
  }
  return specs;
}

TEST(adam_cuda_body, has_one_hash_with_every_cpu_kernel_over_every_combination) {
  const std::vector<AdamHyper> hypers = every_hyper();
  const int64_t numel = 8 * kAdamThreads + 256 + 3;  // a round of vectors, a whole block more, a tail
  for (const StateDType state : {StateDType::f32, StateDType::bf16, StateDType::q8}) {
    for (const int64_t misalign : {0, 1}) {
      const std::vector<TensorSpec> specs = every_combination(state, numel, misalign);
      EXPECT_EQ(specs.size(), (kThreadSanitizer ? 1u : 4u) * 7 * 3 * (state == StateDType::f32 ? 2 : 1));
      const auto values = misalign ? AdamProblem::Values::with_specials : AdamProblem::Values::normal;
      AdamProblem problem(specs, 42, values);
      problem.run_cuda_body(hypers);
      const uint64_t hash = hash_of(problem.result());
      for_each_isa([&](const std::string&) {
        problem.reset();
        problem.run_cpu(hypers);
        EXPECT_EQ(hash_of(problem.result()), hash) << "misaligned by " << misalign << ", states " << int(state);
      });
      if (!kSlow) {
        problem.reset();
        problem.run_cuda_body(AdamProblem::scalars_of(hypers), kNumAdamForms - 1);
        EXPECT_EQ(hash_of(problem.result()), hash) << "the kernel for all states, misaligned by " << misalign;
      }
      if (misalign) continue;
      problem.segments().back().numel -= 1;  // a twin that leaves out one element of one combination
      problem.reset();
      problem.run_cuda_body(hypers);
      EXPECT_NE(hash_of(problem.result()), hash);
    }
  }
}

// Lanes that keep their elements, or take from others than they should. One type, as each takes long to compile.
enum class Exchange { sound, none, wrong_lanes };
struct BlockOfLanes : HostBlock {
  explicit BlockOfLanes(const HostBlock& block) : HostBlock(block) {}
  uint32_t shfl(uint32_t x, int from) const {
    return exchange == Exchange::none ? x : HostBlock::shfl(x, exchange == Exchange::wrong_lanes ? from ^ 2 : from);
  }
  static inline Exchange exchange = Exchange::sound;
};

TEST(adam_cuda_body, a_broken_exchange_between_lanes_is_rejected) {
  constexpr int kAny = kNumAdamForms - 1;
  const std::vector<AdamScalars> scalars = AdamProblem::scalars_of(various_hypers());
  for (const StateDType state : {StateDType::f32, StateDType::bf16, StateDType::q8}) {
    for (const auto& [param, grad] : {std::pair(DType::f32, DType::bf16), std::pair(DType::f16, DType::f32)}) {
      AdamProblem problem({{256, param, grad, Master::none, false, 0, 0, 0, 0, state}}, 44);
      problem.run_cpu(various_hypers());
      const auto want = problem.result();
      for (const Exchange exchange : {Exchange::none, Exchange::wrong_lanes, Exchange::sound}) {
        BlockOfLanes::exchange = exchange;
        problem.reset();
        problem.run_cuda_form<kAny, BlockOfLanes>(scalars);
        EXPECT_EQ(problem.result() == want, exchange == Exchange::sound);
      }
    }
  }
}

TEST(adam_cuda_body, a_missing_block_is_rejected) {
  AdamProblem problem({{3 * kAdamChunk}}, 41);
  problem.run_cpu(various_hypers());
  const auto want = problem.result();
  problem.reset();
  problem.segments()[0].numel = 2 * kAdamChunk;
  problem.run_cuda_body(various_hypers());
  EXPECT_NE(problem.result(), want);
}

}  // namespace
}  // namespace shardcore::testing
