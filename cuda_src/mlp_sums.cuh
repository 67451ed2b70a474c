// The layout of the FP32 sums that each block of mlp_bwd.cu writes and mlp_gradients.cu adds up over the blocks.
// kernels/mlp.py allocates their memory by the same formulas; tests/host_kernels/test_layout.py compares the two.
//
// The sums of a block are contiguous: those of each layer, from the first layer to the last; with a loss, kLossPlaces
// sums follow, the first of which is the block's sum of losses. The gradient of a layer's weight (outputs, inputs),
// both padded to multiples of 16, is divided into tiles of 16 × 8, in row-major order. Each row of tiles has one more
// tile at its end, whose columns all hold the bias gradient. In a tile each lane of a warp has four consecutive sums,
// in the order of `multiply_add` in mma.cuh.
//
// Example with 32 outputs and 16 inputs: sums_of_layer is 2 rows · (2 + 1) tiles · 128 = 768.
//   tile   0: outputs  0..15, inputs 0..7    1: outputs  0..15, inputs 8..15    2: outputs  0..15, bias
//          3: outputs 16..31, inputs 0..7    4: outputs 16..31, inputs 8..15    5: outputs 16..31, bias
#pragma once

namespace lt {

constexpr int kMaxLayers = 16;
constexpr int kFragment = 128;  // number of sums of a tile: four for each lane
// Number of sums reserved for the loss: one, and three of padding that keep each block's sums aligned to 16 bytes.
constexpr int kLossPlaces = 4;

// Number of 16 × 8 tiles across the gradient of a layer's weight, and one more for the bias gradient.
__host__ __device__ constexpr int tiles_across(int inputs) { return inputs / 8 + 1; }

// Number of sums of a layer; both arguments are padded to multiples of 16.
__host__ __device__ constexpr int sums_of_layer(int outputs, int inputs) {
  return outputs / 16 * tiles_across(inputs) * kFragment;
}

}  // namespace lt
