// The forward pass of a narrow MLP. It reads x and the weights once and writes only the outputs; the hidden layers'
// outputs stay in registers. mlp.cuh lists the definitions for which it is compiled.
//
// A warp computes its rows alone, from the first layer to the last, so that the only barrier of the block follows the
// loading of the weights.

#include "mlp.cuh"

namespace lt {

// Number of tiles of 16 rows that a warp computes at a time: with two, weights are read from shared memory half as
// often as with one.
constexpr int kRowTiles = WIDTH <= 64 ? 2 : 1;
constexpr int kWarpRows = kRowTiles * kStep;

// Computes the last layer, which has no activation, and stores its result into the first `columns` columns of a tile.
__device__ inline void last_layer(SCALAR* tile, int pitch, int columns, const uint32 (&rows)[kSteps][kRowTiles][4],
                                  const SCALAR* weights, const float* bias) {
#pragma unroll 1
  for (int col = 0; col < columns; col += kStep) {
    float sums[kRowTiles][2][4];
    start_with_bias(sums, bias + col);
    multiply_rows<true>(sums, rows, weights + col * (WIDTH + kSkew));
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&four)[4] = sums[r][i / 2];
        SCALAR* place = place_of_word(tile + r * kStep * pitch + col, pitch, i);
        *reinterpret_cast<uint32*>(place) = rounded_pair(four[i % 2 * 2], four[i % 2 * 2 + 1]);
      }
    }
  }
}

// Writes a warp's rows, 16 bytes at a time if the rows are aligned to 16 bytes.
__device__ inline void store_rows(const Matrix& y, int64 first, int64 rows, int columns, const SCALAR* tile, int pitch) {
  const int lane = threadIdx.x % kWarp, count = rows < kWarpRows ? static_cast<int>(rows) : kWarpRows;
  if (lies_whole(y, columns)) {
    const int octets = columns / kOctet;
    for (int i = lane; i < count * octets; i += kWarp) {
      const int row = i / octets, col = i % octets * kOctet;
      store_packed(element<SCALAR>(y, first + row, col), load_packed(tile + row * pitch + col));
    }
    return;
  }
  for (int i = lane; i < count * columns; i += kWarp) {
    const int row = i / columns, col = i % columns;
    *element<SCALAR>(y, first + row, col) = tile[row * pitch + col];
  }
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256, 1) mlp_fwd(const lt::MlpParams p) {
  using namespace lt;
  DYNAMIC_SHARED(uint4, memory);
  const int last = p.count - 1, x_columns = p.layers[0].inputs, y_columns = p.layers[last].outputs;
  const int inputs = whole_steps(x_columns), outputs = whole_steps(y_columns);
  const int pitch = (inputs > outputs ? inputs : outputs) + kSkew;
  const Weights weights{reinterpret_cast<SCALAR*>(memory), inputs};
  float* biases = reinterpret_cast<float*>(weights.of(last) + outputs * (WIDTH + kSkew));
  // Each warp has two buffers in shared memory: it computes the rows in one while its next rows of x are copied to the
  // other.
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp, lane = threadIdx.x % kWarp;
  SCALAR* tiles = reinterpret_cast<SCALAR*>(biases + last * WIDTH + outputs) + warp * 2 * kWarpRows * pitch;
  const int64 stride = static_cast<int64>(gridDim.x) * warps * kWarpRows;
  int64 row = (static_cast<int64>(blockIdx.x) * warps + warp) * kWarpRows;
  const auto copy_x = [&](int turn, int64 first) {
    SCALAR* tile = tiles + turn * kWarpRows * pitch;
    if (first < p.rows) copy_rows(tile, pitch, kWarpRows, inputs, p.x, first, p.rows, x_columns, lane, kWarp);
    end_copies();
  };
  wait_for_predecessor();
  load_layers(p, weights, biases, p.count);
  copy_x(0, row);
  wait_for_copies<0>();
  __syncthreads();
  for (int turn = 0; row < p.rows; row += stride, turn ^= 1) {
    SCALAR* tile = tiles + turn * kWarpRows * pitch;
    copy_x(turn ^ 1, row + stride);
    wait_for_copies<1>();
    __syncwarp();
    float sums[kRowTiles][kTiles][4];
    uint32 rows[kSteps][kRowTiles][4];
    start_with_bias(sums, biases);
    multiply_tile<true, 1>(sums, tile, pitch, inputs, weights.of(0), weights.pitch(0));
#pragma unroll 1
    for (int i = 0;;) {
      activate(sums, p.slope);
      clear_padding(sums, p.layers[i].outputs);
      round_activated(rows, sums);
      if (++i == last) break;
      start_with_bias(sums, biases + i * WIDTH);
      multiply_rows<true>(sums, rows, weights.of(i));
    }
    __syncwarp();
    last_layer(tile, pitch, outputs, rows, weights.of(last), biases + last * WIDTH);
    __syncwarp();
    store_rows(p.y, row, p.rows - row, y_columns, tile, pitch);
    __syncwarp();
  }
}
