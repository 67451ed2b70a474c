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
constexpr int kChunk = kRowTiles * kStep;  // rows of a chunk, which a row warp processes at a time
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

// How the tiles of a layer's weight gradient are divided among the sum warps. The split with the fewest tiles for each
// warp is chosen; among equals the one with the fewest rows plus columns of tiles, since a warp has to read these; then
// the one with the fewest rows of tiles, since each row adds sums for the bias.
struct Split {
  int down, across;
};
__device__ constexpr int parts_of(int tiles, int parts) { return (tiles + parts - 1) / parts; }
__device__ constexpr Split split_of(int down, int across) {
  Split best{SUM_WARPS, 1};
  for (int i = SUM_WARPS; i > 0; --i) {
    const int j = SUM_WARPS / i;
    const int rows = parts_of(down, i), columns = parts_of(across, j);
    const int best_rows = parts_of(down, best.down), best_columns = parts_of(across, best.across);
    const int more = rows * columns - best_rows * best_columns;
    if (more < 0 || (more == 0 && rows + columns < best_rows + best_columns)) best = Split{i, j};
  }
  return best;
}

// A warp's sums of the gradients of one layer with DOWN · 16 outputs and ACROSS · 16 inputs.
template <int DOWN, int ACROSS>
struct Sums {
  static constexpr Split kSplit = split_of(DOWN, ACROSS);
  static constexpr int kDown = parts_of(DOWN, kSplit.down);
  static constexpr int kAcross = parts_of(ACROSS, kSplit.across);
  // tiles of 8 columns in a row of tiles: those of the weight gradient, and one more for the bias gradient
  static constexpr int kTilesAcross = tiles_across(ACROSS * kStep);
  static constexpr int kSize = sums_of_layer(DOWN * kStep, ACROSS * kStep);

  float of_weight[kDown][kAcross][2][4];
  float of_bias[kDown][4];

  __device__ void clear() {
    memset(of_weight, 0, sizeof(of_weight));
    memset(of_bias, 0, sizeof(of_bias));
  }

  // The first tile of the calling warp. The warps that sum the weight's gradient share its tiles; the last may have
  // fewer.
  static __device__ int first_down(int warp) { return warp / kSplit.across * kDown; }
  static __device__ int first_across(int warp) { return warp % kSplit.across * kAcross; }
  static constexpr bool kIsEven = kDown * kSplit.down == DOWN && kAcross * kSplit.across == ACROSS;
  static __device__ bool has(int down, int across) { return kIsEven || (down < DOWN && across < ACROSS); }
  static __device__ bool has_any(int warp) {
    return (kSplit.down * kSplit.across == SUM_WARPS || warp < kSplit.down * kSplit.across) &&
           has(first_down(warp), first_across(warp));
  }

  // Adds the product gradientᵀ · input over the rows of a chunk. Tiles beyond the last one repeat its numbers and are
  // not written.
  __device__ void add(int warp, const SCALAR* gradient, int gradient_pitch, const SCALAR* input, int input_pitch) {
    if (!has_any(warp)) return;
    const int down = first_down(warp), across = first_across(warp);
    const uint32 ones = rounded_pair(1.0f, 1.0f);
    uint32 left[kRowTiles][kDown][4], right[kRowTiles][kAcross][4];
#pragma unroll
    for (int step = 0; step < kRowTiles; ++step) {
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
        const int tile = kIsEven || down + i < DOWN ? down + i : DOWN - 1;
        load_left_transposed(left[step][i], gradient + step * kStep * gradient_pitch + tile * kStep, gradient_pitch);
      }
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        const int tile = kIsEven || across + j < ACROSS ? across + j : ACROSS - 1;
        load_right(right[step][j], input + step * kStep * input_pitch + tile * kStep, input_pitch);
      }
    }
#pragma unroll
    for (int step = 0; step < kRowTiles; ++step) {
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
#pragma unroll
        for (int i = 0; i < kDown; ++i) {
          multiply_add<SCALAR>(of_weight[i][j][0], left[step][i], right[step][j][0], right[step][j][1]);
          multiply_add<SCALAR>(of_weight[i][j][1], left[step][i], right[step][j][2], right[step][j][3]);
        }
      }
      if (across != 0) continue;
