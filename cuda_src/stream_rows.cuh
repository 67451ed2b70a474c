// Streams rows through shared memory: a group of threads, a block or a warp, holds a whole row, and while it writes the
// row's gradient, it fetches its next row into the memory that becomes free. All rows are aligned alike, so that
// everything but a row's address is known before the first row. Compiled for one SCALAR type, ROW_THREADS, the threads of
// a block, ROW_LANES, the threads of a group, and ROW_BLOCKS, the blocks of a multiprocessor.
//
// A multiprocessor that has a single block holds a long row: each thread has its last octets in registers. What then still
// has no room is read again, from L2.
#pragma once

#include "softmax_rows.cuh"

namespace lt {

constexpr uint32 kLanes = ROW_LANES;
constexpr bool kBlockRows = kLanes == kRowThreads;  // whether a group is a block; otherwise it is a warp
constexpr int64 kOctetStride = static_cast<int64>(kLanes) * kOctet;  // from one of a thread's octets to the next
constexpr int64 kBatchStride = kOctetStride * kOctetsInFlight;
constexpr bool kLongRows = ROW_BLOCKS == 1;

// How a thread's octets of a row are cut into batches.
struct Batches {
  uint32 whole;  // batches of which every thread has all octets, so that no bounds are checked
  uint32 held;   // how many of them have room in shared memory; all of them unless rows are long
  uint32 rest;   // octets of the last batch

  __device__ Batches(const Row& row, const Group& group, const Held& shared)
      : whole((octets_from(0, row.octets, kLanes) - 1) / kOctetsInFlight),
        held(kLongRows && shared.slots / kOctetsInFlight < whole ? shared.slots / kOctetsInFlight : whole),
        rest(octets_from(group.lane, row.octets, kLanes) - whole * kOctetsInFlight) {}
};

// Starts to copy a batch of octets into shared memory.
__device__ inline void fetch_batch(const Held& held, uint32 batch, const SCALAR* from, uint32 count) {
#pragma unroll
  for (int k = 0; k < kOctetsInFlight; ++k) {
    if (k < static_cast<int>(count)) held.fetch(batch * kOctetsInFlight + k, from + k * kOctetStride);
  }
}

// Asks for a batch that will be read from global memory.
__device__ inline void prefetch_batch(const SCALAR* from) {
#pragma unroll
  for (int k = 0; k < kOctetsInFlight; ++k) prefetch_octet(from + k * kOctetStride);
}

struct Batch {
  Raw raw[kOctetsInFlight];

  Batch() = default;
  __device__ Batch(const Held& held, uint32 batch, uint32 count) {
#pragma unroll
    for (int k = 0; k < kOctetsInFlight; ++k) {
      raw[k] = k < static_cast<int>(count) ? held.get(batch * kOctetsInFlight + k) : nothing();
    }
  }
  __device__ Batch(const SCALAR* from, uint32 count) {
#pragma unroll
    for (int k = 0; k < kOctetsInFlight; ++k) {
      raw[k] = k < static_cast<int>(count) ? load_octet(from + k * kOctetStride) : nothing();
    }
  }

  __device__ void write(SCALAR* to, const Slope& slope, uint32 count, int64 col) const {
#pragma unroll
    for (int k = 0; k < kOctetsInFlight; ++k) {
      if (k < static_cast<int>(count)) store_octet(to + k * kOctetStride, slope.of(raw[k], col + k * kOctetStride));
    }
  }
};

// The last batch of a thread's octets of a row: in registers if rows are long, otherwise behind the others in shared memory.
struct Rest {
  Batch own;

