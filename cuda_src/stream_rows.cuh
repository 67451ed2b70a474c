// Streams rows through shared memory. A group of threads, a block or a warp, computes a row that has been copied to
// shared memory. As soon as a part of the row is no longer needed, the group starts to copy a part of its next row into
// the freed memory. If a group is a block, its threads keep the first packets of a row in registers from the first pass
// over the row (maximum and sum) to the second (gradient), so that the next row is being copied while the softmax of
// this one is computed, and global memory is never idle. All rows are aligned alike, so that everything but a row's
// address is computed before the first row. Compiled for one SCALAR type, ROW_THREADS, the threads of a block,
// ROW_LANES, the threads of a group, ROW_BLOCKS, the blocks of a multiprocessor, and ROW_KEPT, the number of batches of
// packets that a thread keeps in registers; every row has at least one batch more. Without a gradient there is no
// second pass, and a batch is no longer needed once the first pass has read it.
//
// Shared memory is a ring buffer of batches: a new batch overwrites the oldest consumed one. Packets of a row for which
// registers and shared memory have no room are read twice from global memory; this happens only to long rows, which
// ROW_BLOCKS 1 gives a multiprocessor to themselves.
#pragma once

#include "softmax_rows.cuh"

namespace lt {

// Distance in elements from one of a thread's packets to its next.
constexpr int64 kPacketStride = static_cast<int64>(kLanes) * kPacket;
constexpr int64 kBatchStride = kPacketStride * kPacketsInFlight;
constexpr bool kLongRows = ROW_BLOCKS == 1;
constexpr uint32 kKept = ROW_KEPT;
// The first pass over a row (maximum and sum) frees the shared memory of its first kFreed batches of packets: of those
// that registers keep for the gradient, or of all if no gradient is written.
constexpr uint32 kFreed = kWrites ? kKept : 0xFFFFFFFF;

__device__ inline uint32 smaller(uint32 a, uint32 b) { return a < b ? a : b; }

// How a thread's packets of a row are divided into batches, which are loaded together.
struct Batches {
  uint32 whole;    // number of batches that are complete in every thread, so that no bounds are checked
  uint32 rest;     // number of packets in the incomplete batch at the row's end
  uint32 fetched;  // number of batches that are copied to shared memory; all of them unless rows are long
  uint32 slots;    // number of batches for which shared memory has room

  __device__ Batches(const Row& row, const Group& group, const SharedRing& held)
      : whole((packets_from(0, row.packets, kLanes) - 1) / kPacketsInFlight),
        rest(packets_from(group.lane, row.packets, kLanes) - whole * kPacketsInFlight),
        fetched(kLongRows ? smaller(all(), held.slots / kPacketsInFlight + kKept) : all()),
        slots(smaller(held.slots / kPacketsInFlight, fetched)) {}

  __device__ uint32 all() const { return whole + 1; }
  // Number of complete batches among those that are copied to shared memory.
  __device__ uint32 whole_fetched() const { return smaller(whole, fetched); }
  // Number of packets that the calling thread has in a batch.
  __device__ uint32 count(uint32 batch) const { return batch < whole ? kPacketsInFlight : rest; }
  __device__ uint32 slot_after(uint32 slot) const { return slot + 1 < slots ? slot + 1 : 0; }
  // Number of later copies that may still be in flight when the first pass needs `batch` in shared memory. Into each
  // slot that it has freed before, a later batch is being copied.
  __device__ uint32 behind(uint32 batch) const { return smaller(batch, kFreed) + slots - 1 - batch; }
};

// Starts to copy a batch of packets into shared memory.
__device__ inline void fetch_batch(const SharedRing& held, uint32 slot, const SCALAR* from, uint32 count) {
#pragma unroll
  for (int k = 0; k < kPacketsInFlight; ++k) {
    if (k < static_cast<int>(count)) held.fetch(slot * kPacketsInFlight + k, from + k * kPacketStride);
  }
}

// Prefetches into L2 a batch for which shared memory has no room.
__device__ inline void prefetch_batch(const SCALAR* from, uint32 count) {
#pragma unroll
  for (int k = 0; k < kPacketsInFlight; ++k) {
    if (k < static_cast<int>(count)) prefetch_packet(from + k * kPacketStride);
  }
}

struct Batch {
  Raw raw[kPacketsInFlight];

