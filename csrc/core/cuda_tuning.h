// Choices that change the CUDA Adam kernels' speed and not their bits.
#pragma once

// 1: one range test for 4 roots and divisions (adam_roots.h). 0: the compiler's, one each.
#ifndef SHARDCORE_FAST_ROOTS
#define SHARDCORE_FAST_ROOTS 1
#endif

// 1: 8-bit codes by multiplications with powers of two (state_codec.h).
#ifndef SHARDCORE_SCALED_CODES
#define SHARDCORE_SCALED_CODES 1
#endif

// 1: the loads of a round are issued before the arithmetic of the one before it.
#ifndef SHARDCORE_PREFETCH
#define SHARDCORE_PREFETCH 0
#endif

// How lanes share a block of 256 with 16-bit and float32 streams. 1: halves far apart, a warp's access is one piece of memory.
// 0: pairs of lanes exchange, a pair's access is 32 bytes.
#ifndef SHARDCORE_WHOLE_LINES
#define SHARDCORE_WHOLE_LINES 1
#endif

// Blocks a multiprocessor, of 128 threads: f32 moments, bf16 moments, 8-bit moments, any mixture.
#ifndef SHARDCORE_MIN_BLOCKS_F32
#define SHARDCORE_MIN_BLOCKS_F32 8
#endif
#ifndef SHARDCORE_MIN_BLOCKS_BF16
#define SHARDCORE_MIN_BLOCKS_BF16 8
#endif
#ifndef SHARDCORE_MIN_BLOCKS_Q8
#define SHARDCORE_MIN_BLOCKS_Q8 8
#endif
#ifndef SHARDCORE_MIN_BLOCKS_ANY
#define SHARDCORE_MIN_BLOCKS_ANY 5
#endif

// 0: none. 1: evict-first loads and stores (.cs). 2: loads that leave no line in L1.
#ifndef SHARDCORE_STREAMING
#define SHARDCORE_STREAMING 0
#endif

#ifndef SHARDCORE_ADAM_THREADS
#define SHARDCORE_ADAM_THREADS 128
#endif
#ifndef SHARDCORE_ADAM_ROUNDS
#define SHARDCORE_ADAM_ROUNDS 8
#endif
