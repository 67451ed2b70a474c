// The backward pass of a narrow MLP: computes the gradients of its weights and biases from the gradient of its outputs
// or, with a LOSS, from their targets. With a LOSS the kernel is a whole training step except the optimizer's update.
// It recomputes the forward pass, which costs less than writing and reading the hidden layers' outputs.
//
// Compiled for the definitions that mlp.cuh lists, and
//   INPUTS, OUTPUTS        numbers of columns of x and of the outputs, padded to multiples of 16
//   HIDDEN                 number of hidden layers
//   SAVED                  the number from which backward computes the activation's derivative: 0 none, 1 the
//                          pre-activation (or the derivative itself, see `kSharesTerms`), 2 the output
//   ROW_WARPS, ROW_TILES   number of warps that run rows forward and backward, and of tiles of 16 rows that each of them
//                          processes at a time
//   SUM_WARPS              number of warps that compute the gradients of the weights
//   FIRST, LAST            first and last layer whose gradients this launch computes: if a thread has too few registers
//                          for the sums of all layers, several launches share the layers
//   ROW_REGISTERS,         number of registers of a thread in row warps and in sum warps, if the warps move registers to
//   SUM_REGISTERS          each other; otherwise zeros
//   THREADS                threads of the block
//   LOSS                   a struct of losses.cuh; not defined if the gradient of the outputs is given
//   WEIGHTED               0: the losses have no weights
//
// A row warp runs its rows forward through all layers and backward again. It writes the factors of the weight gradients
// to its buffers in shared memory: the layers' inputs and outputs, and the gradients of their pre-activations. When a
// chunk of rows is complete, the sum warps multiply these factors, while the row warp begins its next chunk; it waits
// for the sum warps only before it writes to its buffers again. The sum warps serve the row warps in turn and keep the
// FP32 sums of all gradients in registers. At the end they write the sums to global memory, where mlp_gradients.cu adds
// them up over the blocks. So the order of additions depends only on the grid.
//
// Shared memory of a block, with the bytes of an MLP 64-64-64-10 in BF16 with ReLU. Its block is ROW_WARPS 4, ROW_TILES
// 2, SUM_WARPS 4, so that a chunk has 32 rows; it makes all gradients in one launch (FIRST 0, LAST 2). Rows are kSkew =
// 8 elements longer than their columns: 72, and 24 of the 16 padded outputs.
//
//   weights    layer 0: 64 × 72     9,216 |  read by all warps, never written after the start
//              layer 1: 64 × 72     9,216 |
//              layer 2: 16 × 72     2,304 |
//   biases     64 + 64 + 16 FP32      576 |
//   row warp 0 x, even chunks       4,608 |  32 × 72; while the sum warps read one,
//              x, odd chunks        4,608 |  the row warp copies its next chunk to the other
//              output of layer 0    4,608 |  32 × 72: the right operand of layer 1's gradient
//              output of layer 1    4,608 |  the right operand of layer 2's gradient
//              gradient of layer 0  4,608 |  with SAVED 1 first the saved numbers, then the gradient
//              gradient of layer 1  4,608 |
//              gradient of outputs  1,536 |  32 × 24
//   row warps 1, 2, 3: as row warp 0, 29,184 each                        sum: 138,048 bytes
//
//   time   row warp 0:  | chunk A, forward and back | full(0) | chunk B: layer 0's product | wait: empty(0) | rest of B ...
//          sum warps:                               | full(0) | multiply A's factors, pass empty(0) | full(1) ...

#include "losses.cuh"
#include "mlp.cuh"

namespace lt {

constexpr int kRowTiles = ROW_TILES;
constexpr int kChunk = kRowTiles * kStep;  // rows of a chunk, which a row warp processes together
constexpr int kInputSteps = INPUTS / kStep;
constexpr int kOutputSteps = OUTPUTS / kStep;
constexpr int kPitch = WIDTH + kSkew;
constexpr int kInputPitch = INPUTS + kSkew;
constexpr int kOutputPitch = OUTPUTS + kSkew;
constexpr int kTogether = (1 + SUM_WARPS) * kWarp;  // number of threads that meet at a barrier: one row warp and all sum warps
#ifdef LOSS
constexpr bool kHasLoss = true;
#else
constexpr bool kHasLoss = false;
#endif

// Numbers of the named barriers between a row warp and the sum warps: by `full` the row warp signals that its chunk is
// ready, by `empty` the sum warps signal that they have read it.
__device__ inline int full(int row_warp) { return 1 + row_warp; }
__device__ inline int empty(int row_warp) { return 1 + ROW_WARPS + row_warp; }
static_assert(2 * ROW_WARPS < kBarriers, "more row warps than barriers");

// True if this launch computes the gradients of a layer's weight and bias.
__device__ constexpr bool makes(int layer) { return FIRST <= layer && layer <= LAST; }

// The buffers of a row warp in shared memory, see the drawing above: chunks of x, outputs of hidden layers, gradients
// of their pre-activations, and gradients of the MLP's outputs. With SAVED 1 a gradient's buffer first holds the saved
// numbers of its layer. If the output of layer LAST is needed only for its derivative, the layer's gradient overwrites
// the output.
struct WarpBuffers {
  SCALAR* memory;

