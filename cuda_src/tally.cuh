// Sums over training steps, of losses and of correctly classified rows. They stay on the device until the host reads
// them. Most kernels that compute a loss also add it to these sums; after the others, the kernel of tally.cu does.
#pragma once

#include "vector.cuh"

namespace lt {

// The host sets all numbers to zero at the beginning.
struct TallyState {
  float loss;  // the sum of the losses of all steps
  float rest;  // the part of `loss` that rounding has cut off (Kahan summation)
  uint64 steps;
  uint64 rows;  // number of rows whose label is not ignored
  uint64 correct;
  float mean;  // the present step's loss so far: the sum of its parts' losses times their weights
};

// A part of a step, such as a micro-batch, whose loss is added to a tally.
struct Tally {
  TallyState* state;  // null if nothing is added
  float weight;       // factor of the part's loss
  int first;          // whether this is the first part of its step
};

// The label of a row; labels are int64 if `wide`, otherwise int32.
__device__ inline int64 label_at(const void* labels, int wide, int64 row) {
  return wide ? static_cast<const int64*>(labels)[row] : static_cast<const int*>(labels)[row];
}

// Adds a part's loss to the tally. One thread of a grid calls it.
__device__ inline void add_loss(const Tally& tally, float loss) {
  TallyState& state = *tally.state;
  const float part = tally.weight * loss;
  state.mean = tally.first ? part : state.mean + part;
  const float term = part - state.rest, sum = state.loss + term;
  state.rest = (sum - state.loss) - term;
  state.loss = sum;
  state.steps += tally.first;
}

// Adds the calling block's numbers of rows: those whose label is not ignored, and those that are classified correctly.
// One thread of each block calls it.
__device__ inline void add_rows(const Tally& tally, uint32 rows, uint32 correct) {
  if (rows != 0) atomicAdd(&tally.state->rows, static_cast<uint64>(rows));
  if (correct != 0) atomicAdd(&tally.state->correct, static_cast<uint64>(correct));
}

// Stores a loss, and adds it to the tally, if there is one. One thread of a grid calls it.
__device__ inline void store_loss(float* at, float loss, const Tally& tally) {
  *at = loss;
  if (tally.state) add_loss(tally, loss);
}

}  // namespace lt
