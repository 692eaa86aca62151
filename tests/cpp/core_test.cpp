// Small parts of csrc/core: powers, sums, chunks, executors, the choice of the instruction set, the FTZ/DAZ guard.
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "core/block_walk.h"
#include "core/chunks.h"
#include "core/double_double.h"
#include "core/fp_env.h"
#include "core/int_pow.h"
#include "core/thread_pool.h"
#include "cpp/common.h"
#include "cpp/host_grid.h"

namespace shardcore::testing {
namespace {

#if SHARDCORE_X86
using Quad = __float128;
#else
using Quad = long double;  // 128 bits on aarch64
#endif

TEST(core, int_pow_is_the_power) {
  for (const double base : {0.0, 0.5, 0.9, 0.95, 0.999, 0.99999}) {
    for (const int64_t n : {0, 1, 2, 3, 7, 10, 100, 1000, 12345, 1000000}) {
      const double want = static_cast<double>(std::pow(static_cast<long double>(base), static_cast<long double>(n)));
      EXPECT_NEAR(int_pow(base, n), want, static_cast<double>(n + 1) * 0x1p-53 * want + 1e-300) << base << "^" << n;
    }
  }
  EXPECT_EQ(int_pow(0.999, INT64_MAX), 0.0);
}

TEST(core, two_sum_loses_nothing) {
  Random random(3);
  for (int i = 0; i < 10000; ++i) {
    const double a = std::ldexp(random.uniform() - 0.5, static_cast<int>(random.integer(200)) - 100);
    const double b = std::ldexp(random.uniform() - 0.5, static_cast<int>(random.integer(40)) - 20 + std::ilogb(a));
    const DoubleDouble s = two_sum(a, b);
    ASSERT_EQ(s.high, a + b);
    const Quad exact = static_cast<Quad>(a) + b;
    ASSERT_TRUE(static_cast<Quad>(s.high) + s.low == exact);
  }
}

TEST(core, sums_of_not_finite_numbers_are_not_finite) {
  const DoubleDouble inf = dd_add(DoubleDouble{1.0, 0.0}, INFINITY);
  EXPECT_EQ(inf.high, INFINITY);
  EXPECT_EQ(inf.low, 0.0);
  EXPECT_EQ(dd_add(inf, 5.0).high + dd_add(inf, 5.0).low, INFINITY);
  EXPECT_TRUE(std::isnan(dd_add(inf, static_cast<double>(kNan)).high));
  EXPECT_TRUE(std::isnan(dd_add(dd_add(DoubleDouble{}, static_cast<double>(kNan)), 1.0).high));
}

struct Numel {
  int64_t numel;
};

TEST(core, chunks_cover_every_element_once_whatever_the_list) {
  for (const int64_t count : {1, 2, 7, 8, 9, 63, 64, 65, 511, 513, 1500}) {
    const std::vector<int64_t> sizes = {0, 1, 4, 5, 0, 0, 12, 3, 0};
    std::vector<Numel> list;
    for (int64_t i = 0; i < count; ++i) list.push_back({sizes[static_cast<size_t>(i % 9)]});
    const HostTable<Numel> table(list, 4);
    std::vector<int64_t> covered(list.size());
    for (int64_t index = 0; index < table.num_chunks(); ++index) {
      const Chunk chunk = chunk_at(table.get(), index, 4);
      const auto tensor = static_cast<size_t>(chunk.tensor);
      ASSERT_EQ(chunk.first, covered[tensor]) << count << " tensors, chunk " << index;
      covered[tensor] += std::min<int64_t>(4, list[tensor].numel - chunk.first);
    }
    for (size_t i = 0; i < list.size(); ++i) ASSERT_EQ(covered[i], list[i].numel) << count << " tensors, tensor " << i;
  }
}

TEST(core, chunks_of_huge_tensors_are_found) {
  constexpr int64_t kHuge = (int64_t{1} << 40) + 1;  // of 2^38 + 1 chunks
  const std::vector<Numel> list = {{0}, {kHuge}, {0}, {1}, {kHuge}, {2}};
  const HostTable<Numel> table(list, 4);
  const int64_t chunks = (int64_t{1} << 38) + 1;
  EXPECT_EQ(table.num_chunks(), 2 * chunks + 2);
  const std::vector<std::array<int64_t, 3>> wanted = {
      {0, 1, 0},          {chunks - 1, 1, kHuge - 1}, {chunks, 3, 0},        {chunks + 1, 4, 0},
      {chunks + 2, 4, 4}, {2 * chunks, 4, kHuge - 1}, {2 * chunks + 1, 5, 0}};
  for (const auto& [index, tensor, first] : wanted) {
    const Chunk chunk = chunk_at(table.get(), index, 4);
    EXPECT_EQ(chunk.tensor, tensor) << index;
    EXPECT_EQ(chunk.first, first) << index;
  }
}

TEST(core, block_walk_visits_every_block_once_however_split) {
  const std::vector<int64_t> numels = {0, 0, 1, 256, 257, 0, 1000, 0, 255, 0, 0};
  const auto num_tensors = static_cast<int64_t>(numels.size());
  const BlockWalk walk(num_tensors, [&](int64_t i) { return numels[static_cast<size_t>(i)]; });
  EXPECT_EQ(walk.num_blocks(), 1 + 1 + 2 + 4 + 1);
  for (int64_t step = 1; step <= walk.num_blocks(); ++step) {
    std::multiset<std::pair<int64_t, int64_t>> seen;
    for (int64_t begin = 0; begin < walk.num_blocks(); begin += step) {
      walk.visit(begin, std::min(walk.num_blocks(), begin + step), [&](int64_t i, int64_t first, int64_t last) {
        ASSERT_LT(first, last);
        for (int64_t block = first; block < last; ++block) seen.insert({i, block});
      });
    }
    std::multiset<std::pair<int64_t, int64_t>> want;
    for (int64_t i = 0; i < num_tensors; ++i) {
      for (int64_t block = 0; block < blocks_of(numels[static_cast<size_t>(i)]); ++block) want.insert({i, block});
    }
    EXPECT_EQ(seen, want) << "step " << step;
  }
  const BlockWalk empty(0, [](int64_t) { return int64_t{0}; });
  EXPECT_EQ(empty.num_blocks(), 0);
}

TEST(core, thread_pool_covers_the_range_once) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (const int64_t count : {0, 1, 2, 7, 8, 9, 1000}) {
      for (const int64_t grain : {1, 3, 5000}) {
        std::vector<std::atomic<int>> hits(static_cast<size_t>(count));
        pool.parallel_for(10, 10 + count, grain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i - 10)];
        });
        for (const auto& h : hits) ASSERT_EQ(h, 1) << threads << " threads, " << count << " items";
      }
    }
  }
}

