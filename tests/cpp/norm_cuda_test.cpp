// The norm's CUDA kernels on the host, with their warps and block reductions: the bits of the definition and of the CPU.
#include "core/executor.h"
#include "cpp/cuda_kernels.h"
#include "norm/norm_counters.h"

namespace shardcore::testing {
namespace {

Buffer random_values(DType dtype, int64_t numel, int64_t misalign, uint32_t seed) {
  Random random(seed);
  Buffer data(numel * itemsize(dtype), misalign * itemsize(dtype));
  for (int64_t i = 0; i < numel; ++i) {
    const float magnitude = dtype == DType::f16 ? 1.0f : std::ldexp(1.0f, static_cast<int>(random.integer(60)) - 30);
    store_from_f32(data.data(), dtype, i, random.normal() * magnitude);
  }
  return data;
}

DoubleDouble on_cpu(const std::vector<NormSegment>& segments) {
  SerialExecutor executor;
  return sq_norm_cpu(segments.data(), static_cast<int64_t>(segments.size()), executor);
}

TEST(norm_cuda, one_block_has_the_bits_of_the_definition) {
  for (const DType dtype : kDTypes) {
    for (const int64_t misalign : {0, 1, 2}) {
      for (int64_t n = 1; n <= 256; n += n < 12 || n > 246 ? 1 : 29) {
        if (kThreadSanitizer && n % 5 != 1) continue;
        Buffer data = random_values(dtype, n, misalign, static_cast<uint32_t>(n));
        const DoubleDouble got = sq_norm_cuda_body({{data.data(), n, dtype}});
        ASSERT_EQ(got.high, naive_block(data.data(), dtype, n)) << n << " elements, misaligned by " << misalign;
        ASSERT_EQ(got.low, 0.0);
      }
    }
  }
}

TEST(norm_cuda, has_the_cpu_norm_for_every_dtype_size_and_alignment) {
  for (const DType dtype : kDTypes) {
    for (const int64_t misalign : {0, 1, 4, 8}) {
      for (const int64_t numel :
           {int64_t{257}, int64_t{2048 + 5}, norm_chunk(dtype) - 1, norm_chunk(dtype), norm_chunk(dtype) + 2048 + 259}) {
        if (kThreadSanitizer && (numel > 3000 || misalign > 1)) continue;
        Buffer data = random_values(dtype, numel, misalign, static_cast<uint32_t>(numel + misalign));
        const std::vector<NormSegment> list = {{data.data(), numel, dtype}};
        const DoubleDouble got = sq_norm_cuda_body(list);
        for_each_isa([&](const std::string&) {
          const DoubleDouble want = on_cpu(list);
          ASSERT_EQ(float_bits(norm_from_sq(got)), float_bits(norm_from_sq(want)))
              << numel << " elements, misaligned by " << misalign;
          ASSERT_LE(relative_difference(want, got), kGrouping);
        });
      }
    }
  }
}

// What a warp finds for each chunk: its tensor's elements. As all its lanes find it.
std::vector<int64_t> numel_of_chunks(const NormItems& items, int64_t num_chunks) {
  std::vector<int64_t> found(static_cast<size_t>(num_chunks));
  HostGrid::run(num_chunks, 32, [&](int64_t chunk, int lane, const HostBlock& block) {
    const int64_t numel = item_of_chunk(items, chunk, lane, block).numel;
    EXPECT_EQ(block.max(static_cast<uint32_t>(numel)), static_cast<uint32_t>(numel)) << "lane " << lane;
    if (lane == 0) found[static_cast<size_t>(chunk)] = numel;
  });
  return found;
}

TEST(norm_cuda, every_chunk_finds_its_tensor) {
  const int64_t chunk = kNormChunk, chunk16 = norm_chunk(DType::f16);
  const std::vector<NormSegment> list = {
      {nullptr, 0, DType::f32},         {nullptr, 1, DType::f32},       {nullptr, 0, DType::f16},
      {nullptr, 0, DType::f16},         {nullptr, chunk16, DType::f16}, {nullptr, 2 * chunk16 + 1, DType::bf16},
      {nullptr, chunk + 1, DType::f32}, {nullptr, 5, DType::f32},       {nullptr, 0, DType::bf16}};
  const NormPlan plan(list);
  NormItems few, many;
  EXPECT_TRUE(few.try_assign(plan.items));
  many.table = plan.items.data(), many.count = few.count;
  const std::vector<int64_t> numels = {1, chunk16, 2 * chunk16 + 1, 2 * chunk16 + 1, 2 * chunk16 + 1, chunk + 1, chunk + 1, 5};
  for (const NormItems* items : {&few, &many}) EXPECT_EQ(numel_of_chunks(*items, plan.num_chunks), numels);
  EXPECT_TRUE(NormItems().try_assign(std::vector<NormItem>(NormItems::kFew)));
  EXPECT_FALSE(NormItems().try_assign(std::vector<NormItem>(NormItems::kFew + 1)));
}

TEST(norm_cuda, every_chunk_finds_its_tensor_in_a_long_table) {
  for (const int64_t count : {31, 32, 33, 1023, 1024, 1025, 2500}) {
    if (kThreadSanitizer && count > 33) continue;
    std::vector<NormSegment> list;
    std::vector<int64_t> numels;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t chunks = i % 5 == 0 ? 3 : 1;
      list.push_back({nullptr, (chunks - 1) * kNormChunk + i + 1, DType::f32});
      numels.insert(numels.end(), static_cast<size_t>(chunks), list.back().numel);
    }
    const NormPlan plan(list);
    NormItems items;
    items.table = plan.items.data(), items.count = static_cast<int32_t>(plan.items.size());
    EXPECT_EQ(numel_of_chunks(items, plan.num_chunks), numels) << count;
  }
}

TEST(norm_cuda, a_list_with_more_partial_sums_than_threads) {
  std::vector<Buffer> buffers;
  std::vector<NormSegment> list;
  const int64_t count = kThreadSanitizer ? 30 : 2 * kNormThreads + 40;  // more than a launch takes along, too
  for (int64_t i = 0; i < count; ++i) {
    const int64_t numel = i % 7 * 50;  // none in each seventh
    const DType dtype = kDTypes[i % 3];
    buffers.push_back(random_values(dtype, numel, i % 2, static_cast<uint32_t>(i)));
    list.push_back({buffers.back().data(), numel, dtype});
  }
  const DoubleDouble got = sq_norm_cuda_body(list), want = on_cpu(list);
  EXPECT_EQ(float_bits(norm_from_sq(got)), float_bits(norm_from_sq(want)));
  EXPECT_LE(relative_difference(want, got), kGrouping);
}

// The tree of the sum of partial sums, word for word: 512 sums, then pairs within each 32, then pairs of what 32 gave.
DoubleDouble naive_tree(const DoubleDouble* partial, int64_t count) {
  std::vector<DoubleDouble> sums(512, DoubleDouble{});
  for (int64_t i = 0; i < count; ++i) sums[i % 512] = dd_add(sums[i % 512], partial[i]);
  for (const size_t unit : {size_t{1}, size_t{32}}) {
    for (size_t step = unit; step < unit * (unit == 1 ? 32 : 16); step *= 2) {
      for (size_t i = 0; i < 512; i += 2 * step) sums[i] = dd_add(sums[i], sums[i + step]);
    }
  }
  return sums[0];
}

TEST(norm_cuda, partial_sums_are_added_in_one_tree_whatever_their_number) {
  Random random(9);
  int other_bits = 0;
  for (const int64_t count : {0, 1, 255, 257, 511, 513, 2047, 2049, 4096, 4101, 8197}) {
    Partials partials(count);
    for (int64_t i = 0; i < count; ++i) {
      const double high = std::ldexp(1.0 + std::fabs(random.normal()), static_cast<int>(random.integer(60)) - 30);
      partials.data()[i] = two_sum(high, high * 0x1p-54 * random.normal());
    }
    const DoubleDouble got = partials.total<HostBlock>(), want = naive_tree(partials.data(), count);
    EXPECT_EQ(std::pair(got.high, got.low), std::pair(want.high, want.low)) << count;
    std::reverse(partials.data(), partials.data() + count);
    other_bits += partials.total<HostBlock>().low != want.low;
  }
  EXPECT_GT(other_bits, 3);  // the order of the terms shows
}

TEST(norm_cuda, the_number_of_cuda_blocks_and_their_order_change_no_bit) {
  const int64_t numel = (kThreadSanitizer ? 1 : 5) * kNormChunk + 77;
  Buffer data = random_values(DType::f32, numel, 0, 6);
  const std::vector<NormSegment> list = {{data.data(), kNormChunk + 7, DType::f32}, {data.data(), numel, DType::f32}};
  const DoubleDouble want = sq_norm_cuda_body(list, 0, {0});  // one CUDA block does all chunks
  for (const std::vector<int64_t>& order : {std::vector<int64_t>{0, 1}, {1, 0}, {2, 0, 1}, {7, 5, 0, 2, 4, 6, 1, 3}}) {
    if (kThreadSanitizer && order.size() > 2) continue;
    const DoubleDouble got = sq_norm_cuda_body(list, 0, order), again = sq_norm_cuda_body(list, 0, order, 2);
    EXPECT_EQ(std::pair(got.high, got.low), std::pair(want.high, want.low));
    EXPECT_EQ(std::pair(again.high, again.low), std::pair(want.high, want.low));  // the counter was left at 0
    EXPECT_NE(sq_norm_cuda_body<BlockInAHurry>(list, 0, order).high, want.high);
    EXPECT_TRUE(std::isnan(sq_norm_cuda_body<BlockThatWaits>(list, 0, order).high));
  }
}

TEST(norm_cuda, a_launch_has_as_many_cuda_blocks_as_run_at_once) {
  EXPECT_EQ(norm_grid(1, 132), 1);
  EXPECT_EQ(norm_grid(528, 132), 528);
  EXPECT_EQ(norm_grid(1 << 20, 132), 528);
}

TEST(norm_cuda, launches_that_may_run_at_once_count_apart) {
  NormCounters counters(5);
  const int streams[3] = {};
  EXPECT_EQ(counters.acquire(nullptr, false), 0);
  EXPECT_EQ(counters.acquire(&streams[0], false), 1);
  EXPECT_EQ(counters.acquire(nullptr, false), 0);     // a stream's launches run one after the other
  EXPECT_EQ(counters.acquire(&streams[0], true), 2);  // a graph's may run beside the stream's, and beside another graph's
  EXPECT_EQ(counters.acquire(&streams[0], true), 3);
  EXPECT_EQ(counters.acquire(&streams[0], false), 1);
  EXPECT_EQ(counters.acquire(&streams[1], true), 4);
  EXPECT_EQ(counters.acquire(&streams[1], false), NormCounters::kNone);
  EXPECT_EQ(counters.acquire(&streams[2], true), NormCounters::kNone);
  EXPECT_EQ(counters.acquire(nullptr, false), 0);
}

TEST(norm_cuda, what_is_not_finite_shows) {
  for (const DType dtype : kDTypes) {
    for (const int64_t place : {int64_t{0}, int64_t{700}, int64_t{999}}) {  // 999: in the tail
      for (const float bad : {kInf, -kInf, kNan}) {
        Buffer data = random_values(dtype, 1000, 0, 3);
        store_from_f32(data.data(), dtype, place, bad);
        const DoubleDouble got = sq_norm_cuda_body({{data.data(), 1000, dtype}});
        EXPECT_TRUE(std::isnan(bad) ? std::isnan(got.high) : std::isinf(got.high));
      }
    }
  }
}

TEST(norm_cuda, broken_twins_are_rejected) {
  for (const DType dtype : kDTypes) {
    const int64_t numel = 2048 + 5;
    Buffer data = random_values(dtype, numel, 0, 5);
    const std::vector<NormSegment> list = {{data.data(), numel, dtype}};
    const DoubleDouble want = on_cpu(list);
    const auto rejected = [&](DoubleDouble got) { return !(relative_difference(want, got) <= kGrouping); };
    EXPECT_FALSE(rejected(sq_norm_cuda_body(list)));
    EXPECT_TRUE(rejected(sq_norm_cuda_body<BlockOfOtherLanes>(list)));
    EXPECT_TRUE(rejected(sq_norm_cuda_body({{data.data(), numel - 1, dtype}})));  // a dropped tail
    if (dtype != DType::f32) {
      EXPECT_TRUE(rejected(sq_norm_cuda_body<BlockWithoutWait>(list)));
    }
  }
  if (!kThreadSanitizer) {                                                      // there: planted_race.cpp
    Buffer data = random_values(DType::f32, LanesF32::kStride * kBlock, 0, 5);  // so that all warps come at the same time
    const std::vector<NormSegment> list = {{data.data(), LanesF32::kStride * kBlock, DType::f32}};
    const DoubleDouble want = on_cpu(list);
    EXPECT_TRUE(some_run_is_rejected(
        [&] { return !(relative_difference(want, sq_norm_cuda_body<BlockWithoutSync>(list)) <= kGrouping); }));
  }
}

}  // namespace
}  // namespace shardcore::testing
