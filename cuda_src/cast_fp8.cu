// A matrix times a scale in FP8, row by row, transposed or both, and the largest absolute value of its elements: all in one
// read of the matrix. With neither result it only finds the largest absolute value. See fp8.cuh.
//
// Compiled for a SCALAR type of the matrix, and for E5M2 and ALIGNED of fp8.cuh.

#include "fp8.cuh"

namespace lt {

struct CastFp8Params {
  Matrix x;
  Fp8Output fp8;
};

// Blocks of a multiprocessor. Each loads 32 KiB at once; while some wait for loads, others store. FP32 needs more registers.
constexpr int kBlocks = sizeof(SCALAR) == 4 ? 3 : 4;

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, lt::kBlocks) cast_fp8(const lt::CastFp8Params p) {
  using namespace lt;
  wait_for_predecessor();
  Fp8Writer writer(p.fp8);
  const int64 col = static_cast<int64>(blockIdx.x) * kTile + threadIdx.x * kOctet;
  const int count = octet_count(col, p.fp8.cols);
  constexpr int kInFlight = 16 / sizeof(SCALAR);  // rows that a thread loads at once, which 32 registers hold
  for (uint32 block_row = blockIdx.y * kTile; block_row < p.fp8.rows; block_row += gridDim.y * kTile) {
    const uint32 row = block_row + threadIdx.y * kOctet;
    const int rows = count ? octet_count(row, p.fp8.rows) : 0;
#pragma unroll
    for (int first = 0; first < kOctet; first += kInFlight) {
#if ALIGNED
      Packed<SCALAR> raw[kInFlight] = {};
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (first + i < rows) raw[i] = load_packed(element<SCALAR>(p.x, row + first + i, col));
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) writer.take(first + i, unpack(raw[i]));
#else
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        writer.take(first + i, first + i < rows ? load<SCALAR>(p.x, row + first + i, col, count) : Octet{});
      }
#endif
    }
    writer.store(block_row);
  }
  writer.store_amax();
}
