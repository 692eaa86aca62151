// What a call needs of a HostTier that Python holds, to make copies of its own.
#pragma once

#include <memory>

#include "bind/checks.h"
#include "copy/host_tier.h"

namespace shardcore::bind {

// The tier, if callers may copy (HostTier::caller_copies).
std::shared_ptr<HostTier> callers_tier(const Where& where, const py::handle& object);

// Refuses two tensors that no copy can be made of: layout, dtypes, size, memory that is not the tier's or that both have.
void check_copy(const HostTier& tier, at::Device device, Direction direction, const Where& dst_where, const at::Tensor& dst,
                const Where& src_where, const at::Tensor& src);

}  // namespace shardcore::bind
