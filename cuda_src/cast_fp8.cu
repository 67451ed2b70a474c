// Casts a matrix to FP8 by one scale, and finds the largest absolute value of its elements, in one read of the matrix.
// The FP8 result is written row-major, transposed or both; if neither is wanted, the kernel only finds the largest
// absolute value. See fp8.cuh.
//
// VECTORS selects another cast: by a scale for each row of the matrix, and a scale for each row of its transpose. That
// cast takes two launches, each of which reads the matrix. See fp8_rows.cuh.
//
// A function may be applied to the elements before they are cast: an activation and dropout, a gated activation such as
// SwiGLU, or the derivative of one of these. The derivative of a gated activation makes two matrices, the gradients of
// the gate and of the value. Both are cast.
//
// Compiled for:
//   SCALAR         the type of all other matrices
//   ACTIVATION     a struct of activations.cuh
//   DROPOUT        0 or 1
//   BACKWARD       0: the function is y = dropout(act(x)). 1: x is the gradient of such a y, and the function is
//                  dropout'(x) · act'(saved); the kernel may also sum its results over the rows (the bias gradient)
//   SAVED          1 if act' is computed from `saved`, the pre-activation; 0 if BACKWARD is 0, or if act is the identity
//                  and GATED is 0
//   GATED          1: the function is y = dropout(act(x) · value); with BACKWARD, x is the gradient of this y, `saved`
//                  is the gate, and the results are the gradients of gate and value, with the bits of gated_bwd in
//                  gated.cu
//   VECTORS        0: casts by one scale. 1: finds a scale for each row and column, and writes nothing else. 2: casts
//                  by these scales. Always 0 if there is a function
//   E5M2, ALIGNED  see fp8.cuh; ALIGNED is 0 only if there is no function

#include "activations.cuh"
#include "column_sum.cuh"
#include "fp8_rows.cuh"
#include "philox.cuh"

namespace lt {

struct CastFp8Params {
  Matrix x;
  Matrix saved;  // the tensor for the derivative; null if SAVED is 0
  Matrix value;  // factor of the activated gate; null if GATED is 0
  Fp8Output fp8;
  Fp8Output fp8_value;  // results for the gradient of `value`, only if GATED and BACKWARD are 1
  ColumnSum<SCALAR> db;  // bias gradient, only if BACKWARD is 1: each row of blocks of the grid sums a part of the rows
  Dropout dropout;
  float slope;
};

template <class T>
constexpr bool kIsNone = false;
template <>
constexpr bool kIsNone<None> = true;

// True if the kernel only casts 16-bit numbers by one scale, or finds scales; then a thread needs few registers.
constexpr bool kIsLight = kIsNone<ACTIVATION> && !BACKWARD && !DROPOUT && !GATED && VECTORS != 2 && sizeof(SCALAR) == 2;
// Number of rows whose loads a thread has in flight before it computes: as many as registers allow.
constexpr int kInFlight = !ALIGNED ? 1 : DROPOUT || SAVED || GATED ? 2 : kIsLight ? 8 : 4;
// Launch bounds: blocks that a multiprocessor must hold, so that some compute and store while others wait for loads.
// GeluErf needs the most registers of all activations, and so gets the fewest blocks.
template <class T>
constexpr int kBlocksOf = 3;
template <>
constexpr int kBlocksOf<GeluErf> = 2;
// True if two matrices are cast: the gradients of gate and value.
constexpr bool kIsPair = GATED && BACKWARD;
constexpr int kBlocks = !ALIGNED ? 1 : kIsLight ? 4 : kBlocksOf<ACTIVATION>;

#if VECTORS == 0
using Writer = Fp8Writer<>;
#elif VECTORS == 1
using Writer = Fp8ScaleFinder;
#else
using Writer = Fp8RowWriter;
#endif

#if ALIGNED
using Raw = Packed<SCALAR>;
#else
using Raw = Octet;
#endif

// The position of a thread's patch: eight rows of one octet (eight columns) each.
struct Octets {
  uint32 last_row;
  int64 col;
  int64 cols;
  int count;  // number of the octet's elements that exist; the others are loaded as zeros

