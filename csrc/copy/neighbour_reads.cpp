#include "copy/neighbour_reads.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
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
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <tuple>
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
  Clock::time_point deadline = Clock::time_point::max();  // nobody waits for it yet
  Slot* slot = nullptr;                                   // where it is on offer
  uint64_t number = 0;                                    // of that offer
  bool done = false;
  std::string error;
};
using Pieces = std::deque<std::shared_ptr<Piece>>;

// Another process, and the pieces on their way to it and from it.
struct Peer {
  NeighbourAddress address;
  Board* board = nullptr;  // null: not connected
  Pieces sending, offered;
  std::map<int64_t, Pieces> receiving;  // by tag

  bool idle() const { return sending.empty() && offered.empty() && receiving.empty(); }
  bool lives() const {
    std::array<int64_t, 2> mark = {};
    return read_memory(address.pid, address.board, mark.data(), sizeof(mark)) == 0 && mark == address.mark;
  }
};

}  // namespace

struct NeighbourReads::State {
  const pid_t pid = getpid();
  int count = 0, own = 0;
  int64_t timeout_ns = 0;
  int file = -1;
  Board* board = nullptr;

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::vector<Peer> peers;  // addresses and boards are set before anything is on its way
  Pieces finished;          // let go of by callers: memory may belong to Python, which the thread must not touch
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
  bool offer(Peer& peer, Piece& piece);
  std::pair<Slot*, uint64_t> find(Peer& peer);
  void take(std::unique_lock<std::mutex>& lock, Peer& peer, Slot* slot, uint64_t number);
  void give_up(std::unique_lock<std::mutex>& lock);
  void finish(const std::shared_ptr<Piece>& piece, const std::string& error = "");
  // Fails what `which` chooses of all pieces, with `why`.
  template <typename Which>
  void fail(const Which& which, const std::string& why);
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
bool NeighbourReads::State::offer(Peer& peer, Piece& piece) {
  Row& row = board->rows[piece.other];
  Slot* const slot = std::find_if(row.slots, row.slots + kSlots, [](const Slot& one) { return one.number == 0; });
  if (slot == row.slots + kSlots) return false;
  row.used = std::max<uint32_t>(row.used, static_cast<uint32_t>(slot - row.slots) + 1);
  slot->tag = piece.tag;
  slot->address = reinterpret_cast<int64_t>(piece.data);
  slot->size_bytes = piece.size_bytes;
  piece.slot = slot;
  piece.number = ++offers;
  slot->number.store(piece.number, std::memory_order_release);
  ring(peer.board);
  return true;
}

// The first offer that someone here waits for, and its number. A pass can miss one that came to a slot behind it and still see
// a later one: who sees that sees all that came before it, so it looks again.
std::pair<Slot*, uint64_t> NeighbourReads::State::find(Peer& peer) {
  Slot* found = nullptr;
  uint64_t first = UINT64_MAX;
  for (uint64_t before = 0; before != first && !peer.receiving.empty();) {
    before = first;
    Row& row = peer.board->rows[own];
    for (Slot *slot = row.slots, *const end = slot + std::min<uint32_t>(row.used, kSlots); slot < end; ++slot) {
      const uint64_t number = slot->number.load(std::memory_order_acquire);
      if (number != 0 && number < first && peer.receiving.count(slot->tag) != 0) first = number, found = slot;
    }
  }
  return {found, first};
}

// Reads an offer, without the lock meanwhile.
void NeighbourReads::State::take(std::unique_lock<std::mutex>& lock, Peer& peer, Slot* slot, uint64_t number) {
  const int64_t tag = slot->tag, address = slot->address, size_bytes = slot->size_bytes;
  if (slot->number != number) return;  // its sender gave it up
  const auto found = peer.receiving.find(tag);
  const std::shared_ptr<Piece> piece = found->second.front();
  found->second.pop_front();
  if (found->second.empty()) peer.receiving.erase(found);
  std::string error;
  if (size_bytes != piece->size_bytes) {
    error = describe(*piece) + " were expected, but it sent " + std::to_string(size_bytes);
  } else {
    lock.unlock();
    const int code = read_memory(peer.address.pid, address, piece->data, piece->size_bytes);
    lock.lock();
    if (code != 0) error = describe(*piece) + " could not be read: " + std::generic_category().message(code);
  }
  if (!slot->number.compare_exchange_strong(number, 0) && error.empty()) {  // its memory may have changed before it was read
    error = describe(*piece) + " were given up by their sender while they were read";
  }
  ring(peer.board);
  finish(piece, error);
}

// Does what can be done at once; returns whether that was anything.
bool NeighbourReads::State::advance(std::unique_lock<std::mutex>& lock) {
  bool moved = false;
  for (Peer& peer : peers) {
    if (peer.idle()) continue;
    for (auto it = peer.offered.begin(); it != peer.offered.end();) {
      if ((*it)->slot->number.load(std::memory_order_acquire) == (*it)->number) {
        ++it;
        continue;
      }
      finish(*it);
      it = peer.offered.erase(it);
      moved = true;
    }
    for (; !peer.sending.empty() && offer(peer, *peer.sending.front()); moved = true) {
      peer.offered.push_back(peer.sending.front());
      peer.sending.pop_front();
    }
    for (auto [slot, number] = find(peer); slot != nullptr; std::tie(slot, number) = find(peer)) {
      take(lock, peer, slot, number);
      moved = true;
    }
  }
  return moved;
}

template <typename Which>
void NeighbourReads::State::fail(const Which& which, const std::string& why) {
  for (Peer& peer : peers) {
    const auto fail_of = [&](Pieces& pieces) {
      for (auto it = pieces.begin(); it != pieces.end();) {
        Piece& piece = **it;
        if (!which(piece)) {
          ++it;
          continue;
        }
        if (piece.slot != nullptr) piece.slot->number.compare_exchange_strong(piece.number, 0);  // offered no longer
        finish(*it, describe(piece) + why);
        it = pieces.erase(it);
      }
    };
    fail_of(peer.sending);
    fail_of(peer.offered);
    for (auto it = peer.receiving.begin(); it != peer.receiving.end();) {
      fail_of(it->second);
      it = it->second.empty() ? peer.receiving.erase(it) : std::next(it);
    }
  }
}

// Fails what waits for those who are gone, and what took too long.
void NeighbourReads::State::give_up(std::unique_lock<std::mutex>& lock) {
  std::vector<bool> gone;
  for (const Peer& peer : peers) gone.push_back(!peer.idle() && !peer.lives());
  if (std::find(gone.begin(), gone.end(), true) != gone.end()) advance(lock);  // what they did before
  fail([&](const Piece& piece) { return gone[static_cast<size_t>(piece.other)]; },
       " wait for a process that ended, or left the group");
  fail([now = Clock::now()](const Piece& piece) { return now >= piece.deadline; },
       " were not there within " + std::to_string(timeout_ns / 1'000'000) + " ms");
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
    const bool idle = std::all_of(peers.begin(), peers.end(), [](const Peer& peer) { return peer.idle(); });
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
    std::unique_lock<std::mutex> lock(state_->mutex);
    piece_->deadline = std::min(piece_->deadline, Clock::now() + std::chrono::nanoseconds(state_->timeout_ns));
    state_->changed.wait(lock, [&] { return piece_->done; });
    if (!piece_->error.empty()) throw CopyError(piece_->error);
  }

