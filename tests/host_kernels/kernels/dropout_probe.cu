// Probes of the kernels' random numbers: the words of one counter, and the factors of dropout from one index on.

#include "philox.cuh"
#include "vector.cuh"

namespace {

template <bool kWhole>
__device__ lt::Octet factors_from(const lt::Dropout& d, lt::uint64 index) {
  lt::Octet ones{{1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f}};
  lt::apply_dropout<kWhole>(ones, d, lt::dropout_step(d), index);
  return ones;
}

}  // namespace

struct PhiloxProbeParams {
  const lt::Words* counters;
  const lt::uint32* keys;  // input: the key of each counter, two words
  lt::Words* words;
};

struct DropoutProbeParams {
  lt::Dropout dropout;
  const lt::uint64* indices;
  lt::Octet* factors;
};

extern "C" __global__ void philox_probe(const PhiloxProbeParams p) {
  p.words[blockIdx.x] = lt::philox4x32(p.counters[blockIdx.x], p.keys[2 * blockIdx.x], p.keys[2 * blockIdx.x + 1]);
}

extern "C" __global__ void dropout_probe(const DropoutProbeParams p) {
  p.factors[blockIdx.x] = factors_from<false>(p.dropout, p.indices[blockIdx.x]);
}

// `index` is a multiple of eight in every call.
extern "C" __global__ void whole_dropout_probe(const DropoutProbeParams p) {
  p.factors[blockIdx.x] = factors_from<true>(p.dropout, p.indices[blockIdx.x]);
}