  __device__ explicit Octets(const Fp8Output& out)
      : last_row(out.rows - 1), col(static_cast<int64>(blockIdx.x) * kTile + threadIdx.x * kOctet), cols(out.cols) {
    if (col >= cols) col = 0;
    count = octet_count(col, cols);
  }

  __device__ uint32 existing(uint32 row) const { return row < last_row ? row : last_row; }

  __device__ Raw load_from(const Matrix& m, uint32 row) const {
#if ALIGNED
    return load_packed(element<SCALAR>(m, existing(row), col));
#else
    return load<SCALAR>(m, existing(row), col, count);
#endif
  }
};

// Octets of the operands, as they were loaded.
struct CastOperands {
  Raw x, saved, value;
};

// Octets to be cast; `dvalue` is used only if kIsPair.
struct CastResults {
  Octet y, dvalue;
};

__device__ inline Octet product(const Octet& a, const Octet& b) {
  Octet out;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) out.v[i] = a.v[i] * b.v[i];
  return out;
}

// Rounds to SCALAR, as gated_bwd of gated.cu does when it stores the gradients.
__device__ inline Octet rounded(const Octet& x) { return unpack(pack<SCALAR>(x)); }

// Applies the activation and dropout, or their derivatives, to an octet of x.
__device__ inline CastResults compute(const CastFp8Params& p, const Octets& at, const CastOperands& read, uint32 step, uint32 row) {
  const uint64 index = static_cast<uint64>(at.existing(row)) * at.cols + at.col;
  Octet x = unpack(read.x), act, slope;
  const Octet z = SAVED ? unpack(read.saved) : x;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    act.v[i] = ACTIVATION::forward(z.v[i], p.slope);
    slope.v[i] = ACTIVATION::derivative(z.v[i], p.slope);
  }
  if (!BACKWARD) x = GATED ? product(act, unpack(read.value)) : act;
  if (DROPOUT) apply_dropout<true>(x, p.dropout, step, index);
  if (!SAVED) return {x, x};
  if (!GATED) return {product(x, slope), x};
  return {rounded(product(product(x, unpack(read.value)), slope)), rounded(product(x, act))};
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, lt::kBlocks) cast_fp8(const lt::CastFp8Params p) {
  using namespace lt;
  wait_for_predecessor();
  Writer writer(p.fp8);
  Fp8Writer<1> dvalue(p.fp8_value);
  const uint32 step = DROPOUT ? dropout_step(p.dropout) : 0;
  // Threads beyond the last row or column repeat the computation of existing elements. So no load depends on a
  // condition, and all loads are in flight together. Only existing elements are stored and added up.
  const Octets at(p.fp8);
  Octet sums{};
  for (uint32 block_row = blockIdx.y * kTile; block_row < p.fp8.rows; block_row += gridDim.y * kTile) {
    const uint32 row = block_row + threadIdx.y * kOctet;
#pragma unroll 1  // If the loop were unrolled, the compiler would load all rows first, and spill registers.
    for (int first = 0; first < kOctet; first += kInFlight) {
      CastOperands read[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        read[i].x = at.load_from(p.x, row + first + i);
        if (SAVED) read[i].saved = at.load_from(p.saved, row + first + i);
        if (GATED) read[i].value = at.load_from(p.value, row + first + i);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const CastResults made = compute(p, at, read[i], step, row + first + i);
        writer.take(block_row, first + i, made.y);
        if (kIsPair) dvalue.take(block_row, first + i, made.dvalue);
        if (BACKWARD && row + first + i < p.fp8.rows) sums += made.y;
      }
    }
    writer.store(block_row);
    if (kIsPair) dvalue.store(block_row);
  }
  writer.store_amax();
  if (kIsPair) {
    __syncthreads();
    dvalue.store_amax();
  }
  if (BACKWARD && !GATED && p.db.sum) sum_over_grid(p.db, sums, p.fp8.cols);
}
