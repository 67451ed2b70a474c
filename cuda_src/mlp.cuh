// Parts that the kernels of a narrow MLP share. Its weights lie in shared memory. The activations of a row stay in registers
// from layer to layer: the result of a product, with its bias, activated and rounded, is the left operand of the next product.
//
// Compiled for:
//   SCALAR      the type of all matrices: __half or __nv_bfloat16
//   ACTIVATION  a struct of activations.cuh, that of all layers but the last, which has none
//   WIDTH       columns of the hidden layers, a multiple of 16; narrower layers are padded with zeros
//
// Inputs and outputs have any number of columns up to kMaxWidth; they too are padded to multiples of 16.
#pragma once

#include "activations.cuh"
#include "mlp_sums.cuh"
#include "mma.cuh"
#include "reduce.cuh"

namespace lt {

constexpr int kStep = 16;           // rows of a tile of outputs; also the terms along K that one mma instruction sums
constexpr int kSteps = WIDTH / kStep;
constexpr int kTiles = WIDTH / 8;   // number of tiles of 8 columns in a layer of WIDTH columns
constexpr int kSkew = 8;            // elements of padding behind each row, so that eight rows lie in different banks

struct MlpLayer {
  void* weight;  // the weight (outputs, inputs), without gaps
  void* bias;    // the bias (outputs,); may be null
  int inputs;
  int outputs;
};

struct MlpParams {
  MlpLayer layers[kMaxLayers];
  Matrix x;  // inputs of the MLP (rows, inputs of the first layer)
  Matrix y;  // (rows, outputs of the last layer); in the backward pass their gradient or, with a loss, their targets
  float* partial;           // backward pass: the sums of each block
  const float* grad_scale;  // factor of the loss's gradient, in device memory; null means 1
  int64 rows;
  int count;  // number of layers, at least two
  float slope;
  float gradient_scale;  // 1 / (rows · outputs), times the factor of a loss's gradient
  float delta;           // delta of Huber's loss
};

__device__ inline int whole_steps(int columns) { return (columns + kStep - 1) / kStep * kStep; }

// The weights of all layers in shared memory: (outputs, inputs) each, padded, rows kSkew apart.
struct Weights {
  SCALAR* first;
  int inputs;  // number of inputs of the first layer

  __device__ int pitch(int layer) const { return (layer ? WIDTH : inputs) + kSkew; }
  __device__ SCALAR* of(int layer) const {
    return layer ? first + WIDTH * (inputs + kSkew) + (layer - 1) * WIDTH * (WIDTH + kSkew) : first;
  }
};

// The address of this lane's row for `ldmatrix`, which loads four 8 × 8 matrices that make a 16 × 16 tile. With ACROSS the
// second matrix lies beside the first, otherwise below it.
template <bool ACROSS>
__device__ inline const SCALAR* row_of_tile(const SCALAR* tile, int pitch) {
  const int lane = threadIdx.x % kWarp, inner = lane / 8 % 2 * 8, outer = lane / 16 * 8, row = lane % 8;
  return tile + (row + (ACROSS ? outer : inner)) * pitch + (ACROSS ? inner : outer);
}

// Loads the left operand of a product from shared memory: a tile of 16 × 16, or its transpose.
__device__ inline void load_left(uint32 (&a)[4], const SCALAR* tile, int pitch) {
  load_matrices<false>(a, row_of_tile<false>(tile, pitch));
}
__device__ inline void load_left_transposed(uint32 (&a)[4], const SCALAR* tile, int pitch) {
  load_matrices<true>(a, row_of_tile<true>(tile, pitch));
}

// Loads the right operand of two products side by side. The tile's rows are the products' columns, or their terms.
__device__ inline void load_right(uint32 (&b)[4], const SCALAR* tile, int pitch) {
  load_matrices<true>(b, row_of_tile<false>(tile, pitch));
}
__device__ inline void load_right_transposed(uint32 (&b)[4], const SCALAR* tile, int pitch) {
  load_matrices<false>(b, row_of_tile<true>(tile, pitch));
}

// One step of a product of R tiles of rows with C tiles of 8 columns. TRANSPOSED: `weights` are (columns, steps), as in the
// forward pass, and not (steps, columns).
template <bool TRANSPOSED, int R, int C>
__device__ inline void multiply_step(float (&sums)[R][C][4], const uint32 (&left)[R][4], const SCALAR* weights, int pitch,
                                     int step) {
#pragma unroll
  for (int i = 0; i < C / 2; ++i) {
    uint32 right[4];
    if (TRANSPOSED) {
      load_right_transposed(right, weights + i * kStep * pitch + step * kStep, pitch);
    } else {
      load_right(right, weights + step * kStep * pitch + i * kStep, pitch);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      multiply_add<SCALAR>(sums[r][2 * i], left[r], right[0], right[1]);
      multiply_add<SCALAR>(sums[r][2 * i + 1], left[r], right[2], right[3]);
    }
  }
}

// The product of rows in shared memory, of any whole number of steps, UNROLLED at a time.
template <bool TRANSPOSED, int UNROLLED, int R, int C>
__device__ inline void multiply_tile(float (&sums)[R][C][4], const SCALAR* rows, int row_pitch, int columns,
                                     const SCALAR* weights, int pitch) {
#pragma unroll UNROLLED
  for (int step = 0; step < columns / kStep; ++step) {
    uint32 left[R][4];
#pragma unroll
    for (int r = 0; r < R; ++r) load_left(left[r], rows + r * kStep * row_pitch + step * kStep, row_pitch);
    multiply_step<TRANSPOSED>(sums, left, weights, pitch, step);
  }
}

// The product of rows in registers.
template <bool TRANSPOSED, int R, int C>
__device__ inline void multiply_rows(float (&sums)[R][C][4], const uint32 (&rows)[kSteps][R][4], const SCALAR* weights) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    multiply_step<TRANSPOSED>(sums, rows[step], weights, WIDTH + kSkew, step);
  }
}