  static constexpr int kX = FIRST == 0 ? 2 : 1;
  static constexpr int kFirstOutput = FIRST == 0 ? 0 : FIRST - 1;
  static constexpr int kOutputs = (SAVED == 2 ? HIDDEN : LAST) - kFirstOutput;
  static constexpr bool kReplaces = SAVED == 2 && LAST < HIDDEN;
  static constexpr int kGradients = (SAVED == 1 || LAST == HIDDEN ? HIDDEN : LAST + !kReplaces) - FIRST;
  static constexpr int kHidden = kChunk * kX * kInputPitch;  // offset of the hidden layers' buffers
  static constexpr int kSize = kHidden + kChunk * ((kOutputs + kGradients) * kPitch + makes(HIDDEN) * kOutputPitch);

  static __device__ bool has_output(int layer) {
    return (kFirstOutput == 0 || layer >= kFirstOutput) && (kOutputs == HIDDEN || layer < kFirstOutput + kOutputs);
  }
  __device__ SCALAR* x(int turn) const { return memory + (kX == 1 ? 0 : turn * kChunk * kInputPitch); }
  __device__ SCALAR* output(int layer) const { return memory + kHidden + (layer - kFirstOutput) * kChunk * kPitch; }
  __device__ SCALAR* gradient(int layer) const {
    if (kReplaces && layer == LAST) return output(layer);
    return memory + kHidden + (kOutputs + layer - FIRST) * kChunk * kPitch;
  }
};

// Numbers of tiles of 16 outputs and of 16 inputs of a layer's weight gradient.
__device__ constexpr int tiles_down(int layer) { return layer == HIDDEN ? kOutputSteps : kSteps; }
__device__ constexpr int columns_of(int layer) { return layer == 0 ? kInputSteps : kSteps; }

// The tiles of this launch's weight gradients form a sequence: layer by layer, and in a layer column by column. Of a tile
// each lane has eight sums; of a tile in the first column it has four more, for the bias gradient. Each sum warp
// computes a run of the sequence, and the runs are as short as possible.
__device__ constexpr int tiles_of(int layer) { return tiles_down(layer) * columns_of(layer); }
__device__ constexpr int first_tile_of(int layer) {
  int tiles = 0;
  for (int i = FIRST; i < layer; ++i) tiles += tiles_of(i);
  return tiles;
}
__device__ constexpr int layer_of(int tile) {
  int layer = FIRST;
  while (layer < LAST && tile >= first_tile_of(layer + 1)) ++layer;
  return layer;
}
__device__ constexpr bool has_bias(int tile) {
  return tile - first_tile_of(layer_of(tile)) < tiles_down(layer_of(tile));
}
constexpr int kRunTiles = first_tile_of(LAST) + tiles_of(LAST);  // number of tiles of this launch
__device__ constexpr int sums_of(int tile) { return has_bias(tile) ? 12 : 8; }

// The tile after a run that begins at `tile` and has at most `most` sums.
__device__ constexpr int end_of_run(int tile, int most) {
  for (int sums = 0; tile < kRunTiles && sums + sums_of(tile) <= most; ++tile) sums += sums_of(tile);
  return tile;
}
// The first tile of a sum warp's run, if a run has at most `most` sums.
__device__ constexpr int first_tile(int warp, int most) {
  int tile = 0;
  for (int i = 0; i < warp; ++i) tile = end_of_run(tile, most);
  return tile;
}
// The smallest number of sums for each run with which the runs of all sum warps together contain all tiles.
__device__ constexpr int smallest_run() {
  int most = 12;
  while (first_tile(SUM_WARPS, most) < kRunTiles) most += 4;
  return most;
}
constexpr int kMostSums = smallest_run();

// Returns the number of a block's sums that precede the sums of layer `layer`, in the layout of mlp_sums.cuh. For
// HIDDEN + 1, which is one more than the last layer, this is the number of sums of all layers.
__device__ constexpr int sums_before_layer(int layer) {
  int sums = 0;
  for (int i = 0; i < layer; ++i) sums += sums_of_layer(tiles_down(i) * kStep, columns_of(i) * kStep);
  return sums;
}
// Number of partial sums that a block writes to global memory: for the gradients of all layers, and for the loss if
// there is one.
constexpr int kPartial = sums_before_layer(HIDDEN + 1) + (kHasLoss ? kLossPlaces : 0);

// The run of sum warp WARP.
template <int WARP>
struct Run {
  static constexpr int kFirst = first_tile(WARP, kMostSums), kEnd = first_tile(WARP + 1, kMostSums);
  static constexpr int kTiles = kEnd > kFirst ? kEnd - kFirst : 1;

