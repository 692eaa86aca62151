// The cpu tier: HostTier, its copies' events, and the OffloadPipeline that makes its steps. And empty_huge.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "bind/adam_lists.h"
#include "bind/checks.h"
#include "bind/device_step.h"
#include "copy/host_memory.h"
#include "copy/host_tier.h"
#include "elementwise/element_cpu.h"
#include "offload/offload_pipeline.h"

#ifdef SHARDCORE_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace shardcore::bind {
namespace {

// What a tier's copies need while they are in flight. Tensors are released in a later call from Python, with the GIL held,
// never on a copying thread, which does not hold it. Buffers refer to the HostTier only, so that copies in flight make no
// cycle.
struct Copies {
  Copies(std::shared_ptr<HostTier> owner, at::Device other_side) : tier(std::move(owner)), device(other_side) {}
  ~Copies() { tier->drain(); }  // holds the GIL, which no copy in flight needs: at exit it might not be acquired again

  void keep(Direction direction, int64_t number, const at::Tensor& dst, const at::Tensor& src) {
    kept[static_cast<int>(direction)].push_back({number, dst, src});
  }

  void release() {
    for (const Direction direction : kDirections) {
      std::deque<Kept>& in_flight = kept[static_cast<int>(direction)];
      if (in_flight.empty()) continue;
      const int64_t completed = tier->stream(direction).completed();
      while (!in_flight.empty() && in_flight.front().number <= completed) {
        const Kept done = std::move(in_flight.front());  // its destructor may release the GIL, and another thread enter here
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

// Refuses two tensors that no copy can be made of: layout, dtypes, size, memory that is not the tier's or that both have.
void check_copy(const Copies& copies, Direction direction, const Where& dst_where, const at::Tensor& dst,
                const Where& src_where, const at::Tensor& src) {
  const bool to = direction == Direction::to_tier;
  check_layout(dst_where, dst, to ? at::Device(at::kCPU) : copies.device);
  check_layout(src_where, src, to ? copies.device : at::Device(at::kCPU));
  if (src.scalar_type() != dst.scalar_type()) {
    type_error(src_where, "dtype ", src.scalar_type(), "; expected ", dst.scalar_type(), " (as ", dst_where.name,
               ": copies do not cast)");
  }
  check_numel(src_where, src, dst.numel(), dst_where.name);
  const auto size_bytes = static_cast<int64_t>(dst.nbytes());
  if (size_bytes == 0) return;
  if (!copies.tier->owns((to ? dst : src).const_data_ptr(), size_bytes)) {
    value_error(to ? dst_where : src_where,
                "memory that this tier did not make; expected a buffer of this tier (from its empty(), or a view of one)");
  }
  if (copies.device.is_cpu()) {
    const auto* d = static_cast<const char*>(dst.const_data_ptr());
    const auto* s = static_cast<const char*>(src.const_data_ptr());
    if (d < s + size_bytes && s < d + size_bytes) {
      value_error(src_where, "memory that ", dst_where.name, " has too; expected two distinct buffers");
    }
  }
}

// One copy, which can be waited for: its number in its queue. The queue owns the events.
class PyCopyEvent {
 public:
  PyCopyEvent(std::shared_ptr<Copies> copies, Direction direction, int64_t number)
      : copies_(std::move(copies)), direction_(direction), number_(number) {}

  bool query() {
    const bool done = stream().query(number_);
    if (done) copies_->release();
    return done;
  }

  void synchronize() {
    if (!stream().query(number_)) {  // releasing the GIL means to acquire it again, from threads that may be busy with it
      const py::gil_scoped_release no_gil;
      stream().synchronize(number_);
    }
    copies_->release();
  }

  void wait() {
    {
      const py::gil_scoped_release no_gil;
      stream().wait(number_, copies_->current_stream());
    }
    copies_->release();
  }

  int64_t number() const { return number_; }

 private:
  CopyStream& stream() { return copies_->tier->stream(direction_); }

  std::shared_ptr<Copies> copies_;
  Direction direction_;
  int64_t number_;
};

using Arrivals = std::vector<std::optional<PyCopyEvent>>;

// A tensor (numel,) over allocate(size_bytes), given back by release(data, size_bytes). MemoryError if there is no such memory.
template <typename Allocate, typename Release>
at::Tensor empty_by(const char* op, int64_t numel, at::ScalarType dtype, const Allocate& allocate, const Release& release) {
  const auto options = at::TensorOptions().dtype(dtype);
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  if (numel < 0) value_error({op, "numel"}, numel, "; expected 0 or more");
  if (numel > INT64_MAX / item) value_error({op, "numel"}, numel, "; expected at most ", INT64_MAX / item);
  if (numel == 0) return at::empty({0}, options);
  void* data = nullptr;
  try {
    const py::gil_scoped_release no_gil;  // locking pages takes a while
    data = allocate(numel * item);
  } catch (const std::bad_alloc&) {
    PyErr_Format(PyExc_MemoryError, "%s: numel has %lld bytes; expected what this machine can give (free memory, or take less)",
                 op, static_cast<long long>(numel * item));
    throw py::error_already_set();
  }
  return at::from_blob(
      data, {numel}, [release, size_bytes = numel * item](void* p) { release(p, size_bytes); }, options);
}

at::Tensor empty_huge(int64_t numel, at::ScalarType dtype) {
  return empty_by("empty_huge", numel, dtype, allocate_pages, free_pages);
}

class PyHostTier {
 public:
  // backend: None, or a capsule "shardcore.CopyBackend" whose CopyBackend, which it hands over, makes the copies.
  PyHostTier(at::Device device, bool pin_memory, std::optional<int64_t> pin_memory_limit, const py::object& its_backend) {
    check_device_supported({"HostTier", "device"}, device);
    std::unique_ptr<CopyBackend> backend;
    if (!its_backend.is_none()) {
      backend.reset(static_cast<CopyBackend*>(PyCapsule_GetPointer(its_backend.ptr(), "shardcore.CopyBackend")));
      if (backend == nullptr) throw py::error_already_set();
    } else if (device.is_cpu()) {
      backend = make_thread_backend();
    }
#ifdef SHARDCORE_WITH_CUDA
    if (device.is_cuda()) {
      if (!device.has_index()) device = at::Device(at::kCUDA, c10::cuda::current_device());
      const c10::cuda::CUDAGuard guard(device);
      if (backend == nullptr) backend = make_cuda_backend(device.index());
    }
#endif
    if (device.is_cpu()) device = at::Device(at::kCPU);
    auto tier = std::make_shared<HostTier>(std::move(backend), pin_memory, pin_memory_limit.value_or(-1));
    copies_ = std::make_shared<Copies>(std::move(tier), device);
  }

  at::Tensor empty(int64_t numel, at::ScalarType dtype, bool pinned, const std::vector<int>& nodes) {
    const auto allocate = [&](int64_t size_bytes) { return copies_->tier->allocate(size_bytes, pinned, nodes); };
    return empty_by("HostTier.empty", numel, dtype, allocate, [tier = copies_->tier](void* p, int64_t) { tier->release(p); });
  }

  PyCopyEvent to_tier(const at::Tensor& dst, const at::Tensor& src) {
    return copy("HostTier.to_tier", dst, src, Direction::to_tier);
  }
  PyCopyEvent from_tier(const at::Tensor& dst, const at::Tensor& src) {
    return copy("HostTier.from_tier", dst, src, Direction::from_tier);
  }

  void synchronize() {
    {
      const py::gil_scoped_release no_gil;
      copies_->tier->synchronize();
    }
    copies_->release();
  }

  void drain() {
    {
      const py::gil_scoped_release no_gil;
      copies_->tier->drain();
    }
    copies_->release();
  }

  const HostTier& tier() const { return *copies_->tier; }
  const std::shared_ptr<Copies>& copies() const { return copies_; }

 private:
  PyCopyEvent copy(const char* op, const at::Tensor& dst, const at::Tensor& src, Direction direction) {
    check_copy(*copies_, direction, {op, "dst"}, dst, {op, "src"}, src);
    const auto size_bytes = static_cast<int64_t>(dst.nbytes());
    if (size_bytes == 0) return {copies_, direction, 0};
    const at::Tensor& ours = direction == Direction::to_tier ? dst : src;
    bump_version(dst);
    copies_->release();
    int64_t number = 0;
    {
      void* const d = dst.data_ptr();
      const void* const s = src.const_data_ptr();
      std::optional<py::gil_scoped_release> no_gil;
      if (!copies_->tier->queues(ours.const_data_ptr())) no_gil.emplace();  // it may wait for the device
      number = copies_->tier->copy(direction, d, s, size_bytes, copies_->current_stream());
    }
    copies_->keep(direction, number, dst, src);
    return {copies_, direction, number};
  }

  std::shared_ptr<Copies> copies_;
};

// Index i of an elementwise optimizer's lists, whose one state, if any, is in place of exp_avg.
AdamSegment element_segment_of(const AdamLists& lists, const TensorList& grads, size_t i) {
  constexpr const char* op = "OffloadPipeline.element_chunk";
  const auto place = static_cast<int64_t>(i);
  AdamSegment t{};
  t.numel = lists.params[i].numel();
  t.param = lists.params[i].data_ptr();
  t.param_dtype = float_dtype({op, "params", place}, lists.params[i]);
  t.grad = grads[i].const_data_ptr();
  t.grad_dtype = float_dtype({op, "grads", place}, grads[i]);
  if (lists.exp_avgs[i].defined()) t.exp_avg = lists.exp_avgs[i].data_ptr();
  if (!lists.masters[i].defined()) return t;
  t.master = lists.masters[i].data_ptr();
  t.master_kind = Master::f32;
  return t;
}

// Each run of segments that have the same scalars.
void update_elements(const std::vector<AdamSegment>& segments, const std::vector<ElementScalars>& scalars, Executor& executor) {
  std::vector<ElementSegment> run;
  for (size_t i = 0; i < segments.size(); ++i) {
    const AdamSegment& t = segments[i];
    run.push_back(
        {t.param, t.grad, t.exp_avg, static_cast<float*>(t.master), t.numel, t.param_dtype, t.grad_dtype, DType::f32});
    if (i + 1 < segments.size() && segments[i + 1].hyper_index == t.hyper_index) continue;
    update_elements_cpu(run.data(), static_cast<int64_t>(run.size()), scalars[static_cast<size_t>(t.hyper_index)], executor);
    run.clear();
  }
}

// Everything of a chunk except its gradients, which each step passes. Destroyed with the GIL held.
class PyOffloadChunk {
 public:
  PyOffloadChunk(std::shared_ptr<Copies> copies, AdamLists lists, const TensorList& grads, TensorList weights,
                 std::vector<int64_t> grad_starts, bool grads_come, int place)
      : copies_(std::move(copies)),
        lists_(std::move(lists)),
        weights_(std::move(weights)),
        grad_starts_(std::move(grad_starts)) {
    const size_t count = lists_.params.size();
    for (const size_t other : {grads.size(), weights_.size(), grad_starts_.size(), lists_.keys.size()}) {
      TORCH_INTERNAL_ASSERT(other == count);
    }
    chunk_.place = place;
    for (size_t i = 0; i < count; ++i) {
      OffloadSpan span;
      AdamSegment& t = span.segment =
          lists_.exp_avg_sqs.empty() ? element_segment_of(lists_, grads, i) : segment_of(lists_, grads, i, at::kCPU);
      t.hyper_index = static_cast<int32_t>(lists_.hyper_index[i]);
      t.param_index = lists_.keys[i].param_index;
      t.first_element = lists_.keys[i].first_element;
      span.grad_comes = grads_come;
      const at::Tensor& weight = weights_[i];
      if (weight.defined()) {
        TORCH_INTERNAL_ASSERT(weight.nbytes() == lists_.params[i].nbytes() && weight.is_contiguous());
        span.weight = weight.data_ptr();
      }
      chunk_.spans.push_back(span);
    }
  }

  // Copies that are still in flight use the tensors.
  ~PyOffloadChunk() {
    for (const Direction direction : kDirections) {
      CopyStream& stream = copies_->tier->stream(direction);
      if (stream.completed() < stream.queued()) stream.drain();
    }
  }
  PyOffloadChunk(const PyOffloadChunk&) = delete;
  PyOffloadChunk& operator=(const PyOffloadChunk&) = delete;

  size_t size() const { return chunk_.spans.size(); }

  // The chunk of a step, whose gradients are parts of grads[first...], which arrivals[first...] bring.
  OffloadChunk with(const std::vector<at::Tensor>& grads, const Arrivals& arrivals, size_t first, size_t num_hypers) const {
    OffloadChunk chunk = chunk_;
    for (size_t i = 0; i < size(); ++i) {
      const at::Tensor& grad = grads[first + i];
      OffloadSpan& span = chunk.spans[i];
      TORCH_INTERNAL_ASSERT(grad.numel() >= grad_starts_[i] + span.segment.numel && grad.is_contiguous() &&
                            grad.element_size() == itemsize(span.segment.grad_dtype) &&
                            static_cast<size_t>(span.segment.hyper_index) < num_hypers);
      span.grad = static_cast<const char*>(grad.const_data_ptr()) + grad_starts_[i] * grad.element_size();
      if (!arrivals.empty() && arrivals[first + i]) chunk.arrival = std::max(chunk.arrival, arrivals[first + i]->number());
    }
    return chunk;
  }

  void bump_versions() const {
    for (size_t i = 0; i < size(); ++i) bump_version(weights_[i].defined() ? weights_[i] : lists_.params[i]);
  }

 private:
  const std::shared_ptr<Copies> copies_;
  const AdamLists lists_;
  const TensorList weights_;
  const std::vector<int64_t> grad_starts_;
  OffloadChunk chunk_;
};

class PyOffloadPipeline {
 public:
  PyOffloadPipeline(const PyHostTier& tier, int places) : copies_(tier.copies()), pipeline_(copies_->tier, places) {}

  std::unique_ptr<PyOffloadChunk> chunk(const py::handle& params, const py::handle& grads, const py::handle& exp_avgs,
                                        const py::handle& exp_avg_sqs, const py::handle& hyper_index, const py::object& masters,
                                        const py::object& max_exp_avg_sqs, const py::object& keys,
                                        const py::object& exp_avg_scales, const py::object& exp_avg_sq_scales,
                                        const py::handle& weights, std::vector<int64_t> grad_starts, bool grads_come, int place,
                                        const py::object& changed) {
    AdamLists lists = adam_lists_of(params, exp_avgs, exp_avg_sqs, hyper_index, masters, max_exp_avg_sqs, keys, exp_avg_scales,
                                    exp_avg_sq_scales, changed);
    constexpr const char* op = "OffloadPipeline.chunk";
    return std::make_unique<PyOffloadChunk>(copies_, std::move(lists), tensors_of(op, "grads", grads),
                                            tensors_of(op, "weights", weights, true), std::move(grad_starts), grads_come,
                                            place);
  }

  std::unique_ptr<PyOffloadChunk> element_chunk(const py::handle& params, const py::handle& grads, const py::handle& states,
                                                const py::handle& masters, std::vector<int64_t> hyper_index,
                                                const py::handle& weights, std::vector<int64_t> grad_starts, bool grads_come,
                                                int place) {
    constexpr const char* op = "OffloadPipeline.element_chunk";
    AdamLists lists;
    lists.params = tensors_of(op, "params", params);
    lists.exp_avgs = tensors_of(op, "states", states, true);
    lists.masters = tensors_of(op, "masters", masters, true);
    lists.hyper_index = std::move(hyper_index);
    lists.keys.resize(lists.params.size());
    return std::make_unique<PyOffloadChunk>(copies_, std::move(lists), tensors_of(op, "grads", grads),
                                            tensors_of(op, "weights", weights, true), std::move(grad_starts), grads_come,
                                            place);
  }

  void begin(const py::sequence& chunks, std::vector<at::Tensor> grads, const py::object& hypers, int num_threads,
             bool weights_leave, const Arrivals& arrivals, bool any_order) {
    OffloadPipeline::Step step;
    const size_t num_hypers = PyCallable_Check(hypers.ptr()) != 0 ? SIZE_MAX : py::len(hypers);
    step.weights_leave = weights_leave;
    step.any_order = any_order;
    step.stream = copies_->current_stream();
    py::tuple kept(chunks);
    size_t count = 0;
    for (const py::handle chunk : kept) count += chunk.cast<const PyOffloadChunk&>().size();
    TORCH_INTERNAL_ASSERT(grads.size() == count && (arrivals.empty() || arrivals.size() == count));
    size_t first = 0;
    for (const py::handle item : kept) {
      const auto& chunk = item.cast<const PyOffloadChunk&>();
      step.chunks.push_back(chunk.with(grads, arrivals, first, num_hypers));
      first += chunk.size();
    }
    step.update = update_by(hypers);
    pipeline_.end();  // with the GIL: at once, if all was waited for
    for (const py::handle chunk : kept) chunk.cast<const PyOffloadChunk&>().bump_versions();
    chunks_ = std::move(kept);
    grads_ = std::move(grads);
    hypers_ = hypers;
    pipeline_.begin(std::move(step), num_threads);
  }

  void wait_fetched(int64_t count) {
    const py::gil_scoped_release no_gil;
    pipeline_.wait_fetched(count, torch_executor());
  }

  std::optional<PyCopyEvent> wait_updated(int64_t first, int64_t last) {
    {
      const py::gil_scoped_release no_gil;
      pipeline_.wait_updated(last, torch_executor());
    }
    const int64_t number = pipeline_.last_copy(first, last);
    if (number == 0) return std::nullopt;
    return PyCopyEvent(copies_, Direction::from_tier, number);
  }

  void end() {
    {
      const py::gil_scoped_release no_gil;
      pipeline_.end();
    }
    chunks_ = py::tuple();
    grads_.clear();
    hypers_ = py::none();
  }

  py::list events() const {
    py::list list;
    for (const OffloadEvent& event : pipeline_.events()) {
      list.append(py::make_tuple(event.what, event.begin_s, event.end_s, event.amount));
    }
    return list;
  }

 private:
  // What updates a chunk: Python, or the kernel whose scalars `hypers` are.
  static decltype(OffloadPipeline::Step::update) update_by(const py::object& hypers) {
    if (PyCallable_Check(hypers.ptr()) != 0) {
      return [call = py::handle(hypers)](int64_t number, const std::vector<AdamSegment>&, Executor&) {
        const py::gil_scoped_acquire gil;
        call(number);
      };
    }
    if (py::len(hypers) != 0 && py::isinstance<ElementScalars>(hypers[py::int_(0)])) {
      return [scalars = hypers.cast<std::vector<ElementScalars>>()](int64_t, const std::vector<AdamSegment>& segments,
                                                                    Executor& executor) {
        update_elements(segments, scalars, executor);
      };
    }
    return [scalars = scalars_of("OffloadPipeline.begin", hypers_of(hypers))](int64_t, const std::vector<AdamSegment>& segments,
                                                                              Executor& executor) {
      adam_cpu(segments.data(), static_cast<int64_t>(segments.size()), scalars.data(), executor);
    };
  }

  const std::shared_ptr<Copies> copies_;
  py::tuple chunks_;  // these, grads_ and hypers_: until the step has ended
  std::vector<at::Tensor> grads_;
  py::object hypers_ = py::none();
  OffloadPipeline pipeline_;  // ends first: it reads the others
};

}  // namespace

void bind_offload(py::module_& module) {
  module.def("empty_huge", &empty_huge, py::arg("numel"), py::arg("dtype"));
  py::class_<PyCopyEvent>(module, "CopyEvent")
      .def("query", &PyCopyEvent::query)
      .def("synchronize", &PyCopyEvent::synchronize)
      .def("wait", &PyCopyEvent::wait);
  py::class_<PyHostTier>(module, "HostTier")
      .def(py::init<at::Device, bool, std::optional<int64_t>, const py::object&>(), py::arg("device"),
           py::arg("pin_memory") = false, py::arg("pin_memory_limit") = py::none(), py::arg("backend") = py::none())
      .def("empty", &PyHostTier::empty, py::arg("numel"), py::arg("dtype"), py::arg("pinned") = true,
           py::arg("nodes") = std::vector<int>())
      .def("to_tier", &PyHostTier::to_tier, py::arg("dst"), py::arg("src"))
      .def("from_tier", &PyHostTier::from_tier, py::arg("dst"), py::arg("src"))
      .def("synchronize", &PyHostTier::synchronize)
      .def("drain", &PyHostTier::drain)
      .def_property_readonly("bytes_to_tier", [](const PyHostTier& t) { return t.tier().bytes_to_tier(); })
      .def_property_readonly("bytes_from_tier", [](const PyHostTier& t) { return t.tier().bytes_from_tier(); })
      .def_property_readonly("bytes_allocated", [](const PyHostTier& t) { return t.tier().bytes_allocated(); })
      .def_property_readonly("bytes_pinned", [](const PyHostTier& t) { return t.tier().bytes_pinned(); })
      .def_property_readonly("bytes_refused", [](const PyHostTier& t) { return t.tier().bytes_refused(); })
      .def_property_readonly("pin_refusal", [](const PyHostTier& t) { return t.tier().pin_refusal(); })
      .def_property_readonly("node_refusal", [](const PyHostTier& t) { return t.tier().node_refusal(); });
  py::class_<PyOffloadChunk>(module, "OffloadChunk");
  py::class_<PyOffloadPipeline>(module, "OffloadPipeline")
      .def(py::init<const PyHostTier&, int>(), py::arg("tier"), py::arg("places"))
      .def("chunk", &PyOffloadPipeline::chunk, py::kw_only(), py::arg("params"), py::arg("grads"), py::arg("exp_avgs"),
           py::arg("exp_avg_sqs"), py::arg("hyper_index"), py::arg("masters"), py::arg("max_exp_avg_sqs"), py::arg("keys"),
           py::arg("exp_avg_scales"), py::arg("exp_avg_sq_scales"), py::arg("weights"), py::arg("grad_starts"),
           py::arg("grads_come"), py::arg("place"), py::arg("changed") = py::none())
      .def("element_chunk", &PyOffloadPipeline::element_chunk, py::kw_only(), py::arg("params"), py::arg("grads"),
           py::arg("states"), py::arg("masters"), py::arg("hyper_index"), py::arg("weights"), py::arg("grad_starts"),
           py::arg("grads_come"), py::arg("place"))
      .def("begin", &PyOffloadPipeline::begin, py::arg("chunks"), py::arg("grads"), py::arg("hypers"),
           py::arg("num_threads") = 0, py::arg("weights_leave") = false, py::arg("arrivals") = Arrivals{},
           py::arg("any_order") = false)
      .def("wait_fetched", &PyOffloadPipeline::wait_fetched, py::arg("count"))
      .def("wait_updated", &PyOffloadPipeline::wait_updated, py::arg("first"), py::arg("last"))
      .def("end", &PyOffloadPipeline::end)
      .def_property_readonly("events", &PyOffloadPipeline::events);
}

}  // namespace shardcore::bind
