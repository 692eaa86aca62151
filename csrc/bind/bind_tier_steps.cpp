// TierSteps: steps of the cpu tier, cut into chunks that are checked once and used by every step whose memory is the same.
#include "adam/make_scalars.h"
#include "bind/adam_lists.h"
#include "bind/device_step.h"
#include "bind/host_copies.h"
#include "bind/initialized.h"
#include "offload/tier_steps.h"

namespace shardcore::bind {
namespace {

constexpr const char* kChunkOp = "TierSteps.chunk";
constexpr const char* kBeginOp = "TierSteps.begin";
constexpr const char* kWaitOp = "TierSteps.wait_updated";

}  // namespace

// Everything of a chunk but its gradients, which each step brings. Destroyed with the GIL held.
class __attribute__((visibility("hidden"))) PyTierChunk {
 public:
  PyTierChunk(std::shared_ptr<Copies> copies, AdamLists lists, const TensorList& grads, TensorList weights,
              std::vector<int64_t> grad_starts, bool grads_come, int place)
      : copies_(std::move(copies)),
        lists_(std::move(lists)),
        weights_(std::move(weights)),
        grad_starts_(std::move(grad_starts)) {
    const HostTier& tier = *copies_->tier;
    chunk_.place = place;
    for (size_t i = 0; i < lists_.params.size(); ++i) {
      const auto at = [i](const char* name) { return Where{kChunkOp, name, static_cast<int64_t>(i)}; };
      TierSpan span;
      AdamSegment& t = span.segment = segment_of(lists_, grads, i, at::kCPU);
      t.hyper_index = static_cast<int32_t>(lists_.hyper_index[i]);
      t.param_index = lists_.keys[i].param_index;
      t.first_element = lists_.keys[i].first_element;
      span.grad_comes = grads_come;
      const at::Tensor& weight = weights_[i];
      if (weight.defined()) {
        check_copy(tier, copies_->device, Direction::from_tier, at("weights"), weight, at("params"), lists_.params[i]);
        span.weight = weight.data_ptr();
      }
      if (grads_come && !tier.owns(t.grad, t.numel * itemsize(t.grad_dtype))) {
        value_error(at("grads"), "memory that this tier did not make; expected a place of this tier");
      }
      chunk_.spans.push_back(span);
    }
  }

  // Copies that are still in flight use the tensors.
  ~PyTierChunk() {
    for (const Direction direction : kDirections) {
      CopyStream& stream = copies_->tier->stream(direction);
      if (stream.completed() < stream.queued()) stream.drain(/*hurry=*/false);
    }
  }
  PyTierChunk(const PyTierChunk&) = delete;
  PyTierChunk& operator=(const PyTierChunk&) = delete;

  size_t size() const { return chunk_.spans.size(); }

  // Whether TierSteps of this tier, with so many places, can make it.
  bool fits(const std::shared_ptr<Copies>& copies, int64_t places) const {
    return copies_ == copies && chunk_.place < std::max<int64_t>(1, places);
  }

  // The chunk of a step, whose gradients are parts of grads[first...].
  const TierChunk& with(const TensorList& grads, size_t first, size_t num_hypers) {
    std::vector<const void*> found;
    for (size_t i = 0; i < size(); ++i) {
      const Where where{kBeginOp, "grads", static_cast<int64_t>(first + i)};
      const at::Tensor& grad = grads[first + i];
      const TierSpan& span = chunk_.spans[i];
      check_layout(where, grad, span.grad_comes ? copies_->device : at::Device(at::kCPU));
      if (float_dtype(where, grad) != span.segment.grad_dtype) {
        type_error(where, "dtype ", grad.scalar_type(), "; expected that of the chunk's grads");
      }
      const int64_t end = grad_starts_[i] + span.segment.numel;
      if (grad.numel() < end) value_error(where, grad.numel(), " elements; expected ", end, " or more");
      if (static_cast<size_t>(span.segment.hyper_index) >= num_hypers) {
        value_error({kBeginOp, "hypers"}, num_hypers, " items; expected ", span.segment.hyper_index + 1, " or more");
      }
      found.push_back(static_cast<const char*>(grad.const_data_ptr()) + grad_starts_[i] * grad.element_size());
    }
    if (found != grads_) check_apart(found);
    for (size_t i = 0; i < size(); ++i) chunk_.spans[i].grad = found[i];
    return chunk_;
  }

  void mark() const {
    for (size_t i = 0; i < size(); ++i) mark_written(weights_[i].defined() ? weights_[i] : lists_.params[i]);
  }

