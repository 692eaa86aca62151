// Markers for code that is shared by the host and CUDA, and by several instruction sets.
//
// Invariant: a function that a per-ISA source (csrc/isa) may instantiate is marked SHARDCORE_HD or is static.
// Such functions have internal linkage, so the linker can never hand AVX-512 code to the base path.
#pragma once

#if defined(__CUDACC__)
#define SHARDCORE_HD static __host__ __device__ __forceinline__
#elif defined(SHARDCORE_CALLS_FUNCTIONS)  // with asan's checks in it, code that is inlined everywhere compiles for minutes
#define SHARDCORE_HD [[maybe_unused]] static inline
#else
#define SHARDCORE_HD [[maybe_unused]] static inline __attribute__((always_inline))
#endif

#define SHARDCORE_RESTRICT __restrict__

// Loops that nvcc must unroll (their arrays are registers), and must not (it would cost registers).
#if defined(__CUDA_ARCH__)
#define SHARDCORE_UNROLL _Pragma("unroll")
#define SHARDCORE_NO_UNROLL _Pragma("unroll 1")
#else
#define SHARDCORE_UNROLL
#define SHARDCORE_NO_UNROLL
#endif

// Asserts to nvcc that a pointer read from memory points to global memory: it cannot infer that, and generic accesses take
// longer.
#if defined(__CUDA_ARCH__)
#define SHARDCORE_ASSUME_GLOBAL(pointer) __builtin_assume(__isGlobal(pointer))
#else
#define SHARDCORE_ASSUME_GLOBAL(pointer)
#endif

#if defined(__x86_64__)
#define SHARDCORE_X86 1
#else
#define SHARDCORE_X86 0
#endif

// Declares a CPU loop in the namespace of each instruction set (csrc/isa).
#define SHARDCORE_PER_ISA(declaration) \
  namespace isa_avx512 {               \
  declaration                          \
  }                                    \
  namespace isa_avx2 {                 \
  declaration                          \
  }                                    \
  namespace isa_base {                 \
  declaration                          \
  }