  float of_weight[kTiles][2][4];
  float of_bias[kTiles][4];  // of the tiles in the first column of a layer

  __device__ void clear() {
    memset(of_weight, 0, sizeof(of_weight));
    memset(of_bias, 0, sizeof(of_bias));
  }

  // Adds the product gradientᵀ · input of a layer over the rows of a chunk.
  template <int LAYER>
  __device__ void add(const SCALAR* gradient, int gradient_pitch, const SCALAR* input, int input_pitch) {
    constexpr int kDown = tiles_down(LAYER), kStart = first_tile_of(LAYER), kStop = kStart + tiles_of(LAYER);
    constexpr int kBegin = kFirst > kStart ? kFirst - kStart : 0, kLast = (kEnd < kStop ? kEnd : kStop) - kStart;
    if constexpr (kBegin < kLast) {
      const uint32 ones = rounded_pair(1.0f, 1.0f);
#pragma unroll
      for (int step = 0; step < kRowTiles; ++step) {
        uint32 left[kDown][4];
#pragma unroll
        for (int i = 0; i < kDown; ++i) {
          const bool is_read = kLast - kBegin >= kDown || (i - kBegin % kDown + kDown) % kDown < kLast - kBegin;
          const SCALAR* place = gradient + step * kStep * gradient_pitch + i * kStep;
          if (is_read) load_left_transposed(left[i], place, gradient_pitch);
        }
#pragma unroll
        for (int j = kBegin / kDown; j <= (kLast - 1) / kDown; ++j) {
          uint32 right[4];
          load_right(right, input + step * kStep * input_pitch + j * kStep, input_pitch);
#pragma unroll
          for (int i = 0; i < kDown; ++i) {
            const int tile = j * kDown + i;
            if (tile < kBegin || tile >= kLast) continue;
            const int own = kStart + tile - kFirst;
            multiply_add<SCALAR>(of_weight[own][0], left[i], right[0], right[1]);
            multiply_add<SCALAR>(of_weight[own][1], left[i], right[2], right[3]);
            if (j == 0) multiply_add<SCALAR>(of_bias[own], left[i], ones, ones);
          }
        }
      }
    }
  }

  // Writes the sums from tile OWN of the run on: each lane one float4 for each tile of 8 columns. Addresses are computed
  // at compile time: computed in a loop they made the kernel's code more than twice as long, and a step with few rows
  // spends most of its time on fetching code.
  template <int OWN = 0>
  __device__ void write(float* sums) const {
    if constexpr (kFirst + OWN < kEnd) {
      constexpr int kLayer = layer_of(kFirst + OWN), kDown = tiles_down(kLayer), kAcross = columns_of(kLayer);
      constexpr int kTile = kFirst + OWN - first_tile_of(kLayer), kColumn = kTile / kDown;
      constexpr int kBefore = sums_before_layer(kLayer) / 4 + kTile % kDown * tiles_across(kAcross * kStep) * kWarp;
      float4* row = reinterpret_cast<float4*>(sums) + kBefore + threadIdx.x % kWarp;
      row[2 * kColumn * kWarp] = as_word(of_weight[OWN][0]);
      row[(2 * kColumn + 1) * kWarp] = as_word(of_weight[OWN][1]);
      if (kColumn == 0) row[2 * kAcross * kWarp] = as_word(of_bias[OWN]);
      write<OWN + 1>(sums);
    }
  }

