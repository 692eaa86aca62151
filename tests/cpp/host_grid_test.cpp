// The host's stand-in for CUDA's blocks and warps gives right results with both kinds of teams, and finds barriers that are
// missing or not reached. That the thread sanitizer sees races in it: planted_race.cpp.
#include "cpp/host_grid.h"

#include <gtest/gtest.h>

#include <atomic>

namespace shardcore::testing {
namespace {

constexpr TeamKind kKinds[] = {TeamKind::fibers, TeamKind::threads};

// The thread sanitizer must be told of fibers; there real threads are what matters.
bool runs(TeamKind kind) { return kind == TeamKind::threads || !kThreadSanitizer; }

TEST(host_grid, warp_operations_see_their_warp) {
  for (const TeamKind kind : kKinds) {
    if (!runs(kind)) continue;
    std::atomic<int> wrong{0}, calls{0};
    HostGrid::run(
        10, 96,
        [&](int64_t, int thread, const HostBlock& block) {
          const int warp = thread / 32, lane = thread % 32;
          for (int round = 0; round < 5; ++round) {
            const auto largest = static_cast<uint32_t>(31 + 1000 * round + warp);
            wrong += block.max(static_cast<uint32_t>(lane * 7 % 32 + 1000 * round + warp)) != largest;
            for (int mask = 1; mask < 32; mask *= 2) {
              const auto theirs = static_cast<uint64_t>((thread ^ mask) + round);
              wrong += block.shfl_xor(static_cast<uint64_t>(thread + round), mask) != theirs;
            }
          }
          ++calls;
        },
        kind);
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(calls, 10 * 96);
  }
}

// Every thread adds what all threads wrote.
int wrong_sums(TeamKind kind, bool with_barrier) {
  std::atomic<int> wrong{0};
  HostGrid::run(
      20, 64,
      [&](int64_t block_index, int thread, const HostBlock& block) {
        auto* const values = block.shared<int32_t>();
        values[thread] = thread + static_cast<int>(block_index);
        if (with_barrier) block.sync();
        int64_t sum = 0;
        for (int i = 0; i < 64; ++i) sum += values[i];
        wrong += sum != 64 * 63 / 2 + 64 * block_index;
      },
      kind);
  return wrong;
}

TEST(host_grid, threads_meet_at_the_barrier_of_a_block) {
  for (const TeamKind kind : kKinds) {
    if (runs(kind)) {
      EXPECT_EQ(wrong_sums(kind, true), 0);
    }
  }
}

TEST(host_grid, a_missing_barrier_gives_wrong_results_on_fibers) {
  if (runs(TeamKind::fibers)) {
    EXPECT_GT(wrong_sums(TeamKind::fibers, false), 0);
  }
}

TEST(host_grid, copies_of_16_bytes_want_addresses_that_are_multiples_of_it) {
  alignas(16) static const char global[32] = {};
  HostGrid::run(1, 32, [&](int64_t, int, const HostBlock& block) {
    EXPECT_NO_THROW(block.copy16(block.shared<char>() + 16, global + 16));
    EXPECT_THROW(block.copy16(block.shared<char>() + 8, global), std::logic_error);
    EXPECT_THROW(block.copy16(block.shared<char>(), global + 4), std::logic_error);
  });
}

TEST(host_grid, a_barrier_that_one_thread_leaves_out_is_an_error) {
  if (!runs(TeamKind::fibers)) return;
  const auto run = [](int absent, bool warp) {
    HostGrid::run(
        1, 64,
        [&](int64_t, int thread, const HostBlock& block) {
          if (thread == absent) return;
          warp ? static_cast<void>(block.max(1)) : block.sync();
        },
        TeamKind::fibers);
  };
  for (const bool warp : {false, true}) {
    EXPECT_THROW(run(40, warp), std::logic_error);
    EXPECT_NO_THROW(run(-1, warp));  // and the next block runs
  }
}

}  // namespace
}  // namespace shardcore::testing
