// The tables of one list of tensors on the device, for AdamStepper. Only with CUDA.
//
// A graph replays kernels with the addresses that they were captured with. So tables made while a stream is captured lie in
// memory of their own that nothing writes again (upload_for_graph), and live as long as the stepper; the tensors in them are
// the caller's to keep, at their addresses: parameters, states and counters that exist before the capture (a warm-up step makes
// them), and gradients made before it, or in it, in the graph's own pool. Tables of other steps are replaced when an address,
// a size or the stream changes.
#pragma once

#ifdef SHARDCORE_WITH_CUDA

#include <vector>

#include "adam/adam_cuda.h"
#include "bind/cuda_table.h"
#include "bind/device_step.h"
#include "norm/norm_cuda.h"

namespace shardcore::bind {

class AdamTables {
 public:
  // plan: of a device step, or null.
  AdamTables(std::vector<AdamSegment> segments, const DevicePlan* plan, at::Device device, cudaStream_t stream, bool for_graph)
      : segments_(std::move(segments)), adam_(segments_, kAdamChunk, device, for_graph), device_(device), stream_(stream) {
    if (plan == nullptr) return;
    counts_ = plan->counts;
    clips_ = plan->clips;
    counts_bytes_ = upload_table({bytes_of(counts_)}, device, for_graph);
    if (!clips_) return;
    std::vector<NormSegment> grads;
    for (const AdamSegment& t : segments_) grads.push_back({t.grad, t.numel, t.grad_dtype});
    norm_ = NormTable(grads, device, for_graph);
  }

  bool serve(const std::vector<AdamSegment>& segments, const DevicePlan* plan, at::Device device, cudaStream_t stream) const {
    const bool same_plan = plan == nullptr ? counts_.empty() : plan->counts == counts_ && plan->clips == clips_;
    return same_plan && segments == segments_ && device == device_ && stream == stream_;
  }

  const std::vector<AdamSegment>& segments() const { return segments_; }
  const DeviceTable<AdamSegment>& adam() const { return adam_; }
  const DeviceCount* counts() const { return static_cast<const DeviceCount*>(counts_bytes_.const_data_ptr()); }

  // The sum of squares of all gradients, queued on the stream.
  at::Tensor sq_norm() const { return queue_sq_norm(norm_, device_, stream_); }

 private:
  std::vector<AdamSegment> segments_;  // these, counts_ and clips_: what the tables were made from
  std::vector<DeviceCount> counts_;
  bool clips_ = false;
  DeviceTable<AdamSegment> adam_;
  NormTable norm_;
  at::Tensor counts_bytes_;
  at::Device device_;
  cudaStream_t stream_;
};

}  // namespace shardcore::bind

#endif