 private:
  static __device__ float4 as_word(const float (&four)[4]) { return float4{four[0], four[1], four[2], four[3]}; }
};

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

// True for GELU and SiLU. Their output and derivative need the same exponential function and reciprocal, which cost
// more than all other arithmetic. So the forward pass computes both, and stores the derivative instead of the
// pre-activation. GeluErf could share as much, but its longer arithmetic would then need more registers than a thread
// can have.
template <class A>
constexpr bool kSharesTerms = false;
template <>
constexpr bool kSharesTerms<Gelu> = true;
template <>
constexpr bool kSharesTerms<Silu> = true;

// The output of the activation, and the number from which `derivative` finds its derivative.
struct Activated {
  float output, saved;
};
template <class A>
__device__ inline Activated activated(float z, float slope) {
  return Activated{A::forward(z, slope), z};
}
template <>
__device__ inline Activated activated<Silu>(float z, float) {
  const float s = sigmoid(z), y = z * s;
  return Activated{y, s + (y - y * s)};
}
// Computes the derivative as `Gelu::derivative` does, from z² limited to 256. The output uses the limited z² too: this
// leaves it unchanged, because beyond |z| = 16 the sigmoid is 0 or 1.
template <>
__device__ inline Activated activated<Gelu>(float z, float) {
  const float square = fminf(z * z, 256.0f), s = Gelu::gate(z, square), y = z * s;
  return Activated{y, s + (y - y * s) * (Gelu::kLinear + 3.0f * Gelu::kCubic * square)};
}

#if SAVED == 2
__device__ inline float derivative(float saved, float) { return ACTIVATION::derivative_from_output(saved); }
#else
__device__ inline float derivative(float saved, float slope) {
  return kSharesTerms<ACTIVATION> ? saved : ACTIVATION::derivative(saved, slope);
}
#endif

// Activates FP32 sums, and stores the numbers that `derivative` needs.
__device__ inline void activate_and_save(SCALAR* saved, float (&sums)[kRowTiles][kTiles][4], float slope) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* pair = sums[r][2 * step + i / 2] + i % 2 * 2;
        const Activated left = activated<ACTIVATION>(pair[0], slope), right = activated<ACTIVATION>(pair[1], slope);
        SCALAR* place = place_of_word(saved + r * kStep * kPitch + step * kStep, kPitch, i);
        *reinterpret_cast<uint32*>(place) = rounded_pair(left.saved, right.saved);
        pair[0] = left.output, pair[1] = right.output;
      }
    }
  }
}

// Multiplies the gradient of a layer's output by the activation's derivative, which is computed from the saved values.
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

// Multiplies by ReLU's derivative after the gradient was rounded: a factor of 0 or 1 rounds nothing. Infinity times 0
// is NaN, as for the other activations.
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

// Sixteen columns of a chunk, from `col` on, of the matrix y: gradients of the outputs, or targets. The elements are in
// registers, laid out as the left operand of mma. Rows and columns that do not exist are zeros. The elements are
// converted to FP32 only when they are used, so that the loads' latency overlaps the work in between.
struct OutputTile {
  SCALAR pairs[kRowTiles][4][2];

  __device__ void load(const Matrix& m, int64 first, int64 rows, int columns, int col) {
    const int row = threadIdx.x % kWarp / 4, own = col + threadIdx.x % 4 * 2;
    const int count = rows - first < kChunk ? static_cast<int>(rows - first) : kChunk;
    const SCALAR* place = element<SCALAR>(m, first + row, own);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const SCALAR* pair = place + (r * kStep + i % 2 * 8) * m.row_stride;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int across = i / 2 * 8 + j;
          const bool exists = row + r * kStep + i % 2 * 8 < count && own + across < columns;
          pairs[r][i][j] = exists ? pair[across * m.col_stride] : from_float<SCALAR>(0.0f);
        }
      }
    }
  }
  __device__ float2 pair(int r, int i) const { return float2{to_float(pairs[r][i][0]), to_float(pairs[r][i][1])}; }
};

