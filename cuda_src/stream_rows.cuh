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

// Writes the gradient of a row that is on its way, and returns its loss. Memory is read while it is written, without a
// pause between rows. `next` is the row after it, if there is one.
__device__ inline float stream_row(const CrossEntropyParams& p, const Row& row, int64 label, const SCALAR* next,
                                   bool has_next, const Group& group, const Held& held, const Batches& batches,
                                   const Smoothing& smoothing, float scale) {
  const uint32 first = group.lane * kOctet, single = row.octets * kOctet + group.lane;
  if (p.ignores && label == p.ignore_index) {
    wait_for_all_but<0>();
    clear(p, row, group);
    if (has_next) fetch_row(held, batches, next + first);
    return 0.0f;
  }
  const Target target(p, row, label, smoothing);
  Softmax softmax{-CUDART_INF_F, 0.0f, 0.0f};
  if (single < p.cols) take_in(softmax, to_float(row.logits[single]));
  read_fetched(softmax, held, batches, smoothing.share > 0.0f);
  softmax = reduce_row(softmax, group);
  const Slope slope = target.slope(softmax, scale);
  write_fetched(row.gradient + first, next + first, has_next, held, batches, slope);
  if (single < p.cols) {
    row.set_gradient(p, single, label == single ? target.gradient(slope) : slope.of(to_float(row.logits[single])));
  }
  const uint32 octet = row.octet_of(label);
  if (octet < row.octets && octet % kRowThreads == group.lane) row.set_gradient(p, label, target.gradient(slope));
  return target.loss(softmax);
}

// The calling thread's part of the sum of all losses. Labels are counted while the first row is on its way.
__device__ inline float stream_rows(const CrossEntropyParams& p, const Group& group, const Held& held, float* scratch,
                                    Mean& mean) {
  const Smoothing smoothing(p);
  Row row(p, blockIdx.x);  // there are no more blocks than rows
  const Batches batches(row, group, held);
  int64 label = label_at(p, blockIdx.x);
  fetch_row(held, batches, row.logits + group.lane * kOctet);
  mean = Mean(p, scratch);
  float loss = 0.0f;
#pragma unroll 1
  for (int64 index = blockIdx.x; index < p.rows; index += gridDim.x) {
    const int64 next_index = index + gridDim.x;
    const bool has_next = next_index < p.rows;
    const SCALAR* next = row.logits + gridDim.x * p.logits.row_stride;
    const int64 next_label = has_next ? label_at(p, next_index) : 0;  // known when it is needed
    const float loss_of_row = stream_row(p, row, label, next, has_next, group, held, batches, smoothing, mean.scale);
    if (group.lane == 0) loss += loss_of_row;
    row.logits = next;
    row.gradient += gridDim.x * p.gradient.row_stride;
    label = next_label;
  }
  return loss;
}

}  // namespace lt
