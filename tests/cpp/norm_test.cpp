// Squared norm: the fixed tree of a block, every instruction set and thread count, the float32 result.
#include "norm/norm_block.h"

#include <algorithm>

#include "core/executor.h"
#include "cpp/common.h"
#include "norm/norm_cpu.h"

namespace shardcore::testing {
namespace {

DoubleDouble norm_of(const std::vector<NormSegment>& segments, Executor& executor) {
  return sq_norm_cpu(segments.data(), static_cast<int64_t>(segments.size()), executor);
}

float norm_from(DoubleDouble s) { return static_cast<float>(std::sqrt(s.high + s.low)); }

uint64_t bits_of(double x) {
  uint64_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

TEST(norm, one_block_has_the_tree_on_every_isa) {
  Random random(10);
  for_each_isa([&](const std::string&) {
    for (const DType dtype : kDTypes) {
      for (int64_t n = 0; n <= 256; n += n < 40 || n > 250 ? 1 : 13) {
        Buffer data(n * itemsize(dtype), 3 * itemsize(dtype));
        for (int64_t i = 0; i < n; ++i) {
          const float magnitude = dtype == DType::f16 ? 1.0f : std::ldexp(1.0f, static_cast<int>(random.integer(60)) - 30);
          store_from_f32(data.data(), dtype, i, random.normal() * magnitude);
        }
        const double want = naive_block(data.data(), dtype, n);
        SerialExecutor executor;
        const DoubleDouble got = norm_of({{data.data(), n, dtype}}, executor);
        ASSERT_EQ(bits_of(got.high), bits_of(want)) << n;
        ASSERT_EQ(got.low, 0.0);
      }
    }
  });
}

TEST(norm, another_order_is_rejected) {
  Random random(11);
  int differences = 0;
  for (int trial = 0; trial < 20; ++trial) {
    float x[256];
    double left_to_right = 0.0;
    for (float& value : x) {
      value = random.normal();
      left_to_right += square_f64(value);
    }
    differences += left_to_right != sq_norm_block(x);
  }
  EXPECT_GT(differences, 5);
}

TEST(norm, wakes_no_second_thread_for_2_MiB) {
  ThreadCount threads;
  for (const auto& [numel, want] : {std::pair<int64_t, int64_t>{1 << 19, 1}, {1 << 20, 2}, {1 << 22, 8}}) {
    Buffer data(numel * 4, 0);
    norm_of({{data.data(), numel, DType::f32}}, threads);
    EXPECT_EQ(threads.last, want) << numel;
  }
}

TEST(norm, list_does_not_depend_on_threads_or_isa) {
  Random random(12);
  std::vector<Buffer> buffers;
  std::vector<NormSegment> segments;
  for (const int64_t n : {0, 100000, 1, 0, 255, 256, 257, 70000, 0}) {
    const DType dtype = kDTypes[random.integer(3)];
    buffers.emplace_back(n * itemsize(dtype), itemsize(dtype));
    for (int64_t i = 0; i < n; ++i) store_from_f32(buffers.back().data(), dtype, i, random.normal());
    segments.push_back({buffers.back().data(), n, dtype});
  }
  long double want = 0.0L;
  for (const NormSegment& s : segments) {
    for (int64_t i = 0; i < s.numel; ++i) want += static_cast<long double>(square_f64(load_as_f32(s.data, s.dtype, i)));
  }
  SerialExecutor serial;
  const DoubleDouble first = norm_of(segments, serial);
  EXPECT_NEAR(first.high, static_cast<double>(want), 1e-13 * first.high);
  for_each_isa([&](const std::string&) {
    for (const int threads : {1, 2, 3, 7}) {
      EagerPool pool(threads);
      const DoubleDouble got = norm_of(segments, pool);
      EXPECT_EQ(bits_of(got.high), bits_of(first.high));
      EXPECT_EQ(bits_of(got.low), bits_of(first.low));
    }
  });
}

TEST(norm, any_grouping_of_blocks_gives_the_same_float32) {
  Random random(13);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<double> blocks(200);
    for (double& b : blocks) b = std::ldexp(random.uniform(), static_cast<int>(random.integer(60)) - 30);
    std::vector<float> norms;
    for (int order = 0; order < 6; ++order) {
      std::vector<DoubleDouble> groups(static_cast<size_t>(1 + random.integer(20)));
      for (const double b : blocks) {
        DoubleDouble& group = groups[static_cast<size_t>(random.integer(static_cast<int64_t>(groups.size())))];
        group = dd_add(group, b);
      }
      DoubleDouble total{};
      for (const DoubleDouble& group : groups) total = dd_add(total, group);
      norms.push_back(norm_from(total));
    }
    for (const float norm : norms) ASSERT_EQ(float_bits(norm), float_bits(norms[0]));
  }
}

TEST(norm, double_double_keeps_what_double_loses) {
  DoubleDouble total{1.0, 0.0};
  double plain = 1.0;
  const double tiny = std::ldexp(1.0, -53);
  for (int i = 0; i < 1000; ++i) {
    total = dd_add(total, tiny);
    plain += tiny;
  }
  EXPECT_EQ(plain, 1.0);
  EXPECT_EQ((total.high - 1.0) + total.low, 1000 * tiny);
}

TEST(norm, not_finite_and_large_elements) {
  SerialExecutor executor;
  std::vector<float> x(1000, 1.0f);
  x[999] = kInf;
  EXPECT_EQ(norm_from(norm_of({{x.data(), 1000, DType::f32}}, executor)), kInf);
  x[3] = kNan;
  EXPECT_TRUE(std::isnan(norm_of({{x.data(), 1000, DType::f32}}, executor).high));
  std::fill(x.begin(), x.end(), 3e37f);  // squares overflow float32, not double
  EXPECT_NEAR(norm_from(norm_of({{x.data(), 100, DType::f32}}, executor)), 3e38f, 1e33f);
}

}  // namespace
}  // namespace shardcore::testing
