#include "copy/neighbour_reads.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "copy/neighbour_board.h"
#include "core/thread_pool.h"

namespace shardcore {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLookNs = 200'000'000;  // how often to look whether those who are waited for still live

struct Piece {
  bool sends = false;
  int other = 0;
  int64_t tag = 0;
  void* data = nullptr;
  int64_t size_bytes = 0;
  std::shared_ptr<void> owner;
  Clock::time_point deadline;
  Slot* slot = nullptr;  // where it is on offer
  uint64_t number = 0;   // of that offer
  bool done = false;
  std::string error;
};
using Pieces = std::deque<std::shared_ptr<Piece>>;

}  // namespace

struct NeighbourReads::State {
  const pid_t pid = getpid();
  int count = 0, own = 0;
  int64_t timeout_ns = 0;
  int file = -1;
  Board* board = nullptr;
  std::vector<Peer> peers;

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  Pieces sending, offered, receiving;
  Pieces finished;  // let go of by callers: memory may belong to Python, which the thread must not touch
  uint64_t offers = 0;
  bool stop = false;
  std::thread thread;

  ~State() {
    const size_t size = Board::size_bytes(count);
    for (const Peer& peer : peers) {
      if (peer.board != nullptr) munmap(peer.board, size);
    }
    if (board != nullptr) munmap(board, size);
    if (file >= 0) close(file);
  }

  void run();
  bool advance(std::unique_lock<std::mutex>& lock);
  void finish(const std::shared_ptr<Piece>& piece, const std::string& error = "");
  bool offer(const std::shared_ptr<Piece>& piece);
  Slot* find(const Piece& piece);
  void take(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Piece>& piece, Slot* slot);
  void give_up(std::unique_lock<std::mutex>& lock);
  std::string describe(const Piece& piece) const;
};

std::string NeighbourReads::State::describe(const Piece& piece) const {
  return std::to_string(piece.size_bytes) + " bytes " + (piece.sends ? "for" : "of") + " neighbour " +
         std::to_string(piece.other) + " (process " + std::to_string(peers[static_cast<size_t>(piece.other)].address.pid) + ")";
}

void NeighbourReads::State::finish(const std::shared_ptr<Piece>& piece, const std::string& error) {
  piece->error = error;
  piece->done = true;
  finished.push_back(piece);
  changed.notify_all();
}

// Puts the piece into a free slot, if there is one.
bool NeighbourReads::State::offer(const std::shared_ptr<Piece>& piece) {
  Slot* const row = board->row(piece->other);
  Slot* const slot = std::find_if(row, row + kSlots, [](const Slot& one) { return one.number == 0; });
  if (slot == row + kSlots) return false;
  slot->tag = piece->tag;
  slot->address = reinterpret_cast<int64_t>(piece->data);
  slot->size_bytes = piece->size_bytes;
  piece->slot = slot;
  piece->number = ++offers;
  slot->number.store(piece->number, std::memory_order_release);
  ring(peers[static_cast<size_t>(piece->other)].board);
  return true;
}

// The first offer of what the piece waits for. A pass can miss one that came to a slot behind it and still see a later one: who
// sees that sees all that came before it, so it looks again.
Slot* NeighbourReads::State::find(const Piece& piece) {
  Slot* const row = peers[static_cast<size_t>(piece.other)].board->row(own);
  Slot* found = nullptr;
  uint64_t first = UINT64_MAX;
  for (uint64_t before = 0; before != first;) {
    before = first;
    for (Slot* slot = row; slot < row + kSlots; ++slot) {
      const uint64_t number = slot->number.load(std::memory_order_acquire);
      if (number != 0 && number < first && slot->tag == piece.tag) first = number, found = slot;
    }
  }
  return found;
}

// Reads an offer, without the lock meanwhile.
void NeighbourReads::State::take(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Piece>& piece, Slot* slot) {
  const Peer& peer = peers[static_cast<size_t>(piece->other)];
  std::string error;
  if (slot->size_bytes != piece->size_bytes) {
    error = describe(*piece) + " were expected, but it sent " + std::to_string(slot->size_bytes);
  } else {
    lock.unlock();
    const int code = read_memory(peer.address.pid, slot->address, piece->data, piece->size_bytes);
    lock.lock();
    if (code != 0) error = describe(*piece) + " could not be read: " + std::generic_category().message(code);
  }
  slot->number.store(0, std::memory_order_release);
  ring(peer.board);
  finish(piece, error);
}