#ifdef LOSS
// Computes the loss of sixteen rounded outputs of each row against their targets, and its gradient; returns the sum of
// the losses.
__device__ inline float loss_and_gradient(uint32 (&gradient)[kRowTiles][4], const float (&outputs)[kRowTiles][2][4],
                                          const OutputTile& targets, const MlpParams& p, int64 first, int col) {
  const int lane = threadIdx.x % kWarp, columns = p.layers[HIDDEN].outputs;
  const LossOptions options{p.delta, 1.0f};
  const float factor = LOSS::kFactor * p.gradient_scale, scale = p.grad_scale ? factor * *p.grad_scale : factor;
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool has_row = first + r * kStep + lane / 4 + i % 2 * 8 < p.rows;
      const int at = col + lane % 4 * 2 + i / 2 * 8;
      const float(&four)[4] = outputs[r][i / 2];
      const float2 target = targets.pair(r, i);
      const float2 output = Pair<SCALAR>::unpack(Pair<SCALAR>::pack(float2{four[i % 2 * 2], four[i % 2 * 2 + 1]}));
      LossTerm left = LOSS::of(output.x, target.x, options), right = LOSS::of(output.y, target.y, options);
      if (!has_row || at >= columns) left = LossTerm{};
      if (!has_row || at + 1 >= columns) right = LossTerm{};
      sum += left.value + right.value;
      gradient[r][i] = rounded_pair(left.slope * scale, right.slope * scale);
    }
  }
  return sum;
}
#endif

// The matrices at both ends of the MLP: its inputs x, and the gradients of its outputs or, with a loss, the targets.
struct Ends {
  Matrix x, y;
};

// The rows of an array from row `first` on, as a matrix.
__device__ inline Matrix rows_from(const Rows& rows, int64 first) {
  char* data = static_cast<char*>(const_cast<void*>(rows.data)) + first * rows.pitch;
  return Matrix{data, rows.pitch / static_cast<int64>(sizeof(SCALAR)), 1};
}
__device__ inline Ends ends_of(const MlpParams& p) {
  if (!kHasLoss || p.table == nullptr) return Ends{p.x, p.y};
  return Ends{rows_from(p.table[0], p.first), rows_from(p.table[1], p.first)};
}

// The number of the calling warp's first chunk of rows, the number of chunks, and a chunk's first row. Chunks are
// counted in 32 bits, which saves registers.
__device__ inline int first_chunk(int warp) { return gridDim.x * warp + blockIdx.x; }
__device__ inline int chunks_of(const MlpParams& p) { return static_cast<int>((p.rows + kChunk - 1) / kChunk); }
__device__ inline int64 row_of(int chunk) { return static_cast<int64>(chunk) * kChunk; }

// Begins to copy the calling warp's chunk of x, if there is one.
__device__ inline void copy_x(const MlpParams& p, const Matrix& x, SCALAR* to, int chunk) {
  const int64 first = row_of(chunk);
  constexpr int kOctets = INPUTS / kOctet;
  const int columns = p.layers[0].inputs, lane = threadIdx.x % kWarp;
  if (columns == INPUTS && first + kChunk <= p.rows && lies_whole(x, columns)) {
    const SCALAR* from = element<SCALAR>(x, first, 0);
#pragma unroll
    for (int i = lane; i < kChunk * kOctets; i += kWarp) {
      const int row = i / kOctets, col = i % kOctets * kOctet;
      copy_async(to + row * kInputPitch + col, from + row * x.row_stride + col, 16);
    }
  } else if (first < p.rows) {
    copy_rows(to, kInputPitch, kChunk, INPUTS, x, first, p.rows, columns, lane, kWarp);
  }
  end_copies();
}

// Activates and rounds a hidden layer's FP32 sums. Stores the output and, with SAVED 1, the pre-activation or the
// derivative.
__device__ inline void finish_layer(uint32 (&rows)[kSteps][kRowTiles][4], float (&sums)[kRowTiles][kTiles][4],
                                    const MlpParams& p, const WarpBuffers& own, int layer) {
  if (SAVED == 1 && (FIRST == 0 || layer >= FIRST)) {
    activate_and_save(own.gradient(layer), sums, p.slope);
  } else {
    activate(sums, p.slope);
  }
  clear_padding(sums, p.layers[layer].outputs);
  round_activated(rows, sums);
  if (WarpBuffers::has_output(layer)) store_words(own.output(layer), rows);
}

