// Ordered sum: the bits of the definition on every instruction set and thread count; the norm of its result.
#include <algorithm>
#include <array>
#include <functional>

#include "core/executor.h"
#include "cpp/reduce_problem.h"
#include "norm/norm_cpu.h"
#include "reduce/reduce_math.h"

namespace shardcore::testing {
namespace {

TEST(reduce, wakes_no_second_thread_for_2_MiB_of_all_ranks) {
  ThreadCount threads;
  for (const auto& [numel, world_size, want] :
       {std::array<int64_t, 3>{1 << 19, 1, 1}, {1 << 20, 1, 2}, {1 << 18, 2, 1}, {1 << 18, 4, 2}, {1 << 17, 16, 2}}) {
    ReduceProblem problem({numel, world_size, DType::f32, DType::f32, false, 0, false, 1.0});
    ordered_sum_cpu(problem.op, threads);
    EXPECT_EQ(threads.last, want) << numel << " elements of " << world_size << " ranks";
  }
}

TEST(reduce, has_the_bits_of_the_definition_and_the_norm_of_what_it_stored) {
  std::vector<SumCase> cases = sum_cases({0, 1, 15, 16, 17, 35, 255, 256, 257, 1000});
  cases.push_back({200000, 3, DType::bf16, DType::f32, true, 1, true, 1.0});
  for (const bool own : {false, true}) {
    cases.push_back({70001, 2, DType::f32, DType::f32, false, 0, own, 1.0});
    cases.push_back({70001, 3, DType::bf16, DType::f32, false, 0, own, 0.7});
  }
  EagerPool alone(1), three(3);
  for (const SumCase& c : cases) {
    ReduceProblem problem(c);
    const auto want = definition(problem);
    if (c.own && c.numel != 0) problem.use_own();
    SerialExecutor serial;
    const NormSegment stored{problem.out.data(), c.numel, c.out};
    const DoubleDouble norm = sq_norm_cpu(&stored, 1, serial);
    for_each_isa([&](const std::string&) {
      for (EagerPool* const pool : {&alone, &three}) {
        problem.out.set_bytes(problem.initial);
        const DoubleDouble got = ordered_sum_cpu(problem.op, *pool);
        ASSERT_EQ(problem.out.bytes(), want) << c.numel << " elements, " << c.world_size << " ranks";
        ASSERT_TRUE(problem.out.sentinels_intact());
        ASSERT_EQ(got.high, norm.high);
        ASSERT_EQ(got.low, norm.low);
      }
    });
  }
}

TEST(reduce, other_orders_and_roundings_are_rejected) {
  const SumCase c{1000, 5, DType::f32, DType::f32, true, 0, false, 0.3};
  ReduceProblem problem(c);
  const auto want = definition(problem);
  const OrderedSum& op = problem.op;
  const auto* const pieces = static_cast<const float*>(op.pieces);
  auto* const out = static_cast<float*>(op.out);
  const std::function<float(int64_t, float)> twins[] = {
      [&](int64_t i, float old) {  // ranks backwards
        float sum = pieces[4 * 1000 + i];
        for (int64_t rank = 3; rank >= 0; --rank) sum += pieces[rank * 1000 + i];
        return old + scale_sum(sum, op.scale);
      },
      [&](int64_t i, float old) {  // scale rounded to float32 first
        float sum = 0;
        for (int64_t rank = 0; rank < 5; ++rank) sum += pieces[rank * 1000 + i];
        return old + sum * static_cast<float>(op.scale);
      },
      [&](int64_t i, float) {  // not accumulated
        float sum = 0;
        for (int64_t rank = 0; rank < 5; ++rank) sum += pieces[rank * 1000 + i];
        return scale_sum(sum, op.scale);
      },
  };
  for (const auto& twin : twins) {
    problem.out.set_bytes(problem.initial);
    for (int64_t i = 0; i < c.numel; ++i) out[i] = twin(i, out[i]);
    EXPECT_NE(problem.out.bytes(), want);
  }
}

TEST(reduce, scales_that_float32_holds_round_once_as_others_do) {
  for (const double scale : {0.5, 0.25, 1.0 / 1024, 3.0}) {
    for (const float value : {1.0e-45f, 3.0e-45f, 1.1754944e-38f, 1.7e-38f, 3.4028235e38f, 1.0f / 3.0f}) {
      ReduceProblem problem({257, 2, DType::f32, DType::f32, false, 0, false, 2 * scale});
      std::fill(problem.pieces.as<float>(), problem.pieces.as<float>() + 257, value);
      std::fill(problem.pieces.as<float>() + 257, problem.pieces.as<float>() + 514, 0.0f);
      const auto want = definition(problem);
      SerialExecutor serial;
      for_each_isa([&](const std::string&) {
        problem.out.set_bytes(problem.initial);
        ordered_sum_cpu(problem.op, serial);
        ASSERT_EQ(problem.out.bytes(), want) << value << " * " << scale;
      });
    }
  }
}

TEST(reduce, the_result_may_take_the_place_of_the_own_piece) {
  ReduceProblem problem({1000, 3, DType::f32, DType::f32, false, 0, false, 1.0});
  const auto want = definition(problem);
  problem.use_own();
  SerialExecutor serial;
  for_each_isa([&](const std::string&) {
    problem.out.set_bytes(problem.own);
    problem.op.own = problem.op.out;
    ordered_sum_cpu(problem.op, serial);
    ASSERT_EQ(problem.out.bytes(), want);
  });
}

TEST(reduce, not_finite_pieces_show_in_the_norm) {
  for (const float bad : {kInf, -kInf, kNan}) {
    ReduceProblem problem({1000, 2, DType::bf16, DType::f32, false, 0, false, 1.0});
    store_from_f32(problem.pieces.data(), DType::bf16, 1999, bad);
    SerialExecutor serial;
    EXPECT_FALSE(std::isfinite(ordered_sum_cpu(problem.op, serial).high));
  }
}

}  // namespace
}  // namespace shardcore::testing
