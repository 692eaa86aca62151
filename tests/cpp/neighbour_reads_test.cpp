// Pieces that processes read from each other: two ends in this process, and ends in processes of their own, some of which die.
#include "copy/neighbour_reads.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>

#include <chrono>
#include <functional>
#include <numeric>
#include <thread>

#include "cpp/common.h"

namespace shardcore::testing {
namespace {

constexpr int64_t kMinute = 60'000'000'000;

// Where the kernel lets no process read another's memory (some containers, emulators), there is nothing to test.
std::string refusal() {
  NeighbourReads a(2, 0, kMinute), b(2, 1, kMinute);
  return a.connect(1, b.address());
}

class neighbour_reads : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = refusal();
    if (!why.empty()) GTEST_SKIP() << why;
  }
};

struct Pair {
  explicit Pair(int64_t timeout_ns = kMinute) : a(2, 0, timeout_ns), b(2, 1, timeout_ns) {
    EXPECT_EQ(a.connect(1, b.address()), "");
    EXPECT_EQ(b.connect(0, a.address()), "");
  }
  NeighbourReads a, b;
};

std::vector<int32_t> numbers(size_t count, int32_t from) {
  std::vector<int32_t> values(count);
  std::iota(values.begin(), values.end(), from);
  return values;
}

int64_t size_of(const std::vector<int32_t>& values) { return static_cast<int64_t>(4 * values.size()); }

std::string error_of(Ticket& ticket) {
  try {
    ticket.wait();
  } catch (const CopyError& error) {
    return error.what();
  }
  return "";
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text << "\nlacks: " << part;
}

TEST_F(neighbour_reads, pieces_cross_in_any_order_of_tags) {
  Pair pair;
  const auto x = numbers(100'000, 1), y = numbers(70'000, -5), z = numbers(3, 9);
  std::vector<int32_t> got_x(x.size()), got_y(y.size()), got_z(z.size());
  std::vector<std::shared_ptr<Ticket>> tickets;
  tickets.push_back(pair.b.receive(0, 7, got_y.data(), size_of(y), nullptr));  // before anything is sent
  tickets.push_back(pair.a.send(1, 5, x.data(), size_of(x), nullptr));
  tickets.push_back(pair.a.send(1, 7, y.data(), size_of(y), nullptr));
  tickets.push_back(pair.b.send(0, 5, z.data(), size_of(z), nullptr));
  tickets.push_back(pair.b.receive(0, 5, got_x.data(), size_of(x), nullptr));  // the other was sent later
  tickets.push_back(pair.a.receive(1, 5, got_z.data(), size_of(z), nullptr));
  for (const auto& ticket : tickets) ticket->wait();
  EXPECT_EQ(got_x, x);
  EXPECT_EQ(got_y, y);
  EXPECT_EQ(got_z, z);
}

TEST_F(neighbour_reads, of_one_tag_the_first_goes_to_the_first_and_more_than_the_slots_wait) {
  Pair pair;
  constexpr int kPieces = 2000;  // 1024 are on offer at a time
  std::vector<std::vector<int32_t>> sent, got(kPieces, std::vector<int32_t>(10));
  std::vector<std::shared_ptr<Ticket>> tickets;
  for (int i = 0; i < kPieces; ++i) sent.push_back(numbers(10, 1000 * i));
  for (const auto& piece : sent) tickets.push_back(pair.a.send(1, 1, piece.data(), size_of(piece), nullptr));
  for (auto& piece : got) tickets.push_back(pair.b.receive(0, 1, piece.data(), size_of(piece), nullptr));
  for (const auto& ticket : tickets) ticket->wait();
  EXPECT_EQ(got, sent);
}

