// The CUDA backend of the cpu tier: page-locked host memory, one stream per direction, and an event after each copy.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "copy/copy_stream.h"
#include "copy/host_memory.h"
#include "core/cuda_check.h"

namespace shardcore {
namespace {

// Makes a device current for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    SHARDCORE_CUDA_CHECK(cudaGetDevice(&saved_));
    SHARDCORE_CUDA_CHECK(cudaSetDevice(device));
  }
  ~DeviceScope() { cudaSetDevice(saved_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int saved_ = 0;
};

// A cudaEvent_t with one owner. Recorded again for the next copy once its own is done.
class Event {
 public:
  Event() { SHARDCORE_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);  // at exit CUDA may be shut down, and the event with it
  }
  Event(Event&& other) noexcept : event_(other.event_) { other.event_ = nullptr; }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  cudaEvent_t get() const { return event_; }
  void forget() { event_ = nullptr; }  // in a forked child, where it does not exist

 private:
  cudaEvent_t event_ = nullptr;
};

class CudaStream final : public CopyStream {
 public:
  CudaStream(Direction direction, int device) : direction_(direction), device_(device), pid_(getpid()) {
    const DeviceScope scope(device_);
    ready_ = std::make_unique<Event>();
    SHARDCORE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }

  ~CudaStream() override {
    if (forked()) {
      ready_->forget();
      for (InFlight& copy : in_flight_) copy.done.forget();
      for (Event& event : spare_) event.forget();
      return;
    }
    cudaStreamSynchronize(stream_);  // here and below: at exit CUDA may be shut down, and the copies with it
    cudaStreamDestroy(stream_);
  }

  int64_t copy(void* dst, const void* src, int64_t size_bytes, void* stream) override {
    refuse_fork();
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t number = queued_ + 1;
    try {
      const DeviceScope scope(device_);
      const auto compute = static_cast<cudaStream_t>(stream);
      refuse_capture(compute);
      reap();
      in_flight_.push_back({number, acquire_event(), 0});
      const cudaEvent_t done = in_flight_.back().done.get();
      // Hand-over: what is queued on the compute stream so far, and nothing later, precedes the copy.
      SHARDCORE_CUDA_CHECK(cudaEventRecord(ready_->get(), compute));
      SHARDCORE_CUDA_CHECK(cudaStreamWaitEvent(stream_, ready_->get(), 0));
      const cudaMemcpyKind kind = direction_ == Direction::to_tier ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
      SHARDCORE_CUDA_CHECK(cudaMemcpyAsync(dst, src, static_cast<size_t>(size_bytes), kind, stream_));
      // A copy that runs without an event behind it must not outlive this call: its end could not be waited for.
      const cudaError_t recorded = cudaEventRecord(done, stream_);
      if (recorded != cudaSuccess) cudaStreamSynchronize(stream_);
      SHARDCORE_CUDA_CHECK(recorded);
    } catch (const std::runtime_error& error) {
      if (!in_flight_.empty() && in_flight_.back().number == number) in_flight_.pop_back();
      fail(number, error);
    }
    queued_ = number;
    return number;
  }

  void synchronize(int64_t number) override {
    refuse_fork();
    std::unique_lock<std::mutex> lock(mutex_);
    InFlight* const copy = find(number);
    if (copy == nullptr) return;
    ++copy->waiters;  // keeps its event from being recorded for another copy
    lock.unlock();
    const cudaError_t error = cudaEventSynchronize(copy->done.get());
    lock.lock();
    --copy->waiters;
    check(number, error, "cudaEventSynchronize");
  }

