// Updates all parameters that share an update rule in one launch, except weights that optimizer_fp8.cu updates. Eight
// blocks update one chunk of one tensor, a thread eight elements.
//
// Compiled for RULE, MOMENT and STOCHASTIC, see optimizer.cuh.

#include "optimizer.cuh"

namespace lt {

// Updates the scale as torch.amp.GradScaler does: neither lets the scale grow beyond FP32. Unlike with GradScaler, a
// scale that shrinks stays a normal number, so that its inverse is finite.
__device__ inline void update_scale(const OptimizerParams& p, const Progress& now) {
  const int successes = now.nonfinite == 0 ? *p.growth_tracker + 1 : 0;
  const bool grows = successes == p.growth_interval;
  if (now.nonfinite != 0) *p.scale = fmaxf(now.scale * p.backoff_factor, 1.17549435e-38f);
  if (grows && now.scale * p.growth_factor <= 3.40282347e38f) *p.scale = now.scale * p.growth_factor;
  *p.growth_tracker = grows ? 0 : successes;
}

constexpr uint32 kThreads = 128;
// Eight blocks share a chunk and read the same table entry: with one entry for each block, the table would be 0.3 % of
// all bytes that an update moves.
constexpr uint32 kBlocksOfChunk = 8;
// Finished blocks are counted by several counters, which lie apart: with a single counter an update takes 0.8 % longer
// on an H200.
constexpr uint32 kCounters = 32;
constexpr uint32 kCounterDistance = 64;

__device__ inline uint32 counter_of_block() { return blockIdx.x % kCounters; }

__device__ inline uint32 last_of_counter() { return (gridDim.x - counter_of_block() - 1) / kCounters; }

// Counts the calling block after it has read the optimizer's state; returns how many blocks its counter has counted
// before. No fence is needed: the block has used the state before its barrier, so that all of its reads are done.
__device__ inline uint32 count_in(const OptimizerParams& p) {
  return atomicInc(p.tickets + counter_of_block() * kCounterDistance, last_of_counter());
}

// Returns whether the calling block is the last of all blocks to be counted.
__device__ inline bool is_last(const OptimizerParams& p, uint32 before) {
  if (before != last_of_counter()) return false;
  const uint32 last = (gridDim.x < kCounters ? gridDim.x : kCounters) - 1;
  return atomicInc(&p.state->update_ticket, last) == last;
}

// The block that was counted last writes the state that the next step will read. It need not wait for any block's
// update.
__device__ inline void advance(const OptimizerParams& p, const Progress& now, bool skipped, uint32 before) {
  if (!is_last(p, before)) return;
  if (skipped) {
    p.state->skipped = now.skipped + 1;
  } else {
    p.state->steps = now.steps + 1;
  }
  p.state->nonfinite = 0;
  if (p.scale) update_scale(p, now);
}

// Launch bounds: blocks that a multiprocessor must hold. A variant that moves fewer bytes for each element needs more
// blocks to hide the latency of memory; with two blocks more than these, registers spill.
constexpr int kBlocks = kMoments * sizeof(MOMENT) <= 4 ? 10 : 8;

}  // namespace lt

extern "C" __global__ void __launch_bounds__(128, lt::kBlocks) optimizer(const lt::OptimizerParams p) {
  using namespace lt;
  // Values that are needed only after the loads wait in shared memory, which spares registers.
  __shared__ OptimizerChunk chunk;
  __shared__ Progress now;
  __shared__ UpdateStep step;
  // The table is constant, so it may be read before the previous kernel has ended.
  const OptimizerChunk own_chunk = p.chunks[blockIdx.x / kBlocksOfChunk];
  const uint32 start = blockIdx.x % kBlocksOfChunk * kThreads * kOctet;
  wait_for_predecessor();
  if (threadIdx.x == 0) chunk = own_chunk;
  const Quads at = quads_of_thread(own_chunk.count, own_chunk.aligned, start);
  const Tensors old = load_tensors(own_chunk, at);
  if (threadIdx.x == 0) {  // the factors are computed while the loads are in flight
    now = read_progress(p, own_chunk.tensor);
    step = make_step(p, now);
  }
  __syncthreads();
  uint32 before = ~0u;  // the initial value is no possible count: `advance` does nothing if this block is not counted
  // The block is counted here, although the count is read only at the end: the update hides the atomic's latency.
  if (threadIdx.x == 0 && p.tickets) before = count_in(p);
  if (!step.skipped) {
    const Octets result = update(p, chunk, step, old);
    const bool rounds = STOCHASTIC || kMoment == kBfloat16;
    const uint64 octet = chunk.octet + start / kOctet + threadIdx.x;
    const Words random = rounds ? rounding_words(p.seed, octet, chunk.tensor, step.number) : Words{};
    store_value(chunk, at, random, result.value);
    store_moments(chunk, at, random, result);
  }
  if (threadIdx.x == 0) advance(p, now, step.skipped, before);
}
