// The host-thread backend's queues: order, waits, hand-over, simulated links, failures, ends with copies in flight, forks.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>

#include "copy/copy_thread.h"
#include "copy/host_tier.h"
#include "cpp/common.h"

namespace shardcore::testing {
namespace {

using Bytes = std::vector<uint8_t>;

Simulation late() {
  Simulation simulation;
  simulation.late = true;
  return simulation;
}

Bytes counted(size_t size, int first) {
  Bytes bytes(size);
  std::iota(bytes.begin(), bytes.end(), static_cast<uint8_t>(first));
  return bytes;
}

int64_t queue(CopyStream& stream, Bytes& dst, const Bytes& src) {
  return stream.copy(dst.data(), src.data(), static_cast<int64_t>(src.size()), nullptr);
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const CopyError& error) {
    return error.what();
  }
  return "no error";
}

TEST(copy_stream, copies_of_a_direction_are_made_in_order) {
  const auto backend = make_thread_backend();
  CopyStream& stream = backend->stream(Direction::to_tier);
  // Each copy reads what the one before wrote.
  std::vector<Bytes> chain(50, Bytes(10000, 0));
  chain[0] = counted(10000, 1);
  for (size_t i = 1; i < chain.size(); ++i) EXPECT_EQ(queue(stream, chain[i], chain[i - 1]), static_cast<int64_t>(i));
  stream.synchronize(49);
  EXPECT_EQ(chain[49], chain[0]);
  EXPECT_EQ(stream.completed(), 49);
  EXPECT_EQ(stream.queued(), 49);
  EXPECT_EQ(backend->stream(Direction::from_tier).queued(), 0);
}

TEST(copy_stream, numbers_say_which_copies_are_done) {
  const auto backend = make_thread_backend(late());
  CopyStream& stream = backend->stream(Direction::to_tier);
  const Bytes src = counted(100, 1);
  Bytes first(100, 0), second(100, 0), third(100, 0);
  queue(stream, first, src), queue(stream, second, src), queue(stream, third, src);
  EXPECT_EQ(stream.completed(), 0);
  EXPECT_FALSE(stream.query(1));
  stream.synchronize(2);
  EXPECT_TRUE(stream.query(1));
  EXPECT_TRUE(stream.query(2));
  EXPECT_FALSE(stream.query(3));
  EXPECT_EQ(stream.completed(), 2);
  EXPECT_EQ(second, src);
  EXPECT_EQ(third, Bytes(100, 0)) << "a copy was made before someone waited for it";
  stream.synchronize(1);  // done before
  stream.synchronize(0);  // done from the beginning
  EXPECT_EQ(stream.completed(), 2);
  stream.wait(3, nullptr);
  EXPECT_EQ(third, src);
}

TEST(copy_stream, the_two_directions_do_not_wait_for_each_other) {
  const auto backend = make_thread_backend(late());
  CopyStream &in = backend->stream(Direction::to_tier), &out = backend->stream(Direction::from_tier);
  const Bytes src = counted(64, 1);
  Bytes a(64, 0), b(64, 0);
  queue(in, a, src);
  queue(out, b, src);
  out.synchronize(1);
  EXPECT_EQ(b, src);
  EXPECT_EQ(in.completed(), 0);
  in.synchronize(1);
  EXPECT_EQ(a, src);
}

// Steps over one staging buffer: a copy in, a change, a copy out. One wait is left out: 0 none, 1 before the change, 2 before
// the next round, 3 at the end.
Bytes steps_over_one_buffer(const Simulation& simulation, int left_out) {
  const auto backend = make_thread_backend(simulation);
  CopyStream &in = backend->stream(Direction::to_tier), &out = backend->stream(Direction::from_tier);
  Bytes device = counted(1000, 1), staging(1000, 0);
  int64_t back = 0;
  Bytes result;
  for (int round = 0; round < 5; ++round) {
    if (left_out != 2) out.synchronize(back);
    const int64_t arrived = queue(in, staging, device);
    if (left_out != 1) in.synchronize(arrived);
    for (uint8_t& byte : staging) byte = static_cast<uint8_t>(3 * byte + 1);
    back = queue(out, device, staging);
  }
  if (left_out != 3) out.synchronize(back);
  result = device;
  in.drain(true), out.drain(true);
  return result;
}

// Values alone show a missing wait: under the latest schedule that is allowed. (TSan shows the race: planted_race.cpp.)
TEST(copy_stream, a_wait_that_is_left_out_changes_the_bytes) {
  Bytes expected = counted(1000, 1);
  for (int round = 0; round < 5; ++round) {
    for (uint8_t& byte : expected) byte = static_cast<uint8_t>(3 * byte + 1);
  }
  EXPECT_EQ(steps_over_one_buffer({}, 0), expected);
  EXPECT_EQ(steps_over_one_buffer(late(), 0), expected);
#if !defined(__SANITIZE_THREAD__)  // the twins do race
  for (const int left_out : {1, 2, 3}) EXPECT_NE(steps_over_one_buffer(late(), left_out), expected) << left_out;
#endif
}

TEST(copy_stream, a_throttle_counts_the_time_of_each_copy_after_the_other) {
  Throttle link(1e9);  // a byte takes a nanosecond
  EXPECT_EQ(link.done_ns(0, 1000), 1000);
  EXPECT_EQ(link.done_ns(10, 500), 1500);    // waits for the first one
  EXPECT_EQ(link.done_ns(5000, 500), 5500);  // an idle link saves no time up
  EXPECT_EQ(link.done_ns(5000, 0), 5500);
  Throttle slow(3e8);
  EXPECT_EQ(slow.done_ns(0, 1), 4);  // rounded up
  Throttle none(0);
  EXPECT_EQ(none.done_ns(7, int64_t{1} << 50), 7);
  Throttle stuck(1e-12);
  EXPECT_EQ(stuck.done_ns(7, 1), INT64_MAX);
  EXPECT_EQ(stuck.done_ns(8, 1), INT64_MAX);
}

TEST(copy_stream, each_direction_has_a_link_of_its_own) {
  std::atomic<int64_t> clock{0};
  std::vector<int64_t> until[2];
  Simulation simulation;
  simulation.bytes_per_second = 1e9;
  simulation.now_ns = [&clock] { return clock.load(); };
  for (const Direction direction : kDirections) {
    auto& slept = until[static_cast<int>(direction)];
    simulation.sleep_until_ns = [&slept](int64_t ns) { slept.push_back(ns); };
    const auto backend = make_thread_backend(simulation);
    CopyStream& stream = backend->stream(direction);
    const Bytes src = counted(1000, 1);
    Bytes dst(1000, 0);
    for (const int64_t now : {0, 0, 10000}) {
      clock = now;
      stream.synchronize(queue(stream, dst, src));
    }
    EXPECT_EQ(dst, src);
    Bytes other(1000, 0);  // the other direction's link is free
    CopyStream& opposite = backend->stream(direction == Direction::to_tier ? Direction::from_tier : Direction::to_tier);
    opposite.synchronize(queue(opposite, other, src));
    EXPECT_EQ(slept, (std::vector<int64_t>{1000, 2000, 11000, 11000}));
  }
}

TEST(copy_stream, a_failed_copy_breaks_its_direction_and_says_which_it_was) {
  Simulation simulation;
  simulation.failing_copy = 3;
  const auto backend = make_thread_backend(simulation);
  CopyStream &in = backend->stream(Direction::to_tier), &out = backend->stream(Direction::from_tier);
  const Bytes src = counted(128, 1);
  Bytes a(128, 0), b(128, 0), c(128, 0), d(128, 0);
  in.synchronize(queue(in, a, src));  // the tier's first
  queue(out, b, src);                 // second
  const int64_t failing = queue(in, c, src);
  in.drain(false);
  const std::string message =
      "HostTier.to_tier: copy 2 of 128 bytes failed (a planted fault); no later copy in this direction is made";
  EXPECT_EQ(error_of([&] { in.synchronize(failing); }), message);
  EXPECT_EQ(error_of([&] { in.wait(failing, nullptr); }), message);
  EXPECT_EQ(error_of([&] { in.query(failing); }), message);
  EXPECT_EQ(error_of([&] { queue(in, d, src); }), message);
  EXPECT_EQ(in.completed(), 2);
  EXPECT_EQ(a, src);
  EXPECT_EQ(c, Bytes(128, 0));
  EXPECT_EQ(d, Bytes(128, 0));
  out.synchronize(queue(out, d, src));  // the other direction works
  EXPECT_EQ(b, src);
  EXPECT_EQ(d, src);
}

TEST(copy_stream, what_is_queued_behind_a_failed_copy_is_not_made) {
  Simulation simulation = late();
  simulation.failing_copy = 2;
  const auto backend = make_thread_backend(simulation);
  CopyStream& in = backend->stream(Direction::to_tier);
  const Bytes src = counted(128, 1);
  Bytes a(128, 0), b(128, 0), c(128, 0);
  queue(in, a, src), queue(in, b, src), queue(in, c, src);
  EXPECT_NE(error_of([&] { in.synchronize(3); }), "no error");
  EXPECT_EQ(a, src);
  EXPECT_EQ(b, Bytes(128, 0));
  EXPECT_EQ(c, Bytes(128, 0));
}

TEST(copy_stream, an_end_with_copies_in_flight_makes_them_at_once) {
  for (const bool slow : {false, true}) {
    for (const int with : {0, 1, 20}) {
      Simulation simulation;
      simulation.bytes_per_second = slow ? 1e-3 : 0;  // a day for 100 bytes
      simulation.late = !slow;
      const Bytes src = counted(100, 1);
      std::vector<Bytes> dst(20, Bytes(100, 0));
      {
        const auto backend = make_thread_backend(simulation);
        for (int i = 0; i < with; ++i) queue(backend->stream(kDirections[i % 2]), dst[static_cast<size_t>(i)], src);
      }
      for (int i = 0; i < with; ++i) ASSERT_EQ(dst[static_cast<size_t>(i)], src) << i;
    }
  }
}

TEST(copy_stream, may_be_used_from_several_threads) {
  const auto backend = make_thread_backend();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&backend, t] {
      CopyStream& stream = backend->stream(kDirections[t % 2]);
      const Bytes src = counted(1000, t);
      for (int i = 0; i < 50; ++i) {
        Bytes dst(1000, 0);
        const int64_t number = queue(stream, dst, src);
        stream.synchronize(number);
        EXPECT_GE(stream.completed(), number);
        EXPECT_EQ(dst, src);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

#if !defined(__SANITIZE_THREAD__)  // TSan does not follow a fork of a program with threads
int exit_code_of_fork(const std::function<bool()>& child_is_right) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // ends a child that waits for threads which it does not have
    _exit(child_is_right() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

TEST(copy_stream, a_forked_child_copies_without_its_parents_threads) {
  Simulation simulation = late();
  simulation.bytes_per_second = 1e12;
  auto backend = make_thread_backend(simulation);
  CopyStream& stream = backend->stream(Direction::to_tier);
  const Bytes src = counted(100, 1);
  Bytes dst(100, 0), other(100, 0);
  const int64_t done = queue(stream, dst, src);
  stream.synchronize(done);
  const int64_t in_flight = queue(stream, other, src);
  EXPECT_EQ(exit_code_of_fork([&] {
              stream.synchronize(done);
              const std::string message = error_of([&] { stream.synchronize(in_flight); });
              Bytes mine(100, 0);
              stream.synchronize(queue(stream, mine, src));
              stream.drain(true);
              backend.reset();
              return mine == src && other == Bytes(100, 0) &&
                     message ==
                         "HostTier.to_tier: copy 2 was in flight when this process was forked, and no thread here makes "
                         "it; expected synchronize() before the fork";
            }),
            0);
  stream.synchronize(in_flight);
  EXPECT_EQ(other, src);
}

TEST(copy_stream, a_child_forked_before_the_first_copy_has_threads_of_its_own) {
  auto backend = make_thread_backend();
  const Bytes src = counted(100, 1);
  EXPECT_EQ(exit_code_of_fork([&] {
              CopyStream& stream = backend->stream(Direction::to_tier);
              Bytes mine(100, 0);
              const int64_t number = queue(stream, mine, src);
              stream.synchronize(number);
              backend.reset();
              return number == 1 && mine == src;
            }),
            0);
}
#endif

}  // namespace
}  // namespace shardcore::testing