  Batch() = default;
  __device__ Batch(const SharedRing& held, uint32 slot, uint32 count) {
#pragma unroll
    for (int k = 0; k < kPacketsInFlight; ++k) {
      raw[k] = k < static_cast<int>(count) ? held.get(slot * kPacketsInFlight + k) : nothing();
    }
  }
  __device__ Batch(const SCALAR* from, uint32 count) {
#pragma unroll
    for (int k = 0; k < kPacketsInFlight; ++k) {
      raw[k] = k < static_cast<int>(count) ? load_packet(from + k * kPacketStride) : nothing();
    }
  }

  // Makes the compiler keep the packets in registers rather than FP32 numbers computed from them, which take more.
  __device__ void keep() {
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int k = 0; k < kPacketsInFlight; ++k) {
      uint4& words = raw[k].words;
      asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
    }
#endif
  }

  __device__ void write(SCALAR* to, const Slope& slope, uint32 count, int64 col) const {
#pragma unroll
    for (int k = 0; k < kPacketsInFlight; ++k) {
      if (k < static_cast<int>(count)) store_packet(to + k * kPacketStride, slope.of(raw[k], col + k * kPacketStride));
    }
  }
};

__device__ inline void fetch_row(const SharedRing& held, const Batches& batches, const SCALAR* from) {
#pragma unroll 1
  for (uint32 batch = 0; batch < batches.slots; ++batch) {
    fetch_batch(held, batch, from + batch * kBatchStride, batches.count(batch));
    end_copies();
  }
}

// Iterates over the batches that a group has yet to copy while it computes a row: the last ones of this row, if shared
// memory has no room for all, then those of the next row. It keeps one running address, which takes fewer registers
// than an address for each batch.
struct Ahead {
  const SCALAR* from;  // the thread's first packet of the next batch to fetch
  const SCALAR* next;  // the thread's first packet of the next row
  uint32 batch;
  bool exists;
  bool next_exists;

  __device__ Ahead(const Batches& batches, const SCALAR* row, const SCALAR* next_, bool next_exists_)
      : from(row + batches.slots * kBatchStride),
        next(next_),
        batch(batches.slots),
        exists(true),
        next_exists(next_exists_) {
    turn(batches);
  }
  // Starts to copy the next batch into `slot`, whose batch is no longer needed.
  __device__ void refill(const SharedRing& held, const Batches& batches, uint32 slot) {
    if (exists) fetch_batch(held, slot, from, batches.count(batch));
    end_copies();
    from += kBatchStride;
    ++batch;
    turn(batches);
  }

 private:
  // After the last batch of a row, goes on to the next row.
  __device__ void turn(const Batches& batches) {
    if (batch < batches.fetched) return;
    from = next;
    batch = 0;
    exists = next_exists;
  }
};

__device__ inline void accumulate_batch(Softmax& softmax, const CrossEntropyParams& p, const Batch& read, uint32 batch,
                                     uint32 count, bool with_total, int64 col) {
  const Columns columns{col + batch * kBatchStride, kPacketStride};
  accumulate(softmax, read.raw, count, with_total, p.class_weights, columns);
}

// First pass over a row that is being copied to shared memory: adds the thread's packets to `softmax`, as
// `read_packets` does for other rows. The first batch is in `slot`; `col` is the column of the thread's first packet.
// Returns the slot of the first batch that is not kept in registers; without a gradient that is the next row's first.
__device__ inline uint32 read_fetched(Softmax& softmax, const CrossEntropyParams& p, const SCALAR* from, Ahead& ahead,
                                      const SharedRing& held, const Batches& batches, Batch (&own)[kKept + 1], uint32 slot,
                                      bool with_total, int64 col) {
#pragma unroll
  for (uint32 batch = 0; batch < kKept; ++batch) {
    wait_for_batches(batches.behind(batch));
    own[batch] = Batch(held, slot, kPacketsInFlight);
    accumulate_batch(softmax, p, own[batch], batch, kPacketsInFlight, with_total, col);
    if (kKept > 1) own[batch].keep();
    ahead.refill(held, batches, slot);
    slot = batches.slot_after(slot);
  }
  const uint32 second = slot;
#pragma unroll 1
  for (uint32 batch = kKept; batch < batches.whole_fetched(); ++batch, slot = batches.slot_after(slot)) {
    wait_for_batches(batches.behind(batch));
    accumulate_batch(softmax, p, Batch(held, slot, kPacketsInFlight), batch, kPacketsInFlight, with_total, col);
    if (!kWrites) ahead.refill(held, batches, slot);
  }
  if (batches.whole < batches.fetched) {
    wait_for_batches(batches.behind(batches.whole));
    if (batches.rest) {
      accumulate_batch(softmax, p, Batch(held, slot, batches.rest), batches.whole, batches.rest, with_total, col);
    }
    if (!kWrites) ahead.refill(held, batches, slot);
    slot = batches.slot_after(slot);
  }
  if constexpr (kLongRows) {
#pragma unroll 1
    for (uint32 batch = batches.fetched; batch < batches.all(); ++batch) {
      const uint32 count = batches.count(batch);
      if (!count) break;
      accumulate_batch(softmax, p, Batch(from + batch * kBatchStride, count), batch, count, with_total, col);
    }
  }
  return kWrites ? second : slot;
}

