// The backward pass of a narrow MLP from the gradient of its outputs to the gradients of its weights and biases. The forward
// pass up to the last hidden layer is made again, since that costs less than to write and read its results. See mlp.cuh for
// what it is compiled for, and SAVED, what the derivative of the activation is taken from: 0 nothing, 1 the pre-activation,
// 2 the output; ROW_TILES, tiles of 16 rows of a row warp: with two, it reads weights half as often; THREADS, those of the
// largest block.
//
// A block goes through tiles of rows. Some of its warps, the row warps, have rows of a tile each, and take them through the
// layers and back. The others, the sum warps, make the gradients of the weights of what the row warps have left in shared
// memory a phase before: the outputs of the hidden layers and the gradients of their pre-activations, row by row. Each
// gradient has its FP32 sums in shared memory too, as the lanes of mma.cuh's products have them, over all tiles of the block.
// They are written once, at the end, for mlp_gradients.cu to add them up. A block's tiles, and with them the order of all
// sums, depend on nothing but the grid.

#include "mlp.cuh"

namespace lt {

constexpr int kFragment = 4 * kWarp;  // sums of a 16 × 8 tile
constexpr int kUnit = 2;              // pairs of such tiles that a warp makes at a time: their left operand is the same
constexpr int kPitch = WIDTH + kSkew;
constexpr int kRowTiles = ROW_TILES;
constexpr int kWarpRows = kRowTiles * kStep;

// Tiles of a layer's sums in a row: those of the weight's gradient, and one more for the bias.
__device__ inline int tiles_across(int inputs) { return inputs / 8 + 1; }

// Adds to PAIRS pairs of neighbouring tiles of sums, and to those of the bias if it HAS_BIAS, the products of 16 columns of a
// gradient with those of an input, of which `gradient` and `input` are the calling lane's rows of the first step.
template <int PAIRS, bool HAS_BIAS>
__device__ inline void add_unit(float4* at, float4* of_bias, const SCALAR* gradient, int gradient_pitch, const SCALAR* input,
                                int input_pitch, int rows) {
  const uint32 ones = rounded_pair(1.0f, 1.0f);
  float four[2 * PAIRS][4], bias[4] = {};
#pragma unroll
  for (int i = 0; i < 2 * PAIRS; ++i) {
    const float4 held = at[i * kWarp];
    four[i][0] = held.x, four[i][1] = held.y, four[i][2] = held.z, four[i][3] = held.w;
  }
#pragma unroll 4
  for (int row = 0; row < rows; row += kStep) {
    uint32 left[4];
    load_matrices<true>(left, gradient);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      uint32 right[4];
      load_matrices<true>(right, input + i * kStep);
      multiply_add<SCALAR>(four[2 * i], left, right[0], right[1]);
      multiply_add<SCALAR>(four[2 * i + 1], left, right[2], right[3]);
    }
    if (HAS_BIAS) multiply_add<SCALAR>(bias, left, ones, ones);
    gradient += kStep * gradient_pitch;
    input += kStep * input_pitch;
  }
#pragma unroll
  for (int i = 0; i < 2 * PAIRS; ++i) at[i * kWarp] = float4{four[i][0], four[i][1], four[i][2], four[i][3]};
  if (HAS_BIAS) {
    const float4 held = *of_bias;
    *of_bias = float4{held.x + bias[0], held.y + bias[1], held.z + bias[2], held.w + bias[3]};
  }
}

// Adds to the sums of one layer's gradients: the products of all columns of `gradient`, whose rows are those of the block's
// tile, with all columns of `input`. The calling warp is one of `warps`.
__device__ inline void add_products(float* sums, const SCALAR* gradient, int gradient_pitch, int outputs, const SCALAR* input,
                                    int input_pitch, int inputs, int rows, int warp, int warps) {
  const int lane = threadIdx.x % kWarp, pairs = inputs / kStep, across = (pairs + kUnit - 1) / kUnit;
  int down = 0, first = warp;  // in units
  while (true) {
    for (; first >= across; first -= across) ++down;
    if (down >= outputs / kStep) return;
    float4* at = reinterpret_cast<float4*>(sums) + down * tiles_across(inputs) * kWarp + lane;
    float4* of_bias = at + 2 * pairs * kWarp;
    at += 2 * kUnit * first * kWarp;
    const SCALAR* left = row_of_tile<true>(gradient + down * kStep, gradient_pitch);
    const SCALAR* right = row_of_tile<false>(input + first * kUnit * kStep, input_pitch);
    const bool is_whole = (first + 1) * kUnit <= pairs;
    if (first == 0) {
      if (is_whole) {
        add_unit<kUnit, true>(at, of_bias, left, gradient_pitch, right, input_pitch, rows);
      } else {
        add_unit<1, true>(at, of_bias, left, gradient_pitch, right, input_pitch, rows);
      }
    } else if (is_whole) {
      add_unit<kUnit, false>(at, of_bias, left, gradient_pitch, right, input_pitch, rows);
    } else {
      add_unit<1, false>(at, of_bias, left, gradient_pitch, right, input_pitch, rows);
    }
    first += warps;
  }
}