  void let_go() override {
    if (getpid() != state_->pid) return;
    Pieces finished;
    const std::lock_guard<std::mutex> lock(state_->mutex);
    finished.swap(state_->finished);
  }

 private:
  const std::shared_ptr<NeighbourReads::State> state_;
  const std::shared_ptr<Piece> piece_;
};

// Where the kernel lets only ancestors trace (Ubuntu's setting), lets those do it whom the same launcher started.
void let_siblings_read() {
  int scope = 0;
  const pid_t parent = getppid();
  if (std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope && scope == 1 && parent > 1) {
    prctl(PR_SET_PTRACER, static_cast<unsigned long>(parent), 0, 0, 0);  // and its descendants; refused, connect() says so
  }
}

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
  let_siblings_read();
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
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->fail([](const Piece&) { return true; }, " were on their way when this end was let go of");
  }
  munmap(std::exchange(state_->board, nullptr), Board::size_bytes(state_->count));  // others see it
}

NeighbourAddress NeighbourReads::address() const {
  return {state_->pid, state_->file, reinterpret_cast<int64_t>(state_->board), state_->board->mark};
}

std::string NeighbourReads::connect(int number, const NeighbourAddress& address) {
  Peer peer;
  peer.address = address;
  const std::string path = "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.file);
  struct stat status = {};
  const auto size_bytes = static_cast<off_t>(Board::size_bytes(state_->count));
  const auto fails = [&] { return path + " does not open: " + std::generic_category().message(errno); };
  if (stat(path.c_str(), &status) != 0) return fails();
  if (!S_ISREG(status.st_mode) || status.st_size != size_bytes) {  // a stranger's; to open a device may do something
    return path + " is no board for " + std::to_string(state_->count);
  }
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return fails();
  peer.board = map_board(file, state_->count);
  close(file);
  if (peer.board == nullptr) return path + " cannot be mapped";
  if (peer.board->mark != address.mark || !peer.lives()) {
    munmap(peer.board, static_cast<size_t>(size_bytes));
    return "the memory of process " + std::to_string(address.pid) + " cannot be read (ptrace(2): another user's, or forbidden)";
  }
  state_->peers[static_cast<size_t>(number)] = std::move(peer);
  return "";
}

std::shared_ptr<Ticket> NeighbourReads::start(bool sends, int other, int64_t tag, void* data, int64_t size_bytes,
                                              std::shared_ptr<void> owner) {
  if (getpid() != state_->pid) throw CopyError("NeighbourReads belongs to the process that this one was forked from");
  auto piece = std::make_shared<Piece>();
  piece->sends = sends;
  piece->other = other, piece->tag = tag, piece->data = data, piece->size_bytes = size_bytes;
  piece->owner = std::move(owner);
  auto ticket = std::make_shared<PieceTicket>(state_, piece);
  ticket->let_go();  // of others
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->thread.joinable()) state_->thread = start_thread([state = state_.get()] { state->run(); });
    Peer& peer = state_->peers[static_cast<size_t>(other)];
    (sends ? peer.sending : peer.receiving[tag]).push_back(std::move(piece));
  }
  ring(state_->board);
  return ticket;
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
