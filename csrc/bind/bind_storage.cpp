// Replaces the memory of a tensor's storage, so that weights have memory only around their use.
//
// A Parameter stays the same object, and what autograd saved of it stays valid: both have one storage, whose memory
// is replaced. Between uses the storage is closed: no memory, and reading or writing raises an error
// (torch alone would read address 0). It keeps its size, so that views can still be made: else these fail first, with an error
// that names nothing. Autograd's version counters do not move.
#include <ATen/ops/empty.h>
#include <torch/headeronly/version.h>

#include "bind/checks.h"

namespace shardcore::bind {
namespace {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 14
// Before 2.13 torch can close a storage but not open it again. An explicit instantiation may name a private member.
template <bool c10::StorageImpl::*Member>
struct Opener {
  friend void open_old(c10::StorageImpl& storage) { storage.*Member = false; }
};
void open_old(c10::StorageImpl& storage);
template struct Opener<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
#endif

template <typename Storage>
void open(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {  // builds that call themselves 2.13 may lack it
    storage.clear_data_ptr_access_error_msg_();
  } else {
    open_old(storage);
  }
}

void close(c10::StorageImpl& storage, const std::string& message) {
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, storage.device()));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

void release(void* held) { delete static_cast<at::Tensor*>(held); }

// Memory that is not the engine's (the user re-assigned .data) must be neither hidden nor released. What is closed, or lent,
// may be so already: after an interrupt the engine does all again.
void check_ours(const Where& where, const at::Tensor& tensor) {
  const at::DataPtr& data = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (data.get() != nullptr && data.get_deleter() != &release)
    value_error(where, "memory of someone else; expected a sharded parameter as shard() left it (do not re-assign .data)");
}

void check_own_storage(const Where& where, const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || !is_plain(tensor) || tensor.storage_offset() != 0)
    value_error(where, "no storage of its own; expected a sharded parameter as shard() left it (dense, no view)");
}

// Whether each tensor has no gradient, and the address, version and dtype that it had when the engine wrote it last.
bool untouched(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& addresses,
               const std::vector<int64_t>& versions, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(tensors.size() == addresses.size() && tensors.size() == versions.size(), "untouched: got ", tensors.size(),
                    " tensors, ", addresses.size(), " addresses and ", versions.size(), " versions; expected as many of each");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!tensor.has_storage() || tensor.is_inference() || tensor.scalar_type() != dtype || tensor.grad().defined())
      return false;
    const auto* const storage = static_cast<const char*>(tensor.storage().data());
    const char* const first = storage + tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
    if (reinterpret_cast<intptr_t>(first) != addresses[i] || tensor._version() != versions[i]) return false;
  }
  return true;
}

// Notes a write behind autograd; returns the tensors' versions after it.
std::vector<int64_t> note_write(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> versions;
  versions.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    bump_version(tensor);
    versions.push_back(tensor.is_inference() ? 0 : tensor._version());
  }
  return versions;
}

at::Tensor closed(const std::vector<int64_t>& shape, const at::Tensor& like, const std::string& message) {
  at::Tensor tensor = at::empty({0}, like.options().requires_grad(false));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  tensor.storage().set_nbytes(tensor.nbytes());
  close(*tensor.storage().unsafeGetStorageImpl(), message);
  return tensor;
}

void lend(const std::vector<at::Tensor>& tensors, const at::Tensor& memory, const std::vector<int64_t>& offsets) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Where where{"lend", "tensors", static_cast<int64_t>(i)};
    check_own_storage(where, tensors[i]);
    check_ours(where, tensors[i]);
    if (tensors[i].scalar_type() != memory.scalar_type() || tensors[i].device() != memory.device())
      type_error(where, "dtype ", tensors[i].scalar_type(), " on ", tensors[i].device(), "; expected ", memory.scalar_type(),
                 " on ", memory.device(), " (as memory)");
  }
  char* const data = static_cast<char*>(memory.data_ptr());
  for (size_t i = 0; i < tensors.size(); ++i) {
    c10::StorageImpl& storage = *tensors[i].storage().unsafeGetStorageImpl();
    open(storage);
    storage.set_data_ptr_noswap(at::DataPtr(data + offsets[i] * static_cast<int64_t>(memory.itemsize()), new at::Tensor(memory),
                                            &release, memory.device()));
  }
}

void withdraw(const std::vector<at::Tensor>& tensors, const std::vector<std::string>& messages) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Where where{"withdraw", "tensors", static_cast<int64_t>(i)};
    check_own_storage(where, tensors[i]);
    check_ours(where, tensors[i]);
  }
  for (size_t i = 0; i < tensors.size(); ++i) close(*tensors[i].storage().unsafeGetStorageImpl(), messages[i]);
}

}  // namespace

void bind_storage(py::module_& module) {
  module.def("untouched", &untouched, py::arg("tensors"), py::arg("addresses"), py::arg("versions"), py::arg("dtype"));
  module.def("note_write", &note_write, py::arg("tensors"));
  module.def("closed", &closed, py::arg("shape"), py::arg("like"), py::arg("message"));
  module.def("lend", &lend, py::arg("tensors"), py::arg("memory"), py::arg("offsets"));
  module.def("withdraw", &withdraw, py::arg("tensors"), py::arg("messages"));
}

}  // namespace shardcore::bind