#pragma unroll
      for (int i = 0; i < kDown; ++i) multiply_add<SCALAR>(of_bias[i], left[step][i], ones, ones);
    }
  }

  // Writes the sums: each lane one float4 for each tile of 8 columns.
  __device__ void write(int warp, float* sums) const {
    if (!has_any(warp)) return;
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
      const int down = first_down(warp) + i;
      float4* row = reinterpret_cast<float4*>(sums) + down * kTilesAcross * kWarp + threadIdx.x % kWarp;
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        const int across = first_across(warp) + j;
        if (!has(down, across)) break;
        row[2 * across * kWarp] = as_word(of_weight[i][j][0]);
        row[(2 * across + 1) * kWarp] = as_word(of_weight[i][j][1]);
      }
      if (first_across(warp) == 0 && has(down, 0)) row[2 * ACROSS * kWarp] = as_word(of_bias[i]);
    }
  }

 private:
  static __device__ float4 as_word(const float (&four)[4]) { return float4{four[0], four[1], four[2], four[3]}; }
};

using FirstSums = Sums<kSteps, kInputSteps>;
using HiddenSums = Sums<kSteps, kSteps>;
using LastSums = Sums<kOutputSteps, kSteps>;
constexpr int kBetween = HIDDEN - 1;  // number of layers whose inputs and outputs are both hidden
constexpr int kPartial =  // number of sums of a block
    FirstSums::kSize + kBetween * HiddenSums::kSize + LastSums::kSize + (kHasLoss ? kLossPlaces : 0);

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
// Computes the derivative as `Gelu::derivative` does. The output is computed from the limited square too, which does
// not change it: beyond the limit the gate is 0 or 1.
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

// The work of a sum warp: adds up the weight and bias gradients of all chunks of the block, and writes the sums.
__device__ inline void sum_products(const MlpParams& p, SCALAR* memory, int warp) {
  FirstSums first;
  HiddenSums between[kBetween ? kBetween : 1];
  LastSums last;
  first.clear();
#pragma unroll
  for (int i = 0; i < kBetween; ++i) between[i].clear();
  last.clear();
  const int stride = gridDim.x * ROW_WARPS, chunks = chunks_of(p);
  int turn = 0, row_warp = 0;
#pragma unroll 1
  for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const WarpBuffers rows{memory + row_warp * WarpBuffers::kSize};
    wait_at_barrier(full(row_warp), kTogether);
    if (makes(HIDDEN)) last.add(warp, rows.gradient(HIDDEN), kOutputPitch, rows.output(HIDDEN - 1), kPitch);
#pragma unroll
    for (int i = kBetween - 1; i >= 0; --i) {
      if (makes(i + 1)) between[i].add(warp, rows.gradient(i + 1), kPitch, rows.output(i), kPitch);
    }
    if (makes(0)) first.add(warp, rows.gradient(0), kPitch, rows.x(turn), kInputPitch);
    if (chunk + stride < chunks) pass_barrier(empty(row_warp), kTogether);
    if (++row_warp == ROW_WARPS) row_warp = 0, turn ^= 1;
  }
  float* sums = p.partial + static_cast<int64>(blockIdx.x) * kPartial;
  if (makes(0)) first.write(warp, sums);
#pragma unroll
  for (int i = 0; i < kBetween; ++i) {
    if (makes(i + 1)) between[i].write(warp, sums + FirstSums::kSize + i * HiddenSums::kSize);
  }
  if (makes(HIDDEN)) last.write(warp, sums + FirstSums::kSize + kBetween * HiddenSums::kSize);
}

}  // namespace lt

extern "C" __global__ void __launch_bounds__(THREADS, 1) mlp_bwd(const lt::MlpParams p) {
  using namespace lt;
  DYNAMIC_SHARED(uint4, memory);
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
    loss = take_rows(p, ends, weights, biases, own, warp);
  } else {
    sum_products(p, rows, warp - ROW_WARPS);
  }
#ifdef LOSS
  __shared__ float scratch[kMaxWarps];
  loss = sum_over_block(loss, scratch);
  if (threadIdx.x == 0) p.partial[(blockIdx.x + 1) * static_cast<int64>(kPartial) - kLossPlaces] = loss;
#endif
}
