// What pybind11 lacks: a method of an object that was made by __new__ alone finds uninitialised memory there. The casters of
// our classes refuse such an object.
#pragma once

#include <cstring>

#include "bind/checks.h"

namespace shardcore::bind {

template <typename T>
class __attribute__((visibility("hidden"))) InitializedCaster : public py::detail::type_caster_base<T> {
 public:
  bool load(py::handle source, bool convert) {
    if (py::isinstance<T>(source)) {
      auto* const instance = reinterpret_cast<py::detail::instance*>(source.ptr());
      if (!instance->get_value_and_holder().holder_constructed()) {
        const char* const name = Py_TYPE(source.ptr())->tp_name;  // with its module
        const char* const dot = std::strrchr(name, '.');
        type_error({dot == nullptr ? name : dot + 1, "self"}, "no content; expected an object whose __init__ was called");
      }
    }
    return py::detail::type_caster_base<T>::load(source, convert);
  }
};

}  // namespace shardcore::bind

// Gives a class of shardcore::bind that caster; before any use of it in a file.
#define SHARDCORE_REFUSE_UNINITIALIZED(kind, name)           \
  namespace shardcore::bind {                                \
  kind __attribute__((visibility("hidden"))) name;           \
  }                                                          \
  template <>                                                \
  class pybind11::detail::type_caster<shardcore::bind::name> \
      : public shardcore::bind::InitializedCaster<shardcore::bind::name> {}

SHARDCORE_REFUSE_UNINITIALIZED(struct, PyAdamHyper);
SHARDCORE_REFUSE_UNINITIALIZED(struct, PyAdamLists);
SHARDCORE_REFUSE_UNINITIALIZED(struct, PyDeviceScalars);
SHARDCORE_REFUSE_UNINITIALIZED(struct, PyLossScaleRule);
SHARDCORE_REFUSE_UNINITIALIZED(class, AdamStepper);
SHARDCORE_REFUSE_UNINITIALIZED(class, PyHostTier);
SHARDCORE_REFUSE_UNINITIALIZED(class, PyCopyEvent);
SHARDCORE_REFUSE_UNINITIALIZED(class, PyNeighbourReads);
SHARDCORE_REFUSE_UNINITIALIZED(class, PyTicket);
SHARDCORE_REFUSE_UNINITIALIZED(class, PyTierChunk);
SHARDCORE_REFUSE_UNINITIALIZED(class, PyTierSteps);

#undef SHARDCORE_REFUSE_UNINITIALIZED