// Does what can be done at once; returns whether that was anything.
bool NeighbourReads::State::advance(std::unique_lock<std::mutex>& lock) {
  bool moved = false;
  for (auto it = offered.begin(); it != offered.end();) {
    if ((*it)->slot->number.load(std::memory_order_acquire) == (*it)->number) {
      ++it;
      continue;
    }
    finish(*it);
    it = offered.erase(it);
    moved = true;
  }
  for (auto it = sending.begin(); it != sending.end();) {
    const auto same = [&](const auto& earlier) { return earlier->other == (*it)->other; };  // a slot may be free since then
    if (std::any_of(sending.begin(), it, same) || !offer(*it)) {
      ++it;
      continue;
    }
    offered.push_back(*it);
    it = sending.erase(it);
    moved = true;
  }
  for (size_t i = 0; i < receiving.size();) {
    const std::shared_ptr<Piece> piece = receiving[i];
    const auto here = receiving.begin() + static_cast<ptrdiff_t>(i);
    const bool behind = std::any_of(receiving.begin(), here, [&](const auto& earlier) {
      return earlier->other == piece->other && earlier->tag == piece->tag;  // that one's offer may have come just now
    });
    Slot* const slot = behind ? nullptr : find(*piece);
    if (slot == nullptr) {
      ++i;
      continue;
    }
    receiving.erase(here);
    take(lock, piece, slot);  // callers may add to the end meanwhile
    moved = true;
  }
  return moved;
}

// Fails what waits for those who are gone, and what took too long.
void NeighbourReads::State::give_up(std::unique_lock<std::mutex>& lock) {
  std::vector<bool> gone(static_cast<size_t>(count));
  bool any = false;
  for (const Pieces* pieces : {&sending, &offered, &receiving}) {
    for (const auto& piece : *pieces) {
      const auto other = static_cast<size_t>(piece->other);
      if (!gone[other] && !peers[other].lives()) any = gone[other] = true;
    }
  }
  if (any) advance(lock);  // what it did before
  const Clock::time_point now = Clock::now();
  for (Pieces* pieces : {&sending, &offered, &receiving}) {
    for (auto it = pieces->begin(); it != pieces->end();) {
      const bool lost = gone[static_cast<size_t>((*it)->other)];
      if (!lost && now < (*it)->deadline) {
        ++it;
        continue;
      }
      finish(*it, describe(**it) + (lost ? " wait for a process that ended, or left the group"
                                         : " were not there within " + std::to_string(timeout_ns / 1'000'000) + " ms"));
      it = pieces->erase(it);
    }
  }
}

