// Second stage of the sums of mlp_bwd.cu: adds up the partial sums of its blocks, always in the same order, to the
// rounded gradients and to the loss, if there is one. Compiled for one SCALAR type.
//
// threadIdx.x selects the sum, one of the block's 32; the threads in y divide the partial sums among themselves.

#include "instructions.cuh"
#include "mlp_sums.cuh"

namespace lt {

constexpr int kSums = 32;   // threads in x
constexpr int kParts = 8;   // threads in y

struct MlpGradient {
  SCALAR* weight;  // gradient of the weight (outputs, inputs), without gaps
  SCALAR* bias;    // gradient of the bias (outputs,); may be null
  int inputs;
  int outputs;
};

struct MlpGradientsParams {
  MlpGradient layers[kMaxLayers];
  const float* partial;  // the FP32 sums that the blocks have written, (blocks, sums)
  float* loss;           // may be null; otherwise the sum of losses is the first of a block's last kLossPlaces sums
  float size;            // divisor of the loss
  int blocks;
  int sums;
  int count;       // layers
  int width;       // padded number of columns of the hidden layers
  int accumulate;  // whether the sums are added to the present gradients
};

// Returns the address of the gradient element to which sum `number` belongs; null if it belongs to padding or to an
// absent bias.
__device__ inline SCALAR* place_of_sum(const MlpGradientsParams& p, int number) {
#pragma unroll 1
  for (int i = 0; i < p.count; ++i) {
    const MlpGradient layer = p.layers[i];
    const int outputs = i == p.count - 1 ? (layer.outputs + 15) / 16 * 16 : p.width;
    const int inputs = i ? p.width : (layer.inputs + 15) / 16 * 16;
    const int across = tiles_across(inputs), size = sums_of_layer(outputs, inputs);
    if (number >= size) {
      number -= size;
      continue;
    }
    const int fragment = number / kFragment, lane = number % kFragment / 4, word = number % 4;
    const int row = fragment / across * 16 + lane / 4 + word / 2 * 8, col = fragment % across * 8 + lane % 4 * 2 + word % 2;
    if (row >= layer.outputs) return nullptr;
    if (col >= inputs) return layer.bias && col == inputs ? layer.bias + row : nullptr;
    return col < layer.inputs ? layer.weight + row * layer.inputs + col : nullptr;
  }
  return nullptr;
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256) mlp_gradients(const lt::MlpGradientsParams p) {
  using namespace lt;
  __shared__ float parts[kParts][kSums];
  const int number = blockIdx.x * kSums + threadIdx.x;
  SCALAR* place = place_of_sum(p, number);
  wait_for_predecessor();
  float sum = 0.0f;
#pragma unroll 8
  for (int block = threadIdx.y; block < p.blocks; block += kParts) {
    if (number < p.sums) sum += p.partial[static_cast<int64>(block) * p.sums + number];
  }
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0) return;
#pragma unroll
  for (int i = 1; i < kParts; ++i) sum += parts[i][threadIdx.x];
  if (p.loss && number == p.sums - kLossPlaces) *p.loss = sum / p.size;
  if (place) *place = from_float<SCALAR>(p.accumulate ? to_float(*place) + sum : sum);
}
