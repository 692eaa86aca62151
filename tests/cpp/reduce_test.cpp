// Ordered sum: the bits of the definition on every instruction set, thread count and in the CUDA body; the norm of its result.
#include <functional>

#include "core/executor.h"
#include "core/thread_pool.h"
#include "cpp/common.h"
#include "norm/norm_cpu.h"
#include "reduce/reduce_cpu.h"
#include "reduce/reduce_math.h"

namespace shardcore::testing {
namespace {

struct Case {
  int64_t numel;
  int64_t world_size;
  DType pieces, out;
  bool accumulate;
  int64_t misalign;
};

struct ReduceProblem {
  explicit ReduceProblem(const Case& c)
      : pieces(c.numel * c.world_size * itemsize(c.pieces), c.misalign * itemsize(c.pieces)),
        out(c.numel * itemsize(c.out), c.misalign * itemsize(c.out)) {
    Random random(static_cast<uint32_t>(c.numel * 31 + c.world_size));
    for (int64_t i = 0; i < c.numel * c.world_size; ++i) store_from_f32(pieces.data(), c.pieces, i, random.normal());
    for (int64_t i = 0; i < c.numel; ++i) store_from_f32(out.data(), c.out, i, random.normal());
    initial = out.bytes();
    op = {pieces.data(), c.pieces, c.world_size, c.numel, 0.3 / static_cast<double>(c.world_size),
          out.data(),    c.out,    c.accumulate};
  }
  Buffer pieces, out;
  std::vector<uint8_t> initial;
  OrderedSum op;
};

// The definition, element by element.
std::vector<uint8_t> definition(ReduceProblem& problem) {
  problem.out.set_bytes(problem.initial);
  const OrderedSum& op = problem.op;
  for (int64_t i = 0; i < op.numel; ++i) {
    volatile float sum = load_as_f32(op.pieces, op.piece_dtype, i);  // volatile: each addition rounded to float32
    for (int64_t rank = 1; rank < op.world_size; ++rank)
      sum = sum + load_as_f32(op.pieces, op.piece_dtype, rank * op.numel + i);
    volatile float result = static_cast<float>(static_cast<double>(sum) * op.scale);
    if (op.accumulate) result = load_as_f32(op.out, op.out_dtype, i) + result;
    store_from_f32(op.out, op.out_dtype, i, result);
  }
  return problem.out.bytes();
}

std::vector<Case> cases() {
  std::vector<Case> list;
  for (const DType pieces : kDTypes) {
    for (const DType out : {DType::f32, DType::bf16}) {
      for (const bool accumulate : {false, true}) {
        for (const int64_t world_size : {1, 2, 5}) {
          for (const int64_t numel : {0, 1, 15, 16, 17, 35, 255, 256, 257, 1000}) {
            for (const int64_t misalign : {0, 1}) list.push_back({numel, world_size, pieces, out, accumulate, misalign});
          }
        }
      }
    }
  }
  list.push_back({200000, 3, DType::bf16, DType::f32, true, 1});
  return list;
}

TEST(reduce, has_the_bits_of_the_definition_and_the_norm_of_what_it_stored) {
  for (const Case& c : cases()) {
    ReduceProblem problem(c);
    const auto want = definition(problem);
    SerialExecutor serial;
    const NormSegment stored{problem.out.data(), c.numel, c.out};
    const DoubleDouble norm = sq_norm_cpu(&stored, 1, serial);
    for_each_isa([&](const std::string&) {
      for (const int threads : {1, 3}) {
        ThreadPool pool(threads);
        problem.out.set_bytes(problem.initial);
        const DoubleDouble got = ordered_sum_cpu(problem.op, pool);
        ASSERT_EQ(problem.out.bytes(), want) << c.numel << " elements, " << c.world_size << " ranks";
        ASSERT_TRUE(problem.out.sentinels_intact());
        ASSERT_EQ(got.high, norm.high);
        ASSERT_EQ(got.low, norm.low);
      }
    });
    problem.out.set_bytes(problem.initial);
    for (int64_t i = 0; i < c.numel; ++i) {
      const float stored_value = ordered_sum_element(problem.op, i);
      ASSERT_EQ(float_bits(stored_value), float_bits(load_as_f32(problem.op.out, c.out, i)));
    }
    ASSERT_EQ(problem.out.bytes(), want) << "CUDA body";
  }
}

TEST(reduce, other_orders_and_roundings_are_rejected) {
  const Case c{1000, 5, DType::f32, DType::f32, true, 0};
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

TEST(reduce, not_finite_pieces_show_in_the_norm) {
  for (const float bad : {kInf, -kInf, kNan}) {
    ReduceProblem problem({1000, 2, DType::bf16, DType::f32, false, 0});
    store_from_f32(problem.pieces.data(), DType::bf16, 1999, bad);
    SerialExecutor serial;
    EXPECT_FALSE(std::isfinite(ordered_sum_cpu(problem.op, serial).high));
  }
}

}  // namespace
}  // namespace shardcore::testing
