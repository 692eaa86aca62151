// find_shared against every pair of ranges.
#include "core/overlap.h"
#include "cpp/common.h"

namespace shardcore::testing {
namespace {

using Ranges = std::vector<MemoryRange>;

bool share(const MemoryRange& a, const MemoryRange& b) { return a.begin < b.end && b.begin < a.end; }

// Whether any pair shares bytes of which one is written.
bool any_pair(const Ranges& ranges) {
  for (size_t i = 0; i < ranges.size(); ++i) {
    for (size_t j = i + 1; j < ranges.size(); ++j) {
      if ((ranges[i].written || ranges[j].written) && share(ranges[i], ranges[j])) return true;
    }
  }
  return false;
}

TEST(overlap, agrees_with_all_pairs) {
  Random random(5);
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    Ranges ranges;
    for (int64_t i = 0, count = random.integer(8); i < count; ++i) {
      const auto begin = static_cast<uintptr_t>(64 + random.integer(60));
      ranges.push_back(
          {begin, begin + 1 + static_cast<uintptr_t>(random.integer(6)), {0, static_cast<size_t>(i)}, random.integer(2) == 0});
    }
    const auto found = find_shared(ranges);
    ASSERT_EQ(found.has_value(), any_pair(ranges));
    if (!found) continue;
    ++refused;
    ASSERT_LT(found->first, found->second);
    const MemoryRange &first = ranges[found->first.index], &second = ranges[found->second.index];
    ASSERT_TRUE(share(first, second));
    ASSERT_TRUE(first.written || second.written);
  }
  EXPECT_GT(refused, 2000);
  EXPECT_LT(refused, 18000);
}

TEST(overlap, neighbours_and_nothing_are_fine) {
  EXPECT_FALSE(find_shared({}));
  EXPECT_FALSE(find_shared({{0, 8, {0, 0}, false}, {0, 8, {0, 1}, false}}));
  EXPECT_FALSE(find_shared({{8, 16, {0, 0}, true}, {0, 8, {0, 1}, true}, {16, 20, {0, 2}, false}, {16, 24, {0, 3}, false}}));
  EXPECT_TRUE(find_shared({{8, 16, {0, 0}, true}, {0, 8, {0, 1}, true}, {15, 20, {0, 2}, false}}));
}

TEST(overlap, owners_are_in_the_order_of_lists_and_then_of_tensors) {
  const auto found = find_shared({{0, 8, {1, 0}, true}, {4, 9, {0, 7}, true}});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->first, (MemoryOwner{0, 7}));
  EXPECT_EQ(found->second, (MemoryOwner{1, 0}));
}

}  // namespace
}  // namespace shardcore::testing
