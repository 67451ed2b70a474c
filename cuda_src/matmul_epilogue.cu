// Applies cuBLASLt's epilogues in a separate pass over a stored matrix product, for layouts and sizes for which
// cuBLASLt refuses them or computes them wrongly. blockIdx.z is the index of the matrix in a batch.
//
// Compiled for:
//   SCALAR      the type of D, C, the bias, the auxiliary matrix and the bias gradient
//   PRODUCT     the type of the product: SCALAR, or float so that a 16-bit D is rounded only once
//   OPERAND     the type of the operand that operand_sum sums up
//   ACTIVATION  None, Relu or Gelu

#include "activations.cuh"
#include "column_sum.cuh"

namespace lt {

// ReLU's mask: one bit for each element, the first element of eight in a byte's lowest bit.
struct Mask {
  unsigned char* data;  // the mask's bytes; null if there is no mask
  int64 line_stride;    // stride in bytes from one row (or column, with `along_rows`) to the next
  int64 batch_stride;   // bytes
  int along_rows;       // whether a byte's bits are consecutive rows rather than columns
};

// β·C, for products to which cuBLASLt has not added it: cuBLASLt refuses a C whose order (row-major or column-major) or
// type differs from D's.
struct Addend {
  Matrix c;  // the operand C; null if absent
  int64 batch_stride;
  const float* beta_pointer;  // β in device memory; overrides `beta`
  float beta;
};

struct MatmulEpilogueParams {
  Matrix product;  // the product, of type PRODUCT; may be `d` if the types agree
  int64 product_batch_stride;
  Matrix d;  // the output D; row-major in matmul_forward: elements of a row are contiguous
  int64 d_batch_stride;
  Addend addend;
  Matrix bias;  // the bias of matmul_forward, with stride 0 along the axis on which it is constant; may be null
  Matrix aux;   // the pre-activation, which matmul_forward writes and matmul_backward reads; may be absent
  int64 aux_batch_stride;
  Mask mask;              // ReLU's mask, in place of a pre-activation
  SCALAR* bias_gradient;  // the bias gradient of matmul_backward, (batch, cols) sums over the rows; may be null
  int64 rows;
  int64 cols;
};

struct OperandSumParams {
  Matrix operand;
  int64 batch_stride;
  SCALAR* sum;  // the sums, (batch, cols)
  int64 rows;
  int64 cols;
};

template <class T>
__device__ inline Matrix batch_of(const Matrix& m, int64 stride) {
  return Matrix{m.data ? static_cast<T*>(m.data) + blockIdx.z * stride : nullptr, m.row_stride, m.col_stride};
}

// Eight elements of the product, plus β·C if there is a C.
__device__ inline Octet load_product(const Matrix& product, const Addend& addend, int64 row, int64 col, int count) {
  Octet z = load<PRODUCT>(product, row, col, count);
  if (addend.c.data) {
    const float beta = addend.beta_pointer ? *addend.beta_pointer : addend.beta;
    const Octet c = load<SCALAR>(batch_of<SCALAR>(addend.c, addend.batch_stride), row, col, count);
    for (int i = 0; i < kOctet; ++i) z.v[i] += beta * c.v[i];
  }
  return z;
}

// Packs ReLU's mask of eight elements into a byte. The bit of a NaN is set, so that backward passes its gradient on.
__device__ inline unsigned char pack_passed(const Octet& z) {
  unsigned char bits = 0;
  for (int i = 0; i < kOctet; ++i) bits |= static_cast<unsigned char>(!(z.v[i] <= 0.0f)) << i;
  return bits;
}

__device__ inline bool mask_bit(const Mask& mask, int64 row, int64 col) {
  const int64 line = mask.along_rows ? col : row, bit = mask.along_rows ? row : col;
  const unsigned char byte = mask.data[blockIdx.z * mask.batch_stride + line * mask.line_stride + bit / 8];
  return (byte >> (bit % 8)) & 1;
}

__device__ inline Octet slopes(const MatmulEpilogueParams& p, const Matrix& aux, int64 row, int64 col, int count) {
  Octet out{};
  if (p.mask.data) {
    for (int i = 0; i < count; ++i) out.v[i] = mask_bit(p.mask, row, col + i) ? 1.0f : 0.0f;
    return out;
  }
  out = load<SCALAR>(aux, row, col, count);
  for (int i = 0; i < kOctet; ++i) out.v[i] = ACTIVATION::derivative(out.v[i], 0.0f);
  return out;
}

// Stores the sums over a block's threads into row blockIdx.z of (batch, cols). Every thread of the block must call it.
__device__ inline void store_sums(SCALAR* sums, int64 cols, const Octet& octet) {
  const int64 first = static_cast<int64>(blockIdx.x) * blockDim.x * kOctet;
  sum_over_block(octet, [&](int column, float sum) {
    if (first + column < cols) sums[blockIdx.z * cols + first + column] = from_float<SCALAR>(sum);
  });
}

}  // namespace lt

