// The CUDA kernel's body, run on the host over all blocks and threads, against the CPU path: same bits, nothing else touched.
// Vector accesses assume 16-byte alignment; the address sanitizer's build checks that they have it.
#include "cpp/adam_problem.h"

namespace shardcore::testing {
namespace {

std::vector<TensorSpec> every_mix(int64_t numel, int64_t misalign) {
  std::vector<TensorSpec> specs;
  for (const DType param : kDTypes) {
    for (const DType grad : kDTypes) {
      for (const Master master : {Master::none, Master::f32}) {
        for (int32_t hyper = 0; hyper < 4; ++hyper) {
          specs.push_back(
              {numel, param, grad, master, specs.size() % 2 == 0, misalign, hyper, specs.size(), 77 * numel + hyper});
        }
      }
    }
  }
  return specs;
}

TEST(adam_cuda_body, has_the_cpu_bits_for_every_mix) {
  constexpr int64_t kRound = 8 * kAdamThreads;
  for (const int64_t misalign : {0, 1, 4}) {
    for (const int64_t numel : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{129}, kRound - 1, kRound, kRound + 1,
                                2 * kRound + 5, kAdamChunk - int64_t{1}, int64_t{kAdamChunk}, kAdamChunk + kRound + 3}) {
      AdamProblem problem(every_mix(numel, misalign), static_cast<uint32_t>(numel + misalign));
      problem.run_cpu(various_hypers());
      const auto want = problem.result();
      problem.reset();
      problem.run_cuda_body(various_hypers());
      ASSERT_EQ(problem.result(), want) << numel << " elements, misaligned by " << misalign;
    }
  }
}

TEST(adam_cuda_body, has_the_cpu_bits_for_special_values_and_empty_tensors) {
  std::vector<TensorSpec> specs = every_mix(2 * 8 * kAdamThreads + 3, 0);
  specs.insert(specs.begin(), {0});
  specs.insert(specs.begin() + 5, {0});
  specs.push_back({0});
  AdamProblem problem(specs, 40, AdamProblem::Values::with_specials);
  problem.run_cpu(various_hypers());
  const auto want = problem.result();
  problem.reset();
  problem.run_cuda_body(various_hypers());
  EXPECT_EQ(problem.result(), want);
}

TEST(adam_cuda_body, has_the_cpu_bits_for_reduced_moments_and_split_masters) {
  constexpr int64_t kRound = 8 * kAdamThreads;
  for (const int64_t misalign : {0, 1, 8}) {  // elements
    for (const int64_t numel : {int64_t{0}, int64_t{1}, int64_t{9}, int64_t{255}, int64_t{256}, int64_t{257}, kRound + 3,
                                kAdamChunk + int64_t{300}}) {
      if (misalign != 0 && numel > kRound) continue;
      const auto values = numel % 2 ? AdamProblem::Values::with_specials : AdamProblem::Values::normal;
      AdamProblem problem(every_reduced_mix(numel, misalign), static_cast<uint32_t>(numel + misalign), values);
      problem.run_cpu(various_hypers());
      const auto want = problem.result();
      problem.reset();
      problem.run_cuda_body(various_hypers());
      ASSERT_EQ(problem.result(), want) << numel << " elements, misaligned by " << misalign;
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
