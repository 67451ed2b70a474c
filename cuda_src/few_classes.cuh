// Cross-entropy of rows with few classes. One thread holds a whole row in registers, so that all of the row's loads are
// in flight at once and nothing is loaded twice. Compiled for one SCALAR type.
#pragma once

#include "softmax_rows.cuh"

namespace lt {

constexpr int kFewClasses = 16;

// An array with one number for each class, in registers.
struct FewClasses {
  using Two = Pair<SCALAR>::Type;

  float v[kFewClasses];

  // The logits of a row; places beyond the last class get -infinity, which adds nothing to the sum of exponentials.
  static __device__ FewClasses load(const Matrix& m, int64 row, int cols) {
    const SCALAR* const from = element<const SCALAR>(m, row, 0);
    FewClasses out;
    if (in_pairs(m, cols)) {
      // This loop does not convert to FP32, so that all loads are issued before the first conversion waits for one.
      Two pairs[kFewClasses / 2];
#pragma unroll
      for (int i = 0; i < kFewClasses; i += 2) {
        pairs[i / 2] = Pair<SCALAR>::pack(float2{-CUDART_INF_F, -CUDART_INF_F});
        if (i < cols) pairs[i / 2] = reinterpret_cast<const Two*>(from)[i / 2];
      }
#pragma unroll
      for (int i = 0; i < kFewClasses; i += 2) {
        const float2 pair = Pair<SCALAR>::unpack(pairs[i / 2]);
        out.v[i] = pair.x;
        out.v[i + 1] = pair.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kFewClasses; ++i) out.v[i] = i < cols ? to_float(from[i * m.col_stride]) : -CUDART_INF_F;
    }
    return out;
  }

  // The logit of class `place`, or 0 if that is negative. A loop finds it, because registers have no addresses.
  __device__ float at(int place) const {
    float picked = 0.0f;
#pragma unroll
    for (int i = 0; i < kFewClasses; ++i) picked = i == place ? v[i] : picked;
    return picked;
  }

  __device__ void store(const Matrix& m, int64 row, int cols) const {
    SCALAR* const to = element<SCALAR>(m, row, 0);
    if (in_pairs(m, cols)) {
#pragma unroll
      for (int i = 0; i < kFewClasses; i += 2) {
        if (i < cols) reinterpret_cast<Two*>(to)[i / 2] = Pair<SCALAR>::pack(float2{v[i], v[i + 1]});
      }
    } else {
#pragma unroll
      for (int i = 0; i < kFewClasses; ++i) {
        if (i < cols) to[i * m.col_stride] = from_float<SCALAR>(v[i]);
      }
    }
  }

 private:
  // True if every row begins and ends at the boundary of a pair of elements, so that pairs can be loaded by one access
  // each.
  static __device__ bool in_pairs(const Matrix& m, int cols) {
    return m.col_stride == 1 && (m.row_stride | cols) % 2 == 0 && reinterpret_cast<uint64>(m.data) % sizeof(Two) == 0;
  }
};

__device__ inline Softmax softmax_of(const CrossEntropyParams& p, const FewClasses& logits, int cols) {
  Softmax softmax = Softmax::of_nothing();
#pragma unroll
  for (int i = 0; i < kFewClasses; i += 2) softmax.max = fmaxf(softmax.max, fmaxf(logits.v[i], logits.v[i + 1]));
  const Exponential exponential(softmax.finite_max());
#pragma unroll
  for (int i = 0; i < kFewClasses; i += 2) softmax.sum += exponential(logits.v[i]) + exponential(logits.v[i + 1]);
  softmax.sum *= exponential.correction;
#pragma unroll
  for (int i = 0; i < kFewClasses; ++i) {
    const float weight = kSpreads && i < cols ? p.class_weights[i] : 1.0f;
    softmax.total += i < cols ? (kSpreads ? weight * logits.v[i] : logits.v[i]) : 0.0f;
    if (kSpreads && i < cols) softmax.mass += weight;
  }
  return softmax;
}

// Returns the divisor of the mean loss, where each thread has one row: the number of rows that count, or the sum of
// their classes' weights. `counts` tells whether the thread's row exists and its label is not ignored. A single block
// counts its own rows; for several blocks the kernel count_labels has counted before, unless every row counts 1.
__device__ inline float count_by_threads(const CrossEntropyParams& p, bool counts, int64 label, float* scratch) {
  const bool by_class = kWeighted && p.class_weights;
  if (gridDim.x > 1) return p.ignores || by_class ? *p.counted : static_cast<float>(p.rows);
  if (by_class) return sum_over_block(counts ? label_count(p).of(label) : 0.0f, scratch);
  return static_cast<float>(__syncthreads_count(counts));
}

// The class of a label, or -1 if the label is out of range.
__device__ inline int place_of(int64 label, int cols) {
  return label >= 0 && label < cols ? static_cast<int>(label) : -1;
}

// True if the label is the first of the row's largest logits, and no logit is NaN.
__device__ inline bool is_first_largest(const FewClasses& row, int cols, int64 label) {
  const int place = place_of(label, cols);
  const float picked = row.at(place);
  bool beaten = place < 0;
#pragma unroll
  for (int i = 0; i < kFewClasses; ++i) beaten |= i < place ? !(row.v[i] < picked) : !(row.v[i] <= picked);
  return !beaten;
}

// Replaces a row's logits by its gradient, and returns its loss.
__device__ inline float to_gradient(const CrossEntropyParams& p, FewClasses& row, int cols, int64 label, float scale) {
  const int place = place_of(label, cols);
  const Target target(p, label, row.at(place), Smoothing(p));
  const Softmax softmax = softmax_of(p, row, cols);
  const Slope slope = target.slope(softmax, scale);
#pragma unroll
  for (int i = 0; i < kFewClasses; ++i) {
    if (kSpreads && i >= cols) break;  // beyond the last class there are no class weights
    row.v[i] = slope.of(row.v[i], i) + (i == place ? slope.at_label : 0.0f);
  }
  return target.loss(softmax);
}

}  // namespace lt