__device__ inline void store_words(SCALAR* tile, const uint32 (&rows)[kSteps][kRowTiles][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<uint32*>(place_of_word(tile + r * kStep * kPitch + step * kStep, kPitch, i)) = rows[step][r][i];
      }
    }
  }
}

__device__ inline Pair<SCALAR>::Type saved_pair(SCALAR* saved, int step, int r, int i) {
  return *reinterpret_cast<Pair<SCALAR>::Type*>(place_of_word(saved + r * kStep * kPitch + step * kStep, kPitch, i));
}

#if SAVED == 2
__device__ inline float derivative(float saved, float) { return ACTIVATION::derivative_from_output(saved); }
#else
__device__ inline float derivative(float saved, float slope) { return ACTIVATION::derivative(saved, slope); }
#endif

// Multiplies the gradient of a layer's output by the activation's derivative, from what was saved of the same rows.
__device__ inline void multiply_derivative(float (&sums)[kRowTiles][kTiles][4], SCALAR* saved, float slope) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = Pair<SCALAR>::unpack(saved_pair(saved, step, r, i));
        float* four = sums[r][2 * step + i / 2];
        four[i % 2 * 2] *= derivative(two.x, slope);
        four[i % 2 * 2 + 1] *= derivative(two.y, slope);
      }
    }
  }
}