 private:
  void check_apart(const std::vector<const void*>& grads) {
    std::vector<AdamSegment> segments;
    std::vector<AdamHome> homes;
    for (size_t i = 0; i < size(); ++i) {
      const TierSpan& span = chunk_.spans[i];
      segments.push_back(span.segment);
      if (!span.grad_comes) segments.back().grad = grads[i];
      homes.push_back({span.grad_comes ? grads[i] : nullptr, span.weight});
    }
    grads_.clear();
    check_overlap(lists_, segments, homes, overlap_);
    grads_ = grads;
  }

  const std::shared_ptr<Copies> copies_;
  const AdamLists lists_;
  const TensorList weights_;
  const std::vector<int64_t> grad_starts_;
  TierChunk chunk_;
  std::vector<const void*> grads_;  // that check_apart found good last
  OverlapCheck overlap_;
};

class __attribute__((visibility("hidden"))) PyTierSteps {
 public:
  PyTierSteps(const py::handle& tier, const py::handle& places, const py::handle& passes, const py::handle& adam_per_second)
      : copies_(copies_of({"TierSteps", "tier"}, tier)) {
    places_ = int_of({"TierSteps", "places"}, places);
    const bool pass = bool_of({"TierSteps", "passes"}, passes);
    if (places_ < 0) value_error({"TierSteps", "places"}, places_, "; expected 0 or more");
    if (pass && !copies_->tier->caller_copies()) {
      value_error({"TierSteps", "passes"}, "True; expected False (this tier's caller_copies is False)");
    }
    steps_ = std::make_unique<TierSteps>(copies_->tier, static_cast<int>(places_), pass,
                                         number_of({"TierSteps", "adam_per_second"}, adam_per_second));
  }

  std::unique_ptr<PyTierChunk> chunk(const py::handle& params, const py::handle& grads, const py::handle& exp_avgs,
                                     const py::handle& exp_avg_sqs, const py::handle& hyper_index, const py::object& masters,
                                     const py::object& max_exp_avg_sqs, const py::object& keys,
                                     const py::object& exp_avg_scales, const py::object& exp_avg_sq_scales,
                                     const py::handle& weights, const py::handle& grad_starts, const py::handle& grads_come,
                                     const py::handle& place) {
    AdamLists lists = adam_lists_of(params, exp_avgs, exp_avg_sqs, hyper_index, masters, max_exp_avg_sqs, keys, exp_avg_scales,
                                    exp_avg_sq_scales);
    const size_t count = lists.params.size();
    TensorList grad_list = tensors_of(kChunkOp, "grads", grads);
    TensorList weight_list = tensors_of(kChunkOp, "weights", weights, true);
    const py::object starts = items_of({kChunkOp, "grad_starts"}, grad_starts, "a list of int");
    check_count(kChunkOp, "grads", grad_list.size(), "params", count);
    check_count(kChunkOp, "weights", weight_list.size(), "params", count);
    check_count(kChunkOp, "grad_starts", static_cast<size_t>(PySequence_Fast_GET_SIZE(starts.ptr())), "params", count);
    check_count(kChunkOp, "keys", lists.keys.size(), "params", count);
    std::vector<int64_t> firsts;
    for (size_t i = 0; i < count; ++i) {
      const Where where{kChunkOp, "grad_starts", static_cast<int64_t>(i)};
      firsts.push_back(int_of(where, PySequence_Fast_GET_ITEM(starts.ptr(), static_cast<Py_ssize_t>(i))));
      if (firsts[i] < 0) value_error(where, firsts[i], "; expected 0 or more");
      if (lists.hyper_index[i] < 0 || lists.hyper_index[i] > INT32_MAX) {
        value_error({kChunkOp, "hyper_index", static_cast<int64_t>(i)}, lists.hyper_index[i], "; expected an index of hypers");
      }
    }
    const int64_t number = int_of({kChunkOp, "place"}, place);
    if (number < 0 || number >= std::max<int64_t>(1, places_)) {
      value_error({kChunkOp, "place"}, number, "; expected one of ", places_, " places");
    }
    return std::make_unique<PyTierChunk>(copies_, std::move(lists), grad_list, std::move(weight_list), std::move(firsts),
                                         bool_of({kChunkOp, "grads_come"}, grads_come), static_cast<int>(number));
  }

