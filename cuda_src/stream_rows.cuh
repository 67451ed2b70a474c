// Long rows that lie alike, one after another by a block that holds a row as a whole: while the gradient of one is
// written, the next is fetched into the shared memory that becomes free. All of a row but its base is the same for each,
// and known before the first. Compiled for one SCALAR type, and ROW_THREADS of a block.
#pragma once

#include "softmax_rows.cuh"

namespace lt {

constexpr int64 kOctetStride = static_cast<int64>(kRowThreads) * kOctet;  // from one of a thread's octets to the next
constexpr int64 kBatchStride = kOctetStride * kOctetsInFlight;

// How a thread's octets of a row are cut into batches.
struct Batches {
  uint32 whole;  // that are without bounds: every thread has all of their octets
  uint32 rest;   // octets of the last one

  __device__ Batches(const Row& row, const Group& group, const Held& held)
      : whole((held.slots - 1) / kOctetsInFlight),
        rest(octets_from(group.lane, row.octets, kRowThreads) - whole * kOctetsInFlight) {}
};

// Starts to copy a batch of octets into shared memory.
__device__ inline void fetch_batch(const Held& held, uint32 batch, const SCALAR* from, uint32 count) {
#pragma unroll
  for (int k = 0; k < kOctetsInFlight; ++k) {
    if (k < static_cast<int>(count)) held.fetch(batch * kOctetsInFlight + k, from + k * kOctetStride);
  }
}

__device__ inline void fetch_row(const Held& held, const Batches& batches, const SCALAR* from) {
#pragma unroll 1
  for (uint32 batch = 0; batch < batches.whole; ++batch, from += kBatchStride) {
    fetch_batch(held, batch, from, kOctetsInFlight);
    end_batch();
  }
  fetch_batch(held, batches.whole, from, batches.rest);
  end_batch();
}

struct Batch {
  Raw raw[kOctetsInFlight];

  __device__ Batch(const Held& held, uint32 batch, uint32 count) {
#pragma unroll
    for (int k = 0; k < kOctetsInFlight; ++k) {
      raw[k] = k < static_cast<int>(count) ? held.get(batch * kOctetsInFlight + k) : nothing();
    }
  }

  __device__ void write(SCALAR* to, const Slope& slope, uint32 count) const {
#pragma unroll
    for (int k = 0; k < kOctetsInFlight; ++k) {
      if (k < static_cast<int>(count)) store_octet(to + k * kOctetStride, slope.of(raw[k]));
    }
  }
};

// As read_octets, of a row that is on its way.
__device__ inline void read_fetched(Softmax& softmax, const Held& held, const Batches& batches, bool with_total) {
#pragma unroll 1
  for (uint32 batch = 0; batch < batches.whole; ++batch) {
    wait_for_all_but(batches.whole - batch);
    take_in(softmax, Batch(held, batch, kOctetsInFlight).raw, kOctetsInFlight, with_total);
  }
  wait_for_all_but<0>();
  if (batches.rest) take_in(softmax, Batch(held, batches.whole, batches.rest).raw, batches.rest, with_total);
}

// Writes the gradient to where the thread's first octet goes; `next` is where that of the row after this one is.
__device__ inline void write_fetched(SCALAR* to, const SCALAR* next, bool has_next, const Held& held,
                                     const Batches& batches, const Slope& slope) {
#pragma unroll 1
  for (uint32 batch = 0; batch < batches.whole; ++batch, to += kBatchStride, next += kBatchStride) {
    Batch(held, batch, kOctetsInFlight).write(to, slope, kOctetsInFlight);
    if (has_next) fetch_batch(held, batch, next, kOctetsInFlight);
    end_batch();
  }
  Batch(held, batches.whole, batches.rest).write(to, slope, batches.rest);
  if (has_next) fetch_batch(held, batches.whole, next, batches.rest);
  end_batch();
}

// The row that a block does next. Rows go to whichever block is ready first, since memory serves some faster than others.
// One thread asks for it early, and its block learns it at a barrier.
struct NextRow {
  const SCALAR* logits;
  int64 index;
  bool exists;
  int64 label;

  // Of a row that nobody has taken; the counter is zero at first.
  static __device__ uint32 claim(const CrossEntropyParams& p, const Group& group) {
    return group.lane == 0 ? gridDim.x + atomicAdd(p.claimed, 1u) : 0;
  }
  __device__ NextRow(const CrossEntropyParams& p, int64 index_)
      : logits(element<const SCALAR>(p.logits, index_, 0)),
        index(index_),
        exists(index_ < p.rows),
        label(exists ? label_at(p, index_) : 0) {}
};

// Writes the gradient and the loss of a row that is on its way, and says which row is fetched meanwhile: memory is read
// while it is written, without a pause between rows. `place` is where the block's threads leave word for each other.
__device__ inline NextRow stream_row(const CrossEntropyParams& p, const Row& row, int64 index, int64 label,
                                     const Group& group, const Held& held, const Batches& batches,
                                     const Smoothing& smoothing, float scale, uint32& place) {
  const uint32 claimed = NextRow::claim(p, group);
  const uint32 first = group.lane * kOctet, single = row.octets * kOctet + group.lane;
  if (p.ignores && label == p.ignore_index) {
    if (group.lane == 0) {
      place = claimed;
      p.partial[index] = 0.0f;
    }
    __syncthreads();
    const NextRow next(p, place);
    wait_for_all_but<0>();
    clear(p, row, group);
    if (next.exists) fetch_row(held, batches, next.logits + first);
    return next;
  }
  const Target target(p, row, label, smoothing);
  Softmax softmax{-CUDART_INF_F, 0.0f, 0.0f};
  if (single < p.cols) take_in(softmax, to_float(row.logits[single]));
  read_fetched(softmax, held, batches, smoothing.share > 0.0f);
  if (group.lane == 0) place = claimed;
  softmax = reduce_row(softmax, group);
  const NextRow next(p, place);
  const Slope slope = target.slope(softmax, scale);
  write_fetched(row.gradient + first, next.logits + first, next.exists, held, batches, slope);
  if (single < p.cols) {
    row.set_gradient(p, single, label == single ? target.gradient(slope) : slope.of(to_float(row.logits[single])));
  }
  const uint32 octet = row.octet_of(label);
  if (octet < row.octets && octet % kRowThreads == group.lane) row.set_gradient(p, label, target.gradient(slope));
  if (group.lane == 0) p.partial[index] = target.loss(softmax);
  return next;
}

// All rows. Labels are counted while the first row is on its way. Each row's loss is kept for itself: which block does it
// is a matter of chance.
__device__ inline Mean stream_rows(const CrossEntropyParams& p, const Group& group, const Held& held, float* scratch) {
  __shared__ uint32 places[2];  // in turns: who is behind may still read the other
  const Smoothing smoothing(p);
  int64 index = blockIdx.x, label = label_at(p, index);  // there are no more blocks than rows
  Row row(p, index);
  const Batches batches(row, group, held);
  fetch_row(held, batches, row.logits + group.lane * kOctet);
  const Mean mean(p, scratch);
#pragma unroll 1
  for (uint32 turn = 0; index < p.rows; turn ^= 1) {
    const NextRow next = stream_row(p, row, index, label, group, held, batches, smoothing, mean.scale, places[turn]);
    index = next.index;
    label = next.label;
    row.logits = next.logits;
    row.gradient = element<SCALAR>(p.gradient, index, 0);
  }
  return mean;
}

}  // namespace lt