// D = act(product + β·C + bias); stores the pre-activation or ReLU's mask for backward. The launch bounds require only
// one block for each multiprocessor, though more fit: without the 1, NVRTC 13.0 spills a register to reach a higher
// occupancy.
extern "C" __global__ void __launch_bounds__(256, 1) matmul_forward(const lt::MatmulEpilogueParams p) {
  using namespace lt;
  wait_for_predecessor();
  const int64 col = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kOctet;
  if (col >= p.cols) return;
  const int count = octet_count(col, p.cols);
  const Matrix product = batch_of<PRODUCT>(p.product, p.product_batch_stride);
  const Matrix d = batch_of<SCALAR>(p.d, p.d_batch_stride), aux = batch_of<SCALAR>(p.aux, p.aux_batch_stride);
  for (int64 row = static_cast<int64>(blockIdx.y) * blockDim.y + threadIdx.y; row < p.rows;
       row += static_cast<int64>(gridDim.y) * blockDim.y) {
    Octet z = load_product(product, p.addend, row, col, count);
    if (p.bias.data) z += load<SCALAR>(p.bias, row, col, count);
    if (aux.data) store<SCALAR>(aux, row, col, count, z);
    if (p.mask.data) {
      p.mask.data[blockIdx.z * p.mask.batch_stride + row * p.mask.line_stride + col / kOctet] = pack_passed(z);
    }
    for (int i = 0; i < kOctet; ++i) z.v[i] = ACTIVATION::forward(z.v[i], 0.0f);
    store<SCALAR>(d, row, col, count, z);
  }
}

// D = (product + β·C) · act'(aux). If the bias gradient is wanted, gridDim.y is 1, so that one block sees every row of
// its columns.
extern "C" __global__ void __launch_bounds__(256, 1) matmul_backward(const lt::MatmulEpilogueParams p) {
  using namespace lt;
  wait_for_predecessor();
  const int64 col = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kOctet;
  // Threads beyond the last column must not return early: computing the bias gradient has a barrier.
  const int count = octet_count(col, p.cols);
  const Matrix product = batch_of<PRODUCT>(p.product, p.product_batch_stride);
  const Matrix d = batch_of<SCALAR>(p.d, p.d_batch_stride), aux = batch_of<SCALAR>(p.aux, p.aux_batch_stride);
  Octet sums{};
  for (int64 row = static_cast<int64>(blockIdx.y) * blockDim.y + threadIdx.y; count > 0 && row < p.rows;
       row += static_cast<int64>(gridDim.y) * blockDim.y) {
    Octet gradient = load_product(product, p.addend, row, col, count);
    const Octet slope = slopes(p, aux, row, col, count);
    for (int i = 0; i < kOctet; ++i) {
      gradient.v[i] *= slope.v[i];
      sums.v[i] += gradient.v[i];
    }
    store<SCALAR>(d, row, col, count, gradient);
  }
  if (!p.bias_gradient) return;
  store_sums(p.bias_gradient, p.cols, sums);
}

// Sums an operand over its rows; gridDim.y is 1, so that one block sees every row of its columns.
extern "C" __global__ void __launch_bounds__(256) operand_sum(const lt::OperandSumParams p) {
  using namespace lt;
  wait_for_predecessor();
  const int64 col = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kOctet;
  const int count = octet_count(col, p.cols);
  const Matrix operand = batch_of<OPERAND>(p.operand, p.batch_stride);
  Octet sums{};
  for (int64 row = threadIdx.y; count > 0 && row < p.rows; row += blockDim.y) {
    sums += load<OPERAND>(operand, row, col, count);
  }
  store_sums(p.sum, p.cols, sums);
}
