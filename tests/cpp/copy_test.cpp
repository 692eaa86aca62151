// The cpu tier: buffers of exact size, counted copies, ownership; host pages.
#include <algorithm>
#include <thread>

#include "copy/host_memory.h"
#include "copy/host_tier.h"
#include "core/executor.h"
#include "core/thread_pool.h"
#include "cpp/common.h"

namespace shardcore::testing {
namespace {

TEST(copy, pages_are_zero_and_large_ones_start_at_a_huge_page) {
  for (const int64_t size :
       {int64_t{1}, int64_t{4096}, int64_t{5000}, (int64_t{2} << 20) - 1, int64_t{2} << 20, (int64_t{5} << 20) + 3}) {
    auto* const data = static_cast<uint8_t*>(allocate_pages(size));
    for (int64_t i = 0; i < size; i += 997) ASSERT_EQ(data[i], 0);
    std::fill_n(data, size, uint8_t{1});
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % (size >= (2 << 20) ? 2 << 20 : 4096), 0u);
    free_pages(data, size);
  }
  EXPECT_THROW(allocate_pages(int64_t{1} << 60), std::bad_alloc);
}

TEST(copy, parallel_copy_moves_every_byte_and_no_other) {
  Random random(60);
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    for (const int64_t size : {0, 1, 100, 65536, 65537, 1000003}) {
      Buffer src(size, 1), dst(size, 2);
      for (int64_t i = 0; i < size; ++i) src.as<uint8_t>()[i] = static_cast<uint8_t>(random.bits());
      copy_parallel(dst.data(), src.data(), size, pool);
      ASSERT_EQ(dst.bytes(), src.bytes());
      ASSERT_TRUE(dst.sentinels_intact());
    }
  }
}

TEST(copy, tier_counts_bytes_and_knows_its_buffers) {
  HostTier tier(make_thread_backend());
  SerialExecutor executor;
  auto* const a = static_cast<char*>(tier.allocate(1000));
  auto* const b = static_cast<char*>(tier.allocate(5));
  EXPECT_EQ(tier.bytes_allocated(), 1005);
  EXPECT_TRUE(tier.owns(a, 1000));
  EXPECT_TRUE(tier.owns(a + 999, 1));
  EXPECT_TRUE(tier.owns(b, 5));
  EXPECT_FALSE(tier.owns(a, 1001));
  EXPECT_FALSE(tier.owns(a + 999, 2));
  EXPECT_FALSE(tier.owns(a - 1, 2));
  char local[8] = "seven77";
  EXPECT_FALSE(tier.owns(local, 1));
  tier.to_tier(a + 10, local, 8, nullptr, executor);
  char back[8] = {};
  tier.from_tier(back, a + 10, 8, nullptr, executor);
  tier.from_tier(back, a + 10, 3, nullptr, executor);
  tier.synchronize();
  EXPECT_STREQ(back, local);
  EXPECT_EQ(tier.bytes_to_tier(), 8);
  EXPECT_EQ(tier.bytes_from_tier(), 11);
  tier.release(a);
  EXPECT_FALSE(tier.owns(a, 1));
  EXPECT_EQ(tier.bytes_allocated(), 5);
  tier.release(b);
  EXPECT_EQ(tier.bytes_allocated(), 0);
}

TEST(copy, tier_may_be_used_from_several_threads) {
  HostTier tier(make_thread_backend());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&tier, t] {
      SerialExecutor executor;
      std::vector<char> mine(1000, static_cast<char>(t)), back(1000);
      for (int i = 0; i < 50; ++i) {
        void* const data = tier.allocate(1000);
        tier.to_tier(data, mine.data(), 1000, nullptr, executor);
        tier.from_tier(back.data(), data, 1000, nullptr, executor);
        EXPECT_EQ(back, mine);
        tier.release(data);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(tier.bytes_to_tier(), 4 * 50 * 1000);
  EXPECT_EQ(tier.bytes_from_tier(), 4 * 50 * 1000);
  EXPECT_EQ(tier.bytes_allocated(), 0);
}

}  // namespace
}  // namespace shardcore::testing
