// CUDA's grid on the host: kernel bodies that take a Warp or a Block (csrc/core/cuda_warp.h) run on it, block after block.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/chunks.h"
#include "cpp/host_team.h"

namespace shardcore::testing {

enum class TeamKind { fibers, threads };

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
constexpr TeamKind kTeamKind = TeamKind::threads;
#else
constexpr bool kThreadSanitizer = false;
constexpr TeamKind kTeamKind = TeamKind::fibers;
#endif

// What one thread of a block sees: the operations of CudaBlock.
class HostBlock {
 public:
  // Lanes write in turn to one of two rows, so that one meeting an operation is enough: who writes a row again has been at the
  // meeting after the last reading of it.
  struct Warp {
    std::unique_ptr<HostBarrier> barrier;
    std::array<std::array<uint64_t, 32>, 2> slots{};
  };
  // What a thread has begun to copy, in groups; the last one is open.
  using Copies = std::deque<std::vector<std::pair<void*, const void*>>>;
  struct Shared {
    std::vector<Warp> warps;
    std::vector<Copies> copies;  // of each thread; not in HostBlock, which a fiber that is left where it waits never frees
    std::unique_ptr<HostBarrier> barrier;
    alignas(16) std::array<uint8_t, 48 * 1024> memory{};  // as much as CUDA gives a block that does not ask for more
  };

  HostBlock(Shared& shared, int thread)
      : shared_(shared),
        warp_(shared.warps[static_cast<size_t>(thread / 32)]),
        lane_(static_cast<size_t>(thread % 32)),
        copies_(shared.copies[static_cast<size_t>(thread)]) {
    copies_.assign(1, {});
  }

  uint32_t max(uint32_t x) const {
    const auto& row = exchange(x);
    return static_cast<uint32_t>(*std::max_element(row.begin(), row.end()));
  }

  double shfl_xor(double x, int mask) const {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits = exchange(bits)[lane_ ^ static_cast<size_t>(mask)];
    std::memcpy(&x, &bits, sizeof bits);
    return x;
  }

  uint64_t shfl_xor(uint64_t x, int mask) const { return exchange(x)[lane_ ^ static_cast<size_t>(mask)]; }

  uint32_t shfl(uint32_t x, int from) const { return static_cast<uint32_t>(exchange(x)[static_cast<size_t>(from)]); }

  void sync() const {
    shared_.barrier->wait(sync_turn_);
    sync_turn_ ^= 1;
  }

  void add(uint64_t* sum, uint64_t x) const { std::atomic_ref<uint64_t>(*sum).fetch_add(x, std::memory_order_relaxed); }

  // Blocks run one after the other, so it needs no fence.
  bool is_last(uint32_t* counter, uint32_t count) const {
    *counter = *counter + 1 == count ? 0 : *counter + 1;
    return *counter == 0;
  }

  // Asynchronous copies are made at the latest moment: when they are waited for.
  void copy16(void* shared, const void* global) const {
    for (const void* p : {static_cast<const void*>(shared), global}) {
      if (reinterpret_cast<uintptr_t>(p) % 16 != 0) throw std::logic_error("copy16: an address is no multiple of 16");
    }
    copies_.back().push_back({shared, global});
  }
  void commit_copies() const { copies_.emplace_back(); }
  template <int kGroups>
  void wait_copies() const {
    for (; copies_.size() > kGroups + 1; copies_.pop_front()) {
      for (const auto& [shared, global] : copies_.front()) std::memcpy(shared, global, 16);
    }
  }

  // The block's shared memory; NaN bytes when the block starts.
  template <typename T>
  T* shared() const {
    return reinterpret_cast<T*>(shared_.memory.data());
  }

 private:
  const std::array<uint64_t, 32>& exchange(uint64_t bits) const {
    auto& row = warp_.slots[static_cast<size_t>(turn_)];
    row[lane_] = bits;
    warp_.barrier->wait(turn_);
    turn_ ^= 1;
    return row;
  }

  Shared& shared_;
  Warp& warp_;
  size_t lane_;
  mutable int turn_ = 0, sync_turn_ = 0;
  Copies& copies_;
};

class HostGrid {
 public:
  // body(block_index, thread, block) for all threads of block 0, then of block 1, ...
  template <typename Body>
  static void run(int64_t num_blocks, int threads, const Body& body, TeamKind kind = kTeamKind) {
    run_from(0, num_blocks, threads, body, kind);
  }

  template <typename Body>
  static void run_from(int64_t first_block, int64_t num_blocks, int threads, const Body& body, TeamKind kind = kTeamKind) {
    for (int64_t block = first_block; block < num_blocks; ++block) run_block(block, threads, body, kind);
  }

  template <typename Body>
  static void run_block(int64_t block_index, int threads, const Body& body, TeamKind kind = kTeamKind) {
    std::unique_ptr<Room>& room = rooms()[{kind, threads}];
    if (!room) room = std::make_unique<Room>(kind, threads);
    room->shared.memory.fill(0xff);
    try {
      room->team->run([&](int thread) { body(block_index, thread, HostBlock(room->shared, thread)); });
    } catch (const std::logic_error&) {
      room.reset();  // its fibers are left where they wait
      throw;
    }
  }

 private:
  struct Room {
    Room(TeamKind kind, int threads) : shared{} {
      if (kind == TeamKind::threads) {
        team = std::make_unique<ThreadTeam>(threads);
      } else {
        team = std::make_unique<FiberTeam>(threads);
      }
      shared.warps = std::vector<HostBlock::Warp>(static_cast<size_t>(threads / 32));
      for (HostBlock::Warp& warp : shared.warps) warp.barrier = team->make_barrier(32);
      shared.copies.resize(static_cast<size_t>(threads));
      shared.barrier = team->make_barrier(threads);
    }
    HostBlock::Shared shared;
    std::unique_ptr<HostTeam> team;
  };

  static std::map<std::pair<TeamKind, int>, std::unique_ptr<Room>>& rooms() {
    static std::map<std::pair<TeamKind, int>, std::unique_ptr<Room>> rooms;
    return rooms;
  }
};

// A list's table, in host memory. The segments must outlive it.
template <typename Segment>
class HostTable {
 public:
  HostTable(const std::vector<Segment>& segments, int64_t chunk_numel)
      : segments_(segments), first_chunks_(first_chunks_of(segments, chunk_numel)) {}
  ChunkTable<Segment> get() const { return {segments_.data(), first_chunks_.data(), static_cast<int32_t>(segments_.size())}; }
  int64_t num_chunks() const { return first_chunks_.back(); }

 private:
  const std::vector<Segment>& segments_;
  std::vector<int64_t> first_chunks_;
};

}  // namespace shardcore::testing