  void wait(int64_t number, void* stream) override {
    refuse_fork();
    const std::lock_guard<std::mutex> lock(mutex_);
    const InFlight* const copy = find(number);
    if (copy == nullptr) return;
    check(number, cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), copy->done.get(), 0), "cudaStreamWaitEvent");
  }

  bool query(int64_t number) override {
    refuse_fork();
    const std::lock_guard<std::mutex> lock(mutex_);
    const InFlight* const copy = find(number);
    if (copy == nullptr) return true;
    const cudaError_t state = cudaEventQuery(copy->done.get());
    if (state != cudaErrorNotReady) check(number, state, "cudaEventQuery");
    if (state != cudaSuccess) cudaGetLastError();  // no error
    return state == cudaSuccess;
  }

  int64_t completed() noexcept override {
    if (forked()) return completed_;
    const std::lock_guard<std::mutex> lock(mutex_);
    reap();
    return completed_;
  }

  int64_t queued() const noexcept override { return queued_; }

  void drain() noexcept override {
    if (!forked()) cudaStreamSynchronize(stream_);
  }

 private:
  struct InFlight {
    int64_t number;
    Event done;
    int waiters;  // threads that wait for `done` without the mutex
  };

  bool forked() const { return pid_ != getpid(); }

  void refuse_fork() const {
    if (forked()) {
      throw CopyError(
          std::string("HostTier.") + direction_name(direction_) +
          ": this process was forked from one that uses CUDA, which does not work here; expected a spawned process");
    }
  }

  void refuse_capture(cudaStream_t compute) const {
    if (is_capturing(compute)) {
      throw CopyError("the current stream is captured in a CUDA graph; expected copies outside of graphs");
    }
  }

  [[noreturn]] void fail(int64_t number, const std::exception& error) const {
    throw CopyError(std::string("HostTier.") + direction_name(direction_) + ": copy " + std::to_string(number) +
                    " failed: " + error.what());
  }

  void check(int64_t number, cudaError_t error, const char* call) const {
    try {
      cuda_check(error, call, __FILE__, __LINE__);
    } catch (const std::runtime_error& failure) {
      fail(number, failure);
    }
  }

  // The copy, or nothing if it is known to be done. Elements of a deque stay where they are while others are added and removed
  // at its ends.
  InFlight* find(int64_t number) {
    if (number <= completed_ || in_flight_.empty()) return nullptr;
    return &in_flight_[static_cast<size_t>(number - in_flight_.front().number)];
  }

  // Takes the copies that are done out of the queue; one that failed stays, and its next wait throws.
  void reap() noexcept {
    while (!in_flight_.empty() && in_flight_.front().waiters == 0) {
      InFlight& copy = in_flight_.front();
      const cudaError_t state = cudaEventQuery(copy.done.get());
      if (state != cudaSuccess) {
        if (state == cudaErrorNotReady) cudaGetLastError();  // no error
        return;
      }
      completed_ = copy.number;
      spare_.push_back(std::move(copy.done));
      in_flight_.pop_front();
    }
  }

  Event acquire_event() {
    if (spare_.empty()) return {};
    Event event = std::move(spare_.back());
    spare_.pop_back();
    return event;
  }

  const Direction direction_;
  const int device_;
  const pid_t pid_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Event> ready_;  // of the compute stream; a wait that was queued keeps the state it saw
  std::mutex mutex_;              // guards in_flight_ and spare_, and the writing of both numbers
  std::deque<InFlight> in_flight_;
  std::vector<Event> spare_;
  std::atomic<int64_t> queued_{0};
  std::atomic<int64_t> completed_{0};
};

class CudaBackend final : public CopyBackend {
 public:
  explicit CudaBackend(int device) : device_(device), streams_{{Direction::to_tier, device}, {Direction::from_tier, device}} {
    char address[32] = {};
    SHARDCORE_CUDA_CHECK(cudaDeviceGetPCIBusId(address, sizeof(address), device));
    const int node = numa_node_of(address);
    if (node >= 0) near_ = {node};
  }

  CopyStream& stream(Direction direction) override { return streams_[static_cast<int>(direction)]; }

  void enter_thread() override { SHARDCORE_CUDA_CHECK(cudaSetDevice(device_)); }

  void place(void* data, int64_t size_bytes) noexcept override {
    if (!near_.empty()) place_on_nodes(data, size_bytes, near_);
  }

  bool can_pin() const noexcept override { return true; }

  // Locking touches the pages, so they are taken on the node that place() named.
  std::string pin(void* data, int64_t size_bytes) override {
    const DeviceScope scope(device_);
    // The pages stay this process's alone: a fork would copy all of them, or (before Linux 5.9) part them from the device's.
    madvise(data, static_cast<size_t>(size_bytes), MADV_DONTFORK);
    const cudaError_t error = cudaHostRegister(data, static_cast<size_t>(size_bytes), cudaHostRegisterPortable);
    if (error == cudaSuccess) return "";
    cudaGetLastError();
    madvise(data, static_cast<size_t>(size_bytes), MADV_DOFORK);
    return std::string("cudaHostRegister refused it: ") + cudaGetErrorName(error) + ", " + cudaGetErrorString(error);
  }

  void unpin(void* data) noexcept override {
    cudaHostUnregister(data);  // at exit CUDA may be shut down, and the lock with it
  }

 private:
  const int device_;
  CudaStream streams_[2];
  std::vector<int> near_;  // the device's NUMA node, where it is known
};

}  // namespace

std::unique_ptr<CopyBackend> make_cuda_backend(int device_index) { return std::make_unique<CudaBackend>(device_index); }

}  // namespace shardcore
