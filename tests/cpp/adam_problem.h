// A list of tensors for one Adam call, with everything needed to run it several ways and compare all bits.
#pragma once

#include <deque>
#include <functional>
#include <vector>

#include "adam/adam_cpu.h"
#include "adam/adam_cuda_body.h"
#include "adam/make_scalars.h"
#include "core/chunks.h"
#include "core/executor.h"
#include "cpp/common.h"

namespace shardcore::testing {

struct TensorSpec {
  int64_t numel = 0;
  DType param = DType::f32;
  DType grad = DType::f32;
  bool master = false;
  bool amsgrad = false;
  int64_t misalign = 0;  // elements
  int32_t hyper = 0;
  uint64_t param_index = 0;
  int64_t first_element = 0;
};

class AdamProblem {
 public:
  enum class Values { normal, with_specials };

  AdamProblem(const std::vector<TensorSpec>& specs, uint32_t seed, Values values = Values::normal) {
    Random random(seed);
    const auto value = [&](float scale) { return values == Values::normal ? random.normal(scale) : random.with_specials(); };
    for (const TensorSpec& spec : specs) {
      AdamSegment t{};
      t.numel = spec.numel;
      t.param_dtype = spec.param;
      t.grad_dtype = spec.grad;
      t.hyper_index = spec.hyper;
      t.param_index = spec.param_index;
      t.first_element = spec.first_element;
      t.aligned16 = spec.misalign == 0;
      const auto make = [&](DType dtype, const std::function<float()>& element) {
        Buffer& buffer = buffers_.emplace_back(spec.numel * itemsize(dtype), spec.misalign * itemsize(dtype));
        for (int64_t i = 0; i < spec.numel; ++i) store_from_f32(buffer.data(), dtype, i, element());
        dtypes_.push_back(dtype);
        numels_.push_back(spec.numel);
        return buffer.data();
      };
      t.param = make(spec.param, [&] { return value(1.0f); });
      t.grad = make(spec.grad, [&] { return value(1.0f); });
      t.exp_avg = static_cast<float*>(make(DType::f32, [&] { return value(0.5f); }));
      t.exp_avg_sq = static_cast<float*>(make(DType::f32, [&] { return std::fabs(value(0.5f)); }));
      if (spec.master) t.master = static_cast<float*>(make(DType::f32, [&] { return value(1.0f); }));
      if (spec.amsgrad) t.max_exp_avg_sq = static_cast<float*>(make(DType::f32, [&] { return std::fabs(value(0.5f)); }));
      segments_.push_back(t);
    }
    for (Buffer& buffer : buffers_) initial_.push_back(buffer.bytes());
  }
  AdamProblem(const AdamProblem&) = delete;

  std::vector<AdamSegment>& segments() { return segments_; }

  void reset() {
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].set_bytes(initial_[i]);
  }

  void run_cpu(const std::vector<AdamHyper>& hypers, Executor& executor) {
    const std::vector<AdamScalars> scalars = scalars_of(hypers);
    adam_cpu(segments_.data(), static_cast<int64_t>(segments_.size()), scalars.data(), executor);
  }

  void run_cpu(const std::vector<AdamHyper>& hypers) {
    SerialExecutor executor;
    run_cpu(hypers, executor);
  }

  // The CUDA kernel's body over all blocks and threads, the last first.
  void run_cuda_body(const std::vector<AdamHyper>& hypers) {
    const std::vector<AdamScalars> scalars = scalars_of(hypers);
    const auto chunks = make_chunks(
        static_cast<int64_t>(segments_.size()), [&](int64_t i) { return segments_[static_cast<size_t>(i)].numel; }, kAdamChunk);
    for (auto block = static_cast<int64_t>(chunks.size()) - 1; block >= 0; --block) {
      for (int thread = kAdamThreads - 1; thread >= 0; --thread) {
        adam_cuda_body(segments_.data(), chunks.data(), scalars.data(), block, thread);
      }
    }
  }

  // All bytes of all buffers, NaN payloads made equal. Checks the sentinels.
  std::vector<std::vector<uint8_t>> result() {
    std::vector<std::vector<uint8_t>> bytes;
    for (size_t i = 0; i < buffers_.size(); ++i) {
      EXPECT_TRUE(buffers_[i].sentinels_intact()) << "buffer " << i;
      canonicalize_nans(buffers_[i].data(), dtypes_[i], numels_[i]);
      bytes.push_back(buffers_[i].bytes());
    }
    return bytes;
  }

  static std::vector<AdamScalars> scalars_of(const std::vector<AdamHyper>& hypers) {
    std::vector<AdamScalars> scalars;
    for (const AdamHyper& hyper : hypers) scalars.push_back(make_adam_scalars(hyper));
    return scalars;
  }

 private:
  std::deque<Buffer> buffers_;
  std::vector<DType> dtypes_;
  std::vector<int64_t> numels_;
  std::vector<std::vector<uint8_t>> initial_;
  std::vector<AdamSegment> segments_;
};

// Hypers that between them take every branch: AdamW, Adam with l2, maximize, no bias correction, stochastic rounding.
inline std::vector<AdamHyper> various_hypers() {
  AdamHyper adamw;
  adamw.lr = 0.01, adamw.weight_decay = 0.1, adamw.step = 3, adamw.grad_scale = 0.37;
  AdamHyper l2 = adamw;
  l2.adam_w_mode = false, l2.step = 100;
  AdamHyper maximize = adamw;
  maximize.maximize = true, maximize.bias_correction = false;
  AdamHyper stochastic = adamw;
  stochastic.stochastic_rounding = true, stochastic.seed = 7;
  return {adamw, l2, maximize, stochastic};
}

}  // namespace shardcore::testing