// Second pass over a row: writes the thread's packets of the gradient from `to` on, and starts to copy packets of the
// next row into the freed slots. `slot` is that of the first batch that is not kept in registers, `col` the column of
// `to`. Returns the slot of the next row's first batch.
__device__ inline uint32 write_fetched(const SCALAR* from, SCALAR* to, Ahead& ahead, const SharedRing& held,
                                       const Batches& batches, const Batch (&own)[kKept + 1], uint32 slot,
                                       const Slope& slope, int64 col) {
#pragma unroll 1
  for (uint32 batch = kKept; batch < batches.whole_fetched(); ++batch, slot = batches.slot_after(slot)) {
    const int64 at = batch * kBatchStride;
    Batch(held, slot, kPacketsInFlight).write(to + at, slope, kPacketsInFlight, col + at);
    ahead.refill(held, batches, slot);
  }
  if (batches.whole < batches.fetched) {
    const int64 at = batches.whole * kBatchStride;
    Batch(held, slot, batches.rest).write(to + at, slope, batches.rest, col + at);
    ahead.refill(held, batches, slot);
    slot = batches.slot_after(slot);
  }
  if constexpr (kLongRows) {
#pragma unroll 1
    for (uint32 batch = batches.fetched; batch < batches.all(); ++batch) {
      const int64 at = batch * kBatchStride;
      const uint32 count = batches.count(batch);
      Batch(from + at, count).write(to + at, slope, count, col + at);
      if (ahead.next_exists) prefetch_batch(ahead.next + at, count);
    }
  }
#pragma unroll
  for (uint32 batch = 0; batch < kKept; ++batch) {
    const int64 at = batch * kBatchStride;
    own[batch].write(to + at, slope, kPacketsInFlight, col + at);
  }
  return slot;
}

// Which row a group computes after its next one. Blocks claim rows dynamically by an atomic counter, since memory
// serves some blocks faster than others: one thread claims a row early, and the other threads read its number after a
// barrier. If groups are warps, there are many of them, and they take every n-th row, n being their number. Row numbers
// have 32 bits, because memory cannot hold more rows of this size.
struct Succession {
  uint32 index;
  uint32* place;  // shared memory through which one thread tells its block the row's number

  __device__ Succession(const CrossEntropyParams& p, const Group& group, uint32 next, uint32 step, uint32* place_)
      : index(next + step), place(place_) {
    if (kBlockRows && group.lane == 0) index = 2 * step + atomicAdd(p.claimed, 1u);
  }
  __device__ void announce(const Group& group) const {
    if (kBlockRows && group.lane == 0) *place = index;
  }
  // Returns the number of the row. Must be called after `announce` and a barrier.
  __device__ uint32 row() const { return kBlockRows ? *place : index; }
};

// Progress of a group: it computes row `now`, which is being copied to shared memory and whose first batch is in
// `slot`.
struct Turn {
  uint32 now;
  uint32 next;
  uint32 slot;
  int64 label;  // label of row `now`

  __device__ static int64 label_of(const CrossEntropyParams& p, uint32 row) {
    return row < p.rows ? label_at(p, row) : 0;
  }
};