// The backward pass of the output layer: computes the gradient of the last hidden layer's output. With a loss it first
// computes the MLP's outputs and their gradient. Stores the gradient of the outputs. Returns the calling lane's share
// of the loss.
__device__ inline float output_backward(float (&sums)[kRowTiles][kTiles][4],
                                  [[maybe_unused]] const uint32 (&rows)[kSteps][kRowTiles][4], OutputTile& given,
                                  const MlpParams& p, const Weights& weights, [[maybe_unused]] const float* biases,
                                  const WarpBuffers& own, const Matrix& y, int64 row) {
  float loss = 0.0f;
  memset(sums, 0, sizeof(sums));
#pragma unroll 1
  for (int step = 0;;) {
    uint32 words[kRowTiles][4];
#ifdef LOSS
    float outputs[kRowTiles][2][4];
    start_with_bias(outputs, biases + HIDDEN * WIDTH + step * kStep);
    multiply_rows<true>(outputs, rows, weights.of(HIDDEN) + step * kStep * kPitch);
    loss += loss_and_gradient(words, outputs, given, p, row, step * kStep);
#endif
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!kHasLoss) words[r][i] = rounded_pair(given.pair(r, i).x, given.pair(r, i).y);
        if (!makes(HIDDEN)) continue;
        SCALAR* tile = own.gradient(HIDDEN) + r * kStep * kOutputPitch + step * kStep;
        *reinterpret_cast<uint32*>(place_of_word(tile, kOutputPitch, i)) = words[r][i];
      }
    }
    multiply_step<false>(sums, words, weights.of(HIDDEN), kPitch, step);
    if (++step == kOutputSteps) return loss;
    given.load(y, row, p.rows, p.layers[HIDDEN].outputs, step * kStep);
  }
}

// Computes the gradient of a hidden layer's pre-activation from the gradient of its output, and stores it.
__device__ inline void activation_backward(uint32 (&rows)[kSteps][kRowTiles][4], float (&sums)[kRowTiles][kTiles][4],
                                             const MlpParams& p, const WarpBuffers& own, int layer) {
  SCALAR* saved = SAVED == 1 ? own.gradient(layer) : own.output(layer);
  if (SAVED && !kIsRelu<ACTIVATION>) multiply_derivative(sums, saved, p.slope);
  clear_padding(sums, p.layers[layer].outputs);
  round_sums<false>(rows, sums);
  if (kIsRelu<ACTIVATION>) multiply_relu_derivative(rows, saved);
  if (LAST >= HIDDEN - 1 || layer <= LAST) store_words(own.gradient(layer), rows);
}

// The work of a row warp: runs its chunks forward and backward, and stores the factors of the weight gradients for the
// sum warps. The copy of the first chunk of x has been started. Returns the calling lane's share of the sum of losses.
__device__ inline float take_rows(const MlpParams& p, const Ends& ends, const Weights& weights, const float* biases,
                                  const WarpBuffers& own, int warp) {
  const int first = first_chunk(warp), stride = gridDim.x * ROW_WARPS, chunks = chunks_of(p);
  float loss = 0.0f, sums[kRowTiles][kTiles][4];
  uint32 rows[kSteps][kRowTiles][4];
  int turn = 0;
  for (int chunk = first; chunk < chunks; chunk += stride, turn ^= 1) {
    OutputTile given;  // gradients of the outputs or, with a loss, targets
    given.load(ends.y, row_of(chunk), p.rows, p.layers[HIDDEN].outputs, 0);
    wait_for_copies<0>();
    __syncwarp();
    start_with_bias(sums, biases);
    multiply_tile<true, kInputSteps>(sums, own.x(turn), kInputPitch, INPUTS, weights.of(0), kInputPitch);
    if (WarpBuffers::kX == 1) __syncwarp();
    if (chunk != first) wait_at_barrier(empty(warp), kTogether);
    copy_x(p, ends.x, own.x(turn ^ 1), chunk + stride);
#pragma unroll 1
    for (int i = 0;;) {
      finish_layer(rows, sums, p, own, i);
      if (++i == HIDDEN) break;
      start_with_bias(sums, biases + i * WIDTH);
      multiply_rows<true>(sums, rows, weights.of(i));
    }
    loss += output_backward(sums, rows, given, p, weights, biases, own, ends.y, row_of(chunk));
#pragma unroll 1
    for (int i = HIDDEN - 1; FIRST < HIDDEN; --i) {
      activation_backward(rows, sums, p, own, i);
      if (i == FIRST) break;
      memset(sums, 0, sizeof(sums));
      multiply_rows<false>(sums, rows, weights.of(i));
    }
    pass_barrier(full(warp), kTogether);
  }
  return loss;
}