// The same for ReLU, of the rounded gradient: a factor of 0 or 1 rounds nothing. Infinity times 0 is NaN, as it is there.
__device__ inline void multiply_relu_derivative(uint32 (&rows)[kSteps][kRowTiles][4], SCALAR* saved) {
  using Two = Pair<SCALAR>::Type;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Two is_positive = __hneu2(saved_pair(saved, step, r, i), Pair<SCALAR>::pack(float2{0.0f, 0.0f}));
        Two& gradient = *reinterpret_cast<Two*>(&rows[step][r][i]);
        gradient = __hmul2(gradient, is_positive);
      }
    }
  }
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(THREADS, 1) mlp_bwd(const lt::MlpParams p) {
  using namespace lt;
  DYNAMIC_SHARED(uint4, memory);
  const int hidden = p.count - 1, x_columns = p.layers[0].inputs, y_columns = p.layers[hidden].outputs;
  const int inputs = whole_steps(x_columns), outputs = whole_steps(y_columns);
  const int x_pitch = inputs + kSkew, y_pitch = outputs + kSkew;
  // Of the block's warps, `row_warps` are the first; `warp` counts the sum warps.
  const int tile_rows = p.tile_rows, row_warps = tile_rows / kWarpRows, warp = static_cast<int>(threadIdx.x) / kWarp - row_warps;
  const int warps = blockDim.x / kWarp - row_warps, own_row = (threadIdx.x / kWarp) * kWarpRows;
  const bool has_rows = warp < 0;
  // All weights; biases of the hidden layers; the sums of all gradients; two tiles each of x and y's gradient, those that the
  // block works on and the next or the last ones; a tile for each hidden layer's output, one or two more, and, if the
  // derivative needs them, one for each pre-activation.
  const Weights weights{reinterpret_cast<SCALAR*>(memory), inputs};
  float* biases = reinterpret_cast<float*>(weights.of(hidden) + outputs * kPitch);
  float* sums = biases + hidden * WIDTH;
  const int first_sums = kSteps * tiles_across(inputs) * kFragment, hidden_sums = kSteps * tiles_across(WIDTH) * kFragment;
  const int sum_count = first_sums + (hidden - 1) * hidden_sums + outputs / kStep * tiles_across(WIDTH) * kFragment;
  SCALAR* x_tiles = reinterpret_cast<SCALAR*>(sums + sum_count);
  SCALAR* y_tiles = x_tiles + 2 * tile_rows * x_pitch;
  SCALAR* tiles = y_tiles + 2 * tile_rows * y_pitch;
  const auto tile_of = [&](int i) { return tiles + i * tile_rows * kPitch; };  // the output of hidden layer i, from 0
  // Where the gradient of hidden layer i's pre-activation goes. The sum warps read that of layer i + 1 and the output of layer
  // i meanwhile, and that of layer 0 while the row warps write the outputs of the next tile. So every other one is in a spare
  // tile, from layer 0 on, and the others take the place of the output above. Nothing is above the last hidden layer.
  SCALAR* spare = tile_of(hidden);
  const auto gradient_of = [&](int i) {
    return i % 2 == 0 ? spare : i + 1 < hidden ? tile_of(i + 1) : tile_of(hidden + 1);
  };
#if SAVED == 1
  const auto saved_of = [&](int i) { return tile_of(hidden + 1 + (hidden % 2 == 0) + i) + own_row * kPitch; };
#else
  const auto saved_of = [&](int i) { return tile_of(i) + own_row * kPitch; };
#endif
  const auto sums_of = [&](int i) { return i ? sums + first_sums + (i - 1) * hidden_sums : sums; };
  const auto copy_tiles = [&](int turn, int64 first, int thread, int threads) {
    if (first < p.rows) {
      SCALAR *x = x_tiles + turn * tile_rows * x_pitch, *y = y_tiles + turn * tile_rows * y_pitch;
      copy_rows(x, x_pitch, tile_rows, inputs, p.x, first, p.rows, x_columns, thread, threads);
      copy_rows(y, y_pitch, tile_rows, outputs, p.y, first, p.rows, y_columns, thread, threads);
    }
  };
  const int64 stride = static_cast<int64>(gridDim.x) * tile_rows;
  int64 row = static_cast<int64>(blockIdx.x) * tile_rows;
  for (int i = threadIdx.x; i < sum_count; i += blockDim.x) sums[i] = 0.0f;
  wait_for_predecessor();
  load_layers(p, weights, biases, hidden);
  copy_tiles(0, row, threadIdx.x, blockDim.x);
  end_copies();
  wait_for_copies<0>();
  __syncthreads();
  float products[kRowTiles][kTiles][4];
  uint32 rows[kSteps][kRowTiles][4];
  int turn = 0;
  for (; row < p.rows; row += stride, turn ^= 1) {
    const SCALAR* x = x_tiles + turn * tile_rows * x_pitch;
    const SCALAR* y_gradient = y_tiles + turn * tile_rows * y_pitch;
    // Phase 0: row warps make the outputs of all hidden layers, and the gradient of the last one's. Sum warps make the last
    // tile's gradients of the first layer. In phase `i` after that, row warps make the gradient of a hidden layer's
    // pre-activation, and the product that gives the gradient of the output below. Sum warps make the gradients of the layer
    // above.
    for (int phase = 0; phase <= hidden; ++phase) {
      const int layer = hidden - phase;  // the hidden layer whose pre-activation's gradient is made
      if (has_rows && phase == 0) {
        start_with_bias(products, biases);
        multiply_tile<true>(products, x + own_row * x_pitch, x_pitch, inputs, weights.of(0), weights.pitch(0));
#pragma unroll 1
        for (int i = 0;;) {
#if SAVED == 1
          round_sums<false>(rows, products);
          store_words(saved_of(i), rows);
#endif
          activate(products, p.slope);
          clear_padding(products, p.layers[i].outputs);
          round_activated(rows, products);
          store_words(tile_of(i) + own_row * kPitch, rows);
          if (++i == hidden) break;
          start_with_bias(products, biases + i * WIDTH);
          multiply_rows<true>(products, rows, weights.of(i));
        }
        memset(products, 0, sizeof(products));
        multiply_tile<false>(products, y_gradient + own_row * y_pitch, y_pitch, outputs, weights.of(hidden), kPitch);
      } else if (has_rows) {
        if (SAVED && !kIsRelu<ACTIVATION>) multiply_derivative(products, saved_of(layer), p.slope);
        clear_padding(products, p.layers[layer].outputs);
        round_sums<false>(rows, products);
        if (kIsRelu<ACTIVATION>) multiply_relu_derivative(rows, saved_of(layer));
        store_words(gradient_of(layer) + own_row * kPitch, rows);
        if (layer > 0) {
          memset(products, 0, sizeof(products));
          multiply_rows<false>(products, rows, weights.of(layer));
        }
      } else if (phase == 0) {
        if (row >= stride) {
          add_products(sums, spare, kPitch, WIDTH, x_tiles + (turn ^ 1) * tile_rows * x_pitch, x_pitch, inputs, tile_rows, warp,
                       warps);
        }
      } else {
        if (phase == 1) copy_tiles(turn ^ 1, row + stride, threadIdx.x - row_warps * kWarp, warps * kWarp);
        const bool is_last = phase == 1;
        add_products(sums_of(layer + 1), is_last ? y_gradient : gradient_of(layer + 1), is_last ? y_pitch : kPitch,
                     is_last ? outputs : WIDTH, tile_of(layer), kPitch, WIDTH, tile_rows, warp, warps);
      }
      if (phase == hidden) {
        end_copies();
        wait_for_copies<0>();
      }
      __syncthreads();
    }
  }
  if (!has_rows) {
    add_products(sums, spare, kPitch, WIDTH, x_tiles + (turn ^ 1) * tile_rows * x_pitch, x_pitch, inputs, tile_rows, warp, warps);
  }
  __syncthreads();
  float4* partial = reinterpret_cast<float4*>(p.partial + static_cast<int64>(blockIdx.x) * sum_count);
  for (int i = threadIdx.x; i < sum_count / 4; i += blockDim.x) partial[i] = reinterpret_cast<const float4*>(sums)[i];
}
