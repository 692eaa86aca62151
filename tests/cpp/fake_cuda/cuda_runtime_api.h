// CUDA's runtime as far as csrc/copy/copy_cuda.cu uses it, on host threads: so that backend runs in tests without a GPU, under
// the sanitizers too. A stream is a thread that works off its queue; an event recorded is a marker in one; nothing else orders
// anything, so an order that is missing is a race here as well. Written from CUDA's documentation of these calls.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorNotReady = 600,
  cudaErrorUnknown = 999
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
constexpr unsigned cudaEventDisableTiming = 2, cudaStreamNonBlocking = 1, cudaHostRegisterPortable = 1;

namespace fake_cuda {

// What a recorded event stands for: a place in a stream.
class Marker {
 public:
  void set() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      reached_ = true;
    }
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return reached_; });
  }
  bool reached() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
};

// What tests look at, and how they make calls fail.
struct Runtime {
  std::atomic<int> calls{0}, events{0}, events_made{0}, streams{0};
  std::atomic<bool> streams_wait{true};  // false: cudaStreamWaitEvent does nothing
  std::string failing_call;              // the name of a call that fails while it stands here
  std::map<void*, size_t> registered;
  std::atomic<uint64_t> opened{0};  // a bit for each device that some thread made its own, which costs memory there
};

inline thread_local int current_device = 0;

inline Runtime& runtime() {
  static Runtime one;
  return one;
}

class Stream {
 public:
  Stream() : thread_([this] { run(); }) { ++runtime().streams; }
  // As cudaStreamDestroy: returns at once; the stream ends after its work.
  void end() {
    thread_.detach();
    push({});
  }

  void push(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);  // held while it notifies: the last work deletes the stream
    queue_.push_back(std::move(work));
    more_.notify_one();
  }

  std::shared_ptr<Marker> record() {
    auto marker = std::make_shared<Marker>();
    push([marker] { marker->set(); });
    return marker;
  }

  bool capturing = false;

 private:
  void run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      more_.wait(lock, [&] { return !queue_.empty(); });
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (!work) break;
      work();
    }
    delete this;
  }

  ~Stream() { --runtime().streams; }

  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
};

struct Event {
  std::mutex mutex;  // guards marker
  std::shared_ptr<Marker> marker;

  std::shared_ptr<Marker> current() {
    const std::lock_guard<std::mutex> lock(mutex);
    return marker;
  }
};

inline cudaError_t called(const char* name) {
  ++runtime().calls;
  return runtime().failing_call == name ? cudaErrorUnknown : cudaSuccess;
}

}  // namespace fake_cuda

using cudaStream_t = fake_cuda::Stream*;
using cudaEvent_t = fake_cuda::Event*;

#define FAKE_CUDA_CALLED() \
  if (const cudaError_t error = fake_cuda::called(__func__); error != cudaSuccess) return error

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}
inline const char* cudaGetErrorString(cudaError_t /*error*/) { return "an error of the fake runtime"; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = fake_cuda::current_device;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  fake_cuda::current_device = device;
  fake_cuda::runtime().opened |= uint64_t{1} << device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetPCIBusId(char* address, int size, int /*device*/) {
  FAKE_CUDA_CALLED();
  std::snprintf(address, static_cast<size_t>(size), "0000:C1:00.0");
  return cudaSuccess;
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  FAKE_CUDA_CALLED();
  *stream = new fake_cuda::Stream;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  FAKE_CUDA_CALLED();
  stream->record()->wait();
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  FAKE_CUDA_CALLED();
  stream->end();
  return cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  FAKE_CUDA_CALLED();
  *status = stream->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  FAKE_CUDA_CALLED();
  *event = new fake_cuda::Event;
  ++fake_cuda::runtime().events, ++fake_cuda::runtime().events_made;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  FAKE_CUDA_CALLED();
  delete event;
  --fake_cuda::runtime().events;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  FAKE_CUDA_CALLED();
  const std::lock_guard<std::mutex> lock(event->mutex);
  event->marker = stream->record();
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  FAKE_CUDA_CALLED();
  const auto marker = event->current();
  return marker == nullptr || marker->reached() ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  FAKE_CUDA_CALLED();
  if (const auto marker = event->current()) marker->wait();
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  FAKE_CUDA_CALLED();
  const auto marker = event->current();
  if (marker != nullptr && fake_cuda::runtime().streams_wait) stream->push([marker] { marker->wait(); });
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t size, cudaMemcpyKind /*kind*/, cudaStream_t stream) {
  FAKE_CUDA_CALLED();
  stream->push([=] { std::memcpy(dst, src, size); });
  return cudaSuccess;
}
inline cudaError_t cudaHostRegister(void* data, size_t size, unsigned /*flags*/) {
  if (fake_cuda::called(__func__) != cudaSuccess) return cudaErrorMemoryAllocation;
  fake_cuda::runtime().registered[data] = size;
  return cudaSuccess;
}
inline cudaError_t cudaHostUnregister(void* data) {
  FAKE_CUDA_CALLED();
  return fake_cuda::runtime().registered.erase(data) == 1 ? cudaSuccess : cudaErrorUnknown;
}
