// The host-thread backend's queues: order, waits, hand-over, ends with copies in flight, forks.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>

#include "copy/copy_stream.h"
#include "cpp/common.h"
#include "cpp/simulated_copies.h"

namespace shardcore::testing {
namespace {

using Bytes = std::vector<uint8_t>;

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

// Copies that take a while: the last of them is in flight when this returns.
int64_t queue_many(CopyStream& stream, Bytes& dst, const Bytes& src) {
  for (int i = 0; i < 499; ++i) queue(stream, dst, src);
  return queue(stream, dst, src);
}

TEST(copy_stream, numbers_say_which_copies_are_done) {
  const auto backend = make_thread_backend();
  CopyStream& stream = backend->stream(Direction::to_tier);
  const Bytes src = counted(1 << 20, 1);
  Bytes dst(1 << 20, 0), last(1 << 20, 0);
  const int64_t many = queue_many(stream, dst, src);
  const int64_t number = queue(stream, last, src);
  EXPECT_EQ(number, many + 1);
  EXPECT_FALSE(stream.query(number));
  stream.synchronize(1);
  EXPECT_TRUE(stream.query(1));
  stream.synchronize(0);  // done from the beginning
  stream.wait(number, nullptr);
  EXPECT_TRUE(stream.query(number) && stream.query(many));
  EXPECT_EQ(last, src);
  EXPECT_EQ(stream.completed(), number);
}

TEST(copy_stream, the_two_directions_do_not_wait_for_each_other) {
  const auto backend = make_thread_backend();
  CopyStream &in = backend->stream(Direction::to_tier), &out = backend->stream(Direction::from_tier);
  const Bytes src = counted(1 << 20, 1);
  Bytes a(1 << 20, 0), b(1 << 20, 0);
  const int64_t many = queue_many(in, a, src);
  out.synchronize(queue(out, b, src));
  EXPECT_LT(in.completed(), many);
  EXPECT_EQ(b, src);
  in.drain();
}

// Steps over one staging buffer: a copy in, a change, a copy out. One wait is left out: 0 none, 1 before the change, 2 before
// the next round, 3 at the end.
Bytes steps_over_one_buffer(std::unique_ptr<CopyBackend> backend, int left_out) {
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
  in.drain(), out.drain();
  return result;
}

// Values alone show a missing wait: under the latest schedule that is allowed. (TSan shows the race: planted_race.cpp.)
TEST(copy_stream, a_wait_that_is_left_out_changes_the_bytes) {
  Bytes expected = counted(1000, 1);
  for (int round = 0; round < 5; ++round) {
    for (uint8_t& byte : expected) byte = static_cast<uint8_t>(3 * byte + 1);
  }
  const Simulation late{0, 0, /*late=*/true};
  EXPECT_EQ(steps_over_one_buffer(make_thread_backend(), 0), expected);
  EXPECT_EQ(steps_over_one_buffer(make_simulated_backend(late), 0), expected);
  for (const int left_out : {1, 2, 3}) {
    EXPECT_NE(steps_over_one_buffer(make_simulated_backend(late), left_out), expected) << left_out;
  }
}

TEST(copy_stream, an_end_with_copies_in_flight_makes_them) {
  const Bytes src = counted(1 << 20, 1);
  for (const int with : {0, 1, 20}) {
    std::vector<Bytes> dst(20, Bytes(src.size(), 0));
    {
      const auto backend = make_thread_backend();
      for (int i = 0; i < with; ++i) queue(backend->stream(kDirections[i % 2]), dst[static_cast<size_t>(i)], src);
    }
    for (int i = 0; i < with; ++i) ASSERT_EQ(dst[static_cast<size_t>(i)], src) << i;
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
  auto backend = make_thread_backend();
  CopyStream& stream = backend->stream(Direction::to_tier);
  const Bytes src = counted(1 << 20, 1);
  Bytes dst(1 << 20, 0);
  const int64_t done = queue(stream, dst, src);
  stream.synchronize(done);
  const int64_t in_flight = queue_many(stream, dst, src);
  EXPECT_EQ(exit_code_of_fork([&] {
              stream.synchronize(done);
              const std::string message = error_of([&] { stream.synchronize(in_flight); });
              Bytes mine(100, 0);
              stream.synchronize(queue(stream, mine, counted(100, 1)));
              stream.drain();
              backend.reset();
              return mine == counted(100, 1) &&
                     message ==
                         "HostTier.to_tier: copy 501 was in flight when this process was forked, and no thread here makes "
                         "it; expected synchronize() before the fork";
            }),
            0);
  stream.synchronize(in_flight);
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
