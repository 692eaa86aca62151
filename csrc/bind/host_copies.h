// A HostTier that Python holds: its copies in flight, and the events that say when they are done.
#pragma once

#include <deque>
#include <memory>

#include "bind/checks.h"
#include "copy/host_tier.h"

#ifdef SHARDCORE_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace shardcore::bind {

// What a tier's copies need while they are in flight. Tensors are let go by whoever calls in, with the GIL held: never by a
// copying thread, which has none. Buffers know only the HostTier, so that copies which wait for nobody make no circle.
struct __attribute__((visibility("hidden"))) Copies {
  Copies(std::shared_ptr<HostTier> owner, at::Device other_side) : tier(std::move(owner)), device(other_side) {}
  ~Copies() { tier->drain(/*hurry=*/true); }  // keeps the GIL, which nothing in flight needs: at exit it might not come back

  void keep(Direction direction, int64_t number, const at::Tensor& dst, const at::Tensor& src) {
    kept[static_cast<int>(direction)].push_back({number, dst, src});
  }

  void let_go() {
    for (const Direction direction : kDirections) {
      std::deque<Kept>& in_flight = kept[static_cast<int>(direction)];
      if (in_flight.empty()) continue;
      const int64_t completed = tier->stream(direction).completed();
      while (!in_flight.empty() && in_flight.front().number <= completed) {
        const Kept done = std::move(in_flight.front());  // its end may hand the GIL to a thread that comes here, too
        in_flight.pop_front();
      }
    }
  }

  // torch's current stream on the device; nothing on the CPU.
  void* current_stream() const {
#ifdef SHARDCORE_WITH_CUDA
    if (device.is_cuda()) return c10::cuda::getCurrentCUDAStream(device.index()).stream();
#endif
    return nullptr;
  }

  struct Kept {
    int64_t number;
    at::Tensor dst, src;
  };
  const std::shared_ptr<HostTier> tier;
  const at::Device device;
  std::deque<Kept> kept[2];  // by Direction; guarded by the GIL
};

// Says when one copy is done: its number in its queue. The events behind it belong to the queue.
class __attribute__((visibility("hidden"))) PyCopyEvent {
 public:
  PyCopyEvent(std::shared_ptr<Copies> copies, Direction direction, int64_t number)
      : copies_(std::move(copies)), direction_(direction), number_(number) {}

  bool query() {
    const bool done = stream().query(number_);
    if (done) copies_->let_go();
    return done;
  }

  void synchronize() {
    if (!stream().query(number_)) {  // who lets go of the GIL has to get it back, from threads that never rest
      const py::gil_scoped_release no_gil;
      stream().synchronize(number_);
    }
    copies_->let_go();
  }

  void wait() {
    {
      const py::gil_scoped_release no_gil;
      stream().wait(number_, copies_->current_stream());
    }
    copies_->let_go();
  }

 private:
  CopyStream& stream() { return copies_->tier->stream(direction_); }

  std::shared_ptr<Copies> copies_;
  Direction direction_;
  int64_t number_;
};

// The copies of a HostTier that Python holds.
std::shared_ptr<Copies> copies_of(const Where& where, const py::handle& object);

// Refuses two tensors that no copy can be made of: layout, dtypes, size, memory that is not the tier's or that both have.
void check_copy(const HostTier& tier, at::Device device, Direction direction, const Where& dst_where, const at::Tensor& dst,
                const Where& src_where, const at::Tensor& src);

}  // namespace shardcore::bind
