// Code shared by the kernels of narrow MLPs, which run all layers in one kernel. The weights are in shared memory. The
// activations of a row stay in registers from layer to layer: the result of a layer's product, after bias, activation
// and rounding, is the left operand of the next layer's product.
//
// Compiled for:
//   SCALAR      the type of all matrices: __half or __nv_bfloat16
//   ACTIVATION  a struct of activations.cuh, for all layers but the last, which has no activation
//   WIDTH       number of columns to which all hidden layers are padded with zeros: that of the widest, rounded up to a
//               multiple of 16
//
// Inputs and outputs may have any number of columns up to kMaxWidth; they are padded to multiples of 16 as well.
#pragma once

#include "activations.cuh"
#include "mlp_sums.cuh"
#include "mma.cuh"
#include "reduce.cuh"
#include "rows.cuh"

namespace lt {

constexpr int kStep = 16;           // rows of a tile of outputs; also the terms along K that one mma instruction sums
constexpr int kSteps = WIDTH / kStep;
constexpr int kTiles = WIDTH / 8;   // number of tiles of 8 columns in a layer of WIDTH columns
constexpr int kSkew = 8;            // elements of padding after each row, so that eight rows lie in different banks

struct MlpLayer {
  void* weight;  // the weight (outputs, inputs), without gaps
  void* bias;    // the bias (outputs,); may be null
  int inputs;
  int outputs;
};

struct MlpParams {
  MlpLayer layers[kMaxLayers];
  Matrix x;  // inputs of the MLP (rows, inputs of the first layer)
  Matrix y;  // (rows, outputs of the last layer); the outputs; in the backward pass their gradient or, with a loss, their targets
  const Rows* table;  // with a loss: the arrays of inputs and of targets, read in place of x and y; may be null
  int64 first;        // number of the first row that the launch reads of the arrays in `table`
  float* partial;           // backward pass: the sums of each block
  const float* grad_scale;  // factor of the loss's gradient, in device memory; null means 1
  int64 rows;
  int count;  // number of layers, at least two
  float slope;
  float gradient_scale;  // 1 / (rows · outputs), times the factor of a loss's gradient
  float delta;           // delta of Huber's loss
};

__device__ inline int whole_steps(int columns) { return (columns + kStep - 1) / kStep * kStep; }

// The weights of all layers in shared memory, each (outputs, inputs), both padded to multiples of 16, with kSkew unused
// elements after each row.
struct Weights {
  SCALAR* first;
  int inputs;  // number of inputs of the first layer

  __device__ int pitch(int layer) const { return (layer ? WIDTH : inputs) + kSkew; }
  __device__ SCALAR* of(int layer) const {
    return layer ? first + WIDTH * (inputs + kSkew) + (layer - 1) * WIDTH * (WIDTH + kSkew) : first;
  }
};

// The address of this lane's row for `ldmatrix`, which loads four 8 × 8 matrices that make a 16 × 16 tile. With ACROSS
// the second matrix lies beside the first, otherwise below it.
template <bool ACROSS>
__device__ inline const SCALAR* row_of_tile(const SCALAR* tile, int pitch) {
  const int lane = threadIdx.x % kWarp, inner = lane / 8 % 2 * 8, outer = lane / 16 * 8, row = lane % 8;
  return tile + (row + (ACROSS ? outer : inner)) * pitch + (ACROSS ? inner : outer);
}

// Loads the left operand (A) of an mma product from a 16 × 16 tile in shared memory, or from its transpose.
__device__ inline void load_left(uint32 (&a)[4], const SCALAR* tile, int pitch) {
  load_matrices<false>(a, row_of_tile<false>(tile, pitch));
}
__device__ inline void load_left_transposed(uint32 (&a)[4], const SCALAR* tile, int pitch) {
  load_matrices<true>(a, row_of_tile<true>(tile, pitch));
}

// Loads the right operands (B) of two mma products side by side from a 16 × 16 tile in shared memory. The tile is
// (terms, columns) for `load_right`, and (columns, terms) for `load_right_transposed`.
__device__ inline void load_right(uint32 (&b)[4], const SCALAR* tile, int pitch) {
  load_matrices<true>(b, row_of_tile<false>(tile, pitch));
}
__device__ inline void load_right_transposed(uint32 (&b)[4], const SCALAR* tile, int pitch) {
  load_matrices<false>(b, row_of_tile<true>(tile, pitch));
}

// Adds one step (16 terms of K) of the product of R tiles of rows with C tiles of 8 columns. TRANSPOSED: `weights` are
// (columns, terms), as in the forward pass; otherwise (terms, columns).
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

// Multiplies rows in shared memory by `weights`, with UNROLLED steps in each iteration of the loop.
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

// Multiplies rows in registers by `weights`.
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

// True for ReLU, which needs no instruction of its own: the instruction that rounds the sums also replaces negative
// ones by zero.
template <class A>
constexpr bool kIsRelu = false;
template <>
constexpr bool kIsRelu<Relu> = true;

// Applies the activation to a layer's FP32 sums. Does nothing for ReLU, which `round_activated` applies.
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

// Sets the columns that pad a layer to zero. Otherwise an infinite input times a padded weight of 0 would be NaN in
// these columns, and the next product would spread the NaN to all columns.
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

// Rounds FP32 sums to SCALAR, in the layout of the next product's left operand. RELU: negative sums become zeros.
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

// Rounds the sums that `activate` has processed to SCALAR, in the layout of the next product's left operand, and
// applies ReLU.
template <int R>
__device__ inline void round_activated(uint32 (&rows)[kSteps][R][4], const float (&sums)[R][kTiles][4]) {
  round_sums<kIsRelu<ACTIVATION>>(rows, sums);
}

// The address, in a tile in shared memory, of word `i` of the calling lane's part of a left operand.
__device__ inline SCALAR* place_of_word(SCALAR* tile, int pitch, int i) {
  const int lane = threadIdx.x % kWarp;
  return tile + (lane / 4 + i % 2 * 8) * pitch + lane % 4 * 2 + i / 2 * 8;
}

// True if every row of a matrix is contiguous, aligned to 16 bytes and a multiple of eight elements long.
__device__ inline bool lies_whole(const Matrix& m, int columns) {
  return m.col_stride == 1 && columns % kOctet == 0 && m.row_stride % kOctet == 0 && reinterpret_cast<uint64>(m.data) % 16 == 0;
}

// Copies rows from `first` on to shared memory, with zeros in the columns up to `padded`, a multiple of 8, and in rows
// beyond the last. The work is divided among `threads` threads. The copies are asynchronous if the rows are aligned, so
// that the caller has to wait for them.
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

// Copies the weights of the first `count` layers and, as FP32, their biases to shared memory. The caller has to wait
// for the asynchronous copies, and at a barrier of the block.
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