  __device__ void fetch(const Held& held, const Batches& batches, const SCALAR* from) {
    if constexpr (kLongRows) {
      own = Batch(from, batches.rest);
    } else {
      fetch_batch(held, batches.whole, from, batches.rest);
    }
  }
  __device__ Batch get(const Held& held, const Batches& batches) const {
    if constexpr (kLongRows) return own;
    return Batch(held, batches.whole, batches.rest);
  }
};

__device__ inline void fetch_row(const Held& held, const Batches& batches, Rest& rest, const SCALAR* from) {
#pragma unroll 1
  for (uint32 batch = 0; batch < batches.held; ++batch) {
    fetch_batch(held, batch, from + batch * kBatchStride, kOctetsInFlight);
    end_batch();
  }
  rest.fetch(held, batches, from + batches.whole * kBatchStride);
  end_batch();
}

__device__ inline void take_in_batch(Softmax& softmax, const CrossEntropyParams& p, const Batch& read, uint32 batch,
                                     uint32 count, bool with_total, int64 col) {
  const Columns columns{col + batch * kBatchStride, kOctetStride};
  take_in(softmax, read.raw, count, with_total, p.class_weights, columns);
}

// Does what read_octets does, for a row that is being fetched from `from` on, the thread's first octet, in column `col`.
__device__ inline void read_fetched(Softmax& softmax, const CrossEntropyParams& p, const SCALAR* from, const Held& held,
                                    const Batches& batches, const Rest& rest, bool with_total, int64 col) {
#pragma unroll 1
  for (uint32 batch = 0; batch < batches.held; ++batch) {
    wait_for_all_but(batches.held - batch);
    take_in_batch(softmax, p, Batch(held, batch, kOctetsInFlight), batch, kOctetsInFlight, with_total, col);
  }
  if constexpr (kLongRows) {
#pragma unroll 1
    for (uint32 batch = batches.held; batch < batches.whole; ++batch) {
      const Batch read(from + batch * kBatchStride, kOctetsInFlight);
      take_in_batch(softmax, p, read, batch, kOctetsInFlight, with_total, col);
    }
  }
  wait_for_all_but<0>();
  if (!batches.rest) return;
  take_in_batch(softmax, p, rest.get(held, batches), batches.whole, batches.rest, with_total, col);
}

// Writes the thread's octets of the gradient from `to` on, and fetches its octets of the next row from `next` on; `col` is
// the column of `to`, and `from` where the row that was read begins.
__device__ inline void write_fetched(const SCALAR* from, SCALAR* to, const SCALAR* next, bool has_next, const Held& held,
                                     const Batches& batches, Rest& rest, const Slope& slope, int64 col) {
#pragma unroll 1
  for (uint32 batch = 0; batch < batches.held; ++batch, to += kBatchStride, next += kBatchStride) {
    Batch(held, batch, kOctetsInFlight).write(to, slope, kOctetsInFlight, col + batch * kBatchStride);
    if (has_next) fetch_batch(held, batch, next, kOctetsInFlight);
    end_batch();
  }
  if constexpr (kLongRows) {
#pragma unroll 1
    for (uint32 batch = batches.held; batch < batches.whole; ++batch, to += kBatchStride, next += kBatchStride) {
      const Batch again(from + batch * kBatchStride, kOctetsInFlight);
      again.write(to, slope, kOctetsInFlight, col + batch * kBatchStride);
      if (has_next) prefetch_batch(next);
    }
  }
  rest.get(held, batches).write(to, slope, batches.rest, col + batches.whole * kBatchStride);
  if (has_next) rest.fetch(held, batches, next);
  end_batch();
}

// The row that a group works on next.
struct NextRow {
  const SCALAR* logits;
  int64 index;
  bool exists;
  int64 label;

  __device__ NextRow(const CrossEntropyParams& p, int64 index_)
      : logits(element<const SCALAR>(p.logits, index_, 0)),
        index(index_),
        exists(index_ < p.rows),
        label(exists ? label_at(p, index_) : 0) {}
};

// How a group finds its next row. Among blocks, a row goes to the block that is ready first, since memory serves some
// blocks faster than others: one thread takes a row early, and the block learns its number behind a barrier. Warps, of
// which there are many, take turns.
struct Succession {
  int64 index;
  uint32* place;  // where one thread of a block leaves the row's number for the others

