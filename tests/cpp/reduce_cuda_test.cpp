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
  for (const DType pieces : kDTypes) {  // more ranks than a lane has under way, in whole and broken rounds
    for (const int64_t world_size : {7, 8, 9, 16, 31, 64, 256, 1024}) {
      for (const DType out : {DType::f32, DType::bf16}) {
        const int64_t numel = world_size < 64 ? 768 : 256;
        cases.push_back({numel, world_size, pieces, out, world_size % 2 == 0, 0, world_size < 64, 1.0});
        cases.push_back({numel + 3, world_size, pieces, out, world_size % 2 != 0, 1, world_size > 64, 0.3});
      }
    }
  }
  size_t number = 0;
  for (const SumCase& c : cases) {
    if (kThreadSanitizer && (c.numel > 1000 || number++ % 11 != 0)) continue;
    ReduceProblem problem(c);
    const auto want = definition(problem);
    const DoubleDouble norm = norm_of_result(problem.op);
    problem.op.own_rank = c.world_size / 2;
    if (c.own && c.numel != 0) problem.use_own();
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

// What ranks of 64 and more leave of a unit of a 7B model (202M elements), and GPUs by their multiprocessors.
bool fills_gpus(int64_t (*grid)(int64_t numel)) {
  bool fills = true;
  for (const int64_t ranks : {64, 256, 1024}) {
    const int64_t numel = (202'383'360 / ranks + kBlock - 1) / kBlock * kBlock;
    for (const int multiprocessors : {108, 132, 148}) fills = fills && grid(numel) >= 2 * multiprocessors;
  }
  return fills;
}

TEST(reduce_cuda, every_multiprocessor_has_two_blocks_at_up_to_a_thousand_ranks) {
  EXPECT_TRUE(fills_gpus([](int64_t numel) { return ordered_sum_grid(numel); }));
  EXPECT_FALSE(fills_gpus([](int64_t numel) { return (numel + kNormChunk - 1) / kNormChunk; }));  // the norm's: 97, 25 and 7
  EXPECT_FALSE(fills_gpus([](int64_t numel) { return (numel + 1023) / 1024; }));                  // a warp more: 193 for 1,024
}

TEST(reduce_cuda, cuda_blocks_cover_all_elements_and_are_not_too_many_to_add_up) {
  for (int64_t numel = 1; numel < int64_t{1} << 40; numel += numel / 3 + 1) {
    const int64_t chunk = ordered_sum_chunk(numel), grid = ordered_sum_grid(numel);
    ASSERT_EQ(chunk % (kOrderedWarps * kBlock), 0) << numel;
    ASSERT_GE(grid * chunk, numel);
    ASSERT_LT((grid - 1) * chunk, numel);
    ASSERT_LE(grid, kOrderedBlocks);
  }
  EXPECT_EQ(ordered_sum_grid(0), 0);
}

TEST(reduce_cuda, the_result_may_take_the_place_of_the_own_piece) {
  for (const int64_t numel : {1000, 1003}) {
    ReduceProblem problem({numel, 3, DType::f32, DType::f32, false, 0, false, 1.0});
    const auto want = definition(problem);
    problem.use_own();
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
  ReduceProblem problem({2048 + 8, 2, DType::bf16, DType::f32, false, 0, false, 1.0});
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
  EXPECT_TRUE(rejected(ordered_sum_cuda_body<BlockWithoutWait>(problem.op)));
  OrderedSum shorter = problem.op;
  shorter.world_size = 1;
  EXPECT_TRUE(rejected(ordered_sum_cuda_body(shorter)));
}

}  // namespace
}  // namespace shardcore::testing