// Computes one row and writes its gradient, while the next row is being copied, so that memory is read and written at
// the same time, without a pause between rows. Advances `turn` to the next row; returns the loss of this row.
__device__ inline float stream_row(const CrossEntropyParams& p, Turn& turn, Row& row, const Succession& succession,
                                   const Group& group, const SharedRing& held, const Batches& batches,
                                   const Smoothing& smoothing, float scale) {
  const uint32 first = group.lane * kPacket, single = row.packets * kPacket + group.lane;
  const bool next_exists = turn.next < p.rows;
  const SCALAR* const next = element<const SCALAR>(p.logits, turn.next, 0) + first;
  row.logits = element<const SCALAR>(p.logits, turn.now, 0);
  if (p.ignores && turn.label == p.ignore_index) {
    succession.announce(group);
    if (kBlockRows) __syncthreads();
    wait_for_copies<0>();
    row.gradient = element<SCALAR>(p.gradient, turn.now, 0);
    if (kWrites) clear(p, row, group);
    if (next_exists) fetch_row(held, batches, next);
    turn = {turn.next, succession.row(), 0, Turn::label_of(p, turn.next)};
    return 0.0f;
  }
  // Label and weight are loaded before the wait for the row, so that both latencies overlap.
  const int64 label = turn.label;
  const SCALAR picked = label >= 0 && label < p.cols ? row.logit(p, label) : from_float<SCALAR>(0.0f);
  const float weight = weight_of(p, turn.now, label);
  Ahead ahead(batches, row.logits + first, next, next_exists);
  Softmax softmax = Softmax::of_nothing();
  if (single < p.cols) accumulate(softmax, p, to_float(row.logits[single]), single);
  Batch own[kKept + 1];
  const bool with_total = smoothing.share > 0.0f;
  const uint32 slot = read_fetched(softmax, p, row.logits + first, ahead, held, batches, own, turn.slot, with_total, first);
  const Target target(p, label, to_float(picked), smoothing);
  succession.announce(group);
  softmax = reduce_row(softmax, group);
  const Slope slope = target.slope(softmax, kWeighted ? weight * scale : scale);
  row.gradient = element<SCALAR>(p.gradient, turn.now, 0);
  turn = {turn.next, succession.row(), slot, Turn::label_of(p, turn.next)};
  if (kWrites) {
    turn.slot = write_fetched(row.logits + first, row.gradient + first, ahead, held, batches, own, slot, slope, first);
    if (single < p.cols) {
      row.set_gradient(p, single, label == single ? target.gradient(slope) : slope.of(to_float(row.logits[single]), single));
    }
    const uint32 packet = row.packet_of(label);
    if (packet < row.packets && packet % kLanes == group.lane) row.set_gradient(p, label, target.gradient(slope));
  }
  return kWeighted ? weight * target.loss(softmax) : target.loss(softmax);
}

// Computes all rows of the calling group. Warps return the calling thread's share of the sum of losses. Blocks claim
// rows in an order that changes from run to run, so that they store the loss of each row instead, to be added up in the
// order of the rows. Labels are counted while the first rows are being copied.
__device__ inline float stream_rows(const CrossEntropyParams& p, const Group& group, const SharedRing& held, float* scratch,
                                    Mean& mean) {
  __shared__ uint32 places[2];  // numbers of claimed rows, used in turn: a slow thread may still read the previous one
  const Smoothing smoothing(p);
  const uint32 groups = blockDim.x / kLanes, step = gridDim.x * groups;
  const uint32 start = blockIdx.x * groups + threadIdx.x / kLanes;
  Turn turn{start, start + step, 0, Turn::label_of(p, start)};
  Row row(p, start < p.rows ? start : 0);
  const Batches batches(row, group, held);
  if (start < p.rows) fetch_row(held, batches, row.logits + group.lane * kPacket);
  mean = Mean(p, scratch);
  float loss = 0.0f;
#pragma unroll 1
  for (uint32 place = 0; turn.now < p.rows; place ^= 1) {
    const uint32 now = turn.now;
    const Succession succession(p, group, turn.next, step, &places[place]);
    const float of_row = stream_row(p, turn, row, succession, group, held, batches, smoothing, mean.scale);
    if (group.lane == 0) {
      loss += of_row;
      if (kBlockRows) p.partial[now] = of_row;
    }
  }
  return loss;
}

}  // namespace lt
