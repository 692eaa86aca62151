// The host's stand-in for warps gives right results. That the thread sanitizer sees races in it: planted_race.cpp.
#include "cpp/host_warps.h"

#include <gtest/gtest.h>

#include <atomic>

namespace shardcore::testing {
namespace {

TEST(host_warps, every_lane_gets_the_largest_of_its_warp) {
  std::atomic<int> wrong{0}, calls{0};
  for (int block = 0; block < 20; ++block) {
    HostWarps(3).run([&](int thread, const HostWarp& warp) {
      for (uint32_t round = 0; round < 5; ++round) {
        const uint32_t largest =
            warp.max(static_cast<uint32_t>(thread) * 7 % 32 + 1000 * round + static_cast<uint32_t>(thread / 32));
        wrong += largest != 31 + 1000 * round + static_cast<uint32_t>(thread / 32);
      }
      ++calls;
    });
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(calls, 20 * 96);
}

}  // namespace
}  // namespace shardcore::testing
