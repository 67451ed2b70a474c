// Probes of mma.cuh: the result of each instruction in every lane of a warp. Compiled for one SCALAR type.

#include "instructions.cuh"
#include "mma.cuh"

struct MmaProbeParams {
  const unsigned* a;                // left operand: four words a lane
  const unsigned* b;                // right operand: two words a lane
  float* c;                         // sums: four a lane, to which the product is added
  const unsigned short* rows;       // source of the loads: 32 rows of eight elements
  unsigned* plain;                  // loaded matrices: four words a lane
  unsigned* transposed;             // the same matrices, transposed: four words a lane
  const unsigned short* source;     // source of the copies: sixteen bytes a lane
  // Target of the copies: sixteen bytes a lane, of which lane l copies 2 · (l % 9) from the source.
  unsigned short* copied;
};

extern "C" __global__ void mma_probe(const MmaProbeParams p) {
  using namespace lt;
  __shared__ uint4 shared[32], copies[32];
  const int lane = threadIdx.x;
  shared[lane] = reinterpret_cast<const uint4*>(p.rows)[lane];
  copy_async(copies + lane, reinterpret_cast<const uint4*>(p.source) + lane, 2 * (lane % 9));
  end_copies();
  wait_for_copies<0>();
  __syncwarp();
  float c[4];
  uint32 a[4], plain[4], transposed[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = p.a[4 * lane + i];
    c[i] = p.c[4 * lane + i];
  }
  multiply_add<SCALAR>(c, a, p.b[2 * lane], p.b[2 * lane + 1]);
  load_matrices<false>(plain, shared + lane);
  load_matrices<true>(transposed, shared + lane);
  for (int i = 0; i < 4; ++i) {
    p.c[4 * lane + i] = c[i];
    p.plain[4 * lane + i] = plain[i];
    p.transposed[4 * lane + i] = transposed[i];
  }
  reinterpret_cast<uint4*>(p.copied)[lane] = copies[lane];
}
