// The cpu tier: buffers of exact size, what is pinned, counted copies, ownership; host pages and their NUMA node.
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

#include "copy/host_memory.h"
#include "copy/host_tier.h"
#include "cpp/common.h"
#include "cpp/simulated_copies.h"

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

TEST(copy, tier_counts_bytes_and_knows_its_buffers) {
  HostTier tier(make_thread_backend(), false, -1);
  auto* const a = static_cast<char*>(tier.allocate(1000, true));
  auto* const b = static_cast<char*>(tier.allocate(5, true));
  EXPECT_EQ(tier.bytes_allocated(), 1005);
  EXPECT_TRUE(tier.owns(a, 1000));
  EXPECT_TRUE(tier.owns(a + 999, 1));
  EXPECT_TRUE(tier.owns(b, 5));
  EXPECT_FALSE(tier.owns(a, 1001));
  EXPECT_FALSE(tier.owns(a + 999, 2));
  EXPECT_FALSE(tier.owns(a - 1, 2));
  char local[8] = "seven77";
  EXPECT_FALSE(tier.owns(local, 1));
  EXPECT_EQ(tier.copy(Direction::to_tier, a + 10, local, 8, nullptr), 1);
  tier.synchronize();
  char back[8] = {};
  EXPECT_EQ(tier.copy(Direction::from_tier, back, a + 10, 8, nullptr), 1);
  EXPECT_EQ(tier.copy(Direction::from_tier, back, a + 10, 3, nullptr), 2);
  EXPECT_EQ(tier.bytes_from_tier(), 11);  // counted when queued
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
  HostTier tier(make_thread_backend(), false, -1);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&tier, t] {
      std::vector<char> mine(1000, static_cast<char>(t)), back(1000);
      for (int i = 0; i < 50; ++i) {
        void* const data = tier.allocate(1000, false);
        CopyStream &in = tier.stream(Direction::to_tier), &out = tier.stream(Direction::from_tier);
        in.synchronize(tier.copy(Direction::to_tier, data, mine.data(), 1000, nullptr));
        out.synchronize(tier.copy(Direction::from_tier, back.data(), data, 1000, nullptr));
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

const int64_t kPage = sysconf(_SC_PAGESIZE);

// A tier whose system locks so many pages.
std::unique_ptr<HostTier> pinning_tier(int64_t system_pages, bool pin, int64_t limit_bytes) {
  return std::make_unique<HostTier>(make_simulated_backend({0, 0, false, system_pages * kPage}), pin, limit_bytes);
}

TEST(copy, pinned_buffers_take_whole_pages_and_no_more) {
  const auto tier = pinning_tier(100, true, -1);
  void* const a = tier->allocate(5 * kPage + 1, true);  // not 8 pages
  EXPECT_EQ(tier->bytes_pinned(), 6 * kPage);
  EXPECT_EQ(tier->bytes_allocated(), 5 * kPage + 1);
  void* const b = tier->allocate(3 * kPage, false);
  EXPECT_EQ(tier->bytes_pinned(), 6 * kPage);
  void* const c = tier->allocate(kPage, true);
  EXPECT_EQ(tier->bytes_pinned(), 7 * kPage);
  for (void* const data : {a, b, c}) tier->release(data);
  EXPECT_EQ(tier->bytes_pinned(), 0);
  EXPECT_EQ(tier->pin_refusal(), "");
}

TEST(copy, what_may_not_be_pinned_is_pageable_and_counted) {
  const auto capped = pinning_tier(100, true, 4 * kPage + 7);
  void* const a = capped->allocate(3 * kPage, true);
  void* const b = capped->allocate(kPage + 1, true);  // two pages: one too many
  EXPECT_EQ(capped->bytes_pinned(), 3 * kPage);
  EXPECT_EQ(capped->bytes_refused(), 2 * kPage);
  EXPECT_EQ(capped->pin_refusal(), "pin_memory_limit is " + std::to_string(4 * kPage + 7) + " bytes, of which " +
                                       std::to_string(3 * kPage) + " are pinned");
  static_cast<char*>(b)[kPage] = 1;
  EXPECT_TRUE(capped->queues(static_cast<char*>(a) + 2 * kPage) && !capped->queues(b));
  capped->release(a);
  void* const c = capped->allocate(4 * kPage, true);  // there is room again
  EXPECT_EQ(capped->bytes_pinned(), 4 * kPage);
  capped->release(b), capped->release(c);
  EXPECT_EQ(capped->bytes_refused(), 0);

  const auto refused = pinning_tier(2, true, -1);
  void* const d = refused->allocate(3 * kPage, true);
  EXPECT_EQ(refused->bytes_pinned(), 0);
  EXPECT_EQ(refused->pin_refusal(), "the simulated system locks no more pages");
  refused->release(d);

  const std::unique_ptr<HostTier> tiers[] = {pinning_tier(100, false, -1),
                                             std::make_unique<HostTier>(make_thread_backend(), true, 0)};
  for (const auto& tier : tiers) {
    void* const e = tier->allocate(kPage, true);  // not asked to, or without any meaning
    EXPECT_EQ(tier->bytes_pinned() + tier->bytes_refused(), 0);
    EXPECT_EQ(tier->queues(e), tier != tiers[0]);
    tier->release(e);
  }
}

class FakeSys {
 public:
  explicit FakeSys(const std::string& online) {
    char name[] = "/tmp/shardcore_sys_XXXXXX";
    root_ = mkdtemp(name);
    write("/devices/system/node", "online", online);
  }
  ~FakeSys() { std::filesystem::remove_all(root_); }
  void write(const std::string& folder, const std::string& file, const std::string& text) const {
    std::filesystem::create_directories(root_ + folder);
    std::ofstream(root_ + folder + "/" + file) << text << "\n";
  }
  int node_of(const std::string& address) const { return numa_node_of(address, root_); }

 private:
  std::string root_;
};

TEST(copy, the_node_of_a_device_is_read_where_there_are_several) {
  for (const std::string online : {"0-1", "0", "0,2", ""}) {
    const FakeSys sys(online);
    sys.write("/bus/pci/devices/0000:c1:00.0", "numa_node", "1");
    sys.write("/bus/pci/devices/0000:02:00.0", "numa_node", "-1");
    const bool several = online.size() > 1;
    EXPECT_EQ(sys.node_of("0000:C1:00.0"), several ? 1 : -1) << online;
    EXPECT_EQ(sys.node_of("0000:02:00.0"), -1);
    EXPECT_EQ(sys.node_of("0000:03:00.0"), -1);
  }
  EXPECT_EQ(numa_node_of("0000:c1:00.0", "/nowhere"), -1);
}

#if defined(SYS_mbind)
// What linux/mempolicy.h calls MPOL_F_ADDR, and with it MPOL_F_NODE.
constexpr unsigned long kPolicyOf = 2, kNodeOf = 3;

int policy_at(const void* data, unsigned long what = kPolicyOf) {
  int found = -1;
  EXPECT_EQ(syscall(SYS_get_mempolicy, &found, nullptr, 0UL, data, what), 0);
  return found;
}

TEST(copy, pages_lie_on_the_nodes_that_were_asked_for) {
  constexpr int kDefault = 0, kPreferred = 1, kInterleave = 3;
  HostTier tier(make_thread_backend(), false, -1);
  const int64_t size = 16 * kPage;
  auto* const plain = static_cast<char*>(tier.allocate(size, false));
  auto* const on_one = static_cast<char*>(tier.allocate(size, false, {0}));
  auto* const by_turns = static_cast<char*>(tier.allocate(size, false, {0, 1}));
  if (!tier.node_refusal().empty()) GTEST_SKIP() << "the kernel accepts no NUMA policy here";
  EXPECT_EQ(policy_at(plain), kDefault);
  EXPECT_EQ(policy_at(on_one), kPreferred);
  EXPECT_EQ(policy_at(by_turns), kInterleave);
  EXPECT_EQ(policy_at(by_turns + size - 1), kInterleave);
  std::fill_n(on_one, size, char{1});
  EXPECT_EQ(policy_at(on_one + 5 * kPage, kNodeOf), 0);
  std::thread other([&] {  // which has a policy of its own, as numactl would have set it
    const unsigned long node_0 = 1;
    ASSERT_EQ(syscall(SYS_set_mempolicy, kPreferred, &node_0, 64UL), 0);
    void* const own = tier.allocate(kPage, false, {0, 1});
    EXPECT_EQ(policy_at(own), kDefault);  // what the thread has holds
    tier.release(own);
  });
  other.join();
  for (void* const data : {plain, on_one, by_turns}) tier.release(data);
  EXPECT_EQ(tier.node_refusal(), "");
}
#endif

TEST(copy, memory_that_the_system_does_not_place_is_as_good) {
  for (const int node : {1023, 5000, -1}) {  // no machine here has 1024 nodes
    HostTier tier(make_thread_backend(), false, -1);
    auto* const data = static_cast<char*>(tier.allocate(kPage, false, {node}));
    std::fill_n(data, kPage, char{1});
    EXPECT_EQ(tier.node_refusal().rfind("mbind: ", 0), 0u) << tier.node_refusal();
    tier.release(data);
  }
}

}  // namespace
}  // namespace shardcore::testing
