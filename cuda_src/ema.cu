// Updates the exponential moving averages of all parameters of a model (Polyak averaging) in one launch. A block
// updates the average of one chunk of one parameter, a thread eight elements. lt_runtime/training/ema.py does the same
// on the host.

#include "instructions.cuh"
#include "quads.cuh"

namespace lt {

// An entry of the table: a chunk of a parameter. Both addresses point to the chunk's first element.
struct EmaChunk {
  float* average;
  const void* value;
  uint32 count;
  unsigned char type;     // type of the value: kFloat32, kFloat16 or kBfloat16
  unsigned char aligned;  // whether both addresses are multiples of 16 bytes
  unsigned char reserved[2];
};

struct EmaParams {
  const EmaChunk* chunks;
  float weight;  // weight of the value; the average's weight is 1 - weight
};

}  // namespace lt

extern "C" __global__ void __launch_bounds__(256) ema(const lt::EmaParams p) {
  using namespace lt;
  // The table is constant, so it may be read before the previous kernel has ended.
  const EmaChunk chunk = p.chunks[blockIdx.x];
  wait_for_predecessor();
  const Quads at = quads_of_thread(chunk.count, chunk.aligned);
  const Bits old = load_bits(chunk.average, kFloat32, at), value = load_bits(chunk.value, chunk.type, at);
  const Octet now = unpack(value, chunk.type);
  Octet average = unpack(old, kFloat32);
  // In the form average + weight · (value - average), an average that equals its value does not change. In the form (1
  // - weight) · average + weight · value, rounding could change it.
#pragma unroll
  for (int k = 0; k < kOctet; ++k) average.v[k] += p.weight * (now.v[k] - average.v[k]);
  store_bits(chunk.average, kFloat32, at, pack(average, kFloat32));
}
