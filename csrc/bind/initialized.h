// What pybind11 lacks: a method of an object that was made by __new__ alone finds uninitialised memory there. The casters of
// our classes refuse such an object.
#pragma once

#include <cstring>

#include "bind/checks.h"

namespace shardcore::bind {

struct __attribute__((visibility("hidden"))) PyAdamHyper;
struct __attribute__((visibility("hidden"))) PyAdamLists;
struct __attribute__((visibility("hidden"))) PyDeviceStep;
struct __attribute__((visibility("hidden"))) PyDeviceScalars;
struct __attribute__((visibility("hidden"))) PyLossScaleRule;
class __attribute__((visibility("hidden"))) AdamStepper;
class __attribute__((visibility("hidden"))) PyHostTier;
class __attribute__((visibility("hidden"))) PyCopyEvent;
class __attribute__((visibility("hidden"))) PyNeighbourReads;
class __attribute__((visibility("hidden"))) PyTicket;
class __attribute__((visibility("hidden"))) PyTierChunk;
class __attribute__((visibility("hidden"))) PyTierSteps;

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

namespace pybind11::detail {
template <>
class type_caster<shardcore::bind::PyAdamHyper> : public shardcore::bind::InitializedCaster<shardcore::bind::PyAdamHyper> {};
template <>
class type_caster<shardcore::bind::PyAdamLists> : public shardcore::bind::InitializedCaster<shardcore::bind::PyAdamLists> {};
template <>
class type_caster<shardcore::bind::PyDeviceStep> : public shardcore::bind::InitializedCaster<shardcore::bind::PyDeviceStep> {};
template <>
class type_caster<shardcore::bind::PyDeviceScalars>
    : public shardcore::bind::InitializedCaster<shardcore::bind::PyDeviceScalars> {};
template <>
class type_caster<shardcore::bind::PyLossScaleRule>
    : public shardcore::bind::InitializedCaster<shardcore::bind::PyLossScaleRule> {};
template <>
class type_caster<shardcore::bind::AdamStepper> : public shardcore::bind::InitializedCaster<shardcore::bind::AdamStepper> {};
template <>
class type_caster<shardcore::bind::PyHostTier> : public shardcore::bind::InitializedCaster<shardcore::bind::PyHostTier> {};
template <>
class type_caster<shardcore::bind::PyCopyEvent> : public shardcore::bind::InitializedCaster<shardcore::bind::PyCopyEvent> {};
template <>
class type_caster<shardcore::bind::PyNeighbourReads>
    : public shardcore::bind::InitializedCaster<shardcore::bind::PyNeighbourReads> {};
template <>
class type_caster<shardcore::bind::PyTicket> : public shardcore::bind::InitializedCaster<shardcore::bind::PyTicket> {};
template <>
class type_caster<shardcore::bind::PyTierChunk> : public shardcore::bind::InitializedCaster<shardcore::bind::PyTierChunk> {};
template <>
class type_caster<shardcore::bind::PyTierSteps> : public shardcore::bind::InitializedCaster<shardcore::bind::PyTierSteps> {};
}  // namespace pybind11::detail
