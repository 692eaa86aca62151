// adam_scalars on the host, whatever the calling thread's FTZ/DAZ.
#pragma once

#include "adam/adam_scalars.h"

namespace shardcore {

AdamScalars make_adam_scalars(const AdamHyper& hyper);

}  // namespace shardcore