// Adds the products of the layers from LAYER down to FIRST to a run, over the rows of a chunk.
template <int LAYER, class R>
__device__ inline void add_layers(R& run, const WarpBuffers& rows, int turn) {
  const bool is_last = LAYER == HIDDEN, is_first = LAYER == 0;
  run.template add<LAYER>(rows.gradient(LAYER), is_last ? kOutputPitch : kPitch,
                          is_first ? rows.x(turn) : rows.output(LAYER - 1), is_first ? kInputPitch : kPitch);
  if constexpr (LAYER > FIRST) add_layers<LAYER - 1>(run, rows, turn);
}

// The work of sum warp WARP: adds up its run of the weight and bias gradients over all chunks of the block, and writes
// the sums.
template <int WARP>
__device__ inline void sum_products(const MlpParams& p, SCALAR* memory) {
  Run<WARP> run;
  run.clear();
  const int stride = gridDim.x * ROW_WARPS, chunks = chunks_of(p);
  int turn = 0, row_warp = 0;
#pragma unroll 1
  for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const WarpBuffers rows{memory + row_warp * WarpBuffers::kSize};
    wait_at_barrier(full(row_warp), kTogether);
    add_layers<LAST>(run, rows, turn);
    if (chunk + stride < chunks) pass_barrier(empty(row_warp), kTogether);
    if (++row_warp == ROW_WARPS) row_warp = 0, turn ^= 1;
  }
  run.write(p.partial + static_cast<int64>(blockIdx.x) * kPartial);
}

// Each sum warp has code of its own, because registers cannot be addressed by a number that is known only at run time.
template <int WARP = 0>
__device__ inline void sum_products_of(int warp, const MlpParams& p, SCALAR* memory) {
  if constexpr (WARP < SUM_WARPS) {
    if (warp == WARP) {
      sum_products<WARP>(p, memory);
    } else {
      sum_products_of<WARP + 1>(warp, p, memory);
    }
  }
}

// Whether the kernel uses setmaxnreg (SUM_REGISTERS > 0), but is compiled for an architecture without it. The kernel is
// then empty; `fitting_parts` requests no such kernel.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kIsMissing = SUM_REGISTERS > 0;
#else
constexpr bool kIsMissing = false;
#endif

// Sets the number of registers of each thread in the calling warps; 0 leaves it as it is. Warps whose numbers differ only
// in the last two bits have to call it together. Warps that get more registers wait until others have given up as many.
template <int COUNT>
__device__ inline void change_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kRegisters = 65536, kUnit = 8, kAtStart = kRegisters / THREADS / kUnit * kUnit;
  if constexpr (COUNT > kAtStart) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
  if constexpr (COUNT > 0 && COUNT <= kAtStart) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(THREADS, 1) mlp_bwd(const lt::MlpParams p) {
  using namespace lt;
  DYNAMIC_SHARED(uint4, memory);
  if (kIsMissing) return;
  // Shared memory holds all weights and biases, then the buffers of each row warp.
  const Weights weights{reinterpret_cast<SCALAR*>(memory), INPUTS};
  float* biases = reinterpret_cast<float*>(weights.of(HIDDEN) + OUTPUTS * kPitch);
  SCALAR* rows = reinterpret_cast<SCALAR*>(biases + HIDDEN * WIDTH + OUTPUTS);
  // The shuffle tells the compiler that `warp` is the same in all lanes, so that branches on it do not diverge.
  const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / kWarp, 0);
  wait_for_predecessor();
  const WarpBuffers own{rows + warp * WarpBuffers::kSize};
  load_layers(p, weights, biases, p.count);
  const Ends ends = ends_of(p);
  if (warp < ROW_WARPS) copy_x(p, ends.x, own.x(0), first_chunk(warp));
  end_copies();
  wait_for_copies<0>();
  __syncthreads();
  [[maybe_unused]] float loss = 0.0f;
  if (warp < ROW_WARPS) {
    change_registers<ROW_REGISTERS>();
    loss = take_rows(p, ends, weights, biases, own, warp);
  } else {
    change_registers<SUM_REGISTERS>();
    sum_products_of(warp - ROW_WARPS, p, rows);
  }
#ifdef LOSS
  __shared__ float scratch[kMaxWarps];
  loss = sum_over_block(loss, scratch);
  if (threadIdx.x == 0) p.partial[(blockIdx.x + 1) * static_cast<int64>(kPartial) - kLossPlaces] = loss;
#endif
}
