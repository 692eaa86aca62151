// A list of tensors for one Adam call, with everything needed to run it several ways and compare all bits.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "adam/adam_cpu.h"
#include "adam/adam_cuda_body.h"
#include "adam/make_scalars.h"
#include "core/executor.h"
#include "core/tile.h"
#include "cpp/common.h"
#include "cpp/host_grid.h"

namespace shardcore::testing {

struct TensorSpec {
  int64_t numel = 0;
  DType param = DType::f32;
  DType grad = DType::f32;
  Master master = Master::none;
  bool amsgrad = false;
  int64_t misalign = 0;  // elements
  int32_t hyper = 0;
  uint64_t param_index = 0;
  int64_t first_element = 0;
  StateDType state = StateDType::f32;
  bool notes_changes = false;
};

// With bits for the weights that change, of those that can have them.
inline std::vector<TensorSpec> noting_changes(std::vector<TensorSpec> specs) {
  for (TensorSpec& spec : specs) spec.notes_changes = spec.param != DType::f32;
  return specs;
}

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
      t.master_kind = spec.master;
      t.state_dtype = spec.state;
      t.aligned16 = spec.misalign == 0;
      const auto make_bytes = [&](int64_t count, int64_t size) {  // any bytes are valid
        Buffer& buffer = buffers_.emplace_back(count * size, spec.misalign * size);
        for (int64_t i = 0; i < count * size; ++i) buffer.as<uint8_t>()[i] = static_cast<uint8_t>(random.bits());
        kinds_.push_back(size == 2 ? Kind::remainder : Kind::codes);
        numels_.push_back(count);
        return buffer.data();
      };
      const auto make_count = [&](int64_t count, DType dtype, const std::function<float()>& element) {
        Buffer& buffer = buffers_.emplace_back(count * itemsize(dtype), spec.misalign * itemsize(dtype));
        for (int64_t i = 0; i < count; ++i) store_from_f32(buffer.data(), dtype, i, element());
        kinds_.push_back(static_cast<Kind>(dtype));
        numels_.push_back(count);
        return buffer.data();
      };
      const auto make = [&](DType dtype, const std::function<float()>& element) {
        return make_count(spec.numel, dtype, element);
      };
      const auto magnitude = [&] { return std::fabs(value(0.5f)); };
      const size_t weight = buffers_.size();
      t.param = make(spec.param, [&] { return value(1.0f); });
      t.grad = make(spec.grad, [&] { return value(1.0f); });
      if (spec.state == StateDType::q8) {
        t.exp_avg = make_bytes(spec.numel, 1);
        t.exp_avg_sq = make_bytes(spec.numel, 1);
        t.exp_avg_scale = static_cast<float*>(make_count(blocks_of(spec.numel), DType::f32, magnitude));
        t.exp_avg_sq_scale = static_cast<float*>(make_count(blocks_of(spec.numel), DType::f32, magnitude));
      } else {
        const DType state = spec.state == StateDType::f32 ? DType::f32 : DType::bf16;
        t.exp_avg = make(state, [&] { return value(0.5f); });
        t.exp_avg_sq = make(state, magnitude);
      }
      if (spec.master == Master::f32) t.master = make(DType::f32, [&] { return value(1.0f); });
      if (spec.master == Master::split) {
        weight_of_[buffers_.size()] = weight;
        t.master = make_bytes(spec.numel, 2);
      }
      if (spec.amsgrad) t.max_exp_avg_sq = static_cast<float*>(make(DType::f32, magnitude));
      if (spec.notes_changes) t.changed = static_cast<uint8_t*>(make_bytes((spec.numel + 7) / 8, 1));  // some are set
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

  int64_t first_chunk = 0;  // run_cuda_body leaves out the chunks before it

  void run_cuda_body(const std::vector<AdamHyper>& hypers) { run_cuda_body(scalars_of(hypers), adam_form_of(segments_)); }

  // The CUDA kernel of this form. Where that is slow to compile, the one that fits all and has the code of all.
  void run_cuda_body(const std::vector<AdamScalars>& scalars, [[maybe_unused]] int form) {
    if constexpr (kSlow) {
      run_cuda_form<kNumAdamForms - 1>(scalars);
    } else {
      choose_adam_body(form, [&](auto index) { run_cuda_form<decltype(index)::value>(scalars); });
    }
  }

  // Over all blocks and threads, the last block first. Block: what stands for CUDA's. A form takes a second to compile.
  template <int kForm, typename Block = HostBlock>
  void run_cuda_form(const std::vector<AdamScalars>& scalars) {
    const HostTable table(segments_, kAdamChunk);
    AdamScalarsArg arg;
    if (!arg.try_assign(scalars)) arg.table = scalars.data();
    const auto body = [&](int64_t block_index, int thread, const HostBlock& block) {
      adam_cuda_body<kForm>(table.get(), arg, block_index, thread, Block(block));
    };
    for (int64_t block = table.num_chunks() - 1; block >= first_chunk; --block) {
      HostGrid::run_block(block, kAdamThreads, body);
    }
  }

  // All bytes of all buffers, NaN payloads made equal. Checks the sentinels.
  std::vector<std::vector<uint8_t>> result() {
    std::vector<std::vector<uint8_t>> bytes;
    for (size_t i = 0; i < buffers_.size(); ++i) {
      EXPECT_TRUE(buffers_[i].sentinels_intact()) << "buffer " << i;
      if (kinds_[i] == Kind::remainder) {  // of a NaN master: the rest of its payload
        for (int64_t k = 0; k < numels_[i]; ++k) {
          if (std::isnan(bf16_to_f32(buffers_[weight_of_[i]].as<uint16_t>()[k]))) buffers_[i].as<int16_t>()[k] = 0;
        }
      } else if (kinds_[i] != Kind::codes) {
        canonicalize_nans(buffers_[i].data(), static_cast<DType>(kinds_[i]), numels_[i]);
      }
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
  enum class Kind : uint8_t { f32, bf16, f16, remainder, codes };  // the first three as DType
  std::vector<Kind> kinds_;
  std::map<size_t, size_t> weight_of_;  // the buffer of the weight that a remainder belongs to
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

// Every mix with reduced moments or a split master. Every other one has random keys that 16 and 32 bits do not hold.
inline std::vector<TensorSpec> every_reduced_mix(int64_t numel, int64_t misalign) {
  std::vector<TensorSpec> specs;
  for (const StateDType state : {StateDType::f32, StateDType::bf16, StateDType::q8}) {
    for (const Master master : {Master::none, Master::f32, Master::split}) {
      for (const DType param : kDTypes) {
        if (master == Master::split ? param != DType::bf16 : state == StateDType::f32) continue;
        for (const DType grad : kDTypes) {
          const auto hyper = static_cast<int32_t>(specs.size() % 4);
          const bool amsgrad = state == StateDType::f32 && specs.size() % 2 == 0;
          const uint64_t large = specs.size() % 2;
          specs.push_back({numel, param, grad, master, amsgrad, misalign, hyper, specs.size() + (large << 20),
                           77 * numel + (static_cast<int64_t>(large) << 33), state});
        }
      }
    }
  }
  return specs;
}

}  // namespace shardcore::testing
