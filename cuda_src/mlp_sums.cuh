// The layout of the FP32 sums that a block of mlp_bwd.cu writes and mlp_gradients.cu adds up. kernels/mlp.py, which allocates
// their memory, is compared with it by tests/host_kernels/test_layout.py.
//
// A block's sums follow each other: those of each layer, from the first layer to the last, then with a loss kLossPlaces,
// the first of which has the block's share of the loss. The gradient of a layer's weight (outputs, inputs), both padded to
// multiples of 16, is cut into tiles of 16 × 8. A row of tiles ends with one more, whose columns are all the bias's gradient.
// Tiles lie row by row. In a tile each lane of a warp has four consecutive sums, in the order of `multiply_add` in mma.cuh.
//
// Example, of 32 outputs and 16 inputs: sums_of_layer is 2 rows · (2 + 1) tiles · 128 = 768.
//   tile   0: outputs  0..15, inputs 0..7    1: outputs  0..15, inputs 8..15    2: outputs  0..15, bias
//          3: outputs 16..31, inputs 0..7    4: outputs 16..31, inputs 8..15    5: outputs 16..31, bias
#pragma once

namespace lt {

constexpr int kMaxLayers = 16;
constexpr int kFragment = 128;  // number of sums of a tile: four for each lane
// Number of places reserved for the sum of the loss: one, and a gap that keeps each block's sums aligned to 16 bytes.
constexpr int kLossPlaces = 4;

// How many tiles of 8 columns a row of tiles has, the bias's included.
__host__ __device__ constexpr int tiles_across(int inputs) { return inputs / 8 + 1; }

// How many sums a layer has; both numbers are padded to multiples of 16.
__host__ __device__ constexpr int sums_of_layer(int outputs, int inputs) {
  return outputs / 16 * tiles_across(inputs) * kFragment;
}

}  // namespace lt