void NeighbourReads::State::run() {
  std::unique_lock<std::mutex> lock(mutex);
  Clock::time_point looked = Clock::now();
  while (!stop) {
    const uint32_t seen = board->bell;
    if (advance(lock)) continue;
    if (Clock::now() - looked > std::chrono::nanoseconds(kLookNs)) {
      give_up(lock);
      looked = Clock::now();
    }
    const bool idle = sending.empty() && offered.empty() && receiving.empty();
    lock.unlock();
    await_bell(board, seen, idle ? int64_t{3600} * 1'000'000'000 : kLookNs);
    lock.lock();
    if (idle) looked = Clock::now();
  }
}

namespace {

class PieceTicket final : public Ticket {
 public:
  PieceTicket(std::shared_ptr<NeighbourReads::State> state, std::shared_ptr<Piece> piece)
      : state_(std::move(state)), piece_(std::move(piece)) {}

  void wait() override {
    if (getpid() != state_->pid) {
      throw CopyError(state_->describe(*piece_) +
                      " were on their way when this process was forked, and no thread here reads them");
    }
    Pieces finished;  // let go of without the lock
    std::unique_lock<std::mutex> lock(state_->mutex);
    state_->changed.wait(lock, [&] { return piece_->done; });
    finished.swap(state_->finished);
    lock.unlock();
    if (!piece_->error.empty()) throw CopyError(piece_->error);
  }

 private:
  const std::shared_ptr<NeighbourReads::State> state_;
  const std::shared_ptr<Piece> piece_;
};

[[noreturn]] void no_board(const char* what) {
  throw std::system_error(errno, std::generic_category(), std::string("NeighbourReads: no ") + what + " for the board");
}

}  // namespace

NeighbourReads::NeighbourReads(int count, int own, int64_t timeout_ns) : state_(std::make_shared<State>()) {
  state_->count = count;
  state_->own = own;
  state_->timeout_ns = timeout_ns;
  state_->peers.resize(static_cast<size_t>(count));
  state_->file = static_cast<int>(syscall(SYS_memfd_create, "shardcore", 1U /* MFD_CLOEXEC */));
  if (state_->file < 0) no_board("file");
  if (ftruncate(state_->file, static_cast<off_t>(Board::size_bytes(count))) != 0) no_board("memory");
  if ((state_->board = map_board(state_->file, count)) == nullptr) no_board("address range");
  auto& mark = state_->board->mark;
  if (getrandom(mark.data(), sizeof(mark), 0) != static_cast<ssize_t>(sizeof(mark))) no_board("random mark");
}

NeighbourReads::~NeighbourReads() {
  if (getpid() != state_->pid) {
    new std::shared_ptr<State>(state_);  // leaked: its thread, which does not exist here, cannot be joined
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop = true;
  }
  ring(state_->board);
  if (state_->thread.joinable()) state_->thread.join();
  munmap(std::exchange(state_->board, nullptr), Board::size_bytes(state_->count));  // others see it
  const std::lock_guard<std::mutex> lock(state_->mutex);
  for (Pieces* pieces : {&state_->sending, &state_->offered, &state_->receiving}) {
    for (const auto& piece : *pieces)
      state_->finish(piece, state_->describe(*piece) + " were on their way when this end was let go of");
    pieces->clear();
  }
}

NeighbourAddress NeighbourReads::address() const {
  return {state_->pid, state_->file, reinterpret_cast<int64_t>(state_->board), state_->board->mark};
}

std::string NeighbourReads::connect(int number, const NeighbourAddress& address) {
  Peer peer{address};
  const std::string path = "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return path + " does not open: " + std::generic_category().message(errno);
  struct stat status = {};
  const auto size_bytes = static_cast<off_t>(Board::size_bytes(state_->count));
  if (fstat(file, &status) == 0 && status.st_size == size_bytes) peer.board = map_board(file, state_->count);
  close(file);
  if (peer.board == nullptr) return path + " is no board for " + std::to_string(state_->count);
  if (peer.board->mark != address.mark || !peer.lives()) {
    munmap(peer.board, static_cast<size_t>(size_bytes));
    return "the memory of process " + std::to_string(address.pid) + " cannot be read (ptrace(2): another user's, or forbidden)";
  }
  state_->peers[static_cast<size_t>(number)] = peer;
  return "";
}

std::shared_ptr<Ticket> NeighbourReads::start(bool sends, int other, int64_t tag, void* data, int64_t size_bytes,
                                              std::shared_ptr<void> owner) {
  auto piece = std::make_shared<Piece>();
  piece->other = other, piece->tag = tag, piece->data = data, piece->size_bytes = size_bytes;
  piece->sends = sends;
  piece->owner = std::move(owner);
  piece->deadline = Clock::now() + std::chrono::nanoseconds(state_->timeout_ns);
  Pieces finished;
  if (getpid() != state_->pid) throw CopyError("NeighbourReads belongs to the process that this one was forked from");
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->thread.joinable()) state_->thread = start_thread([state = state_.get()] { state->run(); });
    (sends ? state_->sending : state_->receiving).push_back(piece);
    finished.swap(state_->finished);
  }
  ring(state_->board);
  return std::make_shared<PieceTicket>(state_, std::move(piece));
}

std::shared_ptr<Ticket> NeighbourReads::send(int to, int64_t tag, const void* data, int64_t size_bytes,
                                             std::shared_ptr<void> owner) {
  return start(true, to, tag, const_cast<void*>(data), size_bytes, std::move(owner));
}

std::shared_ptr<Ticket> NeighbourReads::receive(int from, int64_t tag, void* data, int64_t size_bytes,
                                                std::shared_ptr<void> owner) {
  return start(false, from, tag, data, size_bytes, std::move(owner));
}

}  // namespace shardcore
