// The ordered sum's CUDA kernel on the host, with its warps and block reductions: the bits of the definition, and the CPU's
// norm.
#include "core/executor.h"
#include "cpp/cuda_kernels.h"
#include "cpp/reduce_problem.h"

namespace shardcore::testing {
namespace {

DoubleDouble norm_of_result(const OrderedSum& op) {
  SerialExecutor executor;
  const NormSegment stored{op.out, op.numel, op.out_dtype};
  return sq_norm_cpu(&stored, 1, executor);
}

TEST(reduce_cuda, has_the_bits_of_the_definition_and_the_norm_of_what_it_stored) {
  std::vector<SumCase> cases = sum_cases({0, 1, 256, 259, 1000});
  cases.push_back({2 * kNormChunk + 5, 2, DType::bf16, DType::f32, true, 1, true, 1.0});
  cases.push_back({2 * kNormChunk + 256, 3, DType::f32, DType::bf16, false, 0, false, 1.0});
  size_t number = 0;
  for (const SumCase& c : cases) {
    if (kThreadSanitizer && (c.numel > 1000 || number++ % 11 != 0)) continue;
    ReduceProblem problem(c);
    const auto want = definition(problem);
    const DoubleDouble norm = norm_of_result(problem.op);
    if (c.own && c.numel != 0) problem.take_own();
    problem.out.set_bytes(problem.initial);
    const DoubleDouble got = ordered_sum_cuda_body(problem.op);
    ASSERT_EQ(problem.out.bytes(), want) << c.numel << " elements, " << c.world_size << " ranks";
    ASSERT_TRUE(problem.out.sentinels_intact());
    ASSERT_EQ(float_bits(norm_from_sq(got)), float_bits(norm_from_sq(norm)));
    ASSERT_LE(relative_difference(norm, got), kGrouping);
    SerialExecutor serial;
    for_each_isa([&](const std::string&) {
      problem.out.set_bytes(problem.initial);
      ordered_sum_cpu(problem.op, serial);
      ASSERT_EQ(problem.out.bytes(), want);
    });
  }
}

TEST(reduce_cuda, the_result_may_take_the_place_of_the_own_piece) {
  for (const int64_t numel : {1000, 1003}) {
    ReduceProblem problem({numel, 3, DType::f32, DType::f32, false, 0, false, 1.0});
    const auto want = definition(problem);
    problem.take_own();
    problem.out.set_bytes(problem.own);
    problem.op.own = problem.op.out;
    ordered_sum_cuda_body(problem.op);
    ASSERT_EQ(problem.out.bytes(), want);
  }
}

TEST(reduce_cuda, what_multiplies_the_scale_is_read_where_it_lies) {
  for (const double there : {0.25, 1.0 / 3.0}) {
    ReduceProblem problem({kNormChunk + 259, 3, DType::f16, DType::f32, true, 1, false, 1.0});
    problem.op.scale = 2.0 * there;
    const auto want = definition(problem);
    problem.out.set_bytes(problem.initial);
    problem.op.scale = 2.0;
    problem.op.scale_at = &there;
    ordered_sum_cuda_body(problem.op);
    ASSERT_EQ(problem.out.bytes(), want);
  }
}

TEST(reduce_cuda, elements_past_the_end_do_not_count_even_with_an_infinite_scale) {
  ReduceProblem problem({259, 1, DType::f32, DType::f32, false, 0, false, 1.0});
  problem.op.scale = static_cast<double>(kInf);
  EXPECT_TRUE(std::isinf(ordered_sum_cuda_body(problem.op).high));  // not NaN, which 0 * inf would be
}

TEST(reduce_cuda, broken_twins_are_rejected) {
  ReduceProblem problem({2048 + 5, 2, DType::bf16, DType::f32, false, 0, false, 1.0});
  const auto want = definition(problem);
  const DoubleDouble norm = norm_of_result(problem.op);
  const auto rejected = [&](DoubleDouble got) {
    const bool same = relative_difference(norm, got) <= kGrouping && problem.out.bytes() == want;
    problem.out.set_bytes(problem.initial);
    return !same;
  };
  problem.out.set_bytes(problem.initial);
  EXPECT_FALSE(rejected(ordered_sum_cuda_body(problem.op)));
  EXPECT_TRUE(rejected(ordered_sum_cuda_body<BlockOfOtherLanes>(problem.op)));
  if (!kThreadSanitizer) {  // there: planted_race.cpp
    EXPECT_TRUE(some_run_is_rejected([&] { return rejected(ordered_sum_cuda_body<BlockWithoutSync>(problem.op)); }));
  }
  OrderedSum shorter = problem.op;
  shorter.world_size = 1;
  EXPECT_TRUE(rejected(ordered_sum_cuda_body(shorter)));
}

}  // namespace
}  // namespace shardcore::testing
