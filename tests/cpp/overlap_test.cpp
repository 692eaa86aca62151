// OverlapCheck against every pair of ranges, and what it remembers.
#include "core/overlap.h"
#include "cpp/common.h"

namespace shardcore::testing {
namespace {

using Ranges = std::vector<MemoryRange>;

bool share(const MemoryRange& a, const MemoryRange& b) { return a.begin < b.end && b.begin < a.end; }

// Whether any pair shares bytes of which one is written.
bool any_pair(const Ranges& written, const Ranges& read) {
  for (size_t i = 0; i < written.size(); ++i) {
    for (size_t j = i + 1; j < written.size(); ++j) {
      if (share(written[i], written[j])) return true;
    }
    for (const MemoryRange& r : read) {
      if (share(written[i], r)) return true;
    }
  }
  return false;
}

TEST(overlap, agrees_with_all_pairs) {
  Random random(5);
  OverlapCheck check;  // one for all, so that it must forget what it refused
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    Ranges lists[2];
    int64_t tag = 0;
    for (Ranges& ranges : lists) {
      const auto count = random.integer(4);
      for (int64_t i = 0; i < count; ++i) {
        const auto begin = static_cast<uintptr_t>(64 + random.integer(60));
        ranges.push_back({begin, begin + 1 + static_cast<uintptr_t>(random.integer(6)), tag++});
      }
    }
    const bool want = any_pair(lists[0], lists[1]);
    const auto found = check.find(lists[0], lists[1]);
    ASSERT_EQ(found.has_value(), want);
    ASSERT_EQ(check.find(lists[0], lists[1]).has_value(), want) << "asked again";
    if (!found) continue;
    ++refused;
    ASSERT_LT(found->first_tag, found->second_tag);
    Ranges all = lists[0];
    all.insert(all.end(), lists[1].begin(), lists[1].end());
    ASSERT_TRUE(share(all[static_cast<size_t>(found->first_tag)], all[static_cast<size_t>(found->second_tag)]));
    ASSERT_LT(found->first_tag, static_cast<int64_t>(lists[0].size())) << "one of them must be written";
  }
  EXPECT_GT(refused, 2000);
  EXPECT_LT(refused, 18000);
}

TEST(overlap, neighbours_and_nothing_are_fine) {
  OverlapCheck check;
  EXPECT_FALSE(check.find({}, {{0, 8, 0}, {0, 8, 1}}));
  EXPECT_FALSE(check.find({{8, 16, 0}, {0, 8, 1}}, {{16, 20, 2}, {16, 24, 3}}));
  EXPECT_TRUE(check.find({{8, 16, 0}, {0, 8, 1}}, {{15, 20, 2}}));
  EXPECT_FALSE(check.find({}, {{15, 20, 2}})) << "the ranges of an earlier call count no more";
}

}  // namespace
}  // namespace shardcore::testing