template <int R, int C>
__device__ inline void start_with_bias(float (&sums)[R][C][4], const float* bias) {
#pragma unroll
  for (int i = 0; i < C; ++i) {
    const float2 pair = reinterpret_cast<const float2*>(bias + 8 * i)[threadIdx.x % 4];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      sums[r][i][0] = sums[r][i][2] = pair.x;
      sums[r][i][1] = sums[r][i][3] = pair.y;
    }
  }
}

// ReLU takes no instruction of its own: the rounding of the sums replaces negative sums with zero.
template <class A>
constexpr bool kIsRelu = false;
template <>
constexpr bool kIsRelu<Relu> = true;

// Activates a layer's FP32 sums. Does nothing where `round_activated` applies the activation while it rounds (ReLU).
template <int R>
__device__ inline void activate(float (&sums)[R][kTiles][4], float slope) {
#pragma unroll
  for (int r = 0; r < R && !kIsRelu<ACTIVATION>; ++r) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[r][i][j] = ACTIVATION::forward(sums[r][i][j], slope);
    }
  }
}

// Writes zeros to the columns that pad a layer. Without that an infinite input times a padded weight of 0 would be NaN
// there, and the next product would spread it to the layer's columns.
template <int R>
__device__ inline void clear_padding(float (&sums)[R][kTiles][4], int columns) {
  if (columns == WIDTH) return;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool exists = 8 * i + static_cast<int>(threadIdx.x) % 4 * 2 + j % 2 < columns;
#pragma unroll
      for (int r = 0; r < R; ++r) sums[r][i][j] = exists ? sums[r][i][j] : 0.0f;
    }
  }
}

__device__ inline uint32 rounded_pair(float x, float y) {
  const auto pair = Pair<SCALAR>::pack(float2{x, y});
  uint32 word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}

// Rounds FP32 sums to SCALAR, as the left operand of the next product. RELU: negative sums become zeros.
template <bool RELU, int R>
__device__ inline void round_sums(uint32 (&rows)[kSteps][R][4], const float (&sums)[R][kTiles][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&four)[4] = sums[r][2 * step + i / 2];
        const float x = four[i % 2 * 2], y = four[i % 2 * 2 + 1];
        rows[step][r][i] = RELU ? rounded_positive_pair<SCALAR>(x, y) : rounded_pair(x, y);
      }
    }
  }
}