  __device__ Succession(const CrossEntropyParams& p, const Group& group, int64 current, uint32* place_)
      : index(current + gridDim.x * (blockDim.x / kLanes)), place(place_) {
    if (kBlockRows && group.lane == 0) index = gridDim.x + atomicAdd(p.claimed, 1u);
  }
  __device__ void announce(const Group& group) const {
    if (kBlockRows && group.lane == 0) *place = static_cast<uint32>(index);
  }
  // The next row; to be called after `announce` and a barrier.
  __device__ NextRow next(const CrossEntropyParams& p) const { return {p, kBlockRows ? *place : index}; }
};

struct Done {
  NextRow next;
  float loss;
};

// Writes the gradient of a row that is being fetched, and fetches the next row meanwhile: memory is read and written at the
// same time, without a pause between rows.
__device__ inline Done stream_row(const CrossEntropyParams& p, const Row& row, int64 row_index, int64 label,
                                  const Succession& succession, const Group& group, const Held& held,
                                  const Batches& batches, Rest& rest, const Smoothing& smoothing, float scale) {
  const uint32 first = group.lane * kOctet, single = row.octets * kOctet + group.lane;
  if (p.ignores && label == p.ignore_index) {
    succession.announce(group);
    if (kBlockRows) __syncthreads();
    const NextRow next = succession.next(p);
    wait_for_all_but<0>();
    clear(p, row, group);
    if (next.exists) fetch_row(held, batches, rest, next.logits + first);
    return {next, 0.0f};
  }
  const Target target(p, row, label, smoothing);
  const float weight = weight_of(p, row_index, label);
  Softmax softmax = Softmax::of_nothing();
  if (single < p.cols) take_in(softmax, p, to_float(row.logits[single]), single);
  read_fetched(softmax, p, row.logits + first, held, batches, rest, smoothing.share > 0.0f, first);
  succession.announce(group);
  softmax = reduce_row(softmax, group);
  const NextRow next = succession.next(p);
  const Slope slope = target.slope(softmax, kWeighted ? weight * scale : scale);
  write_fetched(row.logits + first, row.gradient + first, next.logits + first, next.exists, held, batches, rest, slope,
                first);
  if (single < p.cols) {
    row.set_gradient(p, single, label == single ? target.gradient(slope) : slope.of(to_float(row.logits[single]), single));
  }
  const uint32 octet = row.octet_of(label);
  if (octet < row.octets && octet % kLanes == group.lane) row.set_gradient(p, label, target.gradient(slope));
  return {next, kWeighted ? weight * target.loss(softmax) : target.loss(softmax)};
}

// Works on all rows; returns the calling thread's share of the sum of their losses. Which block gets a row is a matter of
// chance, so that blocks instead keep the loss of each row apart, to be summed in order. Labels are counted while the
// first rows are being fetched.
__device__ inline float stream_rows(const CrossEntropyParams& p, const Group& group, const Held& held, float* scratch,
                                    Mean& mean) {
  __shared__ uint32 places[2];  // used in turns: a thread that is behind may still read the other one
  const Smoothing smoothing(p);
  NextRow now(p, static_cast<int64>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes);
  Row row(p, now.exists ? now.index : 0);
  const Batches batches(row, group, held);
  Rest rest;
  if (now.exists) fetch_row(held, batches, rest, row.logits + group.lane * kOctet);
  mean = Mean(p, scratch);
  float loss = 0.0f;
#pragma unroll 1
  for (uint32 turn = 0; now.exists; turn ^= 1) {
    const Succession succession(p, group, now.index, &places[turn]);
    const Done done = stream_row(p, row, now.index, now.label, succession, group, held, batches, rest, smoothing,
                                 mean.scale);
    if (group.lane == 0) {
      loss += done.loss;
      if (kBlockRows) p.partial[now.index] = done.loss;
    }
    now = done.next;
    row.logits = now.logits;
    row.gradient = element<SCALAR>(p.gradient, now.index, 0);
  }
  return loss;
}

}  // namespace lt