  void begin(const py::handle& chunks, const py::handle& grads, const py::handle& hypers, const py::handle& num_threads,
             const py::handle& weights_leave) {
    const py::object items = items_of({kBeginOp, "chunks"}, chunks, "a list of TierChunk");
    TensorList grad_list = tensors_of(kBeginOp, "grads", grads);
    const int64_t threads = int_of({kBeginOp, "num_threads"}, num_threads);
    if (threads < 0 || threads > 4096) value_error({kBeginOp, "num_threads"}, threads, "; expected 0 to 4096");
    TierSteps::Step step;
    step.scalars = scalars_of(kBeginOp, hypers_of(kBeginOp, hypers));
    step.weights_leave = bool_of({kBeginOp, "weights_leave"}, weights_leave);
    step.stream = copies_->current_stream();
    size_t first = 0;
    std::vector<const PyTierChunk*> checked;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
      const py::handle item = PySequence_Fast_GET_ITEM(items.ptr(), i);
      if (!py::isinstance<PyTierChunk>(item)) {
        type_error({kBeginOp, "chunks", i}, "type ", Py_TYPE(item.ptr())->tp_name, "; expected TierChunk");
      }
      auto& chunk = item.cast<PyTierChunk&>();
      if (!chunk.fits(copies_, places_)) {
        value_error({kBeginOp, "chunks", i}, "a chunk of another TierSteps; expected one that this one's chunk() made");
      }
      if (first + chunk.size() <= grad_list.size()) step.chunks.push_back(chunk.with(grad_list, first, step.scalars.size()));
      first += chunk.size();
      checked.push_back(&chunk);
    }
    check_count(kBeginOp, "grads", grad_list.size(), "spans", first);
    auto kept = py::reinterpret_steal<py::object>(PySequence_Tuple(items.ptr()));
    if (!kept) throw py::error_already_set();
    steps_->end();  // with the GIL: at once, if all was waited for
    count_ = 0;
    for (const PyTierChunk* chunk : checked) chunk->mark();
    chunks_ = std::move(kept);  // until the step has ended
    grads_ = std::move(grad_list);
    steps_->begin(std::move(step), static_cast<int>(threads));
    count_ = static_cast<int64_t>(checked.size());
  }

  void wait_fetched(int64_t count) {
    const py::gil_scoped_release no_gil;
    steps_->wait_fetched(count, torch_executor());
  }

  py::object wait_updated(int64_t first, int64_t last) {
    if (first < 0 || first > last) value_error({kWaitOp, "first"}, first, "; expected 0 to ", last, " (last)");
    if (last > count_) value_error({kWaitOp, "last"}, last, "; expected at most ", count_, ", the chunks of this step");
    {
      const py::gil_scoped_release no_gil;
      steps_->wait_updated(last, torch_executor());
    }
    const int64_t left = steps_->left(first, last);
    return left == 0 ? py::none() : py::cast(PyCopyEvent(copies_, Direction::from_tier, left));
  }

  void end() {
    {
      const py::gil_scoped_release no_gil;
      steps_->end();
    }
    count_ = 0;
    chunks_ = py::none();
    grads_ = {};
  }

  py::list events() const {
    py::list list;
    for (const TierEvent& event : steps_->events()) {
      list.append(py::make_tuple(event.what, event.begin_s, event.end_s, event.amount));
    }
    return list;
  }

 private:
  const std::shared_ptr<Copies> copies_;
  int64_t places_ = 0;
  int64_t count_ = 0;  // of the chunks of the step under way
  py::object chunks_ = py::none();
  TensorList grads_;
  std::unique_ptr<TierSteps> steps_;  // ends first: it reads the others
};

void bind_tier_steps(py::module_& module) {
  py::class_<PyTierChunk>(module, "TierChunk");
  py::class_<PyTierSteps>(module, "TierSteps")
      .def(py::init<const py::handle&, const py::handle&, const py::handle&, const py::handle&>(), py::arg("tier"),
           py::arg("places"), py::kw_only(), py::arg("passes"), py::arg("adam_per_second") = 0.0)
      .def("chunk", &PyTierSteps::chunk, py::kw_only(), py::arg("params"), py::arg("grads"), py::arg("exp_avgs"),
           py::arg("exp_avg_sqs"), py::arg("hyper_index"), py::arg("masters"), py::arg("max_exp_avg_sqs"), py::arg("keys"),
           py::arg("exp_avg_scales"), py::arg("exp_avg_sq_scales"), py::arg("weights"), py::arg("grad_starts"),
           py::arg("grads_come"), py::arg("place"))
      .def("begin", &PyTierSteps::begin, py::arg("chunks"), py::arg("grads"), py::arg("hypers"), py::arg("num_threads") = 0,
           py::arg("weights_leave") = false)
      .def("wait_fetched", &PyTierSteps::wait_fetched, py::arg("count"))
      .def("wait_updated", &PyTierSteps::wait_updated, py::arg("first"), py::arg("last"))
      .def("end", &PyTierSteps::end)
      .def_property_readonly("events", &PyTierSteps::events);
}

}  // namespace shardcore::bind