// Rounds the sums that `activate` has processed to SCALAR, as the left operand of the next product.
template <int R>
__device__ inline void round_activated(uint32 (&rows)[kSteps][R][4], const float (&sums)[R][kTiles][4]) {
  round_sums<kIsRelu<ACTIVATION>>(rows, sums);
}

// The address in a tile of shared memory of word `i` of the calling lane's left operand.
__device__ inline SCALAR* place_of_word(SCALAR* tile, int pitch, int i) {
  const int lane = threadIdx.x % kWarp;
  return tile + (lane / 4 + i % 2 * 8) * pitch + lane % 4 * 2 + i / 2 * 8;
}

// Tells whether every row of a matrix is contiguous, aligned to 16 bytes and a multiple of eight elements long.
__device__ inline bool lies_whole(const Matrix& m, int columns) {
  return m.col_stride == 1 && columns % kOctet == 0 && m.row_stride % kOctet == 0 && reinterpret_cast<uint64>(m.data) % 16 == 0;
}

// Copies rows from `first` on to shared memory, with zeros in columns up to `padded` and in rows that are not there.
// Starts an asynchronous copy, for which the caller has to wait, or copies at once. Each of `threads` threads takes its
// part; `padded` is a multiple of 8.
__device__ inline void copy_rows(SCALAR* to, int pitch, int padded_rows, int padded, const Matrix& from, int64 first,
                                 int64 rows, int columns, int thread, int threads) {
  const int octets = padded / kOctet, down = threads / octets, across = threads % octets;
  const bool is_whole = lies_whole(from, columns);
  int row = thread / octets, octet = thread % octets;
  if (is_whole && across == 0) {  // a thread copies the same columns of every row
    const int bytes = octet * kOctet < columns ? 16 : 0;
    const SCALAR* source = bytes ? element<SCALAR>(from, first + row, octet * kOctet) : static_cast<SCALAR*>(from.data);
    const int64 step = bytes ? down * from.row_stride : 0;
    SCALAR* place = to + row * pitch + octet * kOctet;
    const int left = rows - first < padded_rows ? static_cast<int>(rows - first) : padded_rows;
    for (; row < padded_rows; row += down, place += down * pitch, source += step) {
      const bool exists = row < left;
      copy_async(place, exists ? source : static_cast<SCALAR*>(from.data), exists ? bytes : 0);
    }
    return;
  }
  while (row < padded_rows) {
    const int left = first + row < rows ? columns - octet * kOctet : 0;
    const int count = left < 0 ? 0 : left < kOctet ? left : kOctet;
    SCALAR* place = to + row * pitch + octet * kOctet;
    const SCALAR* source = count ? element<SCALAR>(from, first + row, octet * kOctet) : static_cast<SCALAR*>(from.data);
    if (is_whole) {
      copy_async(place, source, count * static_cast<int>(sizeof(SCALAR)));
    } else {
      store_packed(place, pack<SCALAR>(Scattered<SCALAR>::load(source, from.col_stride, count)));
    }
    row += down;
    octet += across;
    if (octet >= octets) {
      octet -= octets;
      ++row;
    }
  }
}

// Brings the weights and, as FP32, the biases of the first `count` layers to shared memory; the block has to wait for the
// copies, and for all its threads.
__device__ inline void load_layers(const MlpParams& p, const Weights& weights, float* biases, int count) {
  const int thread = threadIdx.x, threads = blockDim.x;
  for (int i = 0; i < p.count; ++i) {
    const MlpLayer layer = p.layers[i];
    const bool is_last = i == p.count - 1;
    const int outputs = is_last ? whole_steps(layer.outputs) : WIDTH;
    copy_rows(weights.of(i), weights.pitch(i), outputs, i ? WIDTH : weights.inputs, Matrix{layer.weight, layer.inputs, 1}, 0,
              layer.outputs, layer.inputs, thread, threads);
    for (int col = thread; i < count && col < outputs; col += threads) {
      const bool has = layer.bias && col < layer.outputs;
      biases[i * WIDTH + col] = has ? to_float(static_cast<const SCALAR*>(layer.bias)[col]) : 0.0f;
    }
  }
}

}  // namespace lt