TEST(core, thread_pool_takes_jobs_in_a_row_and_after_its_threads_have_slept) {
  ThreadPool pool(4);
  std::vector<int64_t> hits(64);  // not atomic: TSan sees a part that two threads take, or that outlives its job
  for (int64_t job = 0; job < 2000; ++job) {
    if (job % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const int64_t count = 1 + job % 64;
    pool.parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
    });
  }
  int64_t expected = 0;
  for (int64_t i = 63; i >= 0; --i) {
    for (int64_t job = 0; job < 2000; ++job) expected += job % 64 == i;
    ASSERT_EQ(hits[static_cast<size_t>(i)], expected) << i;
  }
}

TEST(core, thread_pool_passes_exceptions_on_and_works_after_them) {
  ThreadPool pool(4);
  EXPECT_THROW(pool.parallel_for(0, 100, 1,
                                 [](int64_t begin, int64_t) {
                                   if (begin > 0) throw std::runtime_error("planted");
                                 }),
               std::runtime_error);
  EXPECT_THROW(pool.parallel_for(0, 100, 1,
                                 [](int64_t begin, int64_t) {
                                   if (begin == 0) throw std::runtime_error("planted in the caller");
                                 }),
               std::runtime_error);
  std::atomic<int64_t> sum{0};
  pool.parallel_for(0, 100, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  EXPECT_EQ(sum, 100);
}

#if defined(__linux__)
// Whether a thread of this process comes to sleep, and does so for a few looks in a row: who spins is always found running.
bool falls_asleep(const std::string& thread) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  for (int looks = 0; std::chrono::steady_clock::now() < end;) {
    std::string line;
    std::getline(std::ifstream("/proc/self/task/" + thread + "/stat"), line);
    looks = line.compare(line.rfind(')') + 2, 1, "S") == 0 ? looks + 1 : 0;
    if (looks == 3) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

TEST(core, thread_pool_sleeps_when_nothing_is_to_do) {
  ThreadPool pool(2);
  const auto self = [] { return std::to_string(syscall(SYS_gettid)); };
  const std::string caller = self();
  std::string worker;
  std::atomic<bool> begun{false};
  bool slept = false;
  pool.parallel_for(0, 2, 1, [&](int64_t, int64_t) {
    if (self() == caller) {
      while (!begun) std::this_thread::yield();
    } else {
      worker = self();
      begun = true;
      slept = falls_asleep(caller);  // who waits for the end of a job
    }
  });
  EXPECT_TRUE(slept);
  EXPECT_TRUE(falls_asleep(worker));  // who waits for the next one
}
#endif

TEST(core, thread_pool_that_cannot_start_ends_the_threads_it_started) {
  std::atomic<int> started{0}, ended{0};
  const ThreadPool::Spawn third_fails = [&](const std::function<void()>& loop) {
    if (started == 2) throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
    ++started;
    return std::thread([&ended, loop] {
      loop();
      ++ended;
    });
  };
  EXPECT_THROW(ThreadPool(8, third_fails), std::system_error);
  EXPECT_EQ(started, 2);
  EXPECT_EQ(ended, 2);
}

#if !defined(__SANITIZE_THREAD__)  // TSan does not follow a fork of a program with threads
TEST(core, thread_pool_works_in_a_forked_child) {
  ThreadPool pool(4);
  std::atomic<int64_t> sum{0};
  const auto add = [&](int64_t begin, int64_t end) { sum += end - begin; };
  pool.parallel_for(0, 100, 1, add);
  const pid_t child = fork();
  if (child == 0) {
    pool.parallel_for(0, 100, 1, add);
    _exit(sum == 200 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif

TEST(core, isa_choice) {
  const std::vector<std::string> isas = cpu_isas();
  ASSERT_FALSE(isas.empty());
  EXPECT_EQ(isas.back(), SHARDCORE_X86 ? "base" : "neon");
  const std::string before = cpu_isa_name(cpu_isa());
  for_each_isa([](const std::string& isa) { EXPECT_EQ(cpu_isa_name(cpu_isa()), isa); });
  EXPECT_EQ(cpu_isa_name(cpu_isa()), before);
  try {
    set_cpu_isa("sse9");
    FAIL() << "sse9 was accepted";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("has \"sse9\"; expected " + isas.front()), std::string::npos) << error.what();
  }
  EXPECT_EQ(cpu_isa_name(cpu_isa()), before);
}

#if SHARDCORE_X86
TEST(core, subnormal_guard_clears_and_restores) {
  volatile float tiny = 1e-40f;
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040u);
  EXPECT_EQ(tiny * 1.0f, 0.0f);
  {
    const SubnormalGuard guard;
    EXPECT_EQ(_mm_getcsr() & 0x8040u, 0u);
    EXPECT_EQ(tiny * 1.0f, tiny);
  }
  EXPECT_EQ(_mm_getcsr() & 0x8040u, 0x8040u);
  _mm_setcsr(saved);
}
#endif

}  // namespace
}  // namespace shardcore::testing
