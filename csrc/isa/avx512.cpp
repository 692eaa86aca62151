// The CPU loops compiled for AVX-512; see base.cpp for what they may include.
#include "core/macros.h"
#if SHARDCORE_X86
#define SHARDCORE_ISA isa_avx512
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")
#endif

#include "adam/adam_cpu_loop.h"
#include "digest/digest_cpu_loop.h"
#include "elementwise/element_cpu_loop.h"
#include "norm/norm_cpu_loop.h"
#include "reduce/reduce_cpu_loop.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