TEST_F(neighbour_reads, memory_is_kept_until_it_was_read_and_let_go_of_then) {
  Pair pair;
  auto x = std::make_shared<std::vector<int32_t>>(numbers(50'000, 3));
  const std::vector<int32_t> expected = *x;
  const std::weak_ptr<void> memory = x;
  const int32_t* const data = x->data();
  pair.a.send(1, 0, data, size_of(expected), std::move(x));  // nobody keeps the ticket
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(memory.expired());
  std::vector<int32_t> got(expected.size());
  pair.b.receive(0, 0, got.data(), size_of(got), nullptr)->wait();
  EXPECT_EQ(got, expected);
  std::vector<int32_t> more(1);
  pair.a.send(1, 1, more.data(), 4, nullptr);
  pair.b.receive(0, 1, more.data(), 4, nullptr)->wait();
  for (int i = 0; i < 1000 && !memory.expired(); ++i) {  // the next caller lets go
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    pair.a.receive(1, 99, more.data(), 4, nullptr);
  }
  EXPECT_TRUE(memory.expired());
}

TEST_F(neighbour_reads, what_does_not_come_or_is_not_taken_fails_in_time) {
  Pair pair(50'000'000);
  int32_t value = 0;
  const auto lost = pair.a.receive(1, 0, &value, 4, nullptr);
  const auto untaken = pair.a.send(1, 0, &value, 4, nullptr);
  expect_contains(error_of(*lost),
                  "4 bytes of neighbour 1 (process " + std::to_string(getpid()) + ") were not there within 50 ms");
  expect_contains(error_of(*untaken), "4 bytes for neighbour 1");
  expect_contains(error_of(*untaken), "were not there within 50 ms");
}

TEST_F(neighbour_reads, what_its_sender_gives_up_while_it_is_read_is_no_piece) {
  std::vector<int32_t> source(size_t{1} << 22);
  const auto size = static_cast<size_t>(size_of(source));
  std::string error;
  for (int trial = 0; trial < 20 && error.empty(); ++trial) {  // on a busy machine the sender may give up too late
    auto a = std::make_unique<NeighbourReads>(2, 0, kMinute);
    NeighbourReads b(2, 1, kMinute);
    ASSERT_EQ(a->connect(1, b.address()), "");
    ASSERT_EQ(b.connect(0, a->address()), "");
    void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    std::fill(source.begin(), source.end(), 1);
    const auto sent = a->send(1, 0, source.data(), size_of(source), nullptr);
    const auto received = b.receive(0, 0, memory, size_of(source), nullptr);
    for (unsigned char here = 0; (here & 1) == 0;) ASSERT_EQ(mincore(memory, 1, &here), 0);  // until it is being read
    a.reset();
    std::fill(source.rbegin(), source.rend(), 2);  // the memory is the sender's again
    error = error_of(*received);
    const auto* const got = static_cast<int32_t*>(memory);
    if (error.empty()) {
      EXPECT_EQ(std::count(got, got + source.size(), 1), static_cast<ptrdiff_t>(source.size()));
    }
    munmap(memory, size);
  }
}

TEST_F(neighbour_reads, what_nobody_takes_stops_nothing_else) {
  Pair pair;
  int32_t value = 5, got = 0;
  for (int i = 0; i < 100; ++i) pair.a.send(1, 1, &value, 4, nullptr);
  pair.a.send(1, 2, &value, 4, nullptr);
  pair.b.receive(0, 2, &got, 4, nullptr)->wait();
  EXPECT_EQ(got, 5);
}

TEST_F(neighbour_reads, time_counts_from_the_wait) {
  constexpr auto kTimeout = std::chrono::milliseconds(300);
  Pair pair(std::chrono::nanoseconds(kTimeout).count());
  int32_t value = 5, got = 0;
  const auto early = pair.a.send(1, 0, &value, 4, nullptr);
  std::this_thread::sleep_for(2 * kTimeout);  // no wait for any of it
  pair.b.receive(0, 0, &got, 4, nullptr)->wait();
  EXPECT_EQ(got, 5);
  EXPECT_EQ(error_of(*early), "");
}

TEST_F(neighbour_reads, another_size_is_an_error_at_the_reader) {
  Pair pair;
  const auto x = numbers(4, 1);
  std::vector<int32_t> got(3, -1);
  const auto sent = pair.a.send(1, 0, x.data(), 16, nullptr);
  const auto received = pair.b.receive(0, 0, got.data(), 12, nullptr);
  expect_contains(error_of(*received), "12 bytes of neighbour 0");
  expect_contains(error_of(*received), "but it sent 16");
  EXPECT_EQ(got, std::vector<int32_t>(3, -1));
}

TEST_F(neighbour_reads, memory_that_is_gone_is_an_error) {
  Pair pair;
  void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  pair.a.send(1, 0, page, 4096, nullptr);
  mprotect(page, 4096, PROT_NONE);  // not munmap: another may take its place
  std::vector<int32_t> got(1024);
  expect_contains(error_of(*pair.b.receive(0, 0, got.data(), 4096, nullptr)), "could not be read: Bad address");
  munmap(page, 4096);
}

TEST_F(neighbour_reads, who_lets_go_fails_what_waits_on_both_sides) {
  auto pair = std::make_unique<Pair>();
  int32_t value = 0;
  const auto own = pair->a.receive(1, 0, &value, 4, nullptr);
  std::thread waiter([&] { expect_contains(error_of(*own), "this end was let go of"); });
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  pair.reset();
  waiter.join();

  auto left = std::make_unique<NeighbourReads>(2, 0, kMinute);
  NeighbourReads stays(2, 1, kMinute);
  ASSERT_EQ(stays.connect(0, left->address()), "");
  const auto waits = stays.receive(0, 0, &value, 4, nullptr);
  const auto untaken = stays.send(0, 0, &value, 4, nullptr);
  left.reset();
  expect_contains(error_of(*waits), "wait for a process that ended, or left the group");
  expect_contains(error_of(*untaken), "4 bytes for neighbour 0");
}

TEST_F(neighbour_reads, strangers_are_not_found) {
  NeighbourReads a(2, 0, kMinute), b(2, 1, kMinute), of_three(3, 1, kMinute);
  NeighbourAddress address = b.address();
  address.mark[0] ^= 1;
  expect_contains(a.connect(1, address), "cannot be read");
  expect_contains(a.connect(1, of_three.address()), "is no board for 2");
  address = b.address();
  address.file = 1 << 20;
  expect_contains(a.connect(1, address), "does not open");
  address.pid = INT32_MAX;
  expect_contains(a.connect(1, address), "does not open");
}

pid_t run_child(const std::function<void()>& run) {
  const pid_t pid = fork();
  if (pid == 0) {
    run();
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  return pid;
}

int exit_code(pid_t pid) {
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

template <typename Run>
void with_child(const std::function<void(NeighbourReads&)>& run, const Run& parent) {
  int up[2], down[2];
  ASSERT_EQ(pipe(up), 0);
  ASSERT_EQ(pipe(down), 0);
  const pid_t pid = run_child([&] {
    NeighbourReads mine(2, 1, kMinute);
    const NeighbourAddress own = mine.address();
    NeighbourAddress other;
    EXPECT_EQ(write(up[1], &own, sizeof(own)), static_cast<ssize_t>(sizeof(own)));
    EXPECT_EQ(read(down[0], &other, sizeof(other)), static_cast<ssize_t>(sizeof(other)));
    EXPECT_EQ(mine.connect(0, other), "");
    run(mine);
  });
  NeighbourReads mine(2, 0, kMinute);
  const NeighbourAddress own = mine.address();
  NeighbourAddress other;
  ASSERT_EQ(read(up[0], &other, sizeof(other)), static_cast<ssize_t>(sizeof(other)));
  ASSERT_EQ(mine.connect(1, other), "");
  ASSERT_EQ(write(down[1], &own, sizeof(own)), static_cast<ssize_t>(sizeof(own)));
  parent(mine, pid);
  for (const int file : {up[0], up[1], down[0], down[1]}) close(file);
}

TEST_F(neighbour_reads, processes_exchange_many_pieces) {
  constexpr int kRounds = 200;
  const auto trade = [](NeighbourReads& reads, int own) {
    const int other = 1 - own;
    for (int round = 0; round < kRounds; ++round) {
      const auto x = numbers(static_cast<size_t>(1 + 997 * round), 10 * round + own);
      std::vector<int32_t> got(x.size());
      const auto in = reads.receive(other, round % 3, got.data(), size_of(got), nullptr);
      const auto out = reads.send(other, round % 3, x.data(), size_of(x), nullptr);
      in->wait();
      out->wait();
      ASSERT_EQ(got, numbers(x.size(), 10 * round + other));
    }
  };
  with_child([&](NeighbourReads& reads) { trade(reads, 1); },
             [&](NeighbourReads& reads, pid_t pid) {
               trade(reads, 0);
               EXPECT_EQ(exit_code(pid), 0);
             });
}

TEST_F(neighbour_reads, a_killed_process_fails_what_waits_for_it) {
  with_child([](NeighbourReads&) { pause(); },
             [](NeighbourReads& reads, pid_t pid) {
               int32_t value = 0;
               const auto in = reads.receive(1, 0, &value, 4, nullptr);
               const auto out = reads.send(1, 0, &value, 4, nullptr);
               kill(pid, SIGKILL);  // a zombie, until someone asks what became of it
               expect_contains(error_of(*in), "wait for a process that ended");
               expect_contains(error_of(*out), "wait for a process that ended");
               EXPECT_EQ(exit_code(pid), 1000 + SIGKILL);
             });
}

TEST_F(neighbour_reads, a_forked_child_is_told_and_harms_nothing) {
  auto pair = std::make_unique<Pair>();
  int32_t value = 5, got = 0;
  const auto ticket = pair->b.receive(0, 0, &got, 4, nullptr);
  const pid_t pid = run_child([&] {
    expect_contains(error_of(*ticket), "when this process was forked");
    EXPECT_THROW(pair->a.send(1, 0, &value, 4, nullptr), CopyError);
    pair.reset();
  });
  EXPECT_EQ(exit_code(pid), 0);
  pair->a.send(1, 0, &value, 4, nullptr)->wait();
  ticket->wait();
  EXPECT_EQ(got, 5);
}

}  // namespace
}  // namespace shardcore::testing
